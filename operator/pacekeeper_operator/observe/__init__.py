"""The observed state: pods, nodes, reports of workers, and Prometheus, gathered into one Observation."""

"""What there is: pods, nodes, what workers say, what Prometheus says, gathered into one Observation."""

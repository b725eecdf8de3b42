"""The operator: the only code that calls the Kubernetes API server and Prometheus."""

"""A made-up Kubernetes: its API server, and the machines that work for it."""

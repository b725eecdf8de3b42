"""A simulated Kubernetes: its API server, controllers, scheduler, and kubelets."""

"""The sidecar, a worker's only connection to the operator: plan, heartbeats, faults, evidence; it serves /metrics."""

"""The sidecar: the worker's only voice. It polls the plan, sends heartbeats, faults and evidence, and serves /metrics."""

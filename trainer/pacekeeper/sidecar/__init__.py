"""The sidecar, a worker's only voice: it polls the plan, sends heartbeats, faults and evidence, serves /metrics."""

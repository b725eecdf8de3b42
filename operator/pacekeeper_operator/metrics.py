"""The operator's own metrics, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

INCIDENTS = Counter("pacekeeper_incidents", "Incidents opened.", ("cause", "class_", "mode"))
REMEDIES = Counter("pacekeeper_remedies", "Remedies applied.", ("remedy",))
OUTCOMES = Counter("pacekeeper_incident_outcomes", "Incidents that are over.", ("cause", "outcome"))
RECOVERY_SECONDS = Histogram(
    "pacekeeper_recovery_seconds",
    "From first sign to proven recovery.",
    ("cause",),
    buckets=(0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600),
)
RECONCILE_SECONDS = Histogram(
    "pacekeeper_reconcile_seconds",
    "Duration of one pass over a job.",
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10),
)
RECONCILE_ERRORS = Counter("pacekeeper_reconcile_errors", "Passes over a job that failed.")
STEP_FAILURES = Counter("pacekeeper_step_failures", "Steps of a pass that failed of a bug of the operator's own.")
JOBS = Gauge("pacekeeper_jobs", "Jobs by phase.", ("phase",))
PROMETHEUS_UP = Gauge("pacekeeper_prometheus_available", "Whether Prometheus answered the last time.")
PROMETHEUS_BAD_ROWS = Counter("pacekeeper_prometheus_bad_rows", "Rows of Prometheus' answers that made no sense.")
GPU_SERIES_VOUCHED = Gauge("pacekeeper_gpu_series_vouched", "Whether GPU series count as a witness against a node.")
LEADER = Gauge("pacekeeper_leader", "Whether this operator holds the Lease.")
REFUSALS = Counter("pacekeeper_refused_calls", "Calls to the endpoint for sidecars that were refused.", ("status",))
CERTIFICATE_ENDS = Gauge(
    "pacekeeper_certificate_end_seconds", "When a certificate ends, seconds since the epoch.", ("certificate",)
)

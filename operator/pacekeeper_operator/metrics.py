"""The operator's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram

from .api import FabricStatus

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
HOT_LINKS = Gauge(
    "pacekeeper_hot_links",
    "Hot places of the job's delay matrix (links, senders, receivers) when its connections were last looked at.",
    ("namespace", "trainingjob"),
)
LINK_SIDES = Gauge(
    "pacekeeper_link_side_ratio",
    "Time for a byte that a rank sends (receives) over the usual, of the slowest sides at that time.",
    ("namespace", "trainingjob", "rank", "side"),
)
FABRIC_LINK_LOAD = Gauge(
    "pacekeeper_fabric_link_load",
    "Planned load of a link of the Fabric: flows, where all are alike. Up: from the leaf to the spine.",
    ("fabric", "leaf", "spine", "direction"),
)
FABRIC_FLOWS = Gauge("pacekeeper_fabric_flows", "Flows between leaves, of all jobs.", ("fabric",))
FABRIC_MAX_LOAD = Gauge("pacekeeper_fabric_max_load", "Planned load of the fullest link.", ("fabric",))
FABRIC_BOUND = Gauge("pacekeeper_fabric_bound", "Load of the fullest link below which no plan comes.", ("fabric",))
FABRIC_DEAD_LINKS = Gauge("pacekeeper_fabric_dead_links", "Links that carry nothing.", ("fabric",))
_shown_jobs: set[tuple[str, str]] = set()
_shown_sides: dict[tuple[str, str], frozenset[tuple[str, str]]] = {}
"""(rank, side) that are shown, by namespace and job."""
_shown_series: dict[Gauge, frozenset[tuple[str, ...]]] = {}
"""Of a Fabric, by their labels."""


def show_links(namespace: str, job: str, hot: int | None, sides: Iterable[tuple[int, str, float]] = ()) -> None:
    """What a job's connections showed: a few series a job, however many ranks it has. hot: None, nothing is known."""
    now = {(str(rank), side): ratio for rank, side, ratio in sides}
    for gone in _shown_sides.pop((namespace, job), frozenset()) - now.keys():
        LINK_SIDES.remove(namespace, job, *gone)
    for place, ratio in now.items():
        LINK_SIDES.labels(namespace, job, *place).set(ratio)
    if now:
        _shown_sides[namespace, job] = frozenset(now)
    if hot is not None:
        HOT_LINKS.labels(namespace, job).set(hot)
        _shown_jobs.add((namespace, job))
    elif (namespace, job) in _shown_jobs:
        _shown_jobs.remove((namespace, job))
        HOT_LINKS.remove(namespace, job)


def show_fabric(fabric: str, status: FabricStatus | None) -> None:
    """What is said of it, or nothing any more: loads of the links that its status lists, where ways are planned."""
    status = status or FabricStatus()
    listed = () if status.max_load is None else status.links
    loads: dict[tuple[str, ...], int] = {(fabric, link.leaf, link.spine, "up"): link.up for link in listed}
    loads |= {(fabric, link.leaf, link.spine, "down"): link.down for link in listed}
    _show(FABRIC_LINK_LOAD, loads)
    figures = {
        FABRIC_FLOWS: status.flows,
        FABRIC_MAX_LOAD: status.max_load,
        FABRIC_BOUND: status.bound,
        FABRIC_DEAD_LINKS: status.dead,
    }
    for metric, value in figures.items():
        _show(metric, {} if value is None else {(fabric,): value})


def _show(metric: Gauge, series: Mapping[tuple[str, ...], int]) -> None:
    """These and no others. A scrape comes at any moment, from a thread of its own: what stays is never missing."""
    for gone in _shown_series.get(metric, frozenset()) - series.keys():
        metric.remove(*gone)
    for labels, value in series.items():
        metric.labels(*labels).set(value)
    _shown_series[metric] = frozenset(series)

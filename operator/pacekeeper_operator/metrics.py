"""The operator's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram

from .api import (
    Cause,
    Class,
    FabricStatus,
    JobStatus,
    Mode,
    NodeHistory,
    NodeHistoryStatus,
    Outcome,
    QuarantineCondition,
    QuarantineStatus,
    Remedy,
    RestartPartName,
)

_JOB = ("namespace", "trainingjob")
_STATUS_VALUES = {"True": 1, "False": 0}

INCIDENTS = Counter("pacekeeper_incidents", "Incidents opened.", ("cause", "class_", "mode"))
REMEDIES = Counter("pacekeeper_remedies", "Remedies applied.", ("remedy",))
OUTCOMES = Counter("pacekeeper_incident_outcomes", "Incidents that are over.", ("cause", "outcome"))
RECOVERY_SECONDS = Histogram(
    "pacekeeper_recovery_seconds",
    "From first sign to proven recovery.",
    ("cause",),
    buckets=(0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600),
)
RESTART_PART_SECONDS = Histogram(
    "pacekeeper_restart_part_seconds",
    "What recoveries by a new round went to; the parts add up to the recovery.",
    ("part",),
    buckets=(0.1, 0.3, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600),
)
RECONCILE_SECONDS = Histogram(
    "pacekeeper_reconcile_seconds",
    "Duration of one pass over a job.",
    buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 2, 10),
)
RECONCILE_ERRORS = Counter("pacekeeper_reconcile_errors", "Passes over a job that failed.")
STATUS_FAILURES = Counter("pacekeeper_status_failures", "Statuses of jobs that could not be written.")
STEP_FAILURES = Counter("pacekeeper_step_failures", "Steps of a pass that failed of a bug of the operator's own.")
JOBS = Gauge("pacekeeper_jobs", "Jobs by phase.", ("phase",))
WORKERS_HEARD = Gauge("pacekeeper_workers_heard", "Members of all jobs that their last pass has heard of.")
PROMETHEUS_UP = Gauge("pacekeeper_prometheus_available", "Whether Prometheus answered the last time.")
PROMETHEUS_BAD_ROWS = Counter("pacekeeper_prometheus_bad_rows", "Rows of Prometheus' answers that made no sense.")
WEBHOOK_LOST = Counter("pacekeeper_webhook_lost", "Messages about incidents that the webhook has not taken.")
GPU_SERIES_VOUCHED = Gauge("pacekeeper_gpu_series_vouched", "Whether GPU series count as a witness against a node.")
CLOCK_AHEAD_SECONDS = Gauge(
    "pacekeeper_clock_ahead_seconds", "By how much this machine's clock is ahead of the API server's."
)
PROBES_CANNOT_PASS = Gauge(
    "pacekeeper_probes_cannot_pass", "Whether probe pods failed the last time on nodes that are not suspected."
)
LEADER = Gauge("pacekeeper_leader", "Whether this operator holds the Lease.")
TASKS = Gauge("pacekeeper_tasks", "Asynchronous tasks of the operator that are not done.")
REFUSALS = Counter("pacekeeper_refused_calls", "Calls to the endpoint for sidecars that were refused.", ("status",))
CONNECTIONS = Gauge("pacekeeper_connections", "Connections to the endpoint for sidecars that are open.")
CONNECTIONS_ROOM = Gauge("pacekeeper_connections_room", "Connections that memory and open files leave room for.")
REFUSED_CONNECTIONS = Counter("pacekeeper_refused_connections", "Connections that there was no room for.")
CERTIFICATE_ENDS = Gauge(
    "pacekeeper_certificate_end_seconds", "When a certificate ends, seconds since the epoch.", ("certificate",)
)
JOB_PHASE = Gauge("pacekeeper_job_phase", "1: the phase that the job is in.", (*_JOB, "phase"))
JOB_STEP = Gauge("pacekeeper_job_step", "Last completed optimizer step.", _JOB)
JOB_SLOWDOWN = Gauge("pacekeeper_job_slowdown", "A step's time over that without stragglers.", _JOB)
JOB_GOODPUT = Gauge("pacekeeper_job_goodput", "Share of the time since the first step not lost to incidents.", _JOB)
JOB_WORKERS = Gauge("pacekeeper_job_workers", "Workers: desired and ready with ranks, spare.", (*_JOB, "state"))
JOB_RESTARTS = Gauge("pacekeeper_job_restarts", "Restarts that count against the budget, since the job began.", _JOB)
JOB_RESTARTS_LEFT = Gauge("pacekeeper_job_restarts_left", "Of the restart budget, within its window.", _JOB)
JOB_RESTARTS_ALLOWED = Gauge("pacekeeper_job_restarts_allowed", "The restart budget of a window.", _JOB)
JOB_MODE = Gauge("pacekeeper_job_mode", "1: the mode in which the ranks synchronise.", (*_JOB, "mode"))
JOB_CONDITION = Gauge(
    "pacekeeper_job_condition",
    "Conditions of the job, by their present reasons: 1 True, 0 False; missing: not known.",
    (*_JOB, "condition", "reason"),
)
NODE_QUARANTINE = Gauge(
    "pacekeeper_node_quarantine",
    "1: the phase of a NodeQuarantine, which has its node's name, and the reason of its condition Quarantined.",
    ("nodequarantine", "phase", "reason"),
)
NODE_INCIDENTS = Gauge(
    "pacekeeper_node_incidents",
    "Incidents of all jobs that a node is remembered for, within 90 days, by kind.",
    ("node", "kind"),
)
HOT_LINKS = Gauge(
    "pacekeeper_hot_links",
    "Hot places of the job's delay matrix (links, senders, receivers) when its connections were last looked at.",
    _JOB,
)
LINK_SIDES = Gauge(
    "pacekeeper_link_side_ratio",
    "Time for a byte that a rank sends (receives) over the usual, of the slowest sides at that time.",
    (*_JOB, "rank", "side"),
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
_shown: dict[tuple[Gauge, Hashable], frozenset[tuple[str, ...]]] = {}
"""Labels of what is shown, by whose they are."""


def show_job(
    namespace: str, job: str, status: JobStatus | None, left: int | None = None, allowed: int | None = None
) -> None:
    """What the job's status says, and its restart budget: some twenty series a job, however many ranks it has.
    None: not known; without a status nothing of the job is shown any more."""
    status = status or JobStatus()
    named = status.phase is not None
    workers = {"desired": status.workers.desired, "ready": status.workers.ready, "spare": status.workers.spare}
    found: Mapping[Gauge, Mapping[tuple[str, ...], float]] = {
        JOB_PHASE: {(status.phase,): 1} if status.phase is not None else {},
        JOB_MODE: {(status.sync_mode,): 1} if status.sync_mode is not None else {},
        JOB_WORKERS: {(state,): count for state, count in workers.items()} if named else {},
        JOB_CONDITION: {
            (one.type, one.reason): _STATUS_VALUES[one.status]
            for one in status.conditions
            if one.status in _STATUS_VALUES
        },
        JOB_STEP: _one(status.step),
        JOB_SLOWDOWN: _one(status.slowdown),
        JOB_GOODPUT: _one(status.goodput),
        JOB_RESTARTS: _one(status.restarts),
        JOB_RESTARTS_LEFT: _one(left),
        JOB_RESTARTS_ALLOWED: _one(allowed),
    }
    for metric, series in found.items():
        _show(metric, (namespace, job), {(namespace, job, *labels): value for labels, value in series.items()})


def show_links(namespace: str, job: str, hot: int | None, sides: Iterable[tuple[int, str, float]] = ()) -> None:
    """What a job's connections showed: a few series a job, however many ranks it has. hot: None, nothing is known."""
    _show(LINK_SIDES, (namespace, job), {(namespace, job, str(rank), side): ratio for rank, side, ratio in sides})
    _show(HOT_LINKS, (namespace, job), {} if hot is None else {(namespace, job): hot})


def show_quarantines(found: Mapping[str, QuarantineStatus]) -> None:
    """All there are, by their nodes' names. One without a phase has not been looked at yet."""
    series: dict[tuple[str, ...], float] = {}
    for name, status in found.items():
        reason = next((one.reason for one in status.conditions if one.type == QuarantineCondition.QUARANTINED), "")
        if status.phase is not None:
            series[name, status.phase, reason] = 1
    _show(NODE_QUARANTINE, None, series)


def show_node_histories(found: Iterable[NodeHistory]) -> None:
    """All there are: at most four series a node that had Incidents."""
    series: dict[tuple[str, ...], float] = {}
    for history in found:
        for count in NodeHistoryStatus.of(history.incidents).counts:
            series[history.node, count.kind] = count.count
    _show(NODE_INCIDENTS, None, series)


def show_fabric(fabric: str, status: FabricStatus | None) -> None:
    """What is said of the one in force, or nothing any more: loads of the links that its status lists, where ways are
    planned."""
    status = status or FabricStatus()
    listed = () if status.max_load is None else status.links
    loads: dict[tuple[str, ...], float] = {(fabric, link.leaf, link.spine, "up"): link.up for link in listed}
    loads |= {(fabric, link.leaf, link.spine, "down"): link.down for link in listed}
    _show(FABRIC_LINK_LOAD, None, loads)
    figures = {
        FABRIC_FLOWS: status.flows,
        FABRIC_MAX_LOAD: status.max_load,
        FABRIC_BOUND: status.bound,
        FABRIC_DEAD_LINKS: status.dead,
    }
    for metric, value in figures.items():
        _show(metric, None, {} if value is None else {(fabric,): value})


def _one(value: float | None) -> Mapping[tuple[str, ...], float]:
    return {} if value is None else {(): value}


def _show(metric: Gauge, owner: Hashable, series: Mapping[tuple[str, ...], float]) -> None:
    """Of this owner these and no others. A scrape comes at any moment, from a thread of its own: what stays is never
    missing."""
    for gone in _shown.pop((metric, owner), frozenset()) - series.keys():
        metric.remove(*gone)
    for labels, value in series.items():
        metric.labels(*labels).set(value)
    if series:
        _shown[metric, owner] = frozenset(series)


def _begin_at_nought() -> None:
    """Prometheus sees no increase in a series that begins with its first event."""
    for cause in Cause:
        RECOVERY_SECONDS.labels(cause)
        for outcome in Outcome:
            OUTCOMES.labels(cause, outcome)
        for class_ in Class:
            for mode in Mode:
                INCIDENTS.labels(cause, class_, mode)
    for remedy in Remedy:
        REMEDIES.labels(remedy)
    for part in RestartPartName:
        RESTART_PART_SECONDS.labels(part)


_begin_at_nought()

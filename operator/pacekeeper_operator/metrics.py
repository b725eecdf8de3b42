"""The operator's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram

from pacekeeper_analysis.accounting.gpu_account import Loss

from .api.conditions import QuarantineCondition
from .api.fabric import FabricStatus
from .api.incident import IncidentCause, IncidentClass, IncidentOutcome, RestartPartName
from .api.node_history import NodeHistory, NodeHistoryStatus
from .api.node_quarantine import QuarantineStatus
from .api.training_job import JobStatus, RemediationMode, Remedy
from .api.watched_job import WatchedJobStatus
from .state.straggler_estimate import FaultEstimate, StragglerEstimate

_JOB_LABELS, _WATCHED_LABELS = ("namespace", "trainingjob"), ("namespace", "watchedjob")
_STATUS_VALUES = {"True": 1, "False": 0}

INCIDENTS_OPENED = Counter("pacekeeper_incidents", "Incidents opened.", ("cause", "class_", "mode"))
REMEDIES_APPLIED = Counter("pacekeeper_remedies", "Remedies applied.", ("remedy",))
INCIDENT_OUTCOMES = Counter("pacekeeper_incident_outcomes", "Incidents that ended.", ("cause", "outcome"))
RECOVERY_SECONDS = Histogram(
    "pacekeeper_recovery_seconds",
    "From first sign to proven recovery.",
    ("cause",),
    buckets=(0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300, 600),
)
RESTART_PART_SECONDS = Histogram(
    "pacekeeper_restart_part_seconds",
    "Time of recoveries by a new round, by part; the parts add up to the recovery.",
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
STEP_FAILURES = Counter("pacekeeper_step_failures", "Steps of a pass that failed because of a bug in the operator.")
JOBS_BY_PHASE = Gauge("pacekeeper_jobs", "Jobs by phase.", ("phase",))
WORKERS_REPORTING = Gauge("pacekeeper_workers_reporting", "Members of all jobs that had reported at the last pass.")
PROMETHEUS_UP = Gauge("pacekeeper_prometheus_available", "Whether Prometheus answered the last time.")
PROMETHEUS_BAD_ROWS = Counter("pacekeeper_prometheus_bad_rows", "Invalid rows in Prometheus' answers.")
WEBHOOK_MESSAGES_LOST = Counter(
    "pacekeeper_webhook_messages_lost", "Incident messages that the webhook did not accept."
)
WATCH_INJECTED = Gauge("pacekeeper_watch_injected", "Whether the watch is injected into new pods.")
WATCH_SWITCHED_OFF = Gauge("pacekeeper_watch_switched_off", "Whether the watch has switched itself off.")
WATCH_BLOCKED_PODS = Gauge("pacekeeper_watch_blocked_pods", "Pods that containers of the watch keep from running.")
GPU_SERIES_TRUSTED = Gauge("pacekeeper_gpu_series_trusted", "Whether GPU series count as a witness against a node.")
CLOCK_AHEAD_SECONDS = Gauge(
    "pacekeeper_clock_ahead_seconds", "By how much this machine's clock is ahead of the API server's."
)
PROBES_CANNOT_PASS = Gauge(
    "pacekeeper_probes_cannot_pass", "Whether probe pods failed the last time on nodes that are not suspected."
)
LEADER = Gauge("pacekeeper_leader", "Whether this operator holds the Lease.")
TASKS = Gauge("pacekeeper_tasks", "Asynchronous tasks of the operator that are not done.")
REFUSED_CALLS = Counter(
    "pacekeeper_refused_calls", "Calls to the endpoint for sidecars that were refused.", ("status",)
)
OPEN_CONNECTIONS = Gauge("pacekeeper_connections", "Connections to the endpoint for sidecars that are open.")
CONNECTION_CAPACITY = Gauge("pacekeeper_connections_capacity", "Connections that memory and open files leave room for.")
REFUSED_CONNECTIONS = Counter("pacekeeper_refused_connections", "Connections that were refused by a limit.")
CERTIFICATE_EXPIRY = Gauge(
    "pacekeeper_certificate_expiry_timestamp_seconds",
    "When a certificate ends, seconds since the epoch.",
    ("certificate",),
)
JOB_PHASE = Gauge("pacekeeper_job_phase", "1: the phase that the job is in.", (*_JOB_LABELS, "phase"))
JOB_STEP = Gauge("pacekeeper_job_step", "Last completed optimizer step.", _JOB_LABELS)
JOB_SLOWDOWN = Gauge("pacekeeper_job_slowdown", "A step's time over that without stragglers.", _JOB_LABELS)
JOB_GOODPUT = Gauge(
    "pacekeeper_job_goodput", "Share of the time since the first step not lost to incidents.", _JOB_LABELS
)
JOB_WORKERS = Gauge("pacekeeper_job_workers", "Workers: desired and ready with ranks, spare.", (*_JOB_LABELS, "state"))
JOB_RESTARTS = Gauge(
    "pacekeeper_job_restarts", "Restarts that count against the budget, since the job began.", _JOB_LABELS
)
JOB_RESTARTS_LEFT = Gauge("pacekeeper_job_restarts_left", "Of the restart budget, within its window.", _JOB_LABELS)
JOB_RESTARTS_ALLOWED = Gauge("pacekeeper_job_restarts_allowed", "The restart budget of a window.", _JOB_LABELS)
JOB_MODE = Gauge("pacekeeper_job_mode", "1: the mode in which the ranks synchronize.", (*_JOB_LABELS, "mode"))
JOB_CONDITION = Gauge(
    "pacekeeper_job_condition",
    "Conditions of the job, by their present reasons: 1 True, 0 False; missing: not known.",
    (*_JOB_LABELS, "condition", "reason"),
)
WATCHED_PHASE = Gauge(
    "pacekeeper_watched_phase", "1: how much of a watched job is observed.", (*_WATCHED_LABELS, "phase")
)
WATCHED_SLOWDOWN = Gauge(
    "pacekeeper_watched_slowdown", "A step's time over that without what probably slows it.", _WATCHED_LABELS
)
WATCHED_GPU_SECONDS = Gauge(
    "pacekeeper_watched_gpu_seconds",
    "GPU seconds that a watched job has held, by what they were for: Useful, or what they were lost to.",
    (*_WATCHED_LABELS, "use"),
)
NODE_QUARANTINE = Gauge(
    "pacekeeper_node_quarantine",
    "1: the phase of a NodeQuarantine, which has its node's name, and the reason of its condition Quarantined.",
    ("nodequarantine", "phase", "reason"),
)
NODE_INCIDENTS = Gauge(
    "pacekeeper_node_incidents",
    "Incidents of all jobs in a node's history (90 days), by kind.",
    ("node", "kind"),
)
HOT_LINKS = Gauge(
    "pacekeeper_hot_links",
    "Hot links, senders, and receivers of the job's delay matrix when its connections were last checked.",
    _JOB_LABELS,
)
LINK_SIDES = Gauge(
    "pacekeeper_link_side_ratio",
    "Time for a byte that a rank sends (receives) over the usual, of the slowest sides at that time.",
    (*_JOB_LABELS, "rank", "side"),
)
ESTIMATED_PROBABILITY = Gauge(
    "pacekeeper_estimator_probability",
    "Probability of a fault by the estimator, which decides nothing yet.",
    (*_JOB_LABELS, "fault"),
)
ESTIMATED_SLOWDOWN = Gauge(
    "pacekeeper_estimator_slowdown", "Slowdown by the fault if there is one.", (*_JOB_LABELS, "fault")
)
ESTIMATED_ONSET = Gauge(
    "pacekeeper_estimator_onset_timestamp_seconds",
    "When the fault began if there is one, seconds since the epoch.",
    (*_JOB_LABELS, "fault"),
)
ESTIMATOR_DISAGREEMENTS = Counter(
    "pacekeeper_estimator_disagreements",
    "Passes in which only the estimator proposed a remedy, or only the rules applied one.",
    ("kind",),
)
FABRIC_LINK_LOAD = Gauge(
    "pacekeeper_fabric_link_load",
    "Planned load of a link of the Fabric: flows, where all are alike. Up: from the leaf to the spine.",
    ("fabric", "leaf", "spine", "direction"),
)
FABRIC_FLOWS = Gauge("pacekeeper_fabric_flows", "Flows between leaves, of all jobs.", ("fabric",))
FABRIC_MAX_LOAD = Gauge("pacekeeper_fabric_max_load", "Planned load of the fullest link.", ("fabric",))
FABRIC_LOWER_BOUND = Gauge(
    "pacekeeper_fabric_lower_bound", "Lower bound of the fullest link's load for any plan.", ("fabric",)
)
FABRIC_DEAD_LINKS = Gauge("pacekeeper_fabric_dead_links", "Links that carry nothing.", ("fabric",))
_published_labels: dict[tuple[Gauge, Hashable], frozenset[tuple[str, ...]]] = {}
"""Labels of the published series, by metric and owner."""

_published_faults: dict[tuple[str, str], tuple[FaultEstimate, ...]] = {}
"""What the estimator knows of each job, as it is published."""


def publish_job_metrics(
    namespace: str,
    job: str,
    status: JobStatus | None,
    restarts_left: int | None = None,
    restarts_allowed: int | None = None,
) -> None:
    """Publish the job's status and its restart budget: about 20 series per job, independent of its ranks.

    None: unknown. Without a `status`, all series of the job are removed.
    """
    status = status or JobStatus()
    has_status = status.phase is not None
    workers = {"desired": status.workers.desired, "ready": status.workers.ready, "spare": status.workers.spare}
    series_by_metric: Mapping[Gauge, Mapping[tuple[str, ...], float]] = {
        JOB_PHASE: {(status.phase,): 1} if status.phase is not None else {},
        JOB_MODE: {(status.sync_mode,): 1} if status.sync_mode is not None else {},
        JOB_WORKERS: {(state,): count for state, count in workers.items()} if has_status else {},
        JOB_CONDITION: {
            (condition.type, condition.reason): _STATUS_VALUES[condition.status]
            for condition in status.conditions
            if condition.status in _STATUS_VALUES
        },
        JOB_STEP: _build_single_series(status.step),
        JOB_SLOWDOWN: _build_single_series(status.slowdown),
        JOB_GOODPUT: _build_single_series(status.goodput),
        JOB_RESTARTS: _build_single_series(status.restarts),
        JOB_RESTARTS_LEFT: _build_single_series(restarts_left),
        JOB_RESTARTS_ALLOWED: _build_single_series(restarts_allowed),
    }
    for metric, series in series_by_metric.items():
        _publish_series(
            metric, (namespace, job), {(namespace, job, *labels): value for labels, value in series.items()}
        )


def publish_watched_metrics(namespace: str, job: str, status: WatchedJobStatus | None) -> None:
    """Publish a watched job's status: nine series. Without a `status`, all series of the job are removed."""
    status = status or WatchedJobStatus()
    uses: dict[tuple[str, ...], float] = {}
    if status.account is not None:
        total = status.account.to_account().total
        uses = {("Useful",): total.useful, **{(loss.value,): total.lost.get(loss, 0.0) for loss in Loss}}
    series_by_metric: Mapping[Gauge, Mapping[tuple[str, ...], float]] = {
        WATCHED_PHASE: {(status.phase,): 1} if status.phase is not None else {},
        WATCHED_SLOWDOWN: _build_single_series(status.slowdown),
        WATCHED_GPU_SECONDS: uses,
    }
    for metric, series in series_by_metric.items():
        found = {(namespace, job, *labels): value for labels, value in series.items()}
        _publish_series(metric, (namespace, job), found)


def publish_link_metrics(
    namespace: str, job: str, hot: int | None, sides: Iterable[tuple[int, str, float]] = ()
) -> None:
    """Publish the state of a job's connections: a few series per job, independent of its ranks.

    `hot`: number of hot links; None: unknown. `sides`: (rank, side, ratio).
    """
    _publish_series(
        LINK_SIDES, (namespace, job), {(namespace, job, str(rank), side): ratio for rank, side, ratio in sides}
    )
    _publish_series(HOT_LINKS, (namespace, job), {} if hot is None else {(namespace, job): hot})


def publish_estimate(namespace: str, job: str, estimate: StragglerEstimate | None) -> None:
    """Publish what the estimator knows of a job: three series per fault, if they have changed."""
    faults = () if estimate is None else estimate.faults
    if _published_faults.get((namespace, job), ()) == faults:
        return
    if faults:
        _published_faults[namespace, job] = faults
    else:
        del _published_faults[namespace, job]
    for gauge, name in (
        (ESTIMATED_PROBABILITY, "probability"),
        (ESTIMATED_SLOWDOWN, "slowdown"),
        (ESTIMATED_ONSET, "since"),
    ):
        series: dict[tuple[str, ...], float] = {
            (namespace, job, fault.fault.value): float(getattr(fault, name)) for fault in faults
        }
        _publish_series(gauge, (namespace, job), series)


def count_disagreements(kinds: Iterable[str]) -> None:
    """Count one pass for each kind (`shadow.list_disagreements`)."""
    for kind in kinds:
        ESTIMATOR_DISAGREEMENTS.labels(kind).inc()


def publish_quarantine_metrics(statuses: Mapping[str, QuarantineStatus]) -> None:
    """Publish all NodeQuarantines, by node name. One without a phase has not been reconciled yet."""
    series: dict[tuple[str, ...], float] = {}
    for name, status in statuses.items():
        reason = next(
            (condition.reason for condition in status.conditions if condition.type == QuarantineCondition.QUARANTINED),
            "",
        )
        if status.phase is not None:
            series[name, status.phase, reason] = 1
    _publish_series(NODE_QUARANTINE, None, series)


def publish_node_history_metrics(histories: Iterable[NodeHistory]) -> None:
    """Publish all NodeHistories: at most four series per node that had Incidents."""
    series: dict[tuple[str, ...], float] = {}
    for history in histories:
        for count in NodeHistoryStatus.from_incidents(history.incidents).counts:
            series[history.node, count.kind] = count.count
    _publish_series(NODE_INCIDENTS, None, series)


def publish_fabric_metrics(fabric: str, status: FabricStatus | None) -> None:
    """Publish the active Fabric's status, or remove its series if `status` is None.

    Link loads cover the links that the status lists, if routes are planned.
    """
    status = status or FabricStatus()
    listed = () if status.max_load is None else status.links
    loads: dict[tuple[str, ...], float] = {(fabric, link.leaf, link.spine, "up"): link.up for link in listed}
    loads |= {(fabric, link.leaf, link.spine, "down"): link.down for link in listed}
    _publish_series(FABRIC_LINK_LOAD, None, loads)
    values = {
        FABRIC_FLOWS: status.flows,
        FABRIC_MAX_LOAD: status.max_load,
        FABRIC_LOWER_BOUND: status.lower_bound,
        FABRIC_DEAD_LINKS: status.dead_links,
    }
    for metric, value in values.items():
        _publish_series(metric, None, {} if value is None else {(fabric,): value})


def _build_single_series(value: float | None) -> Mapping[tuple[str, ...], float]:
    return {} if value is None else {(): value}


def _publish_series(metric: Gauge, owner: Hashable, series: Mapping[tuple[str, ...], float]) -> None:
    """Replace the owner's series of `metric` by `series`.

    A scrape may come at any time, from another thread. A series that stays is never missing.
    """
    for stale_labels in _published_labels.pop((metric, owner), frozenset()) - series.keys():
        metric.remove(*stale_labels)
    for labels, value in series.items():
        metric.labels(*labels).set(value)
    if series:
        _published_labels[metric, owner] = frozenset(series)


def _initialize_counters() -> None:
    """Create all series with value 0: Prometheus sees no increase in a series that begins with its first event."""
    for cause in IncidentCause:
        RECOVERY_SECONDS.labels(cause)
        for outcome in IncidentOutcome:
            INCIDENT_OUTCOMES.labels(cause, outcome)
        for class_ in IncidentClass:
            for mode in RemediationMode:
                INCIDENTS_OPENED.labels(cause, class_, mode)
    for remedy in Remedy:
        REMEDIES_APPLIED.labels(remedy)
    for part in RestartPartName:
        RESTART_PART_SECONDS.labels(part)


_initialize_counters()

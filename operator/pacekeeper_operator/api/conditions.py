"""Conditions and their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobCondition(StrEnum):
    """Types of a job's conditions."""

    READY = "Ready"  # by the conventions of kstatus: exactly one of these three is True
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    RUNNING = "Running"
    DEGRADED = "Degraded"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    PATHS_IN_FORCE = "PathsInForce"  # all flows take their planned routes; only where a Fabric plans any
    PREFLIGHT = "Preflight"  # the nodes were probed before the job started; only with spec.preflight.enabled
    METRICS_AVAILABLE = "MetricsAvailable"  # False: the message names the missing metrics, and why they are missing
    ACTION_BLOCKED = "ActionBlocked"  # an action of the operator is blocked; the message names it and the reason
    INVALID_TEMPLATE = "InvalidTemplate"  # the API server rejects the pods; the message quotes it


class Reason(StrEnum):
    """Reasons of conditions and events."""

    # Running
    TRAINING = "Training"
    WAITING_FOR_PODS = "WaitingForPods"
    SCHEDULING_TIMEOUT = "SchedulingTimeout"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CANNOT_START = "ContainerCannotStart"  # a missing Secret or ConfigMap, a command that does not exist, …
    FOLDER_IN_USE = "CheckpointFolderInUse"
    # Reconciling
    REPLICAS_DIFFER = "ReplicasDiffer"
    # Stalled
    BACK_OFF = "BackOff"  # retries wait, longer each time
    # Degraded
    ALL_RANKS_SLOW = "AllRanksSlow"
    STRAGGLER = "Straggler"
    SLOW_COMMUNICATION = "SlowCommunication"
    LOCAL_SGD_ACTIVE = "LocalSGDActive"
    NON_FINITE_LOSS = "NonFiniteLoss"
    PLAN_REFUSED = "PlanRefused"
    CHECKPOINT_FAILING = "CheckpointFailing"
    WORKERS_UNREACHABLE = "WorkersUnreachable"
    FEWER_REPLICAS = "FewerReplicas"
    NO_SPARE = "NoSpareLeft"
    WORKER_CANNOT_START = "WorkerCannotStart"  # a spare, or a replacement
    QUARANTINE_BREAKER = "QuarantineBreaker"
    PAUSED = "Paused"
    HEALTHY = "Healthy"
    # Recovering
    INCIDENT_OPEN = "IncidentOpen"
    NO_INCIDENT = "NoIncident"
    # MetricsAvailable
    PROMETHEUS_AVAILABLE = "PrometheusAvailable"
    PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"
    PROMETHEUS_ACCESS_DENIED = "PrometheusAccessDenied"
    METRICS_MISSING = "MetricsMissing"
    PROMETHEUS_NOT_CONFIGURED = "PrometheusNotConfigured"
    # PathsInForce
    ALL_FLOWS_ON_ROUTE = "AllFlowsOnRoute"
    ROUTED_BY_NETWORK = "RoutedByNetwork"
    NOT_REPORTED = "NotReported"
    # Preflight
    NODES_PASSED = "NodesPassed"
    NODES_FAILED = "NodesFailed"
    PROBING = "Probing"
    INCONCLUSIVE = "Inconclusive"
    # Suspended
    SUSPENDED = "SuspendRequested"
    RESUMED = "Resumed"
    QUEUED = "Queued"
    # Complete, Failed
    RANKS_FINISHED = "RanksFinished"
    SCRIPT_FAILED = "ScriptFailed"
    NO_PROGRESS = "NoProgress"
    JOB_FAILED = "JobFailed"  # another version of the operator gave the reason
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # ActionBlocked
    POD_DENIED = "PodDenied"
    ACTION_FAILED = "ActionFailed"
    NOTHING_BLOCKED = "NothingBlocked"
    # InvalidTemplate
    POD_REFUSED = "PodRefused"
    POD_ACCEPTED = "PodAccepted"


class FabricCondition(StrEnum):
    """Types of a Fabric's conditions."""

    IN_FORCE = "InForce"  # of several Fabrics, this one is in force
    LEAVES_RESOLVED = "LeavesResolved"  # every node that has workers has labels that name its leaf
    LINKS_RESOLVED = "LinksResolved"  # the exceptions, hops, and query results match the fabric
    PLANNED = "Planned"  # all flows between leaves have a route


class FabricReason(StrEnum):
    """Reasons of a Fabric's conditions."""

    # InForce
    OLDEST = "Oldest"
    ANOTHER_IS_OLDER = "AnotherIsOlder"
    UNREADABLE = "Unreadable"
    # LeavesResolved
    LABELED = "Labeled"
    NODES_UNLABELED = "NodesUnlabeled"
    NO_LEAVES = "NoLeaves"
    TOO_MANY_LEAVES = "TooManyLeaves"
    # LinksResolved
    LINKS_CONSISTENT = "LinksConsistent"
    UNKNOWN_LINKS = "UnknownLinks"
    UNKNOWN_SPINES = "UnknownSpines"
    QUERY_FAILED = "QueryFailed"
    # Planned
    AT_LOWER_BOUND = "AtLowerBound"
    ABOVE_LOWER_BOUND = "AboveLowerBound"
    NO_FLOWS = "NoFlows"
    PLANNING = "Planning"
    NO_ROUTE = "NoRoute"
    NOT_PLANNED = "NotPlanned"
    PATH_CONTROL_OFF = "PathControlOff"
    PATHS_UNKNOWN = "PathsUnknown"


class QuarantineCondition(StrEnum):
    """Types of a NodeQuarantine's conditions."""

    WITNESSED = "Witnessed"  # the reason names the witness; Unknown: the last probe gave no result
    QUARANTINED = "Quarantined"  # the node is tainted and cordoned; the reason is a QuarantineVerdict


CONDITION_TIMES = ("last_transition_time",)
"""Fields of a condition that are times."""


@dataclass(frozen=True)
class ConditionStatus:
    """A metav1.Condition; lists of them are keyed by `type`."""

    type: str
    status: str  # True | False | Unknown
    reason: str
    message: str = ""
    last_transition_time: float | None = None
    observed_generation: int = 0

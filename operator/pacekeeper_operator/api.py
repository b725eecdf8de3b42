"""The custom resources as the operator sees them: names, words, and frozen dataclasses with the CRDs' defaults.

`JobSpec.parse(body["spec"])` reads what the API server has validated against crds/; the checks here are those that a
duration or a number needs to become a value. Unknown fields are left out, so that operator and CRD may differ by a
version. Durations are seconds, points in time are seconds since the epoch; on the wire they are `1h30m` and RFC 3339.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.fabric.view import FabricLink as FabricLink
from pacekeeper_analysis.fabric.view import LinkState as LinkState
from pacekeeper_analysis.plan import SourceNaming, SyncMode
from pacekeeper_analysis.reading import MaxLength, Within, abbreviate_value

from .codec import Converters, from_json, to_json, to_patch

Object = dict[str, Any]
"""One as on the wire."""

GROUP = "pacekeeper.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

LABEL_JOB = f"{GROUP}/job"
"""On pods, plans and incidents: the job's name."""
LABEL_WORKER = f"{GROUP}/worker"
"""On pods: the worker's ordinal."""
LABEL_PROBE = f"{GROUP}/probe"
"""On probe pods: the node's UID."""
LABEL_PROBE_GROUP = f"{GROUP}/circle"
"""On probe pods: what those have in common that are looked after together."""
LABEL_NO_QUARANTINE = f"{GROUP}/no-quarantine"
"""On nodes, with any value: the platform team's opt-out."""
ANNOTATION_AVOIDED_NODES = f"{GROUP}/avoids"
"""Of a worker's pod: names of the nodes that it was kept off when it was made."""
ANNOTATION_PROFILE = f"{GROUP}/profile"
"""On jobs: another value asks for a behaviour window at once."""
ANNOTATION_RETAIN_UNTIL = f"{GROUP}/retain-until"
"""On incidents, RFC 3339: deleted afterwards. Remove the annotation to keep the incident."""
DROPPED_TEMPLATE_KEY = f"{GROUP}/unread"
"""Key of what stands for a template that is too large to be kept: why, with the remedy."""
PAUSE_CONFIG_MAP = "pacekeeper-pause"
"""ConfigMap of the operator's namespace: while it exists, no remedy is applied. Its key `reason` says why."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_PRIORITY = "kueue.x-k8s.io/priority-class"
"""On jobs: the WorkloadPriorityClass by which they stand in their queue."""
LABEL_PREBUILT = "kueue.x-k8s.io/prebuilt-workload-name"
"""On a copy that MultiKueue has made of a job of another cluster: its Workload, which comes from there, too."""
DEFAULT_MANAGER = f"{GROUP}/operator"
"""Who runs a job whose `managedBy` names nobody else."""
TAINT_QUARANTINE = f"{GROUP}/quarantine"
"""Key of the taint (effect NoSchedule) of a quarantined node."""
FINALIZER_JOB = f"{GROUP}/job"
FINALIZER_QUARANTINE = f"{GROUP}/release-node"
FIELD_MANAGER_FABRIC = "pacekeeper-fabric"
"""Owner of the status of Fabrics (server-side apply)."""
FIELD_MANAGER_CONDITION = "pacekeeper-condition"
"""Owner of the condition of a quarantined node (server-side apply)."""
FIELD_MANAGER_CORDON = "pacekeeper-quarantine"
"""Owner of taint and cordon (server-side apply): giving up the ownership leaves a cordon that somebody else owns."""

TRAINER_CONTAINER = "trainer"
"""The container of the template that runs `pacekeeper run`."""
SIDECAR_CONTAINER = "pacekeeper-sidecar"
MAX_JOB_NAME = 40
MAX_PROFILE_REQUEST_CHARACTERS = 64
"""Characters of the annotation that are looked at."""
MAX_NODE_INCIDENTS = 64
"""Of a NodeHistory: the newest are kept."""
MAX_EVIDENCE_ITEMS = 64
MAX_EVIDENCE_CHARACTERS = 8192
TOKEN_AUDIENCE = "pacekeeper"
METRICS_PORT = 9464
"""Of a sidecar with a network of its own; `manifests.metrics_port` says that of any worker."""
METRICS_PORT_NAME = "pk-metrics"


class Remedy(StrEnum):
    """What can be done about a fault; the CRD's `remediation.allow` takes any of them."""

    RESTART_RANKS = "RestartRanks"
    REPLACE_WORKER = "ReplaceWorker"
    REBALANCE = "Rebalance"
    LOCAL_SGD = "LocalSGD"
    PLAN_GARBAGE = "PlanGarbage"
    BALANCE_LENGTHS = "BalanceLengths"
    QUARANTINE_NODE = "QuarantineNode"
    PLAN_TRAFFIC = "PlanTraffic"


class RemediationMode(StrEnum):
    """Whether remedies are applied, or only decided and written down."""

    ACT = "Act"
    RECOMMEND = "Recommend"


class RequestedSyncMode(StrEnum):
    """How the ranks shall keep their parameters alike: a mode of `SyncMode`, or the operator's choice."""

    AUTO = "Auto"
    SYNC = SyncMode.SYNC
    EDIT = SyncMode.EDIT
    ASYNC_EDIT = SyncMode.ASYNC_EDIT


class CleanPodPolicy(StrEnum):
    """Which pods go once the job is Complete or Failed."""

    RUNNING = "Running"  # those that still run; ended ones stay for their logs
    ALL = "All"
    NONE = "None"


class JobPhase(StrEnum):
    """The job in one word, for people; programs read the conditions."""

    PENDING = "Pending"  # not all workers are placed
    STARTING = "Starting"  # placed, before the first step of the first round
    RUNNING = "Running"
    RECOVERING = "Recovering"  # an incident is open and its remedy under way
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class JobCondition(StrEnum):
    """Types of a job's conditions."""

    READY = "Ready"  # for tools, by kstatus' conventions: exactly one of these three is True
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    RUNNING = "Running"
    DEGRADED = "Degraded"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    PATHS_IN_FORCE = "PathsInForce"  # its flows go the ways that are planned for them; only where a Fabric plans any
    PREFLIGHT = "Preflight"  # the nodes were looked at before the job began; only where spec.preflight wants it
    METRICS_AVAILABLE = "MetricsAvailable"  # False: the message says what cannot be seen, and why
    HINDERED = "Hindered"  # something that the operator wants cannot be done; the message says what and why
    INVALID_TEMPLATE = "InvalidTemplate"  # the API server refuses the pods; the message holds its words


class Reason(StrEnum):
    """Reasons of conditions and events."""

    # Running
    TRAINING = "Training"
    WAITING_FOR_PODS = "WaitingForPods"
    SCHEDULING_TIMEOUT = "SchedulingTimeout"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CANNOT_START = "ContainerCannotStart"  # a missing Secret or ConfigMap, a command that is not there, …
    FOLDER_IN_USE = "CheckpointFolderInUse"
    # Reconciling
    OTHER_REPLICAS = "ReplicasDiffer"
    # Stalled
    BACK_OFF = "BackOff"  # the next try waits, longer each time
    # Degraded
    ALL_SLOW = "AllRanksSlowAlike"
    STRAGGLER = "Straggler"
    SLOW_COMMUNICATION = "SlowCommunication"
    LOCAL_SGD = "TrainsInLocalSGD"
    NON_FINITE_LOSS = "NonFiniteLoss"
    PLAN_REFUSED = "PlanRefused"
    CHECKPOINT_FAILING = "CheckpointFailing"
    WORKERS_UNREACHED = "WorkersUnreached"
    FEWER_REPLICAS = "FewerReplicas"
    NO_SPARE = "NoSpareLeft"
    WORKER_CANNOT_START = "WorkerCannotStart"  # a spare, or a successor
    QUARANTINE_BREAKER = "QuarantineBreaker"
    PAUSED = "Paused"
    HEALTHY = "Healthy"
    # Recovering
    INCIDENT = "IncidentOpen"
    NO_INCIDENT = "NoIncident"
    # MetricsAvailable
    METRICS_ANSWERED = "PrometheusAnswers"
    METRICS_AWAY = "PrometheusAway"
    METRICS_REFUSED = "PrometheusRefuses"
    FIGURES_MISSING = "FiguresMissing"
    METRICS_NOT_CONFIGURED = "PrometheusNotConfigured"
    # PathsInForce
    ALL_ON_THEIR_WAY = "AllOnTheirWay"
    LEFT_TO_THE_NETWORK = "LeftToTheNetwork"
    NOT_TOLD = "NotTold"
    # Preflight
    NODES_PASSED = "NodesPassed"
    NODES_FAILED = "NodesFailed"
    PROBING = "Probing"
    NOT_FOUND_OUT = "NotFoundOut"
    # Suspended
    SUSPENDED = "SuspendRequested"
    RESUMED = "Resumed"
    QUEUED = "Queued"
    # Complete, Failed
    TRAINED = "RanksFinished"
    SCRIPT_FAILED = "ScriptFailed"
    NO_PROGRESS = "NoProgress"
    JOB_FAILED = "JobFailed"  # by the word of another version of the operator
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # Hindered
    POD_DENIED = "PodDenied"
    NOT_DONE = "NotDone"
    ALL_DONE = "AllDone"
    # InvalidTemplate
    REFUSED = "PodRefused"
    ACCEPTED = "PodAccepted"


class IncidentCause(StrEnum):
    """What an incident is about; part of its name."""

    CRASH = "crash"  # a rank ended
    HANG = "hang"
    ROUND_FAILED = "round-failed"  # the launchers could not start one
    OUT_OF_MEMORY = "out-of-memory"
    WORKER_LOST = "worker-lost"
    WORKER_FROZEN = "worker-frozen"  # it is there, but its launcher stands still, or its ranks cannot be killed
    NODE_LOST = "node-lost"
    GPU_ERROR = "gpu-error"
    GPU_WARNING = "gpu-warning"  # it works, but a fault is to be expected
    NODE_LEAVING = "node-leaving"  # its platform wants the node empty
    STRAGGLER = "straggler"
    SLOW_COMMUNICATION = "slow-communication"
    VOLATILE = "volatile"  # slow ranks come and go
    GARBAGE = "garbage-collection"  # of different ranks in different steps
    UNEVEN_LENGTHS = "uneven-lengths"  # of sequences, dealt unevenly
    SLOW_STEPS = "slow-steps"  # on all ranks alike, or as somebody had them looked into by hand


class IncidentClass(StrEnum):
    """Whose fault it is."""

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    DISRUPTION = "Disruption"  # somebody wanted it: drain, eviction, preemption, deletion
    PERFORMANCE = "Performance"
    UNKNOWN = "Unknown"


class IncidentOutcome(StrEnum):
    """What became of an incident, measured after the fact."""

    RECOVERED = "Recovered"  # training goes on as before
    MITIGATED = "Mitigated"  # better than before the remedy, not as good as before the fault
    NOT_HELPED = "NotHelped"
    RECOMMENDED = "Recommended"  # mode Recommend: nothing was done
    FAILED = "Failed"  # the job failed of it
    SUPERSEDED = "Superseded"  # overtaken by another round, or by the job's suspension, completion or deletion


class QuarantinePhase(StrEnum):
    SUSPECTED = "Suspected"  # a job blames the node, which is untouched until a witness has spoken
    HELD = "Held"  # a witness has spoken, but breaker, budget or pause keep the node untouched
    CLEARED = "Cleared"  # a probe pod has passed: the node is untouched, and is not probed again for a while
    PENDING = "Pending"  # waits for approval
    ACTIVE = "Active"  # tainted and cordoned
    PROBING = "Probing"  # a probe pod decides whether it is released
    RELEASED = "Released"


class Witness(StrEnum):
    """Who says that a node is bad."""

    NONE = "None"  # a job, by what its workers say: nobody whom the platform trusts
    NODE_CONDITION = "NodeCondition"  # the node is not Ready, or has a condition that the platform names
    GPU_SERIES = "GpuSeries"  # DCGM, from targets that the platform vouches for
    PROBE = "Probe"  # a pod of the operator's own on the node
    PERSON = "Person"  # whoever has made or approved the NodeQuarantine


class QuarantineVerdict(StrEnum):
    """What has become of a node that a job blames; the reason of its condition `Quarantined`."""

    QUARANTINED = "Quarantined"
    AWAITS_APPROVAL = "AwaitsApproval"
    SUSPECTED = "Suspected"  # no witness has spoken yet
    CLEARED = "Cleared"  # a probe pod has passed, or nobody has confirmed it in time
    BREAKER = "Breaker"
    BUDGET_SPENT = "BudgetSpent"
    PAUSED = "Paused"
    OPTED_OUT = "OptedOut"
    UNKNOWN_NODE = "UnknownNode"
    RELEASING = "Releasing"  # an earlier quarantine of this node is just ending

    @property
    def is_final(self) -> bool:
        """Nothing more will come of this suspicion."""
        return self not in (
            QuarantineVerdict.SUSPECTED,
            QuarantineVerdict.AWAITS_APPROVAL,
            QuarantineVerdict.BREAKER,
            QuarantineVerdict.BUDGET_SPENT,
            QuarantineVerdict.PAUSED,
            QuarantineVerdict.RELEASING,
        )


class InconclusiveReason(StrEnum):
    """Why a probe has said nothing about its node."""

    SLOW = "Slow"  # beside other nodes, which is to be confirmed: it may have been its neighbours for a moment
    IMAGE = "Image"  # it cannot be pulled, which may be the registry's fault, or the installation's
    NOT_RUN = "NotRun"  # the pod could not be made, had no room on the node, or was ended by somebody
    OVERTAKEN = "Overtaken"  # another witness has spoken meanwhile
    SHARED = "Shared"  # a probe pod on another node failed in the same check: it is the installation's fault
    ALONE = "Alone"  # no probe pod on another node has passed the check in which it failed


class NodeIncidentKind(StrEnum):
    """Kinds of Incidents that a NodeHistory counts."""

    LOST = "Lost"
    HUNG = "Hung"
    SLOW = "Slow"
    GPU_ERROR = "GpuError"


class PathControl(StrEnum):
    """How flows are brought onto the ways that are planned for them."""

    OFF = "Off"  # not at all: ranks are ordered, no more
    PROBE = "Probe"  # by ports whose ways probes have found
    REROLL = "Reroll"  # by other ports for slow pairs, kept where they are better


class FabricCondition(StrEnum):
    """Types of a Fabric's conditions."""

    IN_FORCE = "InForce"  # of several, it is the one that counts
    LEAVES_KNOWN = "LeavesKnown"  # every node that has workers says in which leaf it is
    LINKS_KNOWN = "LinksKnown"  # what is said of links fits
    PLANNED = "Planned"  # all flows between leaves have a way


class FabricReason(StrEnum):
    """Reasons of a Fabric's conditions."""

    # InForce
    OLDEST = "Oldest"
    ANOTHER_IS_OLDER = "AnotherIsOlder"
    UNREADABLE = "Unreadable"
    # LeavesKnown
    LABELLED = "Labelled"
    NODES_UNLABELLED = "NodesUnlabelled"
    NO_LEAVES = "NoLeaves"
    TOO_MANY_LEAVES = "TooManyLeaves"
    # LinksKnown
    FITS = "Fits"
    UNKNOWN_LINKS = "UnknownLinks"
    UNKNOWN_SPINES = "UnknownSpines"
    QUERY_FAILED = "QueryFailed"
    # Planned
    AT_THE_BOUND = "AtTheBound"
    ABOVE_THE_BOUND = "AboveTheBound"
    NO_FLOWS = "NoFlows"
    PLANNING = "Planning"
    NO_WAY = "NoWay"
    NOT_PLANNED = "NotPlanned"
    PATH_CONTROL_OFF = "PathControlOff"
    PATHS_UNKNOWN = "PathsUnknown"


class QuarantineCondition(StrEnum):
    """Types of a NodeQuarantine's conditions."""

    WITNESSED = "Witnessed"  # the reason says by whom; Unknown: the last probe has said nothing
    QUARANTINED = "Quarantined"  # the node is tainted and cordoned; the reason is a Verdict


@dataclass(frozen=True)
class CheckpointSpec:
    path: str = "/checkpoints"
    every_steps: int = 100
    keep: int = 3
    volume_claim_name: str = ""  # "": the user mounts a volume at `path` himself, or none outlives the pod
    sub_path: str | None = None  # folder of the claim; "": the claim itself; None: as `manifests.checkpoint_sub_path`
    adopt: str = ""  # another job, whose checkpoints this one takes over
    read_only: bool = False  # the job reads checkpoints, and writes none


@dataclass(frozen=True)
class ProfileSpec:
    sources: SourceNaming = SourceNaming.HASH  # how behaviour windows name the job's own files


@dataclass(frozen=True)
class DetectionSpec:
    straggler_slowdown: float = 1.1
    window_steps: int = 32
    hang_seconds: float | None = None  # None: auto, from the job's own steps
    profile: ProfileSpec = field(default_factory=ProfileSpec)


@dataclass(frozen=True)
class ExitCodesSpec:
    """What the script's own exit codes ask for. Each from 1 to 255."""

    do_not_retry: tuple[int, ...] = ()
    replace_node: tuple[int, ...] = ()


@dataclass(frozen=True)
class RemediationSpec:
    mode: RemediationMode = RemediationMode.ACT
    allow: tuple[Remedy, ...] = tuple(Remedy)
    max_restarts: int = 10  # within `restart_window`; disruptions and suspend never count
    restart_window: float = 3600.0  # seconds
    max_rounds_without_progress: int = 3  # that may end at the same step; 0: without limit
    exit_codes: ExitCodesSpec = field(default_factory=ExitCodesSpec)


@dataclass(frozen=True)
class RunPolicySpec:
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING


@dataclass(frozen=True)
class PreflightSpec:
    """Whether probe pods look at the nodes before ranks start on them. Seconds."""

    enabled: bool = False
    timeout: float = 300.0  # what has not been found out by then holds nothing up
    valid_for: float = 86400.0  # a node that was looked at more recently is not looked at again


@dataclass(frozen=True)
class JobSpec:
    """What the user wants of a job."""

    template: Mapping[str, Any]  # PodTemplateSpec, as the user wrote it
    replicas: int = 1
    min_replicas: int | None = None  # None: never fewer than `replicas`
    spares: int = 0
    nproc_per_node: int = 1
    suspend: bool = False
    sync_mode: RequestedSyncMode = RequestedSyncMode.AUTO
    scheduling_timeout: float = 300.0  # seconds
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    detection: DetectionSpec = field(default_factory=DetectionSpec)
    remediation: RemediationSpec = field(default_factory=RemediationSpec)
    run_policy: RunPolicySpec = field(default_factory=RunPolicySpec)
    preflight: PreflightSpec = field(default_factory=PreflightSpec)
    managed_by: str = DEFAULT_MANAGER

    @property
    def effective_min_replicas(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        if "template" not in spec:
            raise InputError("spec.template: is missing; give a pod template with a container `trainer`")
        return from_json(cls, spec, "spec", _SPEC_CONVERTERS)


@dataclass(frozen=True)
class TrainingJob:
    """A TrainingJob: who it is, and what its user wants."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec
    created_at: float = 0.0
    deleted: bool = False  # deletion was asked for
    profile_wanted: str = ""  # value of its annotation: another one asks for a behaviour window
    queue: str = ""  # that has to admit it; "": none
    priority_class: str = ""  # among those who wait for a queue; "": that of its pods
    prebuilt: str = ""  # name of its Workload where another cluster has sent both; "": it is made here
    queued: str = ""  # why its queue holds it, which is as if it were suspended; "": it does not

    @property
    def selector(self) -> str:
        """Label selector of its pods; also `status.selector`, for the scale subresource."""
        return f"{LABEL_JOB}={self.name}"

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """`body`: the whole object. Raises InputError that names the field."""
        return cls._from_metadata(body["metadata"], JobSpec.parse(body["spec"]))

    @classmethod
    def parse_identity(cls, body: Mapping[str, Any]) -> Self:
        """The same without what its user wants: who it is can always be read."""
        return cls._from_metadata(body["metadata"], JobSpec(template={}))

    @classmethod
    def _from_metadata(cls, metadata: Mapping[str, Any], spec: JobSpec) -> Self:
        labels = metadata.get("labels") or {}
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            spec=spec,
            created_at=parse_time(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0,
            deleted="deletionTimestamp" in metadata,
            queue=str(labels.get(LABEL_QUEUE, "")),
            priority_class=str(labels.get(LABEL_PRIORITY, "")),
            prebuilt=str(labels.get(LABEL_PREBUILT, "")),
            profile_wanted=str((metadata.get("annotations") or {}).get(ANNOTATION_PROFILE, ""))[:MAX_PROFILE_REQUEST_CHARACTERS],
        )


@dataclass(frozen=True)
class WorkerCounts:
    """Of `status.workers`. `ready` counts those whose ranks run, out of `desired`; spares are counted apart."""

    desired: int = 0
    ready: int = 0
    spare: int = 0
    summary: str = ""  # the column WORKERS

    @classmethod
    def from_counts(cls, desired: int, ready: int, spare: int) -> Self:
        return cls(desired, ready, spare, f"{ready}/{desired}" + (f"+{spare}" if spare else ""))


@dataclass(frozen=True)
class LeafCrossings:
    """How often the ring of a job's ranks leaves a leaf of the network."""

    now: int
    best: int  # of any order of these workers


@dataclass(frozen=True)
class ConditionStatus:
    """A metav1.Condition; lists of them are keyed by `type`."""

    type: str
    status: str  # True | False | Unknown
    reason: str
    message: str = ""
    last_transition_time: float = 0.0
    observed_generation: int = 0


@dataclass(frozen=True)
class JobStatus:
    """What the operator says of a job. `to_patch` is for a merge patch: what is None is removed."""

    phase: JobPhase | None = None
    reason: str | None = None
    message: str | None = None
    observed_generation: int | None = None
    conditions: tuple[ConditionStatus, ...] = ()
    start_time: float | None = None
    completion_time: float | None = None
    round: int | None = None
    step: int | None = None
    last_checkpoint_step: int | None = None
    checkpoint_sub_path: str | None = None  # folder of its claim; None: the claim itself, as of older operators
    total_steps: int | None = None  # that the script wants; None: it does not say
    progress: str | None = None  # 24%
    remaining: str | None = None  # a duration, rounded; None: not to be said
    workers: WorkerCounts = field(default_factory=WorkerCounts)
    selector: str | None = None
    slowdown: float | None = None
    goodput: float | None = None  # 0 … 1
    sync_mode: SyncMode | None = None
    restarts: int | None = None
    bottleneck: str | None = None
    leaf_crossings: LeafCrossings | None = None  # None: nobody says where its nodes are

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", _TIME_PARSERS)

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, {**_TIME_FORMATTERS, "slowdown": round_for_json, "goodput": round_for_json})


@dataclass(frozen=True)
class ObjectRef:
    name: str
    namespace: str
    uid: str | None = None


@dataclass(frozen=True)
class RemedyPrice:
    """One remedy that was considered, with what it would win and cost (seconds of training)."""

    name: str
    gain_seconds: float | None = None  # None: the job stands still, every remedy wins all
    cost_seconds: float | None = None
    chosen: bool = False
    reason: str = ""


@dataclass(frozen=True)
class IncidentSpec:
    """What happened, where and to whom; written once."""

    job_ref: ObjectRef
    cause: IncidentCause
    class_: IncidentClass = IncidentClass.UNKNOWN
    round: int = 0
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    message: str = ""  # one sentence for people
    evidence: tuple[str, ...] = ()

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        return from_json(cls, spec, "spec", {})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"evidence": _shorten_evidence})


class RestartPartName(StrEnum):
    """What the time of a recovery by a new round goes to, in this order."""

    TEARDOWN = "Teardown"  # until the ranks of the round before are gone
    WAIT = "Wait"  # to notice, to decide, and for everybody who is to take part
    PROCESS = "Process"  # start, imports, the device
    COMMUNICATORS = "Communicators"
    SCRIPT = "Script"  # its own: model, optimizer, data
    LOAD = "Load"  # of the state
    FIRST_STEP = "FirstStep"


@dataclass(frozen=True)
class RestartPart:
    name: RestartPartName
    seconds: float
    rank: int | None = None  # that all waited for; None: no single one


@dataclass(frozen=True)
class Restart:
    """The parts of a recovery, which add up to it."""

    parts: tuple[RestartPart, ...] = ()
    restored_from: str | None = None  # Memory, Neighbour, Checkpoint, or Nothing, where the farthest rank's state was
    longest: str | None = None  # the longest part and its rank, for people


@dataclass(frozen=True)
class IncidentStatus:
    """How the incident goes on. Times are seconds since the epoch; durations count from `first_sign`."""

    mode: RemediationMode | None = None
    remedy: str | None = None  # the chosen one
    considered: tuple[RemedyPrice, ...] = ()
    first_sign: float | None = None
    detected: float | None = None
    decided: float | None = None
    applied: float | None = None
    recovered: float | None = None
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    steps_lost: int | None = None
    restart: Restart | None = None  # None: no new round, or nobody tells of it
    slowdown_before: float | None = None
    slowdown_after: float | None = None
    predicted_gain: float | None = None  # seconds of training
    measured_gain: float | None = None
    diagnosis: Finding | None = None
    outcome: IncidentOutcome | None = None
    message: str | None = None

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", _TIME_PARSERS)

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, {**_TIME_FORMATTERS, **dict.fromkeys(_ROUNDED_INCIDENT_FIELDS, round_for_json)})


@dataclass(frozen=True)
class NodeSuspicion:
    """What one namespace's jobs say against a node, last; or the platform itself, in the operator's own namespace."""

    namespace: str
    incident: str  # "": no job's, but the platform's own
    reason: str
    at: float
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to look at the node: it takes a second namespace's
    since: float | None = None  # when the namespace said it first; None: at `at`

    @property
    def first_reported_at(self) -> float:
        """When the namespace said it first, seconds since the epoch."""
        return self.at if self.since is None else self.since

    @property
    def is_from_platform(self) -> bool:
        return not self.incident


@dataclass(frozen=True)
class QuarantineSpec:
    """A NodeQuarantine is named after its node."""

    reason: str
    node_uid: str | None = None  # a node of the same name and another UID is not the one that was meant
    incident_ref: ObjectRef | None = None
    expires_after: float = 3600.0  # seconds, from cordonedAt
    approved: bool = False
    signs: tuple[NodeSuspicion, ...] = ()  # (): somebody has made it by hand, and needs no witness

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        return from_json(cls, spec, "spec", {"expires_after": parse_duration, "at": parse_time, "since": parse_time})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"expires_after": format_duration, "at": format_time, "since": format_time})


_Seconds = Annotated[float, Within(0.0, 1e6)]
_Rate = Annotated[float, Within(0.0, 1e15)]
_Share = Annotated[float, Within(0.0, 1.0)]


@dataclass(frozen=True)
class ProbeLink:
    """The way from one probe pod to another, as the first has measured it."""

    peer: Annotated[str, MaxLength(253)]  # its node
    up: _Rate  # bytes a second
    down: _Rate
    ping: _Seconds  # there and back, the median


@dataclass(frozen=True)
class ProbeMetrics:
    """What a probe pod has measured of its node. Others say whether that is slow: `decide.node_figures`."""

    core_seconds: _Seconds  # processor time of a fixed piece of work, the median of the cores
    slowest_core_seconds: _Seconds = 0.0
    cores: Annotated[int, Within(0, 4096)] = 0  # that were timed
    held_back: _Share = 0.0  # of the time the work could not run, and not for its neighbours' work
    idle_cores: Annotated[float, Within(0.0, 1e5)] = 0.0  # meanwhile
    throttled: _Share = 0.0  # of the time a quota stood against the pod
    pressure: _Share = 0.0  # of the last ten seconds something on the node waited for a core
    frequency: Annotated[float, Within(0.0, 10.0)] = 0.0  # of the first core over its highest; 0: not known
    memory_bytes_per_second: _Rate = 0.0
    links: Annotated[tuple[ProbeLink, ...], MaxLength(8)] = ()

    def to_json(self) -> dict[str, Any]:
        return to_json(self, _PROBE_METRIC_FORMATTERS)


@dataclass(frozen=True)
class ProbeResult:
    """One look at a node by a pod that was pinned to it."""

    pod: str
    started: float
    finished: float | None = None
    passed: bool | None = None  # None: it still runs, or has said nothing about the node
    message: str = ""
    inconclusive: InconclusiveReason | None = None
    figures: ProbeMetrics | None = None


@dataclass(frozen=True)
class QuarantineStatus:
    phase: QuarantinePhase | None = None
    message: str | None = None
    conditions: tuple[ConditionStatus, ...] = ()
    node_uid: str | None = None  # of the node that is meant, where spec.nodeUID does not say
    cordoned_at: float | None = None
    previously_cordoned: bool | None = None  # somebody else's cordon was there before ours, and stays
    probes: tuple[ProbeResult, ...] = ()  # the last few

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", _TIME_PARSERS)

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, {**_TIME_FORMATTERS, **_PROBE_METRIC_FORMATTERS})


@dataclass(frozen=True)
class NodeProbe:
    """What the last look at a node before a job's start has come to. Named after its node; goes with it."""

    node_uid: str
    at: float  # seconds since the epoch
    passed: bool | None = None  # None: it could not be found out
    message: str = ""
    figures: ProbeMetrics | None = None
    gpus_left_alone: bool = False  # its free GPUs were not looked at

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return from_json(cls, spec, "spec", {"at": parse_time})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"at": format_time, **_PROBE_METRIC_FORMATTERS})


@dataclass(frozen=True)
class NodeIncident:
    """An Incident of some job that its node is remembered for."""

    namespace: str
    name: str
    kind: NodeIncidentKind
    at: float  # when it was detected, seconds since the epoch
    left_with_node: bool | None = None  # None: its worker was not moved, or what came of it is not known


@dataclass(frozen=True)
class NodeIncidentCount:
    """How many Incidents of one kind a node has had. Times are seconds since the epoch."""

    kind: NodeIncidentKind
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class NodeHistoryStatus:
    """`incidents`: the newest first. `counts`: the same by kind, for people."""

    incidents: tuple[NodeIncident, ...] = ()
    counts: tuple[NodeIncidentCount, ...] = ()

    @classmethod
    def from_incidents(cls, incidents: tuple[NodeIncident, ...]) -> Self:
        """With their counts."""
        times = {kind: [one.at for one in incidents if one.kind is kind] for kind in NodeIncidentKind}
        counts = (NodeIncidentCount(kind, len(at), min(at), max(at)) for kind, at in times.items() if at)
        return cls(incidents, tuple(counts))

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return from_json(cls, status, "status", _HISTORY_TIME_PARSERS)

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, _HISTORY_TIME_FORMATTERS)


@dataclass(frozen=True)
class NodeHistory:
    """What a node is remembered for. Named after its node; goes with it."""

    node: str
    node_uid: str
    incidents: tuple[NodeIncident, ...] = ()  # the newest first
    uid: str = ""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """`body`: the whole object. Never raises: an entry that cannot be read (another version has written it, say)
        is left out, and the others count."""
        metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        written = status.get("incidents")
        found = tuple(_parse_node_incidents(written if isinstance(written, list) else ()))
        return cls(metadata["name"], str(spec.get("nodeUID", "")), found, metadata.get("uid", ""))


def _parse_node_incidents(items: Iterable[Any]) -> Iterator[NodeIncident]:
    for item in items:
        with suppress(InputError):
            yield from_json(NodeIncident, item if isinstance(item, Mapping) else {}, "status.incidents", _HISTORY_TIME_PARSERS)


@dataclass(frozen=True)
class LevelSpec:
    node_label: str


@dataclass(frozen=True)
class UplinkSpec:
    """From each leaf to each spine, and back."""

    capacity: float = 400e9  # bits a second of one cable
    parallel: int = 1  # so many cables side by side


@dataclass(frozen=True)
class LinkException:
    """A link that is not as the others."""

    leaf: str
    spine: str
    state: LinkState = LinkState.DOWN
    capacity: float = 0.0  # bits a second, where it is slow


@dataclass(frozen=True)
class PathControlSpec:
    mode: PathControl = PathControl.OFF
    ports: tuple[int, int] = (20000, 29999)  # the first and the last


@dataclass(frozen=True)
class FabricSpec:
    """The network between the nodes."""

    spines: int  # of each plane
    planes: int = 1
    levels: tuple[LevelSpec, ...] = ()  # from the leaf outward
    uplink: UplinkSpec = field(default_factory=UplinkSpec)
    exceptions: tuple[LinkException, ...] = ()
    link_query: str = ""  # PromQL
    hops: Mapping[str, str] = field(default_factory=dict)  # address → spine
    path_control: PathControlSpec = field(default_factory=PathControlSpec)

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        if "spines" not in spec:
            raise InputError("spec.spines: is missing; give the number of spines of each plane")
        return from_json(cls, spec, "spec", {"capacity": parse_rate, "ports": parse_ports, "hops": dict})


@dataclass(frozen=True)
class FabricStatus:
    observed_generation: int | None = None
    leaves: int | None = None
    flows: int | None = None
    max_load: int | None = None
    bound: int | None = None
    dead: int | None = None
    moved: int | None = None
    links: tuple[FabricLink, ...] = ()
    conditions: tuple[ConditionStatus, ...] = ()

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", _TIME_PARSERS)

    def to_json(self) -> dict[str, Any]:
        return to_json(self, _TIME_FORMATTERS)


@dataclass(frozen=True)
class Fabric:
    """One, as it is written. `unreadable`: why its spec cannot be read; "": it can."""

    name: str
    uid: str
    generation: int
    created_at: float
    spec: FabricSpec
    status: FabricStatus = field(default_factory=FabricStatus)
    unreadable: str = ""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Never raises: what cannot be read counts for nothing, and says why."""
        metadata, unreadable = body["metadata"], ""
        try:
            spec = FabricSpec.parse(body.get("spec") or {})
        except InputError as error:
            spec, unreadable = FabricSpec(spines=1), str(error)
        try:
            status = FabricStatus.parse(body.get("status") or {})
        except InputError:
            status = FabricStatus()  # written anew
        created_at = parse_time(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0
        generation = metadata.get("generation", 0)
        return cls(metadata["name"], metadata["uid"], generation, created_at, spec, status, unreadable)


_RATE_PATTERN = re.compile(r"([1-9]\d{0,5}(?:\.\d{1,3})?)([MGT])", re.ASCII)


def parse_rate(text: str) -> float:
    """Bits a second of `400G`. Raises InputError."""
    match = _RATE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{abbreviate_value(text)} is no rate: write bits a second in M, G or T, like 400G")
    return float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


_PORT_RANGE_PATTERN = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)


def parse_ports(text: str) -> tuple[int, int]:
    """The first and the last of `20000-29999`. Raises InputError."""
    match = _PORT_RANGE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= first < last <= 65535:
        raise InputError(f"{abbreviate_value(text)} must be two ports from 1024 to 65535, the lower one first, like 20000-29999")
    return first, last


_GO_DURATION_PATTERN = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(text: str) -> float:
    """Seconds of `1h30m`, `5m`, `90s`. Raises InputError."""
    match = _GO_DURATION_PATTERN.fullmatch(text) if isinstance(text, str) and text else None
    if match is None:
        raise InputError(f"{abbreviate_value(text)} is not a duration: write whole hours, minutes, seconds like 1h30m, 5m or 90s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(3600 * hours + 60 * minutes + seconds)


def format_duration(seconds: float) -> str:
    """What `parse_duration` reads; whole seconds."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m"), (left, "s")) if value]
    return "".join(parts) or "0s"


def parse_time(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not a time in RFC 3339, like 2026-01-31T12:00:00Z") from error


def format_time(seconds: float) -> str:
    """RFC 3339 with microseconds, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def round_for_json(value: float) -> float | None:
    """Three digits after the point; None for what JSON cannot carry (a slowdown of infinity: the job stands still)."""
    return round(value, 3) if math.isfinite(value) else None


def _shorten_evidence(evidence: tuple[str, ...]) -> list[str]:
    return [item[:MAX_EVIDENCE_CHARACTERS] for item in evidence[:MAX_EVIDENCE_ITEMS]]


def _parse_hang_seconds(value: str | int) -> float | None:
    if value == "auto":
        return None
    if isinstance(value, int) and value >= 1:
        return float(value)
    raise InputError(f"{value!r} must be auto or whole seconds ≥ 1")


_SPEC_CONVERTERS: Converters = {
    "timeout": parse_duration,
    "valid_for": parse_duration,
    "scheduling_timeout": parse_duration,
    "restart_window": parse_duration,
    "hang_seconds": _parse_hang_seconds,
    "template": dict,
}
_TIME_FIELDS = (
    "last_transition_time",
    "start_time",
    "completion_time",
    "first_sign",
    "detected",
    "decided",
    "applied",
    "recovered",
    "cordoned_at",
    "started",
    "finished",
)
_TIME_PARSERS: Converters = dict.fromkeys(_TIME_FIELDS, parse_time)
_TIME_FORMATTERS: Converters = dict.fromkeys(_TIME_FIELDS, format_time)
_PROBE_METRIC_FORMATTERS: Converters = {
    **dict.fromkeys(("core_seconds", "slowest_core_seconds", "ping"), lambda seconds: round(seconds, 7)),
    **dict.fromkeys(("held_back", "idle_cores", "throttled", "pressure", "frequency"), round_for_json),
    **dict.fromkeys(("memory_bytes_per_second", "up", "down"), round),
}
_HISTORY_TIME_PARSERS: Converters = dict.fromkeys(("at", "first_at", "last_at"), parse_time)
_HISTORY_TIME_FORMATTERS: Converters = dict.fromkeys(("at", "first_at", "last_at"), format_time)
_ROUNDED_INCIDENT_FIELDS = (
    "seconds",
    "gain_seconds",
    "cost_seconds",
    "detected_seconds",
    "recovered_seconds",
    "slowdown_before",
    "slowdown_after",
    "predicted_gain",
    "measured_gain",
)

"""TrainingJob: a job that the operator runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.requests import SourceNaming
from pacekeeper_analysis.stragglers.defaults import DEFAULT_STRAGGLER_SLOWDOWN, DEFAULT_WINDOW_STEPS

from .codec import Converters, from_json, to_patch
from .conditions import CONDITION_TIMES, ConditionStatus
from .formats import format_time, parse_duration, parse_time, round_for_json
from .names import (
    ANNOTATION_PROFILE,
    DEFAULT_MANAGER,
    LABEL_JOB,
    LABEL_PREBUILT,
    LABEL_PRIORITY,
    LABEL_QUEUE,
    LABEL_WORKER,
)

MAX_JOB_NAME = 40
MAX_PROFILE_REQUEST_CHARACTERS = 64
"""Characters of the annotation that are read."""


class Remedy(StrEnum):
    """Remedies for a fault. `remediation.allow` of the CRD takes any of them."""

    RESTART_RANKS = "RestartRanks"
    REPLACE_WORKER = "ReplaceWorker"
    REBALANCE = "Rebalance"
    LOCAL_SGD = "LocalSGD"
    PLAN_GC = "PlanGC"
    BALANCE_LENGTHS = "BalanceLengths"
    QUARANTINE_NODE = "QuarantineNode"
    PLAN_TRAFFIC = "PlanTraffic"


class RemediationMode(StrEnum):
    """Whether remedies are applied, or only decided and recorded."""

    ACT = "Act"
    RECOMMEND = "Recommend"


class RequestedSyncMode(StrEnum):
    """The synchronization mode that a job requests: a mode of `SyncMode`, or the operator's choice."""

    AUTO = "Auto"
    SYNC = SyncMode.SYNC
    EDIT = SyncMode.EDIT
    ASYNC_EDIT = SyncMode.ASYNC_EDIT


class CleanPodPolicy(StrEnum):
    """The pods that are deleted once the job is Complete or Failed."""

    RUNNING = "Running"  # those that still run; ended pods stay for their logs
    ALL = "All"
    NONE = "None"


class JobKind(StrEnum):
    """The kind of the object that a job is described by."""

    TRAINING_JOB = "TrainingJob"
    WATCHED_JOB = "WatchedJob"  # created by others, and only observed


class JobPhase(StrEnum):
    """A summary of the job for people. Programs read the conditions."""

    PENDING = "Pending"  # not all workers are placed
    STARTING = "Starting"  # placed, before the first step of the first round
    RUNNING = "Running"
    RECOVERING = "Recovering"  # an Incident is open and its remedy is under way
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class AccessMode(StrEnum):
    """Which nodes can mount a claim at a time: many, or one."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


@dataclass(frozen=True)
class CheckpointSpec:
    path: str = "/checkpoints"
    every_steps: int = 100
    keep: int = 3
    volume_claim_name: str = ""  # "": the user mounts a volume at `path`, or no checkpoint outlives the pod
    sub_path: str | None = None  # of the claim or URI; "": its root; None: see `manifests.choose_checkpoint_sub_path`
    adopt: str = ""  # another job, whose checkpoints this one takes over
    read_only: bool = False  # the job reads checkpoints, and writes none
    uri: str = ""  # of an object store that takes the place of `path`; "": there is a folder at `path`
    access_mode: AccessMode = AccessMode.READ_WRITE_MANY  # of the claim

    @property
    def uses_server(self) -> bool:
        """Whether the workers reach the claim through the checkpoint server, since only one node can mount it."""
        return bool(self.volume_claim_name) and self.access_mode is AccessMode.READ_WRITE_ONCE


@dataclass(frozen=True)
class ProfileSpec:
    sources: SourceNaming = SourceNaming.HASH  # how profiles name the job's own files


@dataclass(frozen=True)
class DetectionSpec:
    straggler_slowdown: float = DEFAULT_STRAGGLER_SLOWDOWN
    window_steps: int = DEFAULT_WINDOW_STEPS
    hang_seconds: float | None = None  # None: auto, learned from the job's own steps
    profile: ProfileSpec = field(default_factory=ProfileSpec)


@dataclass(frozen=True)
class ExitCodesSpec:
    """Actions on exit codes of the script. Each code is from 1 to 255."""

    do_not_retry: tuple[int, ...] = ()
    replace_node: tuple[int, ...] = ()


@dataclass(frozen=True)
class RemediationSpec:
    mode: RemediationMode = RemediationMode.ACT
    allow: tuple[Remedy, ...] = tuple(Remedy)
    max_restarts: int = 10  # within `restart_window`; disruptions and suspend never count
    restart_window: float = 3600.0  # seconds
    max_rounds_without_progress: int = 3  # rounds that may end at the same step; 0: no limit
    exit_codes: ExitCodesSpec = field(default_factory=ExitCodesSpec)


@dataclass(frozen=True)
class RunPolicySpec:
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING


@dataclass(frozen=True)
class PreflightSpec:
    """Whether probe pods check the nodes before ranks start on them. Times are in seconds."""

    enabled: bool = False
    timeout: float = 300.0  # the job starts without the results that are missing by then
    valid_for: float = 86400.0  # a node that was probed more recently is not probed again


@dataclass(frozen=True)
class JobSpec:
    """The desired state of a job, as the user wrote it."""

    template: Mapping[str, Any]  # PodTemplateSpec, as the user wrote it
    trainer_container: str = ""  # of the template, with the ranks; "": see `trainer_container.find_trainer_container`
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
        """Parse a TrainingJob's spec.

        Raises InputError that names the field.
        """
        if "template" not in spec:
            raise InputError("spec.template: is missing; give a pod template with a container that trains")
        return from_json(cls, spec, "spec", _SPEC_CONVERTERS)


@dataclass(frozen=True)
class TrainingJob:
    """A TrainingJob: its identity, and what its user wants. A watched job is described by one without a template."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: JobSpec
    created_at: float | None = None
    deleting: bool = False  # deletion was requested
    profile_request: str = ""  # value of ANNOTATION_PROFILE: a changed value requests a profile
    queue: str = ""  # the Kueue queue that has to admit it; "": none
    priority_class: str = ""  # its priority in the queue; "": that of its pods
    prebuilt_workload: str = ""  # name of its Workload if another cluster has sent both; "": it is created here
    queue_hold_reason: str = ""  # why its queue holds it, which counts as suspended; "": it does not
    kind: JobKind = JobKind.TRAINING_JOB

    @property
    def selector(self) -> str:
        """The label selector of its workers; also `status.selector`, for the scale subresource."""
        if self.spec.checkpoint.uses_server:  # whose pod has the job's label too
            return f"{LABEL_JOB}={self.name},{LABEL_WORKER}"
        return f"{LABEL_JOB}={self.name}"

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a whole TrainingJob object.

        Raises InputError that names the field.
        """
        return cls._from_metadata(body["metadata"], JobSpec.parse(body["spec"]))

    @classmethod
    def parse_identity(cls, body: Mapping[str, Any]) -> Self:
        """Parse the identity only, with an empty spec. It can be read even if the spec is invalid."""
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
            created_at=parse_time(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else None,
            deleting="deletionTimestamp" in metadata,
            queue=str(labels.get(LABEL_QUEUE, "")),
            priority_class=str(labels.get(LABEL_PRIORITY, "")),
            prebuilt_workload=str(labels.get(LABEL_PREBUILT, "")),
            profile_request=str((metadata.get("annotations") or {}).get(ANNOTATION_PROFILE, ""))[
                :MAX_PROFILE_REQUEST_CHARACTERS
            ],
        )


@dataclass(frozen=True)
class WorkerCounts:
    """The content of `status.workers`.

    `ready` counts workers whose ranks run, out of `desired`; spares are separate.
    """

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
    best: int  # the minimum over all orders of these workers


@dataclass(frozen=True)
class ResumePoint:
    """The content of `status.resumedFrom`: where the present round, or the last one, continued."""

    round: int
    step: int  # 0: the beginning
    source: str | None = None  # Memory, Peer, Checkpoint, or Nothing; None: not reported


_JOB_TIMES = ("start_time", "completion_time", *CONDITION_TIMES)


@dataclass(frozen=True)
class JobStatus:
    """The status of a job. `to_patch` returns a merge patch, in which a field that is None is removed."""

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
    checkpoint_sub_path: str | None = None  # folder of its claim or URI; "": the root
    resumed_from: ResumePoint | None = None  # None: no round has reported it
    total_steps: int | None = None  # as the script declares; None: it does not
    progress: str | None = None  # 24%
    remaining: str | None = None  # a duration, rounded; None: unknown
    workers: WorkerCounts = field(default_factory=WorkerCounts)
    selector: str | None = None
    slowdown: float | None = None
    goodput: float | None = None  # 0 … 1
    sync_mode: SyncMode | None = None
    restarts: int | None = None
    bottleneck: str | None = None
    leaf_crossings: LeafCrossings | None = None  # None: no labels of nodes name their leaves

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", dict.fromkeys(_JOB_TIMES, parse_time))

    def to_patch(self) -> dict[str, Any]:
        return to_patch(
            self, {**dict.fromkeys(_JOB_TIMES, format_time), "slowdown": round_for_json, "goodput": round_for_json}
        )


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

"""What workers send to the operator: their present state with each poll, faults, and requested evidence.

Times called `…_at` are seconds since the epoch by the worker's clock. Workers are not trusted: each value read here has
its field's type and is within the bounds declared at the field. Otherwise reading raises InputError, which names the
field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Self

from pacekeeper_rank.collectives.communicators import MAX_COMMUNICATORS
from pacekeeper_rank.records import Collective, Device, Phase, StateOrigin

from ..errors import InputError
from .communicators import Communicator, check_communicators_size, parse_entered
from .decoding import MaxLength, OneOf, Truncated, Within, read_dataclass, read_tuple
from .operations import MAX_OPERATIONS_CHARACTERS, decode_operations
from .plan import MAX_WORKER_PATHS, SyncMode
from .watched_report import ReportedProgress, ReportedRank, WatchedReport

MAX_WINDOW_STEPS = 4096
"""Upper limit of steps of a rank's window."""
MAX_WORKER_RANKS = 1024
"""Upper limit of ranks of one worker."""
MAX_WORKER_GPUS = 32
"""Upper limit of GPUs of one worker."""
MAX_WORKER_FLOWS = 4096
"""Upper limit of flows of one worker."""

Name = Annotated[str, MaxLength(253)]
MessageText = Annotated[str, Truncated(2_000)]
Count = Annotated[int, Within(0)]
Position = Annotated[int, Within(0)]
"""A step or a rank."""
Port = Annotated[int, Within(1, 65535)]
Seconds = Annotated[float, Within(0, 1e12)]
Samples = Annotated[int, Within(0, 2**31)]
"""Samples of one rank in one step."""
Mode = Annotated[str, OneOf(frozenset({"", *SyncMode}))]
Groups = Annotated[tuple[Communicator, ...], MaxLength(MAX_COMMUNICATORS)]
StepSeries = Annotated[tuple[Annotated[float, Within(0, 1e24)], ...], MaxLength(MAX_WINDOW_STEPS)]


@dataclass(frozen=True)
class RankMetrics:
    """How a rank trains now: means over its window of steps. None means not known (yet)."""

    rank: Count
    steps: Count = 0  # of the window, with its present share of the batch
    step_seconds: Seconds | None = None
    compute_seconds: Seconds | None = None  # own work in a step, without waits for peers
    compute_seconds_per_sample: Seconds | None = None  # a step of a monitored script counts as one sample
    wait_seconds: Seconds | None = None  # waits for peers in a step
    share: Samples | None = None  # samples in a step
    first_steps_seconds: Seconds | None = None  # median time of the job's first steady steps, as measured here
    synchronization_seconds: Seconds = 0.0  # for which a synchronization blocked it; 0: none did
    last_step: Count | None = None  # number of the last step of the window; None: there is none, or an older sender


class LauncherState(StrEnum):
    """What a worker's launcher is doing."""

    STARTING = "Starting"  # importing torch
    WARM = "Warm"  # ready to fork ranks, has none
    GATHERING = "Gathering"  # waits in the rendezvous for the other launchers of its membership
    RUNNING = "Running"  # its ranks run
    FINISHED = "Finished"  # its ranks ended with success
    FAILED = "Failed"  # it has given up; the faults give the reason
    LOST = "Lost"  # it could reach neither operator nor peers for too long, and ended its ranks


@dataclass(frozen=True)
class GpuHealth:
    """NVML's report of one GPU over the last ten minutes. None means not known; a count of 0 may be unknown, too."""

    gpu: Name  # UUID
    signs: Annotated[tuple[Annotated[str, MaxLength(40)], ...], MaxLength(16)] = ()  # of failures.gpu_health.Sign
    memory_errors: Count = 0  # uncorrected
    lifetime_errors: Count = 0  # uncorrected, in its whole life
    remapped_rows: Count = 0  # in its whole life
    pcie_replays: Count = 0
    pcie_width: Count | None = None  # lanes, now
    pcie_generation: Count | None = None  # now
    nvlink_errors: Count = 0  # replays and recoveries
    throttled_minutes: Count = 0  # in which the hardware throttled its clocks
    clock_share: Annotated[float, Within(0, 1)] | None = None  # of its highest clock, in the last minute under load
    temperature: Count | None = None  # °C now: of chip or memory, the hotter one
    power: Annotated[float, Within(0, 1e6)] | None = None  # W


class PathFault(StrEnum):
    """Why a rank's traffic does not take its planned path. The traffic flows anyway: the network chooses the route."""

    NONE = ""
    NO_SHIM = "NoShim"  # the ranks run without the shim: a pure wheel, another libc or architecture
    PORTS_TAKEN = "PortsTaken"  # no port of the job's range is free
    FILTERED = "Filtered"  # no switch reports where packets expire (ICMP)
    NOT_FOUND = "NotFound"  # no port that was tried leads over the wanted spine
    BLACK_HOLE = "BlackHole"  # packets over the wanted spine get no further
    TRANSLATED = "Translated"  # connections arrive, but not from the peer's address: it is rewritten on the way
    NOT_TAKEN = "NotTaken"  # the connection came from another port


@dataclass(frozen=True)
class PathReport:
    """The state of a planned path in this round, as the sender's launcher sees it."""

    source: Count  # rank
    destination: Count  # rank
    in_force: bool = False  # the connection was observed on it
    fault: PathFault = PathFault.NONE


class StartStage(StrEnum):
    """What a rank reaches at the start of a round, in this order."""

    DEVICE = "Device"  # its process runs, has imported what it needs, and has its device
    COMMUNICATORS = "Communicators"  # it is in its process groups
    SCRIPT = "Script"  # its script has built model, optimizer and data, and requests their state
    LOAD = "Load"  # its state is loaded
    FIRST_STEP = "FirstStep"  # it has completed a step


@dataclass(frozen=True)
class ReachedStage:
    """When the last of a worker's ranks reached a stage of this round."""

    stage: StartStage
    seconds: Seconds  # since the worker's launcher began the round
    rank: Count  # the last one


@dataclass(frozen=True)
class RoundStart:
    """How the present round started on a worker; a new round begins with the defaults."""

    started_at: Seconds | None = None  # None: its ranks do not run yet
    restored_step: Position | None = None  # that its ranks continued from, 0: the beginning; None: not known yet
    first_step_at: Seconds | None = None  # end of its first optimizer step; None: not completed yet
    # Reported with the first step.
    teardown_seconds: Seconds = 0.0  # from when the previous round's end was noticed until its ranks were gone
    stages: Annotated[tuple[ReachedStage, ...], MaxLength(len(StartStage))] = ()  # (): not yet, or not reported
    origin: Annotated[str, OneOf(frozenset(origin.name for origin in StateOrigin))] = StateOrigin.UNKNOWN.name
    """Where the ranks' state came from: the farthest of their origins."""


@dataclass(frozen=True)
class StepProgress:
    """How many optimizer steps a worker's slowest rank has completed."""

    step: Position | None = None  # last completed step of the job; None: none
    steps_in_round: Count = 0
    total_steps: Annotated[int, Within(1)] | None = None  # that the script wants; None: unlimited, or not known
    step_ended_at: Seconds | None = None  # end of the last complete step; None: there is none, or an older sender


@dataclass(frozen=True)
class CheckpointReport:
    """What a worker holds and knows of the job's checkpoints."""

    step: Position | None = None  # of the newest published one; None: none is known
    snapshot_step: Position | None = None  # of the newest snapshot in memory; None: none
    replicated_step: Position | None = None  # of the newest snapshot that another worker has, too; None: none
    request: Count = 0  # last one answered
    # Of the checkpoints of the whole job; only the worker of rank 0 reports them.
    failed_rank: Position | None = None  # that could not save the newest checkpoint; None: saved, or not known
    error: MessageText = ""  # path and reason; "": saved, or none was due
    age_seconds: Seconds | None = None  # of the newest published one; None: none is known


@dataclass(frozen=True)
class BadLoss:
    """A loss that is not finite."""

    rank: Position
    step: Position  # first such step in this round


@dataclass(frozen=True)
class TrainingReport:
    """How a worker's ranks train, by their script and the plan in force on them."""

    managed: bool = False  # the script is managed: it uses the library, not only pacekeeper.auto
    sync_mode: Mode = ""  # a plan.SyncMode, in force on this worker's ranks; "": monitored, or not known yet
    global_batch: Annotated[int, Within(1, 2**40)] | None = None  # samples of the job in a step; None: not known
    replica_ranks: Annotated[int, Within(1)] | None = None
    """The script trains exactly with any multiple of this number of ranks. None: not known."""
    refused: MessageText = ""  # why the ranks do not follow the newest plan, for people; "": they do
    bad_loss: BadLoss | None = None  # the first one of the ranks here


@dataclass(frozen=True)
class Heartbeat:
    """A worker's present state. The launcher writes it, and the sidecar sends it with each poll of the plan."""

    worker: Name = ""
    state: LauncherState = LauncherState.STARTING
    plan_version: Count = 0  # that the launcher follows
    membership: Count = 0
    round: Count = 0  # last round started or agreed on, from 1
    restarts: Count = 0  # rounds that the launchers started by themselves in this membership
    start: RoundStart = RoundStart()
    progress: StepProgress = StepProgress()
    checkpoint: CheckpointReport = CheckpointReport()
    training: TrainingReport = TrainingReport()
    launcher_silent_seconds: Seconds = 0.0  # since its last sign of life, by the sidecar; also 0 before and after it
    unkillable_ranks: Annotated[tuple[Count, ...], MaxLength(MAX_WORKER_RANKS)] = ()  # still running long after SIGKILL
    rendezvous_port: Port | None = None  # for serving a rendezvous; None: an older launcher
    probe_port: Port | None = None  # for answering link probes; None: an older launcher
    rank_metrics: Annotated[
        tuple[RankMetrics, ...], MaxLength(MAX_WORKER_RANKS)
    ] = ()  # of the ranks here; (): none trains yet
    gpus: Annotated[tuple[GpuHealth, ...], MaxLength(MAX_WORKER_GPUS)] = ()  # from NVML in the pod
    paths: Annotated[tuple[PathReport, ...], MaxLength(MAX_WORKER_PATHS)] = ()  # that begin here
    reported_progress: ReportedProgress | None = None  # of a watched container's script; None: it reports none
    commands_may_follow: bool | None = None  # after the launcher, as in a shell script; None: none has reported
    watched: WatchedReport | None = None  # of a container that Pacekeeper did not create; None: of a job's worker
    sent_at: Seconds | None = None  # by the clock of the other times, shows its offset; None: not given

    def to_json(self) -> dict[str, Any]:
        """Return the heartbeat as JSON, without fields that have their default.

        This leaves a third of the size for a worker with eight GPUs. Thousands of workers send heartbeats and one
        process reads them.
        """
        return _drop_defaults(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read a heartbeat. Raises InputError, which names the field."""
        return read_dataclass(cls, data)

    @property
    def watched_ranks(self) -> tuple[ReportedRank, ...] | None:
        """The ranks of a watched container; None: it is none."""
        return None if self.watched is None else self.watched.ranks

    @property
    def gpu_signs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The health signs of each GPU, which must be reported without delay."""
        return tuple((health.gpu, health.signs) for health in self.gpus)


class FaultKind(StrEnum):
    """A kind of fault that a worker noticed."""

    RANK_FAILED = "RankFailed"  # a rank ended with an exit code or a signal
    STALLED = "Stalled"  # the worker's ranks make no progress; every worker of the job sends it, also innocent ones
    TERMINATING = "Terminating"  # the pod was asked to end (drain, eviction, preemption)
    GPU_ERROR = "GpuError"  # an event of NVML
    ROUND_FAILED = "RoundFailed"  # a round could not start: a launcher was missing, or the store was unreachable


FINISHED_MESSAGE = "pacekeeper: the ranks have finished"
"""Line of a trainer's termination message. Exit code 0 alone proves nothing: in a pipe it is another command's."""

EXITED_PROCESS_STATES = ("Z", "X", "")
"""State letters of a process that has exited."""

DEBUGGER_WAIT = "a debugger"
"""A value of `RankState.waits_for`: a user debugs the rank, which may take any time."""


@dataclass(frozen=True)
class RankState:
    """What a rank was doing when its worker's ranks stalled."""

    rank: Count
    phase: Annotated[str, OneOf(frozenset(phase.name for phase in Phase))]
    phase_seconds: Seconds
    step: Position | None  # last completed step of the job; None: none
    collective: Annotated[str, OneOf(frozenset(collective.name for collective in Collective))]
    """NONE: the rank is outside collectives."""
    group: Count
    sequence: Count  # of the last collective entered in the group, from 1
    collectives_entered: Count  # in this round, over all groups: the rank with the fewest was left behind
    waiting_seconds: Seconds  # since it entered the collective, or since its last sign of progress
    process_state: Annotated[str, MaxLength(1)]  # letter of /proc/<pid>/stat: R, S, D, T (stopped), Z; "": gone
    moving: bool  # its stack, or its CPU time unless it may spin for its GPU, changed between two polls
    stack: Annotated[str, Truncated(16_000)] = ""  # innermost call last; "": could not be taken
    overdue: bool = False  # it has shown no progress for longer than its phase may take
    device: Annotated[str, OneOf(frozenset(device.name for device in Device))] = Device.NONE.name
    # The oldest collective that its GPU has not completed; meaningful if `device` is SCHEDULED or STARTED.
    device_collective: Annotated[str, OneOf(frozenset(collective.name for collective in Collective))] = "NONE"
    device_group: Count = 0
    device_sequence: Count = 0
    peer: Position | None = None  # global rank that it sends to or receives from; None: none, or any sender
    entered: Annotated[str, MaxLength(2_000)] = ""
    """How far it has come in each of its groups (`communicators.format_entered`). "": its library does not report it"""
    ended: bool = False  # its process has exited with code 0
    waits_for: Annotated[str, Truncated(200)] = ""
    """What its process waits for that no rank provides: a child process, a file, a clock. "" if nothing of the kind."""
    excused: bool = False  # it may still wait for that: `hangSeconds` have not passed

    def __post_init__(self) -> None:
        """Raise InputError if `entered` is malformed."""
        parse_entered(self.entered)


@dataclass(frozen=True)
class BlockedConnection:
    """One end of a rank's connection that has data to send and makes no progress.

    The other end acknowledges nothing, although its window is open.
    """

    rank: Count  # that owns it
    remote: Annotated[str, MaxLength(64)]  # address:port
    seconds: Seconds  # for which nothing has been acknowledged, at least


@dataclass(frozen=True)
class FaultReport:
    """A fault that a worker noticed, sent until the operator has acknowledged it. `name` is unique in the job."""

    name: Name
    kind: FaultKind
    worker: Name
    round: Count
    noticed_at: Seconds
    membership: Count = 0
    rank: Position | None = None  # that failed; None: the fault concerns the worker
    exit_code: Annotated[int, Within(-1024, 2**31)] = 0  # negative: the signal
    out_of_memory: bool = False  # the cgroup's oom_kill counter rose
    completed_step: bool = False  # whether the rank had completed a step in this round
    step: Position | None = None  # last completed step of the rank, or of the slowest one here; None: none
    ended_peer: Position | None = None  # rank that exited with code 0 and for which this one waited
    error: Annotated[str, Truncated(8_000)] = ""  # the script's last lines
    ranks: Annotated[tuple[RankState, ...], MaxLength(MAX_WORKER_RANKS)] = ()  # of a stall
    unreachable: Annotated[tuple[Name, ...], MaxLength(64)] = ()  # of a stall: peers that did not answer
    missing: Annotated[tuple[Name, ...], MaxLength(64)] = ()  # of a round that could not start: absent workers
    communicators: Groups = ()  # of a stall: those that `ranks` refer to
    blocked: Annotated[tuple[BlockedConnection, ...], MaxLength(64)] = ()  # of a stall: the longest first
    # Of a stall, for people; "": nothing is known.
    ras: MessageText = ""  # NCCL's own report (RAS) on the communicators
    transfers: MessageText = ""  # what transfers in progress over NCCL wait for
    xid: Count = 0  # of a GPU_ERROR
    sent_at: Seconds | None = None  # by the clock of `noticed_at`, shows its offset; None: not given

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read a fault. Raises InputError, which names the field."""
        check_communicators_size(data)
        return read_dataclass(cls, data, "Fault")


@dataclass(frozen=True)
class RankWindow:
    """A rank's last steps, one number per step (seconds), oldest first. The lists by step have equal lengths."""

    rank: Count
    steps: Annotated[tuple[Count, ...], MaxLength(MAX_WINDOW_STEPS)]
    step_seconds: StepSeries
    compute_seconds: StepSeries  # own work, without the waits for peers
    samples: Annotated[tuple[Samples, ...], MaxLength(MAX_WINDOW_STEPS)]
    gc_seconds: StepSeries = ()  # of each step; (): not recorded
    lengths: StepSeries = ()  # of each step's samples, summed (for example tokens); (): not known
    squares: StepSeries = ()  # of these lengths, summed; (): only the sums of the lengths are known
    sync_mode: Mode = ""  # a plan.SyncMode, in force during the whole window
    transfers: StepSeries = ()  # of the last synchronizations in Local-SGD modes: seconds they blocked the rank
    baseline_seconds: Seconds | None = None  # median time of the job's first steady steps, as measured here
    baseline_own_seconds: Seconds | None = None  # median own work in these steps
    share_granularity: Annotated[int, Within(1, 2**31)] = 1  # a rank's share is a multiple of it (static shapes)

    def __post_init__(self) -> None:
        """Raise InputError if the lists by step differ in length."""
        for name in ("step_seconds", "compute_seconds", "samples"):
            self._check_length(name)
        for name in ("gc_seconds", "lengths", "squares"):
            if getattr(self, name):
                self._check_length(name)

    def _check_length(self, name: str) -> None:
        count = len(getattr(self, name))
        if count != len(self.steps):
            raise InputError(f"RankWindow.{name}: {count} numbers for {len(self.steps)} steps; give one a step")


@dataclass(frozen=True)
class RankOperations:
    """The collectives of a rank's last complete steps."""

    rank: Count
    operations: Annotated[str, MaxLength(MAX_OPERATIONS_CHARACTERS)]  # in the format of `operations.encode_operations`

    def __post_init__(self) -> None:
        """Raise InputError if `operations` cannot be decoded."""
        decode_operations(self.operations)


@dataclass(frozen=True)
class LinkWindow:
    """One end of a connection during one window of some seconds, by the kernel's counters (TCP_INFO)."""

    local: Annotated[str, MaxLength(64)]  # address:port
    remote: Annotated[str, MaxLength(64)]
    rank: Position | None = None  # that owns it; None: not a rank's, or not known
    age: Count = 0  # windows ago: 0 is the newest
    seconds: Seconds = 0.0  # that the window took
    acked_bytes: Count = 0  # sent and acknowledged in it
    busy_seconds: Seconds = 0.0  # that the window lasted
    receiver_limited_seconds: Seconds = 0.0  # of these, held up by the receiver's window
    sender_limited_seconds: Seconds = 0.0  # … by the sender's buffer
    retransmitted_bytes: Count = 0
    unsent_bytes: Count = 0  # waiting at its end
    min_round_trip_seconds: Seconds = 0.0
    # Of a fast window among the connection's first ones; None: not known.
    early_bytes: Count | None = None  # acknowledged in it
    early_busy_seconds: Seconds | None = None


@dataclass(frozen=True)
class FlowWindow:
    """What a rank exchanged with one peer of a communicator in one window of some seconds, by NCCL's own report."""

    communicator: Annotated[int, Within(0, 2**64 - 1)]  # NCCL's id, the same on all its ranks
    place: Count  # of the rank in the communicator
    peer: Count  # the other rank's place
    rank: Count
    age: Count = 0  # windows ago: 0 is the newest
    sent_bytes: Count = 0
    network_seconds: Seconds = 0.0  # in which they were in transit, summed over channels


@dataclass(frozen=True)
class LinkProbe:
    """What a launcher measured toward another one, on the operator's request."""

    target: Name  # worker
    bytes_per_second: Seconds | None = None  # of the fastest transfer; None: none came through
    ping_seconds: Seconds | None = None  # median; None: none was answered
    pings_lost: Count = 0
    failed: MessageText = ""  # why the measurement failed; "": it did not


@dataclass(frozen=True)
class Evidence:
    """What a sidecar sends in response to a request: a summary (kilobytes, not traces) of the requested parts."""

    request: Name
    worker: Name
    round: Count
    windows: Annotated[tuple[RankWindow, ...], MaxLength(MAX_WORKER_RANKS)] = ()
    communicators: Groups = ()  # of the ranks here
    operations: Annotated[tuple[RankOperations, ...], MaxLength(MAX_WORKER_RANKS)] = ()
    links: Annotated[tuple[LinkWindow, ...], MaxLength(4096)] = ()
    flows: Annotated[tuple[FlowWindow, ...], MaxLength(MAX_WORKER_FLOWS)] = ()
    probes: Annotated[tuple[LinkProbe, ...], MaxLength(64)] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the evidence as JSON. Links and flows, of which there may be thousands, leave out default values."""
        compact = {"links": _to_plain_json(self.links), "flows": _to_plain_json(self.flows)}
        return {**asdict(replace(self, links=(), flows=())), **compact}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read evidence. Raises InputError, which names the field. An invalid window is left out."""
        if not isinstance(data, Mapping):
            return read_dataclass(cls, data)
        check_communicators_size(data)
        windows = read_tuple(_read_rank_window, data.get("windows", ()), "Evidence.windows", MAX_WORKER_RANKS)
        evidence = read_dataclass(cls, {**data, "windows": ()})
        return replace(evidence, windows=tuple(window for window in windows if window is not None))


def _drop_defaults(record: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, of a dataclass and of those in its fields and tuples."""
    defaults = _get_field_defaults(type(record))  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
    return {name: _to_plain_json(value) for name, value in vars(record).items() if value != defaults[name]}


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain_json(item) for item in value]
    return _drop_defaults(value) if is_dataclass(value) else value


@cache
def _get_field_defaults(cls: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(cls)}


def _read_rank_window(window: object, path: str) -> RankWindow | None:
    try:
        return read_dataclass(RankWindow, window, path)
    except InputError:
        return None

"""What workers tell the operator: their present state with each poll, faults, and the evidence they are asked for.

Times called `…_at` are seconds since the epoch by the worker's clock. Workers are not trusted: what is read here has
its field's type and keeps within the bounds that stand at the field, or it is an InputError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Self

from .communicators import MAX_COMMUNICATORS, Communicator, check_communicators_size, parse_entered
from .errors import InputError
from .operations import MAX_OPERATIONS_CHARACTERS, decode_operations
from .plan import MAX_WORKER_PATHS, SyncMode
from .reading import Truncated, MaxLength, OneOf, Within, read_dataclass, read_tuple
from .records import Collective, Device, Phase, StateOrigin

MAX_WINDOW_STEPS = 4096
"""Steps of a rank's window that are taken."""
MAX_WORKER_RANKS = 1024
"""Of one worker."""
MAX_WORKER_GPUS = 32
"""Of one worker."""
MAX_WORKER_FLOWS = 4096
"""Of one worker."""

Name = Annotated[str, MaxLength(253)]
MessageText = Annotated[str, Truncated(2_000)]
Count = Annotated[int, Within(0)]
Position = Annotated[int, Within(-1)]
"""A step, or a rank; -1: none."""
Seconds = Annotated[float, Within(0, 1e12)]
Samples = Annotated[int, Within(0, 2**31)]
"""Of one rank in one step."""
Mode = Annotated[str, OneOf(frozenset({"", *SyncMode}))]
Groups = Annotated[tuple[Communicator, ...], MaxLength(MAX_COMMUNICATORS)]
StepSeries = Annotated[tuple[Annotated[float, Within(0, 1e24)], ...], MaxLength(MAX_WINDOW_STEPS)]


@dataclass(frozen=True)
class RankMetrics:
    """How a rank trains now: means over its window of steps. 0 where nothing is known (yet)."""

    rank: Count
    steps: Count = 0  # of the window, in which it took its present share of the batch
    step_seconds: Seconds = 0.0
    compute_seconds: Seconds = 0.0  # own work in a step, waits for peers excluded
    compute_seconds_per_sample: Seconds = 0.0  # a script that is only watched counts as one sample a step
    wait_seconds: Seconds = 0.0  # for peers in a step
    share: Samples = 0  # samples in a step; 0: unknown
    first_steps_seconds: Seconds = 0.0  # median time of the job's first steady steps, as seen here
    synchronisation_seconds: Seconds = 0.0  # that one held it up; 0: there was none


class LauncherState(StrEnum):
    """What a worker's launcher is doing."""

    STARTING = "Starting"  # importing torch
    WARM = "Warm"  # ready to fork ranks, without any
    GATHERING = "Gathering"  # waits in the store for the other launchers of its membership
    RUNNING = "Running"  # its ranks run
    FINISHED = "Finished"  # its ranks ended well
    FAILED = "Failed"  # given up; the faults say why
    LOST = "Lost"  # reached neither operator nor peers for too long, and ended its ranks


@dataclass(frozen=True)
class GpuHealth:
    """What NVML says of one GPU, over the last ten minutes; 0: not known, or nothing to tell."""

    gpu: Name  # UUID
    signs: Annotated[tuple[Annotated[str, MaxLength(40)], ...], MaxLength(16)] = ()  # of diagnose.gpu_health.Sign
    memory_errors: Count = 0  # uncorrected
    lifetime_errors: Count = 0  # the same in its whole life
    remapped_rows: Count = 0  # in its whole life
    pcie_replays: Count = 0
    pcie_width: Count = 0  # lanes, now
    pcie_generation: Count = 0  # now
    nvlink_errors: Count = 0  # replays and recoveries
    throttled_minutes: Count = 0  # in which the hardware slowed its clocks down
    clock_share: Annotated[float, Within(0, 1)] = 0.0  # of its highest clock, in the last minute under load
    temperature: Count = 0  # °C now: of chip or memory, whichever is hotter
    power: Annotated[float, Within(0, 1e6)] = 0.0  # W


class PathFault(StrEnum):
    """Why a rank's traffic does not take its planned path. It flows all the same: the network chooses."""

    NONE = ""
    NO_SHIM = "NoShim"  # the ranks run without it: a pure wheel, another libc or architecture
    PORTS_TAKEN = "PortsTaken"  # none of the job's ports can be had
    FILTERED = "Filtered"  # no switch says where packets end (ICMP)
    NOT_FOUND = "NotFound"  # none of the ports that were tried leads by the wanted spine
    BLACK_HOLE = "BlackHole"  # what goes by the wanted spine gets no further
    TRANSLATED = "Translated"  # connections arrive, but none from the peer's address: it is rewritten on the way
    NOT_TAKEN = "NotTaken"  # the connection came about from another port


@dataclass(frozen=True)
class PathReport:
    """What has become of a planned path in this round, as the sender's launcher sees it."""

    source: Count  # rank
    destination: Count  # rank
    in_force: bool = False  # the connection is seen to be on it
    fault: PathFault = PathFault.NONE


class StartStage(StrEnum):
    """What a rank comes to at the start of a round, in this order."""

    DEVICE = "Device"  # its process runs, has imported what it needs, and has its device
    COMMUNICATORS = "Communicators"  # it is in its process groups
    SCRIPT = "Script"  # its script has made model, optimizer and data, and asks for their state
    LOAD = "Load"  # it has its state back
    FIRST_STEP = "FirstStep"  # it has made a step


@dataclass(frozen=True)
class ReachedStage:
    """When the last of a worker's ranks had come so far in this round."""

    stage: StartStage
    seconds: Seconds  # since the worker's launcher began the round
    rank: Count  # that was the last


@dataclass(frozen=True)
class Heartbeat:
    """A worker's present state; the launcher writes it, the sidecar sends it with each poll of the plan."""

    worker: Name = ""
    state: LauncherState = LauncherState.STARTING
    plan_version: Count = 0  # that the launcher follows
    membership: Count = 0
    round: Count = 0  # last round started or agreed; 0: none
    restarts: Count = 0  # rounds that the launchers started by themselves in this membership
    step: Position = -1  # last completed optimizer step of its slowest rank; -1: none
    steps_in_round: Count = 0
    total_steps: Count = 0  # that the script wants of the job; 0: without end, or not known
    checkpoint_step: Position = -1
    snapshot_step: Position = -1
    restored_step: Position = -1  # that the round started from
    checkpoint_request: Count = 0  # last one answered
    global_batch: Annotated[int, Within(0, 2**40)] = 0
    replica_ranks: Count = 0  # the script trains as exactly with any multiple of so many ranks; 0: it does not say
    round_started_at: Seconds = 0.0
    first_step_at: Seconds = 0.0  # end of the first optimizer step of the round; 0: none yet
    # How the round started; told with its first step.
    teardown_seconds: Seconds = 0.0  # from when the round before was seen to end here until its ranks were gone
    start: Annotated[tuple[ReachedStage, ...], MaxLength(len(StartStage))] = ()  # (): not yet, or nobody tells
    origin: Annotated[str, OneOf(frozenset(origin.name for origin in StateOrigin))] = StateOrigin.UNKNOWN.name
    """Where the ranks' state came from: the farthest of their origins."""
    steered: bool = False  # the script uses the library (it can follow shares and modes), not only pacekeeper.auto
    sync_mode: Mode = ""  # a plan.SyncMode, the one in force on this worker's ranks; "": not steered, or not known yet
    refused: MessageText = ""  # why the ranks do not follow the newest plan, in words for people; "": they do
    bad_loss_rank: Position = -1  # a rank here whose loss is not finite; -1: none
    bad_loss_step: Position = -1  # first step of this round in which that was so
    launcher_silent_seconds: Seconds = 0.0  # since its last sign of life, by the sidecar; 0 also: it starts, or is over
    unkillable_ranks: Annotated[tuple[Count, ...], MaxLength(MAX_WORKER_RANKS)] = ()  # still there long after SIGKILL
    # Of the checkpoints of the whole job; only the worker of rank 0 tells.
    checkpoint_failed_rank: Position = -1  # on which the newest checkpoint could not be kept; -1: it was
    checkpoint_error: MessageText = ""  # its path and why; "": it was kept, or none was due
    checkpoint_age_seconds: Annotated[float, Within(-1, 1e12)] = -1.0  # of the newest that is kept; -1: none is known
    meeting_port: Annotated[int, Within(0, 65535)] = 0  # at which this launcher can serve a meeting; 0: an older one
    probe_port: Annotated[int, Within(0, 65535)] = 0  # at which it answers probes of links; 0: an older one
    figures: Annotated[tuple[RankMetrics, ...], MaxLength(MAX_WORKER_RANKS)] = ()  # of the ranks here; (): none trains yet
    gpus: Annotated[tuple[GpuHealth, ...], MaxLength(MAX_WORKER_GPUS)] = ()  # as NVML in the pod says
    paths: Annotated[tuple[PathReport, ...], MaxLength(MAX_WORKER_PATHS)] = ()  # that begin here
    sent_at: Seconds = 0.0  # by the same clock as the other times, which tells how far it is off; 0: not said

    def to_json(self) -> dict[str, Any]:
        """Without what is as it is where nothing is said: a third is left of a worker's with eight GPUs, which
        thousands send and one process reads."""
        return _drop_defaults(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return read_dataclass(cls, data)

    @property
    def gpu_signs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """By GPU: what of its health cannot wait to be told."""
        return tuple((health.gpu, health.signs) for health in self.gpus)


class FaultKind(StrEnum):
    """What a worker has noticed."""

    RANK_FAILED = "RankFailed"  # a rank ended with an exit code or a signal
    STALLED = "Stalled"  # the worker's ranks make no progress; sent by every worker of the job, guilty or not
    TERMINATING = "Terminating"  # the pod was told to end (drain, eviction, preemption)
    GPU_ERROR = "GpuError"  # NVML's events
    ROUND_FAILED = "RoundFailed"  # a round could not be started: not all launchers came, or the store is out of reach


FINISHED_MESSAGE = "pacekeeper: the ranks have finished"
"""Line of a trainer's termination message. Exit code 0 alone proves nothing: behind a pipe it is another command's."""

EXITED_PROCESS_STATES = ("Z", "X", "")
"""State letters of a process that has exited."""

DEBUGGER_WAIT = "a debugger"
"""In `RankState.waits_for`: somebody looks into the rank, for as long as that takes."""


@dataclass(frozen=True)
class RankState:
    """What a rank was doing when its worker's ranks stalled."""

    rank: Count
    phase: Annotated[str, OneOf(frozenset(phase.name for phase in Phase))]
    phase_seconds: Seconds
    step: Position
    collective: Annotated[str, OneOf(frozenset(collective.name for collective in Collective))]
    """NONE: the rank is outside of collectives."""
    group: Count
    sequence: Position  # of the last collective entered in the group
    collectives_entered: Count  # in this round, over all groups: the lowest of the job was left behind
    waiting_seconds: Seconds  # since it entered the collective, or since its last sign of progress
    process_state: Annotated[str, MaxLength(1)]  # letter of /proc/<pid>/stat: R, S, D, T (stopped), Z; "": gone
    moving: bool  # its stack changed between two looks, or its processor time, unless it may spin for its GPU
    stack: Annotated[str, Truncated(16_000)] = ""  # innermost call last; "" where it could not be taken
    overdue: bool = False  # it has shown no progress for longer than its phase may take
    device: Annotated[str, OneOf(frozenset(device.name for device in Device))] = Device.NONE.name
    # The oldest collective that its GPU has not completed; meaningful where `device` says SCHEDULED or STARTED.
    device_collective: Annotated[str, OneOf(frozenset(collective.name for collective in Collective))] = "NONE"
    device_group: Count = 0
    device_sequence: Count = 0
    peer: Position = -1  # global rank that it sends to or receives from; -1: neither, or whoever comes
    entered: Annotated[str, MaxLength(2_000)] = ""
    """How far it has come in each of its groups (`communicators.format_entered`); "": its library does not say."""
    ended: bool = False  # its process has exited with code 0
    waits_for: Annotated[str, Truncated(200)] = ""
    """What its process waits for that no rank gives: a child process, a file, a clock. "": nothing of the kind."""
    excused: bool = False  # it may wait for that still: `hangSeconds` have not passed

    def __post_init__(self) -> None:
        """Raises InputError where `entered` does not say it."""
        parse_entered(self.entered)


@dataclass(frozen=True)
class BlockedConnection:
    """One end of a rank's connection that has something to send, and gets nothing through: the other end acknowledges
    nothing, although its window is open."""

    rank: Count  # that owns it
    remote: Annotated[str, MaxLength(64)]  # address:port
    seconds: Seconds  # for which nothing has been acknowledged, at least


@dataclass(frozen=True)
class FaultReport:
    """One thing that a worker noticed, sent until the operator has acknowledged it. `name` is unique in the job."""

    name: Name
    kind: FaultKind
    worker: Name
    round: Count
    noticed_at: Seconds
    membership: Count = 0
    rank: Position = -1  # that failed; -1: concerns the worker
    exit_code: Annotated[int, Within(-1024, 2**31)] = 0  # negative: the signal
    out_of_memory: bool = False  # the cgroup's oom_kill counter rose
    completed_step: bool = False  # whether the rank had completed a step in this round
    step: Position = -1
    ended_peer: Position = -1  # rank that had exited with code 0, which this one waited for; -1: none
    error: Annotated[str, Truncated(8_000)] = ""  # the script's last lines
    ranks: Annotated[tuple[RankState, ...], MaxLength(MAX_WORKER_RANKS)] = ()  # of a stall
    unreachable: Annotated[tuple[Name, ...], MaxLength(64)] = ()  # neighbours that did not answer, of a stall
    missing: Annotated[tuple[Name, ...], MaxLength(64)] = ()  # workers that did not come, of a round that could not start
    communicators: Groups = ()  # that `ranks` speak of, of a stall
    blocked: Annotated[tuple[BlockedConnection, ...], MaxLength(64)] = ()  # the longest first, of a stall
    # Of a stall, for people; "": nothing is known.
    ras: MessageText = ""  # what NCCL's own watch (RAS) says of the communicators
    transfers: MessageText = ""  # what running transfers over NCCL wait for
    xid: Count = 0
    sent_at: Seconds = 0.0  # by the same clock as `noticed_at`, which tells how far it is off; 0: not said

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        check_communicators_size(data)
        return read_dataclass(cls, data)


@dataclass(frozen=True)
class RankWindow:
    """A rank's last steps, one number a step (seconds), oldest first; the lists by step are equally long."""

    rank: Count
    steps: Annotated[tuple[Count, ...], MaxLength(MAX_WINDOW_STEPS)]
    step_seconds: StepSeries
    compute_seconds: StepSeries  # own work, without the waits for peers
    samples: Annotated[tuple[Samples, ...], MaxLength(MAX_WINDOW_STEPS)]
    garbage_seconds: StepSeries = ()  # of each step; (): not recorded
    lengths: StepSeries = ()  # of each step's samples, in sum (tokens, say); (): not known
    squares: StepSeries = ()  # of these lengths, in sum; (): only the sums of the lengths are known
    sync_mode: Mode = ""  # a plan.SyncMode, in force during the whole window
    transfers: StepSeries = ()  # of the last synchronisations in Local-SGD modes: seconds that they held it up
    baseline_seconds: Seconds = 0.0  # median time of the job's first steady steps as seen here; 0: not known
    baseline_own_seconds: Seconds = 0.0  # median own work in these steps; 0: not known
    share_grain: Annotated[int, Within(1, 2**31)] = 1  # samples that a rank's share is a multiple of (static shapes)

    def __post_init__(self) -> None:
        """Raises InputError where the lists by step differ in length."""
        for name in ("step_seconds", "compute_seconds", "samples"):
            self._check_length(name)
        for name in ("garbage_seconds", "lengths", "squares"):
            if getattr(self, name):
                self._check_length(name)

    def _check_length(self, name: str) -> None:
        found = len(getattr(self, name))
        if found != len(self.steps):
            raise InputError(f"RankWindow.{name}: {found} numbers for {len(self.steps)} steps; give one a step")


@dataclass(frozen=True)
class RankOperations:
    """The collectives of a rank's last whole steps."""

    rank: Count
    operations: Annotated[str, MaxLength(MAX_OPERATIONS_CHARACTERS)]  # as `operations.encode` writes them

    def __post_init__(self) -> None:
        """Raises InputError where `operations` are none."""
        decode_operations(self.operations)


@dataclass(frozen=True)
class LinkWindow:
    """One end of a connection during one window of some seconds, by the kernel's own counters (TCP_INFO)."""

    local: Annotated[str, MaxLength(64)]  # address:port
    remote: Annotated[str, MaxLength(64)]
    rank: Position = -1  # that owns it; -1: not a rank's, or not known
    age: Count = 0  # windows ago: 0 is the newest
    seconds: Seconds = 0.0  # that the window took
    acked_bytes: Count = 0  # sent and acknowledged in it
    busy_seconds: Seconds = 0.0  # with something to send or unacknowledged
    receiver_limited_seconds: Seconds = 0.0  # of these, held up by the receiver's window
    sender_limited_seconds: Seconds = 0.0  # … by the sender's buffer
    retransmitted_bytes: Count = 0
    unsent_bytes: Count = 0  # waiting at its end
    least_round_trip_seconds: Seconds = 0.0
    early_bytes: Count = 0  # acknowledged in a fast one of the connection's first windows; 0: not known
    early_busy_seconds: Seconds = 0.0  # in it


@dataclass(frozen=True)
class FlowWindow:
    """What a rank has exchanged with one peer of a communicator in one window of some seconds, by NCCL's own word."""

    communicator: Annotated[int, Within(0, 2**64 - 1)]  # NCCL's id, the same on all its ranks
    place: Count  # of the rank in the communicator
    peer: Count  # the other one's place
    rank: Count
    age: Count = 0  # windows ago: 0 is the newest
    sent_bytes: Count = 0
    network_seconds: Seconds = 0.0  # in which they were under way, summed over channels


@dataclass(frozen=True)
class LinkProbe:
    """What a launcher measured towards another one, on the operator's request."""

    target: Name  # worker
    bytes_per_second: Seconds = 0.0  # of the fastest transfer; 0: none came through
    ping_seconds: Seconds = 0.0  # median; 0: none was answered
    pings_lost: Count = 0
    failed: MessageText = ""  # why it could not be measured; "": it was


@dataclass(frozen=True)
class Evidence:
    """What a sidecar answers to a request: summarised (kilobytes, not traces), and as much of it as was asked for."""

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
        """Of links and flows, which may be thousands, what is as usual is left out."""
        short = {"links": _to_plain_json(self.links), "flows": _to_plain_json(self.flows)}
        return {**asdict(replace(self, links=(), flows=())), **short}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field. A window that is not sound costs itself only: it is left out."""
        if not isinstance(data, Mapping):
            return read_dataclass(cls, data)
        check_communicators_size(data)
        windows = read_tuple(_read_rank_window, data.get("windows", ()), "Evidence.windows", MAX_WORKER_RANKS)
        told = read_dataclass(cls, {**data, "windows": ()})
        return replace(told, windows=tuple(window for window in windows if window is not None))


def _drop_defaults(record: Any) -> dict[str, Any]:
    """What is not as it is where nothing is said, of a dataclass and of those in its tuples."""
    usual = _get_field_defaults(type(record))  # type: ignore[arg-type]  # mypy takes a class's hash for that of its instances
    return {name: _to_plain_json(value) for name, value in vars(record).items() if value != usual[name]}


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain_json(each) for each in value]
    return _drop_defaults(value) if is_dataclass(value) else value


@cache
def _get_field_defaults(cls: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(cls)}


def _read_rank_window(window: object, path: str) -> RankWindow | None:
    try:
        return read_dataclass(RankWindow, window, path)
    except InputError:
        return None

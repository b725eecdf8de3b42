"""What workers tell the operator: their present state with each poll, faults, and the evidence they are asked for.

Times called `…_at` are seconds since the epoch by the worker's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self, TypeVar

from .errors import InputError


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
class Heartbeat:
    """A worker's present state; the launcher writes it, the sidecar sends it with each poll of the plan."""

    worker: str = ""
    state: LauncherState = LauncherState.STARTING
    plan_version: int = 0  # that the launcher follows
    membership: int = 0
    round: int = 0  # last round started or agreed; 0: none
    restarts: int = 0  # rounds that the launchers started by themselves in this membership
    step: int = -1  # last completed optimizer step of its slowest rank; -1: none
    steps_in_round: int = 0
    checkpoint_step: int = -1
    snapshot_step: int = -1
    restored_step: int = -1  # that the round started from
    checkpoint_request: int = 0  # last one answered
    global_batch: int = 0
    round_started_at: float = 0.0
    first_step_at: float = 0.0  # end of the first optimizer step of the round; 0: none yet
    steered: bool = False  # the script uses the library (it can follow shares and modes), not only pacekeeper.auto
    sync_mode: str = ""  # a plan.SyncMode, the one in force on this worker's ranks; "": not steered, or not known yet
    refused: str = ""  # why the ranks do not follow the newest plan, in words for people; "": they do
    bad_loss_rank: int = -1  # a rank here whose loss is not finite; -1: none
    bad_loss_step: int = -1  # first step of this round in which that was so
    sent_at: float = 0.0  # by the same clock as the other times, which tells how far it is off; 0: not said

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return _read(cls, data, {"state": LauncherState})


class FaultKind(StrEnum):
    """What a worker has noticed."""

    RANK_FAILED = "RankFailed"  # a rank ended with an exit code or a signal
    STALLED = "Stalled"  # the worker's ranks make no progress; sent by every worker of the job, guilty or not
    TERMINATING = "Terminating"  # the pod was told to end (drain, eviction, preemption)
    GPU_ERROR = "GpuError"  # NVML's events
    ROUND_FAILED = "RoundFailed"  # a round could not be started: not all launchers came, or the store is out of reach


@dataclass(frozen=True)
class RankState:
    """What a rank was doing when its worker's ranks stalled."""

    rank: int
    phase: str  # a records.Phase by name
    phase_seconds: float
    step: int
    collective: str  # a records.Collective by name; NONE: the rank is outside of collectives
    group: int
    sequence: int  # of the last collective entered in the group
    collectives_entered: int  # in this round, over all groups: the lowest of the job was left behind
    waiting_seconds: float  # since it entered the collective, or since its last sign of progress
    process_state: str  # letter of /proc/<pid>/stat: R, S, D, T (stopped), Z; "": gone
    moving: bool  # its stack or its processor time changed between two looks
    stack: str = ""  # innermost call last; "" where it could not be taken


@dataclass(frozen=True)
class Fault:
    """One thing that a worker noticed, sent until the operator has acknowledged it. `name` is unique in the job."""

    name: str
    kind: FaultKind
    worker: str
    round: int
    noticed_at: float
    membership: int = 0
    rank: int = -1  # that failed; -1: concerns the worker
    exit_code: int = 0  # negative: the signal
    out_of_memory: bool = False  # the cgroup's oom_kill counter rose
    completed_step: bool = False  # whether the rank had completed a step in this round
    step: int = -1
    error: str = ""  # the script's last lines
    ranks: tuple[RankState, ...] = ()  # of a stall
    unreachable: tuple[str, ...] = ()  # neighbours that did not answer, of a stall
    xid: int = 0
    sent_at: float = 0.0  # by the same clock as `noticed_at`, which tells how far it is off; 0: not said

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        ranks = tuple(_read(RankState, item, {}) for item in data.get("ranks", ()))
        return _read(cls, {**data, "ranks": ranks}, {"kind": FaultKind, "unreachable": tuple})


@dataclass(frozen=True)
class RankWindow:
    """A rank's last steps, one number a step (seconds), oldest first; the lists by step are equally long."""

    rank: int
    steps: tuple[int, ...]
    step_seconds: tuple[float, ...]
    compute_seconds: tuple[float, ...]  # own work, without the waits for peers
    samples: tuple[int, ...]
    garbage_seconds: tuple[float, ...] = ()  # of each step; (): not recorded
    lengths: tuple[float, ...] = ()  # of each step's samples, in sum (tokens, say); (): not known
    squares: tuple[float, ...] = ()  # of these lengths, in sum; (): only the sums of the lengths are known
    sync_mode: str = ""  # a plan.SyncMode, in force during the whole window
    transfers: tuple[float, ...] = ()  # of the last synchronisations in Local-SGD modes: seconds that they held it up
    baseline_seconds: float = 0.0  # median time of the job's first steady steps as seen here; 0: not known
    baseline_own_seconds: float = 0.0  # median own work in these steps; 0: not known


@dataclass(frozen=True)
class Evidence:
    """What a sidecar answers to an evidence request: windows of its ranks, summarised (kilobytes, not traces)."""

    request: str
    worker: str
    round: int
    windows: tuple[RankWindow, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        by_step = ("steps", "step_seconds", "compute_seconds", "samples", "garbage_seconds", "lengths", "squares")
        sequences = dict.fromkeys((*by_step, "transfers"), tuple)
        windows = tuple(_read(RankWindow, item, sequences) for item in data.get("windows", ()))
        return _read(cls, {**data, "windows": windows}, {})


Report = TypeVar("Report")


def _read(cls: type[Report], data: Mapping[str, Any], converters: Mapping[str, Any]) -> Report:
    """An instance of the dataclass `cls`; fields that it does not know are left out, so that versions may differ."""
    names = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # every caller passes a dataclass
    try:
        return cls(**{name: converters.get(name, _same)(value) for name, value in data.items() if name in names})
    except (TypeError, ValueError) as error:
        raise InputError(f"not a {cls.__name__}: {error}; do sidecar and operator have the same version?") from error


def _same(value: Any) -> Any:
    return value

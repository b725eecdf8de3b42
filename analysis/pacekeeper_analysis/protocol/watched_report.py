"""What the sidecar of a watched container reports of its ranks, which no launcher of Pacekeeper has started.

It is a part of the heartbeat. The container is not trusted: each value is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from ..errors import InputError
from .decoding import MaxLength, Truncated, Within

MAX_WATCHED_RANKS = 64
"""Upper limit of ranks of one watched container."""
MAX_WATCHED_WORLD_SIZE = 1 << 17
"""Upper limit of ranks of a watched job."""

MAX_VERSION_CHARACTERS = 64
MAX_REPORTED_STEPS, MAX_REPORTED_SECONDS = 1 << 53, 1 << 40
"""Upper limits of what a script reports of its progress."""

_Version = Annotated[str, MaxLength(MAX_VERSION_CHARACTERS)]


class RecordingLevel(StrEnum):
    """What is recorded in a rank, from the most to the least."""

    NATIVE = "Native"  # steps, own work, and waits, by the C recorder
    PURE = "Pure"  # the same in Python
    STEPS_ONLY = "StepsOnly"  # steps only: own work and waits cannot be told apart


@dataclass(frozen=True)
class ReportedRank:
    """A rank of a watched container, as its own process describes it."""

    rank: Annotated[int, Within(0, MAX_WATCHED_WORLD_SIZE - 1)]
    world_size: Annotated[int, Within(1, MAX_WATCHED_WORLD_SIZE)]
    pid: Annotated[int, Within(0, 2**31)]
    started_at: Annotated[float, Within(0, 1e12)]
    """Start of its process, seconds since the epoch by the container's clock."""
    recording: RecordingLevel = RecordingLevel.STEPS_ONLY
    rendezvous: Annotated[str, MaxLength(253)] = ""  # host:port; "": not known
    run_id: Annotated[str, MaxLength(253)] = ""
    resumed_from: Annotated[int, Within(0, 2**53)] | None = None  # step; None: not known
    python: _Version = ""
    torch: _Version = ""
    broken: Annotated[str, Truncated(500)] = ""  # why the library has disabled itself; "": it has not

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise InputError(f"watched.ranks: rank {self.rank} must be below the world size, {self.world_size}")


@dataclass(frozen=True)
class StepSums:
    """The steps of a rank's process that were measured so far, summed. The first step of a round is not measured."""

    rank: Annotated[int, Within(0, MAX_WATCHED_WORLD_SIZE - 1)]
    last_step: Annotated[int, Within(0, 2**53)]  # number of the newest one
    steps: Annotated[int, Within(1, 2**53)]
    step_seconds: Annotated[float, Within(0, 1e12)]
    own_seconds: Annotated[float, Within(0, 1e12)]  # own work in them, without waits for peers


@dataclass(frozen=True)
class WatchedReport:
    """All ranks of a watched container. (): it has none (yet)."""

    ranks: Annotated[tuple[ReportedRank, ...], MaxLength(MAX_WATCHED_RANKS)] = ()
    sums: Annotated[tuple[StepSums, ...], MaxLength(MAX_WATCHED_RANKS)] = ()  # (): no step is measured, or older sender

    def __post_init__(self) -> None:
        for name, records in (("ranks", self.ranks), ("sums", self.sums)):
            if len({record.rank for record in records}) < len(records):
                raise InputError(f"watched.{name}: describe each rank once")
        if len({rank.world_size for rank in self.ranks}) > 1:
            raise InputError("watched.ranks: all ranks of a container must have the same world size")


@dataclass(frozen=True)
class ReportedProgress:
    """What the script itself reports of its progress. None: not reported."""

    percent: Annotated[int, Within(0, 100)] | None = None
    total_steps: Annotated[int, Within(0, MAX_REPORTED_STEPS)] | None = None
    remaining_seconds: Annotated[int, Within(0, MAX_REPORTED_SECONDS)] | None = None

"""Training that adapts: what holds a job back, and which ways to train would win what.

    found = diagnose(windows, threshold)                 # of a job in mode Sync: its trouble and S
    for way in ways(found, threshold=threshold): ...     # best first: each priced, none applied
    plan = way.applied_to(plan)
    way_back(windows, threshold=threshold, trouble=…)    # of a job in a Local-SGD mode: back to Sync?

Everything is pure: windows in, proposals out. `price.choose` takes `way.option()` beside the dearer remedies, and a
`Hysteresis` says when the mode may change again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .diagnose.straggler import Window
from .plan import Plan, SyncMode
from .price import Option
from .reports import RankWindow


class Trouble(StrEnum):
    """Why the steps of a synchronous job take longer than they need."""

    NONE = "None"
    COMPUTE = "Compute"  # some rank is persistently slow in its own work
    VOLATILE = "Volatile"  # slow ranks come and go
    COMMUNICATION = "Communication"  # steps outlast the ranks' own work by more than in the job's first steady steps
    GARBAGE = "Garbage"  # garbage collections of different ranks fall into different steps, and all wait for each
    LENGTHS = "Lengths"  # cost follows the samples (sequence lengths), which are dealt unevenly


@dataclass(frozen=True)
class Diagnosis:
    """The trouble that costs a synchronous job most, judged from its ranks' windows."""

    trouble: Trouble
    slowdown: float  # S: expected step time over that without this trouble
    culprits: tuple[int, ...]  # ranks; empty where the trouble is not of single ranks
    evidence: tuple[str, ...]  # sentences for people
    step_seconds: float  # expected of a step as things are
    exposed_seconds: float  # of them: communication that no computation hides
    rank_slowdown: tuple[float, ...]  # each rank's cost at equal shares over its peers' median
    effects: Mapping[Trouble, float]  # S of every trouble, each by itself
    window: Window = field(repr=False, compare=False)  # the common steps that were judged


@dataclass(frozen=True)
class Way:
    """A way to train from now on, and what it is expected to win.

    `shares`, `sync_every`, `sync_seconds` and `garbage_every` are the plan's fields; None: as the plan has it.
    """

    mode: SyncMode
    step_seconds: float  # expected for one step's worth of samples of the whole job
    slowdown_after: float  # over the same reference as Diagnosis.slowdown; may be below 1 (noise is won, too)
    reason: str
    shares: tuple[int, ...] | None = None
    sync_every: int | None = None
    sync_seconds: float | None = None
    garbage_every: int | None = None
    refused: str = ""  # why it cannot be taken by a plan; "": it can

    @property
    def remedy(self) -> str:
        """`Rebalance`, `LocalSGD`, `PlanGarbage`, `BalanceLengths` (only ever advised), or `Sync` (the way back)."""
        raise NotImplementedError

    def option(self, refused: str = "") -> Option:
        """For `price.choose`: a free live change. refused: a further reason why it may not be taken."""
        raise NotImplementedError

    def applied_to(self, plan: Plan) -> Plan:
        """The plan's next version, with this way to train."""
        raise NotImplementedError


def diagnose(windows: Sequence[RankWindow], threshold: float) -> Diagnosis | None:
    """What costs the synchronous job most.

    `Trouble.NONE` where no trouble has an S of `threshold` or more. None where the windows cannot tell: ranks are
    missing, fewer than 8 common steps since shares last changed, or a Local-SGD mode is in force.
    """
    raise NotImplementedError


def ways(
    diagnosis: Diagnosis, *, threshold: float, smallest_share: int = 1, largest_share: int | None = None
) -> tuple[Way, ...]:
    """The ways to train that fit the trouble, priced: those that can be taken first, the one to prefer at the head.

    Exact synchronous SGD (other shares, planned garbage collection) comes before Local-SGD where it leaves a slowdown
    below `threshold` or mends nearly as well. Where there is no trouble: shares, if they are uneven and no longer fit.
    largest_share: samples a rank's memory has room for.
    """
    raise NotImplementedError


def way_back(
    windows: Sequence[RankWindow], *, threshold: float, trouble: Trouble = Trouble.NONE, global_batch: int = 0
) -> Way | None:
    """Synchronous SGD again, where the trouble that led to a Local-SGD mode is over; None: stay.

    windows: of all ranks, in a Local-SGD mode (they have no steps in common). trouble: that led here; it has to fall
    below half of the threshold's excess (1.05 for 1.1), any other only below the threshold; NONE: every one below
    half. global_batch: samples of a synchronous step; 0: one local batch of each rank.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class Hysteresis:
    """When the mode may change again: each change soon after the one before doubles the wait, up to `longest`.

    Plain numbers, to be kept with the job; times are seconds of any one clock.
    """

    first: float = 60.0
    longest: float = 3600.0
    hold_seconds: float = 0.0  # after the last change; 0: there was none
    changed_at: float = 0.0

    def allows(self, now: float) -> bool:
        raise NotImplementedError

    def changed(self, now: float) -> Hysteresis:
        """After a change of mode at `now`."""
        raise NotImplementedError

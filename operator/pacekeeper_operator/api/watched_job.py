"""WatchedJob: a training job that Pacekeeper did not create, as it is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pacekeeper_analysis.accounting.gpu_account import GpuAccount, Loss, Tally
from pacekeeper_analysis.protocol.watched_report import RecordingLevel

from .codec import from_json, to_json, to_patch
from .conditions import CONDITION_TIMES, ConditionStatus
from .formats import format_time, parse_time, round_for_json


class WatchedJobPhase(StrEnum):
    """How much of the job is observed."""

    WATCHED = "Watched"  # all ranks
    PARTLY_WATCHED = "PartlyWatched"
    UNWATCHED = "Unwatched"  # no rank reports
    ENDED = "Ended"  # no pod runs any more


class WatchedJobCondition(StrEnum):
    """Types of a WatchedJob's conditions."""

    COVERED = "Covered"  # every rank of the world size has described itself, and new pods are watched
    REPORTING = "Reporting"  # the sidecars of all pods reach the operator
    RECORDING = "Recording"  # own work is recorded, so that slow ranks can be told
    BROKEN = "Broken"  # the library in some rank has disabled itself; the message says why


class WatchedJobReason(StrEnum):
    """Reasons of a WatchedJob's conditions."""

    ENDED = "Ended"
    NO_PODS = "NoPods"  # between two attempts of its controller
    # Covered
    ALL_RANKS = "AllRanks"
    RANKS_MISSING = "RanksMissing"
    NO_RANKS = "NoRanks"
    INJECTION_IS_OFF = "InjectionIsOff"  # of any reasons, this one is given: a person has to act
    # Reporting
    ALL_PODS = "AllPods"
    PODS_SILENT = "PodsSilent"
    # Recording: or a `RecordingLevel`
    NOT_REPORTED = "NotReported"
    # Broken
    NOTHING_BROKEN = "NothingBroken"
    LIBRARY_DISABLED = "LibraryDisabled"


@dataclass(frozen=True)
class RootRef:
    """The outermost object that controls a job's pods."""

    kind: str
    name: str
    api_version: str = ""
    uid: str = ""  # "": the operator may not read the object


@dataclass(frozen=True)
class WatchedJobSpec:
    """The job. It is written once."""

    root: RootRef
    team: str | None = None  # None: its namespace names none

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Parse the spec. Raises InputError that names the field."""
        return from_json(cls, spec, "spec", {})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {})


@dataclass(frozen=True)
class WatchedRoundStatus:
    """One round of the job. Times are seconds since the epoch."""

    round: int
    began: float | None = None
    first_step: float | None = None
    resumed_from: int | None = None
    last_step: int | None = None
    ended: float | None = None
    cause: str | None = None


@dataclass(frozen=True)
class LostSeconds:
    """GPU seconds that were lost, by cause."""

    startup: float = 0.0
    hang: float = 0.0
    straggler: float = 0.0
    communication: float = 0.0
    repeated_steps: float = 0.0
    idle: float = 0.0

    @classmethod
    def from_tally(cls, tally: Tally) -> Self:
        return cls(**{loss.name.lower(): tally.lost.get(loss, 0.0) for loss in Loss})

    def to_tally(self, useful: float) -> Tally:
        return Tally(useful, {loss: seconds for loss in Loss if (seconds := getattr(self, loss.name.lower()))})


@dataclass(frozen=True)
class DayAccount:
    """The GPU seconds of one day, UTC."""

    day: str
    useful: float = 0.0
    lost: LostSeconds = LostSeconds()


@dataclass(frozen=True)
class NodeLoss:
    """GPU seconds lost on one day, UTC, to hangs and slow ranks, by the node of the rank that caused them."""

    node: str
    gpu_seconds: float
    day: str


@dataclass(frozen=True)
class PotentialSavings:
    """What remedies would have kept, by the prices that decide for TrainingJobs."""

    saved: float = 0.0  # GPU seconds
    incidents: int = 0  # for which a remedy would have paid


@dataclass(frozen=True)
class AccountStatus:
    """What the job's GPUs were used for, in GPU seconds, and up to where that is known."""

    gpu_seconds: float = 0.0
    goodput: float | None = None  # share of useful seconds; None: no GPU was held
    useful: float = 0.0
    lost: LostSeconds = LostSeconds()
    days: tuple[DayAccount, ...] = ()  # oldest first
    nodes: tuple[NodeLoss, ...] = ()  # the largest loss first
    until: float | None = None
    round: int = 0
    steps_in_round: int = 0
    highest_step: int = 0
    step: int = 0
    hung: bool = False
    gpus: int = 0

    @classmethod
    def from_account(cls, account: GpuAccount) -> Self:
        by_loss = sorted(account.nodes.items(), key=lambda item: (-item[1], item[0]))
        return cls(
            gpu_seconds=account.total.held,
            goodput=account.total.goodput,
            useful=account.total.useful,
            lost=LostSeconds.from_tally(account.total),
            days=tuple(
                DayAccount(day, tally.useful, LostSeconds.from_tally(tally))
                for day, tally in sorted(account.days.items())
            ),
            nodes=tuple(NodeLoss(node, seconds, day) for (day, node), seconds in by_loss),
            until=account.until,
            round=account.round,
            steps_in_round=account.steps_in_round,
            highest_step=account.highest_step,
            step=account.step,
            hung=account.hung,
            gpus=account.gpus,
        )

    def to_account(self) -> GpuAccount:
        return GpuAccount(
            total=self.lost.to_tally(self.useful),
            days={day.day: day.lost.to_tally(day.useful) for day in self.days},
            nodes={(loss.day, loss.node): loss.gpu_seconds for loss in self.nodes},
            until=self.until,
            round=self.round,
            steps_in_round=self.steps_in_round,
            highest_step=self.highest_step,
            step=self.step,
            hung=self.hung,
            gpus=self.gpus,
        )


_WATCHED_JOB_TIMES = ("began", "first_step", "ended", "until", *CONDITION_TIMES)
_ROUNDED_FIELDS = (
    "step_seconds",
    "slowdown",
    "gpu_seconds",
    "goodput",
    "useful",
    "saved",
    *(loss.name.lower() for loss in Loss),
)


@dataclass(frozen=True)
class WatchedJobStatus:
    """What is observed of the job. None: not known. `to_patch` returns a merge patch."""

    phase: WatchedJobPhase | None = None
    pods: str | None = None  # 4/4
    ranks: str | None = None  # 32/32
    torch: str | None = None
    python: str | None = None
    recording: RecordingLevel | None = None
    step: int | None = None
    step_seconds: float | None = None
    total_steps: int | None = None  # as the script reports it; None: it does not
    progress: str | None = None
    remaining: str | None = None  # a duration, rounded; None: unknown
    slowdown: float | None = None
    culprits: tuple[str, ...] = ()
    waiting: str | None = None
    rounds: tuple[WatchedRoundStatus, ...] = ()
    account: AccountStatus | None = None
    potential_savings: PotentialSavings | None = None
    conditions: tuple[ConditionStatus, ...] = ()

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        """Parse a status. Raises InputError that names the field."""
        return from_json(cls, status, "status", dict.fromkeys(_WATCHED_JOB_TIMES, parse_time))

    def to_patch(self) -> dict[str, Any]:
        return to_patch(
            self,
            {
                **dict.fromkeys(_WATCHED_JOB_TIMES, format_time),
                **dict.fromkeys(_ROUNDED_FIELDS, round_for_json),
            },
        )

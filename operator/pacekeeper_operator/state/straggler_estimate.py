"""What the estimator for stragglers knows of a job, next to the rules that decide (shadow mode).

It is kept in memory only. A new leader begins without it, and has it again after a few windows of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pacekeeper_analysis.estimator.estimator import StragglerEstimator
from pacekeeper_analysis.estimator.parameters import PROBABLE
from pacekeeper_analysis.estimator.proposal import Account, Proposal, TrainingSetup


class EstimatedFault(StrEnum):
    """What a probability is of. The values are label values of metrics."""

    SLOW_WORKER = "SlowWorker"  # the slowest one
    ROTATING_RANKS = "RotatingRanks"
    SLOW_LINK = "SlowLink"


@dataclass(frozen=True)
class FaultEstimate:
    """One fault, as far as it is known."""

    fault: EstimatedFault
    probability: float
    slowdown: float  # if there is one: of a rank's work, or of a step by its transfer
    since: float  # if there is one: seconds since the epoch
    rank: int | None = None  # the slowest one
    job_slowdown: float | None = None  # of the job's steps by it; None: it is improbable, or not known

    @property
    def sentence(self) -> str:
        """For people."""
        subject = self.fault if self.rank is None else f"{self.fault}, rank {self.rank}"
        return f"estimator (shadow): {subject} with P = {self.probability:.3f}, {self.slowdown:.2f} ×"


@dataclass(frozen=True)
class StragglerEstimate:
    """What the estimator would do now, and why."""

    faults: tuple[FaultEstimate, ...]
    proposals: tuple[Proposal, ...] = ()
    wants_steps: bool = False  # single steps would tell more than the means
    settled_request: str = ""  # the last evidence request that nothing more is expected of

    @property
    def sentences(self) -> tuple[str, ...]:
        """For an Incident: what is more probable than not."""
        return tuple(fault.sentence for fault in self.faults if fault.probability > PROBABLE)


@dataclass(frozen=True)
class EstimatorMemory:
    """The state of the estimator between passes."""

    membership: int
    round: int
    workers: tuple[str, ...]
    setup: TrainingSetup
    estimator: StragglerEstimator = field(repr=False)
    account: Account = field(default_factory=Account, repr=False)
    estimate: StragglerEstimate = field(default_factory=lambda: StragglerEstimate(()))
    request: str = ""  # the open evidence request; "": none
    request_since: float = 0.0  # when it was first seen

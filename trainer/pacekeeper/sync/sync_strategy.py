"""Interface of the training strategies, the parts that they use, and a period between sync points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from pacekeeper.data.loader import Loader
from pacekeeper.replication.replication import Replication
from pacekeeper_rank.recorder import Recorder

from .agreement import Agreement, AgreementResult
from .plan_reader import PlanReader
from .progress import Progress
from .state_saver import StateSaver
from .sync_decision import SyncDecision
from .training_config import SampleSource


@dataclass(frozen=True)
class SyncComponents:
    """Components of one rank's job that its training and the common work of all ranks use."""

    agreement: Agreement
    recorder: Recorder
    progress: Progress
    replication: Replication
    state_saver: StateSaver
    loader: Loader
    plan_reader: PlanReader
    is_leave_requested: Callable[[], bool]
    """Returns whether this rank was requested to leave."""
    on_settled: Callable[[], None]
    """Called when the job's samples change other than by a step of this rank."""


@dataclass
class Period:
    """What this rank has done between two sync points."""

    sample_source: SampleSource
    planned_steps: int | None = None
    """Number of steps, the same on all ranks; None: as many as the interval and the samples allow."""
    steps: int = 0
    samples: int = 0
    weight: float = 0.0
    """Weight of its replica's batches."""
    reaches_sync_point: bool = False
    """Whether a sync point follows."""
    out_of_samples: bool = False
    """Whether it follows because no sample is left for this rank."""
    decision: SyncDecision | None = None
    """Decision of the sync point at its end, once the ranks have reached it."""


class SyncStrategy(ABC):
    """What Sync and Local-SGD do differently, on one rank."""

    @property
    @abstractmethod
    def batch_group(self) -> dist.ProcessGroup | None:
        """CPU group of the ranks that share the batch which a gradient is averaged over; None: this rank alone."""

    @property
    @abstractmethod
    def steps_in_period(self) -> int:
        """Steps of a period, if samples are assigned by shares."""

    def end_step(self, period: Period) -> bool:
        """Handle the end of a step. Returns whether a sync point follows."""
        return period.planned_steps is not None and period.steps >= period.planned_steps

    @abstractmethod
    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        """Agree with the other ranks.

        When the job's progress is exact, call `decide`, and return its result. Collective.
        """

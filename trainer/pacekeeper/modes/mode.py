"""What the ways to train have in common: the parts that they work with, a period between ordinals, their interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from pacekeeper.data.loader import Loader
from pacekeeper.observe.recorder import Recorder
from pacekeeper.replication.replication import Replication

from .agreement import AgreementResult, Agreement
from .conclusion import SyncDecision
from .course import SampleSource
from .follower import PlanReader
from .progress import Progress
from .retention import StateSaver


@dataclass(frozen=True)
class SyncComponents:
    """Of one rank's job: what its training, and what all ranks do together, is made of."""

    agreement: Agreement
    recorder: Recorder
    progress: Progress
    replication: Replication
    state_saver: StateSaver
    loader: Loader
    plan_reader: PlanReader
    is_leave_requested: Callable[[], bool]
    """Whether this rank was."""
    on_settled: Callable[[], None]
    """Called when the job's samples have changed other than by a step of this rank."""


@dataclass
class Period:
    """From one ordinal to the next: what this rank has done in it."""

    sample_source: SampleSource
    planned_steps: int | None = None
    """Steps, the same number on all ranks; None: as many as the clock and the samples allow."""
    steps: int = 0
    samples: int = 0
    weight: float = 0.0
    """Of its replica's batches."""
    reaches_sync_point: bool = False
    """Whether an ordinal follows."""
    out_of_samples: bool = False
    """Whether that is so because no sample is left for this rank."""
    decision: SyncDecision | None = None
    """Of the ordinal at its end, once the ranks have met there."""


class SyncStrategy(ABC):
    """What Sync and Local-SGD do differently, on one rank."""

    @property
    @abstractmethod
    def batch_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the batch which a gradient is the mean over, for small talk; None: this one alone."""

    @property
    @abstractmethod
    def steps_in_period(self) -> int:
        """Where samples are dealt by shares."""

    def end_step(self, period: Period) -> bool:
        """A step has ended. Whether an ordinal follows."""
        return period.planned_steps is not None and period.steps >= period.planned_steps

    @abstractmethod
    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        """The ranks agree; when the job's progress is exact, `conclude` says what follows. Collective."""

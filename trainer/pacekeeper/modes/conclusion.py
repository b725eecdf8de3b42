"""What follows from what the ranks have agreed on at an ordinal. Pure: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from .agreement import AgreementResult
from .asking import DueQuery
from .course import SyncActions, SampleSource, select_sync_mode, choose_sample_source
from .progress import Progress


@dataclass(frozen=True)
class RoundLimits:
    """Of a round's training."""

    samples: int | None = None
    """Of the job, at which it ends; None: it has no end."""
    warmup_steps: int = 0
    """Of the job, in Sync whatever is wanted."""


@dataclass(frozen=True)
class SyncDecision:
    """Of an ordinal."""

    agreed: AgreementResult
    actions: SyncActions
    sample_source: SampleSource
    """Of the period that follows."""
    due_queries: frozenset[DueQuery] = frozenset()
    """What scripts have asked for and all ranks know of: each rank that asks for one of these here is told yes."""

    @property
    def needs_common_parameters(self) -> bool:
        """Whether the synchronisation is to be complete before any rank goes on."""
        return self.actions.has_any or bool(self.due_queries)


def decide_sync(
    agreed: AgreementResult,
    progress: Progress,
    current_source: SampleSource,
    limits: RoundLimits,
    *,
    checkpoint_due: bool,
    snapshot_due: bool,
    due_queries: frozenset[DueQuery] = frozenset(),
) -> SyncDecision:
    """
    progress: exact, after what was agreed. supplied: up to this ordinal.
    checkpoint_due, snapshot_due: by the steps since the last one.
    Leases that have ended before the clock are begun anew, whatever follows.
    due: what scripts have asked for. Where a rank came without a step it cannot ask, so nobody is told yes.
    """
    orders, tally, origin = agreed.directives, agreed.summed_report, progress.origin
    mode = select_sync_mode(orders.training_config.sync_mode, progress.step, limits.warmup_steps)
    limit = None if limits.samples is None else limits.samples - origin
    following = choose_sample_source(mode, progress.samples - origin, progress.global_batch, limit)
    finish = limits.samples is not None and progress.samples >= limits.samples
    duties = SyncActions(
        leave=tally.leaving > 0 or orders.suspend,
        finish=finish,
        checkpoint=orders.checkpoint_request > progress.answered_request or checkpoint_due,
        snapshot=snapshot_due,
        switch=not finish and (following != current_source or (current_source.is_leased and tally.out_of_samples > 0)),
    )
    return SyncDecision(agreed, duties, following, frozenset() if tally.out_of_samples else due_queries)

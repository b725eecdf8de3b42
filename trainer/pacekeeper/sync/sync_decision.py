"""The decision that follows from an agreement at a sync point. Pure: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from .agreement import AgreementResult
from .due_queries import DueQuery
from .progress import Progress
from .training_config import SampleSource, SyncActions, choose_sample_source, select_sync_mode


@dataclass(frozen=True)
class RoundLimits:
    """Limits of a round's training."""

    samples: int | None = None
    """Samples of the job at which training ends; None: it has no end."""
    warmup_steps: int = 0
    """First steps of the job, which run in Sync regardless of the requested mode."""


@dataclass(frozen=True)
class SyncDecision:
    """Decision of a sync point."""

    agreed: AgreementResult
    actions: SyncActions
    sample_source: SampleSource
    """Sample source of the period that follows."""
    due_queries: frozenset[DueQuery] = frozenset()
    """Due queries that all ranks have: `Step.due` returns True for them."""

    @property
    def needs_common_parameters(self) -> bool:
        """Whether the synchronization must be complete before any rank continues."""
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
    """Decide what happens at a sync point.

    `progress`: exact, including what was agreed. `current_source`: source of the period up to this sync point.
    `checkpoint_due`, `snapshot_due`: computed from the steps since the last one.
    `due_queries`: due queries of scripts. A rank that came without a step cannot ask, so the result then has none.

    Leases that end before the interval does are started again, regardless of the other actions.
    """
    directives, report, origin = agreed.directives, agreed.summed_report, progress.origin
    mode = select_sync_mode(directives.training_config.sync_mode, progress.step, limits.warmup_steps)
    limit = None if limits.samples is None else limits.samples - origin
    source = choose_sample_source(mode, progress.samples - origin, progress.global_batch, limit)
    finish = limits.samples is not None and progress.samples >= limits.samples
    actions = SyncActions(
        leave=report.leaving > 0 or directives.suspend,
        finish=finish,
        checkpoint=directives.checkpoint_request > progress.answered_request or checkpoint_due,
        snapshot=snapshot_due,
        switch=not finish and (source != current_source or (current_source.is_leased and report.out_of_samples > 0)),
    )
    return SyncDecision(agreed, actions, source, frozenset() if report.out_of_samples else due_queries)

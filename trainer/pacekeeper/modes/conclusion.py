"""What follows from what the ranks have agreed on at an ordinal. Pure: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from .agreement import Agreed
from .asking import Question
from .course import Duties, Supply, mode_from, supply
from .progress import Progress


@dataclass(frozen=True)
class Limits:
    """Of a round's training."""

    samples: int | None = None
    """Of the job, at which it ends; None: it has no end."""
    warmup_steps: int = 0
    """Of the job, in Sync whatever is wanted."""


@dataclass(frozen=True)
class Conclusion:
    """Of an ordinal."""

    agreed: Agreed
    duties: Duties
    supply: Supply
    """Of the period that follows."""
    due: frozenset[Question] = frozenset()
    """What scripts have asked for and all ranks know of: each rank that asks for one of these here is told yes."""

    @property
    def needs_common_parameters(self) -> bool:
        """Whether the synchronisation is to be complete before any rank goes on."""
        return self.duties.any or bool(self.due)


def conclude(
    agreed: Agreed,
    progress: Progress,
    supplied: Supply,
    limits: Limits,
    *,
    checkpoint_due: bool,
    snapshot_due: bool,
    due: frozenset[Question] = frozenset(),
) -> Conclusion:
    """
    progress: exact, after what was agreed. supplied: up to this ordinal.
    checkpoint_due, snapshot_due: by the steps since the last one.
    Leases that have ended before the clock are begun anew, whatever follows.
    due: what scripts have asked for. Where a rank came without a step it cannot ask, so nobody is told yes.
    """
    orders, tally, origin = agreed.orders, agreed.tally, progress.origin
    mode = mode_from(orders.course.sync_mode, progress.step, limits.warmup_steps)
    limit = None if limits.samples is None else limits.samples - origin
    following = supply(mode, progress.samples - origin, progress.global_batch, limit)
    finish = limits.samples is not None and progress.samples >= limits.samples
    duties = Duties(
        leave=tally.leaving > 0 or orders.suspend,
        finish=finish,
        checkpoint=orders.checkpoint_request > progress.answered or checkpoint_due,
        snapshot=snapshot_due,
        switch=not finish and (following != supplied or (supplied.leased and tally.done > 0)),
    )
    return Conclusion(agreed, duties, following, frozenset() if tally.done else due)

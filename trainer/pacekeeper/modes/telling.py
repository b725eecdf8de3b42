"""What a rank says at ordinals: its part of the sums, and on rank 0 the orders for all."""

from __future__ import annotations

from pacekeeper.observe.losses import Losses

from .agreement import Tally
from .asking import Questions
from .mode import Parts, Period
from .pace import Pace


class Telling:
    """Of one rank."""

    def __init__(self, parts: Parts, pace: Pace, losses: Losses, questions: Questions) -> None:
        self._parts = parts
        self._pace = pace
        self._losses = losses
        self._questions = questions

    def begin(self, period: Period, exposed_seconds: float = 0.0) -> None:
        """Begins the exchange. exposed_seconds: that a snapshot costs beside its own time."""
        parts = self._parts
        snapshot_every = 0
        if parts.agreement.rank == 0:
            snapshot_every = parts.retention.snapshot_interval(self._pace.step_seconds, exposed_seconds)
        orders = parts.plan.orders(parts.progress.course, snapshot_every)
        loss, weight = self._losses.hand_over(whole=period.supply.local)
        tally = Tally(
            leaving=int(parts.told_to_leave()),
            loss=loss,
            weight=weight,
            samples=period.samples,
            done=int(period.done),
            asking=int(bool(self._questions.to_tell)),
        )
        parts.agreement.issue(orders, tally)

"""What a rank says at ordinals: its part of the sums, and on rank 0 the orders for all."""

from __future__ import annotations

from pacekeeper.observe.losses import LossTracker

from .agreement import RankReport
from .asking import DueQueries
from .mode import SyncComponents, Period
from .pace import StepTimer


class ReportWriter:
    """Of one rank."""

    def __init__(self, components: SyncComponents, step_timer: StepTimer, losses: LossTracker, due_queries: DueQueries) -> None:
        self._components = components
        self._step_timer = step_timer
        self._losses = losses
        self._due_queries = due_queries

    def begin_exchange(self, period: Period, exposed_seconds: float = 0.0) -> None:
        """Begins the exchange. exposed_seconds: that a snapshot costs beside its own time."""
        parts = self._components
        snapshot_every = 0
        if parts.agreement.rank == 0:
            snapshot_every = parts.state_saver.choose_snapshot_interval(self._step_timer.step_seconds, exposed_seconds)
        orders = parts.plan_reader.read_directives(parts.progress.training_config, snapshot_every)
        loss, weight = self._losses.take_sums(whole=period.sample_source.is_local)
        tally = RankReport(
            leaving=int(parts.is_leave_requested()),
            loss=loss,
            weight=weight,
            samples=period.samples,
            out_of_samples=int(period.out_of_samples),
            querying=int(bool(self._due_queries.unreported)),
        )
        parts.agreement.issue(orders, tally)

"""What a rank contributes to an agreement: its report, and on rank 0 the directives for all ranks."""

from __future__ import annotations

from pacekeeper.observe.losses import LossTracker

from .agreement import RankReport
from .due_queries import DueQueries
from .step_timer import StepTimer
from .sync_strategy import Period, SyncComponents


class ReportWriter:
    """Writes the reports of one rank."""

    def __init__(
        self, components: SyncComponents, step_timer: StepTimer, losses: LossTracker, due_queries: DueQueries
    ) -> None:
        self._components = components
        self._step_timer = step_timer
        self._losses = losses
        self._due_queries = due_queries

    def begin_exchange(self, period: Period, exposed_seconds: float = 0.0) -> None:
        """Begin the exchange. `exposed_seconds`: cost of a snapshot in addition to its own time."""
        components = self._components
        snapshot_every = 0
        if components.agreement.rank == 0:
            snapshot_every = components.state_saver.choose_snapshot_interval(
                self._step_timer.step_seconds, exposed_seconds
            )
        directives = components.plan_reader.read_directives(components.progress.training_config, snapshot_every)
        loss, weight = self._losses.take_sums(wait=period.sample_source.is_local)
        report = RankReport(
            leaving=int(components.is_leave_requested()),
            loss=loss,
            weight=weight,
            samples=period.samples,
            out_of_samples=int(period.out_of_samples),
            querying=int(bool(self._due_queries.unreported)),
        )
        components.agreement.issue(directives, report)

"""Local-SGD (EDiT and AsyncEDiT): replicas train by themselves, and each synchronisation of theirs is an ordinal."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.data.tickets import Tickets
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import Phase

from .agreement import Agreed
from .conclusion import Conclusion
from .mode import Mode, Parts, Period
from .pace import Pace, SynchronisationTimes
from .telling import Telling


class LocalSGD(Mode):
    """The exchange is read at once: ranks wait for each other at synchronisations anyway."""

    def __init__(self, parts: Parts, telling: Telling, pace: Pace, replica: dist.ProcessGroup | None) -> None:
        """`replica`: for the small talk of the ranks that share this one's; None: it has one for itself."""
        self._parts = parts
        self._telling = telling
        self._pace = pace
        self._replica = replica
        self._synchronisations = SynchronisationTimes(parts.recorder, parts.replication)
        self._steps: Tickets | None = None
        """What steps are dealt from; None: nothing is leased, or this rank has called all together."""

    # From and to other ways to train

    def start(self) -> None:
        """The parameters are the common ones now."""
        self._parts.replication.start()

    def stop(self) -> None:
        """One state for all replicas. Collective."""
        with self._parts.recorder.during(Phase.CHECKPOINT):
            self._parts.replication.stop()
            self._parts.retention.equalise_others()

    def start_leases(self, limit: int | None) -> None:
        """`limit`: samples of the job, counted from its origin."""
        loader, progress, agreement = self._parts.loader, self._parts.progress, self._parts.agreement
        store, replica_size = torch_internals.default_store(), self._parts.replication.shape["shard"]
        tickets, promises = (Tickets(store, agreement.rank, replica_size) for _ in range(2))
        self._steps = promises if loader.leases_by_microbatch else tickets
        ahead = 0 if limit is None else limit + progress.origin - progress.samples
        loader.start_leases(tickets.take, None if limit is None else loader.used + ahead, promises.take)

    # Between two ordinals

    @property
    def batch_group(self) -> dist.ProcessGroup | None:
        return self._replica

    @property
    def steps_in_period(self) -> int:
        return self._parts.progress.course.sync_every

    def end_step(self, period: Period) -> bool:
        self._synchronisations.record(self._parts.progress.ordinal_step)
        if period.supply.leased:
            self._call_together()
            return self._pace.is_up(self._parts.progress.course.sync_seconds)
        return super().end_step(period)

    def _call_together(self) -> None:
        """Where somebody has to leave, or rank 0 has new orders: the ranks meet behind the steps that they are in, and
        not once the clock is up. Nobody finds samples for another one."""
        if self._steps is not None and (self._parts.told_to_leave() or self._is_ordered()):
            self._steps.close()
            self._steps = None

    def _is_ordered(self) -> bool:
        """What the ranks can do at an ordinal only, and is better done soon."""
        parts, progress = self._parts, self._parts.progress
        if parts.agreement.rank != 0:
            return False
        orders = parts.plan.orders(progress.course, snapshot_every=0)
        changes = orders.course.sync_mode is not progress.course.sync_mode
        return changes or orders.suspend or orders.checkpoint_request > progress.answered

    # Ordinals

    def meet(self, period: Period, conclude: Callable[[Agreed], Conclusion]) -> Conclusion:
        parts, progress = self._parts, self._parts.progress
        self._telling.begin(period, self._synchronisations.exposed_seconds)
        parts.replication.begin(period.steps, period.supply.mode is SyncMode.ASYNC_EDIT, period.weight)
        self._synchronisations.begun()
        agreed = parts.agreement.take()
        progress.settle(agreed.tally.samples)
        parts.settled()
        parts.recorder.step = progress.step + 1
        parts.recorder.ring.state.step = progress.step
        conclusion = conclude(agreed)
        unused = None
        if conclusion.duties.any:
            unused = [positions for its in parts.agreement.gather(parts.loader.unused()) for positions in its]
        if conclusion.needs_common_parameters:
            self._synchronisations.finish(progress.ordinal_step)
        parts.loader.meet(agreed.tally.samples, unused)
        return conclusion

"""What the ranks of a job do together: at ordinals, they agree, synchronise, switch modes, keep the state, leave.

Between two ordinals a rank trains as it would alone. `modes.py` has the decisions, from numbers that all ranks have
alike; here is what follows from them. At an ordinal the ranks *meet* (they agree on orders and on how far the job is,
and begin the synchronisation), *follow* what was agreed, and *open* the next interval.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.data.loader import Loader
from pacekeeper.data.tickets import Tickets
from pacekeeper.environment import LEFT_WHEN_TOLD
from pacekeeper.keep.retention import Retention
from pacekeeper.observe.garbage import PlannedCollection
from pacekeeper.observe.losses import Losses
from pacekeeper.observe.recorder import Recorder
from pacekeeper.replication.replication import Replication
from pacekeeper.step import Step
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import Kind, Phase

from .agreement import Agreed, Agreement, Tally, new_cpu_group
from .course import MODES, Duties, Supply, crossed, mode_from, supply
from .follower import PlanFollower
from .pace import Pace
from .progress import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolution:
    """What the ranks have agreed on at an ordinal, and what follows from it: the same on all of them."""

    agreed: Agreed
    duties: Duties
    supply: Supply


@dataclass
class Leg:
    """What this rank has done since the last ordinal."""

    planned: int | None = None
    """Steps, the same number on all ranks; None: as many as the clock and the samples allow."""
    steps: int = 0
    samples: int = 0
    weight: float = 0.0
    """Of its replica's batches."""
    ends: bool = False
    """Whether an ordinal follows."""
    done: bool = False
    """Whether that is so because no sample is left for this rank."""
    meeting: Resolution | None = None
    """At that ordinal, once it was held."""


class Ordinals:
    """One rank's part in what the ranks of a job do together. Implements `step.Peers`."""

    def __init__(
        self,
        *,
        rank: int,
        agreement: Agreement,
        plan: PlanFollower,
        recorder: Recorder,
        progress: Progress,
        replication: Replication,
        retention: Retention,
        loader: Loader,
        until: int | None,
        warmup_steps: int,
        told_to_leave: Callable[[], bool],
        settled: Callable[[], None],
    ) -> None:
        """
        until: the job's last step; None: there is none.
        warmup_steps: of the job, in Sync whatever is wanted.
        told_to_leave: whether this rank was.
        settled: called when the job's samples have changed other than by a step of this rank.
        """
        self.loss = math.nan
        """Mean loss over the newest interval that all ranks have reported; NaN: none was."""
        self.finished = False
        """Whether the last step is done."""
        self.stepping = False
        """Whether a step is under way that is not counted yet."""
        self._rank = rank
        self._agreement = agreement
        self._plan = plan
        self._recorder = recorder
        self._state = recorder.ring.state
        self._progress = progress
        self._replication = replication
        self._retention = retention
        self._loader = loader
        self._limit = None if until is None else progress.samples_at(until)
        self._warmup_steps = warmup_steps
        self._told_to_leave = told_to_leave
        self._settled = settled
        self._garbage = PlannedCollection()
        self._supply = Supply(SyncMode.SYNC)
        self._interval = Leg()
        self._step: Step | None = None
        self._last_microbatch = False
        """Whether the present step has come to it."""
        self._ordinal_step = self._asked_from = progress.step
        """Steps of the job at the last ordinal, and at the last one at which every rank could ask what is due."""
        self._losses = Losses(recorder)
        self._synchronising = False
        self._exposed_seconds = 0.0
        """What it took last to complete a synchronisation at once, with no forward pass to hide it."""
        self._replica = _replica_group(rank, replication, agreement)
        self._pace = Pace(agreement, self._replica)

    # The course of a round

    def open(self) -> None:
        """The ordinal before the first step: all ranks learn how the training goes on."""
        self._issue()
        self._follow(self._conclude(self._agreement.take()))

    def next_step(self) -> Step | None:
        """None: no sample is left for this rank up to the next ordinal, which it now comes to."""
        self._pace.begin_step()
        drawn = self._recorder.load(self._loader.next_step)
        if drawn is None:
            self._interval.ends = self._interval.done = True
            return None
        self._step = Step(self, self._progress.step + 1, *drawn)
        self.stepping, self._last_microbatch = True, False
        self._state.share = self._step.samples
        if self._supply.leased:
            self._pace.begin_decision(self._progress.course.sync_seconds)
        return self._step

    def complete_step(self) -> None:
        """The optimizer has stepped: from here on the rank knows whether an ordinal follows.

        The first call in a step counts.
        """
        if not self.stepping:
            return
        self.stepping = False
        step, interval, progress = self._step, self._interval, self._progress
        assert step is not None
        self._pace.end_step()
        progress.count_step(step.samples)
        self._loader.complete_step()
        interval.steps += 1
        interval.samples += step.samples
        interval.weight += step.batch_weight
        if interval.planned is None:
            interval.ends = self._pace.is_up(progress.course.sync_seconds)
        else:
            interval.ends = interval.steps >= interval.planned
        self._state.samples = progress.own_samples
        self._recorder.end_step(step.samples, lengths=step.lengths)
        self._record_synchronisation()

    def pass_boundary(self) -> None:
        """Between two steps: an ordinal, or nothing happens."""
        if self._step is not None:
            self._losses.take(self._step)
        if self._supply.local:
            if self._interval.ends:
                self._follow(self._meet())
        else:
            self._issue_in_time()
            agreed = self._agreement.take()
            self._progress.settle(self._progress.global_batch)
            self._follow(self._conclude(agreed))
        self._step = None

    def close(self) -> None:
        """After the last step: one state for all replicas."""
        if self._supply.local:
            self._back_to_sync()

    # What a step asks of its peers

    def synchronise_gradients(self, wanted: bool) -> None:
        self._last_microbatch = wanted
        self._replication.synchronise_gradients(wanted)

    def computing(self) -> None:
        if not self._supply.local:
            self._issue_in_time()

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        if not self._supply.local:
            if weight is None:
                return float(self._progress.global_batch)
            return self._start_sum(weight, self._agreement.group)
        mine = float(samples) if weight is None else weight
        return mine if self._replica is None else self._start_sum(mine, self._replica)

    def wait(self, work: dist.Work) -> None:
        self._agreement.wait(work)

    def due(self, step: Step, every: int) -> bool:
        if not self._supply.local:
            return crossed(self._asked_from, step.number, every)
        self._complete_without_optimizer()
        if not self._interval.ends:
            return False
        meeting = self._meet()
        if meeting.agreed.tally.done or not crossed(self._asked_from, self._progress.step, every):
            return False  # a rank that came without a step cannot ask: at the next ordinal, then
        self._finish_synchronisation()
        return True

    def checkpoint_if_due(self) -> None:
        if self._supply.local:
            self._complete_without_optimizer()
            if not self._interval.ends:
                return
            self._meet()
        if self._retention.checkpoint_due(self._ordinal_step, self._progress.step):
            self._retention.checkpoint()

    def _complete_without_optimizer(self) -> None:
        """Where a `GradScaler` leaves the optimizer's step out, as it may on one replica only: the ranks answer alike.

        Who asks before the last microbatch is too early, and gets no for an answer.
        """
        if self._last_microbatch:
            self.complete_step()

    # Ordinals

    def _meet(self) -> Resolution:
        """In Local-SGD modes; the first time that something at this ordinal asks for it. Collective."""
        interval = self._interval
        if interval.meeting is None:
            if self._step is not None:
                self._losses.take(self._step)
            self._issue()
            self._replication.begin(interval.steps, self._supply.mode is SyncMode.ASYNC_EDIT, interval.weight)
            self._synchronising = True
            agreed = self._agreement.take()
            self._progress.settle(agreed.tally.samples)
            self._settled()
            self._recorder.step = self._progress.step + 1
            self._state.step = self._progress.step
            interval.meeting = meeting = self._conclude(agreed)
            unused = None
            if meeting.duties.any:
                unused = [positions for its in self._agreement.gather(self._loader.unused()) for positions in its]
                self._finish_synchronisation()
            self._loader.meet(agreed.tally.samples, unused)
        return interval.meeting

    def _conclude(self, agreed: Agreed) -> Resolution:
        """What follows from what was agreed, now that the job's progress is exact."""
        progress, orders, origin = self._progress, agreed.orders, self._progress.origin
        mode = mode_from(orders.course.sync_mode, progress.step, self._warmup_steps)
        limit = None if self._limit is None else self._limit - origin
        following = supply(mode, progress.samples - origin, progress.global_batch, limit)
        finish = self._limit is not None and progress.samples >= self._limit
        request = orders.checkpoint_request > progress.answered
        duties = Duties(
            leave=agreed.tally.leaving > 0 or orders.suspend,
            finish=finish,
            checkpoint=request or self._retention.checkpoint_due(self._ordinal_step, progress.step),
            snapshot=crossed(self._ordinal_step, progress.step, orders.snapshot_every),
            switch=not finish and following != self._supply,
        )
        return Resolution(agreed, duties, following)

    def _follow(self, meeting: Resolution) -> None:
        """All ranks alike do what was agreed, and begin the next interval."""
        orders, tally, duties = meeting.agreed.orders, meeting.agreed.tally, meeting.duties
        self._state.plan_version = orders.plan_version
        if tally.weight > 0:
            self.loss = tally.loss / tally.weight
        if duties.leave:
            self._retention.leave(snapshot=orders.snapshot_every > 0)
            sys.exit(LEFT_WHEN_TOLD)
        if orders.checkpoint_request > self._progress.answered:
            self._retention.answer(orders.checkpoint_request)
        self.checkpoint_if_due()
        self._retention.settle()
        if duties.snapshot:
            self._retention.snapshot()
        self._ordinal_step = self._progress.step
        if not tally.done:
            self._asked_from = self._ordinal_step
        self.finished = duties.finish
        if not self.finished:
            self._open_interval(meeting)

    def _open_interval(self, meeting: Resolution) -> None:
        course, progress = meeting.agreed.orders.course, self._progress
        progress.course = course
        if meeting.agreed.orders.plan_version:  # without a plan, shares come from the checkpoint alone
            self._loader.set_shares(course.shares)
        self._loader.set_cost(course.cost)
        self._garbage.boundary(progress.step, course.garbage_every)
        if meeting.duties.switch:
            self._switch(meeting.supply)
        self._state.sync_mode = self._recorder.mode = MODES.index(self._supply.mode)
        self._interval = Leg(planned=self._planned_steps())
        self._pace.begin_interval()

    def _planned_steps(self) -> int | None:
        """Of the next interval, where ranks do equally many."""
        if self._supply.leased:
            return None
        progress = self._progress
        left = math.inf if self._limit is None else (self._limit - progress.samples) // progress.global_batch
        return int(min(progress.course.sync_every if self._supply.local else 1, left))

    # Switching

    def _switch(self, new: Supply) -> None:
        """Another mode, or another source of samples: with the common parameters, and nothing leased."""
        old, self._supply = self._supply, new
        if old.leased:
            self._loader.stop_leases()
        if old.local and not new.local:
            self._back_to_sync()
        elif new.local and not old.local:
            self._replication.start()
        if new.leased:
            self._start_leases(new.limit)
        if new.mode is not old.mode and self._rank == 0:
            _log.warning("%s from step %d on", new.mode, self._progress.step + 1)

    def _back_to_sync(self) -> None:
        with self._recorder.during(Phase.CHECKPOINT):
            self._replication.stop()
            self._retention.equalise_others()

    def _start_leases(self, limit: int | None) -> None:
        """`limit`: samples of the job, counted from its origin."""
        store = torch_internals.default_store()
        tickets, promises = (Tickets(store, self._rank, self._replication.shape["shard"]) for _ in range(2))
        ahead = 0 if limit is None else limit + self._progress.origin - self._progress.samples
        limit = None if limit is None else self._loader.used + ahead
        self._loader.start_leases(tickets.take, limit, promises.take)

    # Telling and recording

    def _issue_in_time(self) -> None:
        """In Sync: between the step's last forward pass and its backward pass. So the exchange is over when its result
        is wanted, and to begin it keeps no device waiting, since that has work by then."""
        if not self._agreement.issued:
            self._issue()

    def _issue(self) -> None:
        snapshot_every = 0
        if self._rank == 0:
            exposed = self._exposed_seconds if self._supply.local else 0.0
            snapshot_every = self._retention.snapshot_interval(self._pace.step_seconds, exposed)
        orders = self._plan.orders(self._progress.course, snapshot_every)
        loss, weight = self._losses.hand_over()
        tally = Tally(
            leaving=int(self._told_to_leave()),
            loss=loss,
            weight=weight,
            samples=self._interval.samples,
            done=int(self._interval.done),
        )
        self._agreement.issue(orders, tally)

    def _finish_synchronisation(self) -> None:
        if not self._synchronising:
            return
        began = time.monotonic()
        self._replication.finish()
        self._exposed_seconds = time.monotonic() - began
        self._record_synchronisation()

    def _record_synchronisation(self) -> None:
        """Once it is complete: by the forward pass of the step that was just made, or at once."""
        newest = self._replication.newest
        if not self._synchronising or not all(one.ended_ns for one in newest):
            return
        self._synchronising = False
        start, end = min(one.started_ns for one in newest), max(one.ended_ns for one in newest)
        waited = sum(one.waited_ns for one in newest) * 1e-9
        nbytes = sum(one.nbytes for one in newest)
        self._recorder.ring.write(
            Kind.SYNCHRONISATION, start, end, self._progress.ordinal_step, Phase.TRAIN, waited, nbytes=nbytes
        )

    def _start_sum(self, weight: float, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        total = torch.tensor([weight], dtype=torch.float64)
        return self._agreement.start_sum(total, group), total


def _replica_group(rank: int, replication: Replication, agreement: Agreement) -> dist.ProcessGroup | None:
    """For the small talk of the ranks that share a replica; None: this rank has one for itself. Collective."""
    size = replication.shape["shard"]
    if size == 1:
        return None
    first = rank - rank % size
    return agreement.group if replication.shape["sync"] == 1 else new_cpu_group("replica", range(first, first + size))

"""Pacekeeper, as any script uses it; the operator's part is played by a plan file that is there from the beginning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import pacekeeper as pk
from pacekeeper.observe.ring import create_ring
from pacekeeper.runtime import RuntimeFolder, write_json
from pacekeeper_analysis.plan import WorkerRole, SyncMode, WorkerPlan

from .run import AEDIT_LEASE, GLOBAL_BATCH, Outcome, Place, Run
from .workload import GPT, StepPacer, LossSnapshots, SourceCode, loss_sum, make_optimizer


def shares(run: Run, place: Place) -> Outcome:
    """Synchronous SGD with the run's shares."""
    return train(run, place, SyncMode.SYNC)


def edit(run: Run, place: Place) -> Outcome:
    return train(run, place, SyncMode.EDIT)


def aedit(run: Run, place: Place) -> Outcome:
    return train(run, place, SyncMode.ASYNC_EDIT)


def switches(run: Run, place: Place) -> Outcome:
    """Through all modes and back, live; a quarter of the run in each."""
    a_quarter = run.steps // 4
    return train(
        run,
        place,
        SyncMode.SYNC,
        {a_quarter: SyncMode.EDIT, 2 * a_quarter: SyncMode.ASYNC_EDIT, 3 * a_quarter: SyncMode.SYNC},
    )


def train(run: Run, place: Place, mode: SyncMode, changes: Mapping[int, SyncMode] = MappingProxyType({})) -> Outcome:
    """`changes`: the mode of the plan from the first step on that has this number or a higher one."""
    prepare_runtime(run, place, mode)
    due = sorted(changes.items(), reverse=True)
    modes: set[SyncMode] = set()
    pace, snapshots = StepPacer(run.costs(), place.rank, run.unit_seconds), LossSnapshots()
    data = SourceCode(run.samples, run.seed)
    job = pk.init(seed=run.seed)
    model = GPT(pace)
    replica = job.replicate(model, units=lambda gpt: gpt.blocks)
    inner = make_optimizer(model, run.learning_rate)
    optimizer = job.optimizer(inner, outer=pk.OuterSGD(), warmup_steps=run.warmup_steps)
    schedule = job.lr_lambda(inner, run.rate_left)
    microbatch = AEDIT_LEASE if mode is SyncMode.ASYNC_EDIT else GLOBAL_BATCH
    loader = job.dataloader(data, GLOBAL_BATCH, max_microbatch=microbatch, shuffle=False)
    periods = Periods(job, pace)
    for step in job.steps(loader, until=run.steps):
        periods.begin_step()
        modes.add(tuple(SyncMode)[job.recorder.ring.state.sync_mode])
        if due and step.number >= due[-1][0]:
            write_plan(run, place, due.pop()[1], version=2 + len(changes) - len(due))
        for positions, x, y in step.microbatches():
            pace.begin(positions.tolist())
            (loss_sum(replica, x, y) / step.total_weight).backward()
            pace.end()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.snapshot_every and step.due("snapshot", every=run.snapshot_every):
            snapshots.add_snapshot(pace.period, model)
    periods.end()
    if never := {mode, *changes.values()} - modes:
        raise RuntimeError(f"{', '.join(never)} was never in force")
    return Outcome(pace.diary, periods.weights, snapshots.losses(data) if place.rank == 0 else [])


class Periods:
    """Tells the diary which synchronisation comes next, and what this rank's data weighed in each."""

    def __init__(self, job: pk.Job, pace: StepPacer) -> None:
        self.weights: list[float] = []
        self._job, self._pacer = job, pace
        self._replication = job._replication
        self._synchronisations = 0
        self._began = False
        self._local = False

    def begin_step(self) -> None:
        if self._began:
            self.end()
        self._began, self._local = True, self._replication.is_local
        self._pacer.period = len(self.weights) + 1

    def end(self) -> None:
        """Between two steps: what came then, after a step that was made in Sync or by this rank alone?"""
        if not self._local:
            self.weights.append(len(self._pacer.diary[-1].samples) / GLOBAL_BATCH)
            return
        newest = self._replication.newest_synchronizations
        if newest and newest[0].number > self._synchronisations:
            without_this_rank = newest[0].number - self._synchronisations - 1  # it had no sample left
            self.weights += [*[0.0] * without_this_rank, float(newest[0].replica_weights[self._job.rank])]
            self._synchronisations = newest[0].number


def prepare_runtime(run: Run, place: Place, mode: SyncMode) -> None:
    """The runtime folder as a launcher would have made it: this rank's ring, and the plan, for rank 0 to read."""
    runtime = RuntimeFolder(place.folder).create()
    create_ring(runtime.ring(place.rank), place.rank, round_=1)
    write_plan(run, place, mode, version=1)
    os.environ.update(PACEKEEPER_RUNTIME=str(place.folder), PACEKEEPER_ROUND="1")


def write_plan(run: Run, place: Place, mode: SyncMode, version: int) -> None:
    plan = WorkerPlan(
        version=version,
        role=WorkerRole.MEMBER,
        sync_mode=mode,
        sync_every=run.sync_every,
        sync_seconds=run.sync_seconds or 1.0,
        shares=run.shares,
    )
    if place.rank == 0:
        write_json(RuntimeFolder(place.folder).plan, plan.to_json())

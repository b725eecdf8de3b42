"""Pacekeeper, as any script uses it; the operator's part is played by a plan file that is there from the beginning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import pacekeeper as pk
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from pacekeeper_rank.record_ring import create_ring

from .run import AEDIT_LEASE, GLOBAL_BATCH, Outcome, Place, Run
from .workload import GPT, LossSnapshots, SourceCode, StepPacer, compute_loss_sum, make_optimizer


def train_shares(run: Run, place: Place) -> Outcome:
    """Synchronous SGD with the run's shares."""
    return train_in_mode(run, place, SyncMode.SYNC)


def train_edit(run: Run, place: Place) -> Outcome:
    return train_in_mode(run, place, SyncMode.EDIT)


def train_aedit(run: Run, place: Place) -> Outcome:
    return train_in_mode(run, place, SyncMode.ASYNC_EDIT)


def train_switching(run: Run, place: Place) -> Outcome:
    """Through all modes and back, live; a quarter of the run in each."""
    quarter = run.steps // 4
    return train_in_mode(
        run,
        place,
        SyncMode.SYNC,
        {quarter: SyncMode.EDIT, 2 * quarter: SyncMode.ASYNC_EDIT, 3 * quarter: SyncMode.SYNC},
    )


def train_in_mode(
    run: Run, place: Place, mode: SyncMode, changes: Mapping[int, SyncMode] = MappingProxyType({})
) -> Outcome:
    """`changes`: the mode of the plan from the first step on that has this number or a higher one."""
    prepare_runtime(run, place, mode)
    pending_changes = sorted(changes.items(), reverse=True)
    modes: set[SyncMode] = set()
    pacer, snapshots = StepPacer(run.draw_costs(), place.rank, run.unit_seconds), LossSnapshots()
    data = SourceCode(run.samples, run.seed)
    job = pk.init(seed=run.seed)
    model = GPT(pacer)
    replica = job.replicate(model, units=lambda gpt: gpt.blocks)
    inner = make_optimizer(model, run.learning_rate)
    optimizer = job.optimizer(inner, outer=pk.OuterSGD(), warmup_steps=run.warmup_steps)
    schedule = job.lr_lambda(inner, run.compute_rate_factor)
    microbatch = AEDIT_LEASE if mode is SyncMode.ASYNC_EDIT else GLOBAL_BATCH
    loader = job.dataloader(data, GLOBAL_BATCH, max_microbatch=microbatch, shuffle=False)
    periods = Periods(job, pacer)
    for step in job.steps(loader, until=run.steps):
        periods.begin_step()
        modes.add(tuple(SyncMode)[job.recorder.ring.state.sync_mode])
        if pending_changes and step.number >= pending_changes[-1][0]:
            write_plan(run, place, pending_changes.pop()[1], version=2 + len(changes) - len(pending_changes))
        for positions, x, y in step.microbatches():
            pacer.begin(positions.tolist())
            (compute_loss_sum(replica, x, y) / step.total_weight).backward()
            pacer.end()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.snapshot_every and step.due("snapshot", every=run.snapshot_every):
            snapshots.add_snapshot(pacer.period, model)
    periods.end()
    if missing_modes := {mode, *changes.values()} - modes:
        raise RuntimeError(f"{', '.join(missing_modes)} was never in force")
    return Outcome(pacer.diary, periods.weights, snapshots.losses(data) if place.rank == 0 else [])


class Periods:
    """Writes into the diary which synchronization comes next, and what this rank's data weighed in each."""

    def __init__(self, job: pk.Job, pacer: StepPacer) -> None:
        self.weights: list[float] = []
        self._job, self._pacer = job, pacer
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
        """Between two steps: what came then, after a step that was made in Sync or by this rank only?"""
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

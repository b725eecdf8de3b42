"""Invariants of training itself: which rounds run, what they go on from, and that nobody ends ranks that train well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pacekeeper_operator.api import IncidentCause

from ..network import API_PLACE
from .record import Bookkeeping, WorkerEntry, JobHistory, Object, ClusterHistory, is_operator_change, is_refused
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..workers.run import TrainingRound
    from ..workers.worker import SimulatedWorker
    from ..world import World

ROUND_OVERLAP_SECONDS = 10.0
"""So long after a newer round has begun an older one may still take steps: a launcher that hears of nobody ends its
ranks within that time."""
FIRST_STEP_SECONDS = 30.0
"""From a job's creation to its first step, when all goes well."""


LOST_CAUSES = (IncidentCause.WORKER_LOST, IncidentCause.NODE_LOST, IncidentCause.WORKER_FROZEN)


class _StepRule(Rule):
    """Is told of every round that begins, and of every step. What it finds then is said at the next look."""

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._found: list[str] = []
        world.trainings.on_step.append(self._on_step)

    def _on_step(self, run: TrainingRound) -> None:
        self._found += self.check_step(run)

    def check_step(self, run: TrainingRound) -> Iterator[str]:
        """`run.ordinals` is 0 where it has just restored its state."""
        raise NotImplementedError

    def check_world(self) -> Iterator[str]:
        found, self._found = self._found, []
        return iter(found)

    def get_job_name(self, run: TrainingRound) -> str:
        job = self.history.jobs.get(run.training.uid)
        return "a job" if job is None else job.name


def _has_single_worker(run: TrainingRound) -> bool:
    """Whether all of its ranks are one worker's."""
    return len({rank.worker.name for rank in run.assigned_ranks}) < 2


class OneRoundAtATime(_StepRule):
    description = "one round at a time, and each has a number above all before"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._newest: dict[str, TrainingRound] = {}

    def check_step(self, run: TrainingRound) -> Iterator[str]:
        newest = self._newest.get(run.training.uid)
        if newest is None or newest is run:
            self._newest[run.training.uid] = run
        elif run.sync_points == 0:
            self._newest[run.training.uid] = run
            known = newest.began_at > self.history.restored_at  # of rounds after a backup nobody knows that is left
            if known and (run.round, run.membership) <= (newest.round, newest.membership):
                yield (
                    f"{self.get_job_name(run)}: round {run.round} of membership {run.membership} begins after round "
                    f"{newest.round} of membership {newest.membership}"
                )
        elif self.history.now() - newest.began_at > ROUND_OVERLAP_SECONDS and not _has_single_worker(run):
            # A lone worker that nobody reaches hears of no other round; what it writes is fenced off.
            yield f"{self.get_job_name(run)}: round {run.round} takes a step long after round {newest.round} has begun"


class CheckpointsAreNotLost(_StepRule):
    description = "a round goes on from the newest checkpoint, or from something newer"

    def check_step(self, run: TrainingRound) -> Iterator[str]:
        newest = run.training.volume.newest
        if run.sync_points == 0 and newest is not None and run.restored_step < newest.step:
            yield f"{self.get_job_name(run)}: round {run.round} begins at {run.restored_step}, and {newest.step} was kept"


class LauncherRestartsWithinLimit(_StepRule):
    description = "launchers begin no more rounds by themselves than the plan allows"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._rounds_started: dict[tuple[str, int], int] = {}

    def check_step(self, run: TrainingRound) -> Iterator[str]:
        job = self.history.jobs.get(run.training.uid)
        if run.sync_points or job is None:
            return
        key = (job.uid, run.membership)
        self._rounds_started[key] = self._rounds_started.get(key, 0) + 1
        allowed = job.most_allowed.get(run.membership, math.inf)
        if self._rounds_started[key] - 1 > allowed:
            yield f"{job.name}: {self._rounds_started[key]} rounds in membership {run.membership}, where {allowed} may be added"


class TrainingWorkersAreNotReplaced(Rule):
    description = "a worker whose ranks train well is not given up for lost"
    kinds = ("trainingjobstates",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        job = self.history.find_job(change.object)
        if job is None or job.bookkeeping is None or job.previous_bookkeeping is None or not is_operator_change(change):
            return
        if job.is_deleted or job.bookkeeping.ended or job.bookkeeping.stop or not self._has_lost_incident(job.previous_bookkeeping, job.bookkeeping):
            return
        for name, hand in job.bookkeeping.workers.items():
            known = job.previous_bookkeeping.workers.get(name)
            if hand.dead and hand.leaving and (known is None or not known.dead) and self._is_training(job, hand):
                yield f"{name}: {hand.leaving}"

    def _has_lost_incident(self, before: Bookkeeping, now: Bookkeeping) -> bool:
        fresh = (incident for name, incident in now.incidents.items() if name not in before.incidents)
        return any(incident["cause"] in LOST_CAUSES for incident in fresh)

    def _is_training(self, job: JobHistory, hand: WorkerEntry) -> bool:
        worker = self.world.workers.get(hand.uid)
        pod = self.history.pods.get((job.namespace, hand.name))
        if worker is None or pod is None or "deletionTimestamp" in pod["metadata"] or worker.is_gone:
            return False
        if worker.node not in self.history.nodes:  # its Node was deleted, so Kubernetes gives it up as well
            return False
        if worker.launcher.paused or worker.sidecar.paused or not self._can_reach_others(worker):
            return False
        runs = [rank.training_round for rank in worker.ranks if rank.is_alive and rank.training_round is not None]
        return bool(runs) and all(not run.over and not run.is_stalled and run.sync_points > 0 for run in runs)

    def _can_reach_others(self, worker: SimulatedWorker) -> bool:
        reaches = self.world.network.can_reach
        return reaches(worker.node, API_PLACE) and all(reaches(worker.node, other) for other in self.world.nodes)


class TrainingMakesProgress(Rule):
    """Where a schedule says how long a job may stand still."""

    description = "a job that can train does not stand still"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._since: dict[str, float] = {}
        """By uid: when it last took a step, or could not be expected to."""
        self._worst: dict[str, float] = {}
        world.trainings.on_step.append(self._on_step)

    def check_world(self) -> Iterator[str]:
        now = self.history.now()
        for job in self.history.jobs.values():
            if job.body is None or job.is_deleted or self._may_stand_still(job, job.body):
                self._since[job.uid] = now
                continue
            began = self._since.setdefault(job.uid, now + FIRST_STEP_SECONDS)
            self._worst[job.uid] = max(self._worst.get(job.uid, 0.0), now - began)
            if self._worst[job.uid] > self.history.patience:
                yield f"{job.name} for more than {self.history.patience:g} s"

    def _may_stand_still(self, job: JobHistory, body: Object) -> bool:
        """It is suspended, refused, or has come to its last step."""
        if body["spec"].get("suspend") or is_refused(body):
            return True
        training = self.world.trainings.find_training(job.uid)
        if job.bookkeeping is not None and job.bookkeeping.ended:
            return True
        runs = () if training is None else training.rounds[-1:]
        return any(run.training.last_step is not None and run.progress.step >= run.training.last_step for run in runs)

    def _on_step(self, run: TrainingRound) -> None:
        if run.sync_points:
            uid, now = run.training.uid, self.history.now()
            self._worst[uid] = max(self._worst.get(uid, 0.0), now - self._since.get(uid, now))
            self._since[uid] = now


TRAINING_RULES: tuple[type[Rule], ...] = (
    OneRoundAtATime,
    CheckpointsAreNotLost,
    LauncherRestartsWithinLimit,
    TrainingWorkersAreNotReplaced,
    TrainingMakesProgress,
)

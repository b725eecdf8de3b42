"""Invariants of training itself: which rounds run, what they go on from, and that nobody ends ranks that train well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pacekeeper_operator.api import Cause

from ..network import API
from .record import Books, Hand, JobRecord, Object, Record, by_operator, is_refused
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..workers.run import Run
    from ..workers.worker import Worker
    from ..world import World

OVERLAP_SECONDS = 10.0
"""So long after a newer round has begun an older one may still take steps: a launcher that hears of nobody ends its
ranks within that time."""
STARTS_SECONDS = 30.0
"""From a job's creation to its first step, when all goes well."""


LOST = (Cause.WORKER_LOST, Cause.NODE_LOST, Cause.WORKER_FROZEN)


class _OfSteps(Rule):
    """Is told of every round that begins, and of every step. What it finds then is said at the next look."""

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._found: list[str] = []
        world.trainings.on_step.append(self._told)

    def _told(self, run: Run) -> None:
        self._found += self.stepped(run)

    def stepped(self, run: Run) -> Iterator[str]:
        """`run.ordinals` is 0 where it has just restored its state."""
        raise NotImplementedError

    def looked(self) -> Iterator[str]:
        found, self._found = self._found, []
        return iter(found)

    def name(self, run: Run) -> str:
        job = self.record.jobs.get(run.training.uid)
        return "a job" if job is None else job.name


def _is_alone(run: Run) -> bool:
    """Whether all of its ranks are one worker's."""
    return len({rank.worker.name for rank in run.seated}) < 2


class OneRoundAtATime(_OfSteps):
    words = "one round at a time, and each has a number above all before"

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._newest: dict[str, Run] = {}

    def stepped(self, run: Run) -> Iterator[str]:
        newest = self._newest.get(run.training.uid)
        if newest is None or newest is run:
            self._newest[run.training.uid] = run
        elif run.ordinals == 0:
            self._newest[run.training.uid] = run
            known = newest.began_at > self.record.restored_at  # of rounds after a backup nobody knows that is left
            if known and (run.round, run.membership) <= (newest.round, newest.membership):
                yield (
                    f"{self.name(run)}: round {run.round} of membership {run.membership} begins after round "
                    f"{newest.round} of membership {newest.membership}"
                )
        elif self.record.now() - newest.began_at > OVERLAP_SECONDS and not _is_alone(run):
            # A lone worker that nobody reaches hears of no other round; what it writes is fenced off.
            yield f"{self.name(run)}: round {run.round} takes a step long after round {newest.round} has begun"


class WhatIsKeptIsNotLost(_OfSteps):
    words = "a round goes on from the newest checkpoint, or from something newer"

    def stepped(self, run: Run) -> Iterator[str]:
        newest = run.training.volume.newest
        if run.ordinals == 0 and newest is not None and run.restored_step < newest.step:
            yield f"{self.name(run)}: round {run.round} begins at {run.restored_step}, and {newest.step} was kept"


class LaunchersKeepToTheirRestarts(_OfSteps):
    words = "launchers begin no more rounds by themselves than the plan allows"

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._begun: dict[tuple[str, int], int] = {}

    def stepped(self, run: Run) -> Iterator[str]:
        job = self.record.jobs.get(run.training.uid)
        if run.ordinals or job is None:
            return
        key = (job.uid, run.membership)
        self._begun[key] = self._begun.get(key, 0) + 1
        allowed = job.most_allowed.get(run.membership, math.inf)
        if self._begun[key] - 1 > allowed:
            yield f"{job.name}: {self._begun[key]} rounds in membership {run.membership}, where {allowed} may be added"


class WhoTrainsWellStays(Rule):
    words = "a worker whose ranks train well is not given up for lost"
    kinds = ("trainingjobstates",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        job = self.record.job_of(change.object)
        if job is None or job.books is None or job.before is None or not by_operator(change):
            return
        if job.deleted or job.books.over or job.books.stop or not self._says_that_some_are_lost(job.before, job.books):
            return
        for name, hand in job.books.hands.items():
            known = job.before.hands.get(name)
            if hand.dead and hand.leaving and (known is None or not known.dead) and self._trains(job, hand):
                yield f"{name}: {hand.leaving}"

    def _says_that_some_are_lost(self, before: Books, now: Books) -> bool:
        fresh = (incident for name, incident in now.incidents.items() if name not in before.incidents)
        return any(incident["cause"] in LOST for incident in fresh)

    def _trains(self, job: JobRecord, hand: Hand) -> bool:
        worker = self.world.workers.get(hand.uid)
        pod = self.record.pods.get((job.namespace, hand.name))
        if worker is None or pod is None or "deletionTimestamp" in pod["metadata"] or worker.gone:
            return False
        if worker.node not in self.record.nodes:  # its Node was deleted, so Kubernetes gives it up as well
            return False
        if worker.launcher.paused or worker.sidecar.paused or not self._reaches_others(worker):
            return False
        runs = [rank.run for rank in worker.ranks if rank.alive and rank.run is not None]
        return bool(runs) and all(not run.over and not run.stands and run.ordinals > 0 for run in runs)

    def _reaches_others(self, worker: Worker) -> bool:
        reaches = self.world.network.reaches
        return reaches(worker.node, API) and all(reaches(worker.node, other) for other in self.world.nodes)


class TrainingGoesOn(Rule):
    """Where a schedule says how long a job may stand still."""

    words = "a job that can train does not stand still"

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._since: dict[str, float] = {}
        """By uid: when it last took a step, or could not be expected to."""
        self._worst: dict[str, float] = {}
        world.trainings.on_step.append(self._stepped)

    def looked(self) -> Iterator[str]:
        now = self.record.now()
        for job in self.record.jobs.values():
            if job.body is None or job.deleted or self._may_rest(job, job.body):
                self._since[job.uid] = now
                continue
            began = self._since.setdefault(job.uid, now + STARTS_SECONDS)
            self._worst[job.uid] = max(self._worst.get(job.uid, 0.0), now - began)
            if self._worst[job.uid] > self.record.patience:
                yield f"{job.name} for more than {self.record.patience:g} s"

    def _may_rest(self, job: JobRecord, body: Object) -> bool:
        """It is suspended, refused, or has come to its last step."""
        if body["spec"].get("suspend") or is_refused(body):
            return True
        training = self.world.trainings.of_job(job.uid)
        if job.books is not None and job.books.over:
            return True
        runs = () if training is None else training.runs[-1:]
        return any(run.training.until is not None and run.progress.step >= run.training.until for run in runs)

    def _stepped(self, run: Run) -> None:
        if run.ordinals:
            uid, now = run.training.uid, self.record.now()
            self._worst[uid] = max(self._worst.get(uid, 0.0), now - self._since.get(uid, now))
            self._since[uid] = now


RULES: tuple[type[Rule], ...] = (
    OneRoundAtATime,
    WhatIsKeptIsNotLost,
    LaunchersKeepToTheirRestarts,
    WhoTrainsWellStays,
    TrainingGoesOn,
)

"""Invariants of training: which rounds run, where they resume, and that ranks that train are not ended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pacekeeper_operator.api.incident import IncidentCause

from ..kubernetes.api.changes import ObjectChange
from ..network import API_PLACE
from ..workers.training_round import TrainingRound
from ..workers.worker import SimulatedWorker
from ..world import World
from .cluster_history import (
    Bookkeeping,
    ClusterHistory,
    JobHistory,
    Object,
    WorkerEntry,
    is_operator_change,
    is_refused,
)
from .rule import Rule

ROUND_OVERLAP_SECONDS = 10.0
"""Seconds for which an older round may take steps after a newer one has started: a launcher without contact ends its
ranks within that time."""
FIRST_STEP_SECONDS = 30.0
"""From a job's creation to its first step without faults."""


LOST_CAUSES = (IncidentCause.WORKER_LOST, IncidentCause.NODE_LOST, IncidentCause.WORKER_UNRESPONSIVE)


class _StepRule(Rule):
    """Receives every start of a round, and every step. Violations are reported at the next periodic check."""

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._found: list[str] = []
        world.trainings.on_step.append(self._on_step)

    def _on_step(self, training_round: TrainingRound) -> None:
        self._found += self.check_step(training_round)

    def check_step(self, training_round: TrainingRound) -> Iterator[str]:
        """Yield violations. `training_round.sync_points` is 0 if the round has just restored its state."""
        raise NotImplementedError

    def check_world(self) -> Iterator[str]:
        violations, self._found = self._found, []
        return iter(violations)

    def get_job_name(self, training_round: TrainingRound) -> str:
        job = self.history.jobs.get(training_round.training.uid)
        return "a job" if job is None else job.name


def _has_single_worker(training_round: TrainingRound) -> bool:
    """Return whether all of its ranks belong to one worker."""
    return len({rank.worker.name for rank in training_round.assigned_ranks}) < 2


class OneRoundAtATime(_StepRule):
    description = "one round at a time, with a higher number than all earlier ones"

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._newest: dict[str, TrainingRound] = {}

    def check_step(self, training_round: TrainingRound) -> Iterator[str]:
        newest = self._newest.get(training_round.training.uid)
        if newest is None or newest is training_round:
            self._newest[training_round.training.uid] = training_round
        elif training_round.sync_points == 0:
            self._newest[training_round.training.uid] = training_round
            is_known = newest.began_at > self.history.restored_at  # rounds after the backup are unknown
            if is_known and training_round.round <= newest.round:
                yield (
                    f"{self.get_job_name(training_round)}: round {training_round.round} of membership "
                    f"{training_round.membership} begins after round {newest.round} of membership {newest.membership}"
                )
        elif self.history.now() - newest.began_at > ROUND_OVERLAP_SECONDS and not _has_single_worker(training_round):
            # A single worker without contact does not learn of another round. Its writes are fenced off.
            yield (
                f"{self.get_job_name(training_round)}: round {training_round.round} takes a step long after round "
                f"{newest.round} has begun"
            )


class CheckpointsAreNotLost(_StepRule):
    description = "a round resumes from the newest checkpoint, or from newer state"

    def check_step(self, training_round: TrainingRound) -> Iterator[str]:
        newest = training_round.training.volume.newest
        if training_round.sync_points == 0 and newest is not None and training_round.restored_step < newest.step:
            yield (
                f"{self.get_job_name(training_round)}: round {training_round.round} starts at "
                f"{training_round.restored_step}, not at {newest.step}"
            )


class LauncherRestartsWithinLimit(_StepRule):
    description = "launchers start no more rounds by themselves than the plan allows"

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._rounds_started: dict[tuple[str, int], int] = {}

    def check_step(self, training_round: TrainingRound) -> Iterator[str]:
        job = self.history.jobs.get(training_round.training.uid)
        if training_round.sync_points or job is None:
            return
        key = (job.uid, training_round.membership)
        self._rounds_started[key] = self._rounds_started.get(key, 0) + 1
        allowed = job.most_allowed.get(training_round.membership, math.inf)
        if self._rounds_started[key] - 1 > allowed:
            yield (
                f"{job.name}: {self._rounds_started[key]} rounds in membership {training_round.membership}, "
                f"where {allowed} are allowed"
            )


class TrainingWorkersAreNotReplaced(Rule):
    description = "a worker whose ranks train normally is not declared lost"
    kinds = ("trainingjobstates",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        job = self.history.find_job(change.object)
        if job is None or job.bookkeeping is None or job.previous_bookkeeping is None or not is_operator_change(change):
            return
        if (
            job.is_deleted
            or job.bookkeeping.ended
            or job.bookkeeping.stop
            or not self._has_lost_incident(job.previous_bookkeeping, job.bookkeeping)
        ):
            return
        for name, entry in job.bookkeeping.workers.items():
            old_entry = job.previous_bookkeeping.workers.get(name)
            if (
                entry.dead
                and entry.leaving
                and (old_entry is None or not old_entry.dead)
                and self._is_training(job, entry)
            ):
                yield f"{name}: {entry.leaving}"

    def _has_lost_incident(self, previous: Bookkeeping, current: Bookkeeping) -> bool:
        new_incidents = (incident for name, incident in current.incidents.items() if name not in previous.incidents)
        return any(incident["cause"] in LOST_CAUSES for incident in new_incidents)

    def _is_training(self, job: JobHistory, entry: WorkerEntry) -> bool:
        worker = self.world.workers.get(entry.uid)
        pod = self.history.pods.get((job.namespace, entry.name))
        if worker is None or pod is None or "deletionTimestamp" in pod["metadata"] or worker.is_gone:
            return False
        if worker.node not in self.history.nodes:  # its Node was deleted, so Kubernetes gives it up, too
            return False
        if worker.launcher.paused or worker.sidecar.paused or not self._can_reach_others(worker):
            return False
        rounds = [rank.training_round for rank in worker.ranks if rank.is_alive and rank.training_round is not None]
        return bool(rounds) and all(
            not training_round.over and not training_round.is_stalled and training_round.sync_points > 0
            for training_round in rounds
        )

    def _can_reach_others(self, worker: SimulatedWorker) -> bool:
        can_reach = self.world.network.can_reach
        return can_reach(worker.node, API_PLACE) and all(can_reach(worker.node, node) for node in self.world.nodes)


class TrainingMakesProgress(Rule):
    """Checks only schedules that limit how long a job may make no progress."""

    description = "a job that can train does not stall"

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._since: dict[str, float] = {}
        """By UID: when it last took a step, or could not be expected to."""
        self._worst: dict[str, float] = {}
        world.trainings.on_step.append(self._on_step)

    def check_world(self) -> Iterator[str]:
        now = self.history.now()
        for job in self.history.jobs.values():
            if job.body is None or job.is_deleted or self._may_stand_still(job, job.body):
                self._since[job.uid] = now
                continue
            since = self._since.setdefault(job.uid, now + FIRST_STEP_SECONDS)
            self._worst[job.uid] = max(self._worst.get(job.uid, 0.0), now - since)
            if self._worst[job.uid] > self.history.patience:
                yield f"{job.name} for more than {self.history.patience:g} s"

    def _may_stand_still(self, job: JobHistory, body: Object) -> bool:
        """Return whether the job is suspended or rejected, or has taken its last step."""
        if body["spec"].get("suspend") or is_refused(body):
            return True
        training = self.world.trainings.find_training(job.uid)
        if job.bookkeeping is not None and job.bookkeeping.ended:
            return True
        rounds = () if training is None else training.rounds[-1:]
        return any(
            training_round.training.last_step is not None
            and training_round.progress.step >= training_round.training.last_step
            for training_round in rounds
        )

    def _on_step(self, training_round: TrainingRound) -> None:
        if training_round.sync_points:
            uid, now = training_round.training.uid, self.history.now()
            self._worst[uid] = max(self._worst.get(uid, 0.0), now - self._since.get(uid, now))
            self._since[uid] = now


TRAINING_RULES: tuple[type[Rule], ...] = (
    OneRoundAtATime,
    CheckpointsAreNotLost,
    LauncherRestartsWithinLimit,
    TrainingWorkersAreNotReplaced,
    TrainingMakesProgress,
)

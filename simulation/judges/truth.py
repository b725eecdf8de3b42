"""What a job's status says is so. It may be old for a while, and for as long as the operator cannot know better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pacekeeper_operator.api import JobCondition, JobPhase, Reason, parse_duration, parse_time
from pacekeeper_operator.settings import Settings

from ..network import API_PLACE
from .record import NEVER_HAPPENED, Bookkeeping, JobHistory, Object, ClusterHistory, is_operator_change
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..workers.run import TrainingRound
    from ..world import World

MAX_STATUS_DELAY_SECONDS = 90.0
"""So late, at most, an operator that can see it says what is so."""
MAX_STALL_STATUS_DELAY_SECONDS = 180.0
"""The same of ranks that take no step: launchers give them a while to take one."""
STALLED_MESSAGE = "it is said to be Running, and takes no step"
LATELY_SECONDS = 30.0
"""So long a job may be over before its status says so: by then it is written, and an operator that is away is back."""
ROUNDS_WITHOUT_PROGRESS = 3
"""By default (spec.remediation.maxRoundsWithoutProgress)."""
MAX_STATUS_STEP_AGE_CHECKS = 9
"""So many looks back the step in a status may lie: 45 s."""


class StatusIsAccurate(Rule):
    description = "status never says for long what is not so"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._calm_since = 0.0
        self._wrong_since: dict[tuple[str, str], float] = {}
        """(uid, what is wrong) → since when it is."""
        self._stepped_at: dict[str, float] = {}
        """By uid: when it last took a step."""
        self._steps: dict[str, list[int]] = {}
        """By uid: at the last looks."""
        world.trainings.on_step.append(self._on_step)

    def check_world(self) -> Iterator[str]:
        now = self.history.now()
        if not is_operator_calm(self.world):
            self._calm_since = now
        wrong = {(job.uid, what): job.name for job in self.history.jobs.values() for what in self._find_wrong(job)}
        self._wrong_since = {key: self._wrong_since.get(key, now) for key in wrong}
        for key, since in self._wrong_since.items():
            if now - max(since, self._calm_since) > (MAX_STALL_STATUS_DELAY_SECONDS if key[1] == STALLED_MESSAGE else MAX_STATUS_DELAY_SECONDS):
                yield f"{wrong[key]}: {key[1]}"

    def _find_wrong(self, job: JobHistory) -> Iterator[str]:
        if job.body is None or job.is_deleted:
            return
        status, now = job.body.get("status", {}), self.history.now()
        phase, stepped = status.get("phase"), self._stepped_at.get(job.uid)
        steps = self._steps.setdefault(job.uid, [])
        training = self.world.trainings.find_training(job.uid)
        steps.append(training.rounds[-1].progress.step if training is not None and training.rounds else -1)
        del steps[:-MAX_STATUS_STEP_AGE_CHECKS]
        trains = stepped is not None and now - stepped < 10.0
        if phase == JobPhase.RUNNING and not trains:
            yield STALLED_MESSAGE
        if phase in (JobPhase.PENDING, JobPhase.STARTING, JobPhase.SUSPENDED) and trains:
            yield f"it is said to be {phase}, and trains"
        if phase == JobPhase.RUNNING and len(steps) >= MAX_STATUS_STEP_AGE_CHECKS and status.get("step", -1) < min(steps):
            yield "its step is an old one"

    def _on_step(self, run: TrainingRound) -> None:
        if run.sync_points:
            self._stepped_at[run.training.uid] = self.history.now()


class EndReasonIsAccurate(Rule):
    description = "a job is Complete or Failed for the reason that it tells"
    kinds = ("trainingjobs",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        was, now = (body.get("status", {}).get("phase") if body else None for body in (change.previous, change.object))
        job = self.history.jobs.get(change.object["metadata"]["uid"])
        if change.type != "MODIFIED_MESSAGE" or was == now or job is None or job.bookkeeping is None:
            return
        training = self.world.trainings.find_training(job.uid)
        if now == JobPhase.COMPLETE and (
            training is None
            or training.last_step is None
            or all(run.progress.step < training.last_step for run in training.rounds)
        ):
            yield f"{job.name} is Complete, and its ranks have not come to their end"
        if now == JobPhase.FAILED:
            conditions = change.object["status"].get("conditions", ())
            failed = next((c for c in conditions if c["type"] == JobCondition.FAILED and c["status"] == "True"), None)
            if failed is None:
                yield f"{job.name} has failed, and does not say why"
            elif not self._is_accurate(job, job.bookkeeping, failed["reason"]):
                yield f"{job.name} has failed of {failed['reason']}: {failed.get('message')}"

    def _is_accurate(self, job: JobHistory, books: Bookkeeping, reason: str) -> bool:
        assert job.body is not None
        spec, training = job.body["spec"], self.world.trainings.find_training(job.uid)
        if reason == Reason.RESTART_BUDGET_SPENT:
            window = parse_duration(spec.get("remediation", {}).get("restartWindow", "1h"))
            last = max(books.restarts, default=0.0)
            spent = sum(at > last - window for at in books.restarts) >= job.allowed_restarts[0]
            return spent and not self._is_kept_from_starting(job, books)
        if reason == Reason.DEADLINE_EXCEEDED:
            limit = spec.get("runPolicy", {}).get("activeDeadlineSeconds", math.inf)
            made = parse_time(job.body["metadata"]["creationTimestamp"])
            return bool(self.world.wall_time() >= made + limit)
        if reason == Reason.SCRIPT_FAILED:  # on one worker alone it may as well be the worker
            failing = 0 if training is None else len(training.mistakes_on if books.trained else training.failed_on)
            if training is not None and not books.trained and training.outage_at > NEVER_HAPPENED:
                return True  # nothing tells what all lack from a mistake where the script has never worked
            return failing > 1 or (failing > 0 and not spec.get("spares"))
        if reason == Reason.NO_PROGRESS:
            limit = spec.get("remediation", {}).get("maxRoundsWithoutProgress", ROUNDS_WITHOUT_PROGRESS)
            ends = [run.progress.step for run in training.rounds if run.sync_points] if training is not None else []
            return bool(ends.count(max(ends, default=0)) >= limit)
        if reason == Reason.IMAGE_PULL_FAILED:
            return any(_is_missing_images(pod) for pod in self.history.pods.values() if self.history.find_job(pod) is job)
        return False

    def _is_kept_from_starting(self, job: JobHistory, books: Bookkeeping) -> bool:
        """It has trained, and its rounds end before their first step by what all lack. Those that met before are too
        few to have spent its restarts."""
        training = self.world.trainings.find_training(job.uid)
        if training is None or not books.trained or not training.rounds:
            return False
        return training.outage_at > training.rounds[-1].stepped_at and len(training.rounds) <= job.allowed_restarts[0]


class NothingGoesBeforeItsTime(Rule):
    words = "no clock but the API server's ends what has time left"
    kinds = ("trainingjobs", "incidents")

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._ended: dict[str, float] = {}
        """By uid of a job: since when it is said to be over (virtual seconds)."""

    def heard(self, change: ObjectChange) -> Iterator[str]:
        name = change.object["metadata"]["name"]
        if change.plural == "incidents":
            if change.type == "DELETED" and is_operator_change(change):
                yield f"Incident {name} is deleted, and its retention is {Settings().incident_retention / 86400:g} days"
            return
        uid = change.object["metadata"]["uid"]
        if change.object.get("status", {}).get("phase") in (JobPhase.COMPLETE, JobPhase.FAILED):
            self._ended.setdefault(uid, change.time)
        ttl = change.object["spec"].get("runPolicy", {}).get("ttlSecondsAfterFinished")
        was = change.previous is not None and "deletionTimestamp" in change.previous["metadata"]
        deleted = change.type == "DELETED" or "deletionTimestamp" in change.object["metadata"]
        if not is_operator_change(change) or was or not deleted:
            return
        waited = change.time - self._ended.get(uid, change.time)
        if ttl is None or waited < ttl - LATELY_SECONDS:
            yield f"{name} is deleted {waited:.0f} s after its end, and has {ttl} s"


def _is_missing_images(pod: Object) -> bool:
    """By the word of its node."""
    status = pod.get("status", {})
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return any(its["state"].get("waiting", {}).get("reason") == "ErrImagePull" for its in containers)


def is_operator_calm(world: World) -> bool:
    """Whether an operator leads that sees and reaches all that it needs."""
    leader, faults, reaches = world.deployment.leader, world.api.faults, world.network.can_reach
    if leader is None or leader.process.paused or leader.operator is None or not leader.operator.is_leader():
        return False
    if faults.down or faults.silent or faults.error_rate or faults.lost_rate or faults.late_rate or faults.slow[1]:
        return False
    if faults.watch_lag[1] > 1.0 or not reaches(leader.name, API_PLACE):
        return False
    return all(reaches(leader.name, worker.node) for worker in world.workers.values() if not worker.is_gone)


STATUS_RULES: tuple[type[Rule], ...] = (StatusIsAccurate, EndReasonIsAccurate, NothingGoesBeforeItsTime)

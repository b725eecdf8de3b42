"""Whether a job's status is accurate. It may lag, in particular while the operator cannot know better."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.formats import parse_duration, parse_time
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.settings import Settings

from ..kubernetes.api.changes import ObjectChange
from ..network import API_PLACE
from ..workers.training_round import TrainingRound
from ..world import World
from .cluster_history import NEVER_HAPPENED, Bookkeeping, ClusterHistory, JobHistory, Object, is_operator_change
from .rule import Rule

MAX_STATUS_DELAY_SECONDS = 90.0
"""Maximum delay of an operator that can see the actual state."""
MAX_STALL_STATUS_DELAY_SECONDS = 180.0
"""The same for ranks that take no step: launchers give them a while to take one."""
STALLED_MESSAGE = "its status is Running, but it takes no step"
LATELY_SECONDS = 30.0
"""Seconds for which a job may be over before its status shows it. By then it is written, and the operator is back."""
ROUNDS_WITHOUT_PROGRESS = 3
"""Default of spec.remediation.maxRoundsWithoutProgress."""
MAX_STATUS_STEP_AGE_CHECKS = 9
"""Maximum age of the step in a status, in checks: 45 s."""


class StatusIsAccurate(Rule):
    description = "the status is never wrong for long"

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._calm_since = 0.0
        self._wrong_since: dict[tuple[str, str], float] = {}
        """(uid, what is wrong) → since when."""
        self._stepped_at: dict[str, float] = {}
        """By UID: when it last took a step."""
        self._steps: dict[str, list[int]] = {}
        """By UID: its step at the last checks."""
        world.trainings.on_step.append(self._on_step)

    def check_world(self) -> Iterator[str]:
        now = self.history.now()
        if not is_operator_calm(self.world):
            self._calm_since = now
        wrong = {
            (job.uid, problem): job.name for job in self.history.jobs.values() for problem in self._find_wrong(job)
        }
        self._wrong_since = {key: self._wrong_since.get(key, now) for key in wrong}
        for key, since in self._wrong_since.items():
            if now - max(since, self._calm_since) > (
                MAX_STALL_STATUS_DELAY_SECONDS if key[1] == STALLED_MESSAGE else MAX_STATUS_DELAY_SECONDS
            ):
                yield f"{wrong[key]}: {key[1]}"

    def _find_wrong(self, job: JobHistory) -> Iterator[str]:
        if job.body is None or job.is_deleted:
            return
        status, now = job.body.get("status", {}), self.history.now()
        phase, stepped_at = status.get("phase"), self._stepped_at.get(job.uid)
        steps = self._steps.setdefault(job.uid, [])
        training = self.world.trainings.find_training(job.uid)
        steps.append(training.rounds[-1].progress.step if training is not None and training.rounds else -1)
        del steps[:-MAX_STATUS_STEP_AGE_CHECKS]
        trains = stepped_at is not None and now - stepped_at < 10.0
        if phase == JobPhase.RUNNING and not trains:
            yield STALLED_MESSAGE
        if phase in (JobPhase.PENDING, JobPhase.STARTING, JobPhase.SUSPENDED) and trains:
            yield f"its status is {phase}, but it trains"
        if (
            phase == JobPhase.RUNNING
            and len(steps) >= MAX_STATUS_STEP_AGE_CHECKS
            and status.get("step", -1) < min(steps)
        ):
            yield "its step is an old one"

    def _on_step(self, training_round: TrainingRound) -> None:
        if training_round.sync_points:
            self._stepped_at[training_round.training.uid] = self.history.now()


class EndReasonIsAccurate(Rule):
    description = "a job is Complete or Failed for the reason in its status"
    kinds = ("trainingjobs",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        old_phase, new_phase = (
            body.get("status", {}).get("phase") if body else None for body in (change.previous, change.object)
        )
        job = self.history.jobs.get(change.object["metadata"]["uid"])
        if change.type != "MODIFIED" or old_phase == new_phase or job is None or job.bookkeeping is None:
            return
        training = self.world.trainings.find_training(job.uid)
        if new_phase == JobPhase.COMPLETE and (
            training is None
            or training.last_step is None
            or all(training_round.progress.step < training.last_step for training_round in training.rounds)
        ):
            yield f"{job.name} is Complete, but its ranks have not finished"
        if new_phase == JobPhase.FAILED:
            conditions = change.object["status"].get("conditions", ())
            failed = next(
                (
                    condition
                    for condition in conditions
                    if condition["type"] == JobCondition.FAILED and condition["status"] == "True"
                ),
                None,
            )
            if failed is None:
                yield f"{job.name} has failed without a reason"
            elif not self._is_accurate(job, job.bookkeeping, failed["reason"]):
                yield f"{job.name} has failed of {failed['reason']}: {failed.get('message')}"

    def _is_accurate(self, job: JobHistory, bookkeeping: Bookkeeping, reason: str) -> bool:
        assert job.body is not None
        spec, training = job.body["spec"], self.world.trainings.find_training(job.uid)
        if reason == Reason.RESTART_BUDGET_SPENT:
            window = parse_duration(spec.get("remediation", {}).get("restartWindow", "1h"))
            last = max(bookkeeping.restarts, default=0.0)
            spent = sum(at > last - window for at in bookkeeping.restarts) >= job.allowed_restarts[0]
            return spent and not self._is_kept_from_starting(job, bookkeeping)
        if reason == Reason.DEADLINE_EXCEEDED:
            limit = spec.get("runPolicy", {}).get("activeDeadlineSeconds", math.inf)
            created_at = parse_time(job.body["metadata"]["creationTimestamp"])
            return bool(self.world.wall_time() >= created_at + limit)
        if reason == Reason.SCRIPT_FAILED:  # on a single worker, the worker may be the cause
            failing = (
                0 if training is None else len(training.mistakes_on if bookkeeping.trained else training.failed_on)
            )
            if training is not None and not bookkeeping.trained and training.outage_at > NEVER_HAPPENED:
                return True  # if the script has never worked, an outage cannot be distinguished from a mistake
            return failing > 1 or (failing > 0 and not spec.get("spares"))
        if reason == Reason.NO_PROGRESS:
            limit = spec.get("remediation", {}).get("maxRoundsWithoutProgress", ROUNDS_WITHOUT_PROGRESS)
            final_steps = (
                [training_round.progress.step for training_round in training.rounds if training_round.sync_points]
                if training is not None
                else []
            )
            return bool(final_steps.count(max(final_steps, default=0)) >= limit)
        if reason == Reason.IMAGE_PULL_FAILED:
            return any(
                _is_missing_images(pod) for pod in self.history.pods.values() if self.history.find_job(pod) is job
            )
        return False

    def _is_kept_from_starting(self, job: JobHistory, bookkeeping: Bookkeeping) -> bool:
        """Return whether the job has trained, and an outage ends its rounds before their first step.

        The rounds that ran before must be too few to have used up its restarts.
        """
        training = self.world.trainings.find_training(job.uid)
        if training is None or not bookkeeping.trained or not training.rounds:
            return False
        return training.outage_at > training.rounds[-1].stepped_at and len(training.rounds) <= job.allowed_restarts[0]


class NothingGoesBeforeItsTime(Rule):
    description = "no clock but the API server's ends a timeout early"
    kinds = ("trainingjobs", "incidents")

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._ended: dict[str, float] = {}
        """By UID of a job: since when its status shows that it is over (virtual seconds)."""

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        name = change.object["metadata"]["name"]
        if change.plural == "incidents":
            if change.type == "DELETED" and is_operator_change(change):
                yield f"Incident {name} is deleted, but its retention is {Settings().incident_retention / 86400:g} days"
            return
        uid = change.object["metadata"]["uid"]
        if change.object.get("status", {}).get("phase") in (JobPhase.COMPLETE, JobPhase.FAILED):
            self._ended.setdefault(uid, change.time)
        ttl = change.object["spec"].get("runPolicy", {}).get("ttlSecondsAfterFinished")
        was_deleting = change.previous is not None and "deletionTimestamp" in change.previous["metadata"]
        deleted = change.type == "DELETED" or "deletionTimestamp" in change.object["metadata"]
        if not is_operator_change(change) or was_deleting or not deleted:
            return
        waited = change.time - self._ended.get(uid, change.time)
        if ttl is None or waited < ttl - LATELY_SECONDS:
            yield f"{name} is deleted {waited:.0f} s after its end, but has {ttl} s"


def _is_missing_images(pod: Object) -> bool:
    """Return whether the pod's status reports a failed image pull."""
    status = pod.get("status", {})
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return any(container["state"].get("waiting", {}).get("reason") == "ErrImagePull" for container in containers)


def is_operator_calm(world: World) -> bool:
    """Return whether an operator leads that sees and reaches everything that it needs."""
    leader, faults, can_reach = world.deployment.leader, world.api.faults, world.network.can_reach
    if leader is None or leader.process.paused or leader.operator is None or not leader.operator.is_leader():
        return False
    if faults.down or faults.silent or faults.error_rate or faults.lost_rate or faults.late_rate or faults.slow[1]:
        return False
    if faults.watch_lag[1] > 1.0 or not can_reach(leader.name, API_PLACE):
        return False
    return all(can_reach(leader.name, worker.node) for worker in world.workers.values() if not worker.is_gone)


STATUS_RULES: tuple[type[Rule], ...] = (StatusIsAccurate, EndReasonIsAccurate, NothingGoesBeforeItsTime)

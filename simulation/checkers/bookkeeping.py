"""Invariants of a job's plan and bookkeeping. They check each write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pacekeeper_operator.api.formats import parse_duration
from pacekeeper_operator.api.incident import IncidentOutcome
from pacekeeper_operator.api.training_job import JobPhase

from ..kubernetes.api.changes import ObjectChange
from .cluster_history import Bookkeeping, JobHistory, is_operator_change
from .rule import Rule

STATES_PLURAL = "trainingjobstates"
MAX_BOOKKEEPING_CHARACTERS = 128 * 1024
"""Approximate maximum size of a small job's bookkeeping."""
MAX_INCIDENTS_PER_JOB = 60
"""Maximum of one job in one run."""


class _StateRule(Rule):
    """Checks what an operator has written against the previous version."""

    kinds: ClassVar[tuple[str, ...]] = (STATES_PLURAL,)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        job = self.history.find_job(change.object)
        if job is None or job.bookkeeping is None or not is_operator_change(change):
            return iter(())
        return self.check_write(job, job.previous_bookkeeping, job.bookkeeping)

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        raise NotImplementedError


class RoundsGrow(_StateRule):
    description = "round numbers only grow"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        if previous is None:
            return
        if current.membership < previous.membership:
            yield f"{job.name}: membership {previous.membership} is followed by {current.membership}"
        if current.round < previous.round:
            yield f"{job.name}: round {previous.round} is followed by {current.round}"
        if (
            current.rank_assignments
            and current.rank_assignments != previous.rank_assignments
            and current.membership == previous.membership
        ):
            yield f"{job.name}: other members in the same membership {current.membership}"
        if current.membership > previous.membership and current.round <= previous.round and previous.rank_assignments:
            yield f"{job.name}: membership {current.membership} starts with round {current.round}, which is not new"


class VersionsGrow(_StateRule):
    description = "each change of the plan is a new version"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        if previous is not None and current.plan != previous.plan and current.version <= previous.version:
            yield f"{job.name}: another plan with version {current.version} after {previous.version}"


class RanksAreUnique(_StateRule):
    description = "no two workers hold a rank"

    def check_write(self, job: JobHistory, _previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        ranks = [rank for _, worker_ranks in current.rank_assignments for rank in worker_ranks]
        if ranks != list(range(len(ranks))):
            yield f"{job.name}: ranks {ranks}"
        names = [worker for worker, _ in current.rank_assignments]
        if len(dict.fromkeys(names)) < len(names):
            yield f"{job.name}: members {names}"


class AssignedWorkersExist(_StateRule):
    description = "ranks are assigned only to recorded workers that are not given up"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        if previous is not None and previous.membership == current.membership:
            return
        for worker, _ in current.rank_assignments:
            entry = current.workers.get(worker)
            if entry is None:
                yield f"{job.name}: {worker} is a member, but not in the bookkeeping"
            elif entry.dead:
                yield f"{job.name}: {worker} is a member, but given up: {entry.leaving}"


class WorkerNamesAreUnique(_StateRule):
    description = "a worker's name is never used again"
    kinds = (STATES_PLURAL, "pods")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == STATES_PLURAL:
            yield from super().check_change(change)
        elif change.type == "ADDED" and (job := self.history.find_job(change.object)) is not None:
            name = change.object["metadata"]["name"]
            entry = job.bookkeeping.workers.get(name) if job.bookkeeping is not None else None
            if entry is not None and entry.uid and entry.uid != change.object["metadata"]["uid"]:
                yield f"{name} was another pod before"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        if previous is None:
            return
        for ordinal, highest in previous.incarnations.items():
            if current.incarnations.get(ordinal, -1) < highest:
                yield f"{job.name}: incarnation {highest} of worker {ordinal} is forgotten"
        for name, entry in current.workers.items():
            old_entry = previous.workers.get(name)
            if old_entry is not None and old_entry.uid and entry.uid != old_entry.uid:
                yield f"{name} is another pod than before"


class OutcomesAreFinal(_StateRule):
    """Exception: a remedy that was only recommended may be applied when more is allowed."""

    description = "the outcome of an incident never changes"
    kinds = (STATES_PLURAL, "incidents")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == STATES_PLURAL:
            yield from super().check_change(change)
        elif change.type == "MODIFIED" and change.previous is not None and is_operator_change(change):
            old_outcome, new_outcome = (
                body.get("status", {}).get("outcome") for body in (change.previous, change.object)
            )
            if old_outcome and old_outcome not in (new_outcome, IncidentOutcome.RECOMMENDED):
                yield f"{change.object['metadata']['name']}: {old_outcome} becomes {new_outcome}"

    def check_write(self, _job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        for name, incident in current.incidents.items():
            old_incident = previous.incidents.get(name) if previous is not None else None
            old_outcome = old_incident.get("outcome") if old_incident is not None else None
            if old_outcome and old_outcome not in (incident.get("outcome"), IncidentOutcome.RECOMMENDED):
                yield f"{name}: {old_outcome} becomes {incident.get('outcome')}"


class EndPhaseIsFinal(Rule):
    description = "a job that is Complete or Failed stays so"
    kinds = ("trainingjobs",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.type != "MODIFIED" or change.previous is None or not is_operator_change(change):
            return
        old_phase, new_phase = (body.get("status", {}).get("phase") for body in (change.previous, change.object))
        if old_phase in (JobPhase.COMPLETE, JobPhase.FAILED) and new_phase != old_phase:
            yield f"{change.object['metadata']['name']}: {old_phase} becomes {new_phase}"


class RestartsWithinBudget(_StateRule):
    description = "never more restarts than spec.remediation allows"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        if previous is None or job.body is None or len(current.restarts) <= len(previous.restarts):
            return
        window = parse_duration(job.body["spec"].get("remediation", {}).get("restartWindow", "1h"))
        last = max(current.restarts)
        recent = sum(at > last - window for at in current.restarts)
        allowed = job.allowed_restarts[1]
        if recent > allowed:
            yield f"{job.name}: {recent} restarts within {window:.0f} s, where {allowed} are allowed"


class NoRestartsWhilePaused(_StateRule):
    description = "no fault is remedied while remedies are paused"

    def check_write(self, job: JobHistory, previous: Bookkeeping | None, current: Bookkeeping) -> Iterator[str]:
        paused = self.history.now() - self.history.paused_since
        if (
            previous is not None
            and len(current.restarts) > len(previous.restarts)
            and paused > RESTART_PAUSE_NOTICE_SECONDS
        ):
            yield f"{job.name}: a restart counts {paused:.0f} s after the pause"


RESTART_PAUSE_NOTICE_SECONDS = 30.0
"""Seconds within which an operator must notice a pause."""


class BookkeepingIsBounded(_StateRule):
    description = "bookkeeping is bounded"
    kinds = (STATES_PLURAL, "incidents")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == "incidents":
            job = self.history.find_job_by_name(
                change.object["metadata"]["namespace"], change.object["spec"]["jobRef"]["name"]
            )
            if job is not None and change.type == "ADDED" and len(job.incidents) == MAX_INCIDENTS_PER_JOB:
                yield f"{job.name}: {MAX_INCIDENTS_PER_JOB} incidents"
            return
        length = len(repr(change.object)) if change.type != "DELETED" else 0
        if length > MAX_BOOKKEEPING_CHARACTERS:
            yield f"{change.object['metadata']['name']}: more than {MAX_BOOKKEEPING_CHARACTERS // 1024} KiB"


BOOKKEEPING_RULES: tuple[type[Rule], ...] = (
    RoundsGrow,
    VersionsGrow,
    RanksAreUnique,
    AssignedWorkersExist,
    WorkerNamesAreUnique,
    OutcomesAreFinal,
    EndPhaseIsFinal,
    RestartsWithinBudget,
    NoRestartsWhilePaused,
    BookkeepingIsBounded,
)

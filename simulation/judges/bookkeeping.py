"""Invariants of a job's plan and bookkeeping: each is judged by what is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pacekeeper_operator.api import JobPhase, IncidentOutcome, parse_duration

from .record import Bookkeeping, JobHistory, ClusterHistory, is_operator_change
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..world import World

STATES_PLURAL = "trainingjobstates"
MAX_BOOKKEEPING_CHARACTERS = 128 * 1024
"""Characters of a small job's bookkeeping, about."""
MAX_INCIDENTS_PER_JOB = 60
"""Of one job, in one run."""


class _StateRule(Rule):
    """Judges what an operator has written upon what one had written before."""

    kinds: ClassVar[tuple[str, ...]] = (STATES_PLURAL,)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        job = self.history.find_job(change.object)
        if job is None or job.bookkeeping is None or not is_operator_change(change):
            return iter(())
        return self.check_write(job, job.previous_bookkeeping, job.bookkeeping)

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        raise NotImplementedError


class RoundsGrow(_StateRule):
    description = "round numbers only grow"

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        if before is None:
            return
        if now.membership < before.membership:
            yield f"{job.name}: membership {before.membership} is followed by {now.membership}"
        if now.round < before.round:
            yield f"{job.name}: round {before.round} is followed by {now.round}"
        if now.rank_assignments and now.rank_assignments != before.rank_assignments and now.membership == before.membership:
            yield f"{job.name}: other members in the same membership {now.membership}"
        if now.membership > before.membership and now.round <= before.round and before.rank_assignments:
            yield f"{job.name}: membership {now.membership} begins with round {now.round}, which has been"


class VersionsGrow(_StateRule):
    description = "each change of the plan is a new version"

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        if before is not None and now.plan != before.plan and now.version <= before.version:
            yield f"{job.name}: another plan with version {now.version} after {before.version}"


class RanksAreUnique(_StateRule):
    description = "no two workers hold a rank"

    def check_write(self, job: JobHistory, _before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        ranks = [rank for _, held in now.rank_assignments for rank in held]
        if ranks != list(range(len(ranks))):
            yield f"{job.name}: ranks {ranks}"
        names = [worker for worker, _ in now.rank_assignments]
        if len(dict.fromkeys(names)) < len(names):
            yield f"{job.name}: members {names}"


class AssignedWorkersExist(_StateRule):
    description = "ranks are given to workers that are known, and not given up"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._checked: dict[str, int] = {}  # the last membership, by the job's uid

    def check_write(self, job: JobHistory, _before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        if now.membership == self._checked.get(job.uid):
            return
        self._checked[job.uid] = now.membership
        for worker, _ in now.rank_assignments:
            hand = now.workers.get(worker)
            if hand is None:
                yield f"{job.name}: {worker} is a member, and nobody knows it"
            elif hand.dead:
                yield f"{job.name}: {worker} is a member, and given up: {hand.leaving}"


class WorkerNamesAreUnique(_StateRule):
    description = "a worker's name is never used again"
    kinds = (STATES_PLURAL, "pods")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == STATES_PLURAL:
            yield from super().check_change(change)
        elif change.type == "ADDED" and (job := self.history.find_job(change.object)) is not None:
            name = change.object["metadata"]["name"]
            known = job.bookkeeping.workers.get(name) if job.bookkeeping is not None else None
            if known is not None and known.uid and known.uid != change.object["metadata"]["uid"]:
                yield f"{name} was another pod before"

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        if before is None:
            return
        for ordinal, highest in before.incarnations.items():
            if now.incarnations.get(ordinal, -1) < highest:
                yield f"{job.name}: incarnation {highest} of worker {ordinal} is forgotten"
        for name, hand in now.workers.items():
            known = before.workers.get(name)
            if known is not None and known.uid and hand.uid != known.uid:
                yield f"{name} is another pod than before"


class OutcomesAreFinal(_StateRule):
    """But what was only recommended may be done when more is allowed."""

    description = "the outcome of an incident never changes"
    kinds = (STATES_PLURAL, "incidents")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == STATES_PLURAL:
            yield from super().check_change(change)
        elif change.type == "MODIFIED_MESSAGE" and change.previous is not None and is_operator_change(change):
            was, now = (body.get("status", {}).get("outcome") for body in (change.previous, change.object))
            if was and was not in (now, IncidentOutcome.RECOMMENDED):
                yield f"{change.object['metadata']['name']}: {was} becomes {now}"

    def check_write(self, _job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        for name, incident in now.incidents.items():
            known = before.incidents.get(name) if before is not None else None
            was = known.get("outcome") if known is not None else None
            if was and was not in (incident.get("outcome"), IncidentOutcome.RECOMMENDED):
                yield f"{name}: {was} becomes {incident.get('outcome')}"


class EndPhaseIsFinal(Rule):
    description = "a job that is Complete or Failed stays so"
    kinds = ("trainingjobs",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.type != "MODIFIED_MESSAGE" or change.previous is None or not is_operator_change(change):
            return
        was, now = (body.get("status", {}).get("phase") for body in (change.previous, change.object))
        if was in (JobPhase.COMPLETE, JobPhase.FAILED) and now != was:
            yield f"{change.object['metadata']['name']}: {was} becomes {now}"


class RestartsWithinBudget(_StateRule):
    description = "never more restarts than spec.remediation allows"

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        if before is None or job.body is None or len(now.restarts) <= len(before.restarts):
            return
        window = parse_duration(job.body["spec"].get("remediation", {}).get("restartWindow", "1h"))
        last = max(now.restarts)
        within = sum(at > last - window for at in now.restarts)
        allowed = job.allowed_restarts[1]
        if within > allowed:
            yield f"{job.name}: {within} restarts within {window:.0f} s, where {allowed} are allowed"


class NoRestartsWhilePaused(_StateRule):
    description = "nothing is done about faults while remedies are paused"

    def check_write(self, job: JobHistory, before: Bookkeeping | None, now: Bookkeeping) -> Iterator[str]:
        paused = self.history.now() - self.history.paused_since
        if before is not None and len(now.restarts) > len(before.restarts) and paused > RESTART_PAUSE_NOTICE_SECONDS:
            yield f"{job.name}: a restart counts {paused:.0f} s after the pause"


RESTART_PAUSE_NOTICE_SECONDS = 30.0
"""So late an operator may notice that it shall pause."""


class BookkeepingIsBounded(_StateRule):
    description = "bookkeeping is bounded"
    kinds = (STATES_PLURAL, "incidents")

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.plural == "incidents":
            job = self.history.find_job_by_name(change.object["metadata"]["namespace"], change.object["spec"]["jobRef"]["name"])
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

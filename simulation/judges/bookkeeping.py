"""Invariants of a job's plan and bookkeeping: each is judged by what is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pacekeeper_operator.api import JobPhase, Outcome, parse_duration

from .record import Books, JobRecord, Record, by_operator
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..world import World

STATES = "trainingjobstates"
LARGEST = 128 * 1024
"""Characters of a small job's bookkeeping, about."""
MOST_INCIDENTS = 60
"""Of one job, in one run."""


class _OfWrites(Rule):
    """Judges what an operator has written upon what one had written before."""

    kinds: ClassVar[tuple[str, ...]] = (STATES,)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        job = self.record.job_of(change.object)
        if job is None or job.books is None or not by_operator(change):
            return iter(())
        return self.written(job, job.before, job.books)

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        raise NotImplementedError


class RoundsGrow(_OfWrites):
    words = "round numbers only grow"

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        if before is None:
            return
        if now.membership < before.membership:
            yield f"{job.name}: membership {before.membership} is followed by {now.membership}"
        if now.round < before.round:
            yield f"{job.name}: round {before.round} is followed by {now.round}"
        if now.seats and now.seats != before.seats and now.membership == before.membership:
            yield f"{job.name}: other members in the same membership {now.membership}"
        if now.membership > before.membership and now.round <= before.round and before.seats:
            yield f"{job.name}: membership {now.membership} begins with round {now.round}, which has been"


class VersionsGrow(_OfWrites):
    words = "each change of the plan is a new version"

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        if before is not None and now.plan != before.plan and now.version <= before.version:
            yield f"{job.name}: another plan with version {now.version} after {before.version}"


class RanksAreHeldOnce(_OfWrites):
    words = "no two workers hold a rank"

    def written(self, job: JobRecord, _before: Books | None, now: Books) -> Iterator[str]:
        ranks = [rank for _, held in now.seats for rank in held]
        if ranks != list(range(len(ranks))):
            yield f"{job.name}: ranks {ranks}"
        names = [worker for worker, _ in now.seats]
        if len(dict.fromkeys(names)) < len(names):
            yield f"{job.name}: members {names}"


class WhoIsSeatedIsThere(_OfWrites):
    words = "ranks are given to workers that are known, and not given up"

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._judged: dict[str, int] = {}  # the last membership, by the job's uid

    def written(self, job: JobRecord, _before: Books | None, now: Books) -> Iterator[str]:
        if now.membership == self._judged.get(job.uid):
            return
        self._judged[job.uid] = now.membership
        for worker, _ in now.seats:
            hand = now.hands.get(worker)
            if hand is None:
                yield f"{job.name}: {worker} is a member, and nobody knows it"
            elif hand.dead:
                yield f"{job.name}: {worker} is a member, and given up: {hand.leaving}"


class NamesAreUsedOnce(_OfWrites):
    words = "a worker's name is never used again"
    kinds = (STATES, "pods")

    def heard(self, change: Change) -> Iterator[str]:
        if change.plural == STATES:
            yield from super().heard(change)
        elif change.type == "ADDED" and (job := self.record.job_of(change.object)) is not None:
            name = change.object["metadata"]["name"]
            known = job.books.hands.get(name) if job.books is not None else None
            if known is not None and known.uid and known.uid != change.object["metadata"]["uid"]:
                yield f"{name} was another pod before"

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        if before is None:
            return
        for ordinal, highest in before.incarnations.items():
            if now.incarnations.get(ordinal, -1) < highest:
                yield f"{job.name}: incarnation {highest} of worker {ordinal} is forgotten"
        for name, hand in now.hands.items():
            known = before.hands.get(name)
            if known is not None and known.uid and hand.uid != known.uid:
                yield f"{name} is another pod than before"


class OutcomesStay(_OfWrites):
    """But what was only recommended may be done when more is allowed."""

    words = "the outcome of an incident never changes"
    kinds = (STATES, "incidents")

    def heard(self, change: Change) -> Iterator[str]:
        if change.plural == STATES:
            yield from super().heard(change)
        elif change.type == "MODIFIED" and change.before is not None and by_operator(change):
            was, now = (body.get("status", {}).get("outcome") for body in (change.before, change.object))
            if was and was not in (now, Outcome.RECOMMENDED):
                yield f"{change.object['metadata']['name']}: {was} becomes {now}"

    def written(self, _job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        for name, incident in now.incidents.items():
            known = before.incidents.get(name) if before is not None else None
            was = known.get("outcome") if known is not None else None
            if was and was not in (incident.get("outcome"), Outcome.RECOMMENDED):
                yield f"{name}: {was} becomes {incident.get('outcome')}"


class TheEndIsFinal(Rule):
    words = "a job that is Complete or Failed stays so"
    kinds = ("trainingjobs",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        if change.type != "MODIFIED" or change.before is None or not by_operator(change):
            return
        was, now = (body.get("status", {}).get("phase") for body in (change.before, change.object))
        if was in (JobPhase.COMPLETE, JobPhase.FAILED) and now != was:
            yield f"{change.object['metadata']['name']}: {was} becomes {now}"


class RestartsWithinBudget(_OfWrites):
    words = "never more restarts than spec.remediation allows"

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        if before is None or job.body is None or len(now.restarts) <= len(before.restarts):
            return
        window = parse_duration(job.body["spec"].get("remediation", {}).get("restartWindow", "1h"))
        last = max(now.restarts)
        within = sum(at > last - window for at in now.restarts)
        allowed = job.allowed_restarts[1]
        if within > allowed:
            yield f"{job.name}: {within} restarts within {window:.0f} s, where {allowed} are allowed"


class NothingRestartsWhilePaused(_OfWrites):
    words = "nothing is done about faults while remedies are paused"

    def written(self, job: JobRecord, before: Books | None, now: Books) -> Iterator[str]:
        paused = self.record.now() - self.record.paused_since
        if before is not None and len(now.restarts) > len(before.restarts) and paused > NOTICED_SECONDS:
            yield f"{job.name}: a restart counts {paused:.0f} s after the pause"


NOTICED_SECONDS = 30.0
"""So late an operator may notice that it shall pause."""


class BookkeepingIsBounded(_OfWrites):
    words = "bookkeeping is bounded"
    kinds = (STATES, "incidents")

    def heard(self, change: Change) -> Iterator[str]:
        if change.plural == "incidents":
            job = self.record.job_named(change.object["metadata"]["namespace"], change.object["spec"]["jobRef"]["name"])
            if job is not None and change.type == "ADDED" and len(job.incidents) == MOST_INCIDENTS:
                yield f"{job.name}: {MOST_INCIDENTS} incidents"
            return
        length = len(repr(change.object)) if change.type != "DELETED" else 0
        if length > LARGEST:
            yield f"{change.object['metadata']['name']}: more than {LARGEST // 1024} KiB"


RULES: tuple[type[Rule], ...] = (
    RoundsGrow,
    VersionsGrow,
    RanksAreHeldOnce,
    WhoIsSeatedIsThere,
    NamesAreUsedOnce,
    OutcomesStay,
    TheEndIsFinal,
    RestartsWithinBudget,
    NothingRestartsWhilePaused,
    BookkeepingIsBounded,
)

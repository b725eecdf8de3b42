"""Nothing that is not written first is done: pods, incidents and quarantines follow from bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pacekeeper_operator.api import LABEL_JOB, Outcome

from .record import NEVER, JobRecord, by_operator
from .rules import UNDER_WAY_SECONDS, Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change


class PodsArePromised(Rule):
    words = "a pod is created only if the bookkeeping has its name"
    kinds = ("pods",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        metadata = change.object["metadata"]
        if change.type != "ADDED" or not by_operator(change) or LABEL_JOB not in metadata.get("labels", {}):
            return
        job = self.record.job_of(change.object)
        if job is None:
            yield f"{metadata['name']} belongs to no job"
        elif job.last_wanted.get(metadata["name"], NEVER) < change.at - UNDER_WAY_SECONDS:
            yield f"{metadata['name']} is created, and not wanted"


class PodsAreGivenUpFirst(Rule):
    words = "a pod is deleted only if the bookkeeping gives its worker up"
    kinds = ("pods",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        before = change.before or change.object
        if not by_operator(change) or change.type == "ADDED" or "deletionTimestamp" in before["metadata"]:
            return
        if change.type == "MODIFIED" and "deletionTimestamp" not in change.object["metadata"]:
            return
        job, name = self.record.job_of(before), before["metadata"]["name"]
        if job is not None and self._stays(job, name, before["metadata"]["uid"]):
            yield f"{name} is deleted, and nothing is written against it"

    def _stays(self, job: JobRecord, name: str, uid: str) -> bool:
        books = job.books
        if job.deleted or books is None or books.over or books.stop or not books.wants(name):
            return False
        return books.hands[name].uid in ("", uid)


class IncidentsAreWrittenFirst(Rule):
    words = "an Incident tells what the bookkeeping says"
    kinds = ("incidents",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        if change.type == "DELETED" or not by_operator(change):
            return
        job = self.record.jobs.get(change.object["spec"]["jobRef"].get("uid", ""))
        name, outcome = change.object["metadata"]["name"], change.object.get("status", {}).get("outcome", "")
        if job is None or name not in job.incidents:
            yield f"{name} is written, and no bookkeeping has it"
            return
        if outcome == Outcome.SUPERSEDED and (job.deleted or job.books is None):
            return  # nobody will see it end
        if outcome and job.incidents[name] != outcome:
            yield f"{name} is {outcome}, and {job.incidents[name] or 'open'} by the bookkeeping"


class QuarantinesAreAskedFor(Rule):
    words = "a NodeQuarantine is created only if a job's bookkeeping asks for it"
    kinds = ("nodequarantines",)
    by_history = True

    def heard(self, change: Change) -> Iterator[str]:
        if change.type != "ADDED" or not by_operator(change):
            return
        node, incident = change.object["metadata"]["name"], change.object["spec"].get("incidentRef", {}).get("name", "")
        asked = max((job.last_asked.get((node, incident), NEVER) for job in self.record.jobs.values()), default=NEVER)
        if asked < change.at - UNDER_WAY_SECONDS:
            yield f"of {node}, for {incident or 'no incident'}"


RULES: tuple[type[Rule], ...] = (
    PodsArePromised,
    PodsAreGivenUpFirst,
    IncidentsAreWrittenFirst,
    QuarantinesAreAskedFor,
)

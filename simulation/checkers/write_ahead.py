"""Every action is recorded first: pods, incidents, and quarantines follow from the bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator

from pacekeeper_operator.api.incident import IncidentOutcome
from pacekeeper_operator.api.names import LABEL_JOB

from ..kubernetes.api.changes import ObjectChange
from .cluster_history import NEVER_HAPPENED, JobHistory, is_operator_change
from .rule import MAX_REQUEST_DELAY_SECONDS, Rule


class PodsAreRecordedFirst(Rule):
    description = "a pod is created only if the bookkeeping has its name"
    kinds = ("pods",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        metadata = change.object["metadata"]
        if change.type != "ADDED" or not is_operator_change(change) or LABEL_JOB not in metadata.get("labels", {}):
            return
        job = self.history.find_job(change.object)
        if job is None:
            yield f"{metadata['name']} belongs to no job"
        elif (
            not job.is_checkpoint_server(change.object)
            and job.last_wanted.get(metadata["name"], NEVER_HAPPENED) < change.time - MAX_REQUEST_DELAY_SECONDS
        ):
            yield f"{metadata['name']} is created, but not wanted"


class PodsAreGivenUpFirst(Rule):
    description = "a pod is deleted only if the bookkeeping gives its worker up"
    kinds = ("pods",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        previous = change.previous or change.object
        if not is_operator_change(change) or change.type == "ADDED" or "deletionTimestamp" in previous["metadata"]:
            return
        if change.type == "MODIFIED" and "deletionTimestamp" not in change.object["metadata"]:
            return
        job, name = self.history.find_job(previous), previous["metadata"]["name"]
        if job is not None and self._is_wanted(job, name, previous["metadata"]["uid"]):
            yield f"{name} is deleted, but the bookkeeping does not give it up"

    def _is_wanted(self, job: JobHistory, name: str, uid: str) -> bool:
        bookkeeping = job.bookkeeping
        if (
            job.is_deleted
            or bookkeeping is None
            or bookkeeping.ended
            or bookkeeping.stop
            or not bookkeeping.is_wanted(name)
        ):
            return False
        return bookkeeping.workers[name].uid in ("", uid)


class IncidentsAreRecordedFirst(Rule):
    description = "an Incident agrees with the bookkeeping"
    kinds = ("incidents",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.type == "DELETED" or not is_operator_change(change):
            return
        job = self.history.jobs.get(change.object["spec"]["jobRef"].get("uid", ""))
        name, outcome = change.object["metadata"]["name"], change.object.get("status", {}).get("outcome", "")
        if job is None or name not in job.incidents:
            yield f"{name} is written, but in no bookkeeping"
            return
        if outcome == IncidentOutcome.SUPERSEDED and (job.is_deleted or job.bookkeeping is None):
            return  # its end will not be observed
        if outcome and job.incidents[name] != outcome:
            yield f"{name} is {outcome}, but {job.incidents[name] or 'open'} by the bookkeeping"


class QuarantinesAreRequested(Rule):
    description = "a NodeQuarantine is created only if a job's bookkeeping requests it"
    kinds = ("nodequarantines",)
    by_history = True

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.type != "ADDED" or not is_operator_change(change):
            return
        node, incident = change.object["metadata"]["name"], change.object["spec"].get("incidentRef", {}).get("name", "")
        requested_at = max(
            (job.last_requested.get((node, incident), NEVER_HAPPENED) for job in self.history.jobs.values()),
            default=NEVER_HAPPENED,
        )
        if requested_at < change.time - MAX_REQUEST_DELAY_SECONDS:
            yield f"of {node}, for {incident or 'no incident'}"


WRITE_AHEAD_RULES: tuple[type[Rule], ...] = (
    PodsAreRecordedFirst,
    PodsAreGivenUpFirst,
    IncidentsAreRecordedFirst,
    QuarantinesAreRequested,
)

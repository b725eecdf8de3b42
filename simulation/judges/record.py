"""What judges remember of a cluster: read off the changes of its objects, by nobody's word but the API server's.

The bookkeeping is read here anew, from its JSON, and only as far as a judgement needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pacekeeper_operator.api import (
    FIELD_MANAGER_CORDON,
    LABEL_JOB,
    LABEL_NO_QUARANTINE,
    LABEL_PROBE,
    PAUSE_CONFIG_MAP,
    TAINT_QUARANTINE,
    JobCondition,
)
from pacekeeper_operator.ledger import read_runs

from ..kubernetes.api_server import RESTORED
from ..kubernetes.containers import SHARED

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange

Object = Mapping[str, Any]
OPERATOR_PLACE_PREFIX = "operator-"
"""What the places of the operator's pods begin with."""
NEVER_HAPPENED = -math.inf


@dataclass(frozen=True)
class WorkerEntry:
    """A worker, as the bookkeeping knows it."""

    name: str
    uid: str
    leaving: str
    dead: bool


@dataclass(frozen=True)
class Bookkeeping:
    """A TrainingJobState, as it is written."""

    version: int
    membership: int
    round: int
    allowed_restarts: int
    stop: str
    plan: Object
    rank_assignments: tuple[tuple[str, tuple[int, ...]], ...]
    """(worker, its ranks)."""
    workers: Mapping[str, WorkerEntry]
    incarnations: Mapping[int, int]
    restarts: tuple[float, ...]
    total_restarts: int
    """Of all restarts that counted."""
    finished: tuple[str, ...]
    ended: bool
    trained: bool
    """Some round has completed a step, as far as operators have heard."""
    incidents: Mapping[str, Object]
    requested_quarantines: tuple[tuple[str, str], ...]
    """(node, incident) of quarantines that are wanted."""

    @classmethod
    def from_object(cls, body: Object) -> Bookkeeping:
        job, plan, state = body["metadata"]["name"], body["plan"], body["state"]
        placement, incidents, life = state["placement"], state["incidents"], state["life"]
        columns, members = placement["workers"], plan["members"]
        names, uids = list(_iterate_worker_names(columns, job)), columns["uids"].split(" ")
        marks = columns.get("marks", {})
        hands = [
            WorkerEntry(name, uids[i], marks.get(str(i), {}).get("leaving", ""), marks.get(str(i), {}).get("dead", False))
            for i, name in enumerate(names)
        ]
        highest = placement["incarnations"]
        return cls(
            version=plan["version"],
            membership=plan["membership"],
            round=plan["round"],
            allowed_restarts=plan["restarts"],
            stop=plan["stop"],
            plan=plan,
            rank_assignments=tuple(_iterate_rank_assignments(members, job)),
            workers={hand.name: hand for hand in hands},
            incarnations=dict(zip(read_runs(highest["ordinals"]), read_runs(highest["highest"]), strict=True)),
            restarts=tuple(state["budget"]["restarts"]),
            total_restarts=state["budget"]["total"],
            finished=tuple(life["finished"]),
            ended=bool(life["completedAt"] or life["failedReason"]),
            trained=bool(life.get("trainingSince")),
            incidents={incident["name"]: incident for incident in incidents["current"]},
            requested_quarantines=tuple((wanted["node"], wanted["incident"]) for wanted in incidents["quarantines"]),
        )

    def is_wanted(self, worker: str) -> bool:
        hand = self.workers.get(worker)
        return hand is not None and not hand.leaving


@dataclass
class JobHistory:
    """Of one TrainingJob, by its UID."""

    name: str
    namespace: str
    uid: str
    body: Object | None = None
    """As it is; None: it is gone."""
    bookkeeping: Bookkeeping | None = None
    previous_bookkeeping: Bookkeeping | None = None
    """As they were before the last write; None where that was the first, or was no operator's."""
    last_wanted: dict[str, float] = field(default_factory=dict)
    """Worker → until when its pod was to be there; infinity: still."""
    last_requested: dict[tuple[str, str], float] = field(default_factory=dict)
    """The same of (node, incident) of a quarantine."""
    restarts: int = 0
    """That its books have ever counted."""
    incidents: dict[str, str] = field(default_factory=dict)
    """All that were ever written in its books, with their outcome."""
    most_allowed: dict[int, int] = field(default_factory=dict)
    """Membership → the most restarts that its plan ever left to the launchers."""
    allowed_restarts: tuple[int, int] = (0, 0)
    """The smallest and the largest maxRestarts that its spec ever had."""

    @property
    def is_deleted(self) -> bool:
        return self.body is None or "deletionTimestamp" in self.body["metadata"]


class ClusterHistory:
    """Of everything. `now`: virtual seconds; `patience`: seconds for which a job that can train may stand still."""

    def __init__(self, now: Callable[[], float], patience: float = math.inf) -> None:
        self.now = now
        self.patience = patience
        self.jobs: dict[str, JobHistory] = {}
        self.nodes: dict[str, Object] = {}
        self.most_nodes = 0
        self.quarantines: dict[str, Object] = {}
        self.last_approved: dict[str, float] = {}
        """Node → until when its quarantine was approved; infinity: it is."""
        self.last_unready: dict[str, float] = {}
        """Node → when it was last seen not to be Ready."""
        self.last_failed_probe: dict[str, float] = {}
        """UID of a node → when a probe pod on it last came to nothing, but for what all nodes fail."""
        self.opted_out: dict[str, float] = {}
        """Node → since when it bears the label."""
        self.paused_since = math.inf
        self.restored_at = NEVER_HAPPENED
        """When everything last went back to a backup."""
        self.pods: dict[tuple[str, str], Object] = {}

    def record_change(self, change: ObjectChange) -> None:
        kind = change.plural
        if change.actor == RESTORED:
            self.restored_at = change.time
        if kind == "trainingjobstates":
            self._record_state(change)
        elif kind == "trainingjobs":
            self._record_job(change)
        elif kind == "pods":
            self._record_pod(change)
        elif kind == "nodes":
            self._record_node(change)
        elif kind == "nodequarantines":
            self._record_quarantine(change)
        elif kind == "configmaps" and change.object["metadata"]["name"] == PAUSE_CONFIG_MAP:
            self.paused_since = math.inf if change.type == "DELETED" else min(self.paused_since, change.time)

    def find_job(self, body: Object) -> JobHistory | None:
        """Whose pod, or whose bookkeeping."""
        for owner in body["metadata"].get("ownerReferences", ()):
            if owner["kind"] == "TrainingJob":
                return self._get_or_create_job(owner["uid"], body)
        return None

    def find_job_by_name(self, namespace: str, name: str) -> JobHistory | None:
        """The one that there is."""
        found = (job for job in self.jobs.values() if (job.namespace, job.name) == (namespace, name) and job.body)
        return next(found, None)

    def _get_or_create_job(self, uid: str, body: Object) -> JobHistory:
        metadata = body["metadata"]
        if uid not in self.jobs:
            name = metadata.get("labels", {}).get(LABEL_JOB, metadata["name"])
            self.jobs[uid] = JobHistory(name, metadata["namespace"], uid)
        return self.jobs[uid]

    def _record_job(self, change: ObjectChange) -> None:
        job = self._get_or_create_job(change.object["metadata"]["uid"], change.object)
        job.body = None if change.type == "DELETED" else change.object
        wanted = change.object["spec"].get("remediation", {}).get("maxRestarts", 10)
        known = job.allowed_restarts if change.type != "ADDED" else (wanted, wanted)
        job.allowed_restarts = (min(wanted, *known), max(wanted, *known))

    def _record_state(self, change: ObjectChange) -> None:
        job = self.find_job(change.object)
        if job is None:
            return
        old = job.bookkeeping
        new = None if change.type == "DELETED" else Bookkeeping.from_object(change.object)
        job.previous_bookkeeping, job.bookkeeping = (old if is_operator_change(change) else None), new
        if new is None:
            return
        job.restarts = max(new.total_restarts, job.restarts)
        job.most_allowed[new.membership] = max(new.allowed_restarts, job.most_allowed.get(new.membership, 0))
        for name, hand in new.workers.items():
            if not hand.leaving:
                job.last_wanted[name] = math.inf
        for key in new.requested_quarantines:
            job.last_requested[key] = math.inf
        for name, incident in new.incidents.items():
            job.incidents[name] = incident.get("outcome") or job.incidents.get(name, "")
        if old is not None:
            for name in old.workers:
                if not new.is_wanted(name) and job.last_wanted.get(name) == math.inf:
                    job.last_wanted[name] = change.time
            for key in old.requested_quarantines:
                if key not in new.requested_quarantines:
                    job.last_requested[key] = change.time

    def _record_pod(self, change: ObjectChange) -> None:
        body = change.object
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if change.type == "DELETED":
            self.pods.pop(key, None)
        else:
            self.pods[key] = body
        node = metadata.get("labels", {}).get(LABEL_PROBE)
        if node is not None:
            phase = body.get("status", {}).get("phase")
            failed = phase == "Failed" or (change.type == "DELETED" and phase != "Succeeded")
            if failed and not _fails_like_all(body):
                self.last_failed_probe[node] = change.time

    def _record_node(self, change: ObjectChange) -> None:
        body, name = change.object, change.object["metadata"]["name"]
        if change.type == "DELETED":
            self.nodes.pop(name, None)
            self.opted_out.pop(name, None)
        else:
            if not is_ready(body) or (change.previous is not None and not is_ready(change.previous)):
                self.last_unready[name] = change.time
            self.record_node(body, change.time)

    def record_node(self, body: Object, at: float) -> None:
        """As it is at that moment."""
        name = body["metadata"]["name"]
        self.nodes[name] = body
        self.most_nodes = max(self.most_nodes, len(self.nodes))
        if LABEL_NO_QUARANTINE in body["metadata"].get("labels", {}):
            self.opted_out.setdefault(name, at)
        else:
            self.opted_out.pop(name, None)

    def _record_quarantine(self, change: ObjectChange) -> None:
        body, name = change.object, change.object["metadata"]["name"]
        approved = change.type != "DELETED" and body["spec"].get("approved", False)
        if approved:
            self.last_approved[name] = math.inf
        elif self.last_approved.get(name) == math.inf:
            self.last_approved[name] = change.time
        if change.type == "DELETED":
            self.quarantines.pop(name, None)
        else:
            self.quarantines[name] = body


def _fails_like_all(probe: Object) -> bool:
    states = [its["state"].get("terminated", {}) for its in probe.get("status", {}).get("containerStatuses", ())]
    return any(SHARED in state.get("message", "") for state in states)


def is_operator_change(change: ObjectChange) -> bool:
    return change.actor.startswith(OPERATOR_PLACE_PREFIX)


def is_refused(job: Object) -> bool:
    """Its template is, and its status says so."""
    conditions = job.get("status", {}).get("conditions", ())
    return any(c["type"] == JobCondition.INVALID_TEMPLATE and c["status"] == "True" for c in conditions)


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_tainted(node: Object) -> bool:
    """By the operator."""
    return any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))


def is_cordoned(node: Object) -> bool:
    """By the operator, perhaps among others."""
    return bool(node["spec"].get("unschedulable")) and FIELD_MANAGER_CORDON in list_cordon_owners(node)


def list_cordon_owners(node: Object) -> tuple[str, ...]:
    """Managers that own the node's cordon."""
    owners = node["metadata"].get("managedFields", ())
    return tuple(entry["manager"] for entry in owners if "f:unschedulable" in entry["fieldsV1"].get("f:spec", {}))


def _iterate_worker_names(columns: Object, job: str) -> Iterator[str]:
    for ordinal, incarnation in zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True):
        yield f"{job}-w{ordinal}-{incarnation}"


def _iterate_rank_assignments(members: Object, job: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    ranks = members["ranks"]
    for i, name in enumerate(_iterate_worker_names(members, job)):
        yield name, tuple(range(i * ranks, (i + 1) * ranks)) if isinstance(ranks, int) else tuple(ranks[i])

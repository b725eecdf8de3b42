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
    PAUSE,
    TAINT_QUARANTINE,
    Condition,
)
from pacekeeper_operator.ledger import read_runs

from ..kubernetes.api_server import RESTORED
from ..kubernetes.containers import SHARED

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change

Object = Mapping[str, Any]
OPERATOR = "operator-"
"""What the places of the operator's pods begin with."""
NEVER = -math.inf


@dataclass(frozen=True)
class Hand:
    """A worker, as the bookkeeping knows it."""

    name: str
    uid: str
    leaving: str
    dead: bool


@dataclass(frozen=True)
class Books:
    """A TrainingJobState, as it is written."""

    version: int
    membership: int
    round: int
    allowed_restarts: int
    stop: str
    plan: Object
    seats: tuple[tuple[str, tuple[int, ...]], ...]
    """(worker, its ranks)."""
    hands: Mapping[str, Hand]
    incarnations: Mapping[int, int]
    restarts: tuple[float, ...]
    total: int
    """Of all restarts that counted."""
    finished: tuple[str, ...]
    over: bool
    trained: bool
    """Some round has completed a step, as far as operators have heard."""
    incidents: Mapping[str, Object]
    asked: tuple[tuple[str, str], ...]
    """(node, incident) of quarantines that are wanted."""

    @classmethod
    def of(cls, body: Object) -> Books:
        job, plan, state = body["metadata"]["name"], body["plan"], body["state"]
        placement, incidents, life = state["placement"], state["incidents"], state["life"]
        columns, members = placement["workers"], plan["members"]
        names, uids = list(_names(columns, job)), columns["uids"].split(" ")
        marks = columns.get("marks", {})
        hands = [
            Hand(name, uids[i], marks.get(str(i), {}).get("leaving", ""), marks.get(str(i), {}).get("dead", False))
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
            seats=tuple(_seats(members, job)),
            hands={hand.name: hand for hand in hands},
            incarnations=dict(zip(read_runs(highest["ordinals"]), read_runs(highest["highest"]), strict=True)),
            restarts=tuple(state["budget"]["restarts"]),
            total=state["budget"]["total"],
            finished=tuple(life["finished"]),
            over=bool(life["completedAt"] or life["failedReason"]),
            trained=bool(life.get("trainingSince")),
            incidents={incident["name"]: incident for incident in incidents["current"]},
            asked=tuple((wanted["node"], wanted["incident"]) for wanted in incidents["quarantines"]),
        )

    def wants(self, worker: str) -> bool:
        hand = self.hands.get(worker)
        return hand is not None and not hand.leaving


@dataclass
class JobRecord:
    """Of one TrainingJob, by its UID."""

    name: str
    namespace: str
    uid: str
    body: Object | None = None
    """As it is; None: it is gone."""
    books: Books | None = None
    before: Books | None = None
    """As they were before the last write; None where that was the first, or was no operator's."""
    last_wanted: dict[str, float] = field(default_factory=dict)
    """Worker → until when its pod was to be there; infinity: still."""
    last_asked: dict[tuple[str, str], float] = field(default_factory=dict)
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
    def deleted(self) -> bool:
        return self.body is None or "deletionTimestamp" in self.body["metadata"]


class Record:
    """Of everything. `now`: virtual seconds; `patience`: seconds for which a job that can train may stand still."""

    def __init__(self, now: Callable[[], float], patience: float = math.inf) -> None:
        self.now = now
        self.patience = patience
        self.jobs: dict[str, JobRecord] = {}
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
        self.restored_at = NEVER
        """When everything last went back to a backup."""
        self.pods: dict[tuple[str, str], Object] = {}

    def hear(self, change: Change) -> None:
        kind = change.plural
        if change.who == RESTORED:
            self.restored_at = change.at
        if kind == "trainingjobstates":
            self._state(change)
        elif kind == "trainingjobs":
            self._job(change)
        elif kind == "pods":
            self._pod(change)
        elif kind == "nodes":
            self._node(change)
        elif kind == "nodequarantines":
            self._quarantine(change)
        elif kind == "configmaps" and change.object["metadata"]["name"] == PAUSE:
            self.paused_since = math.inf if change.type == "DELETED" else min(self.paused_since, change.at)

    def job_of(self, body: Object) -> JobRecord | None:
        """Whose pod, or whose bookkeeping."""
        for owner in body["metadata"].get("ownerReferences", ()):
            if owner["kind"] == "TrainingJob":
                return self._of(owner["uid"], body)
        return None

    def job_named(self, namespace: str, name: str) -> JobRecord | None:
        """The one that there is."""
        found = (job for job in self.jobs.values() if (job.namespace, job.name) == (namespace, name) and job.body)
        return next(found, None)

    def _of(self, uid: str, body: Object) -> JobRecord:
        metadata = body["metadata"]
        if uid not in self.jobs:
            name = metadata.get("labels", {}).get(LABEL_JOB, metadata["name"])
            self.jobs[uid] = JobRecord(name, metadata["namespace"], uid)
        return self.jobs[uid]

    def _job(self, change: Change) -> None:
        job = self._of(change.object["metadata"]["uid"], change.object)
        job.body = None if change.type == "DELETED" else change.object
        wanted = change.object["spec"].get("remediation", {}).get("maxRestarts", 10)
        known = job.allowed_restarts if change.type != "ADDED" else (wanted, wanted)
        job.allowed_restarts = (min(wanted, *known), max(wanted, *known))

    def _state(self, change: Change) -> None:
        job = self.job_of(change.object)
        if job is None:
            return
        old = job.books
        new = None if change.type == "DELETED" else Books.of(change.object)
        job.before, job.books = (old if by_operator(change) else None), new
        if new is None:
            return
        job.restarts = max(new.total, job.restarts)
        job.most_allowed[new.membership] = max(new.allowed_restarts, job.most_allowed.get(new.membership, 0))
        for name, hand in new.hands.items():
            if not hand.leaving:
                job.last_wanted[name] = math.inf
        for key in new.asked:
            job.last_asked[key] = math.inf
        for name, incident in new.incidents.items():
            job.incidents[name] = incident.get("outcome") or job.incidents.get(name, "")
        if old is not None:
            for name in old.hands:
                if not new.wants(name) and job.last_wanted.get(name) == math.inf:
                    job.last_wanted[name] = change.at
            for key in old.asked:
                if key not in new.asked:
                    job.last_asked[key] = change.at

    def _pod(self, change: Change) -> None:
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
                self.last_failed_probe[node] = change.at

    def _node(self, change: Change) -> None:
        body, name = change.object, change.object["metadata"]["name"]
        if change.type == "DELETED":
            self.nodes.pop(name, None)
            self.opted_out.pop(name, None)
        else:
            if not is_ready(body) or (change.before is not None and not is_ready(change.before)):
                self.last_unready[name] = change.at
            self.take_node(body, change.at)

    def take_node(self, body: Object, at: float) -> None:
        """As it is at that moment."""
        name = body["metadata"]["name"]
        self.nodes[name] = body
        self.most_nodes = max(self.most_nodes, len(self.nodes))
        if LABEL_NO_QUARANTINE in body["metadata"].get("labels", {}):
            self.opted_out.setdefault(name, at)
        else:
            self.opted_out.pop(name, None)

    def _quarantine(self, change: Change) -> None:
        body, name = change.object, change.object["metadata"]["name"]
        approved = change.type != "DELETED" and body["spec"].get("approved", False)
        if approved:
            self.last_approved[name] = math.inf
        elif self.last_approved.get(name) == math.inf:
            self.last_approved[name] = change.at
        if change.type == "DELETED":
            self.quarantines.pop(name, None)
        else:
            self.quarantines[name] = body


def _fails_like_all(probe: Object) -> bool:
    states = [its["state"].get("terminated", {}) for its in probe.get("status", {}).get("containerStatuses", ())]
    return any(SHARED in state.get("message", "") for state in states)


def by_operator(change: Change) -> bool:
    return change.who.startswith(OPERATOR)


def is_refused(job: Object) -> bool:
    """Its template is, and its status says so."""
    conditions = job.get("status", {}).get("conditions", ())
    return any(c["type"] == Condition.INVALID_TEMPLATE and c["status"] == "True" for c in conditions)


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_tainted(node: Object) -> bool:
    """By the operator."""
    return any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))


def is_cordoned(node: Object) -> bool:
    """By the operator, perhaps among others."""
    return bool(node["spec"].get("unschedulable")) and FIELD_MANAGER_CORDON in cordoned_by(node)


def cordoned_by(node: Object) -> tuple[str, ...]:
    """Managers that own the node's cordon."""
    owners = node["metadata"].get("managedFields", ())
    return tuple(entry["manager"] for entry in owners if "f:unschedulable" in entry["fieldsV1"].get("f:spec", {}))


def _names(columns: Object, job: str) -> Iterator[str]:
    for ordinal, incarnation in zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True):
        yield f"{job}-w{ordinal}-{incarnation}"


def _seats(members: Object, job: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    ranks = members["ranks"]
    for i, name in enumerate(_names(members, job)):
        yield name, tuple(range(i * ranks, (i + 1) * ranks)) if isinstance(ranks, int) else tuple(ranks[i])

"""What checkers record of a cluster: only from the API server's object changes.

The bookkeeping is parsed from its JSON independently of the operator, and only as far as rules need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.api.names import (
    FIELD_MANAGER_CORDON,
    LABEL_JOB,
    LABEL_NO_QUARANTINE,
    LABEL_PROBE,
    LABEL_WORKER,
    PAUSE_CONFIG_MAP,
    TAINT_QUARANTINE,
)
from pacekeeper_operator.state.state_codec import read_runs

from ..kubernetes.api.changes import RESTORED, ObjectChange
from ..kubernetes.containers import SHARED

Object = Mapping[str, Any]
OPERATOR_PLACE_PREFIX = "operator-"
"""Prefix of the places of the operator's pods."""
NEVER_HAPPENED = -math.inf


@dataclass(frozen=True)
class WorkerEntry:
    """A worker in the bookkeeping."""

    name: str
    uid: str
    leaving: str
    dead: bool


@dataclass(frozen=True)
class Bookkeeping:
    """The content of a TrainingJobState."""

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
    """Number of all restarts that counted."""
    finished: tuple[str, ...]
    ended: bool
    trained: bool
    """Whether a round has completed a step, as far as operators know."""
    incidents: Mapping[str, Object]
    requested_quarantines: tuple[tuple[str, str], ...]
    """(node, incident) of the requested quarantines."""

    @classmethod
    def from_object(cls, body: Object) -> Bookkeeping:
        job, plan, state = body["metadata"]["name"], body["plan"], body["state"]
        placement, incidents, lifecycle = state["placement"], state["incidents"], state["lifecycle"]
        columns, members = placement["workers"], plan["members"]
        names, uids = list(_iterate_worker_names(columns, job)), columns["uids"].split(" ")
        marks = columns.get("marks", {})
        entries = [
            WorkerEntry(
                name, uids[i], marks.get(str(i), {}).get("leaving", ""), marks.get(str(i), {}).get("dead", False)
            )
            for i, name in enumerate(names)
        ]
        incarnations = placement["incarnations"]
        return cls(
            version=plan["version"],
            membership=plan["membership"],
            round=plan["round"],
            allowed_restarts=plan["restarts"],
            stop=plan["stop"],
            plan=plan,
            rank_assignments=tuple(_iterate_rank_assignments(members, job)),
            workers={entry.name: entry for entry in entries},
            incarnations=dict(
                zip(read_runs(incarnations["ordinals"]), read_runs(incarnations["highest"]), strict=True)
            ),
            restarts=tuple(state["budget"]["restarts"]),
            total_restarts=state["budget"]["totalRestarts"],
            finished=tuple(lifecycle["finished"]),
            ended="completedAt" in lifecycle or bool(lifecycle["failedReason"]),
            trained="trainingSince" in lifecycle,
            incidents={incident["name"]: incident for incident in incidents["current"]},
            requested_quarantines=tuple(
                (request["node"], request["incident"]) for request in incidents["quarantineRequests"]
            ),
        )

    def is_wanted(self, worker: str) -> bool:
        entry = self.workers.get(worker)
        return entry is not None and not entry.leaving


@dataclass
class JobHistory:
    """History of one TrainingJob, by its UID."""

    name: str
    namespace: str
    uid: str
    body: Object | None = None
    """Its present version; None: it is deleted."""
    bookkeeping: Bookkeeping | None = None
    previous_bookkeeping: Bookkeeping | None = None
    """Before the last write; None: that was the first one, or not by an operator."""
    last_wanted: dict[str, float] = field(default_factory=dict)
    """Worker → until when its pod was wanted; infinity: it still is."""
    last_requested: dict[tuple[str, str], float] = field(default_factory=dict)
    """(node, incident) → until when its quarantine was requested; infinity: it still is."""
    restarts: int = 0
    """Maximum that its bookkeeping has counted."""
    incidents: dict[str, str] = field(default_factory=dict)
    """All incidents that its bookkeeping has contained, with their outcomes."""
    most_allowed: dict[int, int] = field(default_factory=dict)
    """Membership → the most restarts that its plan has left to the launchers."""
    allowed_restarts: tuple[int, int] = (0, 0)
    """The smallest and the largest maxRestarts that its spec has had."""

    def is_checkpoint_server(self, pod: Object) -> bool:
        """Return whether this pod of the job is the checkpoint server that its plan names."""
        is_worker = LABEL_WORKER in pod["metadata"]["labels"]
        return not is_worker and self.bookkeeping is not None and bool(self.bookkeeping.plan["checkpoint_server"])

    @property
    def is_deleted(self) -> bool:
        return self.body is None or "deletionTimestamp" in self.body["metadata"]


class ClusterHistory:
    """History of the cluster.

    `now`: returns virtual seconds; `patience`: seconds for which a job that can train may make no progress.
    """

    def __init__(self, now: Callable[[], float], patience: float = math.inf) -> None:
        self.now = now
        self.patience = patience
        self.jobs: dict[str, JobHistory] = {}
        self.nodes: dict[str, Object] = {}
        self.most_nodes = 0
        self.quarantines: dict[str, Object] = {}
        self.last_approved: dict[str, float] = {}
        """Node → until when its quarantine was approved; infinity: it still is."""
        self.last_unready: dict[str, float] = {}
        """Node → when it was last not Ready."""
        self.last_failed_probe: dict[str, float] = {}
        """UID of a node → when a probe pod on it last failed, except for reasons that all nodes share."""
        self.opted_out: dict[str, float] = {}
        """Node → since when it has the opt-out label."""
        self.paused_since = math.inf
        self.restored_at = NEVER_HAPPENED
        """When etcd was last restored from a backup."""
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
        """Return the job that owns this pod or bookkeeping."""
        for owner in body["metadata"].get("ownerReferences", ()):
            if owner["kind"] == "TrainingJob":
                return self._get_or_create_job(owner["uid"], body)
        return None

    def find_job_by_name(self, namespace: str, name: str) -> JobHistory | None:
        """Return the existing job of this name."""
        matches = (job for job in self.jobs.values() if (job.namespace, job.name) == (namespace, name) and job.body)
        return next(matches, None)

    def _get_or_create_job(self, uid: str, body: Object) -> JobHistory:
        metadata = body["metadata"]
        if uid not in self.jobs:
            name = metadata.get("labels", {}).get(LABEL_JOB, metadata["name"])
            self.jobs[uid] = JobHistory(name, metadata["namespace"], uid)
        return self.jobs[uid]

    def _record_job(self, change: ObjectChange) -> None:
        job = self._get_or_create_job(change.object["metadata"]["uid"], change.object)
        job.body = None if change.type == "DELETED" else change.object
        max_restarts = change.object["spec"].get("remediation", {}).get("maxRestarts", 10)
        bounds = job.allowed_restarts if change.type != "ADDED" else (max_restarts, max_restarts)
        job.allowed_restarts = (min(max_restarts, *bounds), max(max_restarts, *bounds))

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
        for name, entry in new.workers.items():
            if not entry.leaving:
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
        """Record the node's state at this time."""
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
    states = [status["state"].get("terminated", {}) for status in probe.get("status", {}).get("containerStatuses", ())]
    return any(SHARED in state.get("message", "") for state in states)


def is_operator_change(change: ObjectChange) -> bool:
    return change.actor.startswith(OPERATOR_PLACE_PREFIX)


def is_refused(job: Object) -> bool:
    """Return whether the job's template is rejected, by its status."""
    conditions = job.get("status", {}).get("conditions", ())
    return any(
        condition["type"] == JobCondition.INVALID_TEMPLATE and condition["status"] == "True" for condition in conditions
    )


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def is_tainted(node: Object) -> bool:
    """Return whether the operator has tainted the node."""
    return any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))


def is_cordoned(node: Object) -> bool:
    """Return whether the operator has cordoned the node, possibly in addition to others."""
    return bool(node["spec"].get("unschedulable")) and FIELD_MANAGER_CORDON in list_cordon_owners(node)


def list_cordon_owners(node: Object) -> tuple[str, ...]:
    """Return the field managers that own the node's cordon."""
    owners = node["metadata"].get("managedFields", ())
    return tuple(entry["manager"] for entry in owners if "f:unschedulable" in entry["fieldsV1"].get("f:spec", {}))


def _iterate_worker_names(columns: Object, job: str) -> Iterator[str]:
    for ordinal, incarnation in zip(read_runs(columns["ordinals"]), read_runs(columns["incarnations"]), strict=True):
        yield f"{job}-w{ordinal}-{incarnation}"


def _iterate_rank_assignments(members: Object, job: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    ranks = members["ranks"]
    for i, name in enumerate(_iterate_worker_names(members, job)):
        yield name, tuple(range(i * ranks, (i + 1) * ranks)) if isinstance(ranks, int) else tuple(ranks[i])

"""NodeHistories as objects: written once for each Incident that ends, pruned, and published.

If an operator crashes between any two calls here, the next call continues from the object. Recording is repeated until
the Incident's end is known to be written, and an Incident counts once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import kopf

from .. import metrics
from ..api.formats import parse_time
from ..api.names import API_VERSION
from ..api.node_history import NodeHistory, NodeHistoryStatus
from ..api.training_job import TrainingJob
from ..async_runtime import OperatorRuntime
from ..decide.nodes.node_history import build_entry, drop_old_entries, rank_unreliable_nodes, with_entry
from ..kube.client import NODE_HISTORIES, NODE_OBJECTS, Cluster, Denied, NotFound, Object, ObjectRejected
from ..kube.server_clock import ServerClock
from ..kube.store import ResourceStore
from ..state.cluster_view import NodeView
from ..state.desired_state import Incident

log = logging.getLogger(__name__)


@dataclass
class NodeHistories:
    """The NodeHistories, listed periodically and not watched: only this operator writes them.

    A deletion by others is not urgent.
    """

    cluster: Cluster
    runtime: OperatorRuntime
    clock: ServerClock
    nodes: ResourceStore[NodeView]
    unreliable_nodes: tuple[str, ...] = ()  # by their histories, worst first
    _histories: ResourceStore[NodeHistory] = field(
        init=False, default_factory=lambda: ResourceStore(NODE_HISTORIES, NodeHistory.parse)
    )
    _write_lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    """Held while a NodeHistory is written."""

    async def record_incident(self, job: TrainingJob, incident: Incident) -> None:
        """Add an Incident that has ended to its node's NodeHistory; idempotent.

        A permanent error (definitions or rights older than this operator) is logged, and the entry is left out: no job
        waits for it. Raises kopf.TemporaryError if a retry may help.
        """
        entry = build_entry(job.namespace, incident, self.runtime.now())
        if entry is None or not incident.node:
            return
        try:
            async with self._write_lock:  # several jobs may have lost the same node
                node = await self.cluster.find(NODE_OBJECTS, incident.node)
                created_at = None if node is None else _get_created_at(node)
                if node is None or (created_at is not None and created_at > incident.detected):
                    return  # the Incident's node is gone, and its history with it
                body = await self._get_or_create_history(node)
                before = NodeHistory.parse(body)
                history = with_entry(before, entry)
                if history != before:
                    body = await self._write_history(body, history)
                self._histories.update(body)
        except (Denied, NotFound, ObjectRejected) as error:
            log.warning("Incident %s is not added to the history of node %s: %s", incident.name, incident.node, error)
        self._refresh_unreliable_nodes()

    async def clean_up(self) -> None:
        """Read all NodeHistories and delete expired entries, unless the clock is in doubt.

        A failed write is retried at the next call, and does not stop the others.
        """
        try:
            await self._histories.refresh(self.cluster, ())
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("NodeHistories cannot be listed: %s", error)
            return
        now = self.runtime.now()
        for outdated in [
            history for history in self._histories if self.clock.agrees and drop_old_entries(history, now) != history
        ]:
            try:
                await self._prune_history(outdated.node, now)
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("the history of node %s is not pruned: %s", outdated.node, error)
        self._refresh_unreliable_nodes()

    def _refresh_unreliable_nodes(self) -> None:
        """Derive from the cached histories what passes and Prometheus use: a pass must not read all histories."""
        now = self.runtime.now()
        nodes = {node.name: node for node in self.nodes}
        self.unreliable_nodes = rank_unreliable_nodes(self._histories, nodes, now)
        metrics.publish_node_history_metrics([drop_old_entries(history, now) for history in self._histories])

    async def _prune_history(self, name: str, now: float) -> None:
        async with self._write_lock:
            body = await self.cluster.find(NODE_HISTORIES, name)
            if body is None:
                self._histories.drop(("", name))
                return
            history = drop_old_entries(NodeHistory.parse(body), now)
            if history.incidents:
                self._histories.update(await self._write_history(body, history))
            else:
                await self.cluster.delete(NODE_HISTORIES, name, uid=history.uid)
                self._histories.drop(("", name))

    async def _get_or_create_history(self, node: Object) -> Object:
        """Return the node's NodeHistory; one of an earlier node of the same name is replaced."""
        cluster, metadata = self.cluster, node["metadata"]
        body = await cluster.find(NODE_HISTORIES, metadata["name"])
        if body is not None and NodeHistory.parse(body).node_uid == metadata["uid"]:
            return body
        if body is not None:
            await cluster.delete(NODE_HISTORIES, metadata["name"], uid=body["metadata"]["uid"])
        owner = {"apiVersion": "v1", "kind": "Node", "name": metadata["name"], "uid": metadata["uid"]}
        return await cluster.create(
            NODE_HISTORIES,
            {
                "apiVersion": API_VERSION,
                "kind": "NodeHistory",
                "metadata": {"name": metadata["name"], "ownerReferences": [owner]},
                "spec": {"nodeUID": metadata["uid"]},
            },
        )

    async def _write_history(self, body: Object, history: NodeHistory) -> Object:
        """Write the history into the object as it was read. Raises Conflict if it has changed since."""
        patch = {
            "metadata": {"resourceVersion": body["metadata"]["resourceVersion"]},
            "status": NodeHistoryStatus.from_incidents(history.incidents).to_patch(),
        }
        return await self.cluster.patch(NODE_HISTORIES, history.node, patch, subresource="status")


def _get_created_at(node: Object) -> float | None:
    """Return the creation time in seconds since the epoch; None: unknown."""
    text = node["metadata"].get("creationTimestamp")
    return parse_time(text) if text else None

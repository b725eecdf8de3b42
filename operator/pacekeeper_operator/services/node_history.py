"""NodeHistories as objects: written once for each Incident that ends, pruned, and shown.

An operator that dies between any two calls here leaves an object that the next call continues from: recording is
repeated until the Incident's end is known to be written, and an Incident counts once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import kopf

from .. import metrics
from ..api import API_VERSION, TrainingJob, NodeHistory, NodeHistoryStatus, parse_time
from ..cluster import NODE_HISTORIES, NODE_OBJECTS, Denied, NotFound, Object, ObjectRejected
from ..decide.node_history import build_entry, rank_unreliable_nodes, with_entry, drop_old_entries
from ..state import Incident

if TYPE_CHECKING:
    from .operator import Operator

log = logging.getLogger(__name__)


async def record_incident(operator: Operator, job: TrainingJob, incident: Incident) -> None:
    """Add an Incident that has ended to its node's NodeHistory. Recording twice is recording once.

    What cannot be written for longer (an installation whose definitions or rights are older than this operator) is
    logged and left out: no job waits for it. Raises kopf.TemporaryError where trying again may help.
    """
    entry = build_entry(job.namespace, incident, operator.runtime.now())
    if entry is None or not incident.node:
        return
    try:
        async with operator.history_lock:  # several jobs may have lost the same node
            node = await operator.cluster.find(NODE_OBJECTS, incident.node)
            if node is None or _get_created_at(node) > incident.detected:
                return  # the node of the Incident is gone, and with it what it would be remembered for
            body = await _get_or_create_history(operator, node)
            known = NodeHistory.parse(body)
            history = with_entry(known, entry)
            if history != known:
                body = await _write_history(operator, body, history)
            operator.histories.update(body)
    except (Denied, NotFound, ObjectRejected) as error:
        log.warning("incident %s is not added to the history of node %s: %s", incident.name, incident.node, error)
    refresh_unreliable_nodes(operator)


async def clean_up_histories(operator: Operator) -> None:
    """Read all NodeHistories and delete what is no longer remembered, unless the time is in doubt. One that cannot be
    written is tried again at the next call, and does not stop the others."""
    try:
        await operator.histories.refresh(operator.cluster, ())
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("NodeHistories cannot be listed: %s", error)
        return
    now = operator.runtime.now()
    for known in [one for one in operator.histories if operator.clock.agrees and drop_old_entries(one, now) != one]:
        try:
            await _prune_history(operator, known.node, now)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("the history of node %s is not pruned: %s", known.node, error)
    refresh_unreliable_nodes(operator)


def refresh_unreliable_nodes(operator: Operator) -> None:
    """Derive from the known histories what passes and Prometheus use: a pass must not go through all of them."""
    now = operator.runtime.now()
    nodes = {node.name: node for node in operator.nodes}
    operator.unreliable_nodes = rank_unreliable_nodes(operator.histories, nodes, now)
    metrics.publish_node_history_metrics([drop_old_entries(one, now) for one in operator.histories])


async def _prune_history(operator: Operator, name: str, now: float) -> None:
    async with operator.history_lock:
        body = await operator.cluster.find(NODE_HISTORIES, name)
        if body is None:
            operator.histories.drop(("", name))
            return
        history = drop_old_entries(NodeHistory.parse(body), now)
        if history.incidents:
            operator.histories.update(await _write_history(operator, body, history))
        else:
            await operator.cluster.delete(NODE_HISTORIES, name, uid=history.uid)
            operator.histories.drop(("", name))


async def _get_or_create_history(operator: Operator, node: Object) -> Object:
    """The node's NodeHistory; that of an earlier node of the same name is replaced by a new one."""
    cluster, metadata = operator.cluster, node["metadata"]
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


async def _write_history(operator: Operator, body: Object, history: NodeHistory) -> Object:
    """The history into its object as it was read. Raises cluster.Conflict where it has changed since."""
    patch = {
        "metadata": {"resourceVersion": body["metadata"]["resourceVersion"]},
        "status": NodeHistoryStatus.from_incidents(history.incidents).to_patch(),
    }
    return await operator.cluster.patch(NODE_HISTORIES, history.node, patch, subresource="status")


def _get_created_at(node: Object) -> float:
    """Seconds since the epoch; 0: it does not say."""
    text = node["metadata"].get("creationTimestamp")
    return parse_time(text) if text else 0.0

"""Looks at nodes before a job's ranks start there: by probe pods in circles, and by what earlier looks have found.

What is found is kept in a NodeProbe of the node's own, so that one look serves all jobs and outlives the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pacekeeper_analysis.errors import InputError

from ..api import API_VERSION, LABEL_CIRCLE, Inconclusive, NodeProbe, PreflightSpec
from ..cluster import NODE_PROBES, NODES, PODS, Cluster, Object
from ..decide.node_circle import FEWEST, Seat, circles, launches
from ..decide.node_probes import slowness, unshared
from ..decide.node_steps import ProbePod
from ..decide.preflight import is_valid
from ..manifests import ProbeTask
from ..observation import NodeCheck
from . import probing
from .operator import Operator

AT_ONCE = 16
"""Circles of a look at many nodes."""
POLL_SECONDS = 0.5
LOOK_SECONDS = 90.0
"""So long one look takes at most; two of them fit into the time that jobs wait by default."""
_FLIGHT = "preflight-"
"""What the names of its pods begin with."""
log = logging.getLogger(__name__)


async def look(
    operator: Operator, wanted: Mapping[str, str], spec: PreflightSpec, since: float, *, gpus: bool = True
) -> dict[str, NodeCheck]:
    """What is known of nodes (name → UID), by UID: from looks that are recent enough for a worker that was made at
    `since`, or from one that is made now. `gpus`: the job uses some; others' are left alone else, and not looked at.
    Raises what the cluster does."""
    async with operator.preflights:  # two at once on a node would measure one another
        nodes = {node["metadata"]["name"]: node for node in await operator.cluster.list(NODES)}
        there = [name for name, uid in wanted.items() if name in nodes and nodes[name]["metadata"]["uid"] == uid]
        found = await _known(operator.cluster, nodes)
        unmet = [name for name in there if name not in found or not is_valid(_check(found[name]), spec, since)]
        unmet += [name for name in there if gpus and name not in unmet and found[name].gpus_left_alone]
        if unmet:
            await _sweep(operator)
            found |= await _probe(operator, unmet, nodes, found, gpus=gpus)
        return {nodes[name]["metadata"]["uid"]: _check(found[name]) for name in there}


async def _sweep(operator: Operator) -> None:
    """An operator that died has left its pods. Nobody looks at nodes now: the caller alone may."""
    for body in await operator.cluster.list(PODS, operator.settings.namespace, labels=LABEL_CIRCLE):
        if body["metadata"].get("labels", {}).get(LABEL_CIRCLE, "").startswith(_FLIGHT):
            await operator.cluster.delete(PODS, body["metadata"]["name"], operator.settings.namespace, grace=0)


def _check(probe: NodeProbe) -> NodeCheck:
    return NodeCheck(probe.at, probe.passed, probe.message)


async def _known(cluster: Cluster, nodes: Mapping[str, Object]) -> dict[str, NodeProbe]:
    """Node → what an earlier look has found. What cannot be read is nothing."""
    found = {}
    for body in await cluster.list(NODE_PROBES):
        name = body["metadata"]["name"]
        try:
            probe = NodeProbe.parse(body["spec"])
        except (InputError, KeyError) as error:
            log.warning("NodeProbe %s is passed over: %s", name, error)
            continue
        if name in nodes and nodes[name]["metadata"]["uid"] == probe.node_uid:
            found[name] = probe
    return found


async def _probe(
    operator: Operator,
    unmet: Sequence[str],
    nodes: Mapping[str, Object],
    known: Mapping[str, NodeProbe],
    *,
    gpus: bool,
) -> dict[str, NodeProbe]:
    """A node that is slow beside others is looked at once more, beside other nodes: somebody may have been busy there
    for a moment."""
    usable = [name for name, node in nodes.items() if probing.is_usable(node)]
    others = sorted((n for n in usable if n not in unmet), key=lambda n: (n not in known or not known[n].passed, n))
    found = await _look_once(operator, unmet, others, nodes, gpus=gpus)
    slow = [name for name, (_, inconclusive) in found.items() if inconclusive is Inconclusive.SLOW]
    if slow:
        passed = [name for name, (probe, _) in found.items() if probe.passed and name not in slow]
        again = await _look_once(operator, slow, [*passed, *others], nodes, gpus=gpus)
        for name, (probe, inconclusive) in again.items():
            confirmed = inconclusive is Inconclusive.SLOW
            found[name] = (replace(probe, passed=False) if confirmed else probe, None)
    left_alone = {name for name in found if not gpus and probing.has_gpus(nodes[name])}
    probes = {name: replace(probe, gpus_left_alone=name in left_alone) for name, (probe, _) in found.items()}
    for name, probe in probes.items():
        await _write(operator.cluster, nodes[name], probe)
    return probes


_Found = tuple[NodeProbe, Inconclusive | None]


async def _look_once(
    operator: Operator, unmet: Sequence[str], others: Sequence[str], nodes: Mapping[str, Object], *, gpus: bool
) -> dict[str, _Found]:
    """Of the unmet ones only; why it says nothing (yet) about a node."""
    planned = circles(unmet, others, lambda name: probing.kind_of(nodes[name]))
    found: dict[str, _Found] = {}
    for start in range(0, len(planned), AT_ONCE):
        found |= await _fly(operator, planned[start : start + AT_ONCE], nodes, unmet if gpus else None)
    return {name: found[name] for name in unmet}


async def _fly(
    operator: Operator,
    planned: Sequence[Sequence[str]],
    nodes: Mapping[str, Object],
    unmet: Sequence[str] | None,
) -> dict[str, _Found]:
    """All these circles at once. `unmet`: whose GPUs are looked at, all that are free; of their company one each. None:
    nobody's are."""
    runtime, flight = operator.runtime, f"{_FLIGHT}{operator.runtime.identifier()}"
    secret, began = runtime.identifier(), runtime.monotonic()
    seats = [[Seat(f"{flight}-{i}-{j}", node) for j, node in enumerate(names)] for i, names in enumerate(planned)]
    owners = {name: await _owner(operator.cluster, nodes[name]) for names in planned for name in names}
    pods: dict[str, ProbePod] = {}
    try:
        while True:
            waited = runtime.monotonic() - began
            bodies = await probing.pods_of(operator.cluster, operator.settings, flight)
            pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
            due = [launch for circle in seats for launch in launches(circle, pods, waited)]
            if waited >= LOOK_SECONDS or (not due and all(pod.ended for pod in pods.values())):
                break
            for launch in due:
                node = nodes[launch.seat.node]
                gpus = 0 if unmet is None else await probing.free_gpus(operator.cluster, node)
                if unmet is not None and launch.seat.node not in unmet:
                    gpus = min(1, gpus)
                task = ProbeTask(flight, secret, gpus, launch.peers, launch.guests)
                owner = owners[launch.seat.node]
                await probing.start(
                    operator.cluster, operator.settings, launch.seat.pod, node, owner, "NodeProbe", task
                )
            await runtime.sleep(POLL_SECONDS)
    finally:
        await probing.end(operator.cluster, operator.settings, flight)
    return {seat.node: _judged(seat, circle, pods, nodes, runtime.now()) for circle in seats for seat in circle}


def _judged(
    seat: Seat,
    circle: Sequence[Seat],
    pods: Mapping[str, ProbePod],
    nodes: Mapping[str, Object],
    now: float,
) -> _Found:
    """What one look has come to. Where others do not end either, it may be the whole cluster that is slow."""
    pod = pods.get(seat.pod, ProbePod(phase=""))
    others = tuple(pods[other.pod] for other in circle if other.pod in pods and other != seat)
    probe = NodeProbe(nodes[seat.node]["metadata"]["uid"], now, None, pod.message, pod.figures)
    if not pod.ended:
        only = bool(pod.phase) and sum(other.phase == "Succeeded" for other in others) >= FEWEST - 1
        reason = pod.inconclusive or (Inconclusive.SLOW if only else Inconclusive.NOT_RUN)
        words = f"its probe pod did not end within {LOOK_SECONDS:.0f} s" + (f": {pod.message}" if pod.message else "")
        return replace(probe, message=words), reason
    if pod.phase == "Failed":
        company = tuple(other for name, other in pods.items() if name != seat.pod)  # of other circles, too
        shared, why = unshared(replace(pod, others=company))
        return replace(probe, passed=None if shared else False, message=f"{pod.message}{why}"), shared
    words = slowness(replace(pod, others=others))
    if words:
        return replace(probe, passed=True, message=f"slow: {words}"), Inconclusive.SLOW
    alone = "" if len(circle) >= FEWEST else "there was no other node of its kind to hold it against"
    return replace(probe, passed=True, message="; ".join(filter(None, (pod.message, alone)))), None


async def _owner(cluster: Cluster, node: Object) -> Object:
    """The node's NodeProbe, with which its probe pods go."""
    name = node["metadata"]["name"]
    return await cluster.find(NODE_PROBES, name) or await _write(cluster, node, NodeProbe(node["metadata"]["uid"], 0.0))


async def _write(cluster: Cluster, node: Object, probe: NodeProbe) -> Object:
    """Whatever stood there before: the newest look counts."""
    name = node["metadata"]["name"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": "NodeProbe",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": probe.to_json(),
    }
    known = await cluster.find(NODE_PROBES, name)
    if known is None:
        return await cluster.create(NODE_PROBES, body)
    body["metadata"] = {**known["metadata"], **body["metadata"]}
    return await cluster.replace(NODE_PROBES, body)

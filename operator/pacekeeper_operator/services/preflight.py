"""Looks at nodes before a job's ranks start there: by probe pods in circles, and by what earlier looks have found.

What is found is kept in a NodeProbe of the node's own, so that one look serves all jobs and outlives the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pacekeeper_analysis.errors import InputError

from ..api import API_VERSION, LABEL_PROBE_GROUP, InconclusiveReason, NodeProbe, PreflightSpec
from ..cluster import NODE_PROBES, NODE_OBJECTS, PODS, Cluster, Object
from ..decide.node_circle import MIN_PROBE_GROUP_NODES, ProbeGroupMember, form_probe_groups, plan_probe_launches
from ..decide.node_probes import describe_pod_slowness, explain_inconclusive
from ..decide.node_steps import ProbePod
from ..decide.preflight import is_check_valid
from ..manifests import NodeProbeTask
from ..observation import NodeCheck
from . import probing
from .operator import Operator
from .probe_claims import GPU_NODES_AT_ONCE, ProbeClaims

MAX_CONCURRENT_PROBE_GROUPS = 16
"""Circles of a look at many nodes."""
PROBE_GROUP_POLL_SECONDS = 0.5
PROBE_GROUP_TIMEOUT_SECONDS = 90.0
"""So long one look takes at most; two of them fit into the time that jobs wait by default."""
_RUN_PREFIX = "preflight-"
"""What the names of its pods begin with."""
log = logging.getLogger(__name__)


async def check_nodes(
    operator: Operator, wanted: Mapping[str, str], spec: PreflightSpec, since: float, *, gpus: bool = True
) -> dict[str, NodeCheck]:
    """What is known of nodes (name → UID), by UID: from looks that are recent enough for a worker that was made at
    `since`, or from one that is made now. `gpus`: the job uses some; others' are left alone else, and not looked at.
    Looks of several jobs run next to each other; a node that another one looks at is waited for, and then known.
    Raises what the cluster does."""
    claims = operator.probe_claims
    nodes = {node["metadata"]["name"]: node for node in await operator.cluster.list(NODE_OBJECTS)}
    there = [name for name, uid in wanted.items() if name in nodes and nodes[name]["metadata"]["uid"] == uid]
    own: dict[str, NodeProbe] = {}
    found: dict[str, NodeProbe] = {}

    def is_unknown(name: str) -> bool:
        return name not in own and (name not in found or not is_check_valid(_convert_probe(found[name]), spec, since))

    def lacks_gpus(name: str) -> bool:
        return gpus and name in found and found[name].gpus_left_alone and not claims.is_resting(name)

    unmet: list[str] | None = None
    while True:
        found = await _list_earlier_probes(operator.cluster, nodes) | own
        asked = there if unmet is None else unmet
        unknown = [name for name in asked if is_unknown(name)]
        left = [name for name in asked if name not in own and name not in unknown and lacks_gpus(name)]
        unmet = [*unknown, *left[:GPU_NODES_AT_ONCE]]  # of no more than may be looked at: the next job takes on
        if not unmet:
            return {nodes[name]["metadata"]["uid"]: _convert_probe(found[name]) for name in there if name in found}
        released = claims.released
        async with claims.turns:
            if released.is_set():  # others have looked at nodes before its turn came
                found = await _list_earlier_probes(operator.cluster, nodes) | own
                unmet = [name for name in unmet if is_unknown(name) or lacks_gpus(name)]
            looked = await _probe_nodes(operator, unmet, nodes, found, gpus=gpus)
        own |= looked
        if unmet and not looked:
            await claims.wait_for(released, PROBE_GROUP_TIMEOUT_SECONDS)


async def _delete_leftover_pods(operator: Operator) -> None:
    """An operator that died has left its pods."""
    for body in await operator.cluster.list(PODS, operator.settings.namespace, labels=LABEL_PROBE_GROUP):
        flight = body["metadata"].get("labels", {}).get(LABEL_PROBE_GROUP, "")
        if flight.startswith(_RUN_PREFIX) and flight not in operator.probe_claims.flights:
            await operator.cluster.delete(PODS, body["metadata"]["name"], operator.settings.namespace, grace=0)


def _convert_probe(probe: NodeProbe) -> NodeCheck:
    return NodeCheck(probe.at, probe.passed, probe.message)


async def _list_earlier_probes(cluster: Cluster, nodes: Mapping[str, Object]) -> dict[str, NodeProbe]:
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


_Circles = Sequence[Sequence[str]]
_ProbeOutcome = tuple[NodeProbe, InconclusiveReason | None]


async def _probe_nodes(
    operator: Operator,
    unmet: Sequence[str],
    nodes: Mapping[str, Object],
    known: Mapping[str, NodeProbe],
    *,
    gpus: bool,
) -> dict[str, NodeProbe]:
    """Looks at as many of them as one flight takes; none where other preflights have to end first."""
    claims = operator.probe_claims
    planned = _plan(claims, unmet, nodes, known)
    if not planned:
        return {}
    held = {name for names in planned for name in names}
    claims.claim(held)
    unmet = [name for name in unmet if name in held]
    takers: set[str] = set()
    try:
        await _delete_leftover_pods(operator)
        takers, left_alone = await _take_gpus(operator, planned, unmet, nodes, known, gpus=gpus)
        flown = await _run_batch(operator, planned, nodes, unmet, takers)
        found = {name: flown[name] for name in unmet}
        # A node that is slow beside others is looked at once more, beside other nodes: somebody may have been busy
        # there for a moment. Nodes that are not needed for it are free for others.
        if slow := [name for name, (_, inconclusive) in found.items() if inconclusive is InconclusiveReason.SLOW]:
            passed = [name for name, (probe, _) in found.items() if probe.passed and name not in slow]
            others = [*passed, *_company(claims, unmet, nodes, known, held)]
            again = form_probe_groups(slow, others, lambda name: probing.get_machine_kind(nodes[name]))
            needed = {name for names in again for name in names}
            claims.claim(needed - held)
            held, spare = needed, held - needed
            claims.release(spare)
            found |= _confirm(await _run_batch(operator, again, nodes, slow, takers), slow)
        probes = {name: replace(probe, gpus_left_alone=name in left_alone) for name, (probe, _) in found.items()}
        for name, probe in probes.items():
            await _write_probe(operator.cluster, nodes[name], probe)
        return probes
    finally:
        claims.release_gpus(takers, takers.intersection(unmet))
        claims.release(held)


def _plan(
    claims: ProbeClaims, unmet: Sequence[str], nodes: Mapping[str, Object], known: Mapping[str, NodeProbe]
) -> list[tuple[str, ...]]:
    """Circles of nodes that nobody looks at now. One that is too small to tell which node is slow waits where nodes of
    its kind are only busy."""

    def kind(name: str) -> tuple[str, ...]:
        return probing.get_machine_kind(nodes[name])

    free = [name for name in unmet if claims.is_free(name)]
    found = form_probe_groups(free, _company(claims, unmet, nodes, known), kind)
    busy = {kind(name) for name, node in nodes.items() if not claims.is_free(name) and probing.is_usable(node)}
    return [names for names in found if len(names) >= MIN_PROBE_GROUP_NODES or kind(names[0]) not in busy][:MAX_CONCURRENT_PROBE_GROUPS]


def _company(
    claims: ProbeClaims,
    unmet: Sequence[str],
    nodes: Mapping[str, Object],
    known: Mapping[str, NodeProbe],
    held: Collection[str] = (),
) -> list[str]:
    """Nodes that may be asked for company now, best first. `held`: claimed by the caller."""
    usable = [
        name
        for name, node in nodes.items()
        if name not in unmet and (claims.is_free(name) or name in held) and probing.is_usable(node)
    ]
    return sorted(usable, key=lambda n: (n not in known or not known[n].passed, n))


async def _take_gpus(
    operator: Operator,
    planned: _Circles,
    unmet: Sequence[str],
    nodes: Mapping[str, Object],
    known: Mapping[str, NodeProbe],
    *,
    gpus: bool,
) -> tuple[set[str], set[str]]:
    """Nodes whose free GPUs the flight may hold, company included, and unmet ones whose GPUs it leaves alone. A circle
    gets the GPUs of all its nodes or of none, so that what fails on one can be seen to work on another. The caller
    releases those that it gets; where this raises, none are claimed."""
    claims = operator.probe_claims
    asked = [name for name in unmet if probing.has_gpus(nodes[name])]
    due = [name for name in asked if gpus and not _rests(claims, name, known)]
    free = {name for name in due if await probing.count_free_gpus(operator.cluster, nodes[name])}
    takers, left_alone = set[str](), set(asked).difference(due)
    for names in planned:
        company = {name for name in names if name not in unmet and probing.has_gpus(nodes[name])}
        wanted = free.intersection(names) | company if free.intersection(names) else set[str]()
        if claims.has_gpu_room(len(wanted)):
            claims.claim_gpus(wanted)
            takers |= wanted
        else:
            left_alone |= wanted - company
    return takers, left_alone


def _rests(claims: ProbeClaims, name: str, known: Mapping[str, NodeProbe]) -> bool:
    """One that failed is looked at in full, or a look without its GPUs would clear it."""
    return claims.is_resting(name) and not (name in known and known[name].passed is False)


def _confirm(again: Mapping[str, _ProbeOutcome], slow: Sequence[str]) -> dict[str, _ProbeOutcome]:
    """What a second look makes of nodes that were slow in the first."""
    found = {name: again[name] for name in slow}
    return {
        name: (replace(probe, passed=False) if inconclusive is InconclusiveReason.SLOW else probe, None)
        for name, (probe, inconclusive) in found.items()
    }


async def _run_batch(
    operator: Operator, planned: _Circles, nodes: Mapping[str, Object], unmet: Sequence[str], takers: Collection[str]
) -> dict[str, _ProbeOutcome]:
    """All these circles at once. `takers`: whose GPUs are looked at, all that are free; of company one each."""
    runtime, flight = operator.runtime, f"{_RUN_PREFIX}{operator.runtime.create_identifier()}"
    secret, began = runtime.create_identifier(), runtime.monotonic()
    seats = [[ProbeGroupMember(f"{flight}-{i}-{j}", node) for j, node in enumerate(names)] for i, names in enumerate(planned)]
    owners = {name: await find_owner(operator.cluster, nodes[name]) for names in planned for name in names}
    pods: dict[str, ProbePod] = {}
    operator.probe_claims.flights.add(flight)
    try:
        while True:
            waited = runtime.monotonic() - began
            bodies = await probing.list_probe_group_pods(operator.cluster, operator.settings, flight)
            pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
            due = [launch for circle in seats for launch in plan_probe_launches(circle, pods, waited)]
            if waited >= PROBE_GROUP_TIMEOUT_SECONDS or (not due and all(pod.ended for pod in pods.values())):
                break
            for launch in due:
                node = nodes[launch.member.node]
                gpus = await probing.count_free_gpus(operator.cluster, node) if launch.member.node in takers else 0
                if launch.member.node not in unmet:
                    gpus = min(1, gpus)
                task = NodeProbeTask(flight, secret, gpus, launch.peers, launch.participants)
                owner = owners[launch.member.node]
                await probing.start_probe_pod(
                    operator.cluster, operator.settings, launch.member.pod, node, owner, "NodeProbe", task
                )
            await runtime.sleep(PROBE_GROUP_POLL_SECONDS)
    finally:
        try:
            await probing.delete_probe_group_pods(operator.cluster, operator.settings, flight)
        finally:
            operator.probe_claims.flights.discard(flight)
    pods = {name: replace(pod, failing_check=operator.node_registry.failing_check) for name, pod in pods.items()}
    return {seat.node: _conclude_probe(seat, circle, pods, nodes, runtime.now()) for circle in seats for seat in circle}


def _conclude_probe(
    seat: ProbeGroupMember,
    circle: Sequence[ProbeGroupMember],
    pods: Mapping[str, ProbePod],
    nodes: Mapping[str, Object],
    now: float,
) -> _ProbeOutcome:
    """What one look has come to. Where others do not end either, it may be the whole cluster that is slow."""
    pod = pods.get(seat.pod, ProbePod(phase=""))
    others = tuple(pods[other.pod] for other in circle if other.pod in pods and other != seat)
    probe = NodeProbe(nodes[seat.node]["metadata"]["uid"], now, None, pod.message, pod.measurements)
    if not pod.ended:
        only = bool(pod.phase) and sum(other.phase == "Succeeded" for other in others) >= MIN_PROBE_GROUP_NODES - 1
        reason = pod.inconclusive or (InconclusiveReason.SLOW if only else InconclusiveReason.NOT_RUN)
        words = f"its probe pod did not end within {PROBE_GROUP_TIMEOUT_SECONDS:.0f} s" + (f": {pod.message}" if pod.message else "")
        return replace(probe, message=words), reason
    if pod.phase == "Failed":
        company = tuple(other for name, other in pods.items() if name != seat.pod)  # of other circles, too
        shared, why = explain_inconclusive(replace(pod, others=company))
        return replace(probe, passed=None if shared else False, message=f"{pod.message}{why}"), shared
    words = describe_pod_slowness(replace(pod, others=others))
    if words:
        return replace(probe, passed=True, message=f"slow: {words}"), InconclusiveReason.SLOW
    alone = "" if len(circle) >= MIN_PROBE_GROUP_NODES else "there was no other node of its kind to hold it against"
    return replace(probe, passed=True, message="; ".join(filter(None, (pod.message, alone)))), None


async def find_owner(cluster: Cluster, node: Object) -> Object:
    """The node's NodeProbe, with which its probe pods go."""
    name = node["metadata"]["name"]
    return await cluster.find(NODE_PROBES, name) or await _write_probe(cluster, node, NodeProbe(node["metadata"]["uid"], 0.0))


async def _write_probe(cluster: Cluster, node: Object, probe: NodeProbe) -> Object:
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

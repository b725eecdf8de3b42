"""Checks nodes before a job's ranks start there, by groups of probe pods and by results of earlier checks.

The result is stored in the node's NodeProbe, so that one check serves all jobs and survives the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pacekeeper_analysis.errors import InputError

from ..api.names import API_VERSION, LABEL_PROBE_GROUP
from ..api.node_probe import InconclusiveReason, NodeProbe
from ..api.training_job import PreflightSpec
from ..decide.nodes.node_probes import describe_pod_slowness, explain_inconclusive
from ..decide.nodes.probe_groups import (
    MIN_PROBE_GROUP_NODES,
    ProbeGroupMember,
    form_probe_groups,
    plan_probe_launches,
)
from ..decide.nodes.quarantine_steps import ProbePod
from ..decide.placement.preflight import is_check_valid
from ..kube.client import NODE_OBJECTS, NODE_PROBES, PODS, Cluster, Object
from ..pods.manifests import NodeProbeTask
from ..state.effect_results import NodeCheck
from . import probing
from .operator import Operator
from .shared.probe_claims import GPU_NODES_AT_ONCE, ProbeClaims

MAX_CONCURRENT_PROBE_GROUPS = 16
"""Probe groups of one batch."""
PROBE_GROUP_POLL_SECONDS = 0.5
PROBE_GROUP_TIMEOUT_SECONDS = 90.0
"""Maximum duration of one batch; two fit into the time that jobs wait by default."""
_RUN_PREFIX = "preflight-"
"""Prefix of the names of a batch's pods."""
log = logging.getLogger(__name__)


async def check_nodes(
    operator: Operator, node_uids: Mapping[str, str], spec: PreflightSpec, since: float, *, gpus: bool = True
) -> dict[str, NodeCheck]:
    """Return the checks of the nodes in `node_uids` (name → UID), by UID.

    An earlier result is used if it is recent enough for a worker that was created at `since`; else the node is probed
    now. `gpus`: the job uses GPUs; otherwise GPUs are neither probed nor held.

    Checks of several jobs run concurrently. A node that another check probes is waited for, and its result is reused.
    Raises the errors of the cluster client.
    """
    claims = operator.probe_claims
    nodes = {node["metadata"]["name"]: node for node in await operator.cluster.list(NODE_OBJECTS)}
    present = [name for name, uid in node_uids.items() if name in nodes and nodes[name]["metadata"]["uid"] == uid]
    new_probes: dict[str, NodeProbe] = {}
    probes: dict[str, NodeProbe] = {}

    def is_unknown(name: str) -> bool:
        return name not in new_probes and (
            name not in probes or not is_check_valid(_convert_probe(probes[name]), spec, since)
        )

    def lacks_gpus(name: str) -> bool:
        return gpus and name in probes and probes[name].gpus_skipped and not claims.is_resting(name)

    pending: list[str] | None = None
    while True:
        probes = await _list_earlier_probes(operator.cluster, nodes) | new_probes
        candidates = present if pending is None else pending
        unknown = [name for name in candidates if is_unknown(name)]
        lacking_gpus = [
            name for name in candidates if name not in new_probes and name not in unknown and lacks_gpus(name)
        ]
        pending = [*unknown, *lacking_gpus[:GPU_NODES_AT_ONCE]]  # limited: the next job's check continues
        if not pending:
            return {nodes[name]["metadata"]["uid"]: _convert_probe(probes[name]) for name in present if name in probes}
        released = claims.released
        async with claims.turns:
            if released.is_set():  # others have probed nodes before this check's turn
                probes = await _list_earlier_probes(operator.cluster, nodes) | new_probes
                pending = [name for name in pending if is_unknown(name) or lacks_gpus(name)]
            probed = await _probe_nodes(operator, pending, nodes, probes, gpus=gpus)
        new_probes |= probed
        if pending and not probed:
            await claims.wait_for(released, PROBE_GROUP_TIMEOUT_SECONDS)


async def _delete_leftover_pods(operator: Operator) -> None:
    """Delete pods that a crashed operator left behind."""
    for body in await operator.cluster.list(PODS, operator.settings.namespace, labels=LABEL_PROBE_GROUP):
        batch = body["metadata"].get("labels", {}).get(LABEL_PROBE_GROUP, "")
        if batch.startswith(_RUN_PREFIX) and batch not in operator.probe_claims.flights:
            await operator.cluster.delete(PODS, body["metadata"]["name"], operator.settings.namespace, grace=0)


def _convert_probe(probe: NodeProbe) -> NodeCheck:
    return NodeCheck(probe.at, probe.passed, probe.message)


async def _list_earlier_probes(cluster: Cluster, nodes: Mapping[str, Object]) -> dict[str, NodeProbe]:
    """Return results of earlier checks by node. Unreadable ones are skipped."""
    probes = {}
    for body in await cluster.list(NODE_PROBES):
        name = body["metadata"]["name"]
        try:
            probe = NodeProbe.parse(body["spec"])
        except (InputError, KeyError) as error:
            log.warning("NodeProbe %s cannot be read and is ignored: %s", name, error)
            continue
        if name in nodes and nodes[name]["metadata"]["uid"] == probe.node_uid:
            probes[name] = probe
    return probes


_Circles = Sequence[Sequence[str]]
_ProbeOutcome = tuple[NodeProbe, InconclusiveReason | None]


async def _probe_nodes(
    operator: Operator,
    pending: Sequence[str],
    nodes: Mapping[str, Object],
    earlier: Mapping[str, NodeProbe],
    *,
    gpus: bool,
) -> dict[str, NodeProbe]:
    """Probe as many of the nodes as one batch takes; none if other checks have to end first."""
    claims = operator.probe_claims
    groups = _plan_probe_groups(claims, pending, nodes, earlier)
    if not groups:
        return {}
    claimed = {name for names in groups for name in names}
    claims.claim(claimed)
    pending = [name for name in pending if name in claimed]
    gpu_nodes: set[str] = set()
    try:
        await _delete_leftover_pods(operator)
        gpu_nodes, skipped = await _take_gpus(operator, groups, pending, nodes, earlier, gpus=gpus)
        results = await _run_batch(operator, groups, nodes, pending, gpu_nodes)
        outcomes = {name: results[name] for name in pending}
        # A node that is slow compared to others is probed once more, compared to other nodes: a process may have been
        # busy there for a moment. Nodes that are not needed for that are released.
        if slow := [name for name, (_, inconclusive) in outcomes.items() if inconclusive is InconclusiveReason.SLOW]:
            passed = [name for name, (probe, _) in outcomes.items() if probe.passed and name not in slow]
            companions = [*passed, *_find_companions(claims, pending, nodes, earlier, claimed)]
            retry_groups = form_probe_groups(slow, companions, lambda name: probing.get_machine_kind(nodes[name]))
            needed = {name for names in retry_groups for name in names}
            claims.claim(needed - claimed)
            claimed, unneeded = needed, claimed - needed
            claims.release(unneeded)
            outcomes |= _confirm_slow_nodes(await _run_batch(operator, retry_groups, nodes, slow, gpu_nodes), slow)
        probes = {name: replace(probe, gpus_skipped=name in skipped) for name, (probe, _) in outcomes.items()}
        for name, probe in probes.items():
            await _write_probe(operator.cluster, nodes[name], probe)
        return probes
    finally:
        claims.release_gpus(gpu_nodes, gpu_nodes.intersection(pending))
        claims.release(claimed)


def _plan_probe_groups(
    claims: ProbeClaims, pending: Sequence[str], nodes: Mapping[str, Object], earlier: Mapping[str, NodeProbe]
) -> list[tuple[str, ...]]:
    """Plan groups of nodes that no other check probes now.

    A group that is too small to show which node is slow waits while nodes of its kind are busy.
    """

    def kind(name: str) -> tuple[str, ...]:
        return probing.get_machine_kind(nodes[name])

    free = [name for name in pending if claims.is_free(name)]
    groups = form_probe_groups(free, _find_companions(claims, pending, nodes, earlier), kind)
    busy_kinds = {kind(name) for name, node in nodes.items() if not claims.is_free(name) and probing.is_usable(node)}
    return [names for names in groups if len(names) >= MIN_PROBE_GROUP_NODES or kind(names[0]) not in busy_kinds][
        :MAX_CONCURRENT_PROBE_GROUPS
    ]


def _find_companions(
    claims: ProbeClaims,
    pending: Sequence[str],
    nodes: Mapping[str, Object],
    earlier: Mapping[str, NodeProbe],
    claimed: Collection[str] = (),
) -> list[str]:
    """Return usable nodes for comparison, best first. `claimed`: claimed by the caller."""
    usable = [
        name
        for name, node in nodes.items()
        if name not in pending and (claims.is_free(name) or name in claimed) and probing.is_usable(node)
    ]
    return sorted(usable, key=lambda n: (n not in earlier or not earlier[n].passed, n))


async def _take_gpus(
    operator: Operator,
    groups: _Circles,
    pending: Sequence[str],
    nodes: Mapping[str, Object],
    earlier: Mapping[str, NodeProbe],
    *,
    gpus: bool,
) -> tuple[set[str], set[str]]:
    """Claim free GPUs for the batch.

    Returns the nodes whose GPUs it may hold, and pending nodes whose GPUs it does not probe.

    A group gets the GPUs of all its nodes or of none. A check that fails on one node can then be seen to work on
    another. The caller releases the claimed ones. If this raises, none are claimed.
    """
    claims = operator.probe_claims
    with_gpus = [name for name in pending if probing.has_gpus(nodes[name])]
    due = [name for name in with_gpus if gpus and not _is_resting(claims, name, earlier)]
    free = {name for name in due if await probing.count_free_gpus(operator.cluster, nodes[name])}
    gpu_nodes, skipped = set[str](), set(with_gpus).difference(due)
    for names in groups:
        companions = {name for name in names if name not in pending and probing.has_gpus(nodes[name])}
        group_nodes = free.intersection(names) | companions if free.intersection(names) else set[str]()
        if claims.has_gpu_room(len(group_nodes)):
            claims.claim_gpus(group_nodes)
            gpu_nodes |= group_nodes
        else:
            skipped |= group_nodes - companions
    return gpu_nodes, skipped


def _is_resting(claims: ProbeClaims, name: str, earlier: Mapping[str, NodeProbe]) -> bool:
    """Return whether the node's GPUs are not probed now.

    A failed node is always probed in full, or it would pass without.
    """
    return claims.is_resting(name) and not (name in earlier and earlier[name].passed is False)


def _confirm_slow_nodes(retried: Mapping[str, _ProbeOutcome], slow: Sequence[str]) -> dict[str, _ProbeOutcome]:
    """Combine the second results of nodes that were slow in the first batch: a node that is slow again fails."""
    outcomes = {name: retried[name] for name in slow}
    return {
        name: (replace(probe, passed=False) if inconclusive is InconclusiveReason.SLOW else probe, None)
        for name, (probe, inconclusive) in outcomes.items()
    }


async def _run_batch(
    operator: Operator,
    groups: _Circles,
    nodes: Mapping[str, Object],
    pending: Sequence[str],
    gpu_nodes: Collection[str],
) -> dict[str, _ProbeOutcome]:
    """Run all groups concurrently.

    `gpu_nodes`: nodes whose free GPUs are all probed; on comparison nodes only one is.
    """
    runtime, batch = operator.runtime, f"{_RUN_PREFIX}{operator.runtime.create_identifier()}"
    secret, began = runtime.create_identifier(), runtime.monotonic()
    members_by_group = [
        [ProbeGroupMember(f"{batch}-{i}-{j}", node) for j, node in enumerate(names)] for i, names in enumerate(groups)
    ]
    owners = {name: await find_owner(operator.cluster, nodes[name]) for names in groups for name in names}
    pods: dict[str, ProbePod] = {}
    operator.probe_claims.flights.add(batch)
    try:
        while True:
            waited = runtime.monotonic() - began
            bodies = await probing.list_probe_group_pods(operator.cluster, operator.settings, batch)
            pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
            due = [launch for members in members_by_group for launch in plan_probe_launches(members, pods, waited)]
            if waited >= PROBE_GROUP_TIMEOUT_SECONDS or (not due and all(pod.ended for pod in pods.values())):
                break
            for launch in due:
                node = nodes[launch.member.node]
                gpus = await probing.count_free_gpus(operator.cluster, node) if launch.member.node in gpu_nodes else 0
                if launch.member.node not in pending:
                    gpus = min(1, gpus)
                task = NodeProbeTask(batch, secret, gpus, launch.peers, launch.participants)
                owner = owners[launch.member.node]
                await probing.start_probe_pod(
                    operator.cluster, operator.settings, launch.member.pod, node, owner, "NodeProbe", task
                )
            await runtime.sleep(PROBE_GROUP_POLL_SECONDS)
    finally:
        try:
            await probing.delete_probe_group_pods(operator.cluster, operator.settings, batch)
        finally:
            operator.probe_claims.flights.discard(batch)
    pods = {name: replace(pod, failing_check=operator.node_registry.failing_check) for name, pod in pods.items()}
    return {
        member.node: _conclude_probe(member, members, pods, nodes, runtime.now())
        for members in members_by_group
        for member in members
    }


def _conclude_probe(
    member: ProbeGroupMember,
    members: Sequence[ProbeGroupMember],
    pods: Mapping[str, ProbePod],
    nodes: Mapping[str, Object],
    now: float,
) -> _ProbeOutcome:
    """Derive the result of one probe pod. If the others do not end either, the whole cluster may be slow."""
    pod = pods.get(member.pod, ProbePod(phase=""))
    peers = tuple(pods[peer.pod] for peer in members if peer.pod in pods and peer != member)
    probe = NodeProbe(nodes[member.node]["metadata"]["uid"], now, None, pod.message, pod.measurements)
    if not pod.ended:
        peers_passed = bool(pod.phase) and sum(peer.phase == "Succeeded" for peer in peers) >= MIN_PROBE_GROUP_NODES - 1
        reason = pod.inconclusive or (InconclusiveReason.SLOW if peers_passed else InconclusiveReason.NOT_RUN)
        description = f"its probe pod did not end within {PROBE_GROUP_TIMEOUT_SECONDS:.0f} s" + (
            f": {pod.message}" if pod.message else ""
        )
        return replace(probe, message=description), reason
    if pod.phase == "Failed":
        all_peers = tuple(peer for name, peer in pods.items() if name != member.pod)  # also of other groups
        cause, explanation = explain_inconclusive(replace(pod, group_peers=all_peers))
        return replace(probe, passed=None if cause else False, message=f"{pod.message}{explanation}"), cause
    description = describe_pod_slowness(replace(pod, group_peers=peers))
    if description:
        return replace(probe, passed=True, message=f"slow: {description}"), InconclusiveReason.SLOW
    note = "" if len(members) >= MIN_PROBE_GROUP_NODES else "there was no other node of its kind to compare it with"
    return replace(probe, passed=True, message="; ".join(filter(None, (pod.message, note)))), None


async def find_owner(cluster: Cluster, node: Object) -> Object:
    """Return the node's NodeProbe, which owns its probe pods, and create it if needed."""
    name = node["metadata"]["name"]
    return await cluster.find(NODE_PROBES, name) or await _write_probe(
        cluster, node, NodeProbe(node["metadata"]["uid"], 0.0)
    )


async def _write_probe(cluster: Cluster, node: Object, probe: NodeProbe) -> Object:
    """Store the newest result, and replace an earlier one."""
    name = node["metadata"]["name"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": "NodeProbe",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": probe.to_json(),
    }
    existing = await cluster.find(NODE_PROBES, name)
    if existing is None:
        return await cluster.create(NODE_PROBES, body)
    body["metadata"] = {**existing["metadata"], **body["metadata"]}
    return await cluster.replace(NODE_PROBES, body)

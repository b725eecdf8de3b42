"""Checks on nodes that are not suspected whether probe pods can pass in this cluster at all.

If they cannot (an image that cannot be pulled, denied egress, a missing runtime class), probes convict no node; see
`decide.nodes.node_probes`. Broken nodes then stay in use, and the platform team would learn the cause only from the
first suspicion. A failure here convicts no node, either.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import kopf

from .. import metrics
from ..api.node_probe import InconclusiveReason
from ..decide.nodes.node_probes import failed_alike
from ..decide.nodes.quarantine_steps import ProbePod
from ..kube.client import NODE_OBJECTS, Denied, Object, ObjectRejected
from ..pods.manifests import NodeProbeTask
from . import events, probing
from .operator import Operator
from .preflight import find_owner

FIRST_SECONDS = 300.0
"""Seconds after the operator begins to lead: an installation or upgrade is complete by then."""
PERIOD_SECONDS = 3600.0
AGAIN_SECONDS = 300.0
"""Interval while probe pods cannot pass, so that a repair is noticed."""
MOST_NODES = 3
"""Maximum number of nodes that are probed one by one until one passes: the first may be broken itself."""
POLL_SECONDS = 1.0
CIRCLE = "known-good"
"""Label of the check's pods."""
log = logging.getLogger(__name__)


async def watch_over(operator: Operator) -> None:
    """Check every hour if the platform lets the operator quarantine nodes, until cancelled."""
    pause = FIRST_SECONDS
    while operator.node_registry.rules.acts:
        await operator.runtime.sleep(pause)
        pause = AGAIN_SECONDS
        if not operator.is_leader() or operator.paused:
            continue
        try:
            await check_probes(operator)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("the check whether probe pods can pass failed; retrying: %s", error)
            continue
        pause = AGAIN_SECONDS if operator.node_registry.failing_check else PERIOD_SECONDS


async def check_probes(operator: Operator) -> None:
    """Probe known-good nodes, one at a time, until one passes. If no node is free, nothing changes.

    Raises the errors of the cluster client.
    """
    await probing.delete_probe_group_pods(
        operator.cluster, operator.settings, CIRCLE
    )  # left behind by a crashed operator
    nodes = {node["metadata"]["name"]: node for node in await operator.cluster.list(NODE_OBJECTS)}
    failed: list[ProbePod] = []
    for name in _choose_nodes(operator, nodes)[:MOST_NODES]:
        pod = await _probe_node(operator, nodes[name])
        if pod.phase == "Succeeded":
            await _report_change(
                operator, nodes[name], "", f"a probe pod on {name}, which is not suspected, has passed"
            )
            return
        if pod.phase and pod.inconclusive is not InconclusiveReason.NOT_RUN:
            log.warning("a probe pod on %s, which is not suspected, did not pass: %s", name, pod.message)
            failed.append(pod)
    if failing := failed_alike(failed):
        names, last = ", ".join(pod.node for pod in failed), failed[-1]
        message = f"probe pods do not pass on {names}, which are not suspected: {last.message}"
        await _report_change(operator, nodes[last.node], failing, message)


def _choose_nodes(operator: Operator, nodes: Mapping[str, Object]) -> list[str]:
    """Return nodes that are Ready, not suspected, and without workers; those with GPUs first, in varying order."""
    used_nodes = {pod.node for pod in operator.stores.pods if not pod.ended}
    salt = f"{operator.runtime.now():.0f}"

    def is_known_good(name: str) -> bool:
        suspected = operator.node_registry.quarantines.get(("", name)) is not None
        return probing.is_usable(nodes[name]) and not suspected and name not in used_nodes

    def rank(name: str) -> tuple[bool, bool, bytes]:
        digest = hashlib.sha256(f"{salt}/{name}".encode()).digest()
        return not probing.has_gpus(nodes[name]), bool(nodes[name].get("spec", {}).get("taints")), digest

    return sorted(filter(is_known_good, nodes), key=rank)


async def _probe_node(operator: Operator, node: Object) -> ProbePod:
    """Run a probe pod on the node, with one of its GPUs if some are free. A result without a phase means nothing.

    A pod that the API server rejects counts as failed, since it would be rejected on each node.
    """
    name, claims = node["metadata"]["name"], operator.probe_claims
    gpus = await probing.count_single_gpu(operator.cluster, node)
    if (probing.has_gpus(node) and not gpus) or not claims.is_free(name):
        return ProbePod(phase="", node=name)
    claims.claim([name])
    try:
        task = NodeProbeTask(CIRCLE, operator.runtime.create_identifier(), gpus, {}, 0)
        pod = f"{CIRCLE}-{operator.runtime.create_identifier()[:8]}"
        try:
            owner = await find_owner(operator.cluster, node)
            await probing.start_probe_pod(operator.cluster, operator.settings, pod, node, owner, "NodeProbe", task)
        except (Denied, ObjectRejected) as error:
            return ProbePod(phase="Failed", node=name, message=f"the API server rejects it: {error}")
        return await _await_end(operator, name)
    finally:
        claims.release([name])
        await probing.delete_probe_group_pods(operator.cluster, operator.settings, CIRCLE)


async def _await_end(operator: Operator, node: str) -> ProbePod:
    """Return the pod once it has ended, or as it is after the timeout of a suspicion's probe."""
    deadline = operator.runtime.monotonic() + operator.settings.probe_timeout
    while True:
        await operator.runtime.sleep(POLL_SECONDS)
        pods = await probing.list_probe_group_pods(operator.cluster, operator.settings, CIRCLE)
        pod = replace(ProbePod.parse(pods[0]) if pods else ProbePod(phase=""), node=node)
        if pod.ended or not pod.phase:
            return pod
        if operator.runtime.monotonic() >= deadline:
            return replace(pod, message=f"it did not end in time: {pod.message or pod.phase}")


async def _report_change(operator: Operator, node: Object, failing: str, message: str) -> None:
    """Report a change of whether probe pods can pass. `failing`: the check that they fail; empty: they pass."""
    before, operator.node_registry.failing_check = operator.node_registry.failing_check, failing
    metrics.PROBES_CANNOT_PASS.set(bool(failing))
    if bool(before) == bool(failing):
        return
    if failing:
        message += "; until they do, probes convict no node that fails in the same way"
    log.warning("%s", message)
    metadata = node["metadata"]
    reference = {"apiVersion": "v1", "kind": "Node", "name": metadata["name"], "uid": metadata["uid"]}
    reason = "ProbesCannotPass" if failing else "ProbesPassAgain"
    await events.emit_event(
        operator.cluster, operator.runtime, reference, reason, message, "CheckProbes", warning=bool(failing)
    )

"""Checks on nodes that are not suspected whether probe pods can pass in this cluster at all.

Where they cannot (an image that is not pulled, denied egress, a missing runtime class), probes convict no node:
`decide.node_probes.unshared`. Broken nodes then stay in use, and the platform team would learn why only from the first
suspicion. What fails here convicts nobody, either.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import kopf

from .. import metrics
from ..api import Inconclusive
from ..cluster import NODES, Denied, Object, Refused
from ..decide.node_probes import failed_alike
from ..decide.node_steps import ProbePod
from ..manifests import ProbeTask
from . import events, probing
from .operator import Operator
from .preflight import find_owner

FIRST_SECONDS = 300.0
"""After the operator begins to lead: what an installation or an upgrade brings along is there by then."""
PERIOD_SECONDS = 3600.0
AGAIN_SECONDS = 300.0
"""While probe pods cannot pass, so that a repair is noticed."""
MOST_NODES = 3
"""That are probed one after the other until one passes: the first may be broken itself."""
POLL_SECONDS = 1.0
CIRCLE = "known-good"
"""Label of its pods."""
log = logging.getLogger(__name__)


async def watch_over(operator: Operator) -> None:
    """Checks every hour where the platform lets the operator quarantine nodes, until cancelled."""
    pause = FIRST_SECONDS
    while operator.fleet.rules.acts:
        await operator.runtime.sleep(pause)
        pause = AGAIN_SECONDS
        if not operator.leads() or operator.paused:
            continue
        try:
            await check(operator)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("whether probe pods can pass could not be checked, which is tried again: %s", error)
            continue
        pause = AGAIN_SECONDS if operator.fleet.failing_check else PERIOD_SECONDS


async def check(operator: Operator) -> None:
    """Probes known-good nodes, one at a time, until one passes. Where none is free for it, nothing changes. Raises what
    the cluster does."""
    await probing.end(operator.cluster, operator.settings, CIRCLE)  # an operator that died has left it
    nodes = {node["metadata"]["name"]: node for node in await operator.cluster.list(NODES)}
    failed: list[ProbePod] = []
    for name in _choose_nodes(operator, nodes)[:MOST_NODES]:
        pod = await _probe(operator, nodes[name])
        if pod.phase == "Succeeded":
            await _report(operator, nodes[name], "", f"a probe pod on {name}, which is not suspected, has passed")
            return
        if pod.phase and pod.inconclusive is not Inconclusive.NOT_RUN:
            log.warning("a probe pod on %s, which is not suspected, did not pass: %s", name, pod.message)
            failed.append(pod)
    if failing := failed_alike(failed):
        names, last = ", ".join(pod.node for pod in failed), failed[-1]
        words = f"probe pods do not pass on {names}, which are not suspected: {last.message}"
        await _report(operator, nodes[last.node], failing, words)


def _choose_nodes(operator: Operator, nodes: Mapping[str, Object]) -> list[str]:
    """Those that are Ready, not suspected, and without workers; those with GPUs first, and others each time."""
    taken = {pod.node for pod in operator.pods if not pod.ended}
    salt = f"{operator.runtime.now():.0f}"

    def is_known_good(name: str) -> bool:
        suspected = operator.fleet.quarantines.get(("", name)) is not None
        return probing.is_usable(nodes[name]) and not suspected and name not in taken

    def rank(name: str) -> tuple[bool, bool, bytes]:
        draw = hashlib.sha256(f"{salt}/{name}".encode()).digest()
        return not probing.has_gpus(nodes[name]), bool(nodes[name].get("spec", {}).get("taints")), draw

    return sorted(filter(is_known_good, nodes), key=rank)


async def _probe(operator: Operator, node: Object) -> ProbePod:
    """What a probe pod on the node comes to, with one of its GPUs where some are free. Without a phase: it says
    nothing. One that the API server refuses has failed, as on every node."""
    name, claims = node["metadata"]["name"], operator.probe_claims
    gpus = await probing.one_gpu(operator.cluster, node)
    if (probing.has_gpus(node) and not gpus) or not claims.is_free(name):
        return ProbePod(phase="", node=name)
    claims.claim([name])
    try:
        task = ProbeTask(CIRCLE, operator.runtime.identifier(), gpus, {}, 0)
        pod = f"{CIRCLE}-{operator.runtime.identifier()[:8]}"
        try:
            owner = await find_owner(operator.cluster, node)
            await probing.start(operator.cluster, operator.settings, pod, node, owner, "NodeProbe", task)
        except (Denied, Refused) as error:
            return ProbePod(phase="Failed", node=name, message=f"the API server refuses it: {error}")
        return await _await_end(operator, name)
    finally:
        claims.release([name])
        await probing.end(operator.cluster, operator.settings, CIRCLE)


async def _await_end(operator: Operator, node: str) -> ProbePod:
    """The pod as it has ended, or as it is when the time of a suspicion's probe is over."""
    deadline = operator.runtime.monotonic() + operator.settings.probe_timeout
    while True:
        await operator.runtime.sleep(POLL_SECONDS)
        pods = await probing.pods_of(operator.cluster, operator.settings, CIRCLE)
        pod = replace(ProbePod.parse(pods[0]) if pods else ProbePod(phase=""), node=node)
        if pod.ended or not pod.phase:
            return pod
        if operator.runtime.monotonic() >= deadline:
            return replace(pod, message=f"it did not end in time: {pod.message or pod.phase}")


async def _report(operator: Operator, node: Object, failing: str, words: str) -> None:
    """Tells when it changes whether probe pods can pass. `failing`: the check that they fail; "": they pass."""
    before, operator.fleet.failing_check = operator.fleet.failing_check, failing
    metrics.PROBES_CANNOT_PASS.set(bool(failing))
    if bool(before) == bool(failing):
        return
    if failing:
        words += "; until they do, probes convict no node that fails in the same way"
    log.warning("%s", words)
    metadata = node["metadata"]
    reference = {"apiVersion": "v1", "kind": "Node", "name": metadata["name"], "uid": metadata["uid"]}
    reason = "ProbesCannotPass" if failing else "ProbesPassAgain"
    await events.tell_about(
        operator.cluster, operator.runtime, reference, reason, words, "CheckProbes", warning=bool(failing)
    )

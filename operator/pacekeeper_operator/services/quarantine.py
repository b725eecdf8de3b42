"""NodeQuarantines: asking for one, bringing the node to what it says, releasing all of them.

Budget, pause and opt-out bind the operator when it asks for a quarantine. A person may approve or create as many as he
likes, and nothing ever stands in the way of a release, except that a node is not handed back before a probe has passed
when nobody has asked for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable

import kopf

from pacekeeper_analysis.errors import InputError

from .. import manifests
from ..api import (
    API_VERSION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
    ObjectRef,
    QuarantinePhase,
    QuarantineSpec,
)
from ..cluster import CONFIG_MAPS, NODES, PODS, QUARANTINES, Cluster, Conflict, NotFound, Object
from ..decide.node_quarantine import (
    RESYNC_SECONDS,
    Action,
    Delete,
    EndProbe,
    Guard,
    Hold,
    Node,
    ProbePod,
    Quarantine,
    Release,
    Report,
    StartProbe,
    Unguard,
    Wait,
    allowed_nodes,
    decide,
)
from ..runtime import Runtime
from ..settings import Settings
from . import events
from .operator import PAUSE

MAX_STEPS = 20
"""Of one call of `reconcile`: what is not done by then is done by the next."""
AGAIN_SECONDS = 1.0
RETRY_SECONDS = 5.0
GPU = "nvidia.com/gpu"
PROBE_RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
log = logging.getLogger(__name__)

_one_at_a_time = asyncio.Lock()  # between counting and creating, nobody else may create


async def quarantine(
    cluster: Cluster, node: str, node_uid: str, reason: str, incident: ObjectRef, settings: Settings, approved: bool
) -> str:
    """Creates the NodeQuarantine of `node`, where opt-out, pause and budget allow; what became of it, in words.

    Without `approved` it waits, and touches nothing, until a person of the platform team approves it.
    """
    async with _one_at_a_time:
        existing = {body["metadata"]["name"]: body for body in await cluster.list(QUARANTINES)}
        if node in existing:
            return _in_words(Quarantine.parse(existing[node]), node_uid)
        if refused := await _refusal(cluster, node, node_uid, existing.values(), settings, approved):
            return refused
        spec = QuarantineSpec(reason, node_uid, incident, settings.quarantine_expires_after, approved)
        body: Object = {
            "apiVersion": API_VERSION,
            "kind": "NodeQuarantine",
            "metadata": {"name": node, "finalizers": [FINALIZER_QUARANTINE]},
            "spec": {**spec.to_json(), "incidentRef": {"namespace": incident.namespace, "name": incident.name}},
        }
        try:
            return _in_words(Quarantine.parse(await cluster.create(QUARANTINES, body)), node_uid)
        except Conflict:
            return _in_words(Quarantine.parse(await cluster.get(QUARANTINES, node)), node_uid)


async def reconcile(cluster: Cluster, name: str, settings: Settings, now: float) -> float:
    """Brings node and probe pod to what the NodeQuarantine `name` says; seconds until it wants to be called again.

    Level-triggered and idempotent. `now`: seconds since the epoch. math.inf: there is no such NodeQuarantine.
    Raises InputError where the object is malformed, and what the cluster raises.
    """
    for _ in range(MAX_STEPS):
        body = await cluster.find(QUARANTINES, name)
        if body is None:
            return math.inf
        node = await cluster.find(NODES, name)
        action = await _next(cluster, body, node, settings, now)
        if isinstance(action, Wait):
            return action.seconds
        try:
            await _carry_out(cluster, action, body, node, settings)
        except (Conflict, NotFound) as error:
            log.info("quarantine of %s: looking anew: %s", name, error)
    return AGAIN_SECONDS


async def watch_over(cluster: Cluster, settings: Settings, changed: asyncio.Event) -> None:
    """Reconciles all NodeQuarantines until it is cancelled: when `changed` is set, and when one of them wants it."""
    swept = False
    while True:
        changed.clear()
        delay = RETRY_SECONDS
        try:
            if not swept:
                await _sweep(cluster)
                swept = True
            names = [body["metadata"]["name"] for body in await cluster.list(QUARANTINES)]
            delay = min([RESYNC_SECONDS, *[await _try_reconcile(cluster, name, settings) for name in names]])
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("quarantines cannot be looked at, and are tried again: %s", error)
        except Exception:
            log.exception("quarantines cannot be looked at, and are tried again")
        try:
            async with asyncio.timeout(delay):
                await changed.wait()
        except TimeoutError:
            continue


async def release_all(cluster: Cluster, timeout: float) -> None:  # noqa: ASYNC109  # the message names what is left
    """Deletes all NodeQuarantines and returns when their nodes are released, whether the operator runs or not.

    Raises TimeoutError, naming those that are left, after `timeout` seconds.
    """
    left = ["those that could not be listed"]
    try:
        async with asyncio.timeout(timeout):
            while left:
                try:
                    left = await _release_once(cluster)
                except kopf.TemporaryError as error:
                    log.warning("releasing is tried again: %s", error)
                if left:
                    await asyncio.sleep(AGAIN_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"not released within {timeout:.0f} s: {', '.join(left)}") from error


async def _release_once(cluster: Cluster) -> list[str]:
    """Asks for all deletions and does what they demand; the names of those that are left, none if all is done."""
    try:
        quarantines = [body["metadata"] for body in await cluster.list(QUARANTINES)]
    except NotFound:  # the definitions are gone, and all NodeQuarantines with them
        quarantines = []
    for metadata in quarantines:
        await cluster.delete(QUARANTINES, metadata["name"], uid=metadata["uid"])
    for metadata in quarantines:
        await _try_reconcile(cluster, metadata["name"], Settings())
    if not quarantines:
        await _sweep(cluster)
    return [metadata["name"] for metadata in quarantines]


async def _sweep(cluster: Cluster) -> None:
    """Releases nodes with our marks and no NodeQuarantine: somebody has taken a finalizer away by force."""
    for body in await cluster.list(NODES):
        name = body["metadata"]["name"]
        if Node.parse(body).marked and not await _exists(cluster, name):
            await _release(cluster, body)
            await _tell(cluster, None, body, "NodeReleased", "it carried our marks, but there is no NodeQuarantine")


async def _exists(cluster: Cluster, name: str) -> bool:
    return await cluster.find(QUARANTINES, name) is not None


async def _try_reconcile(cluster: Cluster, name: str, settings: Settings) -> float:
    """One that fails does not hold up the others."""
    try:
        return await reconcile(cluster, name, settings, time.time())
    except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
        log.warning("quarantine of %s: %s", name, error)
    except Exception:
        log.exception("quarantine of %s: a pass failed", name)
    return RETRY_SECONDS


async def _refusal(
    cluster: Cluster, node: str, node_uid: str, existing: Iterable[Object], settings: Settings, approved: bool
) -> str:
    """Why no quarantine is created; "": it may be."""
    if settings.paused:
        return f"{node} is not quarantined: remedies are paused by the operator's settings"
    if await cluster.find(CONFIG_MAPS, PAUSE, settings.namespace) is not None:
        return f"{node} is not quarantined: remedies are paused by ConfigMap {settings.namespace}/{PAUSE}"
    nodes = {body["metadata"]["name"]: Node.parse(body) for body in await cluster.list(NODES)}
    if node not in nodes or nodes[node].uid != node_uid:
        return f"{node} is not quarantined: the node that was meant does not exist any more"
    if nodes[node].opted_out:
        return f"{node} is not quarantined: its label {LABEL_NO_QUARANTINE} forbids it"
    # A request to a person takes nothing from the budget, but people are not to be flooded with requests either.
    counted = [body for body in existing if body["spec"].get("approved") or not approved]
    allowed = allowed_nodes(len(nodes), settings.quarantine_max_nodes, settings.quarantine_max_share)
    if len(counted) >= allowed:
        return f"{node} is not quarantined: the budget of {allowed} of {len(nodes)} nodes is spent"
    return ""


def _in_words(found: Quarantine, node_uid: str) -> str:
    """What becomes of a node whose NodeQuarantine exists."""
    if found.deleted or found.status.phase is QuarantinePhase.RELEASED or found.node_uid not in (None, node_uid):
        return f"an earlier quarantine of {found.name} is just being released"
    return (
        f"{found.name} is quarantined" if found.spec.approved else f"the quarantine of {found.name} waits for approval"
    )


async def _next(cluster: Cluster, body: Object, node: Object | None, settings: Settings, now: float) -> Action:
    found = Quarantine.parse(body)
    probe = found.last_probe
    pod = None if probe is None else await cluster.find(PODS, probe.pod, settings.namespace)
    return decide(
        found,
        None if node is None else Node.parse(node),
        None if pod is None else ProbePod.parse(pod),
        settings.probe_timeout,
        now,
    )


async def _carry_out(cluster: Cluster, action: Action, body: Object, node: Object | None, settings: Settings) -> None:
    """One step. It is based upon `body` and `node` as they were read: Conflict, where one of them has changed since."""
    name, finalizers = body["metadata"]["name"], body["metadata"].get("finalizers", [])
    match action:
        case Guard():
            await _patch_metadata(cluster, body, finalizers=[*finalizers, FINALIZER_QUARANTINE])
        case Unguard():
            left = [finalizer for finalizer in finalizers if finalizer != FINALIZER_QUARANTINE]
            await _patch_metadata(cluster, body, finalizers=left)
        case Hold(again) if node is not None:
            await _hold(cluster, node)
            if again:
                note = "taint or cordon was taken away; delete the NodeQuarantine to release the node"
                await _tell(cluster, body, node, "QuarantineRestored", note, warning=True)
        case Release(reason) if node is not None:
            await _release(cluster, node)
            await _tell(cluster, body, node, "NodeReleased", reason)
        case Report(status, event, warning):
            version = {"resourceVersion": body["metadata"]["resourceVersion"]}
            patch = {"metadata": version, "status": status.to_patch()}
            await cluster.patch(QUARANTINES, name, patch, subresource="status")
            if event:
                why = f" ({body['spec']['reason']})" if event == "NodeQuarantined" else ""
                await _tell(cluster, body, node, event, f"{status.message}{why}", warning=warning)
        case StartProbe(pod) if node is not None:
            await _start_probe(cluster, pod, body, node, settings)
        case EndProbe(pod):
            await cluster.delete(PODS, pod, settings.namespace, grace=0)
        case Delete():
            await cluster.delete(QUARANTINES, name, uid=body["metadata"]["uid"])


async def _patch_metadata(cluster: Cluster, body: Object, **changes: object) -> None:
    metadata = {"resourceVersion": body["metadata"]["resourceVersion"], **changes}
    await cluster.patch(QUARANTINES, body["metadata"]["name"], {"metadata": metadata})


async def _hold(cluster: Cluster, node: Object) -> None:
    state = Node.parse(node)
    if not state.tainted:
        await _patch_taints(cluster, node, [*_taints(node), {"key": TAINT_QUARANTINE, "effect": "NoSchedule"}])
    if not state.cordoned:
        await cluster.apply(NODES, _applied(node) | {"spec": {"unschedulable": True}}, manager=FIELD_MANAGER_CORDON)


async def _release(cluster: Cluster, node: Object) -> None:
    state = Node.parse(node)
    if state.tainted:
        await _patch_taints(cluster, node, [taint for taint in _taints(node) if taint["key"] != TAINT_QUARANTINE])
    if state.cordoned:
        await cluster.apply(NODES, _applied(node), manager=FIELD_MANAGER_CORDON)


def _taints(node: Object) -> list[Object]:
    taints: list[Object] = node["spec"].get("taints", [])
    return taints


async def _patch_taints(cluster: Cluster, node: Object, taints: list[Object]) -> None:
    """By compare-and-swap: the API server knows the list only as a whole, and other controllers write it, too.

    Server-side apply would take the others' taints away, and would leave ours when we give up the list.
    """
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    await cluster.patch(NODES, node["metadata"]["name"], {"metadata": version, "spec": {"taints": taints or None}})


def _applied(node: Object) -> Object:
    """What we apply to release the cordon. With the UID, or applying to a node that has gone would create one."""
    metadata = {"name": node["metadata"]["name"], "uid": node["metadata"]["uid"]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


async def _start_probe(cluster: Cluster, pod: str, body: Object, node: Object, settings: Settings) -> None:
    gpus = int(node["status"].get("allocatable", {}).get(GPU, 0))
    resources: Object = PROBE_RESOURCES
    if gpus:
        resources = {**resources, "limits": {**PROBE_RESOURCES["limits"], GPU: str(gpus)}}
    command = ["python", "-m", "pacekeeper_operator.probe", f"--gpus={gpus}"]
    await cluster.create(
        PODS, manifests.probe_pod(pod, settings.namespace, node, body, settings.image, command, resources)
    )


async def _tell(
    cluster: Cluster, body: Object | None, node: Object | None, reason: str, note: str, *, warning: bool = False
) -> None:
    """Events about the node and its quarantine, which `kubectl describe` shows."""
    for regarding in (body, node):
        if regarding is not None:
            reference = {
                "apiVersion": "v1" if regarding is node else API_VERSION,
                "kind": "Node" if regarding is node else "NodeQuarantine",
                "name": regarding["metadata"]["name"],
                "uid": regarding["metadata"]["uid"],
            }
            await events.tell_about(cluster, Runtime(), reference, reason, note, reason, warning=warning)

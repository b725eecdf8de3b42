"""NodeQuarantines: suspecting a node, bringing it to what its quarantine says, releasing all of them.

What jobs say only raises suspicions; witnesses, breaker, budget and pause decide what follows. A person may approve or
create as many quarantines as he likes, and nothing ever stands in the way of a release, except that a node is not
handed back before a probe has passed when nobody has asked for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import (
    API_VERSION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    PAUSE,
    TAINT_QUARANTINE,
    Mode,
    ObjectRef,
    QuarantineSpec,
    QuarantineStatus,
    Sign,
    Verdict,
    Witness,
)
from ..cluster import CONFIG_MAPS, NODES, QUARANTINES, Cluster, Conflict, NotFound, Object
from ..decide.node_circle import Seat, launches
from ..decide.node_quarantine import RESYNC_SECONDS, decide, ruling
from ..decide.node_steps import (
    Approve,
    Around,
    Delete,
    EndProbe,
    Guard,
    Hold,
    Node,
    ProbePod,
    Quarantine,
    QuarantineStep,
    Release,
    Report,
    Rules,
    StartProbe,
    Unguard,
    Wait,
)
from ..decide.node_suspicion import SUSPICION_SECONDS, with_sign, witness_of
from ..manifests import ProbeTask
from ..observation import Ruling
from ..runtime import Runtime
from ..settings import Settings
from . import events, probing

MAX_STEPS = 20
"""Of one call of `reconcile`: what is not done by then is done by the next."""
AGAIN_SECONDS = 1.0
RETRY_SECONDS = 5.0
MAX_REASON = 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blame:
    """What a job says against a node."""

    node: str
    uid: str
    reason: str
    incident: ObjectRef  # its namespace is whose word it is
    at: float  # when it was found, seconds since the epoch: what is said again does not become younger
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to look at the node: it takes a second namespace's
    raised: bool = False  # it has stood in a NodeQuarantine


async def suspect(cluster: Cluster, runtime: Runtime, settings: Settings, blame: Blame) -> Ruling:
    """Raise a suspicion against a node, and what has become of it so far. Saying it twice is saying it once.

    The node stays untouched until a witness confirms it: `watch_over` sees to that. A suspicion that has come to
    nothing is not raised anew by the same words, and whoever deletes its NodeQuarantine has ended it.
    """
    sign = Sign(blame.incident.namespace, blame.incident.name, blame.reason[:MAX_REASON], blame.at)
    sign = replace(sign, witness=blame.witness, weak=blame.weak)
    known = await cluster.find(QUARANTINES, blame.node)
    if known is None:
        return await _refusal(cluster, runtime, settings, blame) or await _create(cluster, settings, blame, sign)
    found = Quarantine.parse(known)
    if found.over or found.node_uid not in (None, blame.uid):
        ending = Ruling(Verdict.RELEASING, f"an earlier quarantine of {blame.node} is just ending: say it again then")
        return _ended(blame) or ending
    signs = with_sign(found.spec.signs, sign)
    if found.suspicion and signs != found.spec.signs:
        version = {"resourceVersion": known["metadata"]["resourceVersion"]}
        spec = {"signs": replace(found.spec, signs=signs).to_json()["signs"]}
        await cluster.patch(QUARANTINES, blame.node, {"metadata": version, "spec": spec})
    return replace(ruling(found, blame.uid), raised=found.suspicion)


async def look(cluster: Cluster, node: str, node_uid: str) -> Ruling | None:
    """What has become of a suspicion; None: there is none (any more)."""
    body = await cluster.find(QUARANTINES, node)
    return None if body is None else ruling(Quarantine.parse(body), node_uid)


class Fleet:
    """What one look at all NodeQuarantines has read of the cluster, once for all of them."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._known: dict[str, Quarantine] | None = None
        self._nodes: int | None = None
        self._paused: str | None = None

    async def around(self, found: Quarantine, node: Node | None) -> Around:
        """Read as far as a decision needs it: all nodes, and the pause, only where this node may be touched now."""
        rules = _rules(self._settings)
        if not found.suspicion:
            return Around(rules)
        if self._known is None:
            self._known = {other.name: other for other in await _all(self._cluster)}
        self._known[found.name] = found
        others = tuple(other for other in self._known.values() if other.name != found.name)
        if node is None or witness_of(found, node) is None:
            return Around(rules, others)
        if self._nodes is None or self._paused is None:
            self._nodes, self._paused = (
                len(await self._cluster.list(NODES)),
                await _paused(self._cluster, self._settings),
            )
        return Around(rules, others, self._nodes, self._paused)


async def reconcile(
    cluster: Cluster, runtime: Runtime, settings: Settings, name: str, fleet: Fleet | None = None
) -> float:
    """Brings node and probe pod to what the NodeQuarantine `name` says; seconds until it wants to be called again.

    Level-triggered and idempotent. math.inf: there is no such NodeQuarantine.
    Raises InputError where the object is malformed, and what the cluster raises.
    """
    fleet, now = fleet or Fleet(cluster, settings), runtime.now()
    for _ in range(MAX_STEPS):
        body = await cluster.find(QUARANTINES, name)
        if body is None:
            return math.inf
        node = await cluster.find(NODES, name)
        step = await _next(cluster, body, node, settings, now, fleet)
        if isinstance(step, Approve):  # never upon old news: somebody may have been blamed or quarantined meanwhile
            step = await _next(cluster, body, node, settings, now, Fleet(cluster, settings))
        if isinstance(step, Wait):
            return step.seconds
        try:
            await _carry_out(cluster, runtime, settings, step, body, node)
        except (Conflict, NotFound) as error:
            log.info("quarantine of %s: looking anew: %s", name, error)
        if isinstance(step, StartProbe):
            return AGAIN_SECONDS  # pods of its circle wait for each other's addresses
    return AGAIN_SECONDS


async def watch_over(cluster: Cluster, runtime: Runtime, settings: Settings, changed: asyncio.Event) -> None:
    """Reconciles all NodeQuarantines until it is cancelled: when `changed` is set, and when one of them wants it."""
    swept = False
    while True:
        changed.clear()
        delay = RETRY_SECONDS
        try:
            if not swept:
                await _sweep(cluster, runtime)
                swept = True
            delay = await _look_at_all(cluster, runtime, settings)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("quarantines cannot be looked at, and are tried again: %s", error)
        except Exception:
            log.exception("quarantines cannot be looked at, and are tried again")
        try:
            await runtime.within(delay, changed.wait())
        except TimeoutError:
            continue


async def _look_at_all(cluster: Cluster, runtime: Runtime, settings: Settings) -> float:
    """Seconds until one of them wants to be looked at again."""
    fleet = Fleet(cluster, settings)
    bodies = await cluster.list(QUARANTINES)
    names = [body["metadata"]["name"] for body in bodies]
    metrics.show_quarantines({body["metadata"]["name"]: _status(body) for body in bodies})
    return min([RESYNC_SECONDS, *[await _try_reconcile(cluster, runtime, settings, name, fleet) for name in names]])


def _status(body: Object) -> QuarantineStatus:
    """As it was last said; one that cannot be read says nothing."""
    try:
        return QuarantineStatus.parse(body.get("status") or {})
    except InputError:
        return QuarantineStatus()


async def release_all(cluster: Cluster, runtime: Runtime, seconds: float) -> None:
    """Deletes all NodeQuarantines and returns when their nodes are released, whether the operator runs or not.

    Raises TimeoutError, naming those that are left, after so many `seconds`.
    """
    left = ["those that could not be listed"]

    async def release() -> None:
        while left:
            try:
                left[:] = await _release_once(cluster, runtime)
            except kopf.TemporaryError as error:
                log.warning("releasing is tried again: %s", error)
            if left:
                await runtime.sleep(AGAIN_SECONDS)

    try:
        await runtime.within(seconds, release())
    except TimeoutError as error:
        raise TimeoutError(f"not released within {seconds:.0f} s: {', '.join(left)}") from error


async def _release_once(cluster: Cluster, runtime: Runtime) -> list[str]:
    """Asks for all deletions and does what they demand; the names of those that are left, none if all is done."""
    try:
        quarantines = [body["metadata"] for body in await cluster.list(QUARANTINES)]
    except NotFound:  # the definitions are gone, and all NodeQuarantines with them
        quarantines = []
    for metadata in quarantines:
        await cluster.delete(QUARANTINES, metadata["name"], uid=metadata["uid"])
    for metadata in quarantines:
        await _try_reconcile(cluster, runtime, Settings(), metadata["name"], Fleet(cluster, Settings()))
    if not quarantines:
        await _sweep(cluster, runtime)
    return [metadata["name"] for metadata in quarantines]


async def _sweep(cluster: Cluster, runtime: Runtime) -> None:
    """Releases nodes with our marks and no NodeQuarantine: somebody has taken a finalizer away by force."""
    for body in await cluster.list(NODES):
        name = body["metadata"]["name"]
        if Node.parse(body).marked and not await _exists(cluster, name):
            await _release(cluster, body)
            await _tell(
                cluster, runtime, None, body, "NodeReleased", "it carried our marks, but there is no NodeQuarantine"
            )


async def _exists(cluster: Cluster, name: str) -> bool:
    return await cluster.find(QUARANTINES, name) is not None


async def _try_reconcile(cluster: Cluster, runtime: Runtime, settings: Settings, name: str, fleet: Fleet) -> float:
    """One that fails does not hold up the others."""
    try:
        return await reconcile(cluster, runtime, settings, name, fleet)
    except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
        log.warning("quarantine of %s: %s", name, error)
    except Exception:
        log.exception("quarantine of %s: a pass failed", name)
    return RETRY_SECONDS


async def _refusal(cluster: Cluster, runtime: Runtime, settings: Settings, blame: Blame) -> Ruling | None:
    """Why no suspicion is raised; None: it may be."""
    if ended := _ended(blame):
        return ended
    if runtime.now() >= blame.at + SUSPICION_SECONDS:
        return Ruling(Verdict.CLEARED, f"{blame.node} is untouched: nobody has confirmed the suspicion in time")
    node = await cluster.find(NODES, blame.node)
    if node is None or node["metadata"]["uid"] != blame.uid:
        return Ruling(Verdict.UNKNOWN_NODE, f"the {blame.node} that was meant does not exist any more")
    if Node.parse(node).opted_out:
        return Ruling(Verdict.OPTED_OUT, f"{blame.node} is untouched: its label {LABEL_NO_QUARANTINE} forbids it")
    paused = await _paused(cluster, settings)
    return Ruling(Verdict.PAUSED, f"{blame.node} is untouched: {paused}") if paused else None


def _ended(blame: Blame) -> Ruling | None:
    """Of what has stood in a NodeQuarantine that is over, deleted by somebody perhaps; None: it is new."""
    words = f"the NodeQuarantine that told of {blame.node} has ended"
    return Ruling(Verdict.CLEARED, words) if blame.raised else None


async def _create(cluster: Cluster, settings: Settings, blame: Blame, sign: Sign) -> Ruling:
    expiry = settings.quarantine_expires_after
    spec = QuarantineSpec(sign.reason, blame.uid, blame.incident, expiry, signs=(sign,))
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": "NodeQuarantine",
        "metadata": {"name": blame.node, "finalizers": [FINALIZER_QUARANTINE]},
        "spec": {**spec.to_json(), "incidentRef": _reference(blame.incident)},
    }
    try:
        return replace(ruling(Quarantine.parse(await cluster.create(QUARANTINES, body)), blame.uid), raised=True)
    except Conflict:  # somebody was faster: what is said here is said again if it stays so
        return ruling(Quarantine.parse(await cluster.get(QUARANTINES, blame.node)), blame.uid)


def _reference(incident: ObjectRef) -> Object:
    return {"namespace": incident.namespace, "name": incident.name}


async def _paused(cluster: Cluster, settings: Settings) -> str:
    """Why no node may be touched; "": one may. Where that cannot be read, none may."""
    if settings.paused:
        return "remedies are paused by the operator's settings"
    try:
        found = await cluster.find(CONFIG_MAPS, PAUSE, settings.namespace)
    except (kopf.TemporaryError, kopf.PermanentError):
        return f"whether ConfigMap {settings.namespace}/{PAUSE} pauses remedies cannot be read"
    return "" if found is None else f"remedies are paused by ConfigMap {settings.namespace}/{PAUSE}"


async def _next(
    cluster: Cluster, body: Object, node: Object | None, settings: Settings, now: float, fleet: Fleet
) -> QuarantineStep:
    found = Quarantine.parse(body)
    seen = None if node is None else Node.parse(node)
    probe = found.last_probe
    pod = None if probe is None else _probe(probe.pod, await probing.pods_of(cluster, settings, probe.pod))
    return decide(found, seen, pod, await fleet.around(found, seen), now)


def _probe(name: str, bodies: Sequence[Object]) -> ProbePod | None:
    """The pod on the node in question, with those of its circle; None: there is none of them."""
    pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
    own = pods.pop(name, ProbePod(phase=""))
    return replace(own, others=tuple(pods.values())) if own.phase or pods else None


def _rules(settings: Settings) -> Rules:
    return Rules(
        acts=settings.mode is Mode.ACT and settings.quarantine_mode is Mode.ACT,
        max_nodes=settings.quarantine_max_nodes,
        max_share=settings.quarantine_max_share,
        breaker_nodes=settings.breaker_nodes,
        probe_timeout=settings.probe_timeout,
        release_probes=settings.release_probes,
    )


async def _all(cluster: Cluster) -> list[Quarantine]:
    """Those that can be read."""
    found = []
    for body in await cluster.list(QUARANTINES):
        try:
            found.append(Quarantine.parse(body))
        except InputError as error:
            log.warning("quarantine of %s: %s", body["metadata"]["name"], error)
    return found


async def _carry_out(
    cluster: Cluster, runtime: Runtime, settings: Settings, step: QuarantineStep, body: Object, node: Object | None
) -> None:
    """One step. It is based upon `body` and `node` as they were read: Conflict, where one of them has changed since."""
    name, finalizers = body["metadata"]["name"], body["metadata"].get("finalizers", [])
    match step:
        case Guard():
            await _patch(cluster, body, {"metadata": {"finalizers": [*finalizers, FINALIZER_QUARANTINE]}})
        case Unguard():
            left = [finalizer for finalizer in finalizers if finalizer != FINALIZER_QUARANTINE]
            await _patch(cluster, body, {"metadata": {"finalizers": left}})
        case Approve():
            await _patch(cluster, body, {"spec": {"approved": True}})
        case Hold(again) if node is not None:
            await _hold(cluster, node)
            if again:
                note = "taint or cordon was taken away; delete the NodeQuarantine to release the node"
                await _tell(cluster, runtime, body, node, "QuarantineRestored", note, warning=True)
        case Release(reason) if node is not None:
            await _release(cluster, node)
            await _tell(cluster, runtime, body, node, "NodeReleased", reason)
        case Report():
            await _report(cluster, runtime, step, body, node)
        case StartProbe(pod, share) if node is not None:
            await _start_probe(cluster, runtime, pod, body, node, settings, share)
        case EndProbe(pod):
            await probing.end(cluster, settings, pod)
        case Delete():
            await cluster.delete(QUARANTINES, name, uid=body["metadata"]["uid"])


async def _report(cluster: Cluster, runtime: Runtime, report: Report, body: Object, node: Object | None) -> None:
    await _patch(cluster, body, {"status": report.status.to_patch()}, subresource="status")
    if report.event:
        why = f" ({body['spec']['reason']})" if report.event == "NodeQuarantined" else ""
        note = f"{report.status.message}{why}"
        await _tell(cluster, runtime, body, node, report.event, note, warning=report.warning)


async def _patch(cluster: Cluster, body: Object, changes: Object, subresource: str = "") -> None:
    """Of the NodeQuarantine as it was read."""
    metadata = {"resourceVersion": body["metadata"]["resourceVersion"], **changes.get("metadata", {})}
    name = body["metadata"]["name"]
    await cluster.patch(QUARANTINES, name, {**changes, "metadata": metadata}, subresource=subresource)


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


async def _start_probe(
    cluster: Cluster, runtime: Runtime, pod: str, body: Object, node: Object, settings: Settings, share: bool
) -> None:
    """With two other nodes beside it, where the cluster has some of its kind: alone no node is slow."""
    bodies = await probing.pods_of(cluster, settings, pod)
    company = probing.company(node, await cluster.list(NODES), pod)
    known = {found["metadata"]["name"]: found["spec"]["nodeName"] for found in bodies}
    hosts = [known.get(f"{pod}-{i}", other) for i, other in enumerate(company)]
    circle = [*(Seat(f"{pod}-{i}", other) for i, other in enumerate(hosts)), Seat(pod, node["metadata"]["name"])]
    probe = Quarantine.parse(body).last_probe
    waited = 0.0 if probe is None else runtime.now() - probe.started
    secret = probing.secret_of(bodies) or runtime.identifier()
    for launch in launches(circle, {b["metadata"]["name"]: ProbePod.parse(b) for b in bodies}, waited):
        place = node if launch.seat.pod == pod else await cluster.find(NODES, launch.seat.node)
        if place is None:
            continue
        gpus = await probing.gpus(cluster, place, share=share) if launch.seat.pod == pod else 0
        task = ProbeTask(pod, secret, gpus, launch.peers, launch.guests)
        await probing.start(cluster, settings, launch.seat.pod, place, body, "NodeQuarantine", task)


async def _tell(
    cluster: Cluster,
    runtime: Runtime,
    body: Object | None,
    node: Object | None,
    reason: str,
    note: str,
    *,
    warning: bool = False,
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
            await events.tell_about(cluster, runtime, reference, reason, note, reason, warning=warning)

"""NodeQuarantines: suspecting a node, bringing it to what its quarantine says, releasing all of them.

What jobs say only raises suspicions; witnesses, breaker, budget and pause decide what follows. A person may approve or
create as many quarantines as he likes, and nothing ever stands in the way of a release, except that a node is not
handed back before a probe has passed when nobody has asked for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import kopf

from pacekeeper_analysis.errors import InputError

from ..api import (
    API_VERSION,
    FIELD_MANAGER_CONDITION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
    ObjectRef,
    QuarantineSpec,
    QuarantineStatus,
    NodeSuspicion,
    QuarantineVerdict,
    Witness,
    format_time,
)
from ..cluster import NODE_OBJECTS, NODE_QUARANTINES, ApiServerBusy, Cluster, Conflict, NotFound, Object
from ..decide.node_circle import ProbeGroupMember, plan_probe_launches
from ..decide.node_quarantine import QUARANTINE_RESYNC_SECONDS, build_quarantine_decision
from ..decide.node_steps import (
    ApproveQuarantine,
    DeleteQuarantine,
    EndProbe,
    FlagNode,
    AddFinalizer,
    HoldNode,
    ProbePod,
    Quarantine,
    QuarantineStep,
    ReleaseNode,
    WriteQuarantineStatus,
    StartProbe,
    RemoveFinalizer,
    RequeueAfter,
)
from ..decide.node_suspicion import SUSPICION_TTL_SECONDS, is_probe_start, with_sign
from ..manifests import NodeProbeTask
from ..observation import QuarantineDecision
from ..runtime import OperatorRuntime
from ..settings import Settings
from . import events, probing
from .fleet import NodeRegistry, KnownQuarantine, KnownNode
from .nodes_first import NODE_PRIORITY_THRESHOLD

MAX_STEPS_PER_RECONCILE = 20
"""Of one call of `reconcile`: what is not done by then is done by the next."""
MAX_CONCURRENT_RECONCILES = 16
"""Nodes that are looked after at the same time: so many calls the API server has to answer at once, at most."""
QUARANTINE_REQUEUE_SECONDS = 1.0
QUARANTINE_REPORT_QUIET_SECONDS = 1.0
"""Within which more than a few nodes were held: what is to be said of them waits for the others."""
QUARANTINE_METRICS_SECONDS = 1.0
"""Between two looks at the metrics."""
QUARANTINE_RETRY_SECONDS = 5.0
MAX_REASON_CHARACTERS = 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeAccusation:
    """What a job says against a node."""

    node: str
    uid: str
    reason: str
    incident: ObjectRef  # its namespace is whose word it is; without a name it is the platform's own
    found_at: float  # when it was found, seconds since the epoch: what is said again does not become younger
    witness: Witness = Witness.NONE
    is_weak: bool = False  # alone no reason to look at the node: it takes a second namespace's
    recorded: bool = False  # it has stood in a NodeQuarantine


async def raise_suspicion(fleet: NodeRegistry, blame: NodeAccusation) -> QuarantineDecision:
    """Raise a suspicion against a node, and what has become of it so far. Saying it twice is saying it once.

    The node stays untouched until a witness confirms it: `watch_over` sees to that. A suspicion that has come to
    nothing is not raised anew by the same words, and whoever deletes its NodeQuarantine has ended it.
    """
    sign = NodeSuspicion(blame.incident.namespace, blame.incident.name, blame.reason[:MAX_REASON_CHARACTERS], blame.found_at)
    sign = replace(sign, witness=blame.witness, weak=blame.is_weak)
    known = await fleet.get_quarantine(blame.node)
    if known is None:
        return await _explain_refusal(fleet, blame) or await _create_quarantine(fleet, blame, sign)
    found = known.parsed
    if found.is_over or found.node_uid not in (None, blame.uid):
        ending = QuarantineDecision(QuarantineVerdict.RELEASING, f"an earlier quarantine of {blame.node} is just ending: say it again then")
        return _decide_ended(blame) or ending
    signs = with_sign(found.spec.signs, sign)
    if found.is_suspicion and signs != found.spec.signs:
        spec = {"signs": replace(found.spec, signs=signs).to_json()["signs"]}
        await _patch_quarantine(fleet, known, {"spec": spec})
    return replace(build_quarantine_decision(found, blame.uid), raised=found.is_suspicion)


async def find_decision(fleet: NodeRegistry, node: str, node_uid: str) -> QuarantineDecision | None:
    """What has become of a suspicion; None: there is none (any more)."""
    known = await fleet.get_quarantine(node)
    return None if known is None else build_quarantine_decision(known.parsed, node_uid)


async def reconcile_node(fleet: NodeRegistry, name: str, *, write_report: bool = True) -> float:
    """Brings node and probe pod to what the NodeQuarantine `name` says; seconds until it wants to be called again.

    Level-triggered and idempotent. math.inf: there is nothing to be done. `words` False: of a node that is held,
    nothing is written down; 0 says that there is something.
    Raises InputError where the object is malformed, and what the cluster raises.
    """
    for _ in range(MAX_STEPS_PER_RECONCILE):
        known, seen = await fleet.get_quarantine(name), await fleet.get_node(name)
        if known is None:
            if seen is not None and seen.node.marked and not await _release_orphan(fleet, name, seen):
                continue
            if seen is None or not fleet.has_new_condition(name, seen):
                return math.inf
            await _accuse_by_condition(fleet, name, seen)
            continue
        try:
            step = await _decide_next_step(fleet, known, seen)
            if isinstance(step, ApproveQuarantine):  # never upon old news: somebody may have been blamed or quarantined meanwhile
                step, known = await fleet.decide_approval(name)
            if isinstance(step, RequeueAfter):
                return step.seconds
            if isinstance(step, WriteQuarantineStatus) and seen is not None and seen.node.held and not write_report:
                return 0.0
            if is_probe_start(known.parsed, step):
                async with fleet.probe_lock:  # one after the other, so that no more run than may
                    await _execute_step(fleet, await _decide_next_step(fleet, known, seen), known, seen)
            else:
                await _execute_step(fleet, step, known, seen)
        except (Conflict, NotFound) as error:
            log.info("quarantine of %s: looking anew: %s", name, error)
            await fleet.fetch_quarantine(name)
            await fleet.fetch_node(name)
            continue
        if isinstance(step, StartProbe):
            return QUARANTINE_REQUEUE_SECONDS  # pods of its circle wait for each other's addresses
    return QUARANTINE_REQUEUE_SECONDS


async def reconcile_all(fleet: NodeRegistry) -> float:
    """Reads them all, and does what all of them want; seconds until one of them wants it again."""
    await fleet.refresh()
    fleet.publish_metrics()
    waits = [await _try_reconcile(fleet, name) for name in list(fleet.list_names())]
    return min([QUARANTINE_RESYNC_SECONDS, *waits])


async def run_quarantine_loop(fleet: NodeRegistry) -> None:
    """Brings all nodes to what their NodeQuarantines say, until it is cancelled: whenever something is new about one,
    and when one wants it."""
    round_ = _WorkQueue(fleet)
    fleet.priority_gate.set_backlog(0)  # what was heard while another led waits for nobody
    try:
        while True:
            fleet.change_event.clear()
            try:
                delay = await round_.dispatch()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                delay = QUARANTINE_RETRY_SECONDS
                log.warning("quarantines cannot be looked at, and are tried again: %s", error)
            except Exception:
                delay = QUARANTINE_RETRY_SECONDS
                log.exception("quarantines cannot be looked at, and are tried again")
            try:
                await fleet.runtime.run_with_timeout(delay, fleet.change_event.wait())
            except TimeoutError:
                continue
    finally:
        await round_.end()


@dataclass
class _WorkQueue:
    """Who is looked after now, and who waits for it. Nodes that are not held yet go before words about those that
    are, and so do suspicions that are still to be raised where many nodes fail at once."""

    registry: NodeRegistry
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _waiting: dict[str, None] = field(default_factory=dict)
    _unreported: dict[str, None] = field(default_factory=dict)
    _due_at: dict[str, float] = field(default_factory=dict)  # by the monotonic clock
    _last_held_at: deque[float] = field(default_factory=lambda: deque(maxlen=NODE_PRIORITY_THRESHOLD + 1))  # the last ones, by the same clock
    _listed_at: float = -math.inf
    _metrics_at: float = -math.inf

    async def dispatch(self) -> float:
        """Whatever is due, as far as there is room; seconds until more may be."""
        fleet, now = self.registry, self.registry.runtime.monotonic()
        if now >= self._listed_at + QUARANTINE_RESYNC_SECONDS:
            await self._enqueue_all()
            self._listed_at = now
        self._waiting |= fleet.changed_nodes
        fleet.changed_nodes.clear()
        for name in [name for name, at in self._due_at.items() if at <= now]:
            del self._due_at[name]
            self._waiting[name] = None
        quiet_at = self._last_held_at[0] + QUARANTINE_REPORT_QUIET_SECONDS if len(self._last_held_at) > NODE_PRIORITY_THRESHOLD else now
        for queue, words in ((self._waiting, False), (self._unreported, True)):
            wait = now < fleet.busy_until or (words and now < quiet_at)
            room = 0 if wait else MAX_CONCURRENT_RECONCILES - len(self._running)
            for name in list(islice((name for name in queue if name not in self._running), room)):
                del queue[name]
                work = self._process(name, write_report=words)
                self._running[name] = fleet.runtime.start_task(work, f"quarantine of {name}")
        fleet.priority_gate.set_backlog(len(self._waiting))
        if now >= self._metrics_at + QUARANTINE_METRICS_SECONDS:
            fleet.publish_metrics()
            self._metrics_at = now
        if now < fleet.busy_until:
            return fleet.busy_until - now
        next_ = min([self._listed_at + QUARANTINE_RESYNC_SECONDS, self._metrics_at + QUARANTINE_METRICS_SECONDS, *self._due_at.values()])
        return max(0.0, next_ - now)

    async def close(self) -> None:
        self.registry.priority_gate.set_backlog(0)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _enqueue_all(self) -> None:
        """Nodes once: of them watches tell, and what is a moment old is refused when it is written."""
        fleet = self.registry
        if not fleet.nodes.listed.is_set():
            await fleet.nodes.refresh(fleet.cluster, ())
        await fleet.quarantines.refresh(fleet.cluster, ())
        self._waiting |= dict.fromkeys(fleet.list_names())

    async def _process(self, name: str, *, write_report: bool) -> None:
        delay = QUARANTINE_RETRY_SECONDS
        try:
            delay = await _try_reconcile(self.registry, name, write_report=write_report)
        finally:
            del self._running[name]
            if delay <= 0 and not write_report:
                self._unreported[name] = None
                self._last_held_at.append(self.registry.runtime.monotonic())
            elif delay < math.inf:
                self._due_at[name] = self.registry.runtime.monotonic() + delay
            self.registry.change_event.set()


async def release_all(cluster: Cluster, runtime: OperatorRuntime, seconds: float, settings: Settings | None = None) -> None:
    """Deletes all NodeQuarantines and returns when their nodes are released, whether the operator runs or not.
    `settings`: of the installation, which say whether nodes have a condition of ours.

    Raises TimeoutError, naming those that are left, after so many `seconds`.
    """
    left = ["those that could not be listed"]

    async def release() -> None:
        while left:
            try:
                left[:] = await _release_once(cluster, runtime, settings or Settings())
            except kopf.TemporaryError as error:
                log.warning("releasing is tried again: %s", error)
            if left:
                await runtime.sleep(QUARANTINE_REQUEUE_SECONDS)

    try:
        await runtime.run_with_timeout(seconds, release())
    except TimeoutError as error:
        raise TimeoutError(f"not released within {seconds:.0f} s: {', '.join(left)}") from error


async def _release_once(cluster: Cluster, runtime: OperatorRuntime, settings: Settings) -> list[str]:
    """Asks for all deletions and does what they demand; the names of those that are left, none if all is done."""
    fleet = NodeRegistry(cluster, runtime, settings)
    try:
        quarantines = [body["metadata"] for body in await cluster.list(NODE_QUARANTINES)]
    except NotFound:  # the definitions are gone, and all NodeQuarantines with them
        quarantines = []
    for metadata in quarantines:
        await cluster.delete(NODE_QUARANTINES, metadata["name"], uid=metadata["uid"])
    for metadata in quarantines:
        await _try_reconcile(fleet, metadata["name"])
    if not quarantines:
        await fleet.nodes.refresh(cluster, ())
        await _release_orphans(fleet)
    return [metadata["name"] for metadata in quarantines]


async def _release_orphans(fleet: NodeRegistry) -> None:
    """Releases nodes with our marks and no NodeQuarantine: somebody has taken a finalizer away by force."""
    for seen in fleet.nodes:
        name = seen.body["metadata"]["name"]
        if seen.node.marked and await _find_quarantine(fleet, name) is None:
            await _release_node(fleet, seen)
            await _emit_events(fleet, None, seen, "NodeReleased", "it carried our marks, but there is no NodeQuarantine")


async def _release_orphan(fleet: NodeRegistry, name: str, seen: KnownNode) -> bool:
    """Releases a node with our marks for which no NodeQuarantine is known, whenever that is found; whether it is done.
    That there is none the API server itself has to say: a watch may be late."""
    try:
        if await fleet.fetch_quarantine(name) is not None:
            return False
        await _release_node(fleet, seen)
    except (Conflict, NotFound) as error:
        log.info("marks of %s: looking anew: %s", name, error)
        await fleet.fetch_node(name)
        return False
    await _emit_events(fleet, None, seen, "NodeReleased", "it carried our marks, but there is no NodeQuarantine")
    return True


async def _find_quarantine(fleet: NodeRegistry, name: str) -> Object | None:
    try:
        return await fleet.cluster.find(NODE_QUARANTINES, name)
    except NotFound:
        return None


async def _try_reconcile(fleet: NodeRegistry, name: str, *, write_report: bool = True) -> float:
    """One that fails does not hold up the others."""
    try:
        return await reconcile_node(fleet, name, write_report=write_report)
    except ApiServerBusy as error:
        log.warning("quarantine of %s: %s", name, error)
        fleet.back_off(error.delay or QUARANTINE_RETRY_SECONDS)
        return error.delay or QUARANTINE_RETRY_SECONDS
    except kopf.TemporaryError as error:
        log.warning("quarantine of %s: %s", name, error)
        return max(QUARANTINE_RETRY_SECONDS, error.delay or 0.0)
    except (kopf.PermanentError, InputError) as error:
        log.warning("quarantine of %s: %s", name, error)
    except Exception:
        log.exception("quarantine of %s: a pass failed", name)
    return QUARANTINE_RETRY_SECONDS


async def _accuse_by_condition(fleet: NodeRegistry, name: str, seen: KnownNode) -> None:
    """The platform's own word against a node."""
    said = ObjectRef("", fleet.settings.namespace)
    blame = NodeAccusation(name, seen.node.uid, seen.node.broken, said, fleet.get_broken_since(seen), Witness.NODE_CONDITION)
    ruling = await raise_suspicion(fleet, blame)
    if ruling.verdict is QuarantineVerdict.PAUSED:
        raise kopf.TemporaryError(ruling.message, delay=QUARANTINE_RETRY_SECONDS)
    fleet.mark_condition_reported(name, seen)


async def _explain_refusal(fleet: NodeRegistry, blame: NodeAccusation) -> QuarantineDecision | None:
    """Why no suspicion is raised; None: it may be."""
    if ended := _decide_ended(blame):
        return ended
    if fleet.runtime.now() >= blame.found_at + SUSPICION_TTL_SECONDS:
        return QuarantineDecision(QuarantineVerdict.CLEARED, f"{blame.node} is untouched: nobody has confirmed the suspicion in time")
    seen = await fleet.get_node(blame.node)
    if seen is None or seen.node.uid != blame.uid:
        return QuarantineDecision(QuarantineVerdict.UNKNOWN_NODE, f"the {blame.node} that was meant does not exist any more")
    if seen.node.opted_out:
        return QuarantineDecision(QuarantineVerdict.OPTED_OUT, f"{blame.node} is untouched: its label {LABEL_NO_QUARANTINE} forbids it")
    paused = await fleet.get_pause_reason()
    return QuarantineDecision(QuarantineVerdict.PAUSED, f"{blame.node} is untouched: {paused}") if paused else None


def _decide_ended(blame: NodeAccusation) -> QuarantineDecision | None:
    """Of what has stood in a NodeQuarantine that is over, deleted by somebody perhaps; None: it is new."""
    words = f"the NodeQuarantine that told of {blame.node} has ended"
    return QuarantineDecision(QuarantineVerdict.CLEARED, words) if blame.recorded else None


async def _create_quarantine(fleet: NodeRegistry, blame: NodeAccusation, sign: NodeSuspicion) -> QuarantineDecision:
    expiry, of_job = fleet.settings.quarantine_expires_after, not sign.is_from_platform
    spec = QuarantineSpec(sign.reason, blame.uid, blame.incident if of_job else None, expiry, signs=(sign,))
    seen = await fleet.get_node(blame.node)
    suspicion = Quarantine(blame.node, "", spec, QuarantineStatus(), guarded=True)
    approved = seen is not None and await fleet.try_immediate_approval(suspicion, seen)
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": "NodeQuarantine",
        "metadata": {"name": blame.node, "finalizers": [FINALIZER_QUARANTINE]},
        "spec": replace(spec, approved=approved).to_json(),
    }
    if of_job:
        body["spec"]["incidentRef"] = {"namespace": blame.incident.namespace, "name": blame.incident.name}
    known = False
    try:
        there, raised = await _create_or_get(fleet, body)
        fleet.quarantines.update(there)
        known = True
    finally:
        if approved:
            await fleet.settle_approval(blame.node, written=known)
    return replace(build_quarantine_decision(Quarantine.parse(there), blame.uid), raised=raised)


async def _create_or_get(fleet: NodeRegistry, body: Object) -> tuple[Object, bool]:
    """And whether it was made. Where somebody was faster, what is said here is said again if it stays so."""
    try:
        return await fleet.cluster.create(NODE_QUARANTINES, body), True
    except Conflict:
        return await fleet.cluster.get(NODE_QUARANTINES, body["metadata"]["name"]), False


async def _decide_next_step(fleet: NodeRegistry, known: KnownQuarantine, seen: KnownNode | None) -> QuarantineStep:
    probe = known.parsed.last_probe
    pods = () if probe is None else await probing.list_probe_group_pods(fleet.cluster, fleet.settings, probe.pod)
    return await fleet.decide_next_step(known, seen, None if probe is None else _select_probe_pod(fleet, probe.pod, pods))


def _select_probe_pod(fleet: NodeRegistry, name: str, bodies: Sequence[Object]) -> ProbePod | None:
    """The pod on the node in question, with those of its circle; None: there is none of them."""
    pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
    own = pods.pop(name, ProbePod(phase=""))
    return replace(own, others=tuple(pods.values()), failing_check=fleet.failing_check) if own.phase or pods else None


async def _execute_step(fleet: NodeRegistry, step: QuarantineStep, known: KnownQuarantine, seen: KnownNode | None) -> None:
    """One step. It is based upon both as they were read: Conflict, where one of them has changed since."""
    metadata = known.body["metadata"]
    name, finalizers = metadata["name"], metadata.get("finalizers", [])
    match step:
        case AddFinalizer():
            await _patch_quarantine(fleet, known, {"metadata": {"finalizers": [*finalizers, FINALIZER_QUARANTINE]}})
        case RemoveFinalizer():
            left = [finalizer for finalizer in finalizers if finalizer != FINALIZER_QUARANTINE]
            await _patch_quarantine(fleet, known, {"metadata": {"finalizers": left}})
            await fleet.fetch_quarantine(name)
        case ApproveQuarantine():
            await _approve_quarantine(fleet, known)
        case HoldNode(again) if seen is not None:
            await _hold_node(fleet, seen)
            if again:
                note = "taint or cordon was taken away; delete the NodeQuarantine to release the node"
                await _emit_events(fleet, known, seen, "QuarantineRestored", note, warning=True)
        case FlagNode() if seen is not None:
            await _set_repair_condition(fleet, step, seen)
        case ReleaseNode(reason) if seen is not None:
            await _release_node(fleet, seen)
            await _emit_events(fleet, known, seen, "NodeReleased", reason)
        case WriteQuarantineStatus():
            await _report_status(fleet, step, known, seen)
        case StartProbe(pod, share) if seen is not None:
            await _start_probe(fleet, pod, known, share)
        case EndProbe(pod):
            await probing.delete_probe_group_pods(fleet.cluster, fleet.settings, pod)
        case DeleteQuarantine():
            await fleet.cluster.delete(NODE_QUARANTINES, name, uid=metadata["uid"])
            await fleet.fetch_quarantine(name)
        case _:  # a wait, or what is for a node that has gone
            return


async def _approve_quarantine(fleet: NodeRegistry, known: KnownQuarantine) -> None:
    """Whatever becomes of it, it counts as one until that is known."""
    written = False
    try:
        await _patch_quarantine(fleet, known, {"spec": {"approved": True}})
        written = True
    finally:
        await fleet.settle_approval(known.body["metadata"]["name"], written=written)


async def _report_status(fleet: NodeRegistry, report: WriteQuarantineStatus, known: KnownQuarantine, seen: KnownNode | None) -> None:
    await _patch_quarantine(fleet, known, {"status": report.status.to_patch()}, subresource="status")
    if report.event:
        why = f" ({known.body['spec']['reason']})" if report.event == "NodeQuarantined" else ""
        note = f"{report.status.message}{why}"
        await _emit_events(fleet, known, seen, report.event, note, warning=report.warning)


async def _patch_quarantine(fleet: NodeRegistry, known: KnownQuarantine, changes: Object, subresource: str = "") -> None:
    """Of the NodeQuarantine as it was read."""
    before = known.body["metadata"]
    metadata = {"resourceVersion": before["resourceVersion"], **changes.get("metadata", {})}
    changes = {**changes, "metadata": metadata}
    fleet.quarantines.update(await fleet.cluster.patch(NODE_QUARANTINES, before["name"], changes, subresource=subresource))


async def _hold_node(fleet: NodeRegistry, seen: KnownNode) -> None:
    if not seen.node.tainted:
        await _patch_taints(fleet, seen, [*_list_taints(seen), {"key": TAINT_QUARANTINE, "effect": "NoSchedule"}])
    if not seen.node.cordoned:
        await _apply_cordon(fleet, seen, {"spec": {"unschedulable": True}})


async def _release_node(fleet: NodeRegistry, seen: KnownNode) -> None:
    if seen.node.tainted:
        await _patch_taints(fleet, seen, [taint for taint in _list_taints(seen) if taint["key"] != TAINT_QUARANTINE])
    if seen.node.cordoned:
        await _apply_cordon(fleet, seen, {})
    if seen.node.flagged:  # last: the node takes pods again, whatever becomes of this
        await _apply_conditions(fleet, seen, {})


async def _set_repair_condition(fleet: NodeRegistry, flag: FlagNode, seen: KnownNode) -> None:
    condition = {
        "type": fleet.settings.repair_condition,
        "status": "True",
        "reason": flag.reason,
        "message": flag.message,
        "lastHeartbeatTime": format_time(flag.since)[:19] + "Z",
        "lastTransitionTime": format_time(flag.since)[:19] + "Z",
    }
    await _apply_conditions(fleet, seen, {"status": {"conditions": [condition]}})


def _list_taints(seen: KnownNode) -> list[Object]:
    taints: list[Object] = seen.body["spec"]["taints"]
    return taints


async def _patch_taints(fleet: NodeRegistry, seen: KnownNode, taints: list[Object]) -> None:
    """By compare-and-swap: the API server knows the list only as a whole, and other controllers write it, too.

    Server-side apply would take the others' taints away, and would leave ours when we give up the list.
    """
    name, version = seen.body["metadata"]["name"], seen.body["metadata"]["resourceVersion"]
    changes = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}
    fleet.nodes.update(await fleet.cluster.patch(NODE_OBJECTS, name, changes))


async def _apply_cordon(fleet: NodeRegistry, seen: KnownNode, wanted: Object) -> None:
    """What we want of the cordon. With the UID, or applying to a node that has gone would create one."""
    metadata = {"name": seen.body["metadata"]["name"], "uid": seen.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **wanted}
    fleet.nodes.update(await fleet.cluster.apply(NODE_OBJECTS, body, manager=FIELD_MANAGER_CORDON))


async def _apply_conditions(fleet: NodeRegistry, seen: KnownNode, wanted: Object) -> None:
    """What we want of the node's conditions: server-side apply leaves those of others alone."""
    metadata = {"name": seen.body["metadata"]["name"], "uid": seen.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **wanted}
    manager = FIELD_MANAGER_CONDITION
    fleet.nodes.update(await fleet.cluster.apply(NODE_OBJECTS, body, manager=manager, subresource="status"))


async def _start_probe(fleet: NodeRegistry, pod: str, known: KnownQuarantine, share: bool) -> None:
    """With two other nodes beside it, where the cluster has some of its kind: alone no node is slow."""
    cluster, settings, runtime = fleet.cluster, fleet.settings, fleet.runtime
    name = known.body["metadata"]["name"]
    node = await cluster.get(NODE_OBJECTS, name)
    bodies = await probing.list_probe_group_pods(cluster, settings, pod)
    company = probing.choose_comparison_nodes(node, await cluster.list(NODE_OBJECTS), pod)
    there = {found["metadata"]["name"]: found["spec"]["nodeName"] for found in bodies}
    hosts = [there.get(f"{pod}-{i}", other) for i, other in enumerate(company)]
    circle = [*(ProbeGroupMember(f"{pod}-{i}", other) for i, other in enumerate(hosts)), ProbeGroupMember(pod, name)]
    probe = known.parsed.last_probe
    waited = 0.0 if probe is None else runtime.now() - probe.started
    secret = probing.find_probe_group_secret(bodies) or runtime.create_identifier()
    for launch in plan_probe_launches(circle, {b["metadata"]["name"]: ProbePod.parse(b) for b in bodies}, waited):
        place = node if launch.member.pod == pod else await cluster.find(NODE_OBJECTS, launch.member.node)
        if place is None:
            continue
        own = launch.member.pod == pod
        gpus = await probing.count_probe_gpus(cluster, place, share=share) if own else await probing.count_single_gpu(cluster, place)
        task = NodeProbeTask(pod, secret, gpus, launch.peers, launch.participants)
        await probing.start_probe_pod(cluster, settings, launch.member.pod, place, known.body, "NodeQuarantine", task)


async def _emit_events(
    fleet: NodeRegistry, known: KnownQuarantine | None, seen: KnownNode | None, reason: str, note: str, *, warning: bool = False
) -> None:
    """Events about the node and its quarantine, which `kubectl describe` shows."""
    about = [] if known is None else [(API_VERSION, "NodeQuarantine", known.body["metadata"])]
    about += [] if seen is None else [("v1", "Node", seen.body["metadata"])]
    for version, kind, metadata in about:
        reference = {"apiVersion": version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}
        await events.emit_event(fleet.cluster, fleet.runtime, reference, reason, note, reason, warning=warning)

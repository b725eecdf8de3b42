"""NodeQuarantines: suspect a node, bring it to the state that its quarantine specifies, release all nodes.

Reports of jobs only raise suspicions. Witnesses, breaker, budget, and pause decide what follows. A person may approve
or create any number of quarantines. Nothing ever blocks a release, with one exception: unless a person requested the
release, the node needs a passed probe first.
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

from ..api.formats import format_time
from ..api.incident import ObjectRef
from ..api.names import (
    API_VERSION,
    FIELD_MANAGER_CONDITION,
    FIELD_MANAGER_CORDON,
    FINALIZER_QUARANTINE,
    LABEL_NO_QUARANTINE,
    TAINT_QUARANTINE,
)
from ..api.node_quarantine import NodeSuspicion, QuarantineSpec, QuarantineStatus, QuarantineVerdict, Witness
from ..async_runtime import OperatorRuntime
from ..decide.nodes.node_quarantine import QUARANTINE_RESYNC_SECONDS, build_quarantine_decision
from ..decide.nodes.node_suspicion import SUSPICION_TTL_SECONDS, is_probe_start, with_sign
from ..decide.nodes.probe_groups import ProbeGroupMember, plan_probe_launches
from ..decide.nodes.quarantine_steps import (
    AddFinalizer,
    ApproveQuarantine,
    DeleteQuarantine,
    EndProbe,
    FlagNode,
    HoldNode,
    ProbePod,
    Quarantine,
    QuarantineStep,
    ReleaseNode,
    RemoveFinalizer,
    RequeueAfter,
    StartProbe,
    WriteQuarantineStatus,
)
from ..kube.client import NODE_OBJECTS, NODE_QUARANTINES, ApiServerBusy, Cluster, Conflict, NotFound, Object
from ..pods.manifests import NodeProbeTask
from ..settings import Settings
from ..state.effect_results import QuarantineDecision
from . import events, probing
from .node_registry import KnownNode, KnownQuarantine, NodeRegistry
from .shared.node_priority import NODE_PRIORITY_THRESHOLD

MAX_STEPS_PER_RECONCILE = 20
"""Steps of one call of `reconcile_node`; the next call continues."""
MAX_CONCURRENT_RECONCILES = 16
"""Nodes that are reconciled concurrently, and so the maximum number of concurrent calls to the API server."""
QUARANTINE_REQUEUE_SECONDS = 1.0
QUARANTINE_REPORT_QUIET_SECONDS = 1.0
"""If more than a few nodes were held within this time, reports about them wait for the others."""
QUARANTINE_METRICS_SECONDS = 1.0
"""Seconds between two updates of the metrics."""
QUARANTINE_RETRY_SECONDS = 5.0
MAX_REASON_CHARACTERS = 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeAccusation:
    """An accusation of a node by a job."""

    node: str
    uid: str
    reason: str
    incident: ObjectRef  # its namespace is the accuser; without a name it is the platform
    found_at: float  # seconds since the epoch; a repetition keeps it
    witness: Witness = Witness.NONE
    is_weak: bool = False  # not enough to probe the node without a second namespace's
    recorded: bool = False  # it is or was in a NodeQuarantine


async def raise_suspicion(registry: NodeRegistry, accusation: NodeAccusation) -> QuarantineDecision:
    """Raise a suspicion against a node and return the decision so far; idempotent.

    The node stays untouched until a witness confirms the suspicion; `run_quarantine_loop` does that. The same
    accusation does not raise a suspicion again that came to nothing. A user who deletes the NodeQuarantine has ended
    it.
    """
    suspicion = NodeSuspicion(
        accusation.incident.namespace,
        accusation.incident.name,
        accusation.reason[:MAX_REASON_CHARACTERS],
        accusation.found_at,
    )
    suspicion = replace(suspicion, witness=accusation.witness, weak=accusation.is_weak)
    quarantine = await registry.get_quarantine(accusation.node)
    if quarantine is None:
        return await _explain_refusal(registry, accusation) or await _create_quarantine(registry, accusation, suspicion)
    parsed = quarantine.parsed
    if parsed.is_over or parsed.node_uid not in (None, accusation.uid):
        ending = QuarantineDecision(
            QuarantineVerdict.RELEASING,
            f"an earlier quarantine of {accusation.node} is just ending: the accusation is repeated afterwards",
        )
        return _decide_ended(accusation) or ending
    suspicions = with_sign(parsed.spec.suspicions, suspicion)
    if parsed.is_suspicion and suspicions != parsed.spec.suspicions:
        spec = {"suspicions": replace(parsed.spec, suspicions=suspicions).to_json()["suspicions"]}
        await _patch_quarantine(registry, quarantine, {"spec": spec})
    return replace(build_quarantine_decision(parsed, accusation.uid), recorded=parsed.is_suspicion)


async def find_decision(registry: NodeRegistry, node: str, node_uid: str) -> QuarantineDecision | None:
    """Return the decision about a suspicion; None: there is none (any more)."""
    quarantine = await registry.get_quarantine(node)
    return None if quarantine is None else build_quarantine_decision(quarantine.parsed, node_uid)


async def reconcile_node(registry: NodeRegistry, name: str, *, write_report: bool = True) -> float:
    """Bring node and probe pod to the state that the NodeQuarantine `name` specifies.

    Returns the seconds until the next call. math.inf: there is nothing to do. Level-triggered and idempotent.
    `write_report` False: for a held node, no status is written; 0 means that there is one to write. Raises InputError
    if the object is malformed, and the errors of the cluster client.
    """
    for _ in range(MAX_STEPS_PER_RECONCILE):
        quarantine, known_node = await registry.get_quarantine(name), await registry.get_node(name)
        if quarantine is None:
            if (
                known_node is not None
                and known_node.node.marked
                and not await _release_orphan(registry, name, known_node)
            ):
                continue
            if known_node is None or not registry.has_new_condition(name, known_node):
                return math.inf
            await _accuse_by_condition(registry, name, known_node)
            continue
        try:
            step = await _decide_next_step(registry, quarantine, known_node)
            if isinstance(
                step, ApproveQuarantine
            ):  # never based on old data: other nodes may be blamed or quarantined by now
                step, quarantine = await registry.decide_approval(name)
            if isinstance(step, RequeueAfter):
                return step.seconds
            if (
                isinstance(step, WriteQuarantineStatus)
                and known_node is not None
                and known_node.node.held
                and not write_report
            ):
                return 0.0
            if is_probe_start(quarantine.parsed, step):
                async with registry.probe_lock:  # one at a time, to keep within the limit of probes
                    await _execute_step(
                        registry, await _decide_next_step(registry, quarantine, known_node), quarantine, known_node
                    )
            else:
                await _execute_step(registry, step, quarantine, known_node)
        except (Conflict, NotFound) as error:
            log.info("quarantine of %s: reading it again: %s", name, error)
            await registry.fetch_quarantine(name)
            await registry.fetch_node(name)
            continue
        if isinstance(step, StartProbe):
            return QUARANTINE_REQUEUE_SECONDS  # pods of its group wait for each other's addresses
    return QUARANTINE_REQUEUE_SECONDS


async def reconcile_all(registry: NodeRegistry) -> float:
    """List all NodeQuarantines and reconcile each. Returns the seconds until the next one is due."""
    await registry.refresh()
    registry.publish_metrics()
    delays = [await _try_reconcile(registry, name) for name in list(registry.list_names())]
    return min([QUARANTINE_RESYNC_SECONDS, *delays])


async def run_quarantine_loop(registry: NodeRegistry) -> None:
    """Reconcile all nodes until cancelled: on changes, and when a NodeQuarantine is due."""
    queue = _WorkQueue(registry)
    registry.priority_gate.set_backlog(0)  # changes from before this operator led block nothing
    try:
        while True:
            registry.change_event.clear()
            try:
                delay = await queue.dispatch()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                delay = QUARANTINE_RETRY_SECONDS
                log.warning("NodeQuarantines cannot be reconciled; retrying: %s", error)
            except Exception:
                delay = QUARANTINE_RETRY_SECONDS
                log.exception("NodeQuarantines cannot be reconciled; retrying")
            try:
                await registry.runtime.run_with_timeout(delay, registry.change_event.wait())
            except TimeoutError:
                continue
    finally:
        await queue.close()


@dataclass
class _WorkQueue:
    """The nodes that are being reconciled, and those that wait.

    Nodes that are not held yet precede status reports about held ones. If many nodes fail at once, so do suspicions
    that must still be raised.
    """

    registry: NodeRegistry
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _waiting: dict[str, None] = field(default_factory=dict)
    _unreported: dict[str, None] = field(default_factory=dict)
    _due_at: dict[str, float] = field(default_factory=dict)  # by the monotonic clock
    _last_held_at: deque[float] = field(
        default_factory=lambda: deque(maxlen=NODE_PRIORITY_THRESHOLD + 1)
    )  # times of the last ones, by the same clock
    _list_due_at: float | None = None  # None: at once
    _metrics_due_at: float | None = None  # None: at once

    async def dispatch(self) -> float:
        """Start what is due, within the limit, and return the seconds until more may be due."""
        registry, now = self.registry, self.registry.runtime.monotonic()
        if self._list_due_at is None or now >= self._list_due_at:
            await self._enqueue_all()
            self._list_due_at = now + QUARANTINE_RESYNC_SECONDS
        self._waiting |= registry.changed_nodes
        registry.changed_nodes.clear()
        for name in [name for name, at in self._due_at.items() if at <= now]:
            del self._due_at[name]
            self._waiting[name] = None
        quiet_at = (
            self._last_held_at[0] + QUARANTINE_REPORT_QUIET_SECONDS
            if len(self._last_held_at) > NODE_PRIORITY_THRESHOLD
            else now
        )
        for queue, write_report in ((self._waiting, False), (self._unreported, True)):
            is_blocked = now < registry.busy_until or (write_report and now < quiet_at)
            room = 0 if is_blocked else MAX_CONCURRENT_RECONCILES - len(self._running)
            for name in list(islice((name for name in queue if name not in self._running), room)):
                del queue[name]
                work = self._process(name, write_report=write_report)
                self._running[name] = registry.runtime.start_task(work, f"quarantine of {name}")
        registry.priority_gate.set_backlog(len(self._waiting))
        if self._metrics_due_at is None or now >= self._metrics_due_at:
            registry.publish_metrics()
            self._metrics_due_at = now + QUARANTINE_METRICS_SECONDS
        if now < registry.busy_until:
            return registry.busy_until - now
        next_ = min([self._list_due_at, self._metrics_due_at, *self._due_at.values()])
        return max(0.0, next_ - now)

    async def close(self) -> None:
        self.registry.priority_gate.set_backlog(0)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _enqueue_all(self) -> None:
        """Enqueue all nodes.

        Nodes are listed once: watches report changes, and a write that is based on old data is rejected.
        """
        registry = self.registry
        if not registry.nodes.listed.is_set():
            await registry.nodes.refresh(registry.cluster, ())
        await registry.quarantines.refresh(registry.cluster, ())
        self._waiting |= dict.fromkeys(registry.list_names())

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


async def release_all(
    cluster: Cluster, runtime: OperatorRuntime, seconds: float, settings: Settings | None = None
) -> None:
    """Delete all NodeQuarantines, and return when their nodes are released, whether or not the operator runs.

    `settings`: those of the installation, which determine whether nodes have a repair condition. Raises TimeoutError,
    which names the remaining ones, after `seconds`.
    """
    remaining = ["those that could not be listed"]

    async def release() -> None:
        while remaining:
            try:
                remaining[:] = await _release_once(cluster, runtime, settings or Settings())
            except kopf.TemporaryError as error:
                log.warning("releasing failed; retrying: %s", error)
            if remaining:
                await runtime.sleep(QUARANTINE_REQUEUE_SECONDS)

    try:
        await runtime.run_with_timeout(seconds, release())
    except TimeoutError as error:
        raise TimeoutError(f"not released within {seconds:.0f} s: {', '.join(remaining)}") from error


async def _release_once(cluster: Cluster, runtime: OperatorRuntime, settings: Settings) -> list[str]:
    """Request all deletions and perform the releases. Returns the names of the remaining NodeQuarantines."""
    registry = NodeRegistry(cluster, runtime, settings)
    try:
        quarantines = [body["metadata"] for body in await cluster.list(NODE_QUARANTINES)]
    except NotFound:  # the definition is gone, and all NodeQuarantines with it
        quarantines = []
    for metadata in quarantines:
        await cluster.delete(NODE_QUARANTINES, metadata["name"], uid=metadata["uid"])
    for metadata in quarantines:
        await _try_reconcile(registry, metadata["name"])
    if not quarantines:
        await registry.nodes.refresh(cluster, ())
        await _release_orphans(registry)
    return [metadata["name"] for metadata in quarantines]


async def _release_orphans(registry: NodeRegistry) -> None:
    """Release nodes with quarantine marks but without a NodeQuarantine, whose finalizer was removed by force."""
    for known_node in registry.nodes:
        name = known_node.body["metadata"]["name"]
        if known_node.node.marked and await _find_quarantine(registry, name) is None:
            await _release_node(registry, known_node)
            await _emit_events(
                registry,
                None,
                known_node,
                "NodeReleased",
                "it had Pacekeeper's quarantine marks, but no NodeQuarantine",
            )


async def _release_orphan(registry: NodeRegistry, name: str, known_node: KnownNode) -> bool:
    """Release a marked node without a known NodeQuarantine, and return whether that is done.

    The API server must confirm that there is none: a watch may be late.
    """
    try:
        if await registry.fetch_quarantine(name) is not None:
            return False
        await _release_node(registry, known_node)
    except (Conflict, NotFound) as error:
        log.info("marks of %s: reading the node again: %s", name, error)
        await registry.fetch_node(name)
        return False
    await _emit_events(
        registry, None, known_node, "NodeReleased", "it had Pacekeeper's quarantine marks, but no NodeQuarantine"
    )
    return True


async def _find_quarantine(registry: NodeRegistry, name: str) -> Object | None:
    try:
        return await registry.cluster.find(NODE_QUARANTINES, name)
    except NotFound:
        return None


async def _try_reconcile(registry: NodeRegistry, name: str, *, write_report: bool = True) -> float:
    """Reconcile one node. An error is logged, and does not stop the others."""
    try:
        return await reconcile_node(registry, name, write_report=write_report)
    except ApiServerBusy as error:
        log.warning("quarantine of %s: %s", name, error)
        registry.back_off(error.delay or QUARANTINE_RETRY_SECONDS)
        return error.delay or QUARANTINE_RETRY_SECONDS
    except kopf.TemporaryError as error:
        log.warning("quarantine of %s: %s", name, error)
        return max(QUARANTINE_RETRY_SECONDS, error.delay or 0.0)
    except (kopf.PermanentError, InputError) as error:
        log.warning("quarantine of %s: %s", name, error)
    except Exception:
        log.exception("quarantine of %s: a pass failed", name)
    return QUARANTINE_RETRY_SECONDS


async def _accuse_by_condition(registry: NodeRegistry, name: str, known_node: KnownNode) -> None:
    """Raise a suspicion because of a condition by which the platform accuses the node."""
    accuser = ObjectRef("", registry.settings.namespace)
    accusation = NodeAccusation(
        name,
        known_node.node.uid,
        known_node.node.broken,
        accuser,
        registry.get_broken_since(known_node),
        Witness.NODE_CONDITION,
    )
    decision = await raise_suspicion(registry, accusation)
    if decision.verdict is QuarantineVerdict.PAUSED:
        raise kopf.TemporaryError(decision.message, delay=QUARANTINE_RETRY_SECONDS)
    registry.mark_condition_reported(name, known_node)


async def _explain_refusal(registry: NodeRegistry, accusation: NodeAccusation) -> QuarantineDecision | None:
    """Return why no suspicion is raised; None: it may be."""
    if ended := _decide_ended(accusation):
        return ended
    if registry.runtime.now() >= accusation.found_at + SUSPICION_TTL_SECONDS:
        return QuarantineDecision(
            QuarantineVerdict.CLEARED, f"{accusation.node} is untouched: the suspicion was not confirmed in time"
        )
    known_node = await registry.get_node(accusation.node)
    if known_node is None or known_node.node.uid != accusation.uid:
        return QuarantineDecision(
            QuarantineVerdict.UNKNOWN_NODE, f"the accused node {accusation.node} does not exist any more"
        )
    if known_node.node.opted_out:
        return QuarantineDecision(
            QuarantineVerdict.OPTED_OUT, f"{accusation.node} is untouched: its label {LABEL_NO_QUARANTINE} forbids it"
        )
    pause_reason = await registry.get_pause_reason()
    return (
        QuarantineDecision(QuarantineVerdict.PAUSED, f"{accusation.node} is untouched: {pause_reason}")
        if pause_reason
        else None
    )


def _decide_ended(accusation: NodeAccusation) -> QuarantineDecision | None:
    """Return the decision about an accusation whose NodeQuarantine has ended or was deleted; None: it is new."""
    message = f"the NodeQuarantine of {accusation.node} has ended"
    return QuarantineDecision(QuarantineVerdict.CLEARED, message) if accusation.recorded else None


async def _create_quarantine(
    registry: NodeRegistry, accusation: NodeAccusation, suspicion: NodeSuspicion
) -> QuarantineDecision:
    expiry, from_job = registry.settings.quarantine_expires_after, not suspicion.is_from_platform
    spec = QuarantineSpec(
        suspicion.reason, accusation.uid, accusation.incident if from_job else None, expiry, suspicions=(suspicion,)
    )
    known_node = await registry.get_node(accusation.node)
    candidate = Quarantine(accusation.node, "", spec, QuarantineStatus(), guarded=True)
    approved = known_node is not None and await registry.try_immediate_approval(candidate, known_node)
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": "NodeQuarantine",
        "metadata": {"name": accusation.node, "finalizers": [FINALIZER_QUARANTINE]},
        "spec": replace(spec, approved=approved).to_json(),
    }
    if from_job:
        body["spec"]["incidentRef"] = {"namespace": accusation.incident.namespace, "name": accusation.incident.name}
    written = False
    try:
        stored, created = await _create_or_get(registry, body)
        registry.quarantines.update(stored)
        written = True
    finally:
        if approved:
            await registry.settle_approval(accusation.node, written=written)
    return replace(build_quarantine_decision(Quarantine.parse(stored), accusation.uid), recorded=created)


async def _create_or_get(registry: NodeRegistry, body: Object) -> tuple[Object, bool]:
    """Return the NodeQuarantine, and whether it was created.

    If another writer was faster, the accusation is repeated later.
    """
    try:
        return await registry.cluster.create(NODE_QUARANTINES, body), True
    except Conflict:
        return await registry.cluster.get(NODE_QUARANTINES, body["metadata"]["name"]), False


async def _decide_next_step(
    registry: NodeRegistry, quarantine: KnownQuarantine, known_node: KnownNode | None
) -> QuarantineStep:
    probe = quarantine.parsed.last_probe
    pods = () if probe is None else await probing.list_probe_group_pods(registry.cluster, registry.settings, probe.pod)
    return await registry.decide_next_step(
        quarantine, known_node, None if probe is None else _select_probe_pod(registry, probe.pod, pods)
    )


def _select_probe_pod(registry: NodeRegistry, name: str, bodies: Sequence[Object]) -> ProbePod | None:
    """Return the pod on the suspected node, with those of its group; None: there is none of them."""
    pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
    pod = pods.pop(name, ProbePod(phase=""))
    return (
        replace(pod, group_peers=tuple(pods.values()), failing_check=registry.failing_check)
        if pod.phase or pods
        else None
    )


async def _execute_step(
    registry: NodeRegistry, step: QuarantineStep, quarantine: KnownQuarantine, known_node: KnownNode | None
) -> None:
    """Execute one step, based on both objects as they were read. Raises Conflict if one of them has changed since."""
    metadata = quarantine.body["metadata"]
    name, finalizers = metadata["name"], metadata.get("finalizers", [])
    match step:
        case AddFinalizer():
            await _patch_quarantine(
                registry, quarantine, {"metadata": {"finalizers": [*finalizers, FINALIZER_QUARANTINE]}}
            )
        case RemoveFinalizer():
            remaining = [finalizer for finalizer in finalizers if finalizer != FINALIZER_QUARANTINE]
            await _patch_quarantine(registry, quarantine, {"metadata": {"finalizers": remaining}})
            await registry.fetch_quarantine(name)
        case ApproveQuarantine():
            await _approve_quarantine(registry, quarantine)
        case HoldNode(again) if known_node is not None:
            await _hold_node(registry, known_node)
            if again:
                note = "taint or cordon was removed, and is restored; delete the NodeQuarantine to release the node"
                await _emit_events(registry, quarantine, known_node, "QuarantineRestored", note, warning=True)
        case FlagNode() if known_node is not None:
            await _set_repair_condition(registry, step, known_node)
        case ReleaseNode(reason) if known_node is not None:
            await _release_node(registry, known_node)
            await _emit_events(registry, quarantine, known_node, "NodeReleased", reason)
        case WriteQuarantineStatus():
            await _report_status(registry, step, quarantine, known_node)
        case StartProbe(pod, share) if known_node is not None:
            await _start_probe(registry, pod, quarantine, share)
        case EndProbe(pod):
            await probing.delete_probe_group_pods(registry.cluster, registry.settings, pod)
        case DeleteQuarantine():
            await registry.cluster.delete(NODE_QUARANTINES, name, uid=metadata["uid"])
            await registry.fetch_quarantine(name)
        case _:  # a wait, or a step for a node that is gone
            return


async def _approve_quarantine(registry: NodeRegistry, quarantine: KnownQuarantine) -> None:
    """Approve the quarantine. Until the result is known, it counts as approved."""
    written = False
    try:
        await _patch_quarantine(registry, quarantine, {"spec": {"approved": True}})
        written = True
    finally:
        await registry.settle_approval(quarantine.body["metadata"]["name"], written=written)


async def _report_status(
    registry: NodeRegistry, report: WriteQuarantineStatus, quarantine: KnownQuarantine, known_node: KnownNode | None
) -> None:
    await _patch_quarantine(registry, quarantine, {"status": report.status.to_patch()}, subresource="status")
    if report.event:
        reason = f" ({quarantine.body['spec']['reason']})" if report.event == "NodeQuarantined" else ""
        note = f"{report.status.message}{reason}"
        await _emit_events(registry, quarantine, known_node, report.event, note, warning=report.warning)


async def _patch_quarantine(
    registry: NodeRegistry, quarantine: KnownQuarantine, changes: Object, subresource: str = ""
) -> None:
    """Patch the NodeQuarantine if it is unchanged since it was read."""
    before = quarantine.body["metadata"]
    metadata = {"resourceVersion": before["resourceVersion"], **changes.get("metadata", {})}
    changes = {**changes, "metadata": metadata}
    registry.quarantines.update(
        await registry.cluster.patch(NODE_QUARANTINES, before["name"], changes, subresource=subresource)
    )


async def _hold_node(registry: NodeRegistry, known_node: KnownNode) -> None:
    if not known_node.node.tainted:
        await _patch_taints(
            registry, known_node, [*_list_taints(known_node), {"key": TAINT_QUARANTINE, "effect": "NoSchedule"}]
        )
    if not known_node.node.cordoned:
        await _apply_cordon(registry, known_node, {"spec": {"unschedulable": True}})


async def _release_node(registry: NodeRegistry, known_node: KnownNode) -> None:
    if known_node.node.tainted:
        await _patch_taints(
            registry, known_node, [taint for taint in _list_taints(known_node) if taint["key"] != TAINT_QUARANTINE]
        )
    if known_node.node.cordoned:
        await _apply_cordon(registry, known_node, {})
    if known_node.node.flagged:  # last: the node accepts pods again even if this fails
        await _apply_conditions(registry, known_node, {})


async def _set_repair_condition(registry: NodeRegistry, flag: FlagNode, known_node: KnownNode) -> None:
    condition = {
        "type": registry.settings.repair_condition,
        "status": "True",
        "reason": flag.reason,
        "message": flag.message,
        "lastHeartbeatTime": format_time(flag.since)[:19] + "Z",
        "lastTransitionTime": format_time(flag.since)[:19] + "Z",
    }
    await _apply_conditions(registry, known_node, {"status": {"conditions": [condition]}})


def _list_taints(known_node: KnownNode) -> list[Object]:
    taints: list[Object] = known_node.body["spec"]["taints"]
    return taints


async def _patch_taints(registry: NodeRegistry, known_node: KnownNode, taints: list[Object]) -> None:
    """Patch the taints by compare-and-swap.

    The API server replaces the list as a whole, and other controllers write it, too. Server-side apply would remove the
    others' taints, and would leave ours when we give up the list.
    """
    name, version = known_node.body["metadata"]["name"], known_node.body["metadata"]["resourceVersion"]
    changes = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}
    registry.nodes.update(await registry.cluster.patch(NODE_OBJECTS, name, changes))


async def _apply_cordon(registry: NodeRegistry, known_node: KnownNode, fields: Object) -> None:
    """Apply the cordon of `fields`. The UID prevents that applying to a deleted node creates one."""
    metadata = {"name": known_node.body["metadata"]["name"], "uid": known_node.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **fields}
    registry.nodes.update(await registry.cluster.apply(NODE_OBJECTS, body, manager=FIELD_MANAGER_CORDON))


async def _apply_conditions(registry: NodeRegistry, known_node: KnownNode, fields: Object) -> None:
    """Apply the node conditions of `fields`: server-side apply leaves those of other managers unchanged."""
    metadata = {"name": known_node.body["metadata"]["name"], "uid": known_node.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **fields}
    manager = FIELD_MANAGER_CONDITION
    registry.nodes.update(await registry.cluster.apply(NODE_OBJECTS, body, manager=manager, subresource="status"))


async def _start_probe(registry: NodeRegistry, pod: str, quarantine: KnownQuarantine, share: bool) -> None:
    """Start the probe pods on the node and on up to two comparison nodes of its kind: slowness is relative."""
    cluster, settings, runtime = registry.cluster, registry.settings, registry.runtime
    name = quarantine.body["metadata"]["name"]
    node = await cluster.get(NODE_OBJECTS, name)
    bodies = await probing.list_probe_group_pods(cluster, settings, pod)
    comparison_nodes = probing.choose_comparison_nodes(node, await cluster.list(NODE_OBJECTS), pod)
    existing_nodes = {body["metadata"]["name"]: body["spec"]["nodeName"] for body in bodies}
    peer_nodes = [existing_nodes.get(f"{pod}-{i}", peer) for i, peer in enumerate(comparison_nodes)]
    members = [
        *(ProbeGroupMember(f"{pod}-{i}", peer) for i, peer in enumerate(peer_nodes)),
        ProbeGroupMember(pod, name),
    ]
    probe = quarantine.parsed.last_probe
    waited = 0.0 if probe is None else runtime.now() - probe.started
    secret = probing.find_probe_group_secret(bodies) or runtime.create_identifier()
    for launch in plan_probe_launches(members, {b["metadata"]["name"]: ProbePod.parse(b) for b in bodies}, waited):
        member_node = node if launch.member.pod == pod else await cluster.find(NODE_OBJECTS, launch.member.node)
        if member_node is None:
            continue
        is_suspect = launch.member.pod == pod
        gpus = (
            await probing.count_probe_gpus(cluster, member_node, share=share)
            if is_suspect
            else await probing.count_single_gpu(cluster, member_node)
        )
        task = NodeProbeTask(pod, secret, gpus, launch.peers, launch.participants)
        await probing.start_probe_pod(
            cluster, settings, launch.member.pod, member_node, quarantine.body, "NodeQuarantine", task
        )


async def _emit_events(
    registry: NodeRegistry,
    quarantine: KnownQuarantine | None,
    known_node: KnownNode | None,
    reason: str,
    note: str,
    *,
    warning: bool = False,
) -> None:
    """Emit Events about the node and its quarantine, which `kubectl describe` shows."""
    objects = [] if quarantine is None else [(API_VERSION, "NodeQuarantine", quarantine.body["metadata"])]
    objects += [] if known_node is None else [("v1", "Node", known_node.body["metadata"])]
    for version, kind, metadata in objects:
        reference = {"apiVersion": version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}
        await events.emit_event(registry.cluster, registry.runtime, reference, reason, note, reason, warning=warning)

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
    Sign,
    Verdict,
    Witness,
    format_time,
)
from ..cluster import NODES, QUARANTINES, Busy, Cluster, Conflict, NotFound, Object
from ..decide.node_circle import Seat, launches
from ..decide.node_quarantine import RESYNC_SECONDS, ruling
from ..decide.node_steps import (
    Approve,
    Delete,
    EndProbe,
    Flag,
    Guard,
    Hold,
    ProbePod,
    Quarantine,
    QuarantineStep,
    Release,
    Report,
    StartProbe,
    Unguard,
    Wait,
)
from ..decide.node_suspicion import SUSPICION_SECONDS, begins_a_probe, with_sign
from ..manifests import ProbeTask
from ..observation import Ruling
from ..runtime import Runtime
from ..settings import Settings
from . import events, probing
from .fleet import Fleet, Known, Seen
from .nodes_first import FEW

MAX_STEPS = 20
"""Of one call of `reconcile`: what is not done by then is done by the next."""
AT_ONCE = 16
"""Nodes that are looked after at the same time: so many calls the API server has to answer at once, at most."""
AGAIN_SECONDS = 1.0
QUIET_SECONDS = 1.0
"""Within which more than a few nodes were held: what is to be said of them waits for the others."""
SHOW_SECONDS = 1.0
"""Between two looks at the metrics."""
RETRY_SECONDS = 5.0
MAX_REASON = 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blame:
    """What a job says against a node."""

    node: str
    uid: str
    reason: str
    incident: ObjectRef  # its namespace is whose word it is; without a name it is the platform's own
    at: float  # when it was found, seconds since the epoch: what is said again does not become younger
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to look at the node: it takes a second namespace's
    raised: bool = False  # it has stood in a NodeQuarantine


async def suspect(fleet: Fleet, blame: Blame) -> Ruling:
    """Raise a suspicion against a node, and what has become of it so far. Saying it twice is saying it once.

    The node stays untouched until a witness confirms it: `watch_over` sees to that. A suspicion that has come to
    nothing is not raised anew by the same words, and whoever deletes its NodeQuarantine has ended it.
    """
    sign = Sign(blame.incident.namespace, blame.incident.name, blame.reason[:MAX_REASON], blame.at)
    sign = replace(sign, witness=blame.witness, weak=blame.weak)
    known = await fleet.quarantine(blame.node)
    if known is None:
        return await _refusal(fleet, blame) or await _create(fleet, blame, sign)
    found = known.legible
    if found.over or found.node_uid not in (None, blame.uid):
        ending = Ruling(Verdict.RELEASING, f"an earlier quarantine of {blame.node} is just ending: say it again then")
        return _ended(blame) or ending
    signs = with_sign(found.spec.signs, sign)
    if found.suspicion and signs != found.spec.signs:
        spec = {"signs": replace(found.spec, signs=signs).to_json()["signs"]}
        await _patch(fleet, known, {"spec": spec})
    return replace(ruling(found, blame.uid), raised=found.suspicion)


async def look(fleet: Fleet, node: str, node_uid: str) -> Ruling | None:
    """What has become of a suspicion; None: there is none (any more)."""
    known = await fleet.quarantine(node)
    return None if known is None else ruling(known.legible, node_uid)


async def reconcile(fleet: Fleet, name: str, *, words: bool = True) -> float:
    """Brings node and probe pod to what the NodeQuarantine `name` says; seconds until it wants to be called again.

    Level-triggered and idempotent. math.inf: there is nothing to be done. `words` False: of a node that is held,
    nothing is written down; 0 says that there is something.
    Raises InputError where the object is malformed, and what the cluster raises.
    """
    for _ in range(MAX_STEPS):
        known, seen = await fleet.quarantine(name), await fleet.node(name)
        if known is None:
            if seen is not None and seen.node.marked and not await _release_unanswered(fleet, name, seen):
                continue
            if seen is None or not fleet.broken(name, seen):
                return math.inf
            await _blame_by_condition(fleet, name, seen)
            continue
        try:
            step = await _next(fleet, known, seen)
            if isinstance(step, Approve):  # never upon old news: somebody may have been blamed or quarantined meanwhile
                step, known = await fleet.approval(name)
            if isinstance(step, Wait):
                return step.seconds
            if isinstance(step, Report) and seen is not None and seen.node.held and not words:
                return 0.0
            if begins_a_probe(known.legible, step):
                async with fleet.probes:  # one after the other, so that no more run than may
                    await _carry_out(fleet, await _next(fleet, known, seen), known, seen)
            else:
                await _carry_out(fleet, step, known, seen)
        except (Conflict, NotFound) as error:
            log.info("quarantine of %s: looking anew: %s", name, error)
            await fleet.quarantine_anew(name)
            await fleet.node_anew(name)
            continue
        if isinstance(step, StartProbe):
            return AGAIN_SECONDS  # pods of its circle wait for each other's addresses
    return AGAIN_SECONDS


async def look_at_all(fleet: Fleet) -> float:
    """Reads them all, and does what all of them want; seconds until one of them wants it again."""
    await fleet.read()
    fleet.show()
    waits = [await _try_reconcile(fleet, name) for name in list(fleet.names())]
    return min([RESYNC_SECONDS, *waits])


async def watch_over(fleet: Fleet) -> None:
    """Brings all nodes to what their NodeQuarantines say, until it is cancelled: whenever something is new about one,
    and when one wants it."""
    round_ = _Round(fleet)
    fleet.first.count(0)  # what was heard while another led waits for nobody
    try:
        while True:
            fleet.news.clear()
            try:
                delay = await round_.begin()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                delay = RETRY_SECONDS
                log.warning("quarantines cannot be looked at, and are tried again: %s", error)
            except Exception:
                delay = RETRY_SECONDS
                log.exception("quarantines cannot be looked at, and are tried again")
            try:
                await fleet.runtime.within(delay, fleet.news.wait())
            except TimeoutError:
                continue
    finally:
        await round_.end()


@dataclass
class _Round:
    """Who is looked after now, and who waits for it. Nodes that are not held yet go before words about those that
    are, and so do suspicions that are still to be raised where many nodes fail at once."""

    fleet: Fleet
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _waiting: dict[str, None] = field(default_factory=dict)
    _words: dict[str, None] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)  # by the monotonic clock
    _held_at: deque[float] = field(default_factory=lambda: deque(maxlen=FEW + 1))  # the last ones, by the same clock
    _listed_at: float = -math.inf
    _shown_at: float = -math.inf

    async def begin(self) -> float:
        """Whatever is due, as far as there is room; seconds until more may be."""
        fleet, now = self.fleet, self.fleet.runtime.monotonic()
        if now >= self._listed_at + RESYNC_SECONDS:
            await self._list()
            self._listed_at = now
        self._waiting |= fleet.changed
        fleet.changed.clear()
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._waiting[name] = None
        quiet_at = self._held_at[0] + QUIET_SECONDS if len(self._held_at) > FEW else now
        for queue, words in ((self._waiting, False), (self._words, True)):
            wait = now < fleet.busy_until or (words and now < quiet_at)
            room = 0 if wait else AT_ONCE - len(self._under_way)
            for name in list(islice((name for name in queue if name not in self._under_way), room)):
                del queue[name]
                work = self._attend(name, words=words)
                self._under_way[name] = fleet.runtime.start(work, f"quarantine of {name}")
        fleet.first.count(len(self._waiting))
        if now >= self._shown_at + SHOW_SECONDS:
            fleet.show()
            self._shown_at = now
        if now < fleet.busy_until:
            return fleet.busy_until - now
        next_ = min([self._listed_at + RESYNC_SECONDS, self._shown_at + SHOW_SECONDS, *self._due.values()])
        return max(0.0, next_ - now)

    async def end(self) -> None:
        self.fleet.first.count(0)
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def _list(self) -> None:
        """Nodes once: of them watches tell, and what is a moment old is refused when it is written."""
        fleet = self.fleet
        if not fleet.nodes.listed.is_set():
            await fleet.nodes.read(fleet.cluster, ())
        await fleet.quarantines.read(fleet.cluster, ())
        self._waiting |= dict.fromkeys(fleet.names())

    async def _attend(self, name: str, *, words: bool) -> None:
        delay = RETRY_SECONDS
        try:
            delay = await _try_reconcile(self.fleet, name, words=words)
        finally:
            del self._under_way[name]
            if delay <= 0 and not words:
                self._words[name] = None
                self._held_at.append(self.fleet.runtime.monotonic())
            elif delay < math.inf:
                self._due[name] = self.fleet.runtime.monotonic() + delay
            self.fleet.news.set()


async def release_all(cluster: Cluster, runtime: Runtime, seconds: float, settings: Settings | None = None) -> None:
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
                await runtime.sleep(AGAIN_SECONDS)

    try:
        await runtime.within(seconds, release())
    except TimeoutError as error:
        raise TimeoutError(f"not released within {seconds:.0f} s: {', '.join(left)}") from error


async def _release_once(cluster: Cluster, runtime: Runtime, settings: Settings) -> list[str]:
    """Asks for all deletions and does what they demand; the names of those that are left, none if all is done."""
    fleet = Fleet(cluster, runtime, settings)
    try:
        quarantines = [body["metadata"] for body in await cluster.list(QUARANTINES)]
    except NotFound:  # the definitions are gone, and all NodeQuarantines with them
        quarantines = []
    for metadata in quarantines:
        await cluster.delete(QUARANTINES, metadata["name"], uid=metadata["uid"])
    for metadata in quarantines:
        await _try_reconcile(fleet, metadata["name"])
    if not quarantines:
        await fleet.nodes.read(cluster, ())
        await _sweep(fleet)
    return [metadata["name"] for metadata in quarantines]


async def _sweep(fleet: Fleet) -> None:
    """Releases nodes with our marks and no NodeQuarantine: somebody has taken a finalizer away by force."""
    for seen in fleet.nodes:
        name = seen.body["metadata"]["name"]
        if seen.node.marked and await _quarantine_of(fleet, name) is None:
            await _release(fleet, seen)
            await _tell(fleet, None, seen, "NodeReleased", "it carried our marks, but there is no NodeQuarantine")


async def _release_unanswered(fleet: Fleet, name: str, seen: Seen) -> bool:
    """Releases a node with our marks for which no NodeQuarantine is known, whenever that is found; whether it is done.
    That there is none the API server itself has to say: a watch may be late."""
    try:
        if await fleet.quarantine_anew(name) is not None:
            return False
        await _release(fleet, seen)
    except (Conflict, NotFound) as error:
        log.info("marks of %s: looking anew: %s", name, error)
        await fleet.node_anew(name)
        return False
    await _tell(fleet, None, seen, "NodeReleased", "it carried our marks, but there is no NodeQuarantine")
    return True


async def _quarantine_of(fleet: Fleet, name: str) -> Object | None:
    try:
        return await fleet.cluster.find(QUARANTINES, name)
    except NotFound:
        return None


async def _try_reconcile(fleet: Fleet, name: str, *, words: bool = True) -> float:
    """One that fails does not hold up the others."""
    try:
        return await reconcile(fleet, name, words=words)
    except Busy as error:
        log.warning("quarantine of %s: %s", name, error)
        fleet.busy(error.delay or RETRY_SECONDS)
        return error.delay or RETRY_SECONDS
    except kopf.TemporaryError as error:
        log.warning("quarantine of %s: %s", name, error)
        return max(RETRY_SECONDS, error.delay or 0.0)
    except (kopf.PermanentError, InputError) as error:
        log.warning("quarantine of %s: %s", name, error)
    except Exception:
        log.exception("quarantine of %s: a pass failed", name)
    return RETRY_SECONDS


async def _blame_by_condition(fleet: Fleet, name: str, seen: Seen) -> None:
    """The platform's own word against a node."""
    said = ObjectRef("", fleet.settings.namespace)
    blame = Blame(name, seen.node.uid, seen.node.broken, said, fleet.broken_since(seen), Witness.NODE_CONDITION)
    ruling = await suspect(fleet, blame)
    if ruling.verdict is Verdict.PAUSED:
        raise kopf.TemporaryError(ruling.words, delay=RETRY_SECONDS)
    fleet.told(name, seen)


async def _refusal(fleet: Fleet, blame: Blame) -> Ruling | None:
    """Why no suspicion is raised; None: it may be."""
    if ended := _ended(blame):
        return ended
    if fleet.runtime.now() >= blame.at + SUSPICION_SECONDS:
        return Ruling(Verdict.CLEARED, f"{blame.node} is untouched: nobody has confirmed the suspicion in time")
    seen = await fleet.node(blame.node)
    if seen is None or seen.node.uid != blame.uid:
        return Ruling(Verdict.UNKNOWN_NODE, f"the {blame.node} that was meant does not exist any more")
    if seen.node.opted_out:
        return Ruling(Verdict.OPTED_OUT, f"{blame.node} is untouched: its label {LABEL_NO_QUARANTINE} forbids it")
    paused = await fleet.paused()
    return Ruling(Verdict.PAUSED, f"{blame.node} is untouched: {paused}") if paused else None


def _ended(blame: Blame) -> Ruling | None:
    """Of what has stood in a NodeQuarantine that is over, deleted by somebody perhaps; None: it is new."""
    words = f"the NodeQuarantine that told of {blame.node} has ended"
    return Ruling(Verdict.CLEARED, words) if blame.raised else None


async def _create(fleet: Fleet, blame: Blame, sign: Sign) -> Ruling:
    expiry, of_job = fleet.settings.quarantine_expires_after, not sign.by_platform
    spec = QuarantineSpec(sign.reason, blame.uid, blame.incident if of_job else None, expiry, signs=(sign,))
    seen = await fleet.node(blame.node)
    suspicion = Quarantine(blame.node, "", spec, QuarantineStatus(), guarded=True)
    approved = seen is not None and await fleet.approved_at_once(suspicion, seen)
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
        there, raised = await _made_or_found(fleet, body)
        fleet.quarantines.take(there)
        known = True
    finally:
        if approved:
            await fleet.settled(blame.node, written=known)
    return replace(ruling(Quarantine.parse(there), blame.uid), raised=raised)


async def _made_or_found(fleet: Fleet, body: Object) -> tuple[Object, bool]:
    """And whether it was made. Where somebody was faster, what is said here is said again if it stays so."""
    try:
        return await fleet.cluster.create(QUARANTINES, body), True
    except Conflict:
        return await fleet.cluster.get(QUARANTINES, body["metadata"]["name"]), False


async def _next(fleet: Fleet, known: Known, seen: Seen | None) -> QuarantineStep:
    probe = known.legible.last_probe
    pods = () if probe is None else await probing.pods_of(fleet.cluster, fleet.settings, probe.pod)
    return await fleet.next_step(known, seen, None if probe is None else _probe(fleet, probe.pod, pods))


def _probe(fleet: Fleet, name: str, bodies: Sequence[Object]) -> ProbePod | None:
    """The pod on the node in question, with those of its circle; None: there is none of them."""
    pods = {body["metadata"]["name"]: ProbePod.parse(body) for body in bodies}
    own = pods.pop(name, ProbePod(phase=""))
    return replace(own, others=tuple(pods.values()), failing_check=fleet.failing_check) if own.phase or pods else None


async def _carry_out(fleet: Fleet, step: QuarantineStep, known: Known, seen: Seen | None) -> None:
    """One step. It is based upon both as they were read: Conflict, where one of them has changed since."""
    metadata = known.body["metadata"]
    name, finalizers = metadata["name"], metadata.get("finalizers", [])
    match step:
        case Guard():
            await _patch(fleet, known, {"metadata": {"finalizers": [*finalizers, FINALIZER_QUARANTINE]}})
        case Unguard():
            left = [finalizer for finalizer in finalizers if finalizer != FINALIZER_QUARANTINE]
            await _patch(fleet, known, {"metadata": {"finalizers": left}})
            await fleet.quarantine_anew(name)
        case Approve():
            await _approve(fleet, known)
        case Hold(again) if seen is not None:
            await _hold(fleet, seen)
            if again:
                note = "taint or cordon was taken away; delete the NodeQuarantine to release the node"
                await _tell(fleet, known, seen, "QuarantineRestored", note, warning=True)
        case Flag() if seen is not None:
            await _flag(fleet, step, seen)
        case Release(reason) if seen is not None:
            await _release(fleet, seen)
            await _tell(fleet, known, seen, "NodeReleased", reason)
        case Report():
            await _report(fleet, step, known, seen)
        case StartProbe(pod, share) if seen is not None:
            await _start_probe(fleet, pod, known, share)
        case EndProbe(pod):
            await probing.end(fleet.cluster, fleet.settings, pod)
        case Delete():
            await fleet.cluster.delete(QUARANTINES, name, uid=metadata["uid"])
            await fleet.quarantine_anew(name)
        case _:  # a wait, or what is for a node that has gone
            return


async def _approve(fleet: Fleet, known: Known) -> None:
    """Whatever becomes of it, it counts as one until that is known."""
    written = False
    try:
        await _patch(fleet, known, {"spec": {"approved": True}})
        written = True
    finally:
        await fleet.settled(known.body["metadata"]["name"], written=written)


async def _report(fleet: Fleet, report: Report, known: Known, seen: Seen | None) -> None:
    await _patch(fleet, known, {"status": report.status.to_patch()}, subresource="status")
    if report.event:
        why = f" ({known.body['spec']['reason']})" if report.event == "NodeQuarantined" else ""
        note = f"{report.status.message}{why}"
        await _tell(fleet, known, seen, report.event, note, warning=report.warning)


async def _patch(fleet: Fleet, known: Known, changes: Object, subresource: str = "") -> None:
    """Of the NodeQuarantine as it was read."""
    before = known.body["metadata"]
    metadata = {"resourceVersion": before["resourceVersion"], **changes.get("metadata", {})}
    changes = {**changes, "metadata": metadata}
    fleet.quarantines.take(await fleet.cluster.patch(QUARANTINES, before["name"], changes, subresource=subresource))


async def _hold(fleet: Fleet, seen: Seen) -> None:
    if not seen.node.tainted:
        await _patch_taints(fleet, seen, [*_taints(seen), {"key": TAINT_QUARANTINE, "effect": "NoSchedule"}])
    if not seen.node.cordoned:
        await _apply(fleet, seen, {"spec": {"unschedulable": True}})


async def _release(fleet: Fleet, seen: Seen) -> None:
    if seen.node.tainted:
        await _patch_taints(fleet, seen, [taint for taint in _taints(seen) if taint["key"] != TAINT_QUARANTINE])
    if seen.node.cordoned:
        await _apply(fleet, seen, {})
    if seen.node.flagged:  # last: the node takes pods again, whatever becomes of this
        await _apply_status(fleet, seen, {})


async def _flag(fleet: Fleet, flag: Flag, seen: Seen) -> None:
    condition = {
        "type": fleet.settings.repair_condition,
        "status": "True",
        "reason": flag.reason,
        "message": flag.message,
        "lastHeartbeatTime": format_time(flag.since)[:19] + "Z",
        "lastTransitionTime": format_time(flag.since)[:19] + "Z",
    }
    await _apply_status(fleet, seen, {"status": {"conditions": [condition]}})


def _taints(seen: Seen) -> list[Object]:
    taints: list[Object] = seen.body["spec"]["taints"]
    return taints


async def _patch_taints(fleet: Fleet, seen: Seen, taints: list[Object]) -> None:
    """By compare-and-swap: the API server knows the list only as a whole, and other controllers write it, too.

    Server-side apply would take the others' taints away, and would leave ours when we give up the list.
    """
    name, version = seen.body["metadata"]["name"], seen.body["metadata"]["resourceVersion"]
    changes = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}
    fleet.nodes.take(await fleet.cluster.patch(NODES, name, changes))


async def _apply(fleet: Fleet, seen: Seen, wanted: Object) -> None:
    """What we want of the cordon. With the UID, or applying to a node that has gone would create one."""
    metadata = {"name": seen.body["metadata"]["name"], "uid": seen.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **wanted}
    fleet.nodes.take(await fleet.cluster.apply(NODES, body, manager=FIELD_MANAGER_CORDON))


async def _apply_status(fleet: Fleet, seen: Seen, wanted: Object) -> None:
    """What we want of the node's conditions: server-side apply leaves those of others alone."""
    metadata = {"name": seen.body["metadata"]["name"], "uid": seen.body["metadata"]["uid"]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, **wanted}
    manager = FIELD_MANAGER_CONDITION
    fleet.nodes.take(await fleet.cluster.apply(NODES, body, manager=manager, subresource="status"))


async def _start_probe(fleet: Fleet, pod: str, known: Known, share: bool) -> None:
    """With two other nodes beside it, where the cluster has some of its kind: alone no node is slow."""
    cluster, settings, runtime = fleet.cluster, fleet.settings, fleet.runtime
    name = known.body["metadata"]["name"]
    node = await cluster.get(NODES, name)
    bodies = await probing.pods_of(cluster, settings, pod)
    company = probing.company(node, await cluster.list(NODES), pod)
    there = {found["metadata"]["name"]: found["spec"]["nodeName"] for found in bodies}
    hosts = [there.get(f"{pod}-{i}", other) for i, other in enumerate(company)]
    circle = [*(Seat(f"{pod}-{i}", other) for i, other in enumerate(hosts)), Seat(pod, name)]
    probe = known.legible.last_probe
    waited = 0.0 if probe is None else runtime.now() - probe.started
    secret = probing.secret_of(bodies) or runtime.identifier()
    for launch in launches(circle, {b["metadata"]["name"]: ProbePod.parse(b) for b in bodies}, waited):
        place = node if launch.seat.pod == pod else await cluster.find(NODES, launch.seat.node)
        if place is None:
            continue
        own = launch.seat.pod == pod
        gpus = await probing.gpus(cluster, place, share=share) if own else await probing.one_gpu(cluster, place)
        task = ProbeTask(pod, secret, gpus, launch.peers, launch.guests)
        await probing.start(cluster, settings, launch.seat.pod, place, known.body, "NodeQuarantine", task)


async def _tell(
    fleet: Fleet, known: Known | None, seen: Seen | None, reason: str, note: str, *, warning: bool = False
) -> None:
    """Events about the node and its quarantine, which `kubectl describe` shows."""
    about = [] if known is None else [(API_VERSION, "NodeQuarantine", known.body["metadata"])]
    about += [] if seen is None else [("v1", "Node", seen.body["metadata"])]
    for version, kind, metadata in about:
        reference = {"apiVersion": version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}
        await events.tell_about(fleet.cluster, fleet.runtime, reference, reason, note, reason, warning=warning)

"""All nodes and their NodeQuarantines, as watches tell of them and lists prove it; approvals, one after the other.

Whatever is decided upon here is written by compare-and-swap, so what is a moment old costs another look, and never a
node. Only an approval goes by what others are like, too: for that, all NodeQuarantines are read anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import PAUSE_CONFIG_MAP, RemediationMode, QuarantineStatus
from ..cluster import CONFIG_MAPS, NODE_OBJECTS, NODE_QUARANTINES, Cluster, Conflict, Object
from ..decide.node_census import QuarantineContext, QuarantineUsage
from ..decide.node_quarantine import decide_quarantine_step
from ..decide.node_steps import ApproveQuarantine, TargetNode, ProbePod, Quarantine, QuarantineStep, QuarantineRules
from ..decide.node_suspicion import SUSPICION_TTL_SECONDS, find_witness
from ..observe.store import Key, ResourceStore
from ..runtime import OperatorRuntime
from ..settings import Settings
from .nodes_first import NodePriorityGate

PAUSE_CACHE_SECONDS, APPROVAL_PAUSE_CACHE_SECONDS = 1.0, 0.5
"""So old the word about the pause may be; and for an approval."""

APPROVAL_LIST_CACHE_SECONDS = 2.0
"""So long what was read for an approval is good for others. Nobody but this operator blames or approves meanwhile,
except people, of whom the watch tells; a thousand nodes that fail at once would else have all read a thousand times."""


@dataclass(frozen=True)
class KnownQuarantine:
    """A NodeQuarantine."""

    body: Object
    quarantine: Quarantine | None
    error: str = ""  # why it cannot be read

    @property
    def parsed(self) -> Quarantine:
        """Raises InputError where it cannot be read."""
        if self.quarantine is None:
            raise InputError(self.error)
        return self.quarantine


@dataclass(frozen=True)
class KnownNode:
    """A node, reduced to what its quarantine needs: a node's whole object is tens of kilobytes."""

    node: TargetNode
    body: Object = field(compare=False)
    """Its name, UID, resourceVersion and taints."""


class NodeRegistry:
    """What has not been listed yet is asked for each time."""

    def __init__(self, cluster: Cluster, runtime: OperatorRuntime, settings: Settings) -> None:
        self.cluster = cluster
        self.runtime = runtime
        self.settings = settings
        self.change_event = asyncio.Event()
        self.changed_nodes: dict[str, None] = {}
        """Names of nodes about which something is new, in that order."""
        self.quarantines: ResourceStore[KnownQuarantine] = ResourceStore(NODE_QUARANTINES, _parse_quarantine, on_change=self._on_quarantine_changed, is_reduction_pure=True)
        self.nodes: ResourceStore[KnownNode] = ResourceStore(NODE_OBJECTS, self._reduce_node, on_change=self._on_node_changed, is_reduction_pure=True)
        self.probe_lock = asyncio.Lock()
        """Held by whoever begins a probe of a suspicion."""
        self.busy_until = -math.inf
        """The API server has asked for so long a pause, by the monotonic clock."""
        self.priority_gate = NodePriorityGate(runtime)
        self.failing_check = ""
        """The check that probe pods fail on nodes that nobody suspects: `services.probe_check`."""
        self._usage = QuarantineUsage()
        self._reported_conditions: dict[str, tuple[str, float]] = {}  # node → UID, since when: its condition has been told of
        self._pause: tuple[float, str] = (-math.inf, "")
        self._pause_lock = asyncio.Lock()
        self._approval_lock = asyncio.Lock()
        self._read_at = -math.inf  # when the last reading for an approval began, by the monotonic clock

    def invalidate(self) -> None:
        """It decides from now on: what is known counts for nothing until it has been listed."""
        self.nodes.invalidate()
        self.quarantines.invalidate()

    async def refresh(self) -> None:
        """List both. Raises what the cluster does."""
        await self.nodes.refresh(self.cluster, ())
        await self.quarantines.refresh(self.cluster, ())

    def back_off(self, seconds: float) -> None:
        """The API server wants to be left alone for so long."""
        self.busy_until = max(self.busy_until, self.runtime.monotonic() + seconds)

    async def get_quarantine(self, name: str) -> KnownQuarantine | None:
        if not self.quarantines.listed.is_set():
            return await self.fetch_quarantine(name)
        return self.quarantines.get(("", name))

    async def get_node(self, name: str) -> KnownNode | None:
        if not self.nodes.listed.is_set():
            return await self.fetch_node(name)
        return self.nodes.get(("", name))

    async def fetch_quarantine(self, name: str) -> KnownQuarantine | None:
        body = await self.quarantines.ask(self.cluster, ("", name))
        return None if body is None else self.quarantines.get(("", name)) or _parse_quarantine(body)

    async def fetch_node(self, name: str) -> KnownNode | None:
        body = await self.nodes.ask(self.cluster, ("", name))
        return None if body is None else self.nodes.get(("", name)) or self._reduce_node(body)

    async def decide_next_step(self, known: KnownQuarantine, seen: KnownNode | None, pod: ProbePod | None) -> QuarantineStep:
        """Raises InputError where the NodeQuarantine cannot be read, and what the cluster raises."""
        quarantine = known.parsed
        around = await self._build_context(quarantine, None if seen is None else seen.node)
        return decide_quarantine_step(quarantine, None if seen is None else seen.node, pod, around, self.runtime.now())

    async def decide_approval(self, name: str) -> tuple[QuarantineStep, KnownQuarantine]:
        """What is to be done, by what all NodeQuarantines are like. An approval counts from here on, see `settled`.
        Raises Conflict where there is nothing to approve any more."""
        async with self._lock_fresh_quarantines():
            known, seen = self.quarantines.get(("", name)), await self.get_node(name)
            if known is None or known.quarantine is None or seen is None:
                raise Conflict(f"the NodeQuarantine or the node {name} has changed", delay=1)
            return self._decide_and_grant(known.quarantine, seen), known

    async def try_immediate_approval(self, quarantine: Quarantine, seen: KnownNode) -> bool:
        """Whether one that is about to be made is made as an approved one. It counts from here on, see `settled`."""
        if not quarantine.is_suspicion or find_witness(quarantine, seen.node) is None:
            return False
        await self._ensure_nodes_listed()
        if not QuarantineContext(self.rules, node_count=len(self.nodes)).is_breaker_disabled:
            return False  # most wait for a while, and have to be known meanwhile
        async with self._lock_fresh_quarantines():
            return isinstance(self._decide_and_grant(quarantine, seen), ApproveQuarantine)

    @asynccontextmanager
    async def _lock_fresh_quarantines(self) -> AsyncIterator[None]:
        """All NodeQuarantines as they were read just now, and as has been heard and written since. Who asks at the same
        time is judged one by one."""
        async with self._approval_lock:
            if self.runtime.monotonic() - self._read_at > APPROVAL_LIST_CACHE_SECONDS:
                began = self.runtime.monotonic()
                await self.quarantines.refresh(self.cluster, ())
                await self._ensure_nodes_listed()
                self._read_at = began
            if self.runtime.monotonic() - self._pause[0] > APPROVAL_PAUSE_CACHE_SECONDS:
                await self._check_pause()
            yield

    def _decide_and_grant(self, quarantine: Quarantine, seen: KnownNode) -> QuarantineStep:
        around = QuarantineContext(self.rules, self._usage, len(self.nodes), self._pause[1])
        step = decide_quarantine_step(quarantine, seen.node, None, around, self.runtime.now())
        if isinstance(step, ApproveQuarantine):
            self._usage.grant(quarantine.name)
        return step

    async def settle_approval(self, name: str, *, written: bool) -> None:
        """Whether an approval is written is known; where it is not sure, it is looked at."""
        known = self.quarantines.get(("", name)) if written else await self.fetch_quarantine(name)
        self._usage.settle(None if known is None else known.quarantine, name)

    async def get_pause_reason(self) -> str:
        """Why no node may be touched; "": one may. Where that cannot be read, none may."""
        async with self._pause_lock:  # hundreds that ask at once have one answer
            if self.runtime.monotonic() - self._pause[0] > PAUSE_CACHE_SECONDS:
                await self._check_pause()
        return self._pause[1]

    def has_new_condition(self, name: str, seen: KnownNode | None) -> bool:
        """The node has a condition that the platform vouches for, and that has not been told of before."""
        if seen is None or not seen.node.broken or seen.node.opted_out or not self.quarantines.listed.is_set():
            return False
        if self.runtime.now() >= self.get_broken_since(seen) + SUSPICION_TTL_SECONDS:
            return False
        return self._reported_conditions.get(name) != (seen.node.uid, seen.node.broken_since)

    def get_broken_since(self, seen: KnownNode) -> float:
        """A clock that is ahead makes nothing younger."""
        return min(seen.node.broken_since, self.runtime.now()) or self.runtime.now()

    def mark_condition_reported(self, name: str, seen: KnownNode) -> None:
        """Its condition has: whoever deletes the NodeQuarantine has ended it."""
        self._reported_conditions[name] = (seen.node.uid, seen.node.broken_since)

    def list_names(self) -> Iterator[str]:
        """Of all that something may have to be done about."""
        for known in self.quarantines:
            yield known.body["metadata"]["name"]
        for seen in self.nodes:
            name = seen.body["metadata"]["name"]
            if (seen.node.broken or seen.node.marked) and self.quarantines.get(("", name)) is None:
                yield name

    def publish_metrics(self) -> None:
        """All there are, to Prometheus."""
        found = {known.body["metadata"]["name"]: known.quarantine for known in self.quarantines}
        metrics.publish_quarantine_metrics({name: of.status if of else QuarantineStatus() for name, of in found.items()})

    @property
    def rules(self) -> QuarantineRules:
        settings = self.settings
        return QuarantineRules(
            acts=settings.mode is RemediationMode.ACT and settings.quarantine_mode is RemediationMode.ACT,
            max_nodes=settings.quarantine_max_nodes,
            max_share=settings.quarantine_max_share,
            breaker_nodes=settings.breaker_nodes,
            probe_timeout=settings.probe_timeout,
            release_probes=settings.release_probes,
            condition=settings.repair_condition,
        )

    async def _build_context(self, quarantine: Quarantine, node: TargetNode | None) -> QuarantineContext:
        """As far as the decision needs it: the pause only where this node may be touched now."""
        if not quarantine.is_suspicion:
            return QuarantineContext(self.rules)
        if not self.quarantines.listed.is_set():
            await self.quarantines.refresh(self.cluster, ())
        if node is None or find_witness(quarantine, node) is None:
            return QuarantineContext(self.rules, self._usage)
        await self._ensure_nodes_listed()
        return QuarantineContext(self.rules, self._usage, len(self.nodes), await self.get_pause_reason())

    async def _ensure_nodes_listed(self) -> None:
        if not self.nodes.listed.is_set():
            await self.nodes.refresh(self.cluster, ())

    async def _check_pause(self) -> None:
        settings, why = self.settings, ""
        if settings.paused:
            why = "remedies are paused by the operator's settings"
        else:
            try:
                if await self.cluster.find(CONFIG_MAPS, PAUSE_CONFIG_MAP, settings.namespace) is not None:
                    why = f"remedies are paused by ConfigMap {settings.namespace}/{PAUSE_CONFIG_MAP}"
            except (kopf.TemporaryError, kopf.PermanentError):
                why = f"whether ConfigMap {settings.namespace}/{PAUSE_CONFIG_MAP} pauses remedies cannot be read"
        self._pause = (self.runtime.monotonic(), why)

    def _reduce_node(self, body: Mapping[str, Any]) -> KnownNode:
        metadata = body["metadata"]
        kept = {key: metadata[key] for key in ("name", "uid", "resourceVersion") if key in metadata}
        return KnownNode(
            TargetNode.parse(body, self.settings.quarantine_node_health, self.settings.repair_condition),
            {"metadata": kept, "spec": {"taints": body.get("spec", {}).get("taints") or []}},
        )

    def _on_quarantine_changed(self, key: Key, _known: KnownQuarantine) -> None:
        name, now = key[1], self.quarantines.get(key)
        if now is None or now.quarantine is None:
            self._usage.remove(name)
        else:
            self._usage.update(now.quarantine)
        self._notify(name)

    def _on_node_changed(self, key: Key, seen: KnownNode) -> None:
        name = key[1]
        if not seen.node.broken:
            self._reported_conditions.pop(name, None)  # its next condition is another one, be it in the same second
        if seen.node.broken or seen.node.marked or self.quarantines.get(key) is not None:
            self._notify(name)

    def _notify(self, name: str) -> None:
        self.changed_nodes[name] = None
        self.priority_gate.set_changed(len(self.changed_nodes))
        self.change_event.set()


def _parse_quarantine(body: Mapping[str, Any]) -> KnownQuarantine:
    try:
        return KnownQuarantine(dict(body), Quarantine.parse(body))
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        return KnownQuarantine(dict(body), None, str(error))

"""All nodes and their NodeQuarantines, from watches and lists; approvals, one at a time.

Decisions are written by compare-and-swap. Outdated data therefore costs a retry, and never a node. Only an approval
depends on other NodeQuarantines as well: it reads all of them again.
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
from ..api.names import PAUSE_CONFIG_MAP
from ..api.node_quarantine import QuarantineStatus
from ..api.training_job import RemediationMode
from ..async_runtime import OperatorRuntime
from ..decide.nodes.node_quarantine import decide_quarantine_step
from ..decide.nodes.node_suspicion import SUSPICION_TTL_SECONDS, find_witness
from ..decide.nodes.quarantine_steps import (
    ApproveQuarantine,
    ProbePod,
    Quarantine,
    QuarantineRules,
    QuarantineStep,
    TargetNode,
)
from ..decide.nodes.quarantine_usage import QuarantineContext, QuarantineUsage
from ..kube.client import CONFIG_MAPS, NODE_OBJECTS, NODE_QUARANTINES, Cluster, Conflict, Object
from ..kube.store import Key, ResourceStore
from ..settings import Settings
from .shared.node_priority import NodePriorityGate

PAUSE_CACHE_SECONDS, APPROVAL_PAUSE_CACHE_SECONDS = 1.0, 0.5
"""Maximum age of the cached pause state, and for an approval."""

APPROVAL_LIST_CACHE_SECONDS = 2.0
"""Seconds that the list read for one approval serves others.

Only this operator and people blame or approve nodes, and the watch reports what people do. Without this cache, a
thousand nodes that fail at once would read the whole list a thousand times.
"""


@dataclass(frozen=True)
class KnownQuarantine:
    """A NodeQuarantine as read."""

    body: Object
    quarantine: Quarantine | None
    error: str = ""  # why it cannot be read

    @property
    def parsed(self) -> Quarantine:
        """Return the parsed NodeQuarantine. Raises InputError if it cannot be read."""
        if self.quarantine is None:
            raise InputError(self.error)
        return self.quarantine


@dataclass(frozen=True)
class KnownNode:
    """A node, reduced to what its quarantine needs: a complete node object has tens of kilobytes."""

    node: TargetNode
    body: Object = field(compare=False)
    """Its name, UID, resourceVersion and taints."""


class NodeRegistry:
    """The cache of nodes and NodeQuarantines. Until they are listed, each access reads from the API server."""

    def __init__(self, cluster: Cluster, runtime: OperatorRuntime, settings: Settings) -> None:
        self.cluster = cluster
        self.runtime = runtime
        self.settings = settings
        self.change_event = asyncio.Event()
        self.changed_nodes: dict[str, None] = {}
        """Names of nodes that changed, in order."""
        self.quarantines: ResourceStore[KnownQuarantine] = ResourceStore(
            NODE_QUARANTINES, _parse_quarantine, on_change=self._on_quarantine_changed, is_reduction_pure=True
        )
        self.nodes: ResourceStore[KnownNode] = ResourceStore(
            NODE_OBJECTS, self._reduce_node, on_change=self._on_node_changed, is_reduction_pure=True
        )
        self.probe_lock = asyncio.Lock()
        """Held while the probe of a suspicion is started."""
        self.busy_until = -math.inf
        """End of the pause that the API server requested, by the monotonic clock."""
        self.priority_gate = NodePriorityGate(runtime)
        self.failing_check = ""
        """The check that probe pods fail on nodes that are not suspected: see `services.probe_check`."""
        self._usage = QuarantineUsage()
        self._reported_conditions: dict[
            str, tuple[str, float | None]
        ] = {}  # node → (UID, since): its reported condition
        self._pause_reason = ""  # why no node may be touched; "": nodes may be
        self._pause_read_at: float | None = None  # by the monotonic clock
        self._pause_lock = asyncio.Lock()
        self._approval_lock = asyncio.Lock()
        self._read_at: float | None = None  # when the last list for an approval began, by the monotonic clock

    def invalidate(self) -> None:
        """Start to lead: cached data does not count until it is listed again."""
        self.nodes.invalidate()
        self.quarantines.invalidate()

    async def refresh(self) -> None:
        """List nodes and NodeQuarantines. Raises the errors of the cluster client."""
        await self.nodes.refresh(self.cluster, ())
        await self.quarantines.refresh(self.cluster, ())

    def back_off(self, seconds: float) -> None:
        """Start no reconciles for `seconds`, as the API server requested."""
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

    async def decide_next_step(
        self, known_quarantine: KnownQuarantine, known_node: KnownNode | None, pod: ProbePod | None
    ) -> QuarantineStep:
        """Decide the next step.

        Raises InputError if the NodeQuarantine cannot be read, and the errors of the cluster client.
        """
        quarantine = known_quarantine.parsed
        context = await self._build_context(quarantine, None if known_node is None else known_node.node)
        return decide_quarantine_step(
            quarantine, None if known_node is None else known_node.node, pod, context, self.runtime.now()
        )

    async def decide_approval(self, name: str) -> tuple[QuarantineStep, KnownQuarantine]:
        """Decide by the current list of all NodeQuarantines. An approval counts from here on; see `settle_approval`.

        Raises Conflict if there is nothing to approve any more.
        """
        async with self._lock_fresh_quarantines():
            known_quarantine, known_node = self.quarantines.get(("", name)), await self.get_node(name)
            if known_quarantine is None or known_quarantine.quarantine is None or known_node is None:
                raise Conflict(f"the NodeQuarantine or the node {name} has changed", delay=1)
            return self._decide_and_grant(known_quarantine.quarantine, known_node), known_quarantine

    async def try_immediate_approval(self, quarantine: Quarantine, known_node: KnownNode) -> bool:
        """Return whether a new NodeQuarantine is created as approved. It counts from here on; see `settle_approval`."""
        if not quarantine.is_suspicion or find_witness(quarantine, known_node.node) is None:
            return False
        await self._ensure_nodes_listed()
        if not QuarantineContext(self.rules, node_count=len(self.nodes) or None).is_breaker_disabled:
            return False  # most wait for a while, and must be recorded during that time
        async with self._lock_fresh_quarantines():
            return isinstance(self._decide_and_grant(quarantine, known_node), ApproveQuarantine)

    @asynccontextmanager
    async def _lock_fresh_quarantines(self) -> AsyncIterator[None]:
        """Hold the approval lock with a recent list of all NodeQuarantines, and later changes.

        Approvals are decided one by one.
        """
        async with self._approval_lock:
            began = self.runtime.monotonic()
            if self._read_at is None or began - self._read_at > APPROVAL_LIST_CACHE_SECONDS:
                await self.quarantines.refresh(self.cluster, ())
                await self._ensure_nodes_listed()
                self._read_at = began
            await self._refresh_pause(APPROVAL_PAUSE_CACHE_SECONDS)
            yield

    def _decide_and_grant(self, quarantine: Quarantine, known_node: KnownNode) -> QuarantineStep:
        context = QuarantineContext(self.rules, self._usage, len(self.nodes) or None, self._pause_reason)
        step = decide_quarantine_step(quarantine, known_node.node, None, context, self.runtime.now())
        if isinstance(step, ApproveQuarantine):
            self._usage.grant(quarantine.name)
        return step

    async def settle_approval(self, name: str, *, written: bool) -> None:
        """Record whether an approval was written; if that is uncertain, read the NodeQuarantine."""
        known_quarantine = self.quarantines.get(("", name)) if written else await self.fetch_quarantine(name)
        self._usage.settle(None if known_quarantine is None else known_quarantine.quarantine, name)

    async def get_pause_reason(self) -> str:
        """Return why no node may be touched. Empty: nodes may be. If the pause state cannot be read, none may."""
        async with self._pause_lock:  # hundreds of concurrent callers share one read
            await self._refresh_pause(PAUSE_CACHE_SECONDS)
        return self._pause_reason

    async def _refresh_pause(self, max_age: float) -> None:
        """Read the pause state again if the last reading is older than `max_age` seconds."""
        if self._pause_read_at is None or self.runtime.monotonic() - self._pause_read_at > max_age:
            await self._check_pause()

    def has_new_condition(self, name: str, known_node: KnownNode | None) -> bool:
        """Return whether the node has a condition that by the settings accuses it, and that is not reported yet."""
        if (
            known_node is None
            or not known_node.node.broken
            or known_node.node.opted_out
            or not self.quarantines.listed.is_set()
        ):
            return False
        if self.runtime.now() >= self.get_broken_since(known_node) + SUSPICION_TTL_SECONDS:
            return False
        return self._reported_conditions.get(name) != (known_node.node.uid, known_node.node.broken_since)

    def get_broken_since(self, known_node: KnownNode) -> float:
        """Return since when the node is broken, but not a time in the future: clocks may differ."""
        since, now = known_node.node.broken_since, self.runtime.now()
        return now if since is None else min(since, now)

    def mark_condition_reported(self, name: str, known_node: KnownNode) -> None:
        """Mark the condition as reported: a user who deletes the NodeQuarantine has ended it."""
        self._reported_conditions[name] = (known_node.node.uid, known_node.node.broken_since)

    def list_names(self) -> Iterator[str]:
        """Yield the names of all nodes that may need a step."""
        for known_quarantine in self.quarantines:
            yield known_quarantine.body["metadata"]["name"]
        for known_node in self.nodes:
            name = known_node.body["metadata"]["name"]
            if (known_node.node.broken or known_node.node.marked) and self.quarantines.get(("", name)) is None:
                yield name

    def publish_metrics(self) -> None:
        """Publish the metrics of all NodeQuarantines."""
        quarantines = {
            known_quarantine.body["metadata"]["name"]: known_quarantine.quarantine
            for known_quarantine in self.quarantines
        }
        metrics.publish_quarantine_metrics(
            {name: quarantine.status if quarantine else QuarantineStatus() for name, quarantine in quarantines.items()}
        )

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
        """Build the context as far as the decision needs it; the pause is read only if this node may be touched now."""
        if not quarantine.is_suspicion:
            return QuarantineContext(self.rules)
        if not self.quarantines.listed.is_set():
            await self.quarantines.refresh(self.cluster, ())
        if node is None or find_witness(quarantine, node) is None:
            return QuarantineContext(self.rules, self._usage)
        await self._ensure_nodes_listed()
        return QuarantineContext(self.rules, self._usage, len(self.nodes) or None, await self.get_pause_reason())

    async def _ensure_nodes_listed(self) -> None:
        if not self.nodes.listed.is_set():
            await self.nodes.refresh(self.cluster, ())

    async def _check_pause(self) -> None:
        settings, reason = self.settings, ""
        if settings.paused:
            reason = "remedies are paused by the operator's settings"
        else:
            try:
                if await self.cluster.find(CONFIG_MAPS, PAUSE_CONFIG_MAP, settings.namespace) is not None:
                    reason = f"remedies are paused by ConfigMap {settings.namespace}/{PAUSE_CONFIG_MAP}"
            except (kopf.TemporaryError, kopf.PermanentError):
                reason = f"whether ConfigMap {settings.namespace}/{PAUSE_CONFIG_MAP} pauses remedies cannot be read"
        self._pause_reason, self._pause_read_at = reason, self.runtime.monotonic()

    def _reduce_node(self, body: Mapping[str, Any]) -> KnownNode:
        metadata = body["metadata"]
        reduced = {key: metadata[key] for key in ("name", "uid", "resourceVersion") if key in metadata}
        return KnownNode(
            TargetNode.parse(body, self.settings.quarantine_node_health, self.settings.repair_condition),
            {"metadata": reduced, "spec": {"taints": body.get("spec", {}).get("taints") or []}},
        )

    def _on_quarantine_changed(self, key: Key, _known: KnownQuarantine) -> None:
        name, current = key[1], self.quarantines.get(key)
        if current is None or current.quarantine is None:
            self._usage.remove(name)
        else:
            self._usage.update(current.quarantine)
        self._notify(name)

    def _on_node_changed(self, key: Key, known_node: KnownNode) -> None:
        name = key[1]
        if not known_node.node.broken:
            self._reported_conditions.pop(name, None)  # its next condition is a new one, even within the same second
        if known_node.node.broken or known_node.node.marked or self.quarantines.get(key) is not None:
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

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
from ..api import PAUSE, Mode, QuarantineStatus
from ..cluster import CONFIG_MAPS, NODES, QUARANTINES, Cluster, Conflict, Object
from ..decide.node_census import Around, Census
from ..decide.node_quarantine import decide
from ..decide.node_steps import Approve, Node, ProbePod, Quarantine, QuarantineStep, Rules
from ..decide.node_suspicion import SUSPICION_SECONDS, witness_of
from ..observe.store import Key, Shelf
from ..runtime import Runtime
from ..settings import Settings
from .nodes_first import NodesFirst

PAUSE_SECONDS, APPROVAL_PAUSE_SECONDS = 1.0, 0.5
"""So old the word about the pause may be; and for an approval."""

FRESH_SECONDS = 2.0
"""So long what was read for an approval is good for others. Nobody but this operator blames or approves meanwhile,
except people, of whom the watch tells; a thousand nodes that fail at once would else have all read a thousand times."""


@dataclass(frozen=True)
class Known:
    """A NodeQuarantine."""

    body: Object
    quarantine: Quarantine | None
    trouble: str = ""  # why it cannot be read

    @property
    def legible(self) -> Quarantine:
        """Raises InputError where it cannot be read."""
        if self.quarantine is None:
            raise InputError(self.trouble)
        return self.quarantine


@dataclass(frozen=True)
class Seen:
    """A node, reduced to what its quarantine needs: a node's whole object is tens of kilobytes."""

    node: Node
    body: Object = field(compare=False)
    """Its name, UID, resourceVersion and taints."""


class Fleet:
    """What has not been listed yet is asked for each time."""

    def __init__(self, cluster: Cluster, runtime: Runtime, settings: Settings) -> None:
        self.cluster = cluster
        self.runtime = runtime
        self.settings = settings
        self.news = asyncio.Event()
        self.changed: dict[str, None] = {}
        """Names of nodes about which something is new, in that order."""
        self.quarantines: Shelf[Known] = Shelf(QUARANTINES, _known, changed=self._quarantine_changed, steady=True)
        self.nodes: Shelf[Seen] = Shelf(NODES, self._see, changed=self._node_changed, steady=True)
        self.probes = asyncio.Lock()
        """Held by whoever begins a probe of a suspicion."""
        self.busy_until = -math.inf
        """The API server has asked for so long a pause, by the monotonic clock."""
        self.first = NodesFirst(runtime)
        self.failing_check = ""
        """The check that probe pods fail on nodes that are not suspected: `services.probe_check`."""
        self._census = Census()
        self._raised: dict[str, tuple[str, float]] = {}  # node → UID, since when: its condition has been told of
        self._pause: tuple[float, str] = (-math.inf, "")
        self._pausing = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._read_at = -math.inf  # when the last reading for an approval began, by the monotonic clock

    def prove(self) -> None:
        """It decides from now on: what is known counts for nothing until it has been listed."""
        self.nodes.prove()
        self.quarantines.prove()

    async def read(self) -> None:
        """List both. Raises what the cluster does."""
        await self.nodes.read(self.cluster, ())
        await self.quarantines.read(self.cluster, ())

    def busy(self, seconds: float) -> None:
        """The API server wants to be left alone for so long."""
        self.busy_until = max(self.busy_until, self.runtime.monotonic() + seconds)

    async def quarantine(self, name: str) -> Known | None:
        if not self.quarantines.listed.is_set():
            return await self.quarantine_anew(name)
        return self.quarantines.get(("", name))

    async def node(self, name: str) -> Seen | None:
        if not self.nodes.listed.is_set():
            return await self.node_anew(name)
        return self.nodes.get(("", name))

    async def quarantine_anew(self, name: str) -> Known | None:
        body = await self.quarantines.ask(self.cluster, ("", name))
        return None if body is None else self.quarantines.get(("", name)) or _known(body)

    async def node_anew(self, name: str) -> Seen | None:
        body = await self.nodes.ask(self.cluster, ("", name))
        return None if body is None else self.nodes.get(("", name)) or self._see(body)

    async def next_step(self, known: Known, seen: Seen | None, pod: ProbePod | None) -> QuarantineStep:
        """Raises InputError where the NodeQuarantine cannot be read, and what the cluster raises."""
        quarantine = known.legible
        around = await self._around(quarantine, None if seen is None else seen.node)
        return decide(quarantine, None if seen is None else seen.node, pod, around, self.runtime.now())

    async def approval(self, name: str) -> tuple[QuarantineStep, Known]:
        """What is to be done, by what all NodeQuarantines are like. An approval counts from here on, see `settled`.
        Raises Conflict where there is nothing to approve any more."""
        async with self._all_read():
            known, seen = self.quarantines.get(("", name)), await self.node(name)
            if known is None or known.quarantine is None or seen is None:
                raise Conflict(f"the NodeQuarantine or the node {name} has changed", delay=1)
            return self._judged(known.quarantine, seen), known

    async def approved_at_once(self, quarantine: Quarantine, seen: Seen) -> bool:
        """Whether one that is about to be made is made as an approved one. It counts from here on, see `settled`."""
        if not quarantine.suspicion or witness_of(quarantine, seen.node) is None:
            return False
        await self._count_nodes()
        if not Around(self.rules, nodes=len(self.nodes)).unbroken:
            return False  # most wait for a while, and have to be known meanwhile
        async with self._all_read():
            return isinstance(self._judged(quarantine, seen), Approve)

    @asynccontextmanager
    async def _all_read(self) -> AsyncIterator[None]:
        """All NodeQuarantines as they were read just now, and as has been heard and written since. Who asks at the same
        time is judged one by one."""
        async with self._asking:
            if self.runtime.monotonic() - self._read_at > FRESH_SECONDS:
                began = self.runtime.monotonic()
                await self.quarantines.read(self.cluster, ())
                await self._count_nodes()
                self._read_at = began
            if self.runtime.monotonic() - self._pause[0] > APPROVAL_PAUSE_SECONDS:
                await self._look_whether_paused()
            yield

    def _judged(self, quarantine: Quarantine, seen: Seen) -> QuarantineStep:
        around = Around(self.rules, self._census, len(self.nodes), self._pause[1])
        step = decide(quarantine, seen.node, None, around, self.runtime.now())
        if isinstance(step, Approve):
            self._census.grant(quarantine.name)
        return step

    async def settled(self, name: str, *, written: bool) -> None:
        """Whether an approval is written is known; where it is not sure, it is looked at."""
        known = self.quarantines.get(("", name)) if written else await self.quarantine_anew(name)
        self._census.settle(None if known is None else known.quarantine, name)

    async def paused(self) -> str:
        """Why no node may be touched; "": one may. Where that cannot be read, none may."""
        async with self._pausing:  # hundreds that ask at once have one answer
            if self.runtime.monotonic() - self._pause[0] > PAUSE_SECONDS:
                await self._look_whether_paused()
        return self._pause[1]

    def broken(self, name: str, seen: Seen | None) -> bool:
        """The node has a condition that the platform vouches for, and that has not been told of before."""
        if seen is None or not seen.node.broken or seen.node.opted_out or not self.quarantines.listed.is_set():
            return False
        if self.runtime.now() >= self.broken_since(seen) + SUSPICION_SECONDS:
            return False
        return self._raised.get(name) != (seen.node.uid, seen.node.broken_since)

    def broken_since(self, seen: Seen) -> float:
        """A clock that is ahead makes nothing younger."""
        return min(seen.node.broken_since, self.runtime.now()) or self.runtime.now()

    def told(self, name: str, seen: Seen) -> None:
        """Its condition has: whoever deletes the NodeQuarantine has ended it."""
        self._raised[name] = (seen.node.uid, seen.node.broken_since)

    def names(self) -> Iterator[str]:
        """Of all that something may have to be done about."""
        for known in self.quarantines:
            yield known.body["metadata"]["name"]
        for seen in self.nodes:
            name = seen.body["metadata"]["name"]
            if (seen.node.broken or seen.node.marked) and self.quarantines.get(("", name)) is None:
                yield name

    def show(self) -> None:
        """All there are, to Prometheus."""
        found = {known.body["metadata"]["name"]: known.quarantine for known in self.quarantines}
        metrics.show_quarantines({name: of.status if of else QuarantineStatus() for name, of in found.items()})

    @property
    def rules(self) -> Rules:
        settings = self.settings
        return Rules(
            acts=settings.mode is Mode.ACT and settings.quarantine_mode is Mode.ACT,
            max_nodes=settings.quarantine_max_nodes,
            max_share=settings.quarantine_max_share,
            breaker_nodes=settings.breaker_nodes,
            probe_timeout=settings.probe_timeout,
            release_probes=settings.release_probes,
            condition=settings.repair_condition,
        )

    async def _around(self, quarantine: Quarantine, node: Node | None) -> Around:
        """As far as the decision needs it: the pause only where this node may be touched now."""
        if not quarantine.suspicion:
            return Around(self.rules)
        if not self.quarantines.listed.is_set():
            await self.quarantines.read(self.cluster, ())
        if node is None or witness_of(quarantine, node) is None:
            return Around(self.rules, self._census)
        await self._count_nodes()
        return Around(self.rules, self._census, len(self.nodes), await self.paused())

    async def _count_nodes(self) -> None:
        if not self.nodes.listed.is_set():
            await self.nodes.read(self.cluster, ())

    async def _look_whether_paused(self) -> None:
        settings, why = self.settings, ""
        if settings.paused:
            why = "remedies are paused by the operator's settings"
        else:
            try:
                if await self.cluster.find(CONFIG_MAPS, PAUSE, settings.namespace) is not None:
                    why = f"remedies are paused by ConfigMap {settings.namespace}/{PAUSE}"
            except (kopf.TemporaryError, kopf.PermanentError):
                why = f"whether ConfigMap {settings.namespace}/{PAUSE} pauses remedies cannot be read"
        self._pause = (self.runtime.monotonic(), why)

    def _see(self, body: Mapping[str, Any]) -> Seen:
        metadata = body["metadata"]
        kept = {key: metadata[key] for key in ("name", "uid", "resourceVersion") if key in metadata}
        return Seen(
            Node.parse(body, self.settings.broken_nodes, self.settings.repair_condition),
            {"metadata": kept, "spec": {"taints": body.get("spec", {}).get("taints") or []}},
        )

    def _quarantine_changed(self, key: Key, _known: Known) -> None:
        name, now = key[1], self.quarantines.get(key)
        if now is None or now.quarantine is None:
            self._census.remove(name)
        else:
            self._census.put(now.quarantine)
        self._tell(name)

    def _node_changed(self, key: Key, seen: Seen) -> None:
        name = key[1]
        if not seen.node.broken:
            self._raised.pop(name, None)  # its next condition is another one, be it in the same second
        if seen.node.broken or seen.node.marked or self.quarantines.get(key) is not None:
            self._tell(name)

    def _tell(self, name: str) -> None:
        self.changed[name] = None
        self.first.hear(len(self.changed))
        self.news.set()


def _known(body: Mapping[str, Any]) -> Known:
    try:
        return Known(dict(body), Quarantine.parse(body))
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        return Known(dict(body), None, str(error))

"""What all services of one running operator share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import kopf

from .. import metrics
from ..api import Job, Phase
from ..cluster import CONFIG_MAPS, Cluster, Object
from ..manifests import Installation
from ..observation import NOT_ASKED, Metrics, NodeView
from ..observe import gather
from ..observe.memory import Memory
from ..observe.pods import view_node
from ..observe.prometheus import Prometheus, Sample
from ..settings import Settings
from . import incidents

PAUSE = "pacekeeper-pause"
"""ConfigMap of the operator's namespace: while it exists, no remedy is applied. Its key `reason` says why."""
NODES_SECONDS = 30.0
FIRST_WORD_SECONDS = 60.0
"""Every cluster has a node that the watches tell of within this time."""
MISSED_EVENTS = 3
"""So many times in a row the list has shown changes of pods that no watch told: the watch is dead."""
RETENTION_SECONDS = 600.0
ACTIVE = frozenset({Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RECOVERING})
STALE_SECONDS = 30.0
"""Older words of Prometheus are no news; they are as old as that only where no job was active in between."""
log = logging.getLogger(__name__)


@dataclass
class Operator:
    """The running operator."""

    settings: Settings
    cluster: Cluster
    memory: Memory
    installation: Installation
    prometheus: Prometheus
    sample: Sample = field(default_factory=Sample)
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    nodes_at: float = 0.0
    paused: str = ""
    looked_at: float = 0.0  # when `watch_over` last came round
    watching: bool = False  # some watch has told something: each cluster has a node to tell of
    missed_events: int = 0  # changes of pods that lists have shown since a watch last told one

    async def known_nodes(self, *, fresh: bool = False) -> Mapping[str, NodeView]:
        """All nodes; at most half a minute old, or read now."""
        now = time.time()
        if fresh or now - self.nodes_at > NODES_SECONDS:
            self.nodes, self.nodes_at = await gather.nodes(self.cluster), now
        return self.nodes

    def figures(self, job: Job, now: float) -> Metrics:
        """What Prometheus has said of the job lately."""
        if now - self.sample.at > STALE_SECONDS:
            return Metrics(unavailable=NOT_ASKED)
        return self.sample.of(job.namespace, job.name)

    def node_changed(self, name: str, body: Object | None) -> None:
        """A watch's word of a node; None: it is gone. Jobs look anew where it changes what decisions need."""
        self.watching = True
        known = dict(self.nodes)
        before = known.pop(name, None)
        after = None if body is None else view_node(body)
        if after is not None:
            known[name] = after
        self.nodes = known
        if before != after:
            self.memory.wake_all()

    def blind(self, now: float) -> str:
        """Why no watch can be trusted; "": they live. Lists go on either way, but only at the slow tick."""
        if not self.watching and now - self.memory.started_at > FIRST_WORD_SECONDS:
            return f"no watch has told anything for {FIRST_WORD_SECONDS:.0f} s: kopf does not reach the API server"
        if self.missed_events >= MISSED_EVENTS:
            return f"the watch of pods is dead: {self.missed_events} changes were seen by lists only"
        return ""

    async def watch_over(self) -> None:
        """Ask Prometheus while some job trains, look whether remedies are paused, expire incidents: until cancelled."""
        expired_at = paused_at = 0.0
        while True:
            now = time.time()
            try:
                if now - paused_at > 2 * self.settings.sample_seconds:
                    await self._look_whether_paused()
                    paused_at = now
                await self._ask_prometheus(now)
                if now - expired_at > RETENTION_SECONDS:
                    await incidents.expire(self.cluster, now)
                    expired_at = now
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("looking around failed, and is tried again: %s", error)
            self.looked_at = now
            await asyncio.sleep(self.settings.sample_seconds)

    async def _look_whether_paused(self) -> None:
        found = await self.cluster.find(CONFIG_MAPS, PAUSE, self.settings.namespace)
        if self.settings.paused:
            paused = "remedies are paused by the operator's settings"
        elif found is not None:
            reason = (found.get("data") or {}).get("reason", "no reason given")
            paused = f"remedies are paused by ConfigMap {self.settings.namespace}/{PAUSE}: {reason}"
        else:
            paused = ""
        if paused != self.paused:
            self.paused = paused
            self.memory.wake_all()

    async def _ask_prometheus(self, now: float) -> None:
        if not any(job.phase in ACTIVE for _, job in self.memory):
            return
        self.sample = await self.prometheus.sample(now)
        metrics.PROMETHEUS_UP.set(not self.sample.unavailable)

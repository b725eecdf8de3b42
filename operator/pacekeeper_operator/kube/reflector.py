"""Reflector: one list and watch of a kind of objects, for all stores of that kind.

A watch begins where the last list ended, and continues from the last event when it ends. If the API server does not
keep events that far back, all objects are listed again. That also happens when the API server was restored from a
backup: a watch from the earlier resourceVersion would receive nothing until as many changes have happened again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import kopf

from ..async_runtime import Interrupted, OperatorRuntime
from ..limits import Backoff
from .client import Cluster, NotFound, ResourceVersionExpired
from .store import ResourceStore, refresh_namespace, refresh_stores

REWATCH_PAUSE_SECONDS = 0.1
"""Pause between the end of a watch and the next one, so that watches that end at once do not cause a busy loop."""
FIRST_WATCH_BACKOFF_SECONDS, LONGEST_WATCH_BACKOFF_SECONDS = 0.5, 15.0
log = logging.getLogger(__name__)


@dataclass
class Reflector:
    """The list and watch of these namespaces; empty: of all."""

    cluster: Cluster
    runtime: OperatorRuntime
    stores: Sequence[ResourceStore[Any]]
    namespaces: Sequence[str] = ()
    has_seen_restore: bool = False  # a list has shown that the API server was restored from a backup
    _versions: dict[str, int] = field(default_factory=dict)  # by namespace: known up to this resourceVersion
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)  # set when the open watches are no longer of use

    def __post_init__(self) -> None:
        for store in self.stores:
            store.on_restore = self._on_restore

    async def refresh(self) -> None:
        """Check the stores against a list.

        Raises what `Cluster.list_pages` does; the stores then keep what they know.
        """
        for namespace, version in (await refresh_stores(self.cluster, self.stores, self.namespaces)).items():
            # A running watch has to prove by its own events that it is alive.
            self._versions.setdefault(namespace, version)

    async def run(self) -> None:
        """Apply every change to the stores, until cancelled."""
        await asyncio.gather(*map(self._run_namespace, self.stores[0].kind.list_scopes(self.namespaces)))

    async def _run_namespace(self, namespace: str) -> None:
        backoff = Backoff(FIRST_WATCH_BACKOFF_SECONDS, LONGEST_WATCH_BACKOFF_SECONDS)
        while True:
            started_at = self.runtime.monotonic()
            try:
                await self.runtime.run_unless(self._interrupted.wait(), self._watch(namespace))
                backoff.record_success()
                await self.runtime.sleep(REWATCH_PAUSE_SECONDS)
                continue
            except (ResourceVersionExpired, Interrupted):
                self._versions.pop(namespace, None)
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING  # its CRD may be missing
                log.log(level, "cannot watch %s; retrying: %s", self.stores[0].kind.plural, error)
            if self.runtime.monotonic() - started_at > LONGEST_WATCH_BACKOFF_SECONDS:
                backoff.record_success()  # the watch worked for a while
            await self.runtime.sleep(backoff.record_failure() * (0.75 + 0.5 * self.runtime.random()))

    async def _watch(self, namespace: str) -> None:
        """Watch a namespace until the watch ends.

        Raises ResourceVersionExpired and other errors of the cluster.
        """
        kind, labels = self.stores[0].kind, self.stores[0].labels
        if namespace not in self._versions:
            await self._list(namespace)
        async with aclosing(self.cluster.watch(kind, self._versions[namespace], namespace, labels=labels)) as changes:
            async for change in changes:
                for store in self.stores:
                    store.apply_change(change)
                if namespace in self._versions:
                    self._versions[namespace] = max(change.version, self._versions[namespace])

    def _on_restore(self) -> None:
        self.has_seen_restore = True
        self._versions.clear()
        self._interrupted.set()
        self._interrupted = asyncio.Event()

    async def _list(self, namespace: str) -> None:
        """List what a new watch has missed."""
        self._versions[namespace] = await refresh_namespace(self.cluster, self.stores, namespace)
        for store in self.stores:
            store.missed_changes = 0

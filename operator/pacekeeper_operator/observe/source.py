"""One kind of objects, listed and watched once for all shelves that keep something of it.

A watch begins where the last list ended, and goes on from the last thing that it told when it ends; where the API
server does not know that far back any more, all is listed anew. So it is where the API server was restored from a
backup: a watch from what was known before would tell nothing until as much has happened again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import kopf

from ..cluster import Cluster, ResourceVersionExpired, NotFound
from ..limits import Backoff
from ..runtime import Interrupted, OperatorRuntime
from .store import ResourceStore, refresh_stores, refresh_namespace

REWATCH_PAUSE_SECONDS = 0.1
"""Between a watch's end and the next one: one that ends at once must not be asked for without end."""
FIRST_WATCH_BACKOFF_SECONDS, LONGEST_WATCH_BACKOFF_SECONDS = 0.5, 15.0
log = logging.getLogger(__name__)


@dataclass
class Reflector:
    """Of these namespaces; none: of all."""

    cluster: Cluster
    runtime: OperatorRuntime
    stores: Sequence[ResourceStore[Any]]
    namespaces: Sequence[str] = ()
    has_seen_restore: bool = False  # some list has shown that the API server was restored from a backup
    _versions: dict[str, int] = field(default_factory=dict)  # by namespace: up to which all is known
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)  # the watches that are open are of no use any more

    def __post_init__(self) -> None:
        for shelf in self.stores:
            shelf.on_restore = self._on_restore

    async def refresh(self) -> None:
        """Prove what is known by a list. Raises what `Cluster.pages` does, and then knows no less than before."""
        for place, version in (await refresh_stores(self.cluster, self.stores, self.namespaces)).items():
            self._versions.setdefault(place, version)  # a watch tells all by itself, or would not seem to live

    async def run(self) -> None:
        """Tell the shelves of every change, until cancelled."""
        await asyncio.gather(*map(self._run_namespace, self.stores[0].kind.list_scopes(self.namespaces)))

    async def _run_namespace(self, place: str) -> None:
        backoff = Backoff(FIRST_WATCH_BACKOFF_SECONDS, LONGEST_WATCH_BACKOFF_SECONDS)
        while True:
            began = self.runtime.monotonic()
            try:
                await self.runtime.run_unless(self._interrupted.wait(), self._watch(place))
                backoff.record_success()
                await self.runtime.sleep(REWATCH_PAUSE_SECONDS)
                continue
            except (ResourceVersionExpired, Interrupted):
                self._versions.pop(place, None)
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING  # definitions may be older
                log.log(level, "%s cannot be watched, which is tried again: %s", self.stores[0].kind.plural, error)
            if self.runtime.monotonic() - began > LONGEST_WATCH_BACKOFF_SECONDS:
                backoff.record_success()  # it has lived
            await self.runtime.sleep(backoff.record_failure() * (0.75 + 0.5 * self.runtime.random()))

    async def _watch(self, place: str) -> None:
        """Until the watch ends. Raises Gone, and what the cluster does."""
        kind, labels = self.stores[0].kind, self.stores[0].labels
        if place not in self._versions:
            await self._list(place)
        async with aclosing(self.cluster.watch(kind, self._versions[place], place, labels=labels)) as changes:
            async for change in changes:
                for shelf in self.stores:
                    shelf.apply_change(change)
                if place in self._versions:
                    self._versions[place] = max(change.version, self._versions[place])

    def _on_restore(self) -> None:
        self.has_seen_restore = True
        self._versions.clear()
        self._interrupted.set()
        self._interrupted = asyncio.Event()

    async def _list(self, place: str) -> None:
        """What a watch that begins anew has missed."""
        self._versions[place] = await refresh_namespace(self.cluster, self.stores, place)
        for shelf in self.stores:
            shelf.missed_changes = 0

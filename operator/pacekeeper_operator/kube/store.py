"""Store: a cache of the objects of one kind, like pods or nodes, updated by watches and checked by lists.

A watch may be late, end, or lose a deletion. A list may fail, or be older than an event of the watch. The higher
resourceVersion counts. Until a kind has been listed once, its store is unknown and no decision uses it.

An etcd that was restored from a backup continues from a lower resourceVersion. A list older than what was known when it
was requested shows that, and then replaces everything. So does one older object: with many writes, the resourceVersions
of lists soon pass the known ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .client import Cluster, Denied, ResourceKind, WatchEvent

View = TypeVar("View")
log = logging.getLogger(__name__)
Key = tuple[str, str]
"""Namespace ("" for cluster-scoped objects) and name of an object."""


@dataclass(frozen=True)
class Entry(Generic[View]):
    version: int
    view: View


@dataclass
class ResourceStore(Generic[View]):
    """All objects of one kind, each reduced to what decisions need."""

    kind: ResourceKind
    reduce: Callable[[Mapping[str, Any]], View]
    labels: str = ""
    group: Callable[[Key, View], object] = lambda key, _: key
    """Returns the group by which an object can be queried; by default each object is a group of its own."""
    on_change: Callable[[Key, View], None] = lambda *_: None
    """Called for every object that appeared, disappeared, or changed for decisions."""
    on_restore: Callable[[], None] = lambda: None
    """Called when a list has shown that the API server was restored from a backup."""
    is_reduction_pure: bool = False  # the view depends on the object alone: the same resourceVersion has the same view
    missed_changes: int = 0  # consecutive changes that lists have shown and no watch had reported
    has_watch_events: bool = False  # a watch has sent an event
    change_count: int = 0  # objects that have appeared, disappeared, or changed for decisions
    newest_version: int = 0  # highest resourceVersion of a watch or a list
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _entries: dict[Key, Entry[View]] = field(default_factory=dict)
    _groups: dict[object, set[Key]] = field(default_factory=dict)
    _ordered: dict[object, tuple[Key, ...]] = field(default_factory=dict)  # groups that were queried, sorted by name
    _deleted: dict[Key, int] = field(default_factory=dict)  # resourceVersion of deletions since the last list

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[View]:
        return iter([entry.view for entry in self._entries.values()])

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def items(self) -> Iterator[tuple[Key, View]]:
        return iter([(key, entry.view) for key, entry in self._entries.items()])

    def get(self, key: Key) -> View | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.view

    def get_group(self, group: object) -> tuple[View, ...]:
        """Return all views of a group, in the order of their names."""
        if group not in self._groups:
            return ()
        keys = self._ordered.get(group)
        if keys is None:
            keys = self._ordered[group] = tuple(sorted(self._groups[group]))
        return tuple(self._entries[key].view for key in keys)

    def apply_change(self, change: WatchEvent) -> None:
        """Apply an event of a watch. A bookmark counts as an event."""
        self.has_watch_events, self.missed_changes = True, 0
        self.newest_version = max(self.newest_version, change.version)
        if change.body is not None:
            self.apply_event(change.body, deleted=change.deleted)

    def apply_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Apply a watch's change of an object."""
        self.has_watch_events, self.missed_changes = True, 0
        if deleted:
            self._remove(get_object_key(body), get_resource_version(body))
        else:
            self._put(body)

    def update(self, body: Mapping[str, Any]) -> None:
        """Apply an answer of the API server, which may be ahead of the watch."""
        self._put(body)

    async def ask(self, cluster: Cluster, key: Key) -> Mapping[str, Any] | None:
        """Read an object from the API server and apply it; None if it does not exist.

        Raises what the cluster does.
        """
        cached = self._entries.get(key)
        body = await cluster.find(self.kind, key[1], key[0])
        if body is None:
            self.drop(key)
            return None
        if cached is not None and get_resource_version(body) < cached.version:
            self.notice_restore()
        self.update(body)
        return body

    def contradicts(self, body: Mapping[str, Any], newest_version: int) -> bool:
        """Return whether the store knew a later version of this listed object when the list was requested.

        `newest_version` is the resourceVersion that the store knew then.
        """
        cached = self._entries.get(get_object_key(body))
        return cached is not None and get_resource_version(body) < cached.version <= newest_version

    def drop(self, key: Key) -> None:
        """Remove an object that the API server reports as missing."""
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(key, entry.version)

    async def refresh(self, cluster: Cluster, namespaces: Sequence[str]) -> None:
        """Check the store against lists, as `refresh_stores` does."""
        await refresh_stores(cluster, (self,), namespaces)

    def mark_listed(self) -> None:
        """Record that a complete list has been applied."""
        self._deleted.clear()
        self.listed.set()

    def invalidate(self) -> None:
        """Distrust the store until the next list has been read."""
        self.listed.clear()
        self.missed_changes = 0

    def reset_versions(self) -> None:
        """Accept any resourceVersion as newer. The objects stay until lists have shown which ones exist."""
        self._entries = {key: Entry(0, entry.view) for key, entry in self._entries.items()}
        self._deleted.clear()
        self.newest_version = 0
        self.on_restore()

    def notice_restore(self) -> None:
        """Handle that a known resourceVersion is higher than the API server's own."""
        log.warning("%s were restored from a backup; listing all of them again", self.kind.plural)
        self.reset_versions()

    def update_page(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Apply a page of a list."""
        self._count_missed(sum(self._put(body) for body in bodies))

    def remove_missing(self, listed: Container[Key], version: int, namespace: str) -> None:
        """Remove the objects of a namespace ("": of all) that are not in `listed`, a list at `version`."""
        missing = [
            key
            for key, entry in self._entries.items()
            if key not in listed and entry.version <= version and namespace in ("", key[0])
        ]
        for key in missing:
            self._remove(key, version)
        self._count_missed(len(missing))

    def _count_missed(self, changes: int) -> None:
        if self.listed.is_set():
            self.missed_changes += changes

    def _put(self, body: Mapping[str, Any]) -> bool:
        """Return whether decisions see a change."""
        key, version = get_object_key(body), get_resource_version(body)
        previous = self._entries.get(key)
        if version < max(self._deleted.get(key, 0), previous.version if previous else 0):
            return False  # the list was taken before a newer event of a watch
        if self.is_reduction_pure and previous is not None and version == previous.version > 0:
            return False
        view = self.reduce(body)
        group = self.group(key, view)
        if previous is None or self.group(key, previous.view) != group:
            if previous is not None:
                self._remove_from_group(key, previous.view)
            self._groups.setdefault(group, set()).add(key)
            self._ordered.pop(group, None)
        self._entries[key] = Entry(version, view)
        if previous is not None and previous.view == view:
            return False
        self._notify(key, view)
        return True

    def _remove(self, key: Key, version: int) -> None:
        previous = self._entries.get(key)
        self._deleted[key] = max(version, self._deleted.get(key, 0))
        if previous is None or previous.version > version:
            return
        self._remove_from_group(key, previous.view)
        del self._entries[key]
        self._notify(key, previous.view)

    def _notify(self, key: Key, view: View) -> None:
        self.change_count += 1
        self.on_change(key, view)

    def _remove_from_group(self, key: Key, view: View) -> None:
        group = self.group(key, view)
        self._ordered.pop(group, None)
        self._groups[group].discard(key)
        if not self._groups[group]:
            del self._groups[group]


async def refresh_stores(
    cluster: Cluster, stores: Sequence[ResourceStore[Any]], namespaces: Sequence[str]
) -> dict[str, int]:
    """Check stores of one kind against lists of the namespaces (empty: of all), and return the resourceVersion of each.

    Raises what `Cluster.list_pages` does; the stores then keep what they know. A namespace that cannot be read, for
    example because it is being deleted, is skipped.
    """
    versions: dict[str, int] = {}
    for namespace in stores[0].kind.list_scopes(namespaces):
        try:
            versions[namespace] = await refresh_namespace(cluster, stores, namespace)
        except Denied as error:
            if not namespace:
                raise
            log.warning("%s of namespace %s cannot be listed: %s", stores[0].kind.plural, namespace, error)
    for store in stores:
        store.mark_listed()
    return versions


async def refresh_namespace(cluster: Cluster, stores: Sequence[ResourceStore[Any]], namespace: str) -> int:
    """Apply a list of a namespace ("": of all) to stores of one kind, and return its resourceVersion.

    It does not mark the stores as listed: other namespaces may be missing. Raises what `Cluster.list_pages` does.
    """
    listed: set[Key] = set()
    version, newest_versions = 0, [store.newest_version for store in stores]
    async with aclosing(cluster.list_pages(stores[0].kind, namespace, labels=stores[0].labels)) as pages:
        async for page in pages:
            listed.update(map(get_object_key, page.items))
            for store, newest_version in zip(stores, newest_versions, strict=True):
                older = not version and page.version < newest_version
                if older or any(store.contradicts(body, newest_version) for body in page.items):
                    store.notice_restore()
            version = page.version
            for store in stores:
                store.update_page(page.items)
    for store in stores:
        store.newest_version = max(store.newest_version, version)
        store.remove_missing(listed, version, namespace)
    return version


def get_object_key(body: Mapping[str, Any]) -> Key:
    return body["metadata"].get("namespace") or "", body["metadata"]["name"]


def get_resource_version(body: Mapping[str, Any]) -> int:
    """Return the resourceVersion as a number. Kubernetes guarantees that they compare as numbers.

    If it is not a number it is 0, so that the latest write counts.
    """
    text = body["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else 0

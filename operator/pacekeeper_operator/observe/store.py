"""What there is in the API server, as watches tell it and lists prove it: pods and nodes.

A watch may be late, end, or lose a deletion; a list may fail, or be older than what a watch has told since. Whichever
is newer counts, by resourceVersion. Until a kind has been listed once, nothing is known of it, and nobody decides.

An etcd that was restored from a backup counts from a lower resourceVersion on. A list that is older than what was known
when it was asked for shows that, and then counts for all. So does one object that is older: where much is written, the
versions of lists have soon passed those that were known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..cluster import WatchEvent, Cluster, Denied, ResourceKind

View = TypeVar("View")
log = logging.getLogger(__name__)
Key = tuple[str, str]
"""Namespace ("" for what belongs to none) and name of an object."""


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
    """What objects are asked for by; by default each stands alone."""
    on_change: Callable[[Key, View], None] = lambda *_: None
    """Called for every object that has appeared, gone, or become another to decisions."""
    on_restore: Callable[[], None] = lambda: None
    """Called when a list has shown that the API server was restored from a backup."""
    is_reduction_pure: bool = False  # what an object is reduced to hangs on the object alone: the same state is the same view
    missed_changes: int = 0  # changes in a row that lists have shown and no watch had told
    has_watch_events: bool = False  # some watch has told something
    change_count: int = 0  # so many objects have appeared, gone, or become others to decisions
    newest_version: int = 0  # resourceVersion up to which a watch or a list has told anything
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    _entries: dict[Key, Entry[View]] = field(default_factory=dict)
    _groups: dict[object, set[Key]] = field(default_factory=dict)
    _ordered: dict[object, tuple[Key, ...]] = field(default_factory=dict)  # groups that were asked for, by their names
    _deleted: dict[Key, int] = field(default_factory=dict)  # at which resourceVersion, since the last list

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
        """All of a group, in the order of their names."""
        if group not in self._groups:
            return ()
        keys = self._ordered.get(group)
        if keys is None:
            keys = self._ordered[group] = tuple(sorted(self._groups[group]))
        return tuple(self._entries[key].view for key in keys)

    def apply_change(self, change: WatchEvent) -> None:
        """A watch's word; that it has nothing new to tell is one, too."""
        self.has_watch_events, self.missed_changes = True, 0
        self.newest_version = max(self.newest_version, change.version)
        if change.body is not None:
            self.apply_event(change.body, deleted=change.deleted)

    def apply_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """What a watch tells of an object."""
        self.has_watch_events, self.missed_changes = True, 0
        if deleted:
            self._remove(get_object_key(body), get_resource_version(body))
        else:
            self._put(body)

    def update(self, body: Mapping[str, Any]) -> None:
        """The API server's own answer, which may be ahead of the watch."""
        self._put(body)

    async def ask(self, cluster: Cluster, key: Key) -> Mapping[str, Any] | None:
        """What the API server says of an object now; None: it is not there. Raises what the cluster does."""
        known = self._entries.get(key)
        body = await cluster.find(self.kind, key[1], key[0])
        if body is None:
            self.drop(key)
            return None
        if known is not None and get_resource_version(body) < known.version:
            self.notice_restore()
        self.update(body)
        return body

    def contradicts(self, body: Mapping[str, Any], newest: int) -> bool:
        """Whether this object of a list was known in a later version when the list was asked for, up to `newest`."""
        known = self._entries.get(get_object_key(body))
        return known is not None and get_resource_version(body) < known.version <= newest

    def drop(self, key: Key) -> None:
        """It was asked for, and is not there."""
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(key, entry.version)

    async def refresh(self, cluster: Cluster, namespaces: Sequence[str]) -> None:
        """See `read`."""
        await refresh_stores(cluster, (self,), namespaces)

    def mark_listed(self) -> None:
        """All that there are has been taken."""
        self._deleted.clear()
        self.listed.set()

    def invalidate(self) -> None:
        """What is known counts for nothing until the next list has been read."""
        self.listed.clear()
        self.missed_changes = 0

    def reset_versions(self) -> None:
        """Any version is newer than what is known, which stays until lists have shown what there is."""
        self._entries = {key: Entry(0, entry.view) for key, entry in self._entries.items()}
        self._deleted.clear()
        self.newest_version = 0
        self.on_restore()

    def notice_restore(self) -> None:
        """Something was known in a later version than the API server's own."""
        log.warning("%s have gone back to a backup: all is read anew", self.kind.plural)
        self.reset_versions()

    def update_page(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """A part of a list."""
        self._count_missed(sum(self._put(body) for body in bodies))

    def remove_missing(self, there: Container[Key], version: int, namespace: str) -> None:
        """These are all that there were of a namespace ("": of all) at that resourceVersion."""
        missing = [
            key
            for key, entry in self._entries.items()
            if key not in there and entry.version <= version and namespace in ("", key[0])
        ]
        for key in missing:
            self._remove(key, version)
        self._count_missed(len(missing))

    def _count_missed(self, changes: int) -> None:
        if self.listed.is_set():
            self.missed_changes += changes

    def _put(self, body: Mapping[str, Any]) -> bool:
        """Whether this is news to decisions."""
        key, version = get_object_key(body), get_resource_version(body)
        before = self._entries.get(key)
        if version < max(self._deleted.get(key, 0), before.version if before else 0):
            return False  # a list that was taken before a watch told better
        if self.is_reduction_pure and before is not None and version == before.version > 0:
            return False
        view = self.reduce(body)
        group = self.group(key, view)
        if before is None or self.group(key, before.view) != group:
            if before is not None:
                self._remove_from_group(key, before.view)
            self._groups.setdefault(group, set()).add(key)
            self._ordered.pop(group, None)
        self._entries[key] = Entry(version, view)
        if before is not None and before.view == view:
            return False
        self._notify(key, view)
        return True

    def _remove(self, key: Key, version: int) -> None:
        before = self._entries.get(key)
        self._deleted[key] = max(version, self._deleted.get(key, 0))
        if before is None or before.version > version:
            return
        self._remove_from_group(key, before.view)
        del self._entries[key]
        self._notify(key, before.view)

    def _notify(self, key: Key, view: View) -> None:
        self.change_count += 1
        self.on_change(key, view)

    def _remove_from_group(self, key: Key, view: View) -> None:
        group = self.group(key, view)
        self._ordered.pop(group, None)
        self._groups[group].discard(key)
        if not self._groups[group]:
            del self._groups[group]


async def refresh_stores(cluster: Cluster, stores: Sequence[ResourceStore[Any]], namespaces: Sequence[str]) -> dict[str, int]:
    """Prove what shelves of one kind know by lists, of the given namespaces (none: of all); as of which
    resourceVersion, by namespace.

    Raises what `Cluster.pages` does; they then know no less than before. A namespace that may not be read (it is being
    deleted, say) is passed over."""
    found: dict[str, int] = {}
    for place in stores[0].kind.list_scopes(namespaces):
        try:
            found[place] = await refresh_namespace(cluster, stores, place)
        except Denied as error:
            if not place:
                raise
            log.warning("%s of namespace %s cannot be listed: %s", stores[0].kind.plural, place, error)
    for shelf in stores:
        shelf.mark_listed()
    return found


async def refresh_namespace(cluster: Cluster, stores: Sequence[ResourceStore[Any]], namespace: str) -> int:
    """Tell shelves of one kind of all that there are of a namespace ("": of all); as of which resourceVersion. It
    proves nothing: not all places may have been listed. Raises what `Cluster.pages` does."""
    there: set[Key] = set()
    version, known = 0, [shelf.newest_version for shelf in stores]
    async with aclosing(cluster.list_pages(stores[0].kind, namespace, labels=stores[0].labels)) as pages:
        async for page in pages:
            there.update(map(get_object_key, page.items))
            for shelf, newest in zip(stores, known, strict=True):
                older = not version and page.version < newest
                if older or any(shelf.contradicts(body, newest) for body in page.items):
                    shelf.notice_restore()
            version = page.version
            for shelf in stores:
                shelf.update_page(page.items)
    for shelf in stores:
        shelf.newest_version = max(shelf.newest_version, version)
        shelf.remove_missing(there, version, namespace)
    return version


def get_object_key(body: Mapping[str, Any]) -> Key:
    return body["metadata"].get("namespace") or "", body["metadata"]["name"]


def get_resource_version(body: Mapping[str, Any]) -> int:
    """Kubernetes promises that they can be compared as numbers; where one is none, the last word counts."""
    text = body["metadata"].get("resourceVersion", "")
    return int(text) if text.isdecimal() else 0

"""A kind's objects as one watch tells of them, whatever becomes of that watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import kopf
import pytest

from pacekeeper_operator.kube.client import (
    NODE_OBJECTS,
    PODS,
    Denied,
    NotFound,
    ResourceKind,
    ResourceVersionExpired,
    WatchEvent,
)
from pacekeeper_operator.kube.reflector import Reflector
from pacekeeper_operator.kube.store import ResourceStore
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.virtual_time import Timeline, VirtualRuntime

END = object()


def thing(name: str, version: int, value: str = "", namespace: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)}, "value": value}


class Watched(FakeCluster):
    """Watches tell what is put into `coming`, by namespace: changes, errors, END; where they began is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[str, int]] = []
        self.coming: dict[str, asyncio.Queue[Any]] = {}

    def put(self, *changes: Any, namespace: str = "") -> None:
        for change in changes:
            self.coming.setdefault(namespace, asyncio.Queue()).put_nowait(change)

    async def watch(
        self, kind: ResourceKind, version: int, namespace: str = "", *, labels: str = ""
    ) -> AsyncGenerator[WatchEvent]:
        assert (kind.plural, labels) in {("nodes", ""), ("pods", "")}
        self.began.append((namespace, version))
        while True:
            change = await self.coming.setdefault(namespace, asyncio.Queue()).get()
            if change is END:
                return
            if isinstance(change, Exception):
                raise change
            yield change


class World:
    """A source of nodes for two shelves, on a clock of its own."""

    def __init__(self, kind: ResourceKind = NODE_OBJECTS, *namespaces: str) -> None:
        self.cluster = Watched()
        self.timeline = Timeline()
        self.shelves: list[ResourceStore[Any]] = [
            ResourceStore(kind, lambda body: str(body["value"])),
            ResourceStore(kind, lambda body: len(body["value"])),
        ]
        self.source = Reflector(self.cluster, VirtualRuntime(self.timeline), self.shelves, namespaces)

    def there_are(self, *things: dict[str, Any], version: int) -> None:
        kind = self.shelves[0].kind.plural
        self.cluster.objects = {(kind, t["metadata"]["namespace"], t["metadata"]["name"]): t for t in things}
        self.cluster.version = version

    async def follow(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.source.run())

    def seen(self, name: str, namespace: str = "") -> list[Any]:
        return [shelf.get((namespace, name)) for shelf in self.shelves]


def changed(name: str, version: int, value: str, *, deleted: bool = False, namespace: str = "") -> WatchEvent:
    return WatchEvent(thing(name, version, value, namespace), version, deleted)


async def test_all_shelves_hear_what_one_watch_tells() -> None:
    world = World()
    world.there_are(thing("a", 3, "x"), version=5)
    world.cluster.put(changed("a", 6, "xyz"), changed("b", 7, "y"), changed("a", 8, "xyz", deleted=True))
    following = await world.follow()
    await world.timeline.run(1)
    assert world.cluster.began == [("", 5)], "it begins where its list ended"
    assert world.seen("a") == [None, None]
    assert world.seen("b") == ["y", 1]
    following.cancel()


async def test_a_watch_that_ends_goes_on_from_the_last_word_be_it_that_there_is_nothing() -> None:
    world = World()
    world.there_are(version=5)
    world.cluster.put(changed("a", 6, "x"), WatchEvent(None, 40), END, changed("a", 41, "y"))
    following = await world.follow()
    await world.timeline.run(1)
    assert world.cluster.began == [("", 5), ("", 40)]
    assert world.seen("a") == ["y", 1]
    assert world.shelves[0].has_watch_events
    following.cancel()


async def test_where_the_past_is_forgotten_all_is_listed_anew_and_what_has_gone_is_noticed() -> None:
    world = World()
    world.there_are(thing("a", 3, "x"), version=5)
    world.cluster.put(ResourceVersionExpired("too old"))
    following = await world.follow()
    await world.timeline.run(0)
    assert world.seen("a") == ["x", 1]
    world.there_are(thing("b", 70, "y"), version=80)
    await world.timeline.run(5)
    assert world.cluster.began == [("", 5), ("", 80)]
    assert world.seen("a") == [None, None]
    assert world.seen("b") == ["y", 1]
    following.cancel()


@pytest.mark.parametrize("error", [kopf.TemporaryError("no answer"), NotFound("no such kind"), Denied("no")])
async def test_a_watch_that_fails_is_tried_again_ever_more_slowly(error: Exception) -> None:
    world = World()
    world.there_are(version=5)
    world.cluster.put(*[error] * 20, changed("a", 6, "x"))
    following = await world.follow()
    await world.timeline.run(60)
    assert 5 < len(world.cluster.began) < 15
    await world.timeline.run(600)
    assert world.seen("a") == ["x", 1]
    following.cancel()


async def test_a_list_that_fails_is_tried_again() -> None:
    world = World()
    world.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
    world.there_are(thing("a", 3, "x"), version=5)
    following = await world.follow()
    await world.timeline.run(5)
    assert world.seen("a") == ["x", 1]
    following.cancel()


async def test_a_watch_that_comes_back_tells_again_what_a_list_has_shown_meanwhile() -> None:
    world = World()
    world.there_are(version=5)
    following = await world.follow()
    await world.timeline.run(1)
    world.there_are(thing("a", 50, "x"), version=60)
    await world.source.refresh()
    assert all(shelf.listed.is_set() for shelf in world.shelves)
    assert world.shelves[0].missed_changes == 0, "the first list is none in between"
    world.there_are(thing("a", 70, "y"), version=80)
    await world.source.refresh()
    assert world.shelves[0].missed_changes == 1
    world.cluster.put(END, WatchEvent(None, 90))
    await world.timeline.run(1)
    assert world.cluster.began == [("", 5), ("", 5)]
    assert world.shelves[0].missed_changes == 0
    following.cancel()


async def test_a_namespace_is_followed_by_itself() -> None:
    world = World(PODS, "one", "two")
    world.there_are(thing("a", 3, "x", "one"), version=5)
    world.cluster.put(*[Denied("it is being deleted")] * 50, namespace="one")
    world.cluster.put(changed("b", 6, "y", namespace="two"), namespace="two")
    following = await world.follow()
    await world.timeline.run(5)
    assert world.seen("b", "two") == ["y", 1]
    assert world.seen("a", "one") == ["x", 1], "what another namespace's list does not show stays"
    following.cancel()


async def test_where_the_api_server_was_restored_from_a_backup_the_watch_begins_where_that_ends() -> None:
    world = World()
    world.there_are(thing("a", 90, "x"), version=100)
    following = await world.follow()
    await world.timeline.run(1)
    world.there_are(thing("a", 40, "old"), version=50)
    await world.source.refresh()
    assert world.source.has_seen_restore
    assert world.seen("a") == ["old", 3]
    await world.timeline.run(10)
    world.cluster.put(changed("a", 51, "news"))
    await world.timeline.run(1)
    assert world.cluster.began[0] == ("", 100)
    assert world.cluster.began[-1] == ("", 50)
    assert world.seen("a") == ["news", 4]
    following.cancel()


async def test_a_watch_that_is_ahead_of_the_api_server_is_listed_anew() -> None:
    world = World()
    world.there_are(thing("a", 90, "x"), version=100)
    world.cluster.put(ResourceVersionExpired("Too large resource version: 100, current: 50"))
    following = await world.follow()
    await world.timeline.run(0)
    world.there_are(thing("a", 40, "old"), version=50)
    await world.timeline.run(10)
    assert world.cluster.began[-1] == ("", 50)
    assert world.seen("a") == ["old", 3]
    assert world.source.has_seen_restore
    following.cancel()

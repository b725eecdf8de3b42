"""The objects of a kind as one watch reports them, despite failures of that watch."""

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


def build_object(name: str, version: int, value: str = "", namespace: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": str(version)}, "value": value}


class ScriptedCluster(FakeCluster):
    """Watches yield what is put into `events` by namespace: changes, errors, END. Their versions are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[str, int]] = []
        self.events: dict[str, asyncio.Queue[Any]] = {}

    def put(self, *changes: Any, namespace: str = "") -> None:
        for change in changes:
            self.events.setdefault(namespace, asyncio.Queue()).put_nowait(change)

    async def watch(
        self, kind: ResourceKind, version: int, namespace: str = "", *, labels: str = ""
    ) -> AsyncGenerator[WatchEvent]:
        assert (kind.plural, labels) in {("nodes", ""), ("pods", "")}
        self.began.append((namespace, version))
        while True:
            change = await self.events.setdefault(namespace, asyncio.Queue()).get()
            if change is END:
                return
            if isinstance(change, Exception):
                raise change
            yield change


class ReflectorBench:
    """A reflector of nodes for two stores, on its own clock."""

    def __init__(self, kind: ResourceKind = NODE_OBJECTS, *namespaces: str) -> None:
        self.cluster = ScriptedCluster()
        self.timeline = Timeline()
        self.stores: list[ResourceStore[Any]] = [
            ResourceStore(kind, lambda body: str(body["value"])),
            ResourceStore(kind, lambda body: len(body["value"])),
        ]
        self.source = Reflector(self.cluster, VirtualRuntime(self.timeline), self.stores, namespaces)

    def set_objects(self, *objects: dict[str, Any], version: int) -> None:
        kind = self.stores[0].kind.plural
        self.cluster.objects = {(kind, t["metadata"]["namespace"], t["metadata"]["name"]): t for t in objects}
        self.cluster.version = version

    async def follow(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.source.run())

    def list_values(self, name: str, namespace: str = "") -> list[Any]:
        return [store.get((namespace, name)) for store in self.stores]


def build_event(name: str, version: int, value: str, *, deleted: bool = False, namespace: str = "") -> WatchEvent:
    return WatchEvent(build_object(name, version, value, namespace), version, deleted)


async def test_all_stores_receive_the_events_of_one_watch() -> None:
    bench = ReflectorBench()
    bench.set_objects(build_object("a", 3, "x"), version=5)
    bench.cluster.put(build_event("a", 6, "xyz"), build_event("b", 7, "y"), build_event("a", 8, "xyz", deleted=True))
    following = await bench.follow()
    await bench.timeline.run(1)
    assert bench.cluster.began == [("", 5)], "it begins where its list ended"
    assert bench.list_values("a") == [None, None]
    assert bench.list_values("b") == ["y", 1]
    following.cancel()


async def test_a_watch_that_ends_resumes_from_the_last_event_or_bookmark() -> None:
    bench = ReflectorBench()
    bench.set_objects(version=5)
    bench.cluster.put(build_event("a", 6, "x"), WatchEvent(None, 40), END, build_event("a", 41, "y"))
    following = await bench.follow()
    await bench.timeline.run(1)
    assert bench.cluster.began == [("", 5), ("", 40)]
    assert bench.list_values("a") == ["y", 1]
    assert bench.stores[0].has_watch_events
    following.cancel()


async def test_an_expired_version_leads_to_a_new_list_that_shows_deletions() -> None:
    bench = ReflectorBench()
    bench.set_objects(build_object("a", 3, "x"), version=5)
    bench.cluster.put(ResourceVersionExpired("too old"))
    following = await bench.follow()
    await bench.timeline.run(0)
    assert bench.list_values("a") == ["x", 1]
    bench.set_objects(build_object("b", 70, "y"), version=80)
    await bench.timeline.run(5)
    assert bench.cluster.began == [("", 5), ("", 80)]
    assert bench.list_values("a") == [None, None]
    assert bench.list_values("b") == ["y", 1]
    following.cancel()


@pytest.mark.parametrize("error", [kopf.TemporaryError("no answer"), NotFound("no such kind"), Denied("no")])
async def test_a_failing_watch_is_retried_with_back_off(error: Exception) -> None:
    bench = ReflectorBench()
    bench.set_objects(version=5)
    bench.cluster.put(*[error] * 20, build_event("a", 6, "x"))
    following = await bench.follow()
    await bench.timeline.run(60)
    assert 5 < len(bench.cluster.began) < 15
    await bench.timeline.run(600)
    assert bench.list_values("a") == ["x", 1]
    following.cancel()


async def test_a_failing_list_is_retried() -> None:
    bench = ReflectorBench()
    bench.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
    bench.set_objects(build_object("a", 3, "x"), version=5)
    following = await bench.follow()
    await bench.timeline.run(5)
    assert bench.list_values("a") == ["x", 1]
    following.cancel()


async def test_a_watch_resumes_from_its_own_version_after_a_list() -> None:
    bench = ReflectorBench()
    bench.set_objects(version=5)
    following = await bench.follow()
    await bench.timeline.run(1)
    bench.set_objects(build_object("a", 50, "x"), version=60)
    await bench.source.refresh()
    assert all(store.listed.is_set() for store in bench.stores)
    assert bench.stores[0].missed_changes == 0, "the first list is none in between"
    bench.set_objects(build_object("a", 70, "y"), version=80)
    await bench.source.refresh()
    assert bench.stores[0].missed_changes == 1
    bench.cluster.put(END, WatchEvent(None, 90))
    await bench.timeline.run(1)
    assert bench.cluster.began == [("", 5), ("", 5)]
    assert bench.stores[0].missed_changes == 0
    following.cancel()


async def test_each_namespace_is_watched_separately() -> None:
    bench = ReflectorBench(PODS, "one", "two")
    bench.set_objects(build_object("a", 3, "x", "one"), version=5)
    bench.cluster.put(*[Denied("it is being deleted")] * 50, namespace="one")
    bench.cluster.put(build_event("b", 6, "y", namespace="two"), namespace="two")
    following = await bench.follow()
    await bench.timeline.run(5)
    assert bench.list_values("b", "two") == ["y", 1]
    assert bench.list_values("a", "one") == ["x", 1], "objects that the list of another namespace does not show stay"
    following.cancel()


async def test_after_a_restore_from_a_backup_the_watch_begins_at_its_version() -> None:
    bench = ReflectorBench()
    bench.set_objects(build_object("a", 90, "x"), version=100)
    following = await bench.follow()
    await bench.timeline.run(1)
    bench.set_objects(build_object("a", 40, "old"), version=50)
    await bench.source.refresh()
    assert bench.source.has_seen_restore
    assert bench.list_values("a") == ["old", 3]
    await bench.timeline.run(10)
    bench.cluster.put(build_event("a", 51, "news"))
    await bench.timeline.run(1)
    assert bench.cluster.began[0] == ("", 100)
    assert bench.cluster.began[-1] == ("", 50)
    assert bench.list_values("a") == ["news", 4]
    following.cancel()


async def test_a_watch_ahead_of_the_api_server_leads_to_a_new_list() -> None:
    bench = ReflectorBench()
    bench.set_objects(build_object("a", 90, "x"), version=100)
    bench.cluster.put(ResourceVersionExpired("Too large resource version: 100, current: 50"))
    following = await bench.follow()
    await bench.timeline.run(0)
    bench.set_objects(build_object("a", 40, "old"), version=50)
    await bench.timeline.run(10)
    assert bench.cluster.began[-1] == ("", 50)
    assert bench.list_values("a") == ["old", 3]
    assert bench.source.has_seen_restore
    following.cancel()

"""The objects known from watches that are late or dead, and from lists that fail or arrive late."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import kopf
import pytest

from pacekeeper_operator.kube.client import PODS, Denied, Listing, ResourceKind, WatchEvent
from pacekeeper_operator.kube.store import ResourceStore
from testing.kubernetes.fake_cluster import FakeCluster


def build_pod(name: str, version: int, node: str = "", namespace: str = "ns") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version), "labels": {"job": "j"}}
    return {"metadata": metadata, "spec": {"nodeName": node}}


class StoreBench:
    """A store of pods by their node, and the changes that it reported."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.changed_names: list[str] = []
        self.store: ResourceStore[str] = ResourceStore(
            PODS,
            lambda body: str(body["spec"]["nodeName"]),
            group=lambda key, _: key[0],
            on_change=lambda key, _: self.changed_names.append(key[1]),
        )

    async def set_pods(self, *pods: dict[str, Any], version: int) -> None:
        self.cluster.objects = {("pods", p["metadata"]["namespace"], p["metadata"]["name"]): p for p in pods}
        self.cluster.version = version

    async def read(self, *namespaces: str) -> None:
        await self.store.refresh(self.cluster, namespaces)


@pytest.fixture
def bench() -> StoreBench:
    return StoreBench()


async def test_nothing_is_known_before_the_first_list(bench: StoreBench) -> None:
    bench.cluster.failures["pods"] = [kopf.TemporaryError("429")]
    bench.store.apply_event(build_pod("a", 5), deleted=False)
    with pytest.raises(kopf.TemporaryError):
        await bench.read()
    assert not bench.store.listed.is_set()
    await bench.set_pods(build_pod("a", 5), build_pod("b", 6), version=7)
    await bench.read()
    assert bench.store.listed.is_set()
    assert len(bench.store.get_group("ns")) == 2


async def test_a_failing_list_removes_nothing(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5, "n"), version=7)
    await bench.read()
    bench.cluster.failures["pods"] = [kopf.TemporaryError("429")]
    with pytest.raises(kopf.TemporaryError):
        await bench.read()
    assert bench.store.get(("ns", "a")) == "n"


async def test_a_list_counts_changes_that_watches_missed(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5), build_pod("b", 6), version=7)
    await bench.read()
    assert bench.store.missed_changes == 0, "the first list proves nothing"
    await bench.set_pods(build_pod("b", 9, "n"), version=10)
    await bench.read()
    assert bench.store.get(("ns", "a")) is None
    assert bench.store.get(("ns", "b")) == "n"
    assert bench.store.missed_changes == 2
    bench.store.apply_event(build_pod("b", 11, "n"), deleted=False)
    assert bench.store.missed_changes == 0


async def test_a_list_older_than_a_watch_event_changes_nothing(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5, "old"), build_pod("gone", 6), version=7)
    await bench.read()
    bench.store.apply_event(build_pod("a", 20, "new"), deleted=False)
    bench.store.apply_event(build_pod("young", 21), deleted=False)
    bench.store.apply_event(build_pod("gone", 22), deleted=True)
    await bench.read()  # the answer has version 7
    assert bench.store.get(("ns", "a")) == "new"
    assert bench.store.get(("ns", "young")) is not None
    assert bench.store.get(("ns", "gone")) is None


async def test_a_watch_event_older_than_a_list_changes_nothing(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 9, "new"), version=10)
    await bench.read()
    bench.store.apply_event(build_pod("a", 5, "old"), deleted=False)
    assert bench.store.get(("ns", "a")) == "new"
    bench.store.apply_event(build_pod("a", 8), deleted=True)  # an earlier pod with the same name
    assert bench.store.get(("ns", "a")) == "new"


async def test_only_relevant_changes_are_reported(bench: StoreBench) -> None:
    for version in (1, 2, 3):
        bench.store.apply_event(build_pod("a", version, "n"), deleted=False)
    bench.store.apply_event(build_pod("a", 4, "m"), deleted=False)
    bench.store.apply_event(build_pod("a", 5, "m"), deleted=True)
    assert bench.changed_names == ["a", "a", "a"]


async def test_a_list_leaves_other_namespaces_unchanged(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5), build_pod("a", 6, namespace="other"), version=7)
    await bench.read()
    await bench.set_pods(version=9)
    await bench.read("ns")
    assert bench.store.get_group("ns") == ()
    assert len(bench.store.get_group("other")) == 1


async def test_a_list_without_changes_shows_that_watches_work(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5, "n"), version=7)
    await bench.read()
    bench.store.apply_event(build_pod("b", 8, "n"), deleted=False)
    bench.store.apply_event(build_pod("b", 9, "n"), deleted=True)
    await bench.set_pods(build_pod("a", 5, "n"), version=10)
    for _ in range(3):
        await bench.read()
    assert bench.store.missed_changes == 0
    await bench.set_pods(build_pod("a", 11, "n"), version=12)
    await bench.read()
    assert bench.store.missed_changes == 0, "the version differs, but nothing relevant to decisions"


async def test_a_list_older_than_a_deletion_restores_nothing(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5, "n"), version=7)
    await bench.read()
    bench.store.apply_event(build_pod("a", 9, "n"), deleted=True)
    await bench.read()
    assert (bench.store.get(("ns", "a")), bench.store.missed_changes) == (None, 0)


async def test_nothing_is_known_where_namespaces_may_not_be_read(bench: StoreBench) -> None:
    bench.cluster.failures["pods"] = [Denied("pods is forbidden")]
    with pytest.raises(Denied):
        await bench.read()
    assert not bench.store.listed.is_set()


async def test_a_deletion_of_the_known_version_is_applied(bench: StoreBench) -> None:
    await bench.set_pods(build_pod("a", 5, "n"), version=7)
    await bench.read()
    bench.store.apply_event(build_pod("a", 5, "n"), deleted=True)
    assert bench.store.get(("ns", "a")) is None


async def test_an_object_missing_in_a_list_of_its_version_is_deleted(bench: StoreBench) -> None:
    bench.store.apply_event(build_pod("a", 7, "n"), deleted=False)
    await bench.set_pods(version=7)
    await bench.read()
    assert bench.store.get(("ns", "a")) is None


class PagedCluster(FakeCluster):
    """Lists one object per page, and calls a function between two pages."""

    def __init__(self) -> None:
        super().__init__()
        self.change_between_pages: Callable[[], None] = lambda: None

    async def list_pages(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[Listing]:
        found = await self.list_with_version(kind, namespace, labels=labels, fields=fields)
        for number, body in enumerate(found.items):
            if number:
                self.change_between_pages()
            yield Listing([body], found.version)


class TestPages:
    @pytest.fixture
    async def bench(self) -> StoreBench:
        bench = StoreBench()
        bench.cluster = self.cluster = PagedCluster()
        await bench.set_pods(build_pod("a", 3), build_pod("b", 4), version=7)
        await bench.read()
        return bench

    async def test_an_object_in_no_page_is_deleted(self, bench: StoreBench) -> None:
        await bench.set_pods(build_pod("b", 4), build_pod("c", 8), version=9)
        await bench.read()
        assert {key[1] for key, _ in bench.store.items()} == {"b", "c"}
        assert bench.store.missed_changes == 2

    async def test_watch_events_between_two_pages_are_kept(self, bench: StoreBench) -> None:
        """The list shows its beginning. Then b is deleted and d created."""

        def change_between_pages() -> None:
            bench.store.apply_event(build_pod("b", 11), deleted=True)
            bench.store.apply_event(build_pod("d", 12, "n"), deleted=False)

        self.cluster.change_between_pages = change_between_pages
        await bench.read()
        assert {key[1] for key, _ in bench.store.items()} == {"a", "d"}

    async def test_a_failing_page_removes_nothing(self, bench: StoreBench) -> None:
        def change_between_pages() -> None:
            raise kopf.TemporaryError("the continue parameter is too old")

        self.cluster.change_between_pages = change_between_pages
        await bench.set_pods(build_pod("c", 8), build_pod("d", 8), version=9)
        with pytest.raises(kopf.TemporaryError):
            await bench.read()
        assert {key[1] for key, _ in bench.store.items()} == {"a", "b", "c"}


class TestRestored:
    """An etcd restored from a backup continues from a lower resourceVersion."""

    async def test_a_list_older_than_the_known_version_replaces_everything(self, bench: StoreBench) -> None:
        await bench.set_pods(build_pod("a", 90, "n"), build_pod("new", 95, "n"), version=100)
        await bench.read()
        bench.store.apply_event(build_pod("gone", 101), deleted=True)
        restores: list[str] = []
        bench.store.on_restore = lambda: restores.append("once")
        await bench.set_pods(build_pod("a", 40, "m"), build_pod("gone", 41, "n"), version=50)
        await bench.read()
        assert {key[1]: node for key, node in bench.store.items()} == {"a": "m", "gone": "n"}
        await bench.read()
        bench.store.apply_event(build_pod("a", 51, "o"), deleted=False)
        assert bench.store.get(("ns", "a")) == "o", "later changes count again"
        assert restores == ["once"]

    async def test_an_object_older_than_its_known_version_shows_a_restore(self, bench: StoreBench) -> None:
        await bench.set_pods(build_pod("a", 90, "n"), version=100)
        await bench.read()
        await bench.set_pods(build_pod("a", 40, "m"), version=120)
        restores: list[str] = []
        bench.store.on_restore = lambda: restores.append("once")
        await bench.read()
        assert (bench.store.get(("ns", "a")), restores) == ("m", ["once"])

    async def test_watch_events_during_a_list_show_no_restore(self) -> None:
        bench = StoreBench()
        bench.cluster = cluster = PagedCluster()
        await bench.set_pods(build_pod("a", 90, "n"), build_pod("b", 91, "n"), version=100)
        await bench.read()
        cluster.change_between_pages = lambda: bench.store.apply_change(WatchEvent(build_pod("b", 105, "later"), 105))
        bench.store.on_restore = lambda: pytest.fail("no restore has happened")
        await bench.read()
        assert bench.store.get(("ns", "b")) == "later"

    async def test_a_read_object_older_than_its_known_version_shows_a_restore(self, bench: StoreBench) -> None:
        await bench.set_pods(build_pod("a", 90, "n"), version=100)
        await bench.read()
        restores: list[str] = []
        bench.store.on_restore = lambda: restores.append("once")
        await bench.set_pods(build_pod("a", 40, "m"), version=120)
        assert await bench.store.ask(bench.cluster, ("ns", "a")) == build_pod("a", 40, "m")
        assert (bench.store.get(("ns", "a")), restores) == ("m", ["once"])
        await bench.set_pods(version=121)
        assert await bench.store.ask(bench.cluster, ("ns", "a")) is None
        assert ("ns", "a") not in bench.store

    async def test_known_objects_stay_until_a_list_is_complete(self) -> None:
        bench = StoreBench()
        bench.cluster = cluster = PagedCluster()
        await bench.set_pods(build_pod("a", 90, "n"), version=100)
        await bench.read()
        await bench.set_pods(build_pod("b", 40, "m"), build_pod("c", 41, "m"), version=50)

        def change_between_pages() -> None:
            raise kopf.TemporaryError("no answer")

        cluster.change_between_pages = change_between_pages
        with pytest.raises(kopf.TemporaryError):
            await bench.read()
        assert bench.store.get(("ns", "a")) == "n"
        cluster.change_between_pages = lambda: None
        await bench.read()
        assert {key[1] for key, _ in bench.store.items()} == {"b", "c"}

    async def test_a_watch_event_between_pages_does_not_remove_objects_of_the_list(self) -> None:
        bench = StoreBench()
        bench.cluster = cluster = PagedCluster()
        await bench.set_pods(build_pod("a", 3), build_pod("b", 4), version=7)
        await bench.read()

        def change_between_pages() -> None:
            bench.store.apply_change(WatchEvent(build_pod("d", 12, "n"), 12))

        cluster.change_between_pages = change_between_pages
        await bench.read()
        await bench.set_pods(build_pod("a", 3), build_pod("b", 4), build_pod("d", 12), version=12)
        cluster.change_between_pages = lambda: None
        await bench.read()
        assert len(bench.store) == 3

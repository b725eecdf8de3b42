"""What is known of the API server: by watches that are late or dead, and lists that fail or come late."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import kopf
import pytest

from pacekeeper_operator.kube.client import PODS, Denied, Listing, ResourceKind, WatchEvent
from pacekeeper_operator.kube.store import ResourceStore
from testing.kubernetes.fake_cluster import FakeCluster


def pod(name: str, version: int, node: str = "", namespace: str = "ns") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version), "labels": {"job": "j"}}
    return {"metadata": metadata, "spec": {"nodeName": node}}


class Known:
    """A shelf of pods by their node, and what it told."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.told: list[str] = []
        self.shelf: ResourceStore[str] = ResourceStore(
            PODS,
            lambda body: str(body["spec"]["nodeName"]),
            group=lambda key, _: key[0],
            on_change=lambda key, _: self.told.append(key[1]),
        )

    async def there_are(self, *pods: dict[str, Any], version: int) -> None:
        self.cluster.objects = {("pods", p["metadata"]["namespace"], p["metadata"]["name"]): p for p in pods}
        self.cluster.version = version

    async def read(self, *namespaces: str) -> None:
        await self.shelf.refresh(self.cluster, namespaces)


@pytest.fixture
def known() -> Known:
    return Known()


async def test_nothing_is_known_before_the_first_list(known: Known) -> None:
    known.cluster.failures["pods"] = [kopf.TemporaryError("429")]
    known.shelf.apply_event(pod("a", 5), deleted=False)
    with pytest.raises(kopf.TemporaryError):
        await known.read()
    assert not known.shelf.listed.is_set()
    await known.there_are(pod("a", 5), pod("b", 6), version=7)
    await known.read()
    assert known.shelf.listed.is_set()
    assert len(known.shelf.get_group("ns")) == 2


async def test_a_list_that_fails_takes_nothing_away(known: Known) -> None:
    await known.there_are(pod("a", 5, "n"), version=7)
    await known.read()
    known.cluster.failures["pods"] = [kopf.TemporaryError("429")]
    with pytest.raises(kopf.TemporaryError):
        await known.read()
    assert known.shelf.get(("ns", "a")) == "n"


async def test_a_list_shows_what_watches_have_missed_and_counts_it(known: Known) -> None:
    await known.there_are(pod("a", 5), pod("b", 6), version=7)
    await known.read()
    assert known.shelf.missed_changes == 0, "the first one is no proof of anything"
    await known.there_are(pod("b", 9, "n"), version=10)
    await known.read()
    assert known.shelf.get(("ns", "a")) is None
    assert known.shelf.get(("ns", "b")) == "n"
    assert known.shelf.missed_changes == 2
    known.shelf.apply_event(pod("b", 11, "n"), deleted=False)
    assert known.shelf.missed_changes == 0


async def test_a_list_from_before_what_a_watch_has_told_changes_nothing(known: Known) -> None:
    await known.there_are(pod("a", 5, "old"), pod("gone", 6), version=7)
    await known.read()
    known.shelf.apply_event(pod("a", 20, "new"), deleted=False)
    known.shelf.apply_event(pod("young", 21), deleted=False)
    known.shelf.apply_event(pod("gone", 22), deleted=True)
    await known.read()  # the answer was made at 7
    assert known.shelf.get(("ns", "a")) == "new"
    assert known.shelf.get(("ns", "young")) is not None
    assert known.shelf.get(("ns", "gone")) is None


async def test_a_watch_that_is_behind_a_list_changes_nothing(known: Known) -> None:
    await known.there_are(pod("a", 9, "new"), version=10)
    await known.read()
    known.shelf.apply_event(pod("a", 5, "old"), deleted=False)
    assert known.shelf.get(("ns", "a")) == "new"
    known.shelf.apply_event(pod("a", 8), deleted=True)  # of a pod that had the name before
    assert known.shelf.get(("ns", "a")) == "new"


async def test_only_what_is_news_to_decisions_is_told(known: Known) -> None:
    for version in (1, 2, 3):
        known.shelf.apply_event(pod("a", version, "n"), deleted=False)
    known.shelf.apply_event(pod("a", 4, "m"), deleted=False)
    known.shelf.apply_event(pod("a", 5, "m"), deleted=True)
    assert known.told == ["a", "a", "a"]


async def test_other_namespaces_than_those_that_are_listed_are_left_alone(known: Known) -> None:
    await known.there_are(pod("a", 5), pod("a", 6, namespace="other"), version=7)
    await known.read()
    await known.there_are(version=9)
    await known.read("ns")
    assert known.shelf.get_group("ns") == ()
    assert len(known.shelf.get_group("other")) == 1


async def test_a_list_that_shows_nothing_new_proves_that_watches_live(known: Known) -> None:
    await known.there_are(pod("a", 5, "n"), version=7)
    await known.read()
    known.shelf.apply_event(pod("b", 8, "n"), deleted=False)
    known.shelf.apply_event(pod("b", 9, "n"), deleted=True)
    await known.there_are(pod("a", 5, "n"), version=10)
    for _ in range(3):
        await known.read()
    assert known.shelf.missed_changes == 0
    await known.there_are(pod("a", 11, "n"), version=12)
    await known.read()
    assert known.shelf.missed_changes == 0, "it is another version, and the same to decisions"


async def test_a_list_from_before_a_deletion_brings_nothing_back_and_counts_nothing(known: Known) -> None:
    await known.there_are(pod("a", 5, "n"), version=7)
    await known.read()
    known.shelf.apply_event(pod("a", 9, "n"), deleted=True)
    await known.read()
    assert (known.shelf.get(("ns", "a")), known.shelf.missed_changes) == (None, 0)


async def test_where_all_namespaces_may_not_be_read_nothing_is_known(known: Known) -> None:
    known.cluster.failures["pods"] = [Denied("pods is forbidden")]
    with pytest.raises(Denied):
        await known.read()
    assert not known.shelf.listed.is_set()


async def test_a_deletion_of_the_very_version_that_is_known_is_believed(known: Known) -> None:
    await known.there_are(pod("a", 5, "n"), version=7)
    await known.read()
    known.shelf.apply_event(pod("a", 5, "n"), deleted=True)
    assert known.shelf.get(("ns", "a")) is None


async def test_an_object_as_old_as_the_list_that_does_not_show_it_is_gone(known: Known) -> None:
    known.shelf.apply_event(pod("a", 7, "n"), deleted=False)
    await known.there_are(version=7)
    await known.read()
    assert known.shelf.get(("ns", "a")) is None


class InPages(FakeCluster):
    """One object a page, and what happens between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] = lambda: None

    async def list_pages(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[Listing]:
        found = await self.list_with_version(kind, namespace, labels=labels, fields=fields)
        for number, body in enumerate(found.items):
            if number:
                self.between()
            yield Listing([body], found.version)


class TestPages:
    @pytest.fixture
    async def known(self) -> Known:
        known = Known()
        known.cluster = self.cluster = InPages()
        await known.there_are(pod("a", 3), pod("b", 4), version=7)
        await known.read()
        return known

    async def test_what_was_not_in_any_of_them_is_gone(self, known: Known) -> None:
        await known.there_are(pod("b", 4), pod("c", 8), version=9)
        await known.read()
        assert {key[1] for key, _ in known.shelf.items()} == {"b", "c"}
        assert known.shelf.missed_changes == 2

    async def test_what_a_watch_tells_between_two_of_them_counts(self, known: Known) -> None:
        """The list is as of its beginning: b is deleted and d made meanwhile."""

        def between() -> None:
            known.shelf.apply_event(pod("b", 11), deleted=True)
            known.shelf.apply_event(pod("d", 12, "n"), deleted=False)

        self.cluster.between = between
        await known.read()
        assert {key[1] for key, _ in known.shelf.items()} == {"a", "d"}

    async def test_where_the_next_one_fails_nothing_is_taken_away(self, known: Known) -> None:
        def between() -> None:
            raise kopf.TemporaryError("the continue parameter is too old")

        self.cluster.between = between
        await known.there_are(pod("c", 8), pod("d", 8), version=9)
        with pytest.raises(kopf.TemporaryError):
            await known.read()
        assert {key[1] for key, _ in known.shelf.items()} == {"a", "b", "c"}


class TestRestored:
    """An etcd that goes on from a backup counts from a lower resourceVersion on."""

    async def test_a_list_from_before_what_was_known_when_it_was_asked_for_counts_for_all(self, known: Known) -> None:
        await known.there_are(pod("a", 90, "n"), pod("new", 95, "n"), version=100)
        await known.read()
        known.shelf.apply_event(pod("gone", 101), deleted=True)
        back: list[str] = []
        known.shelf.on_restore = lambda: back.append("once")
        await known.there_are(pod("a", 40, "m"), pod("gone", 41, "n"), version=50)
        await known.read()
        assert {key[1]: node for key, node in known.shelf.items()} == {"a": "m", "gone": "n"}
        await known.read()
        known.shelf.apply_event(pod("a", 51, "o"), deleted=False)
        assert known.shelf.get(("ns", "a")) == "o", "what happens from now on counts again"
        assert back == ["once"]

    async def test_so_does_one_object_where_so_much_was_written_that_the_list_is_not_older(self, known: Known) -> None:
        await known.there_are(pod("a", 90, "n"), version=100)
        await known.read()
        await known.there_are(pod("a", 40, "m"), version=120)
        back: list[str] = []
        known.shelf.on_restore = lambda: back.append("once")
        await known.read()
        assert (known.shelf.get(("ns", "a")), back) == ("m", ["once"])

    async def test_what_a_watch_tells_while_a_list_is_under_way_shows_no_backup(self) -> None:
        known = Known()
        known.cluster = cluster = InPages()
        await known.there_are(pod("a", 90, "n"), pod("b", 91, "n"), version=100)
        await known.read()
        cluster.between = lambda: known.shelf.apply_change(WatchEvent(pod("b", 105, "later"), 105))
        known.shelf.on_restore = lambda: pytest.fail("nothing has gone back")
        await known.read()
        assert known.shelf.get(("ns", "b")) == "later"

    async def test_an_object_that_is_asked_for_and_is_older_than_it_was_known_counts(self, known: Known) -> None:
        await known.there_are(pod("a", 90, "n"), version=100)
        await known.read()
        back: list[str] = []
        known.shelf.on_restore = lambda: back.append("once")
        await known.there_are(pod("a", 40, "m"), version=120)
        assert await known.shelf.ask(known.cluster, ("ns", "a")) == pod("a", 40, "m")
        assert (known.shelf.get(("ns", "a")), back) == ("m", ["once"])
        await known.there_are(version=121)
        assert await known.shelf.ask(known.cluster, ("ns", "a")) is None
        assert ("ns", "a") not in known.shelf

    async def test_what_is_known_stays_until_a_list_has_come_to_its_end(self) -> None:
        known = Known()
        known.cluster = cluster = InPages()
        await known.there_are(pod("a", 90, "n"), version=100)
        await known.read()
        await known.there_are(pod("b", 40, "m"), pod("c", 41, "m"), version=50)

        def between() -> None:
            raise kopf.TemporaryError("no answer")

        cluster.between = between
        with pytest.raises(kopf.TemporaryError):
            await known.read()
        assert known.shelf.get(("ns", "a")) == "n"
        cluster.between = lambda: None
        await known.read()
        assert {key[1] for key, _ in known.shelf.items()} == {"b", "c"}

    async def test_a_watch_that_tells_something_while_a_list_is_under_way_does_not_show_it(self) -> None:
        known = Known()
        known.cluster = cluster = InPages()
        await known.there_are(pod("a", 3), pod("b", 4), version=7)
        await known.read()

        def between() -> None:
            known.shelf.apply_change(WatchEvent(pod("d", 12, "n"), 12))

        cluster.between = between
        await known.read()
        await known.there_are(pod("a", 3), pod("b", 4), pod("d", 12), version=12)
        cluster.between = lambda: None
        await known.read()
        assert len(known.shelf) == 3

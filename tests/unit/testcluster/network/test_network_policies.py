"""The process that follows the API server and keeps the nodes' tables, without either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testcluster import api, network_policies
from testcluster.firewall import PolicyWorld, build_ruleset
from testcluster.network_policies import NAMESPACES, PODS, POLICIES, Enforcer, ObjectCache
from testcluster.settings import list_nodes
from testcluster.shell import ClusterError

MEMBERS = list_nodes(2)
EMPTY = PolicyWorld((), (), ())
DENY = {"metadata": {"name": "deny", "namespace": "a"}, "spec": {"podSelector": {}}}
SERVER = {
    "metadata": {"name": "server", "namespace": "a"},
    "spec": {"nodeName": "node-1", "containers": []},
    "status": {"podIP": "10.244.1.2"},
}


class End(Exception):
    """Ends a loop that never ends by itself."""


class Server:
    """Answers one list and one watch after the other; then ends the test."""

    def __init__(self, *rounds: tuple[list[str], list[tuple[str, str]]] | None) -> None:
        self._rounds = list(rounds)
        self._events: list[tuple[str, str]] = []
        self.seen: list[str] = []

    def get(self, path: str) -> dict[str, Any]:
        if not self._rounds:
            raise End
        if (found := self._rounds.pop(0)) is None:
            raise api.ApiUnavailable(f"GET {path}: away")
        names, self._events = found
        return {"metadata": {"resourceVersion": "1"}, "items": [_named(name) for name in names]}

    def watch(self, path: str, version: str) -> Iterator[dict[str, Any]]:
        assert version == "1"
        for kind, name in self._events:
            if kind == "BREAK":
                raise api.ApiUnavailable(f"GET {path}: the connection broke")
            yield {"type": kind, "object": _named(name)}


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"uid": f"uid-{name}", "name": name}}


@pytest.fixture
def nft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """What is written, instead of the kernel: (node, rules). A node's namespace is a file."""
    written: list[tuple[str, str]] = []
    for node in MEMBERS:
        (tmp_path / node.namespace).touch()
    monkeypatch.setattr(network_policies, "_get_namespace_file", lambda node: tmp_path / node.namespace)
    monkeypatch.setattr(network_policies, "_run_nft", lambda node, *_, stdin: written.append((node.name, stdin)))
    return written


def followed(monkeypatch: pytest.MonkeyPatch, server: Server) -> tuple[ObjectCache, list[set[str]]]:
    """What was known after each change."""
    history: list[set[str]] = []

    class Remembers(ObjectCache):
        def _replace_objects(self, path: str, objects: dict[str, Any]) -> None:
            super()._replace_objects(path, objects)
            history.append({found["metadata"]["name"] for found in objects.values()})

    monkeypatch.setattr(api, "get_path", server.get)
    monkeypatch.setattr(api, "watch_path", server.watch)
    monkeypatch.setattr(network_policies, "_API_RETRY_SECONDS", 0)
    known = Remembers()
    with pytest.raises(End):
        known.follow_path(PODS)
    return known, history


def test_what_comes_and_goes_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [("ADDED", "two"), ("MODIFIED", "one"), ("DELETED", "one"), ("DELETED", "never seen")]
    known, history = followed(monkeypatch, Server((["one"], events)))
    assert history == [{"one"}, {"one", "two"}, {"one", "two"}, {"two"}, {"two"}]
    assert known.changed.is_set()


def test_what_vanished_while_the_api_server_was_away_is_gone_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, history = followed(monkeypatch, Server((["one", "two"], [("BREAK", "")]), None, None, (["two"], [])))
    assert history == [{"one", "two"}, {"two"}], "while it was away, what was known last held"


def test_nothing_is_enforced_before_all_has_been_read() -> None:
    known = ObjectCache({PODS: {}, NAMESPACES: {}})
    assert known.build_world() is None
    known.objects[POLICIES] = {"1": DENY}
    assert known.build_world() == PolicyWorld([], [], [DENY])


def test_only_a_table_that_changes_is_written(nft: list[tuple[str, str]]) -> None:
    enforcer = Enforcer()
    enforcer.enforce(MEMBERS, EMPTY)
    enforcer.enforce(MEMBERS, EMPTY)
    assert [node for node, _ in nft] == ["node-1", "node-2"]
    denied = PolicyWorld((SERVER,), (), (DENY,))
    enforcer.enforce(MEMBERS, denied)
    assert nft[2:] == [("node-1", build_ruleset("node-1", denied))]


def test_a_node_that_was_made_anew_gets_its_table_again(nft: list[tuple[str, str]], tmp_path: Path) -> None:
    enforcer = Enforcer()
    enforcer.enforce(MEMBERS, EMPTY)
    place = tmp_path / MEMBERS[0].namespace
    (tmp_path / "new").touch()  # next to the old one, or it could get the same inode
    (tmp_path / "new").rename(place)
    enforcer.enforce(MEMBERS, EMPTY)
    assert [node for node, _ in nft] == ["node-1", "node-2", "node-1"]


def test_a_node_that_fails_neither_keeps_the_others_from_theirs_nor_is_forgotten(
    nft: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MEMBERS[0].namespace).unlink()
    enforcer = Enforcer()
    enforcer.enforce(MEMBERS, EMPTY)
    assert [node for node, _ in nft] == ["node-2"]
    (tmp_path / MEMBERS[0].namespace).touch()
    with monkeypatch.context() as broken:
        broken.setattr(network_policies, "_run_nft", _fails)
        enforcer.enforce(MEMBERS, EMPTY)
    enforcer.enforce(MEMBERS, EMPTY)
    assert [node for node, _ in nft] == ["node-2", "node-1"]


def _fails(*_: object, **__: object) -> None:
    raise ClusterError("nft is not there")

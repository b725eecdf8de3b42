"""The test cluster's own rules in place of a network plug-in that enforces NetworkPolicies.

A process on the machine follows pods, namespaces and policies, and keeps one nftables table in each node's network
namespace. Pods of one node talk over its bridge: their packets come to the table because `network.ensure_node` has
bridges ask the IP tables. As with every plug-in, rules come a moment after the pods: a new pod is open, and unknown to
others' policies, until its address stands in its status.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testcluster import api
from testcluster.daemons import Daemon
from testcluster.firewall import TABLE, World, ruleset
from testcluster.settings import REPOSITORY, Node, nodes
from testcluster.shell import ClusterError, run, say, succeeds

PODS, NAMESPACES, POLICIES = "/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies"
_GATHER_SECONDS = 0.05  # changes come in bunches
_LOOK_SECONDS = 5.0  # whether a node has come back with an empty network namespace
_PAUSE_SECONDS = 0.5  # between two tries to reach the API server
_SOURCES = ("api.py", "firewall.py", "network_policies.py")


def ensure(count: int) -> None:
    """Policies are enforced on all of so many nodes when this returns."""
    found = daemon(count)
    found.ensure()
    found.wait_for(lambda: all(map(_has_table, nodes(count))), timeout=30, what="network policies on all nodes")


def daemon(count: int) -> Daemon:
    """Its sources are its configuration: a changed one restarts it."""
    sources = "".join((Path(__file__).parent / name).read_text() for name in _SOURCES)
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.network_policies", str(count))
    return Daemon("network-policies", command, configuration=sources)


@dataclass
class Known:
    """The API server's objects by path and UID. Each change puts a new dictionary in the old one's place."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def follow(self, path: str) -> None:
        """For ever. While the API server is away, what was known last holds."""
        while True:
            try:
                self._list_and_watch(path)
            except api.Unavailable as error:
                say(str(error))
                time.sleep(_PAUSE_SECONDS)

    def world(self) -> World | None:
        """None: not everything has been read yet, and half of it would keep out the wrong ones."""
        if len(self.objects) < len((PODS, NAMESPACES, POLICIES)):
            return None
        pods, namespaces, policies = (list(self.objects[path].values()) for path in (PODS, NAMESPACES, POLICIES))
        return World(pods, namespaces, policies)

    def _list_and_watch(self, path: str) -> None:
        listed = api.get(path)
        self._put(path, {found["metadata"]["uid"]: found for found in listed["items"]})
        for event in api.watch(path, listed["metadata"]["resourceVersion"]):
            found = event["object"]
            others = {uid: other for uid, other in self.objects[path].items() if uid != found["metadata"]["uid"]}
            self._put(path, others if event["type"] == "DELETED" else {**others, found["metadata"]["uid"]: found})

    def _put(self, path: str, objects: dict[str, Any]) -> None:
        self.objects[path] = objects
        self.changed.set()


@dataclass
class Enforcer:
    """Writes a node's table when it would be another one."""

    in_force: dict[tuple[Node, int], str] = field(default_factory=dict)

    def enforce(self, members: Sequence[Node], world: World) -> None:
        for node in members:
            try:
                self._enforce(node, ruleset(node.name, world))
            except (ClusterError, OSError) as error:
                say(f"{node.name}: {error}")  # it may be coming up or going down; the next look tries again

    def _enforce(self, node: Node, rules: str) -> None:
        place = (node, _place(node).stat().st_ino)  # a namespace that was made anew is empty
        if self.in_force.get(place) != rules:
            _nft(node, "-f", "-", stdin=rules)
            self.in_force[place] = rules


def main(count: int) -> None:
    threading.excepthook = _end_with
    known, enforcer = Known(), Enforcer()
    for path in (PODS, NAMESPACES, POLICIES):
        threading.Thread(target=known.follow, args=[path], daemon=True).start()
    while True:
        known.changed.wait(_LOOK_SECONDS)
        time.sleep(_GATHER_SECONDS)
        known.changed.clear()
        if world := known.world():
            enforcer.enforce(nodes(count), world)


def _end_with(error: threading.ExceptHookArgs) -> None:
    """A thread that dies takes the process with it: `status` then says DEAD, and `up` starts it again."""
    traceback.print_exception(error.exc_value)
    os._exit(1)


def _place(node: Node) -> Path:
    return Path("/run/netns", node.namespace)


def _nft(node: Node, *arguments: str, stdin: str | None = None) -> str:
    return run("nsenter", f"--net={_place(node)}", "nft", *arguments, stdin=stdin)


def _has_table(node: Node) -> bool:
    return succeeds("nsenter", f"--net={_place(node)}", "nft", "list", "table", "ip", TABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]))

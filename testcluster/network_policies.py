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
from testcluster.firewall import TABLE, PolicyWorld, build_ruleset
from testcluster.settings import REPOSITORY, ClusterNode, list_nodes
from testcluster.shell import ClusterError, run_command, log_progress, is_successful

PODS, NAMESPACES, POLICIES = "/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies"
_CHANGE_COALESCE_SECONDS = 0.05  # changes come in bunches
_TABLE_CHECK_INTERVAL_SECONDS = 5.0  # whether a node has come back with an empty network namespace
_API_RETRY_SECONDS = 0.5  # between two tries to reach the API server
_SOURCE_FILES = ("api.py", "firewall.py", "network_policies.py")


def ensure_enforcement(count: int) -> None:
    """Policies are enforced on all of so many nodes when this returns."""
    found = build_daemon(count)
    found.ensure_running()
    found.wait_for(lambda: all(map(_has_table, list_nodes(count))), timeout=30, what="network policies on all nodes")


def build_daemon(count: int) -> Daemon:
    """Its sources are its configuration: a changed one restarts it."""
    sources = "".join((Path(__file__).parent / name).read_text() for name in _SOURCE_FILES)
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.network_policies", str(count))
    return Daemon("network-policies", command, configuration=sources)


@dataclass
class ObjectCache:
    """The API server's objects by path and UID. Each change puts a new dictionary in the old one's place."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def follow_path(self, path: str) -> None:
        """For ever. While the API server is away, what was known last holds."""
        while True:
            try:
                self._list_and_watch(path)
            except api.ApiUnavailable as error:
                log_progress(str(error))
                time.sleep(_API_RETRY_SECONDS)

    def build_world(self) -> PolicyWorld | None:
        """None: not everything has been read yet, and half of it would keep out the wrong ones."""
        if len(self.objects) < len((PODS, NAMESPACES, POLICIES)):
            return None
        pods, namespaces, policies = (list(self.objects[path].values()) for path in (PODS, NAMESPACES, POLICIES))
        return PolicyWorld(pods, namespaces, policies)

    def _list_and_watch(self, path: str) -> None:
        listed = api.get_path(path)
        self._replace_objects(path, {found["metadata"]["uid"]: found for found in listed["items"]})
        for event in api.watch_path(path, listed["metadata"]["resourceVersion"]):
            found = event["object"]
            others = {uid: other for uid, other in self.objects[path].items() if uid != found["metadata"]["uid"]}
            self._replace_objects(path, others if event["type"] == "DELETED" else {**others, found["metadata"]["uid"]: found})

    def _replace_objects(self, path: str, objects: dict[str, Any]) -> None:
        self.objects[path] = objects
        self.changed.set()


@dataclass
class Enforcer:
    """Writes a node's table when it would be another one."""

    in_force: dict[tuple[ClusterNode, int], str] = field(default_factory=dict)

    def enforce(self, members: Sequence[ClusterNode], world: PolicyWorld) -> None:
        for node in members:
            try:
                self._enforce(node, build_ruleset(node.name, world))
            except (ClusterError, OSError) as error:
                log_progress(f"{node.name}: {error}")  # it may be coming up or going down; the next look tries again

    def _enforce(self, node: ClusterNode, rules: str) -> None:
        place = (node, _get_namespace_file(node).stat().st_ino)  # a namespace that was made anew is empty
        if self.in_force.get(place) != rules:
            _run_nft(node, "-f", "-", stdin=rules)
            self.in_force[place] = rules


def main(count: int) -> None:
    threading.excepthook = _exit_on_error
    known, enforcer = ObjectCache(), Enforcer()
    for path in (PODS, NAMESPACES, POLICIES):
        threading.Thread(target=known.follow_path, args=[path], daemon=True).start()
    while True:
        known.changed.wait(_TABLE_CHECK_INTERVAL_SECONDS)
        time.sleep(_CHANGE_COALESCE_SECONDS)
        known.changed.clear()
        if world := known.build_world():
            enforcer.enforce(list_nodes(count), world)


def _exit_on_error(error: threading.ExceptHookArgs) -> None:
    """A thread that dies takes the process with it: `status` then says DEAD, and `up` starts it again."""
    traceback.print_exception(error.exc_value)
    os._exit(1)


def _get_namespace_file(node: ClusterNode) -> Path:
    return Path("/run/netns", node.namespace)


def _run_nft(node: ClusterNode, *arguments: str, stdin: str | None = None) -> str:
    return run_command("nsenter", f"--net={_get_namespace_file(node)}", "nft", *arguments, stdin=stdin)


def _has_table(node: ClusterNode) -> bool:
    return is_successful("nsenter", f"--net={_get_namespace_file(node)}", "nft", "list", "table", "ip", TABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]))

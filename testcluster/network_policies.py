"""Enforcement of NetworkPolicies in the test cluster, which has no network plugin that does it.

A process on the machine watches pods, namespaces, and policies. It maintains one nftables table in each node's network
namespace. Pods of one node communicate over its bridge. Their packets reach the table because `network.ensure_node`
makes bridges call the IP tables. As with every plugin, rules follow pods with a delay: a new pod is open, and unknown
to others' policies, until its address is in its status.
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
from testcluster.shell import ClusterError, is_successful, log_progress, run_command

PODS, NAMESPACES, POLICIES = "/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies"
_CHANGE_COALESCE_SECONDS = 0.05  # changes arrive in bursts
_TABLE_CHECK_INTERVAL_SECONDS = 5.0  # between checks for nodes that have returned with an empty network namespace
_API_RETRY_SECONDS = 0.5  # between two attempts to reach the API server
_SOURCE_FILES = ("api.py", "firewall.py", "network_policies.py")


def ensure_enforcement(count: int) -> None:
    """Ensure that policies are enforced on all of this number of nodes."""
    daemon = build_daemon(count)
    daemon.ensure_running()
    daemon.wait_for(lambda: all(map(_has_table, list_nodes(count))), timeout=30, what="network policies on all nodes")


def build_daemon(count: int) -> Daemon:
    """Build the daemon. Its source files count as configuration: a change restarts it."""
    sources = "".join((Path(__file__).parent / name).read_text() for name in _SOURCE_FILES)
    command = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "testcluster.network_policies", str(count))
    return Daemon("network-policies", command, configuration=sources)


@dataclass
class ObjectCache:
    """The API server's objects by path and UID. Each change replaces a dictionary by a new one."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def follow_path(self, path: str) -> None:
        """Follow a path indefinitely. While the API server is unavailable, the last state stays."""
        while True:
            try:
                self._list_and_watch(path)
            except api.ApiUnavailable as error:
                log_progress(str(error))
                time.sleep(_API_RETRY_SECONDS)

    def build_world(self) -> PolicyWorld | None:
        """Return the objects; None where some kinds are not listed yet.

        Rules from an incomplete state would be wrong.
        """
        if len(self.objects) < len((PODS, NAMESPACES, POLICIES)):
            return None
        pods, namespaces, policies = (list(self.objects[path].values()) for path in (PODS, NAMESPACES, POLICIES))
        return PolicyWorld(pods, namespaces, policies)

    def _list_and_watch(self, path: str) -> None:
        listed = api.get_path(path)
        self._replace_objects(path, {body["metadata"]["uid"]: body for body in listed["items"]})
        for event in api.watch_path(path, listed["metadata"]["resourceVersion"]):
            body = event["object"]
            remaining = {uid: cached for uid, cached in self.objects[path].items() if uid != body["metadata"]["uid"]}
            self._replace_objects(
                path, remaining if event["type"] == "DELETED" else {**remaining, body["metadata"]["uid"]: body}
            )

    def _replace_objects(self, path: str, objects: dict[str, Any]) -> None:
        self.objects[path] = objects
        self.changed.set()


@dataclass
class Enforcer:
    """Writes a node's table when it changes."""

    in_force: dict[tuple[ClusterNode, int], str] = field(default_factory=dict)

    def enforce(self, members: Sequence[ClusterNode], world: PolicyWorld) -> None:
        for node in members:
            try:
                self._enforce(node, build_ruleset(node.name, world))
            except (ClusterError, OSError) as error:
                log_progress(f"{node.name}: {error}")  # the node may be starting or ending; the next check retries

    def _enforce(self, node: ClusterNode, rules: str) -> None:
        key = (node, _get_namespace_file(node).stat().st_ino)  # a recreated namespace is empty
        if self.in_force.get(key) != rules:
            _run_nft(node, "-f", "-", stdin=rules)
            self.in_force[key] = rules


def main(count: int) -> None:
    threading.excepthook = _exit_on_error
    cache, enforcer = ObjectCache(), Enforcer()
    for path in (PODS, NAMESPACES, POLICIES):
        threading.Thread(target=cache.follow_path, args=[path], daemon=True).start()
    while True:
        cache.changed.wait(_TABLE_CHECK_INTERVAL_SECONDS)
        time.sleep(_CHANGE_COALESCE_SECONDS)
        cache.changed.clear()
        if world := cache.build_world():
            enforcer.enforce(list_nodes(count), world)


def _exit_on_error(error: threading.ExceptHookArgs) -> None:
    """Exit when a thread dies: `status` then shows DEAD, and `up` restarts the process."""
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

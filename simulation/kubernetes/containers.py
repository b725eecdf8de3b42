"""Containers of a pod, as its kubelet handles them. Those of jobs' workers are in `simulation.workers`."""

from __future__ import annotations

import json

from pacekeeper_operator.node_probe import NETWORK

from ..network import API_PLACE
from ..ports import KILLED_EXIT_CODE, ExitCallback, SharedWorld
from .machine import Machine

_PROBE_RUN_SECONDS = (0.3, 3.0)
_PROBE_TIMEOUT_SECONDS = 20.0
"""Seconds, as in `pacekeeper_operator.node_probe`."""
_PROBE_METRICS_JSON = '{"core_seconds":0.002,"memory_bytes_per_second":30000000000}'
"""Metrics of every node. A slow node is slow only in its ranks."""
SHARED = "as on every node"
"""Part of the message of a probe pod that fails a check that all nodes fail."""


class ProbeContainers:
    """The pod of a node probe. It succeeds if the node is usable."""

    def __init__(self, world: SharedWorld, node: Machine, exited: ExitCallback) -> None:
        self._world = world
        self._node = node
        self._exited = exited
        self._random = world.create_random(f"probe on {node.name} at {world.now()}")
        self._ended = False

    def start(self) -> None:
        self._world.call_after(self._random.uniform(*_PROBE_RUN_SECONDS), self._check_node)

    def _check_node(self) -> None:
        if self._ended or self._node.stuck_since is not None:
            return
        if not self._world.network.can_reach(self._node.name, API_PLACE):
            message = "the API server's service cannot be reached: timed out"
            self._world.call_after(_PROBE_TIMEOUT_SECONDS, self._finish, 1, "Error", message)
        elif self._node.fault_message:
            self._finish(1, "Error", self._node.fault_message)
        elif check := self._node.shared_check:
            message = json.dumps({"unfit": f"{check}: timed out, {SHARED}", "check": check, "gpus": 0})
            self._world.call_after(
                _PROBE_TIMEOUT_SECONDS if check == NETWORK else 0.0, self._finish, 1, "Error", message
            )
        else:
            self._finish(0, "Completed", _PROBE_METRICS_JSON)

    def _finish(self, code: int, reason: str, message: str) -> None:
        if not self._ended:
            self._ended = True
            self._exited(code, reason, message)

    def terminate(self, grace: float) -> None:
        self._world.call_after(min(grace, 0.1), self.kill)

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "Error") -> None:
        self._finish(code, reason, "")

    sidecar = None

    def restart_sidecar(self) -> None:
        raise AssertionError("a probe has no sidecar")


class OtherContainers:
    """A pod of another user. It takes resources until it is ended."""

    def __init__(self, world: SharedWorld, exited: ExitCallback) -> None:
        self._world = world
        self._exited = exited

    def start(self) -> None:
        pass

    def terminate(self, grace: float) -> None:
        self._world.call_after(min(grace, 0.5), self.kill)

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "Error") -> None:
        self._exited(code, reason)

    sidecar = None

    def restart_sidecar(self) -> None:
        raise AssertionError("it has no sidecar")

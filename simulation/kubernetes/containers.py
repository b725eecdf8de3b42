"""What runs of a pod, as its kubelet handles it. Workers of jobs have a room of their own; here is everything else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from pacekeeper_operator.probe import NETWORK

from ..loop import Process
from ..network import API_PLACE

if TYPE_CHECKING:
    from .nodes import SimulatedNode
    from .surroundings import ClusterWorld

KILLED_EXIT_CODE = 137
"""Exit code: 128 + SIGKILL."""
_PROBE_RUN_SECONDS = (0.3, 3.0)
_PROBE_TIMEOUT_SECONDS = 20.0
"""Seconds, as of `pacekeeper_operator.probe`."""
_PROBE_METRICS_JSON = '{"core_seconds":0.002,"memory_bytes_per_second":30000000000}'
"""Of every node: what is slow here is slow in the ranks only."""
SHARED = "as on every node"
"""Part of the words of a probe pod that fails what all nodes fail."""


class ExitCallback(Protocol):
    """The main container has ended. Calls after the first one are of no account."""

    def __call__(self, code: int, reason: str, message: str = "") -> None: ...


class Containers(Protocol):
    """What runs of a pod. It tells by `Exited` when its main container has ended."""

    def start(self) -> None: ...

    def terminate(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after so many seconds. Called again, it only shortens the time."""

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "") -> None:
        """All of them, at once."""

    @property
    def sidecar(self) -> Process | None: ...

    def restart_sidecar(self) -> None:
        """Kills it if it still runs; `sidecar` is another process then."""


class ProbeContainers:
    """The pod of a quarantine's probe: it ends well where the node can be used."""

    def __init__(self, world: ClusterWorld, node: SimulatedNode, exited: ExitCallback) -> None:
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
            words = "the API server's service cannot be reached: timed out"
            self._world.call_after(_PROBE_TIMEOUT_SECONDS, self._finish, 1, "Error", words)
        elif self._node.fault_message:
            self._finish(1, "Error", self._node.fault_message)
        elif check := self._node.shared_check:
            words = json.dumps({"unfit": f"{check}: timed out, {SHARED}", "check": check, "gpus": 0})
            self._world.call_after(_PROBE_TIMEOUT_SECONDS if check == NETWORK else 0.0, self._finish, 1, "Error", words)
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
    """Somebody else's pod: it takes room, for as long as it is let."""

    def __init__(self, world: ClusterWorld, exited: ExitCallback) -> None:
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

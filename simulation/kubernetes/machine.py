"""A machine, as its kubelet and its containers see it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from .api.objects import Object
from .conditions import with_condition

_MAX_PODS_PER_NODE = 110


class ImagePulls(StrEnum):
    """The outcome of image pulls on a node."""

    SUCCEED = "succeed"
    FAIL = "fail"
    HANG = "hang"


class Machine:
    """The state of a machine."""

    def __init__(self, name: str, number: int, resources: Mapping[str, str], labels: Mapping[str, str]) -> None:
        self.name = name
        self.address = f"192.0.2.{number + 1}"
        self.pods_network = f"10.{number}"
        self.powered = True
        self.stuck_since: float | None = None
        """Since when its container runtime hangs (virtual seconds). Running containers continue."""
        self.slow = 1.0
        """Factor by which its ranks compute slower."""
        self.fault_message = ""
        """Why it is unusable, as a probe reports it."""
        self.shared_check = ""
        """Check of a probe that this node fails like all others, for a shared cause."""
        self.refuses = ""
        """Reason with which its kubelet rejects each new pod: UnexpectedAdmissionError, …"""
        self.images = ImagePulls.SUCCEED
        self._resources = {"pods": str(_MAX_PODS_PER_NODE), **resources}
        self._labels = labels

    def build_object(self, wall: float) -> Object:
        """Build the Node object that the kubelet registers. `wall`: wall clock."""
        conditions: list[Object] = []
        for type_ in ("MemoryPressure", "DiskPressure", "PIDPressure"):
            conditions = with_condition(conditions, type_, "False", wall)
        conditions = with_condition(conditions, "Ready", "True", wall, "KubeletReady")
        addresses = [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}]
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name, **self._labels}},
            "spec": {},
            "status": {
                "addresses": addresses,
                "capacity": self._resources,
                "allocatable": self._resources,
                "conditions": conditions,
            },
        }

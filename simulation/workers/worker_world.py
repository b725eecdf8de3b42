"""What jobs' workers need of their world."""

from __future__ import annotations

from typing import Protocol

from ..kubernetes.api.api_server import ApiServer
from ..operators.endpoint import OperatorService
from ..ports import SharedWorld
from ..prometheus import SimulatedPrometheus
from .training import TrainingRegistry


class WorkerWorld(SharedWorld, Protocol):
    """A world with what sidecars call, with GPUs' exporters, and with the trainings of all jobs."""

    api: ApiServer
    endpoint: OperatorService
    prometheus: SimulatedPrometheus
    trainings: TrainingRegistry

    def forget_worker(self, uid: str) -> None:
        """Remove a worker from the running ones."""

"""What a cluster's controllers and machines need of their world."""

from __future__ import annotations

from typing import Protocol

from ..ports import Containers, ExitCallback, SharedWorld
from .api.api_server import ApiServer
from .api.objects import Object


class ClusterWorld(SharedWorld, Protocol):
    """A world with an API server, and with workers of jobs that kubelets start."""

    api: ApiServer

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> Containers:
        """Create the processes of a job's worker, without starting them."""

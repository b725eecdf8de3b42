"""What the operator's pods need of their world."""

from __future__ import annotations

from typing import Protocol

from ..kubernetes.api.api_server import ApiServer
from ..ports import SharedWorld
from ..prometheus import SimulatedPrometheus
from .endpoint import OperatorService


class OperatorWorld(SharedWorld, Protocol):
    """A world with what an operator calls, and the Service through which sidecars call it."""

    api: ApiServer
    prometheus: SimulatedPrometheus
    endpoint: OperatorService

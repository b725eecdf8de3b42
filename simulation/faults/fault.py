"""The base classes of faults. The other modules contain the faults, by what they affect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ..kubernetes.nodes import SimulatedNode
from ..operators.pod import OperatorPod
from ..workers.worker import SimulatedWorker
from .context import FaultContext
from .targets import OperatorTarget, TargetRole

HealCallback = Callable[[], None]
"""Heals a fault. Called once."""


class Cost(StrEnum):
    """What a job may lack while a fault lasts, without a violation."""

    SPARES = "spares"  # it has fewer than in its spec
    STATUS = "status"  # its status is outdated
    STEPS = "steps"  # it may make no progress
    STRENGTH = "strength"  # it may train with fewer workers than in its spec
    METRICS = "metrics"  # its ranks' metrics are unknown
    CHECKPOINTS = "checkpoints"  # none is saved


@dataclass(frozen=True)
class Fault:
    """A fault: what it affects, and how. Its injection defines when and for how long."""

    __abstract__: ClassVar = True
    costs: ClassVar[tuple[Cost, ...]] = ()
    at_least: ClassVar[float] = 0.0
    """Minimum duration in seconds: a shorter one has no effect."""

    def inject(self, context: FaultContext) -> HealCallback | None:
        """Inject the fault.

        Return what heals it; None: it needs no healing. Raises TargetMissing if there is no target.
        """
        raise NotImplementedError

    @classmethod
    def can_heal(cls) -> bool:
        """Return whether it can be healed, by the return type of `inject`."""
        return bool(cls.inject.__annotations__["return"] != "None")


@dataclass(frozen=True)
class WorkerFault(Fault):
    """Affects one worker. `index` wraps around."""

    __abstract__: ClassVar = True
    role: TargetRole = TargetRole.MEMBER
    index: int = 0
    job: int = 0  # position in the schedule

    def find_worker(self, context: FaultContext) -> SimulatedWorker:
        return context.find_worker(self.role, self.index, self.job)


@dataclass(frozen=True)
class NodeFault(Fault):
    """Affects the node of a worker; with `free`, one without workers of any job."""

    __abstract__: ClassVar = True
    role: TargetRole = TargetRole.MEMBER
    index: int = 0
    job: int = 0
    free: bool = False

    def find_node(self, context: FaultContext) -> SimulatedNode:
        return (
            context.find_free_node(self.index)
            if self.free
            else context.find_node(context.find_worker(self.role, self.index, self.job))
        )


@dataclass(frozen=True)
class OperatorFault(Fault):
    """Affects one of the operator's pods."""

    __abstract__: ClassVar = True
    which: OperatorTarget = OperatorTarget.LEADER

    def find_pod(self, context: FaultContext) -> OperatorPod:
        return context.find_operator_pod(self.which)


@dataclass(frozen=True)
class JobFault(Fault):
    """A user changes a job, or something that belongs to it."""

    __abstract__: ClassVar = True
    job: int = 0

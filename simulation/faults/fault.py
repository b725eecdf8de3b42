"""What a fault is. The modules beside this one hold the vocabulary, by what they strike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ..kubernetes.nodes import SimulatedNode
    from ..operators.pod import OperatorPod
    from ..workers.worker import SimulatedWorker
    from .scene import FaultContext

HealCallback = Callable[[], None]
"""Ends what a fault has begun. Called once."""


class Cost(StrEnum):
    """What a job may lack for as long as a fault lasts, and no judge may complain about."""

    SPARES = "spares"  # it has fewer than its spec asks for
    STATUS = "status"  # its status is old
    STEPS = "steps"  # it may stand still
    STRENGTH = "strength"  # it may train with fewer workers than its spec asks for
    METRICS = "figures"  # nobody knows how its ranks train
    CHECKPOINTS = "checkpoints"  # none is kept


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: whom it strikes, and how. When and for how long is its stroke's business."""

    __abstract__: ClassVar = True
    costs: ClassVar[tuple[Cost, ...]] = ()
    at_least: ClassVar[float] = 0.0
    """Seconds that it lasts: a shorter one shows nothing."""

    def inject(self, context: FaultContext) -> HealCallback | None:
        """What heals it; None: there is nothing to be healed. Raises Missed where there is nobody to strike."""
        raise NotImplementedError

    @classmethod
    def can_heal(cls) -> bool:
        """Whether there is anything to be healed: what `strike` says that it returns."""
        return bool(cls.inject.__annotations__["return"] != "None")


class TargetMissing(Exception):
    """Whom the fault is for is not there now; the message says who."""


class TargetRole(StrEnum):
    """Of a worker."""

    MEMBER = "member"  # it holds ranks by the plan that is written
    SPARE = "spare"  # any other worker that runs


class OperatorTarget(StrEnum):
    """Of the operator's pods."""

    LEADER = "leader"
    STANDBY = "standby"


@dataclass(frozen=True)
class WorkerFault(Fault):
    """Strikes one worker. `index` counts round and round."""

    __abstract__: ClassVar = True
    role: TargetRole = TargetRole.MEMBER
    index: int = 0
    job: int = 0  # place in the schedule

    def find_worker(self, context: FaultContext) -> SimulatedWorker:
        return context.find_worker(self.role, self.index, self.job)


@dataclass(frozen=True)
class NodeFault(Fault):
    """Strikes the node of a worker, or with `free` one that has no worker of any job."""

    __abstract__: ClassVar = True
    role: TargetRole = TargetRole.MEMBER
    index: int = 0
    job: int = 0
    free: bool = False

    def find_node(self, context: FaultContext) -> SimulatedNode:
        return (
            context.find_free_node(self.index) if self.free else context.find_node(context.find_worker(self.role, self.index, self.job))
        )


@dataclass(frozen=True)
class OperatorFault(Fault):
    """Strikes one of the operator's pods."""

    __abstract__: ClassVar = True
    which: OperatorTarget = OperatorTarget.LEADER

    def find_pod(self, context: FaultContext) -> OperatorPod:
        return context.find_operator_pod(self.which)


@dataclass(frozen=True)
class JobFault(Fault):
    """Somebody does something with a job, or with what belongs to it."""

    __abstract__: ClassVar = True
    job: int = 0

"""What a fault is. The modules beside this one hold the vocabulary, by what they strike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ..kubernetes.nodes import Node
    from ..operators.pod import OperatorPod
    from ..workers.worker import Worker
    from .scene import Scene

Heal = Callable[[], None]
"""Ends what a fault has begun. Called once."""


class Cost(StrEnum):
    """What a job may lack for as long as a fault lasts, and no judge may complain about."""

    SPARES = "spares"  # it has fewer than its spec asks for
    STATUS = "status"  # its status is old
    STEPS = "steps"  # it may stand still
    STRENGTH = "strength"  # it may train with fewer workers than its spec asks for
    FIGURES = "figures"  # nobody knows how its ranks train
    CHECKPOINTS = "checkpoints"  # none is kept


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: whom it strikes, and how. When and for how long is its stroke's business."""

    __abstract__: ClassVar = True
    costs: ClassVar[tuple[Cost, ...]] = ()
    at_least: ClassVar[float] = 0.0
    """Seconds that it lasts: a shorter one shows nothing."""

    def strike(self, scene: Scene) -> Heal | None:
        """What heals it; None: there is nothing to be healed. Raises Missed where there is nobody to strike."""
        raise NotImplementedError

    @classmethod
    def lasts(cls) -> bool:
        """Whether there is anything to be healed: what `strike` says that it returns."""
        return bool(cls.strike.__annotations__["return"] != "None")


class Missed(Exception):
    """Whom the fault is for is not there now; the message says who."""


class Role(StrEnum):
    """Of a worker."""

    MEMBER = "member"  # it holds ranks by the plan that is written
    SPARE = "spare"  # any other worker that runs


class Which(StrEnum):
    """Of the operator's pods."""

    LEADER = "leader"
    STANDBY = "standby"


@dataclass(frozen=True)
class WorkerFault(Fault):
    """Strikes one worker. `index` counts round and round."""

    __abstract__: ClassVar = True
    role: Role = Role.MEMBER
    index: int = 0
    job: int = 0  # place in the schedule

    def worker(self, scene: Scene) -> Worker:
        return scene.worker(self.role, self.index, self.job)


@dataclass(frozen=True)
class NodeFault(Fault):
    """Strikes the node of a worker, or with `free` one that has no worker of any job."""

    __abstract__: ClassVar = True
    role: Role = Role.MEMBER
    index: int = 0
    job: int = 0
    free: bool = False

    def node(self, scene: Scene) -> Node:
        return (
            scene.free_node(self.index) if self.free else scene.node_of(scene.worker(self.role, self.index, self.job))
        )


@dataclass(frozen=True)
class OperatorFault(Fault):
    """Strikes one of the operator's pods."""

    __abstract__: ClassVar = True
    which: Which = Which.LEADER

    def pod(self, scene: Scene) -> OperatorPod:
        return scene.operator(self.which)


@dataclass(frozen=True)
class JobFault(Fault):
    """Somebody does something with a job, or with what belongs to it."""

    __abstract__: ClassVar = True
    job: int = 0

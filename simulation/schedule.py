"""A disaster as a value: a world, jobs, and what strikes them when. A run follows from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pacekeeper_operator.api import API_VERSION, TRAINER_CONTAINER, RemediationMode

from .faults.fault import Cost, Fault
from .faults.moments import Trigger
from .faults.values import from_json, derive_kind, to_json
from .workers.training import REPLICA_RANKS
from .world import NAMESPACE, WorldSettings

MIN_RUN_SECONDS = 600.0
"""Of virtual time that a run takes, at least."""
HEALED_BY_SECONDS = 330.0
"""By then all faults that heal are over: what is left of a run is quiet."""


class Aim(StrEnum):
    """What a run shall show."""

    SAFETY = "safety"  # all faults heal: the end is as if they had never been
    LIVENESS = "liveness"  # some never do: the job goes on all the same


@dataclass(frozen=True)
class SimulatedJob:
    """A TrainingJob that a tenant makes."""

    name: str = "a"
    replicas: int = 3
    spares: int = 1
    min_replicas: int | None = None
    ranks: int = 1  # of each worker
    replica_ranks: int = 1  # any multiple of so many can train
    start_seconds: float = 0.0  # virtual seconds at which it is made
    spec: Mapping[str, Any] = field(default_factory=dict)  # what else it says

    def build_manifest(self) -> dict[str, Any]:
        variable = {"name": REPLICA_RANKS, "value": str(self.replica_ranks)}
        environment = {"env": [variable]} if self.replica_ranks > 1 else {}
        template = {
            "spec": {
                "terminationGracePeriodSeconds": 20,
                "containers": [
                    {
                        "name": TRAINER_CONTAINER,
                        "image": "trainer",
                        "resources": {"requests": {"cpu": "900m"}},
                        **environment,
                    }
                ],
            }
        }
        smallest = {} if self.min_replicas is None else {"minReplicas": self.min_replicas}
        return {
            "apiVersion": API_VERSION,
            "kind": "TrainingJob",
            "metadata": {"name": self.name, "namespace": NAMESPACE},
            "spec": {
                "replicas": self.replicas,
                "spares": self.spares,
                **smallest,
                "nprocPerNode": self.ranks,
                "template": template,
                **self.spec,
            },
        }


@dataclass(frozen=True)
class FaultInjection:
    """A fault and its moment."""

    trigger: Trigger
    fault: Fault
    seconds: float | None = 0.0
    """How long it lasts where it does not end by itself; None: until all faults heal, and in a run for liveness for
    ever."""

    def __str__(self) -> str:
        def words(value: object) -> str:
            content = to_json(value)
            return " ".join([content.pop("kind"), *(f"{key}={held}" for key, held in content.items())])

        lasts = "" if self.seconds == 0.0 else " for ever" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{words(self.trigger)}: {words(self.fault)}{lasts}"


@dataclass(frozen=True)
class Schedule:
    """What `simulation.run.run` takes."""

    seed: int
    aim: Aim = Aim.SAFETY
    world: WorldSettings = field(default_factory=WorldSettings)
    jobs: tuple[SimulatedJob, ...] = (SimulatedJob(),)
    injections: tuple[FaultInjection, ...] = ()

    @property
    def costs(self) -> frozenset[Cost]:
        """What jobs may lack at the end, because of what never heals."""
        if self.aim is Aim.SAFETY:
            return frozenset()
        return frozenset(cost for stroke in self.injections if stroke.seconds is None for cost in stroke.fault.costs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its faults."""
        return tuple(derive_kind(type(stroke.fault)) for stroke in self.injections)

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "aim": self.aim,
            "world": {**asdict(self.world), "operator": dict(self.world.operator)},
            "jobs": [asdict(job) for job in self.jobs],
            "strokes": [
                {"when": to_json(stroke.trigger), "what": to_json(stroke.fault), "seconds": stroke.seconds}
                for stroke in self.injections
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Schedule:
        """Raises ValueError or TypeError where there is no such fault, moment or field."""
        world = dict(content["world"])
        world["operator"] = {
            key: RemediationMode(value) if key.endswith("mode") else value for key, value in world["operator"].items()
        }
        strokes = [
            FaultInjection(from_json(Trigger, each["when"]), from_json(Fault, each["what"]), each["seconds"])
            for each in content["strokes"]
        ]
        return cls(
            seed=content["seed"],
            aim=Aim(content["aim"]),
            world=WorldSettings(**world),
            jobs=tuple(SimulatedJob(**job) for job in content["jobs"]),
            injections=tuple(strokes),
        )

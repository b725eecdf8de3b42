"""A schedule as a value: a world, jobs, and which faults are injected when. It determines the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pacekeeper_operator.api.training_job import RemediationMode

from .faults.fault import Cost, Fault
from .faults.triggers import Trigger
from .faults.value_codec import derive_kind, from_json, to_json
from .simulated_job import SimulatedJob
from .world import WorldSettings

MIN_RUN_SECONDS = 600.0
"""Minimum virtual time of a run."""
HEALED_BY_SECONDS = 330.0
"""Virtual time by which all temporary faults have ended. The rest of a run is quiet."""


class Aim(StrEnum):
    """What a run tests."""

    SAFETY = "safety"  # all faults heal: in the end, everything is as if they had never occurred
    LIVENESS = "liveness"  # some faults are permanent: the job continues nevertheless


@dataclass(frozen=True)
class FaultInjection:
    """A fault and its trigger."""

    trigger: Trigger
    fault: Fault
    seconds: float | None = 0.0
    """Duration of a fault that does not end by itself; None: until all faults heal, and permanent in a liveness run."""

    def __str__(self) -> str:
        def words(value: object) -> str:
            content = to_json(value)
            return " ".join([content.pop("kind"), *(f"{key}={field_value}" for key, field_value in content.items())])

        duration = "" if self.seconds == 0.0 else " permanently" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{words(self.trigger)}: {words(self.fault)}{duration}"


@dataclass(frozen=True)
class Schedule:
    """The input of `simulation.run.run_schedule`."""

    seed: int
    aim: Aim = Aim.SAFETY
    world: WorldSettings = field(default_factory=WorldSettings)
    jobs: tuple[SimulatedJob, ...] = (SimulatedJob(),)
    injections: tuple[FaultInjection, ...] = ()

    @property
    def costs(self) -> frozenset[Cost]:
        """What jobs may lack at the end because of permanent faults."""
        if self.aim is Aim.SAFETY:
            return frozenset()
        return frozenset(
            cost for injection in self.injections if injection.seconds is None for cost in injection.fault.costs
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its faults."""
        return tuple(derive_kind(type(injection.fault)) for injection in self.injections)

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "aim": self.aim,
            "world": {**asdict(self.world), "operator": dict(self.world.operator)},
            "jobs": [asdict(job) for job in self.jobs],
            "injections": [
                {"trigger": to_json(injection.trigger), "fault": to_json(injection.fault), "seconds": injection.seconds}
                for injection in self.injections
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Schedule:
        """Parse a schedule. Raises ValueError or TypeError for an unknown fault, trigger, or field."""
        world = dict(content["world"])
        world["operator"] = {
            key: RemediationMode(value) if key.endswith("mode") else value for key, value in world["operator"].items()
        }
        injections = [
            FaultInjection(from_json(Trigger, item["trigger"]), from_json(Fault, item["fault"]), item["seconds"])
            for item in content["injections"]
        ]
        return cls(
            seed=content["seed"],
            aim=Aim(content["aim"]),
            world=WorldSettings(**world),
            jobs=tuple(SimulatedJob(**job) for job in content["jobs"]),
            injections=tuple(injections),
        )

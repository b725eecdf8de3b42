"""Objects as kubectl gives them, read by what the operator writes them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pacekeeper_analysis.errors import InputError

from ..api import (
    JobCondition,
    ConditionStatus,
    IncidentSpec,
    IncidentStatus,
    TrainingJob,
    JobStatus,
    Object,
    QuarantineSpec,
    QuarantineStatus,
    parse_time,
)

Read = TypeVar("Read")


@dataclass(frozen=True)
class LoadedJob:
    job: TrainingJob
    status: JobStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        return cls(_parse_object(body, TrainingJob.parse), _parse_object(body, lambda found: JobStatus.parse(found.get("status") or {})))

    def find_true_conditions(self, *types: JobCondition) -> tuple[ConditionStatus, ...]:
        """Those of the conditions that are True, in this order."""
        known = {condition.type: condition for condition in self.status.conditions}
        return tuple(known[one] for one in types if one in known and known[one].status == "True")

    def find_condition(self, type_: JobCondition) -> ConditionStatus | None:
        return next((condition for condition in self.status.conditions if condition.type == type_), None)

    @property
    def is_unobserved(self) -> bool:
        """No operator has looked at its newest spec."""
        return (self.status.observed_generation or -1) < self.job.generation


@dataclass(frozen=True)
class LoadedIncident:
    namespace: str
    name: str
    created_at: float
    spec: IncidentSpec
    status: IncidentStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        metadata = body["metadata"]
        return cls(
            metadata["namespace"],
            metadata["name"],
            parse_time(metadata["creationTimestamp"]),
            _parse_object(body, lambda found: IncidentSpec.parse(found["spec"])),
            _parse_object(body, lambda found: IncidentStatus.parse(found.get("status") or {})),
        )

    @property
    def started_at(self) -> float:
        return self.created_at if self.status.first_sign is None else self.status.first_sign

    @property
    def is_open(self) -> bool:
        return self.status.outcome is None


@dataclass(frozen=True)
class LoadedQuarantine:
    node: str
    spec: QuarantineSpec
    status: QuarantineStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        return cls(
            body["metadata"]["name"],
            _parse_object(body, lambda found: QuarantineSpec.parse(found["spec"])),
            _parse_object(body, lambda found: QuarantineStatus.parse(found.get("status") or {})),
        )


def parse_newest_first(bodies: Sequence[Object]) -> list[LoadedIncident]:
    return sorted(map(LoadedIncident.from_object, bodies), key=lambda incident: incident.started_at, reverse=True)


def _parse_object(body: Object, read: Callable[[Object], Read]) -> Read:
    """Raises InputError that names object and remedy."""
    try:
        return read(body)
    except InputError as error:
        name = f"{body['kind']} {body['metadata']['name']}"
        raise InputError(
            f"{name}: {error}; where the operator is newer than this command: pip install --upgrade pacekeeper"
        ) from error

"""Objects as kubectl gives them, read by what the operator writes them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pacekeeper_analysis.errors import InputError

from ..api import (
    Condition,
    ConditionStatus,
    IncidentSpec,
    IncidentStatus,
    Job,
    JobStatus,
    Object,
    QuarantineSpec,
    QuarantineStatus,
    parse_time,
)

Read = TypeVar("Read")


@dataclass(frozen=True)
class SeenJob:
    job: Job
    status: JobStatus

    @classmethod
    def of(cls, body: Object) -> Self:
        return cls(_read(body, Job.parse), _read(body, lambda found: JobStatus.parse(found.get("status") or {})))

    def true(self, *types: Condition) -> tuple[ConditionStatus, ...]:
        """Those of the conditions that are True, in this order."""
        known = {condition.type: condition for condition in self.status.conditions}
        return tuple(known[one] for one in types if one in known and known[one].status == "True")

    def condition(self, type_: Condition) -> ConditionStatus | None:
        return next((condition for condition in self.status.conditions if condition.type == type_), None)

    @property
    def unseen(self) -> bool:
        """No operator has looked at its newest spec."""
        return (self.status.observed_generation or -1) < self.job.generation


@dataclass(frozen=True)
class SeenIncident:
    namespace: str
    name: str
    created_at: float
    spec: IncidentSpec
    status: IncidentStatus

    @classmethod
    def of(cls, body: Object) -> Self:
        metadata = body["metadata"]
        return cls(
            metadata["namespace"],
            metadata["name"],
            parse_time(metadata["creationTimestamp"]),
            _read(body, lambda found: IncidentSpec.parse(found["spec"])),
            _read(body, lambda found: IncidentStatus.parse(found.get("status") or {})),
        )

    @property
    def began(self) -> float:
        return self.created_at if self.status.first_sign is None else self.status.first_sign

    @property
    def open(self) -> bool:
        return self.status.outcome is None


@dataclass(frozen=True)
class SeenQuarantine:
    node: str
    spec: QuarantineSpec
    status: QuarantineStatus

    @classmethod
    def of(cls, body: Object) -> Self:
        return cls(
            body["metadata"]["name"],
            _read(body, lambda found: QuarantineSpec.parse(found["spec"])),
            _read(body, lambda found: QuarantineStatus.parse(found.get("status") or {})),
        )


def newest_first(bodies: Sequence[Object]) -> list[SeenIncident]:
    return sorted(map(SeenIncident.of, bodies), key=lambda incident: incident.began, reverse=True)


def _read(body: Object, read: Callable[[Object], Read]) -> Read:
    """Raises InputError that names object and remedy."""
    try:
        return read(body)
    except InputError as error:
        name = f"{body['kind']} {body['metadata']['name']}"
        raise InputError(
            f"{name}: {error}; where the operator is newer than this command: pip install --upgrade pacekeeper"
        ) from error

"""Objects as kubectl returns them, parsed with the operator's own classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pacekeeper_analysis.errors import InputError

from ..api.conditions import ConditionStatus, JobCondition
from ..api.formats import parse_time
from ..api.incident import IncidentSpec, IncidentStatus
from ..api.names import Object
from ..api.node_quarantine import QuarantineSpec, QuarantineStatus
from ..api.training_job import JobStatus, TrainingJob
from ..api.watched_job import WatchedJobSpec, WatchedJobStatus

Read = TypeVar("Read")


@dataclass(frozen=True)
class LoadedJob:
    job: TrainingJob
    status: JobStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        return cls(
            _parse_object(body, TrainingJob.parse),
            _parse_object(body, lambda raw: JobStatus.parse(raw.get("status") or {})),
        )

    def find_true_conditions(self, *types: JobCondition) -> tuple[ConditionStatus, ...]:
        """Return the conditions of these types that are True, in this order."""
        by_type = {condition.type: condition for condition in self.status.conditions}
        return tuple(by_type[type_] for type_ in types if type_ in by_type and by_type[type_].status == "True")

    def find_condition(self, type_: JobCondition) -> ConditionStatus | None:
        return next((condition for condition in self.status.conditions if condition.type == type_), None)

    @property
    def is_unobserved(self) -> bool:
        """Whether no operator has observed the newest spec."""
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
            _parse_object(body, lambda raw: IncidentSpec.parse(raw["spec"])),
            _parse_object(body, lambda raw: IncidentStatus.parse(raw.get("status") or {})),
        )

    @property
    def started_at(self) -> float:
        return self.created_at if self.status.first_sign is None else self.status.first_sign

    @property
    def is_open(self) -> bool:
        return self.status.outcome is None


@dataclass(frozen=True)
class LoadedWatchedJob:
    namespace: str
    name: str
    uid: str
    spec: WatchedJobSpec
    status: WatchedJobStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        metadata = body["metadata"]
        return cls(
            metadata["namespace"],
            metadata["name"],
            metadata["uid"],
            _parse_object(body, lambda raw: WatchedJobSpec.parse(raw["spec"])),
            _parse_object(body, lambda raw: WatchedJobStatus.parse(raw.get("status") or {})),
        )

    @property
    def root(self) -> str:
        """The job for people: `PyTorchJob segment`."""
        return f"{self.spec.root.kind} {self.spec.root.name}"


@dataclass(frozen=True)
class LoadedQuarantine:
    node: str
    spec: QuarantineSpec
    status: QuarantineStatus

    @classmethod
    def from_object(cls, body: Object) -> Self:
        return cls(
            body["metadata"]["name"],
            _parse_object(body, lambda raw: QuarantineSpec.parse(raw["spec"])),
            _parse_object(body, lambda raw: QuarantineStatus.parse(raw.get("status") or {})),
        )


def parse_newest_first(bodies: Sequence[Object]) -> list[LoadedIncident]:
    return sorted(map(LoadedIncident.from_object, bodies), key=lambda incident: incident.started_at, reverse=True)


def _parse_object(body: Object, parse: Callable[[Object], Read]) -> Read:
    """Parse an object.

    Raises InputError that names the object and the remedy.
    """
    try:
        return parse(body)
    except InputError as error:
        name = f"{body['kind']} {body['metadata']['name']}"
        raise InputError(
            f"{name}: {error}; if the operator is newer than this command: pip install --upgrade pacekeeper"
        ) from error

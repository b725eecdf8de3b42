"""Incident: a fault, what was done about it, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pacekeeper_analysis.failures.finding import Finding

from .codec import from_json, to_json, to_patch
from .formats import format_time, parse_time, round_for_json
from .training_job import RemediationMode

MAX_EVIDENCE_ITEMS = 64
MAX_EVIDENCE_CHARACTERS = 8192


class IncidentCause(StrEnum):
    """The cause of an Incident. It is part of the Incident's name."""

    CRASH = "crash"  # a rank ended
    HANG = "hang"
    ROUND_FAILED = "round-failed"  # the launchers could not start a round
    OUT_OF_MEMORY = "out-of-memory"
    WORKER_LOST = "worker-lost"
    WORKER_UNRESPONSIVE = (
        "worker-unresponsive"  # the pod exists, but its launcher does not respond, or its ranks cannot be killed
    )
    NODE_LOST = "node-lost"
    GPU_ERROR = "gpu-error"
    GPU_WARNING = "gpu-warning"  # the GPU works, but a fault is to be expected
    NODE_LEAVING = "node-leaving"  # the platform is about to empty the node
    STRAGGLER = "straggler"
    SLOW_COMMUNICATION = "slow-communication"
    VOLATILE = "volatile"  # slow ranks come and go
    GARBAGE_COLLECTION = "garbage-collection"  # of Python: different ranks collect in different steps
    UNEVEN_LENGTHS = "uneven-lengths"  # sequence lengths are distributed unevenly over ranks
    SLOW_STEPS = "slow-steps"  # all ranks are slow alike, or a user requested a profile
    STARTED_OVER = "started-over"  # a round began from the start although an earlier one had completed steps


class IncidentClass(StrEnum):
    """The kind of fault, which decides who has to act."""

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    DISRUPTION = "Disruption"  # requested: drain, eviction, preemption, deletion
    PERFORMANCE = "Performance"
    UNKNOWN = "Unknown"


class IncidentOutcome(StrEnum):
    """The result of an Incident, measured after the remedy."""

    RECOVERED = "Recovered"  # training goes on as before
    MITIGATED = "Mitigated"  # better than before the remedy, not as good as before the fault
    INEFFECTIVE = "Ineffective"
    RECOMMENDED = "Recommended"  # mode Recommend: nothing was done
    FAILED = "Failed"  # the job failed because of it
    OBSERVED = "Observed"  # nothing is ever done: of a watched job, or about training that started over
    SUPERSEDED = "Superseded"  # another round, or the job's suspension, completion, or deletion came first


@dataclass(frozen=True)
class ObjectRef:
    name: str
    namespace: str
    uid: str | None = None
    kind: str | None = None  # None: a TrainingJob


@dataclass(frozen=True)
class RemedyPrice:
    """A remedy that was considered, with its gain and cost in seconds of training."""

    name: str
    gain_seconds: float | None = None  # None: the job stands still, so every remedy wins everything
    cost_seconds: float | None = None
    chosen: bool = False
    reason: str = ""


def compute_saved_seconds(considered: Iterable[RemedyPrice], standstill_seconds: float | None) -> float:
    """Return the seconds of training that the chosen remedy would have kept; 0: none was worth it.

    While a job stands still, every remedy wins all of the standstill, of `standstill_seconds` (None: not known).
    """
    price = next((price for price in considered if price.chosen), None)
    if price is None:
        return 0.0
    gain = standstill_seconds if price.gain_seconds is None else price.gain_seconds
    return max(0.0, (gain or 0.0) - (price.cost_seconds or 0.0))


@dataclass(frozen=True)
class IncidentSpec:
    """What happened, where, and to whom. It is written once."""

    job_ref: ObjectRef
    cause: IncidentCause
    class_: IncidentClass = IncidentClass.UNKNOWN
    round: int = 0
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    message: str = ""  # one sentence for people
    evidence: tuple[str, ...] = ()

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        return from_json(cls, spec, "spec", {})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"evidence": _shorten_evidence})


class RestartPartName(StrEnum):
    """The parts of the time of a recovery by a new round, in this order."""

    TEARDOWN = "Teardown"  # until the ranks of the round before have ended
    WAIT = "Wait"  # to detect, to decide, and to wait for all participants
    PROCESS = "Process"  # interpreter start, imports, device initialization
    COMMUNICATORS = "Communicators"
    SCRIPT = "Script"  # the script's own setup: model, optimizer, data
    LOAD = "Load"  # of the checkpoint or snapshot
    FIRST_STEP = "FirstStep"


@dataclass(frozen=True)
class RestartPart:
    name: RestartPartName
    seconds: float
    rank: int | None = None  # the rank that all others waited for; None: no single one


@dataclass(frozen=True)
class Restart:
    """The parts of a recovery, which add up to its duration."""

    parts: tuple[RestartPart, ...] = ()
    restored_from: str | None = None  # Memory, Peer, Checkpoint, or Nothing: the farthest source of any rank
    longest: str | None = None  # the longest part and its rank, for people


_INCIDENT_TIMES = ("first_sign", "detected", "decided", "applied", "recovered")


@dataclass(frozen=True)
class IncidentStatus:
    """The course of an Incident. Times are seconds since the epoch; durations count from `first_sign`."""

    mode: RemediationMode | None = None
    remedy: str | None = None  # the chosen one
    considered: tuple[RemedyPrice, ...] = ()
    first_sign: float | None = None
    detected: float | None = None
    decided: float | None = None
    applied: float | None = None
    recovered: float | None = None
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    steps_lost: int | None = None
    restart: Restart | None = None  # None: there was no new round, or no rank reported its parts
    slowdown_before: float | None = None
    slowdown_after: float | None = None
    predicted_gain: float | None = None  # seconds of training
    measured_gain: float | None = None
    predicted_cost: float | None = None  # seconds of training
    measured_cost: float | None = None
    diagnosis: Finding | None = None
    outcome: IncidentOutcome | None = None
    message: str | None = None

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        return from_json(cls, status, "status", dict.fromkeys(_INCIDENT_TIMES, parse_time))

    def to_patch(self) -> dict[str, Any]:
        return to_patch(
            self,
            {**dict.fromkeys(_INCIDENT_TIMES, format_time), **dict.fromkeys(_ROUNDED_INCIDENT_FIELDS, round_for_json)},
        )


def _shorten_evidence(evidence: tuple[str, ...]) -> list[str]:
    return [item[:MAX_EVIDENCE_CHARACTERS] for item in evidence[:MAX_EVIDENCE_ITEMS]]


_ROUNDED_INCIDENT_FIELDS = (
    "seconds",
    "gain_seconds",
    "cost_seconds",
    "detected_seconds",
    "recovered_seconds",
    "slowdown_before",
    "slowdown_after",
    "predicted_gain",
    "measured_gain",
    "predicted_cost",
    "measured_cost",
)

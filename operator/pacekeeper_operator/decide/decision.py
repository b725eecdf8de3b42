"""Decisions and their actions: values that the checks return and `remedies` applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper_analysis.failures.finding import Finding
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Strategy
from pacekeeper_analysis.stragglers.windows import StepTimeSample

from ..api.conditions import Reason
from ..api.incident import IncidentCause, IncidentClass, RemedyPrice
from ..api.node_quarantine import Witness
from ..api.training_job import Remedy, TrainingJob
from ..state.incident_key import IncidentKey
from ..state.job_metrics import GpuValue
from ..state.network import RankPair


@dataclass(frozen=True)
class CountRestart:
    """Action: count a restart that the launchers did by themselves, as the plan allowed, against the budget."""


@dataclass(frozen=True)
class RestartRanks:
    """Action: begin the next round with the same workers."""


@dataclass(frozen=True)
class BackOff:
    """Action: begin the next round with the same workers after a wait that grows each time (`failures.back_off`)."""


@dataclass(frozen=True)
class ReplaceWorker:
    """Action: move the worker's ranks to a spare, and create a new worker."""

    worker: str
    reason: str
    dead: bool  # it no longer trains; otherwise it stays until the others have a checkpoint
    force: bool = False  # its node is lost, so no kubelet will confirm the deletion
    disruption: bool = False  # uses no restart of the budget
    never_ready: bool = False  # its trainer ended before it was ready
    refused: bool = False  # its kubelet started none of its containers
    waits_for_checkpoint: bool = False  # nothing is broken yet: wait for the checkpoint without a limit


@dataclass(frozen=True)
class Adapt:
    """Action: switch to another training strategy live, at one step: other shares, a Local-SGD mode, planned gc."""

    strategy: Strategy
    bottleneck: Bottleneck
    sufficient: bool  # good enough: no further remedy is sought until the loss reaches the price of a spare


@dataclass(frozen=True)
class PlanTraffic:
    """Action: begin the next round with the same workers over other routes.

    These are the routes that joint planning now wants; with `reroll`, new ports for one pair, where no Fabric allows
    planning; with `revert`, the previous routes.
    """

    reroll: RankPair | None = None
    revert: bool = False
    rates: Mapping[RankPair, float] = field(
        default_factory=dict
    )  # bytes per second over the present routes, where known


@dataclass(frozen=True)
class QuarantineNode:
    """Action: request the quarantine of a node. `withheld`: why the request is only recorded; "": it is sent."""

    node: str
    uid: str
    reason: str
    withheld: str = ""
    witness: Witness = Witness.NONE
    weak: bool = False  # not enough to probe the node: a second namespace must blame it, too


@dataclass(frozen=True)
class FailJob:
    """Action: stop the job as failed, since no remedy is left."""

    reason: Reason
    message: str


Action = CountRestart | RestartRanks | BackOff | ReplaceWorker | Adapt | PlanTraffic | QuarantineNode | FailJob


@dataclass(frozen=True)
class Decision:
    """One fault, and the actions against it."""

    incident_key: IncidentKey
    class_: IncidentClass
    message: str  # one sentence for users
    first_sign: float  # seconds since the epoch
    actions: tuple[Action, ...] = ()
    remedy: Remedy | None = None  # the chosen one; None: the fault is only recorded
    remedies: tuple[RemedyPrice, ...] = ()
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    settled_faults: tuple[str, ...] = ()  # names of the faults that it handles
    gpu_readings: tuple[GpuValue, ...] = ()  # GPU values that it handles
    continued_incident: str = ""  # name of the open incident to which this adds a remedy
    covered_by: str = ""  # name of the open incident that already covers this fault; no new one is opened
    live: bool = False  # needs no new round
    routine: bool = False  # Kubernetes or torchrun would do the same: applied even where remedies are only recommended
    last_step: int | None = None  # completed when it happened
    slowdown_before: float | None = None
    slowdown_after: float | None = None  # predicted
    reference_seconds: float | None = None  # time of a step without this bottleneck
    steps_before: StepTimeSample | None = None  # the step times of the evidence
    predicted_gain: float | None = None  # seconds of training
    finding: Finding | None = None  # the diagnosis; None: the cause needs none
    error: str = ""  # signature of the script's error, by which a repetition is recognized
    no_progress: bool = False  # the round completed no step
    repetition: RepeatedFailure | None = None  # how often rounds have ended at the same step

    @property
    def cause(self) -> IncidentCause:
        return self.incident_key.cause

    @property
    def round(self) -> int:
        """The round in which the fault happened."""
        return self.incident_key.round

    def incident_name(self, job: TrainingJob) -> str:
        return self.continued_incident or self.incident_key.incident_name(job)

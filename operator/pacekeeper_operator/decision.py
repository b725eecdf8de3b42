"""What has been decided: values that `decide` makes and `act` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper_analysis.adapt import Bottleneck, Strategy
from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.diagnose.repetition import RepeatedFailure

from .api import IncidentCause, IncidentClass, TrainingJob, Reason, Remedy, RemedyPrice, Witness
from .network import RankPair
from .observation import GpuValue
from .subject import IncidentKey


@dataclass(frozen=True)
class CountRestart:
    """The launchers have restarted the ranks by themselves, as the plan allowed: it counts against the budget."""


@dataclass(frozen=True)
class RestartRanks:
    """The next round, by the same workers."""


@dataclass(frozen=True)
class BackOff:
    """The next round by the same workers, after a wait that grows each time (`decide.back_off`)."""


@dataclass(frozen=True)
class ReplaceWorker:
    """The worker's ranks move to a spare; a new worker is made in its place."""

    worker: str
    reason: str
    dead: bool  # it does not train any more; otherwise it stays until the others have a checkpoint
    force: bool = False  # its node is lost: nobody there will confirm the deletion
    disruption: bool = False  # somebody wanted it, or none is left: burns no budget
    never_ready: bool = False  # its trainer ended before it was ready
    refused: bool = False  # its kubelet has not even begun it
    waits_for_checkpoint: bool = False  # nothing is broken so far: the checkpoint is waited for, however long it takes


@dataclass(frozen=True)
class Adapt:
    """Another way to train, live, on one step: other shares, a Local-SGD mode, planned garbage collections."""

    strategy: Strategy
    bottleneck: Bottleneck
    sufficient: bool  # well enough: nothing more is looked for until the loss has reached the price of a spare


@dataclass(frozen=True)
class PlanTraffic:
    """The next round, by the same workers, over the ways that joint planning wants by now; or, where nobody plans any,
    with other ports for one pair; or over the ways of before."""

    reroll: RankPair | None = None
    revert: bool = False
    rates: Mapping[RankPair, float] = field(default_factory=dict)  # bytes a second by the ways so far, where that is known


@dataclass(frozen=True)
class QuarantineNode:
    """A suspicion against the node. `withheld` says why it is only written down; "": it is handed on."""

    node: str
    uid: str
    reason: str
    withheld: str = ""
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to look at the node: it takes a second namespace's word


@dataclass(frozen=True)
class FailJob:
    """Nothing helps."""

    reason: Reason
    message: str


Action = CountRestart | RestartRanks | BackOff | ReplaceWorker | Adapt | PlanTraffic | QuarantineNode | FailJob


@dataclass(frozen=True)
class Decision:
    """One fault, and what is to be done about it."""

    incident_key: IncidentKey
    class_: IncidentClass
    message: str  # one sentence for people
    first_sign: float  # seconds since the epoch
    actions: tuple[Action, ...] = ()
    remedy: Remedy | None = None  # the chosen one; None: nothing is done but writing it down
    remedies: tuple[RemedyPrice, ...] = ()
    evidence: tuple[str, ...] = ()
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    settled_faults: tuple[str, ...] = ()  # names of the faults that it deals with
    gpu_readings: tuple[GpuValue, ...] = ()  # readings that it deals with
    continued_incident: str = ""  # name of the open incident to which this is a further remedy
    covered_by: str = ""  # name of the open incident that covers this fault, too: no other one is opened
    live: bool = False  # changes no round
    routine: bool = False  # what Kubernetes or torchrun would do: also where remedies are only recommended
    last_step: int = -1
    slowdown_before: float | None = None
    slowdown_after: float | None = None  # predicted
    reference_seconds: float | None = None  # a step without this trouble
    predicted_gain: float | None = None  # seconds of training
    finding: Finding | None = None  # the diagnosis; None: what happened says all
    error: str = ""  # the script's own words, which tell a repetition
    no_progress: bool = False  # the round had no completed step
    repetition: RepeatedFailure | None = None  # how often rounds have ended at the same step by now

    @property
    def cause(self) -> IncidentCause:
        return self.incident_key.cause

    @property
    def round(self) -> int:
        """In which it happened."""
        return self.incident_key.round

    def incident_name(self, job: TrainingJob) -> str:
        return self.continued_incident or self.incident_key.incident_name(job)

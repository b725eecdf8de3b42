"""The operator's own bookkeeping of a job, kept beside the plan so that one write changes both.

All of it is a value: a pass over a job makes a new State and writes it by compare-and-swap, or nothing. An operator
that dies between any two lines finds here everything that it had promised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pacekeeper_analysis.adapt import Hysteresis, Trouble
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Plan

from .api import Cause, Class, Mode, Outcome, RemedyPrice
from .codec import from_json, to_json

MAX_SETTLED = 500
MAX_PAST = 100
HOLD_SECONDS = 15.0
"""So long a mode stays at least; longer where changes follow each other."""


@dataclass(frozen=True)
class Worker:
    """A pod that the job has or shall have. Its name is reserved here before it is created, and never used again."""

    name: str
    ordinal: int
    incarnation: int
    uid: str = ""  # "": not known to have been created
    node: str = ""
    leaving: str = ""  # why it is given up; "": it stays
    dead: bool = False  # does not train any more: nobody waits for its checkpoint
    force: bool = False  # its node is lost: deleted without waiting for the kubelet


@dataclass(frozen=True)
class Incident:
    """An open incident. Times are seconds since the epoch; what `api.IncidentStatus` says is made from it."""

    name: str
    cause: Cause
    class_: Class
    round: int  # in which it happened
    message: str
    first_sign: float
    detected: float
    decided: float
    mode: Mode = Mode.ACT
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    evidence: tuple[str, ...] = ()
    remedy: str | None = None
    remedies: tuple[RemedyPrice, ...] = ()
    applied: float | None = None
    recovered: float | None = None
    last_step: int = -1  # completed when it happened
    steps_lost: int | None = None
    slowdown_before: float | None = None
    slowdown_after: float | None = None
    reference_seconds: float | None = None  # a step without this trouble, as the evidence says
    predicted_gain: float | None = None
    measured_gain: float | None = None
    outcome: Outcome | None = None
    live: bool = False  # its remedy changes no round: it is judged by the step time
    quarantine: str = ""  # what became of the node, for people


@dataclass(frozen=True)
class Past:
    """What is remembered of a closed incident, to tell a repetition from a first time."""

    cause: Cause
    at: float
    seconds: float  # from first sign to recovery
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    class_: Class = Class.UNKNOWN


@dataclass(frozen=True)
class Suspicion:
    """A straggler that is being looked into."""

    since: float
    step_seconds: float = 0.0  # of the job at that time; 0: not known
    request: str = ""  # evidence request that is out
    asked_at: float = 0.0
    shown: Trouble | None = None  # by the answer before
    clear_at: float = 0.0  # when an answer last showed no trouble; 0: none has

    @property
    def first_sign(self) -> float:
        """Of the trouble that the last answers show."""
        return max(self.since, self.clear_at)


@dataclass(frozen=True)
class Vain:
    """A look into what the metrics suspected that found nothing to be done: not repeated before something changes."""

    at: float
    hold: float  # seconds
    step_seconds: float  # of the job at that time
    forbidden: bool = False  # something was to be done, but was only recommended


@dataclass(frozen=True)
class Adaptation:
    """A Local-SGD mode that the operator has chosen, until what led to it is over."""

    since: float
    trouble: Trouble
    reason: str
    incident: str
    asked_at: float = 0.0  # when the ranks were last asked whether it is over
    over: int = 0  # so many answers in a row said that it is


@dataclass(frozen=True)
class WantedQuarantine:
    """A quarantine that has been decided, and is asked for once the decision is written."""

    node: str
    uid: str
    reason: str
    incident: str


@dataclass(frozen=True)
class State:
    """All that the operator remembers of a job."""

    workers: tuple[Worker, ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)  # ordinal → highest incarnation ever reserved
    template_accepted: int = -1  # generation of the job whose template the API server accepts
    refused: str = ""  # the API server's words about the template of generation `template_refused`
    template_refused: int = -1
    placing_since: float = 0.0  # beginning of the present attempt to place all workers; 0: none under way
    attempts: int = 0  # at placing all workers that have failed since the job last trained
    retry_at: float = 0.0
    round_seen: int = 0  # highest round of the job that the operator has heard of
    vacant_since: float = 0.0  # since when a rank has no worker; 0: none
    incidents: tuple[Incident, ...] = ()  # open ones, and those whose outcome is not written into the cluster yet
    closed: tuple[str, ...] = ()  # names of incidents that are over
    recommended: tuple[str, ...] = ()  # names of incidents about which nothing was done, in mode Recommend
    past: tuple[Past, ...] = ()
    restarts: tuple[float, ...] = ()  # times of the restarts that count, within the window
    restarts_total: int = 0
    membership_restarts: int = 0  # of them, those that the launchers made in the present membership
    quarantines: tuple[WantedQuarantine, ...] = ()
    settled: tuple[str, ...] = ()  # names of faults that have been dealt with
    finished: tuple[str, ...] = ()  # workers whose trainer ended well
    checkpoint_asked_at: float = 0.0
    gpu_nodes: tuple[str, ...] = ()  # nodes whose GPU counters have been looked at
    gpu_values: Mapping[str, float] = field(default_factory=dict)  # "<node>/<gpu>/<metric>" → last value seen
    suspicion: Suspicion | None = None
    vain: Vain | None = None
    adaptation: Adaptation | None = None  # None: mode Sync, or a mode that somebody has written into the plan by hand
    mode_changes: Hysteresis = field(default_factory=lambda: Hysteresis(first=HOLD_SECONDS))
    mode_reason: str = ""  # of the last change of mode
    mode_refused: str = ""  # the ranks' words when they could not follow a Local-SGD mode
    shares_refused: str = ""  # the same of shares, by the present members
    tolerated_pace: float = 0.0  # slowest rank's time a sample over the median that has been dealt with; 0: none
    tolerated_behind: float = 0.0  # the slowest rank's own work that goes with it, as of `Metrics.behind`
    plan_refused: str = ""  # why the plan as somebody had edited it could not be followed
    plan_refused_at: float = 0.0
    barren_round: int = 0  # last round that failed without a completed step; 0: a later one has completed some
    barren_error: str = ""
    failed_starts: int = 0  # workers in a row whose trainer ended before it was ready
    start_time: float = 0.0  # when the operator took the job up, or it was resumed
    training_since: float = 0.0  # first step of the job
    lost_seconds: float = 0.0  # to incidents that are closed
    restart_seconds: float = 0.0  # that a round of this job takes from decision to first step, as measured last
    failed_reason: str = ""
    failed_message: str = ""
    completed_at: float = 0.0
    stopped_at: float = 0.0  # when the ranks were told to leave (suspend, finish)

    def worker(self, name: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    def with_worker(self, changed: Worker) -> State:
        """`changed` in the place of the worker of its name."""
        return replace(self, workers=tuple(changed if w.name == changed.name else w for w in self.workers))

    def incident(self, name: str) -> Incident | None:
        return next((incident for incident in self.incidents if incident.name == name), None)

    def with_incident(self, changed: Incident) -> State:
        """`changed` in the place of the incident of its name, or added."""
        others = tuple(incident for incident in self.incidents if incident.name != changed.name)
        return replace(self, incidents=(*others, changed))

    def settle(self, names: tuple[str, ...]) -> State:
        fresh = tuple(name for name in dict.fromkeys(names) if name not in self.settled)
        return replace(self, settled=(*self.settled, *fresh)[-MAX_SETTLED:])

    def restarts_in_window(self, now: float, window: float) -> int:
        return sum(at > now - window for at in self.restarts)

    @property
    def open_incidents(self) -> tuple[Incident, ...]:
        return tuple(incident for incident in self.incidents if incident.outcome is None)

    def sweep(self, written: frozenset[str]) -> State:
        """Without the incidents that are over and written into the cluster."""
        kept = tuple(i for i in self.incidents if i.outcome is None or i.name not in written)
        return self if kept == self.incidents else replace(self, incidents=kept)

    @property
    def finished_for_good(self) -> bool:
        return bool(self.completed_at or self.failed_reason)


@dataclass(frozen=True)
class Draft:
    """Plan and bookkeeping as they are to be written."""

    plan: Plan
    state: State

    def with_plan(self, **changes: Any) -> Draft:
        """Changes of the plan, with the next version."""
        return replace(self, plan=replace(self.plan, **{"version": self.plan.version + 1, **changes}))

    def with_state(self, **changes: Any) -> Draft:
        return replace(self, state=replace(self.state, **changes))

    def to_data(self) -> dict[str, str]:
        """Of the job's ConfigMap."""
        state = to_json(self.state, {})
        # A ConfigMap holds 1 MiB: thousands of workers must not spend it on what they do not say.
        state["workers"] = [_without_defaults(worker) for worker in state["workers"]]
        return {
            "plan.json": json.dumps(self.plan.to_json(), separators=(",", ":")),
            "state.json": json.dumps(state, separators=(",", ":")),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> Self:
        """Raises InputError."""
        try:
            plan = Plan.from_json(json.loads(data["plan.json"]))
            return cls(plan, from_json(State, json.loads(data["state.json"]), "state.json", {}))
        except (KeyError, ValueError) as error:
            raise InputError(
                f"the plan's ConfigMap cannot be read ({error!r}); delete it to have it made anew"
            ) from error

    @classmethod
    def without_steering(cls, data: Mapping[str, str]) -> Self:
        """As `from_data`, but for what can be steered live: mode and shares are those that a new job has.

        For a plan that this operator cannot read and has never known otherwise. Raises InputError.
        """
        try:
            plan = {name: value for name, value in json.loads(data["plan.json"]).items() if name not in _STEERING}
        except (KeyError, AttributeError, ValueError) as error:
            raise InputError(f"the plan is not JSON ({error!r}); delete its ConfigMap to have it made anew") from error
        return cls.from_data({**data, "plan.json": json.dumps(plan)})


_STEERING = ("sync_mode", "sync_every", "sync_seconds", "shares", "garbage_every", "sequence_cost")


def _without_defaults(worker: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in worker.items() if value is not False and value != ""}

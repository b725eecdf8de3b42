"""The operator's own bookkeeping of a job, kept beside the plan so that one write changes both.

All of it is a value: a pass over a job makes a new State and writes it by compare-and-swap, or nothing. An operator
that dies between any two lines finds here everything that it had promised. `ledger` says how it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pacekeeper_analysis.adapt import Hysteresis, Bottleneck
from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.diagnose.link_probe import LinkProbeVerdict as ProbeVerdict
from pacekeeper_analysis.diagnose.links import SpotKind
from pacekeeper_analysis.diagnose.repetition import RepeatedFailure
from pacekeeper_analysis.plan import Plan, SyncMode
from pacekeeper_analysis.price import AccumulatedLoss

from .api import IncidentCause, IncidentClass, RemediationMode, IncidentOutcome, RemedyPrice, Restart, QuarantineVerdict, Witness

MAX_SETTLED_FAULTS, MAX_SETTLED_FAULTS_PER_WORKER = 4000, 2
"""So many in all, or for each worker where that is more: all that one event brings about, and what came before. A name
that is forgotten too early is news again."""
MAX_PAST_INCIDENTS = 100
MAX_CURRENT_INCIDENTS, MAX_INCIDENTS_WITH_EVIDENCE = 100, 16
"""Incidents that are kept until they are written into the cluster, and how many of them keep their evidence until then:
where Incidents cannot be written for long, the bookkeeping must not grow with them."""
MAX_LINK_VERDICTS = 16
MAX_ROUTE_OBSERVATIONS, MAX_ROUTE_CHANGES, MAX_FAILED_ROUTES = 128, 128, 128
SYNC_MODE_COOL_DOWN_SECONDS = 15.0
"""So long a mode, or a smaller number of workers, stays at least; longer where changes follow each other."""
MAX_GROWTH_COOL_DOWN_SECONDS = 120.0
"""So long a job trains with fewer at most, beside workers that are warm."""


@dataclass(frozen=True)
class WorkerRecord:
    """A pod that the job has or shall have. Its name is reserved here before it is created, and never used again."""

    name: str
    ordinal: int
    incarnation: int
    uid: str = ""  # "": not known to have been created
    node: str = ""
    leaving: str = ""  # why it is given up; "": it stays
    dead: bool = False  # does not train any more: nobody waits for its checkpoint
    force: bool = False  # its node is lost: deleted without waiting for the kubelet
    patient: bool = False  # nothing forces it out: it stays until the checkpoint that was asked for is there
    starting_since: float = 0.0  # when its trainer's container was first seen to run; 0: it does not, or is warm


@dataclass(frozen=True)
class Lifecycle:
    """The job as a whole: begun, trained, ended. Times are seconds since the epoch; 0: not yet."""

    start_time: float = 0.0  # when the operator took the job up, or it was resumed
    training_since: float = 0.0  # first step of the job
    paced_since: float = 0.0  # first step since it began, or was resumed: what its pace is counted from
    paced_step: int = 0  # that it went on from then
    finished: tuple[str, ...] = ()  # workers whose trainer ended well
    completed_at: float = 0.0
    failed_reason: str = ""
    failed_message: str = ""
    stopped_at: float = 0.0  # when the ranks were told to leave (suspend, finish)
    misdated: bool = False  # the clock was wrong after the job had ended: `stopped_at` is set again once it is right
    apart: bool = False  # on its claim it has a folder of its own; False: an operator without these began it

    @cached_property
    def finished_names(self) -> frozenset[str]:
        return frozenset(self.finished)

    @property
    def is_over(self) -> bool:
        """It has ended for good."""
        return bool(self.completed_at or self.failed_reason)


@dataclass(frozen=True)
class Placement:
    """Who the job's workers are, and how getting them goes."""

    workers: tuple[WorkerRecord, ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)  # ordinal → highest incarnation ever reserved
    template_accepted: int = -1  # generation of the job whose template the API server accepts
    template_rejected: int = -1  # the last one whose template it does not
    rejection: str = ""  # in its words
    placing_since: float = 0.0  # beginning of the present attempt to place all workers; 0: none under way
    attempts: int = 0  # at placing all workers that have failed since the job last trained
    retry_at: float = 0.0
    round_seen: int = 0  # highest round of the job that the operator has heard of
    vacant_since: float = 0.0  # since when a rank has no worker; 0: none
    checkpoint_asked_at: float = 0.0
    failed_starts: int = 0  # workers in a row whose trainer ended before it was ready
    refused: int = 0  # pods in a row that their kubelets have not begun
    refused_until: float = 0.0  # until then no more are made
    gated: bool = False  # some pod is not to be scheduled yet: the time for placing does not run
    start_seconds: float = 0.0  # from a pod's creation until its worker was warm, as measured last; 0: not yet
    begun_at: float = 0.0  # when the present membership was decided; 0: not known
    # When workers may be taken in again after the job has gone on with fewer.
    growth: Hysteresis = field(default_factory=lambda: Hysteresis(SYNC_MODE_COOL_DOWN_SECONDS, MAX_GROWTH_COOL_DOWN_SECONDS))

    def find_worker(self, name: str) -> WorkerRecord | None:
        return self._workers_by_name.get(name)

    @cached_property
    def _workers_by_name(self) -> Mapping[str, WorkerRecord]:
        return {worker.name: worker for worker in reversed(self.workers)}


@dataclass(frozen=True)
class RestartBudget:
    """What faults have cost: restarts that count, rounds that led nowhere, time."""

    restarts: tuple[float, ...] = ()  # times of the restarts that count, within the window
    total: int = 0
    in_membership: int = 0  # of them, those that the launchers made in the present membership
    barren_round: int = 0  # last round that failed without a completed step; 0: a later one has completed some
    barren_error: str = ""
    barren_worker: str = ""  # on which it failed
    repetition: RepeatedFailure = field(default_factory=RepeatedFailure)  # of ends at the same step
    backoffs: int = 0  # waits in a row before another round, since no round completes a step; 0: rounds begin at once
    next_round_at: float = 0.0  # seconds since the epoch; while `backoffs` is not 0, no round begins before
    lost_seconds: float = 0.0  # to incidents that are closed
    restart_seconds: float = 0.0  # that a round of this job takes from decision to first step, as measured last
    exchange_seconds: float = 0.0  # the same of a round with a spare

    @property
    def round_seconds(self) -> float:
        """What a round takes, by those with a spare where there were no others; 0: none was measured."""
        return self.restart_seconds or self.exchange_seconds

    def count_restarts_within(self, now: float, window: float) -> int:
        """Restarts that count in the last `window` seconds."""
        return sum(at > now - window for at in self.restarts)

    def find_next_restart_time(self, limit: int, now: float, window: float) -> float:
        """Return when fewer than `limit` (≥ 1) restarts count, in seconds since the epoch; `now` where they do."""
        counting = sorted(at for at in self.restarts if at > now - window)
        return counting[-limit] + window if len(counting) >= limit else now


@dataclass(frozen=True)
class StragglerInvestigation:
    """A straggler that is being looked into."""

    since: float
    step_seconds: float = 0.0  # of the job at that time; 0: not known
    step: int = -1  # the last one at that time
    request: str = ""  # evidence request that is out
    asked_at: float = 0.0
    asked_step: int = -1  # the last one at that time
    asked_pace: float = 0.0  # of the slowest rank at that time, by the figures; 0: not known
    shown: Bottleneck | None = None  # by the answer before
    clear_at: float = 0.0  # when an answer last showed no trouble; 0: none has

    @property
    def first_sign(self) -> float:
        """Of the trouble that the last answers show."""
        return max(self.since, self.clear_at)


@dataclass(frozen=True)
class FruitlessInvestigation:
    """A look into what the metrics suspected that found nothing to be done: not repeated before something changes."""

    at: float
    hold: float  # seconds
    step_seconds: float  # of the job at that time, or since that trouble is over
    forbidden: bool = False  # something was to be done, but was only recommended


@dataclass(frozen=True)
class LocalSgdChoice:
    """A Local-SGD mode that the operator has chosen, until what led to it is over."""

    since: float
    trouble: Bottleneck
    reason: str
    incident: str
    asked_at: float = 0.0  # when the ranks were last asked whether it is over
    over: int = 0  # so many answers in a row said that it is
    over_since: int = 0  # the step at the first of them


@dataclass(frozen=True)
class LinkCheck:
    """What the job's connections showed, and the probe of the hottest place. Ranks: -1, none."""

    at: float
    request: str  # evidence request that told it
    kind: SpotKind | None = None  # of the hottest place; None: none is hot
    source: int = -1
    destination: int = -1
    hot: tuple[str, ...] = ()  # all hot places, for people, hottest first
    known: bool = False  # enough connections could be told apart to be compared
    sides: tuple[LinkSide, ...] = ()  # slowest ones
    bytes_per_second: float = 0.0  # of the hottest place while it was busy; 0: none is hot
    incident: str = ""  # for which it is, or was, probed
    probe: str = ""  # that is out; "": none
    probed_at: float = 0.0


@dataclass(frozen=True)
class LinkSide:
    """All that a rank sends, or receives: its time for a byte over the usual."""

    rank: int
    sends: bool
    ratio: float


@dataclass(frozen=True)
class LinkVerdict:
    """What a probe of a link came to."""

    at: float
    verdict: ProbeVerdict
    worker: str = ""  # whose side is slow
    node: str = ""


@dataclass(frozen=True)
class RouteObservation:
    """What one of the job's flows has shown of the planned way that it took."""

    at: float
    source: str  # leaf that it leaves
    spine: str
    destination: str  # leaf that it comes to
    sender: str  # node
    receiver: str  # node
    ratio: float = 1.0  # its time for a byte over the usual, beside what its way is shared by plan; 0: nothing passes

    @property
    def flow(self) -> tuple[str, ...]:
        """On its way: the same in all that is said of it."""
        return self.sender, self.receiver, self.source, self.spine, self.destination


@dataclass(frozen=True)
class RouteChange:
    """Another way for what one rank sends to another, by a round that was begun for it. A spine "" with draw 0: the
    network chose."""

    source: int
    destination: int
    spine_before: str = ""
    draw_before: int = 0
    spine: str = ""
    draw: int = 0
    bytes_per_second: float = 0.0  # of its connections before, while they were busy; 0: not known


@dataclass(frozen=True)
class RouteTrial:
    """Ways that a round was begun for, until it is known what they are worth."""

    incident: str  # "": they are those of before, put back, and nothing is to be found out
    membership: int  # that goes by them
    step_seconds: float  # of the job before
    sync_mode: SyncMode = SyncMode.SYNC  # in which they were taken
    changes: tuple[RouteChange, ...] = ()  # (): more than are kept, so there is no way back
    since: float = 0.0  # the first step by them; 0: it has not come
    slower: float = 0.0  # steps by them over those before, once that is known; 0: it is not

    @property
    def has_rates(self) -> bool:
        """Of some of the connections, before."""
        return any(change.bytes_per_second for change in self.changes)


@dataclass(frozen=True)
class FailedRoute:
    """What was no better: it is not tried again for a while."""

    at: float
    source: int
    destination: int
    spine: str = ""
    draw: int = 0


@dataclass(frozen=True)
class Adaptation:
    """How the job has come to train as it does, and what has been tried in vain."""

    suspicion: StragglerInvestigation | None = None
    loss: AccumulatedLoss | None = None  # to ranks that are slow in their own work, since the first of them was seen
    vain: FruitlessInvestigation | None = None
    link: LinkCheck | None = None
    link_verdicts: tuple[LinkVerdict, ...] = ()  # oldest first
    ways_seen: tuple[RouteObservation, ...] = ()  # the newest word of each flow and way, oldest first
    ways_asked_at: float = 0.0  # when the connections were last asked for, before a round for other ways
    way_trial: RouteTrial | None = None
    ways_tried: tuple[FailedRoute, ...] = ()  # oldest first
    local_sgd: LocalSgdChoice | None = None  # None: mode Sync, or the mode that the job's spec wants
    mode_changes: Hysteresis = field(default_factory=lambda: Hysteresis(first=SYNC_MODE_COOL_DOWN_SECONDS))
    mode_reason: str = ""  # of the last change of mode
    mode_refusal: str = ""  # the ranks' words when they could not follow a Local-SGD mode
    shares_refusal: str = ""  # the same of shares, by the present members
    tolerated_pace: float = 0.0  # slowest rank's time a sample over its peers' that has been dealt with; 0: none
    tolerated_behind: float = 0.0  # the slowest rank's own work that goes with it, as of `Metrics.behind`

    def accumulate_loss(self, now: float, slowdown: float, since: float) -> AccumulatedLoss:
        """To slow ranks, which are seen to cost `slowdown` now, and first showed that `since`."""
        loss = self.loss or AccumulatedLoss(0.0, since, slowdown)
        return loss.continue_at(max(loss.at, min(since, now)), loss.slowdown).observe(now, slowdown)


@dataclass(frozen=True)
class GpuReadings:
    """What the GPUs of the job's nodes showed when they were looked at."""

    nodes: tuple[str, ...] = ()  # whose counters have been looked at
    values: Mapping[str, float] = field(default_factory=dict)  # "<node>/<gpu>/<metric>" → last value seen


@dataclass(frozen=True)
class AvoidedNode:
    """A node that failed the job's preflight."""

    node: str
    at: float
    why: str
    attempts: int = 0  # at placing the job, of those that had failed by then
    tolerated: bool = False  # there was no room without it


@dataclass(frozen=True)
class Preflight:
    """How looking at the nodes goes."""

    began: float = 0.0  # since when nodes are looked at that no verdict is known of; 0: there are none
    avoided: tuple[AvoidedNode, ...] = ()


@dataclass(frozen=True)
class Incident:
    """An open incident. Times are seconds since the epoch; what `api.IncidentStatus` says is made from it."""

    name: str
    cause: IncidentCause
    class_: IncidentClass
    round: int  # in which it happened
    message: str
    first_sign: float
    detected: float
    decided: float
    mode: RemediationMode = RemediationMode.ACT
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
    restart: Restart | None = None
    slowdown_before: float | None = None
    slowdown_after: float | None = None
    reference_seconds: float | None = None  # a step without this trouble, as the evidence says
    predicted_after: float | None = None  # what its remedy was expected to leave of the slowdown
    predicted_gain: float | None = None
    measured_gain: float | None = None
    outcome: IncidentOutcome | None = None
    live: bool = False  # its remedy changes no round: it is judged by the step time
    finding: Finding | None = None  # the diagnosis, which may become better while the incident is open
    quarantine: str = ""  # what has become of the node, for people
    verdict: QuarantineVerdict | None = None  # the same, for decisions
    shown: str = ""  # what its remedy has shown, for people; "": the figures say all


@dataclass(frozen=True)
class PastIncident:
    """What is remembered of a closed incident, to tell a repetition from a first time."""

    cause: IncidentCause
    at: float
    seconds: float  # from first sign to recovery
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    class_: IncidentClass = IncidentClass.UNKNOWN


NodeKey = tuple[str, str]
"""An incident, and a node that it blames: it may blame several."""


@dataclass(frozen=True)
class QuarantineRequest:
    """A quarantine that has been decided, and is asked for once the decision is written."""

    node: str
    uid: str
    reason: str
    incident: str
    witness: Witness = Witness.NONE
    weak: bool = False  # alone no reason to look at the node
    at: float = 0.0  # when it was decided, seconds since the epoch
    raised: bool = False  # it has stood in a NodeQuarantine: once that is gone, it is not asked for again

    @property
    def node_key(self) -> NodeKey:
        return self.incident, self.node


@dataclass(frozen=True)
class Incidents:
    """What has happened: open, over, and what was dealt with."""

    current: tuple[Incident, ...] = ()  # open ones, and those whose outcome is not written into the cluster yet
    closed: tuple[str, ...] = ()  # names of incidents that are over
    recommended: tuple[str, ...] = ()  # names of incidents about which nothing was done, in mode Recommend
    past: tuple[PastIncident, ...] = ()
    settled: tuple[str, ...] = ()  # names of faults that have been dealt with
    quarantines: tuple[QuarantineRequest, ...] = ()

    @cached_property
    def settled_names(self) -> frozenset[str]:
        return frozenset(self.settled)

    @property
    def open(self) -> tuple[Incident, ...]:
        return tuple(incident for incident in self.current if incident.outcome is None)

    def find(self, name: str) -> Incident | None:
        return next((incident for incident in self.current if incident.name == name), None)

    def list_names(self) -> tuple[str, ...]:
        """Of all incidents that are remembered."""
        return (*self.closed, *self.recommended, *(incident.name for incident in self.current))

    def sweep(self, written: frozenset[str]) -> Incidents:
        """Without the incidents that are over, written into the cluster, and blame no node any more."""
        blaming = {wanted.incident for wanted in self.quarantines}
        kept = tuple(i for i in self.current if i.outcome is None or i.name not in written or i.name in blaming)
        return self if kept == self.current else replace(self, current=kept)


@dataclass(frozen=True)
class Profiling:
    """Behaviour windows: the one that is out, and what has been looked into."""

    incident: str = ""  # for which the window is; "": for none that was open
    round: int = 0  # in which it was asked for
    asked_at: float = 0.0
    until: float = 0.0  # so long answers are waited for
    reason: str = ""  # for people
    asked: tuple[float, ...] = ()  # when windows were asked for within the last hour, by the operator's own choice
    looked_into: tuple[str, ...] = ()  # incidents, the newest last
    uniform: float = 1.0  # how slow all ranks were when that was looked into
    answered: str = ""  # the annotation that was followed last
    shown: str = ""  # the last window that has told something
    shown_in: str = ""  # the incident that tells it


@dataclass(frozen=True)
class State:
    """All that the operator remembers of a job, by what it is about."""

    life: Lifecycle = field(default_factory=Lifecycle)
    placement: Placement = field(default_factory=Placement)
    budget: RestartBudget = field(default_factory=RestartBudget)
    adaptation: Adaptation = field(default_factory=Adaptation)
    gpus: GpuReadings = field(default_factory=GpuReadings)
    incidents: Incidents = field(default_factory=Incidents)
    preflight: Preflight = field(default_factory=Preflight)
    profiling: Profiling = field(default_factory=Profiling)


@dataclass(frozen=True)
class DesiredState:
    """Plan and bookkeeping as they are to be written."""

    plan: Plan
    state: State = field(default_factory=State)

    def with_plan(self, **changes: Any) -> DesiredState:
        """Changes of the plan, with the next version."""
        return replace(self, plan=replace(self.plan, **{"version": self.plan.version + 1, **changes}))

    def with_lifecycle(self, **changes: Any) -> DesiredState:
        return self._with_state(life=replace(self.state.life, **changes))

    def with_placement(self, **changes: Any) -> DesiredState:
        return self._with_state(placement=replace(self.state.placement, **changes))

    def with_budget(self, **changes: Any) -> DesiredState:
        return self._with_state(budget=replace(self.state.budget, **changes))

    def with_adaptation(self, **changes: Any) -> DesiredState:
        return self._with_state(adaptation=replace(self.state.adaptation, **changes))

    def with_gpus(self, **changes: Any) -> DesiredState:
        return self._with_state(gpus=replace(self.state.gpus, **changes))

    def with_incidents(self, **changes: Any) -> DesiredState:
        return self._with_state(incidents=replace(self.state.incidents, **changes))

    def with_profiling(self, **changes: Any) -> DesiredState:
        return self._with_state(profiling=replace(self.state.profiling, **changes))

    def with_preflight(self, **changes: Any) -> DesiredState:
        return self._with_state(preflight=replace(self.state.preflight, **changes))

    def with_worker(self, changed: WorkerRecord) -> DesiredState:
        """`changed` in the place of the worker of its name."""
        return self.with_workers([changed])

    def with_workers(self, changed: Iterable[WorkerRecord]) -> DesiredState:
        """Each in the place of the worker of its name: of many at once, which costs no more than of one."""
        by_name = {worker.name: worker for worker in changed}
        workers = self.state.placement.workers
        return self.with_placement(workers=tuple(by_name.get(w.name, w) for w in workers)) if by_name else self

    def with_incident(self, changed: Incident) -> DesiredState:
        """`changed` in the place of the incident of its name, or added."""
        others = [incident for incident in self.state.incidents.current if incident.name != changed.name]
        return self.with_incidents(current=_bound_incidents([*others, changed]))

    def settle_faults(self, names: tuple[str, ...]) -> DesiredState:
        """The faults of these names have been dealt with."""
        incidents = self.state.incidents
        fresh = tuple(name for name in dict.fromkeys(names) if name not in incidents.settled_names)
        most = max(MAX_SETTLED_FAULTS, MAX_SETTLED_FAULTS_PER_WORKER * len(self.state.placement.workers))
        return self.with_incidents(settled=(*incidents.settled, *fresh)[-most:]) if fresh else self

    def count_restart(self, at: float) -> DesiredState:
        """A restart that counts against the job's budget."""
        budget = self.state.budget
        return self.with_budget(restarts=(*budget.restarts, at), total=budget.total + 1)

    def _with_state(self, **owners: Any) -> DesiredState:
        return replace(self, state=replace(self.state, **owners))


def _bound_incidents(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """The newest are kept whole; of older ones the evidence goes first, and those that are over go before open ones."""
    surplus = max(0, len(incidents) - MAX_CURRENT_INCIDENTS)
    over = [incident.name for incident in incidents if incident.outcome is not None][:surplus]
    kept = [incident for incident in incidents if incident.name not in over]
    silent = (replace(incident, evidence=()) if incident.evidence else incident for incident in kept[:-MAX_INCIDENTS_WITH_EVIDENCE])
    return (*silent, *kept[-MAX_INCIDENTS_WITH_EVIDENCE:])

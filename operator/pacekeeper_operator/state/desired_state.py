"""The desired state of a job: the plan, the operator's bookkeeping next to it, and the open requests to the ranks.

All of it is a value. A pass over a job builds a new one. It writes plan and bookkeeping by one compare-and-swap, or
writes nothing. An operator that dies at any point finds there all that it has committed to. `state_codec` is the
format. The requests are not written (`job_requests`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pacekeeper_analysis.failures.finding import Finding
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict as ProbeVerdict
from pacekeeper_analysis.protocol.plan import Plan, SyncMode
from pacekeeper_analysis.stragglers.mode_changes import SYNC_MODE_COOL_DOWN_SECONDS
from pacekeeper_analysis.stragglers.price import AccumulatedLoss
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Hysteresis
from pacekeeper_analysis.stragglers.windows import StepTimeSample

from ..api.incident import IncidentCause, IncidentClass, IncidentOutcome, RemedyPrice, Restart
from ..api.node_quarantine import QuarantineVerdict, Witness
from ..api.training_job import RemediationMode
from .job_requests import JobRequests
from .restart_estimates import RestartMeasurements

MAX_SETTLED_FAULTS, MAX_SETTLED_FAULTS_PER_WORKER = 4000, 2
"""Settled faults that are remembered: this many in all, or for each worker where that is more.

They cover all that one event causes, and what came before. A fault whose name is forgotten too early counts as new.
"""
MAX_PAST_INCIDENTS = 100
MAX_CURRENT_INCIDENTS, MAX_INCIDENTS_WITH_EVIDENCE = 100, 16
"""Limits of the incidents that are remembered until they are written, and of those that keep their evidence.

Where Incidents cannot be written for long, the bookkeeping must not grow with them.
"""
MAX_LINK_VERDICTS = 16
MAX_ROUTE_OBSERVATIONS, MAX_ROUTE_CHANGES, MAX_FAILED_ROUTES = 128, 128, 128
MAX_GROWTH_COOL_DOWN_SECONDS = 120.0
"""Longest time that a job trains with fewer workers while others are warm."""


@dataclass(frozen=True)
class WorkerRecord:
    """A pod that the job has or is to have. Its name is reserved here before it is created, and never used again."""

    name: str
    ordinal: int
    incarnation: int
    uid: str = ""  # "": not known to have been created
    node: str = ""
    leaving: str = ""  # why it is given up; "": it stays
    dead: bool = False  # it no longer trains: its checkpoint is not awaited
    force: bool = False  # its node is lost: deleted without waiting for the kubelet
    waits_for_checkpoint: bool = False  # nothing forces it out: it stays until the requested checkpoint is published
    starting_since: float | None = None  # when its trainer's container first ran; None: not running, or warm


@dataclass(frozen=True)
class Lifecycle:
    """The job as a whole: begun, trained, ended. Times are seconds since the epoch; None: not yet."""

    start_time: float | None = None  # when the operator started or resumed the job
    training_since: float | None = None  # first step of the job
    progress_since: float | None = None  # first step since it started or resumed; progress is measured from there
    progress_step: int = 0  # the step at that time
    earlier_step: int | None = None  # completed before the present round began, at least; None: none is known
    finished: tuple[str, ...] = ()  # workers whose trainer succeeded
    completed_at: float | None = None
    failed_reason: str = ""
    failed_message: str = ""
    stopped_at: float | None = None  # when the ranks were directed to leave (suspend, finish)
    misdated: bool = False  # the clock was wrong after the job had ended: `stopped_at` is set again once it is right

    @cached_property
    def finished_names(self) -> frozenset[str]:
        return frozenset(self.finished)

    @property
    def has_trained(self) -> bool:
        """Whether the job has completed a step in any round, so that its script and its image can train."""
        return self.training_since is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.completed_at is not None or bool(self.failed_reason)


@dataclass(frozen=True)
class Placement:
    """The job's workers, and the state of placing them."""

    workers: tuple[WorkerRecord, ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)  # ordinal → highest incarnation ever reserved
    template_accepted: int | None = None  # generation of the job whose template the API server accepts
    template_rejected: int | None = None  # the last generation whose template it rejects
    rejection: str = ""  # its message
    placing_since: float | None = None  # beginning of the present attempt to place all workers; None: not under way
    attempts: int = 0  # failed attempts to place all workers since the job last trained
    retry_at: float | None = None
    highest_round: int = 0  # highest round of the job that has been reported to the operator
    vacant_since: float | None = None  # since when a rank has no worker; None: all have one
    checkpoint_requested_at: float | None = None
    failed_starts: int = 0  # workers in a row whose trainer ended before it was ready
    refused_pods: int = 0  # pods in a row that their kubelets have refused
    refused_until: float | None = None  # until then no more are created
    scheduling_gated: bool = False  # some pod has a scheduling gate: the scheduling timeout does not run
    start_seconds: float | None = None  # from a pod's creation until its worker was warm, as measured last
    begun_at: float | None = None  # when the present membership was decided
    # When workers may join again after the job has gone on with fewer.
    growth: Hysteresis = field(
        default_factory=lambda: Hysteresis(SYNC_MODE_COOL_DOWN_SECONDS, MAX_GROWTH_COOL_DOWN_SECONDS)
    )

    def find_worker(self, name: str) -> WorkerRecord | None:
        return self._workers_by_name.get(name)

    @cached_property
    def _workers_by_name(self) -> Mapping[str, WorkerRecord]:
        return {worker.name: worker for worker in reversed(self.workers)}


@dataclass(frozen=True)
class RestartBudget:
    """The cost of faults: restarts that count, no-progress rounds, time."""

    restarts: tuple[float, ...] = ()  # times of the restarts that count, within the window
    total_restarts: int = 0
    membership_restarts: int = 0  # those of them that the launchers made in the present membership
    no_progress_round: int | None = None  # last round that failed without a step; None: a later one has completed some
    no_progress_error: str = ""
    no_progress_worker: str = ""  # on which it failed
    repetition: RepeatedFailure = field(default_factory=RepeatedFailure)  # of ends at the same step
    backoffs: int = 0  # waits in a row before another round, since no round completes a step; 0: rounds begin at once
    next_round_at: float | None = None  # seconds since the epoch; while `backoffs` is not 0, no round begins before
    lost_seconds: float = 0.0  # by incidents that are closed
    measurements: RestartMeasurements = field(default_factory=RestartMeasurements)  # of the last restarts

    def count_restarts_within(self, now: float, window: float) -> int:
        """Return the number of restarts that count in the last `window` seconds."""
        return sum(at > now - window for at in self.restarts)

    def find_next_restart_time(self, limit: int, now: float, window: float) -> float:
        """Return when fewer than `limit` (≥ 1) restarts count, in seconds since the epoch; `now` if they do."""
        counting = sorted(at for at in self.restarts if at > now - window)
        return counting[-limit] + window if len(counting) >= limit else now


@dataclass(frozen=True)
class StragglerInvestigation:
    """A straggler under investigation."""

    since: float
    step_seconds: float | None = None  # of the job at that time; None: not known
    step: int | None = None  # the last completed one at that time
    last_bottleneck: Bottleneck | None = None  # bottleneck of the previous answer
    last_clear_at: float | None = None
    """When an answer last showed no bottleneck, as of the last change of `last_bottleneck`; None: none has."""


@dataclass(frozen=True)
class FruitlessInvestigation:
    """An investigation that found nothing to do. It is not repeated before something changes (a negative cache)."""

    at: float
    cool_down_seconds: float  # seconds
    step_seconds: float | None  # of the job at that time, or since that bottleneck is over; None: not known
    forbidden: bool = False  # a remedy was found, but was only recommended


@dataclass(frozen=True)
class LocalSgdChoice:
    """A Local-SGD mode that the operator has chosen, until its reason is over."""

    since: float
    bottleneck: Bottleneck
    reason: str
    incident: str


@dataclass(frozen=True)
class LinkVerdict:
    """The result of a link probe."""

    at: float
    verdict: ProbeVerdict
    worker: str = ""  # the one whose side is slow
    node: str = ""


@dataclass(frozen=True)
class RouteObservation:
    """What one of the job's flows has shown of the planned route that it took."""

    at: float
    source: str  # leaf that it leaves
    spine: str
    destination: str  # leaf that it comes to
    sender: str  # node
    receiver: str  # node
    ratio: float = 1.0  # its time per byte over the usual, corrected for planned sharing; 0: nothing passes

    @property
    def flow(self) -> tuple[str, ...]:
        """The flow and its route: the identity of all observations of it."""
        return self.sender, self.receiver, self.source, self.spine, self.destination


@dataclass(frozen=True)
class RouteChange:
    """Another route for what one rank sends to another, for which a round was begun.

    An empty spine with draw 0 means that the network chose.
    """

    source: int
    destination: int
    spine_before: str = ""
    draw_before: int = 0
    spine: str = ""
    draw: int = 0
    bytes_per_second: float | None = None  # of its connections before, while they were busy; None: not known


@dataclass(frozen=True)
class RouteTrial:
    """Routes for which a round was begun, until their value is known."""

    incident: str  # "": they are the earlier routes, restored, and there is nothing to measure
    membership: int  # that takes these routes
    step_seconds: float | None  # of the job before; None: not known
    sync_mode: SyncMode = SyncMode.SYNC  # the mode at that time
    changes: tuple[RouteChange, ...] = ()  # (): more than are remembered, so they cannot be reverted
    since: float | None = None  # the first step by these routes; None: not completed yet
    slowdown: float | None = None  # step time by these routes over that before; None: not known yet

    @property
    def has_rates(self) -> bool:
        """Whether the earlier throughput of some of the connections is known."""
        return any(change.bytes_per_second is not None for change in self.changes)


@dataclass(frozen=True)
class FailedRoute:
    """A route that was no better. It is not tried again for a while."""

    at: float
    source: int
    destination: int
    spine: str = ""
    draw: int = 0


@dataclass(frozen=True)
class Adaptation:
    """Why the job trains as it does, and what has been tried without result."""

    investigation: StragglerInvestigation | None = None
    loss: AccumulatedLoss | None = None  # by ranks that are slow in their own work, since the first of them was seen
    fruitless_investigation: FruitlessInvestigation | None = None
    link_verdicts: tuple[LinkVerdict, ...] = ()  # oldest first
    route_observations: tuple[RouteObservation, ...] = ()  # the newest observation of each flow and route, oldest first
    route_trial: RouteTrial | None = None
    failed_routes: tuple[FailedRoute, ...] = ()  # oldest first
    local_sgd: LocalSgdChoice | None = None  # None: mode Sync, or the mode that the job's spec wants
    mode_changes: Hysteresis = field(default_factory=lambda: Hysteresis(first=SYNC_MODE_COOL_DOWN_SECONDS))
    mode_reason: str = ""  # of the last change of mode
    mode_refusal: str = ""  # the ranks' message when they could not follow a Local-SGD mode
    shares_refusal: str = ""  # the same for shares, of the present members
    suppressed_relative_time: float | None = None  # suppressed relative step time (per sample) of the slowest rank
    suppressed_peer_slowdown: float | None = None  # the slowest rank's own work at that time, as in `JobMetrics.behind`

    def accumulate_loss(self, now: float, slowdown: float, since: float) -> AccumulatedLoss:
        """Return the loss by slow ranks, which cost `slowdown` now, and first showed that at `since`."""
        loss = self.loss or AccumulatedLoss(0.0, since, slowdown)
        return loss.continue_at(max(loss.at, min(since, now)), loss.slowdown).observe(now, slowdown)


@dataclass(frozen=True)
class GpuReadings:
    """The last GPU counters of the job's nodes."""

    nodes: tuple[str, ...] = ()  # whose counters have been read
    values: Mapping[str, float] = field(default_factory=dict)  # "<node>/<gpu>/<metric>" → last value


@dataclass(frozen=True)
class AvoidedNode:
    """A node that failed the job's preflight."""

    node: str
    at: float
    reason: str
    attempts: int = 0  # failed attempts to place the job by then
    readmitted: bool = False  # the job could not be placed without it


@dataclass(frozen=True)
class Preflight:
    """The state of the preflight checks."""

    started_at: float | None = None  # since when checks are pending; None: none are
    avoided_nodes: tuple[AvoidedNode, ...] = ()


@dataclass(frozen=True)
class Incident:
    """An open incident. Times are seconds since the epoch. `IncidentStatus` is built from it."""

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
    last_step: int | None = None  # completed when it happened
    steps_lost: int | None = None
    restart: Restart | None = None
    slowdown_before: float | None = None
    slowdown_after: float | None = None
    reference_seconds: float | None = None  # a step without this fault, as measured before, or by the evidence
    steps_before: StepTimeSample | None = None  # the step times of the evidence; None: not measured
    predicted_after: float | None = None  # slowdown that was expected to remain after the remedy
    predicted_gain: float | None = None
    measured_gain: float | None = None
    measured_cost: float | None = None  # seconds of training from the decision to the first step after the remedy
    outcome: IncidentOutcome | None = None
    live: bool = False  # its remedy begins no round: the step time shows whether it helped
    finding: Finding | None = None  # the diagnosis, which may improve while the incident is open
    quarantine_summary: str = ""  # the quarantine decision about the node, for people
    verdict: QuarantineVerdict | None = None  # the same, for decisions
    remedy_result: str = ""  # what its remedy has shown, for people; "": the metrics show it all

    @property
    def predicted_cost(self) -> float | None:
        """Seconds of training that the chosen remedy was expected to cost; None: none was chosen."""
        return next((remedy.cost_seconds for remedy in self.remedies if remedy.chosen), None)


@dataclass(frozen=True)
class PastIncident:
    """The part of a closed incident that is remembered, to recognize a repetition."""

    cause: IncidentCause
    at: float
    seconds: float  # from first sign to recovery
    rank: int | None = None
    worker: str | None = None
    node: str | None = None
    class_: IncidentClass = IncidentClass.UNKNOWN


NodeKey = tuple[str, str]
"""An incident and a node that it blames. An incident may blame several."""


@dataclass(frozen=True)
class QuarantineRequest:
    """A quarantine that has been decided. It is requested once the decision is written."""

    node: str
    uid: str
    reason: str
    incident: str
    witness: Witness = Witness.NONE
    weak: bool = False  # by itself no reason to check the node
    at: float = 0.0  # when it was decided, seconds since the epoch
    recorded: bool = False  # it has been in a NodeQuarantine: once that is gone, it is not requested again

    @property
    def node_key(self) -> NodeKey:
        return self.incident, self.node


@dataclass(frozen=True)
class Incidents:
    """The job's incidents: open, closed, and settled."""

    current: tuple[Incident, ...] = ()  # open ones, and those whose outcome is not written into the cluster yet
    closed: tuple[str, ...] = ()  # names of incidents that are over
    recommended: tuple[str, ...] = ()  # names of incidents for which a remedy was only recommended, in mode Recommend
    past: tuple[PastIncident, ...] = ()
    settled_faults: tuple[str, ...] = ()  # names of faults that have been dealt with
    quarantine_requests: tuple[QuarantineRequest, ...] = ()

    @cached_property
    def settled_names(self) -> frozenset[str]:
        return frozenset(self.settled_faults)

    @property
    def open(self) -> tuple[Incident, ...]:
        return tuple(incident for incident in self.current if incident.outcome is None)

    def find(self, name: str) -> Incident | None:
        return next((incident for incident in self.current if incident.name == name), None)

    def list_names(self) -> tuple[str, ...]:
        """Return the names of all incidents that are remembered."""
        return (*self.closed, *self.recommended, *(incident.name for incident in self.current))

    def sweep(self, written: frozenset[str]) -> Incidents:
        """Return the incidents without those that are closed, written into the cluster, and no longer blame a node."""
        blaming = {request.incident for request in self.quarantine_requests}
        remaining = tuple(
            incident
            for incident in self.current
            if incident.outcome is None or incident.name not in written or incident.name in blaming
        )
        return self if remaining == self.current else replace(self, current=remaining)


@dataclass(frozen=True)
class Profiling:
    """Profile windows that have ended, and what they have investigated."""

    round: int | None = None  # in which the last one was requested
    reason: str = ""  # for the last one, for people
    requested_times: tuple[float, ...] = ()  # times of the windows of the last hour that the operator chose to open
    investigated: tuple[str, ...] = ()  # investigated incidents, the newest last
    uniform_slowdown: float = 1.0  # slowdown of all ranks at the time of the last investigation of that
    followed_annotation: str = ""  # value of the annotation that was followed last
    reported_window: str = ""  # the last window that has shown something
    reporting_incident: str = ""  # the incident that reports it


@dataclass(frozen=True)
class WatchedRound:
    """A round of a watched job: its ranks run in the same processes. Times are seconds since the epoch."""

    round: int
    began: float
    first_step: float | None = None  # end of its first step on all ranks that are described; None: not yet
    resumed_from: int | None = None  # step; None: not known
    last_step: int | None = None  # completed at its end; None: not known, or it has not ended
    ended: float | None = None
    cause: str = ""  # of its end; "": none was observed


@dataclass(frozen=True)
class RequestedPodRestart:
    """The decision to delete a pod of a watched job, so that its controller restarts all ranks.

    It is written before the pod is deleted, and stays when it is withdrawn.
    """

    incident: str
    pod: str
    uid: str
    at: float  # seconds since the epoch
    last_step: int | None = None  # completed when the ranks stopped


@dataclass(frozen=True)
class AvoidableLoss:
    """What remedies would have kept of a watched job's training."""

    seconds: float = 0.0
    incidents: int = 0  # for which a remedy would have paid


@dataclass(frozen=True)
class WatchedProcesses:
    """The processes of a watched job's ranks, which show when a round begins, and what the rounds have lost.

    Each process is named by a digest.
    """

    present: tuple[str, ...] = ()  # of the present round, by rank; "": not seen yet
    earlier: tuple[str, ...] = ()  # the last ones that completed steps in an earlier round, by rank; "": none did
    rounds: tuple[WatchedRound, ...] = ()  # the last ones, oldest first
    restarts: tuple[RequestedPodRestart, ...] = ()  # the last ones, oldest first
    avoidable: AvoidableLoss = AvoidableLoss()  # in incidents that are over


@dataclass(frozen=True)
class State:
    """All that the operator remembers of a job, by subject."""

    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    placement: Placement = field(default_factory=Placement)
    budget: RestartBudget = field(default_factory=RestartBudget)
    adaptation: Adaptation = field(default_factory=Adaptation)
    gpus: GpuReadings = field(default_factory=GpuReadings)
    incidents: Incidents = field(default_factory=Incidents)
    preflight: Preflight = field(default_factory=Preflight)
    profiling: Profiling = field(default_factory=Profiling)
    watched: WatchedProcesses = field(default_factory=WatchedProcesses)  # of a WatchedJob


@dataclass(frozen=True)
class DesiredState:
    """The plan and the bookkeeping that are to be written, and the open requests, which are not."""

    plan: Plan
    state: State = field(default_factory=State)
    requests: JobRequests = field(default_factory=JobRequests)

    def is_stored_as(self, other: DesiredState) -> bool:
        """Return whether what is written of both is the same."""
        return self.plan == other.plan and self.state == other.state

    def with_plan(self, **changes: Any) -> DesiredState:
        """Return the state with changes of the plan, in the next version."""
        return replace(self, plan=replace(self.plan, **{"version": self.plan.version + 1, **changes}))

    def with_requests(self, **changes: Any) -> DesiredState:
        """Return the state with changes of the open requests. They raise no version."""
        return replace(self, requests=replace(self.requests, **changes))

    def with_lifecycle(self, **changes: Any) -> DesiredState:
        return self._with_state(lifecycle=replace(self.state.lifecycle, **changes))

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

    def with_watched(self, **changes: Any) -> DesiredState:
        return self._with_state(watched=replace(self.state.watched, **changes))

    def with_worker(self, changed: WorkerRecord) -> DesiredState:
        """Return the state with `changed` instead of the worker of the same name."""
        return self.with_workers([changed])

    def with_workers(self, changed: Iterable[WorkerRecord]) -> DesiredState:
        """Return the state with each record instead of the worker of the same name. Many cost no more than one."""
        by_name = {worker.name: worker for worker in changed}
        workers = self.state.placement.workers
        return self.with_placement(workers=tuple(by_name.get(w.name, w) for w in workers)) if by_name else self

    def with_incident(self, changed: Incident) -> DesiredState:
        """Return the state with `changed` instead of the incident of the same name, or in addition."""
        others = [incident for incident in self.state.incidents.current if incident.name != changed.name]
        return self.with_incidents(current=_bound_incidents([*others, changed]))

    def settle_faults(self, names: tuple[str, ...]) -> DesiredState:
        """Return the state with the faults of these names as settled."""
        incidents = self.state.incidents
        fresh = tuple(name for name in dict.fromkeys(names) if name not in incidents.settled_names)
        limit = max(MAX_SETTLED_FAULTS, MAX_SETTLED_FAULTS_PER_WORKER * len(self.state.placement.workers))
        return self.with_incidents(settled_faults=(*incidents.settled_faults, *fresh)[-limit:]) if fresh else self

    def count_restart(self, at: float) -> DesiredState:
        """Return the state with one more restart that counts against the job's budget."""
        budget = self.state.budget
        return self.with_budget(restarts=(*budget.restarts, at), total_restarts=budget.total_restarts + 1)

    def _with_state(self, **owners: Any) -> DesiredState:
        return replace(self, state=replace(self.state, **owners))


def _bound_incidents(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """Return the incidents within the limits.

    The newest stay as they are. Older ones lose their evidence first, and closed ones are dropped before open ones.
    """
    surplus = max(0, len(incidents) - MAX_CURRENT_INCIDENTS)
    dropped = [incident.name for incident in incidents if incident.outcome is not None][:surplus]
    remaining = [incident for incident in incidents if incident.name not in dropped]
    without_evidence = (
        replace(incident, evidence=()) if incident.evidence else incident
        for incident in remaining[:-MAX_INCIDENTS_WITH_EVIDENCE]
    )
    return (*without_evidence, *remaining[-MAX_INCIDENTS_WITH_EVIDENCE:])

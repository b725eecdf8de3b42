"""What the operator knows of a job at one moment: an immutable value that all decisions are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pacekeeper_analysis.behaviour.localise import Localization
from pacekeeper_analysis.diagnose.work import KnownRelativeTimes
from pacekeeper_analysis.fabric import places
from pacekeeper_analysis.fabric.order import TopologyLocation
from pacekeeper_analysis.plan import Member, Plan
from pacekeeper_analysis.reports import Evidence, FaultReport, FaultKind, Heartbeat, LauncherState

from .api import IncidentCause, ExitCodesSpec, TrainingJob, RemediationMode, Remedy, QuarantineVerdict
from .network import NetworkState
from .state import NodeKey, DesiredState, Incidents, State, WorkerRecord

RECENT_POLL_SECONDS = 5.0
"""Whoever has polled within this time is heard, and whose poll is held. It must be shorter than any silence
that counts, or somebody's last word before the operator was cut off would prove that it is not."""


@dataclass(frozen=True)
class PodView:
    """A worker's pod, as far as decisions need it."""

    name: str
    uid: str
    phase: str  # Pending, Running, Succeeded, Failed
    node: str = ""
    address: str = ""
    created_at: float = 0.0
    deleting: bool = False
    delete_by: float = 0.0  # end of its grace period; 0: not being deleted
    disruption_reason: str = ""  # reason of its DisruptionTarget condition: eviction, preemption, taint, …
    unschedulable_message: str = ""  # the scheduler's words
    exit_code: int | None = None  # of the trainer, or of `failed_init_container`; None: it has not ended
    failed_init_container: str = ""  # the init container that failed, so that the trainer never ran
    self_inflicted_reason: str = ""  # why its kubelet ended it, where the pod itself is the cause, in the kubelet's words
    exit_reason: str = ""  # OOMKilled, Error, …
    exit_message: str = ""
    finished: bool = False  # its launcher's last word: the ranks have finished
    waiting_reason: str = ""  # ErrImagePull, CreateContainerConfigError, … of any container
    waiting_message: str = ""
    waiting_container: str = ""  # whose reason that is
    job: str = ""  # by its label
    owner: str = ""  # UID of its job
    scheduling_gated: bool = False  # it is not to be scheduled yet: somebody's scheduling gates hold it (a queue's, mostly)
    started: bool = False  # its trainer's container runs
    avoided_nodes: frozenset[str] = frozenset()  # nodes that it was kept off when it was made

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or self.phase in ("Succeeded", "Failed")


FRESH_WORKER_SECONDS = 10.0
"""A worker that has been silent for longer may be gone: nobody gives it ranks."""
LAUNCHER_UNRESPONSIVE_SECONDS = 8.0
"""A launcher that has given its sidecar no sign of life for so long is taken for frozen; it gives two a second."""


@dataclass(frozen=True)
class WorkerView:
    """A worker: what was promised, what the API server says, what it says itself, what a probe says."""

    record: WorkerRecord
    pod: PodView | None = None  # None: there is no such pod
    heartbeat: Heartbeat | None = None
    silent_seconds: float = 0.0  # since it was heard last; counted from the operator's own start at the earliest
    state_seconds: float = math.inf  # since it was first heard to be in the state that it is in
    reachable: bool | None = None  # by the operator's own probe; None: there was no reason to probe
    node_reachable: bool | None = None
    seconds_since_step: float = math.inf  # since it was first heard to have completed its last step; infinity: not known

    @property
    def node(self) -> str:
        """By the API server's word; "": it has none yet."""
        return self.pod.node if self.pod is not None else self.record.node

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def alive(self) -> bool:
        """It has a pod that runs and is not going away."""
        return self.pod is not None and not self.pod.ended and not self.pod.deleting

    @property
    def usable(self) -> bool:
        """It may hold ranks, now or when it is warm."""
        return self.alive and not self.record.leaving

    @property
    def can_checkpoint(self) -> bool:
        """It can still take part in a checkpoint, even if it is to be replaced."""
        return self.pod is not None and not self.pod.ended and not self.record.dead

    @property
    def warm(self) -> bool:
        """It can take ranks at once."""
        return (
            self.usable
            and self.pod is not None
            and bool(self.pod.address)
            and self.heartbeat is not None
            and self.heartbeat.state is LauncherState.WARM
            and self.silent_seconds <= FRESH_WORKER_SECONDS
            and not self.unresponsive
        )

    @property
    def unresponsive(self) -> bool:
        """Its sidecar speaks, but its launcher has stood still for too long."""
        return self.heartbeat is not None and self.heartbeat.launcher_silent_seconds >= LAUNCHER_UNRESPONSIVE_SECONDS


@dataclass(frozen=True)
class NodeView:
    name: str
    uid: str
    ready: bool = True
    leave_reason: str = ""  # why its platform wants it empty; "": it does not
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # those that may say where it is in the network


@dataclass(frozen=True)
class GpuValue:
    """One of DCGM's counters that is not zero, or what a GPU's series show by the policy of GPU health."""

    node: str
    gpu: str
    metric: str  # of DCGM; or a gpu_health.Sign, and `value` is its figure
    value: float
    trusted: bool = False  # Prometheus' own service discovery says which node it is, not the exporter
    uuid: str = ""  # of the GPU; "": the exporter does not say
    instance: str = ""  # of MIG; "": it is the whole GPU's
    previous_value: float | None = 0.0  # what the same series was two minutes ago; None: it was not there

    @property
    def key(self) -> str:
        gpu = self.gpu or self.uuid
        return f"{self.node}/{gpu}{f':{self.instance}' if self.instance else ''}/{self.metric}"

    @property
    def gpu_key(self) -> tuple[str, str]:
        """Which GPU it is."""
        return self.node, self.gpu


PROMETHEUS_NOT_QUERIED = "Prometheus has not been asked lately"


@dataclass(frozen=True)
class PersistentSlowness:
    """Ranks that are slower than their peers by so little that it takes several windows to tell."""

    relative_times: KnownRelativeTimes
    since: float  # seconds since the epoch; of the first of them


@dataclass(frozen=True)
class JobMetrics:
    """How a job does: by what its ranks say, and by Prometheus; None: nothing is known (yet)."""

    # By the figures in its workers' heartbeats.

    slowdown: float | None = None  # S of own work: slowest rank over mean
    behind: float | None = None  # slowest rank's own work over an equal share at its peers' pace: S against them
    pace: float | None = None  # slowest rank's own work a sample over its peers' median
    step_seconds: float | None = None  # median of the ranks' means
    per_sample: float | None = None  # median of the own work a sample of all ranks but the slowest
    slowest_rank: int | None = None
    waiting: float | None = None  # share of a step in which even the rank that waits least waits
    waits_least: int | None = None  # that rank
    steps: int = 0  # that every rank's figures are of, at least, with the plan's shares; 0: some rank has others still
    throughput: float | None = None  # samples a second of the whole job; None: the script does not tell its shares
    uniform: float | None = None  # step time of the least slowed rank over that of the job's own first steady steps
    untold: tuple[str, ...] = ()  # members whose ranks' figures are not known now
    lasting: PersistentSlowness | None = None
    unsettled: bool = False  # whether it takes some more windows to know that there is none
    # By Prometheus.
    gpu: tuple[GpuValue, ...] = ()  # of all nodes
    gpu_signs: tuple[GpuValue, ...] = ()  # that GPUs of all nodes show
    gpu_unvouched: str = ""  # why GPU series are no witness against a node; "": they are
    unavailable: str = ""  # why Prometheus does not answer; "": it does
    refused: bool = False  # it is there, but does not answer us
    ranks: float | None = None  # of the job that tell of their steps
    least_step: float | None = None  # of these ranks
    scrape_age: float | None = None  # seconds since all of these ranks were scraped, when Prometheus was asked
    at: float = 0.0  # when Prometheus was asked


@dataclass(frozen=True)
class ClusterView:
    """The cluster around a job, as far as budgets need it."""

    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    network: NetworkState | None = None  # None: this operator has not looked at it yet
    leaving_since: Mapping[str, float] = field(default_factory=dict)  # of nodes that are to be empty, by name
    levels: tuple[str, ...] = ()  # labels of nodes by which a Fabric says where they are, from the leaf outward
    suspects: frozenset[str] = frozenset()  # nodes that this and other jobs hold lost or failing right now
    unreliable_nodes: tuple[str, ...] = ()  # that had Incidents of any jobs on several days, the worst first
    older_waiting_job: str = ""  # an older job that is to be placed first
    folder_owner: str = ""  # another job that writes its checkpoints where this one would, and began before
    hung_nodes: Mapping[str, int] = field(default_factory=dict)  # node → hangs on it lately, of this namespace's jobs
    hung_elsewhere: frozenset[str] = frozenset()  # nodes on which jobs of other namespaces have hung lately
    past_durations: Mapping[IncidentCause, tuple[float, ...]] = field(default_factory=dict)  # durations of earlier incidents
    reached_elsewhere: bool = False  # the operator has just heard another job's worker, or reached another node


@dataclass(frozen=True)
class QuarantineDecision:
    """What has become of a node that a job blames. The words name nobody else's job."""

    verdict: QuarantineVerdict
    message: str
    recorded: bool = False  # the job's namespace has its say in the NodeQuarantine


@dataclass(frozen=True)
class LocalizedProfile:
    """What a behaviour window has come to. `page`: what is kept of it for people, as JSON; "": it is kept."""

    window: str
    localization: Localization
    page: str = ""


@dataclass(frozen=True)
class NodeCheck:
    """What a look at a node before a job's start has found."""

    at: float  # seconds since the epoch
    passed: bool | None  # None: it could not be found out
    message: str = ""


@dataclass(frozen=True)
class TemplateVerdict:
    """The API server's word on the pods of a generation of the job."""

    generation: int
    rejection: str = ""  # in its words; "": it accepts them


@dataclass(frozen=True)
class BlockedAction:
    """Something that is wanted and could not be done so far."""

    action: str
    reason: str  # in the API server's words, mostly
    is_pod_creation: bool = False  # it is a pod that cannot be created


@dataclass(frozen=True)
class Policy:
    """What may be done: the job's own wishes under the platform's caps."""

    mode: RemediationMode
    allow: frozenset[Remedy]
    max_restarts: int
    restart_window: float
    rounds_without_progress: int = 3  # that may end at the same step; 0: without limit
    exit_codes: ExitCodesSpec = field(default_factory=ExitCodesSpec)
    paused: str = ""  # why remedies are paused in the whole cluster; "": they are not
    grace_after_start: float = 10.0
    applies_network_policy: bool = True  # each job gets a NetworkPolicy
    link_probes_per_hour: int = 2  # of one job; 0: launchers are never asked to measure their links
    profiles_per_hour: int = 2  # behaviour windows of one job; 0: by hand only

    @property
    def applies_remedies(self) -> bool:
        return self.mode is RemediationMode.ACT and not self.paused

    @property
    def applies_routine_remedies(self) -> bool:
        """Whether routine remedies are applied, also where all others are only recommended: ranks that crash restart in
        place, lost workers are replaced, as `batch/v1` and torchrun would."""
        return not self.paused

    @property
    def restraint_reason(self) -> str:
        """Why a remedy that is not routine is not applied; "": it is."""
        return "" if self.applies_remedies else "remedies are only recommended"

    def find_refusal(self, remedy: Remedy) -> str:
        """Why the remedy may not be taken; "": it may."""
        return "" if remedy in self.allow else "spec.remediation.allow does not list it"


@dataclass(frozen=True)
class Observation:
    """All of it. `now` and every time in it are seconds since the epoch."""

    now: float
    operator_age: float  # seconds since this operator began to serve: before, silence means nothing
    job: TrainingJob
    desired: DesiredState
    workers: tuple[WorkerView, ...] = ()
    faults: tuple[FaultReport, ...] = ()  # not settled yet
    evidence: tuple[Evidence, ...] = ()  # answers to the request that is out
    probes: tuple[Evidence, ...] = ()  # answers to the probe of links that is out
    metrics: JobMetrics = field(default_factory=JobMetrics)
    cluster_view: ClusterView = field(default_factory=ClusterView)
    template: TemplateVerdict | None = None  # None: the API server has not been asked lately
    quarantine_decisions: Mapping[NodeKey, QuarantineDecision] = field(default_factory=dict)  # what has become of the nodes that incidents blame
    profile_answers: int = 0  # ranks that have answered in the behaviour window that is out
    last_profile_answer_at: float = 0.0  # when the newest of their answers came
    localized_profile: LocalizedProfile | None = None  # what the last one has come to
    node_checks: Mapping[str, NodeCheck] = field(default_factory=dict)  # UID of a node → what is known of it
    stray_pods: tuple[PodView, ...] = ()  # pods of this job that no worker is known for
    blocked_actions: tuple[BlockedAction, ...] = ()
    clock_agrees: bool = True  # with the API server's; False: nothing that cannot be taken back is done by the time
    nonce: str = ""  # of this pass: what nobody can guess

    @property
    def plan(self) -> Plan:
        return self.desired.plan

    @property
    def state(self) -> State:
        return self.desired.state

    def with_desired(self, desired: DesiredState) -> Observation:
        """The same world under a changed plan: workers know their new records, what has been dealt with is gone."""
        if desired == self.desired:
            return self  # with all that it has worked out by now
        records = desired.state.placement.workers
        return self._replace_fields(
            desired=desired,
            workers=self.workers if records is self.state.placement.workers else self._update_views(records),
            faults=self._drop_settled_faults(desired.state.incidents),
            evidence=tuple(item for item in self.evidence if item.request == desired.plan.evidence_request),
            probes=tuple(item for item in self.probes if desired.plan.probe and item.request == desired.plan.probe.name),
        )

    def with_blocked_actions(self, blocked_actions: tuple[BlockedAction, ...]) -> Observation:
        """The same, with what could not be done."""
        return self._replace_fields(blocked_actions=blocked_actions)

    def _replace_fields(self, **changes: Any) -> Observation:
        """The same but for these; what has been worked out stays where nothing that it comes from has changed."""
        changed = replace(self, **changes)
        kept: list[str] = []
        if changed.workers is self.workers:
            kept += ["_workers_by_name", "places"]
            if changed.plan.members is self.plan.members:
                kept += ["members", "seated", "spares", "_beats", "sync_modes", "steps_in_round"]
                if (changed.plan.membership, changed.plan.round) == (self.plan.membership, self.plan.round):
                    kept += ["round", "training_since"]
        changed.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return changed

    def _update_views(self, records: Sequence[WorkerRecord]) -> tuple[WorkerView, ...]:
        """Called for every action of thousands at once: who has not changed is not made anew."""
        known = self._workers_by_name
        views = ((known.get(record.name), record) for record in records)
        return tuple(
            WorkerView(record) if view is None else view if view.record is record else replace(view, record=record)
            for view, record in views
        )

    def _drop_settled_faults(self, incidents: Incidents) -> tuple[FaultReport, ...]:
        """Faults that are not settled there."""
        if incidents.settled is self.state.incidents.settled or not self.faults:
            return self.faults
        return tuple(fault for fault in self.faults if fault.name not in incidents.settled_names)

    def find_worker(self, name: str) -> WorkerView | None:
        return self._workers_by_name.get(name)

    @cached_property
    def _workers_by_name(self) -> Mapping[str, WorkerView]:
        return {view.name: view for view in self.workers}

    @cached_property
    def members(self) -> tuple[WorkerView, ...]:
        """The workers of the plan's members that are still known, in rank order."""
        found = (self.find_worker(member.worker) for member in self.plan.members)
        return tuple(view for view in found if view is not None)

    @cached_property
    def _heartbeats(self) -> tuple[Heartbeat, ...]:
        """Of the members that are heard, in rank order."""
        return tuple(view.heartbeat for view in self.members if view.heartbeat is not None)

    @cached_property
    def assigned(self) -> frozenset[str]:
        """Names of workers that hold ranks by the plan."""
        return frozenset(member.worker for member in self.plan.members)

    @cached_property
    def spares(self) -> tuple[WorkerView, ...]:
        """Workers without ranks that stay, lowest ordinal first."""
        spares = (view for view in self.workers if view.name not in self.assigned and view.usable)
        return tuple(sorted(spares, key=lambda view: view.record.ordinal))

    @cached_property
    def network_places(self) -> Mapping[str, TopologyLocation]:
        """Where workers' nodes are in the network, by worker; () where that is not known."""
        nodes = self.cluster_view.nodes
        labels = {view.node: nodes[view.node].labels if view.node in nodes else {} for view in self.workers}
        of_nodes = places.locate_nodes(labels, self.cluster_view.levels)
        return {view.name: of_nodes[view.node] for view in self.workers}

    def find_member_of_rank(self, rank: int) -> Member | None:
        return next((member for member in self.plan.members if rank in member.ranks), None)

    def find_worker_of_rank(self, rank: int) -> str | None:
        member = self.find_member_of_rank(rank)
        return None if member is None else member.worker

    @cached_property
    def round(self) -> int:
        """The highest round that a member has seen in this membership; the plan's, where none has spoken."""
        membership = self.plan.membership
        return max([self.plan.round, *(beat.round for beat in self._heartbeats if beat.membership == membership)])

    @property
    def step(self) -> int:
        """The last step that some member is known to have completed; -1: none."""
        return max((beat.step for beat in self._heartbeats), default=-1)

    @cached_property
    def steps_in_round(self) -> int:
        """That every member has completed in its present round, at least; 0: none is heard."""
        return min((beat.steps_in_round for beat in self._heartbeats), default=0)

    @cached_property
    def sync_modes(self) -> frozenset[str]:
        """In which members train, by their own words."""
        return frozenset(beat.sync_mode for beat in self._heartbeats)

    @property
    def has_straggler(self) -> bool:
        """Some rank takes `detection.stragglerSlowdown` × its peers' time a sample or more, by the figures."""
        pace = self.metrics.pace
        return pace is not None and pace >= self.job.spec.detection.straggler_slowdown

    @property
    def restored_step(self) -> int:
        """That the present round started from; 0: the beginning, or not known."""
        return max([0, *(beat.restored_step for beat in self._heartbeats)])

    @property
    def total_steps(self) -> int | None:
        """That the script wants; 0: it does not say, or its ranks contradict each other. None: no rank has begun."""
        told = {beat.total_steps for beat in self._heartbeats if beat.steps_in_round > 0}
        return None if not told else told.pop() if len(told) == 1 else 0

    @property
    def has_trained(self) -> bool:
        """Whether the job has completed a step in any round: its script and its image can train."""
        return bool(self.state.life.training_since)

    @property
    def checkpoint_step(self) -> int:
        return max((beat.checkpoint_step for beat in self._heartbeats), default=-1)

    @cached_property
    def training_since(self) -> float | None:
        """When the present round's first step was complete on every member; None: not all have come so far."""
        membership, round_ = self.plan.membership, self.round
        times = [
            beat.first_step_at
            for beat in self._heartbeats
            if beat.first_step_at > 0 and beat.round == round_ and beat.membership == membership
        ]
        return max(times) if times and len(times) == len(self.plan.members) else None

    @property
    def global_batch(self) -> int:
        """Samples of a step of the whole job; 0: the script does not tell."""
        return max((beat.global_batch for beat in self._heartbeats), default=0)

    @property
    def replica_ranks(self) -> int:
        """The job trains as exactly with any multiple of so many ranks; 0: the script does not say."""
        return max((beat.replica_ranks for beat in self._heartbeats), default=0)

    @property
    def refusal(self) -> str:
        """Why ranks do not follow the newest plan, in their words; "": they do."""
        return next((beat.refused for beat in self._heartbeats if beat.refused), "")

    def select_faults(self, *kinds: FaultKind) -> tuple[FaultReport, ...]:
        """Of these kinds and the present membership, in the order in which they were noticed."""
        chosen = [f for f in self.faults if f.kind in kinds and f.membership in (0, self.plan.membership)]
        return tuple(sorted(chosen, key=lambda fault: fault.noticed_at))

    def is_younger(self, fault: FaultReport, seconds: float) -> bool:
        """Noticed less than `seconds` ago. Clocks differ: what is dated in the future says nothing about its age, and
        nobody waits for it to come true."""
        return 0.0 <= self.now - fault.noticed_at < seconds

    def clamp_time(self, at: float) -> float:
        """A moment that a worker tells, as far as this operator's own clock can confirm it: neither in the future nor
        before the last restart."""
        return min(max([at, self.state.life.start_time, *self.state.budget.restarts[-1:]]), self.now)

    def is_budget_spent(self, policy: Policy) -> bool:
        """No further restart counts within the window."""
        return self.state.budget.count_restarts_within(self.now, policy.restart_window) >= policy.max_restarts

    @property
    def restart_seconds(self) -> float:
        """What a new round costs this job beside the lost steps; before the first was measured, what the present one
        took to its first step, and a guess at least."""
        return self.state.budget.round_seconds or max(5.0, self._round_start_seconds)

    @cached_property
    def _round_start_seconds(self) -> float:
        """From its beginning to its first step, by the member who says the least: all begin together, and nobody's word
        makes it longer. 0: not known."""
        told = [beat for beat in self._heartbeats if beat.first_step_at > beat.round_started_at > 0]
        return min((beat.first_step_at - beat.round_started_at for beat in told), default=0.0)

    @property
    def start_seconds(self) -> float:
        """What a new pod takes until it is warm: placing, images, imports; before the first was measured, a guess."""
        return self.state.placement.start_seconds or 30.0

    @property
    def step_seconds(self) -> float:
        return self.metrics.step_seconds or 0.0

    @property
    def checkpoint_age(self) -> float:
        """Seconds since the newest checkpoint that is kept; 0: not known."""
        return max(0.0, max((beat.checkpoint_age_seconds for beat in self._heartbeats), default=0.0))

    def estimate_restart_cost(self, *, snapshots: bool = True) -> float:
        """Seconds of training that a new round costs now: what was trained since the state was kept, and the restart.

        `snapshots`: those in the workers' memory are of use, because all of the workers stay. A worker that goes takes
        its part of a sharded model along, and which models are sharded nobody tells the operator.
        """
        snapshot = max((beat.snapshot_step for beat in self._heartbeats), default=-1) if snapshots else -1
        steps = self.step - max(self.checkpoint_step, snapshot, 0)
        if steps <= 0:
            return self.restart_seconds
        lost = steps * self.step_seconds
        if not lost and snapshot <= self.checkpoint_step:  # where nobody tells the time of a step
            lost = self.checkpoint_age
        return lost + self.restart_seconds


STANDSTILL_SLOWDOWN = math.inf
"""The slowdown of a job that stands still."""

"""The observation of a job at one moment: an immutable value, the input of all decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pacekeeper_analysis.fabric import locations
from pacekeeper_analysis.fabric.rank_order import TopologyLocation
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import Evidence, FaultKind, FaultReport

from ..api.training_job import TrainingJob
from .cluster_view import ClusterView, PodView, WorkerView
from .desired_state import DesiredState, Incidents, NodeKey, State, WorkerRecord
from .effect_results import (
    BlockedAction,
    LocalizedProfile,
    NodeCheck,
    PodRestartFacts,
    PodRestartRefusal,
    QuarantineDecision,
    TemplateVerdict,
)
from .job_metrics import JobMetrics
from .job_requests import JobRequests
from .policy import Policy
from .restart_estimates import RestartEstimates
from .straggler_estimate import StragglerEstimate
from .training_progress import TrainingProgress


@dataclass(frozen=True)
class Observation:
    """All that is known of a job at one moment. `now` and every time in it are seconds since the epoch."""

    now: float
    operator_age: float  # seconds since this operator began to serve; within a grace period, silence is no evidence
    job: TrainingJob
    desired: DesiredState
    workers: tuple[WorkerView, ...] = ()
    faults: tuple[FaultReport, ...] = ()  # not settled yet
    evidence: tuple[Evidence, ...] = ()  # answers to the pending evidence request
    probes: tuple[Evidence, ...] = ()  # answers to the pending link probe
    metrics: JobMetrics = field(default_factory=JobMetrics)
    cluster_view: ClusterView = field(default_factory=ClusterView)
    template: TemplateVerdict | None = None  # None: there is no recent answer of the API server
    # Decisions about the nodes that incidents blame.
    quarantine_decisions: Mapping[NodeKey, QuarantineDecision] = field(default_factory=dict)
    profile_answers: int = 0  # ranks that have answered in the pending profile window
    last_profile_answer_at: float | None = None  # when their newest answer arrived
    localized_profile: LocalizedProfile | None = None  # result of the last profile window
    node_checks: Mapping[str, NodeCheck] = field(default_factory=dict)  # UID of a node → its preflight check
    checkpoint_server: PodView | None = None  # pod of the job's checkpoint server; None: there is none
    stray_pods: tuple[PodView, ...] = ()  # other pods of this job without a worker record
    blocked_actions: tuple[BlockedAction, ...] = ()
    estimate: StragglerEstimate | None = None  # of the estimator, which decides nothing (shadow mode)
    pod_restart: PodRestartFacts | None = None  # of a watched job that hangs; None: no pod may be deleted
    pod_restart_refusal: PodRestartRefusal | None = None  # of the last deletion that was decided; None: there is none
    clock_agrees: bool = True  # with the API server's; False: nothing irreversible is done because of a time
    nonce: str = ""  # of this pass; unpredictable

    @property
    def plan(self) -> Plan:
        return self.desired.plan

    @property
    def state(self) -> State:
        return self.desired.state

    @property
    def requests(self) -> JobRequests:
        return self.desired.requests

    @cached_property
    def progress(self) -> TrainingProgress:
        """What the members report about the training."""
        plan = self.plan
        heartbeats = tuple(view.heartbeat for view in self.members if view.heartbeat is not None)
        return TrainingProgress(plan.membership, plan.round, len(plan.members), heartbeats, self.metrics.step_seconds)

    @property
    def restarts(self) -> RestartEstimates:
        """What a restart costs now."""
        return RestartEstimates(
            self.progress,
            measurements=self.state.budget.measurements,
            measured_start_seconds=self.state.placement.start_seconds,
        )

    def with_desired(self, desired: DesiredState) -> Observation:
        """Return the observation under a changed plan: workers get their new records, settled faults are dropped."""
        if desired == self.desired:
            return self  # keeps the cached properties
        records = desired.state.placement.workers
        return self._replace_fields(
            desired=desired,
            workers=self.workers if records is self.state.placement.workers else self._update_views(records),
            faults=self._drop_settled_faults(desired.state.incidents),
            evidence=tuple(item for item in self.evidence if item.request == desired.requests.evidence_name),
            probes=tuple(
                item for item in self.probes if desired.requests.probe and item.request == desired.requests.probe.name
            ),
        )

    def with_blocked_actions(self, blocked_actions: tuple[BlockedAction, ...]) -> Observation:
        """Return the observation with other blocked actions."""
        return self._replace_fields(blocked_actions=blocked_actions)

    def _replace_fields(self, **changes: Any) -> Observation:
        """Return a copy with these changes. Cached properties stay where nothing that they depend on has changed."""
        changed = replace(self, **changes)
        retained: list[str] = []
        if changed.workers is self.workers:
            retained += ["_workers_by_name", "network_places"]
            if changed.plan.members is self.plan.members:
                retained += ["members", "assigned", "spares"]
                if (changed.plan.membership, changed.plan.round) == (self.plan.membership, self.plan.round):
                    retained += ["progress"]
        changed.__dict__.update({name: self.__dict__[name] for name in retained if name in self.__dict__})
        return changed

    def _update_views(self, records: Sequence[WorkerRecord]) -> tuple[WorkerView, ...]:
        """Return the workers with these records. It runs for each action in a pass: unchanged views are reused."""
        views_by_name = self._workers_by_name
        views = ((views_by_name.get(record.name), record) for record in records)
        return tuple(
            WorkerView(record) if view is None else view if view.record is record else replace(view, record=record)
            for view, record in views
        )

    def _drop_settled_faults(self, incidents: Incidents) -> tuple[FaultReport, ...]:
        """Return the faults that are not settled in `incidents`."""
        if incidents.settled_faults is self.state.incidents.settled_faults or not self.faults:
            return self.faults
        return tuple(fault for fault in self.faults if fault.name not in incidents.settled_names)

    def find_worker(self, name: str) -> WorkerView | None:
        return self._workers_by_name.get(name)

    @cached_property
    def _workers_by_name(self) -> Mapping[str, WorkerView]:
        return {view.name: view for view in self.workers}

    @cached_property
    def members(self) -> tuple[WorkerView, ...]:
        """The workers of the plan's members that still have a record, in rank order."""
        views = (self.find_worker(member.worker) for member in self.plan.members)
        return tuple(view for view in views if view is not None)

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
        """Location of each worker's node in the network, by worker; () where that is not known."""
        nodes = self.cluster_view.nodes
        labels = {view.node: nodes[view.node].labels if view.node in nodes else {} for view in self.workers}
        node_locations = locations.locate_nodes(labels, self.cluster_view.levels)
        return {view.name: node_locations[view.node] for view in self.workers}

    def find_member_of_rank(self, rank: int) -> Member | None:
        return next((member for member in self.plan.members if rank in member.ranks), None)

    def find_worker_of_rank(self, rank: int) -> str | None:
        member = self.find_member_of_rank(rank)
        return None if member is None else member.worker

    @property
    def has_straggler(self) -> bool:
        """Whether some rank takes at least `detection.stragglerSlowdown` × its peers' time per sample."""
        relative_time = self.metrics.relative_time
        return relative_time is not None and relative_time >= self.job.spec.detection.straggler_slowdown

    def select_faults(self, *kinds: FaultKind) -> tuple[FaultReport, ...]:
        """Return the faults of these kinds in the present membership, in the order in which they were noticed."""
        chosen = [f for f in self.faults if f.kind in kinds and f.membership in (0, self.plan.membership)]
        return tuple(sorted(chosen, key=lambda fault: fault.noticed_at))

    def is_younger(self, fault: FaultReport, seconds: float) -> bool:
        """Return whether the fault was noticed less than `seconds` ago.

        Clocks differ: a time in the future is no evidence of an age, and the operator does not wait for it.
        """
        return 0.0 <= self.now - fault.noticed_at < seconds

    def clamp_time(self, at: float) -> float:
        """Return a time that a worker reports, limited to what this operator's own clock can confirm.

        It is neither in the future nor before the last restart.
        """
        start_time = self.state.lifecycle.start_time
        bounds = [at, *self.state.budget.restarts[-1:]]
        if start_time is not None:
            bounds.append(start_time)
        return min(max(bounds), self.now)

    def is_budget_spent(self, policy: Policy) -> bool:
        """Return whether the window's budget allows no further restart."""
        return self.state.budget.count_restarts_within(self.now, policy.restart_window) >= policy.max_restarts

"""The operator's own decisions upon what is seen of the job: all of `pacekeeper_operator.decide`, and nothing copied.

A pass is one of an operator that has only what the one before has written down. What it requests of the ranks is
answered by the next pass; what it writes into the plan is in force a second later.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, Heartbeat
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.stragglers import straggler
from pacekeeper_operator.observe import persistent_slowness, rank_metrics
from pacekeeper_operator.state.cluster_view import WorkerView
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy as Rules
from pacekeeper_operator.state.restart_estimates import RestartMeasurements
from testing.operators.observations import NOW, build_policy, build_training, change_heartbeat

from .draw import Scenario
from .policy_run import PASS_INTERVAL_SECONDS, USUAL_PASSES, Act, Now, PassIntervals
from .sampled_metrics import FIRST_STEP, SampledMetrics
from .world import CostModel, Setup, Spare, TrainingStrategy

TRAINED_SECONDS = 300.0
"""Before a scenario begins."""
INVESTIGATION_INTERVAL_SECONDS = 1
"""Between two passes during an investigation: as often as the clock allows."""
PAUSE_SHARE, MAX_PAUSE_SECONDS = 0.05, 10
"""Of the duration of an investigation, how much may pass between two passes; seconds at most."""
SLOWNESS_CAUSES = frozenset(
    {
        IncidentCause.STRAGGLER,
        IncidentCause.SLOW_COMMUNICATION,
        IncidentCause.VOLATILE,
        IncidentCause.GARBAGE_COLLECTION,
        IncidentCause.UNEVEN_LENGTHS,
        IncidentCause.SLOW_STEPS,
    }
)


@dataclass(frozen=True)
class OursParameters:
    """Constants that the bench may vary: those that a job's spec has."""

    straggler_excess: float = 0.1  # `spec.detection.stragglerSlowdown`, over 1


USUAL_PARAMETERS = OursParameters()
PERSISTENT_SLOWNESS = "persistent slowness"
OURS_PARTS = frozenset({PERSISTENT_SLOWNESS})
"""What can be disabled: ranks that are slightly slow in each window, as the metrics show them."""


@dataclass
class Ours:
    """A policy."""

    scenario: Scenario
    world: CostModel
    acts: list[Act] = field(default_factory=list)
    alarms: list[tuple[int, IncidentCause]] = field(default_factory=list)
    quarantines: int = 0
    failures: list[str] = field(default_factory=list)
    passes: int = 0
    questions: int = 0  # requests to all ranks
    pass_intervals: PassIntervals = USUAL_PASSES
    ablated: frozenset[str] = frozenset()
    parameters: OursParameters = USUAL_PARAMETERS
    due: int = 0
    _consecutive: int = 0
    _answered: int = 0  # checkpoint requests, by the members: those that a pass before this one has made

    def __post_init__(self) -> None:
        job = self.world.job
        base = build_training(job.workers, spares=int(job.spare is not Spare.NONE), step=FIRST_STEP)
        members = tuple(
            replace(member, ranks=tuple(range(index * job.ranks_each, (index + 1) * job.ranks_each)))
            for index, member in enumerate(base.plan.members)
        )
        desired = base.desired.with_plan(members=members)
        if self.scenario.restart_known:
            seconds = (float(job.restart_seconds),)
            desired = desired.with_budget(measurements=RestartMeasurements(same_workers=seconds, exchange=seconds))
        detection = replace(base.job.spec.detection, straggler_slowdown=1.0 + self.parameters.straggler_excess)
        spec = replace(base.job.spec, nproc_per_node=job.ranks_each, detection=detection)
        self._base = replace(base.with_desired(desired), job=replace(base.job, spec=spec))
        self._heartbeat = self._base.members[0].heartbeat or Heartbeat()
        self.desired: DesiredState = self._base.desired
        self.rules = build_policy(max_restarts=100)
        self._sight = SampledMetrics.from_scenario(self.scenario, self.world)
        self._membership, self._round_from = self.desired.plan.membership, -TRAINED_SECONDS
        self._seen_acts: set[tuple[str, str]] = set()
        self._reported: tuple[Evidence, ...] = ()
        self._relative_times = persistent_slowness.RelativeTimeHistory()

    def choose_setup(self, now: Now) -> Setup:
        end = now.second + 1
        if now.stands:
            if self._sight.pieces:  # the next round goes on from the step that this one has come to
                next_step = self._sight.first + self._sight.count_done_steps(now.second)
                self._sight = SampledMetrics.from_scenario(self.scenario, self.world, next_step)
            return now.setup
        if not self._sight.pieces and now.second:
            self._round_from = float(now.second)
        self._sight.extend(float(now.second) if now.second else self._round_from, now.setup.strategy, now.strain)
        if now.second < self.due:
            return now.setup
        observation = self._observe(now, end)
        if not self._is_calm(observation):
            self._evaluate(observation, now.second)
        is_investigating = (
            self.desired.state.adaptation.investigation is not None
            or self.desired.plan.checkpoint_request > self._answered
        )
        has_nothing_to_do = is_idle(observation.with_desired(self.desired), self.rules)
        pause = (
            self._compute_investigation_pause(end)
            if is_investigating
            else self._compute_calm_pause()
            if has_nothing_to_do
            else PASS_INTERVAL_SECONDS
        )
        self.due = now.second + pause
        return self._build_setup(now.setup)

    def _observe(self, now: Now, end: int) -> Observation:
        metrics = self._collect_metrics(end)
        observation = replace(self._base, now=NOW + end, workers=self._build_views(now, end), metrics=metrics)
        return replace(
            observation.with_desired(self.desired),
            evidence=() if metrics.unreported_members else self._collect_evidence(end),
        )

    def _build_views(self, now: Now, end: int) -> tuple[WorkerView, ...]:
        plan, sampled = self.desired.plan, self._sight
        step = sampled.first + sampled.count_done_steps(end)
        changes: dict[str, Any] = {
            "membership": plan.membership,
            "round": plan.round,
            "start": {
                "started_at": NOW + self._round_from + 1.0 - self.world.job.restart_seconds,
                "first_step_at": NOW + self._round_from + 1.0,
            },
            "progress": {"step": step, "steps_in_round": sampled.count_done_steps(end)},
            "checkpoint": {"step": step, "request": self._answered},
            "training": {"global_batch": self.world.job.batch, "sync_mode": now.setup.strategy.mode.value},
        }
        heartbeat = change_heartbeat(self._heartbeat, changes)
        self._answered = plan.checkpoint_request
        assigned = {member.worker for member in plan.members}
        initial_workers = {member.worker for member in self._base.plan.members}

        def update_view(view: WorkerView) -> WorkerView:
            if view.name in assigned:
                return replace(view, heartbeat=heartbeat)
            if view.name in initial_workers:  # given up, and gone
                return replace(view, pod=None, heartbeat=None)
            return replace(view, silent_seconds=600.0 + end) if self.world.job.spare is Spare.DEAD else view

        return tuple(map(update_view, self._base.workers))

    def _collect_metrics(self, end: int) -> JobMetrics:
        plan_rows = self._select_rows(end)
        if plan_rows is None:
            return JobMetrics(unreported_members=tuple(member.worker for member in self.desired.plan.members))
        metrics = rank_metrics.summarize_ranks(plan_rows, self.desired.plan, JobMetrics())
        if PERSISTENT_SLOWNESS in self.ablated:
            return metrics
        threshold = self._base.job.spec.detection.straggler_slowdown
        self._relative_times = persistent_slowness.add_window(
            self._relative_times, plan_rows.rows, self.desired.plan.membership, threshold, NOW + end
        )
        return self._relative_times.add_to_metrics(metrics)

    def _select_rows(self, end: int) -> rank_metrics.PlanRankRows | None:
        """Metrics of the plan's ranks; None: they have not done a step yet."""
        members, ranks_each = self.desired.plan.members, self.world.job.ranks_each
        rows = self._sight.build_rows(max(self._sight.pieces[0].begin, end - self.scenario.evidence_delay_seconds))
        if rows is None:
            return None
        rows_by_worker = {
            member.worker: rows[index * ranks_each : (index + 1) * ranks_each] for index, member in enumerate(members)
        }
        return rank_metrics.select_plan_rows(rows_by_worker, self.desired.plan)

    def _collect_evidence(self, end: int) -> tuple[Evidence, ...]:
        """To the request that is out: once given, they stay."""
        plan, request = self.desired.plan, self.desired.requests.evidence_name
        if not request:
            return ()
        if self._reported == () or self._reported[0].request != request:
            windows = self._sight.build_windows(end)
            self._reported = tuple(
                Evidence(request, member.worker, plan.round, tuple(windows[rank] for rank in member.ranks))
                for member in plan.members
            )
        return self._reported

    def _compute_investigation_pause(self, end: int) -> int:
        """In the long run questions become rare, and passes between them weigh the same answers again."""
        investigation = self.desired.state.adaptation.investigation
        age = 0.0 if investigation is None else NOW + end - investigation.since
        return int(min(max(INVESTIGATION_INTERVAL_SECONDS, PAUSE_SHARE * age), MAX_PAUSE_SECONDS))

    def _compute_calm_pause(self) -> int:
        self._consecutive += 1
        if self._consecutive != self.pass_intervals.row:
            return self.pass_intervals.every
        self._consecutive = 0
        return self.pass_intervals.rest

    def _is_calm(self, observation: Observation) -> bool:
        """Nothing shows, nothing goes on: a pass would change nothing (tests check this)."""
        return self.passes > 2 and is_idle(observation, self.rules)

    def _evaluate(self, observation: Observation, second: int) -> None:
        result = self._run_steps(observation)
        self.passes += 1
        self.failures += result.failed_steps
        self._record_incidents(result.desired, second)
        self.desired = sweep_finished_incidents(result.desired)

    def _run_steps(self, observation: Observation) -> PassResult:
        return evaluate_job(observation, self.rules)

    def _record_incidents(self, desired: DesiredState, second: int) -> None:
        self.questions += desired.requests.evidence_name not in {"", self.desired.requests.evidence_name}
        self.quarantines += len(desired.state.incidents.quarantine_requests) - len(
            self.desired.state.incidents.quarantine_requests
        )
        for incident in desired.state.incidents.current:
            if incident.cause not in SLOWNESS_CAUSES:
                continue
            key = incident.name, incident.remedy or ""
            if key in self._seen_acts:
                continue
            self._seen_acts.add(key)
            self.alarms.append((second, incident.cause))
            if incident.remedy is not None and incident.applied is not None and incident.predicted_after is not None:
                before = incident.slowdown_before or 1.0
                self.acts.append(
                    Act(second, incident.cause, incident.remedy, incident.rank, before, incident.predicted_after)
                )

    def _build_setup(self, setup: Setup) -> Setup:
        plan = self.desired.plan
        strategy = TrainingStrategy(
            shares=None if plan.shares is None or plan.sync_mode is not SyncMode.SYNC else tuple(plan.shares),
            mode=plan.sync_mode,
            gc_interval=plan.gc_every,
            balanced=plan.sequence_cost is not None,
        )
        if strategy.mode is SyncMode.ASYNC_EDIT:
            strategy = replace(strategy, sync_seconds=plan.sync_seconds)
        if strategy.mode is SyncMode.EDIT:
            strategy = replace(strategy, sync_every=plan.sync_every)
        moved = setup.moved
        if plan.membership != self._membership:
            self._membership = plan.membership
            moved = moved or self._has_replaced_slow_worker(setup)
            return Setup(strategy, moved, setup.round + 1)
        return replace(setup, strategy=strategy)

    def _has_replaced_slow_worker(self, setup: Setup) -> bool:
        """Whether the worker that the strain is bound to holds no ranks any more."""
        strain = next((candidate for candidate in self.scenario.timeline.strains_by_second if candidate.movable), None)
        if strain is None or setup.moved:
            return setup.moved
        initial_workers = [member.worker for member in self._base.plan.members]
        current_workers = {member.worker for member in self.desired.plan.members}
        return not {initial_workers[rank // self.world.job.ranks_each] for rank, _ in strain.slow} & current_workers


def is_idle(observation: Observation, rules: Rules) -> bool:
    """No suspicion of slowness, and no remedy of an earlier one in progress."""
    metrics, state, requests = observation.metrics, observation.state, observation.requests
    is_active = (
        state.adaptation.investigation is not None
        or state.adaptation.local_sgd is not None
        or bool(state.incidents.open)
        or requests.evidence is not None
        or requests.profile is not None
        or (state.placement.vacant_since, state.placement.checkpoint_requested_at) != (None, None)
        or any(worker.leaving for worker in state.placement.workers)
    )
    if (
        is_active
        or metrics.relative_time is None
        or metrics.uniform_slowdown is None
        or metrics.uniform_slowdown >= observation.job.spec.detection.straggler_slowdown
    ):
        return False
    return straggler.update_investigation(observation, rules) == observation.desired


def sweep_finished_incidents(desired: DesiredState) -> DesiredState:
    """Incidents that are over are written into the cluster, and need no bookkeeping (`services.reconcile`)."""
    finished = frozenset(incident.name for incident in desired.state.incidents.current if incident.outcome is not None)
    window = desired.requests.profile_window
    finished -= {"" if window is None else window.incident}
    remaining = desired.state.incidents.sweep(finished)
    return desired if remaining is desired.state.incidents else desired.with_incidents(current=remaining.current)

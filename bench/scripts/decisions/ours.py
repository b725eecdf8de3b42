"""The operator's own decisions upon what is seen of the job: all of `pacekeeper_operator.decide`, and nothing copied.

A pass is one of an operator that has only what the one before has written down. What it asks of the ranks is answered
by the next pass; what it writes into the plan is in force a second later.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.reports import Evidence, Heartbeat
from pacekeeper_operator.api import IncidentCause
from pacekeeper_operator.decide import straggler
from pacekeeper_operator.decide.think import evaluate_job
from pacekeeper_operator.observation import JobMetrics, Observation, WorkerView
from pacekeeper_operator.observation import Policy as Rules
from pacekeeper_operator.observe import figures, lasting
from pacekeeper_operator.state import DesiredState
from tests.support.worlds import NOW, build_policy, build_training

from .course import THRESHOLD, Now
from .draw import Scenario
from .sight import FIRST_STEP, SampledMetrics
from .world import Setup, Spare, TrainingStrategy, CostModel

TRAINED_SECONDS = 300.0
"""Before a scenario begins."""
PASS_INTERVAL_SECONDS, SUSPECT_SECONDS = 2, 1
"""Between two passes (`Settings.sample_seconds`); and while something is looked into, as often as the clock allows."""
OF_THE_TIME, LONGEST_PAUSE = 0.05, 10
"""Of what is looked into for long, so much may pass between two passes; seconds at most."""
SLOWNESS = frozenset(
    {IncidentCause.STRAGGLER, IncidentCause.SLOW_COMMUNICATION, IncidentCause.VOLATILE, IncidentCause.GARBAGE, IncidentCause.UNEVEN_LENGTHS, IncidentCause.SLOW_STEPS}
)


@dataclass(frozen=True)
class PassIntervals:
    """At a job in which nothing happens: seconds between two, and behind `row` of them; row 0: that never comes."""

    every: int = PASS_INTERVAL_SECONDS
    row: int = 0
    rest: int = 0


@dataclass(frozen=True)
class Act:
    """A remedy that was applied: what it was to win, for `figures`. Losses are seconds a second."""

    second: int
    cause: IncidentCause
    remedy: str
    rank: int | None
    before: float  # slowdown, as it was judged
    after: float  # as it was predicted


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
    questions: int = 0  # that all ranks were asked
    pass_intervals: PassIntervals = PassIntervals()
    due: int = 0
    _consecutive: int = 0
    _answered: int = 0  # checkpoint requests, by the members: those that a pass before this one has made

    def __post_init__(self) -> None:
        job = self.world.job
        base = build_training(job.workers, spares=int(job.spare is not Spare.NONE), step=FIRST_STEP)
        members = tuple(
            replace(member, ranks=tuple(range(n * job.ranks_each, (n + 1) * job.ranks_each)))
            for n, member in enumerate(base.plan.members)
        )
        draft = base.desired.with_plan(members=members)
        if self.scenario.restart_known:
            draft = draft.with_budget(restart_seconds=float(job.restart_seconds))
        spec = replace(base.job.spec, nproc_per_node=job.ranks_each)
        self._base = replace(base.with_desired(draft), job=replace(base.job, spec=spec))
        self._heartbeat = self._base.members[0].heartbeat or Heartbeat()
        self.desired: DesiredState = self._base.desired
        self.rules = build_policy(max_restarts=100)
        self._sight = SampledMetrics(self.world, self.scenario.seed, FIRST_STEP)
        self._membership, self._round_from = self.desired.plan.membership, -TRAINED_SECONDS
        self._seen_acts: set[tuple[str, str]] = set()
        self._reported: tuple[Evidence, ...] = ()
        self._relative_times = lasting.RelativeTimeHistory()

    def choose_setup(self, now: Now) -> Setup:
        end = now.second + 1
        if now.stands:
            if self._sight.pieces:  # the next round goes on from the step that this one has come to
                self._sight = SampledMetrics(self.world, self.scenario.seed, self._sight.first + self._sight.done(now.second))
            return now.setup
        if not self._sight.pieces and now.second:
            self._round_from = float(now.second)
        self._sight.goes_on(float(now.second) if now.second else self._round_from, now.setup.strategy, now.strain)
        if now.second < self.due:
            return now.setup
        observation = self._observe(now, end)
        if not self._is_calm(observation):
            self._evaluate(observation, now.second)
        busy = self.desired.state.adaptation.suspicion is not None or self.desired.plan.checkpoint_request > self._answered
        calm = nothing_to_do(observation.with_desired(self.desired), self.rules)
        pause = self._suspect_pause(end) if busy else self._calm_pause() if calm else PASS_INTERVAL_SECONDS
        self.due = now.second + pause
        return self._wished(now.setup)

    def _observe(self, now: Now, end: int) -> Observation:
        metrics = self._metrics(end)
        world = replace(self._base, now=NOW + end, workers=self._views(now, end), metrics=metrics)
        return replace(world.with_desired(self.desired), evidence=() if metrics.untold else self._answers(end))

    def _views(self, now: Now, end: int) -> tuple[WorkerView, ...]:
        plan, sight = self.desired.plan, self._sight
        step = sight.first + sight.done(end)
        beat = replace(
            self._heartbeat,
            membership=plan.membership,
            round=plan.round,
            step=step,
            steps_in_round=sight.done(end),
            checkpoint_step=step,
            checkpoint_request=self._answered,
            global_batch=self.world.job.batch,
            first_step_at=NOW + self._round_from + 1.0,
            round_started_at=NOW + self._round_from + 1.0 - self.world.job.restart_seconds,
            sync_mode=now.setup.strategy.mode.value,
        )
        self._answered = plan.checkpoint_request
        seated = {member.worker for member in plan.members}
        begun = {member.worker for member in self._base.plan.members}

        def seen(view: WorkerView) -> WorkerView:
            if view.name in seated:
                return replace(view, heartbeat=beat)
            if view.name in begun:  # given up, and gone
                return replace(view, pod=None, heartbeat=None)
            return replace(view, silent_seconds=600.0 + end) if self.world.job.spare is Spare.DEAD else view

        return tuple(map(seen, self._base.workers))

    def _metrics(self, end: int) -> JobMetrics:
        members, each = self.desired.plan.members, self.world.job.ranks_each
        rows = self._sight.rows(max(self._sight.pieces[0].begin, end - self.scenario.evidence_delay_seconds))
        if rows is None:
            return JobMetrics(untold=tuple(member.worker for member in members))
        heard = {member.worker: rows[n * each : (n + 1) * each] for n, member in enumerate(members)}
        told = figures.select_plan_rows(heard, self.desired.plan)
        self._relative_times = lasting.add_window(self._relative_times, told.rows, self.desired.plan.membership, THRESHOLD, NOW + end)
        return self._relative_times.add_to_metrics(figures.summarize_ranks(told, self.desired.plan, JobMetrics()))

    def _answers(self, end: int) -> tuple[Evidence, ...]:
        """To the request that is out: once given, they stay."""
        plan = self.desired.plan
        if not plan.evidence_request:
            return ()
        if self._reported == () or self._reported[0].request != plan.evidence_request:
            windows = self._sight.windows(end)
            self._reported = tuple(
                Evidence(plan.evidence_request, m.worker, plan.round, tuple(windows[r] for r in m.ranks))
                for m in plan.members
            )
        return self._reported

    def _suspect_pause(self, end: int) -> int:
        """In the long run questions become rare, and passes between them weigh the same answers again."""
        suspicion = self.desired.state.adaptation.suspicion
        lasts = 0.0 if suspicion is None else NOW + end - suspicion.since
        return int(min(max(SUSPECT_SECONDS, OF_THE_TIME * lasts), LONGEST_PAUSE))

    def _calm_pause(self) -> int:
        self._consecutive += 1
        if self._consecutive != self.pass_intervals.row:
            return self.pass_intervals.every
        self._consecutive = 0
        return self.pass_intervals.rest

    def _is_calm(self, observation: Observation) -> bool:
        """Nothing shows, nothing goes on: a pass would leave all as it is (the tests say so)."""
        return self.passes > 2 and nothing_to_do(observation, self.rules)

    def _evaluate(self, observation: Observation, second: int) -> None:
        thought = evaluate_job(observation, self.rules)
        self.passes += 1
        self.failures += thought.failed_steps
        self._note(thought.desired, second)
        self.desired = swept(thought.desired)

    def _note(self, draft: DesiredState, second: int) -> None:
        self.questions += draft.plan.evidence_request not in {"", self.desired.plan.evidence_request}
        self.quarantines += len(draft.state.incidents.quarantines) - len(self.desired.state.incidents.quarantines)
        for incident in draft.state.incidents.current:
            if incident.cause not in SLOWNESS:
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

    def _wished(self, setup: Setup) -> Setup:
        plan = self.desired.plan
        way = TrainingStrategy(
            shares=None if plan.shares is None or plan.sync_mode is not SyncMode.SYNC else tuple(plan.shares),
            mode=plan.sync_mode,
            gc_interval=plan.garbage_every,
            balanced=plan.sequence_cost is not None,
        )
        if way.mode is SyncMode.ASYNC_EDIT:
            way = replace(way, sync_seconds=plan.sync_seconds)
        if way.mode is SyncMode.EDIT:
            way = replace(way, sync_every=plan.sync_every)
        moved = setup.moved
        if plan.membership != self._membership:
            self._membership = plan.membership
            moved = moved or self._gave_up_the_slow_one(setup)
            return Setup(way, moved, setup.round + 1)
        return replace(setup, way=way)

    def _gave_up_the_slow_one(self, setup: Setup) -> bool:
        """Whether the worker that the strain is bound to holds no ranks any more."""
        strain = next((each for each in self.scenario.timeline.strains_by_second if each.movable), None)
        if strain is None or setup.moved:
            return setup.moved
        before = [member.worker for member in self._base.plan.members]
        now = {member.worker for member in self.desired.plan.members}
        return not {before[rank // self.world.job.ranks_each] for rank, _ in strain.slow} & now


def nothing_to_do(observation: Observation, rules: Rules) -> bool:
    """No sign of slowness, and nothing of an earlier one under way."""
    metrics, state, plan = observation.metrics, observation.state, observation.plan
    goes_on = (
        state.adaptation.suspicion is not None
        or state.adaptation.local_sgd is not None
        or bool(state.incidents.open)
        or bool(plan.evidence_request)
        or plan.profile is not None
        or bool(state.placement.vacant_since or state.placement.checkpoint_asked_at)
        or any(worker.leaving for worker in state.placement.workers)
    )
    if goes_on or metrics.pace is None or metrics.uniform is None or metrics.uniform >= THRESHOLD:
        return False
    return straggler.update_investigation(observation, rules) == observation.desired


def swept(draft: DesiredState) -> DesiredState:
    """Incidents that are over are written into the cluster, and need no bookkeeping (`services.reconcile`)."""
    over = frozenset(i.name for i in draft.state.incidents.current if i.outcome is not None)
    over -= {draft.state.profiling.incident}
    left = draft.state.incidents.sweep(over)
    return draft if left is draft.state.incidents else draft.with_incidents(current=left.current)

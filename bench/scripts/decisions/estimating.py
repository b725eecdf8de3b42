"""The estimator's proposals, carried out at once: what it would do instead of today's rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper_analysis.estimator.estimator import JobLayout, StragglerEstimator
from pacekeeper_analysis.estimator.observations import MetricsWindow, StepWindow
from pacekeeper_analysis.estimator.parameters import EstimatorParameters
from pacekeeper_analysis.estimator.proposal import (
    REPLACE_REMEDY,
    Account,
    Proposal,
    TrainingSetup,
    propose_strategies,
)
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.decide.stragglers.straggler import BOTTLENECK_TO_CAUSE
from pacekeeper_operator.state.restart_estimates import MIN_UNMEASURED_RESTART_SECONDS

from .draw import Scenario
from .ours import TRAINED_SECONDS
from .policy_run import USUAL_PASSES, Act, Now, PassIntervals
from .sampled_metrics import SampledMetrics
from .world import CostModel, Setup, Spare, TrainingStrategy

PERMITTED = frozenset(
    {
        strategies.REBALANCE_REMEDY,
        strategies.LOCAL_SGD_REMEDY,
        strategies.SYNC_REMEDY,
        strategies.PLAN_GC_REMEDY,
        strategies.BALANCE_LENGTHS_REMEDY,
        REPLACE_REMEDY,
    }
)


@dataclass
class Estimating:
    """A policy."""

    scenario: Scenario
    world: CostModel
    parameters: EstimatorParameters = field(default_factory=EstimatorParameters)
    acts: list[Act] = field(default_factory=list)
    alarms: list[tuple[int, IncidentCause]] = field(default_factory=list)
    quarantines: int = 0
    failures: list[str] = field(default_factory=list)
    passes: int = 0
    questions: int = 0
    pass_intervals: PassIntervals = USUAL_PASSES
    ablated: frozenset[str] = frozenset()
    due: int = 0

    def __post_init__(self) -> None:
        job = self.world.job
        self._estimator = StragglerEstimator.create(
            JobLayout(job.ranks, job.ranks_each, job.samples), 0.0, self.parameters
        )
        self._account = Account()
        self._sight = SampledMetrics.from_scenario(self.scenario, self.world)
        self._round_from, self._requested, self._has_spare = -TRAINED_SECONDS, False, job.spare is Spare.WARM
        known = job.restart_seconds if self.scenario.restart_known else 0.0
        self._price = float(known or max(MIN_UNMEASURED_RESTART_SECONDS, job.restart_seconds))

    def choose_setup(self, now: Now) -> Setup:
        end = now.second + 1
        if now.stands:
            if self._sight.pieces:
                first = self._sight.first + self._sight.count_done_steps(now.second)
                self._sight = SampledMetrics.from_scenario(self.scenario, self.world, first)
                self._estimator = self._estimator.begin_round((), float(end))
            return now.setup
        if not self._sight.pieces and now.second:
            self._round_from = float(now.second)
        self._sight.extend(float(now.second) if now.second else self._round_from, now.setup.strategy, now.strain)
        if now.second < self.due:
            return now.setup
        self.passes += 1
        newest = self._sight.first + self._sight.count_done_steps(end) - 1
        fresh = self._requested and self._observe_steps(end)
        if not fresh:
            self._observe_metrics(end, newest)
        self._requested = False
        result = propose_strategies(self._estimator, self._describe_training(now.setup), self._account, fresh=fresh)
        self._account = result.account
        setup = now.setup
        for proposal in result.proposals:
            setup = self._carry_out(proposal, setup, now)
        if setup != now.setup:
            self._estimator = self._estimator.forget_expectations()
        elif (self._estimator.wants_steps or result.wants_steps) and newest > self._estimator.requested_step:
            self._estimator = self._estimator.request_steps(newest)
            self._requested, self.questions = True, self.questions + 1
        is_idle = setup.strategy == TrainingStrategy() and not self._estimator.is_doubtful
        self.due = now.second + (1 if self._requested else self.pass_intervals.every if is_idle else 2)
        return setup

    def _observe_steps(self, end: int) -> bool:
        window = StepWindow.from_rank_windows(self._sight.build_windows(end))
        if window is None:
            return False
        self._estimator = self._estimator.observe_steps(window, float(end))
        return True

    def _observe_metrics(self, end: int, newest: int) -> None:
        at = max(self._sight.pieces[0].begin, end - self.scenario.evidence_delay_seconds)
        rows, steps = self._sight.build_rows(at), self._sight.list_window_steps(at)
        if rows is None:
            return
        window = MetricsWindow(
            last_step=steps[-1].number,
            steps=int(rows["steps"].min()),
            compute_seconds=np.asarray(rows["compute_seconds"]),
            step_seconds=np.asarray(rows["step_seconds"]),
            wait_seconds=np.asarray(rows["wait_seconds"]),
            samples=np.asarray(rows["share"]),
            baseline_seconds=float(np.median(rows["first_steps_seconds"])),
            synchronous=self._sight.pieces[-1].strategy.mode is SyncMode.SYNC,
        )
        self._estimator = self._estimator.observe_metrics(window, newest, float(end))

    def _describe_training(self, setup: Setup) -> TrainingSetup:
        strategy = setup.strategy
        return TrainingSetup(
            mode=strategy.mode,
            shares=strategy.shares,
            gc_every=strategy.gc_interval,
            balanced=strategy.balanced,
            sync_seconds=strategy.sync_seconds,
            sync_every=strategy.sync_every,
            permitted=PERMITTED,
            replace_seconds=self._price if self._has_spare else None,
        )

    def _carry_out(self, proposal: Proposal, setup: Setup, now: Now) -> Setup:
        strategy = setup.strategy
        is_change = True
        if proposal.remedy == strategies.REBALANCE_REMEDY:
            equal = (self.world.job.samples,) * self.world.job.ranks
            is_change = strategy.shares is None
            self._estimator = self._estimator.probe_fixed_share(strategy.shares or equal, proposal.shares or equal)
            strategy = replace(strategy, shares=None if proposal.shares == equal else proposal.shares)
        elif proposal.remedy == strategies.PLAN_GC_REMEDY:
            strategy = replace(strategy, gc_interval=proposal.gc_every or 0)
        elif proposal.remedy == strategies.BALANCE_LENGTHS_REMEDY:
            strategy = replace(strategy, balanced=True)
        elif proposal.remedy == REPLACE_REMEDY:
            self._has_spare = False
            assert proposal.worker is not None
            self._estimator = self._estimator.begin_round((proposal.worker,), float(now.second))
            self._account = replace(self._account, lost_seconds=np.zeros(self.world.job.workers))
            self._record(proposal, now)
            return Setup(replace(strategy, shares=None), setup.moved or self._is_slow(proposal.worker), setup.round + 1)
        else:
            is_change = strategy.mode is SyncMode.SYNC
            strategy = replace(
                strategy,
                shares=None,
                mode=proposal.mode or strategy.mode,
                sync_seconds=proposal.sync_seconds or strategy.sync_seconds,
                sync_every=proposal.sync_every or strategy.sync_every,
            )
            if strategy.mode is SyncMode.SYNC:
                self._estimator = self._estimator.return_to_sync()
        if is_change:
            self._record(proposal, now)
        return replace(setup, strategy=strategy)

    def _is_slow(self, worker: int) -> bool:
        strain = next((s for s in self.scenario.timeline.strains_by_second if s.movable), None)
        return strain is not None and worker in {rank // self.world.job.ranks_each for rank, _ in strain.slow}

    def _record(self, proposal: Proposal, now: Now) -> None:
        cause = BOTTLENECK_TO_CAUSE.get(proposal.bottleneck, IncidentCause.STRAGGLER)
        assert proposal.bottleneck is not Bottleneck.NONE
        self.alarms.append((now.second, cause))
        self.acts.append(
            Act(now.second, cause, proposal.remedy, proposal.rank, proposal.slowdown_before, proposal.slowdown_after)
        )

"""A watched job: the operator's own passes over what is seen of it, which write Incidents and do nothing else.

It is a monitored script, so that no samples are known, and ranks may differ by nature. Nothing that decides is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pacekeeper.observe.rank_history import BASELINE_WINDOWS
from pacekeeper_analysis.estimator.observations import MetricsWindow
from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_operator.api.training_job import JobKind
from pacekeeper_operator.decide.evaluate import PassResult
from pacekeeper_operator.decide.stragglers import shadow
from pacekeeper_operator.decide.watched.described_plan import build_virtual_job
from pacekeeper_operator.decide.watched.evaluate import evaluate_watched_job
from pacekeeper_operator.observe import rank_metrics
from pacekeeper_operator.observe.rank_metrics import PlanRankRows
from pacekeeper_operator.runtime.watched_jobs import build_watch_policy
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import DesiredState, Incident
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.straggler_estimate import EstimatorMemory

from .noise import NoiseSource, Values
from .ours import INVESTIGATION_INTERVAL_SECONDS, OURS_PARTS, SLOWNESS_CAUSES, Ours
from .policy_run import PASS_INTERVAL_SECONDS, WINDOW_STEPS, Now
from .salts import create_rng
from .world import Setup

DOUBTFUL = 0.05
"""Probability of a fault from which on passes are as frequent as the operator's."""


@dataclass
class Watching(Ours):
    """A policy."""

    ablated: frozenset[str] = OURS_PARTS
    incidents: list[tuple[int, Incident]] = field(default_factory=list)
    """Seconds, and the Incidents about slowness that were written in them."""
    _memory: EstimatorMemory | None = None
    _means: MetricsWindow | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = build_watch_policy(Settings())
        self._base = replace(self._base, job=build_virtual_job(self._base.job, self.desired))
        assert self._base.job.kind is JobKind.WATCHED_JOB
        self._heartbeat = replace(self._heartbeat, training=replace(self._heartbeat.training, managed=False))

    def choose_setup(self, now: Now) -> Setup:
        end = now.second + 1
        self._sight.extend(float(now.second) if now.second else self._round_from, now.setup.strategy, now.strain)
        if now.second >= self.due:
            observation = self._observe(now, end)
            self._evaluate(self._estimate(observation), now.second)
            self.due = now.second + self._compute_pause()
        return now.setup

    def _select_rows(self, end: int) -> PlanRankRows | None:
        selected = super()._select_rows(end)
        self._means = None
        if selected is None:
            return None
        rows = np.array(selected.rows)
        rows["share"], rows["compute_seconds_per_sample"] = 0.0, rows["compute_seconds"]
        selected = selected._replace(rows=rows)
        self._means = rank_metrics.build_means(selected, self.desired.plan)
        return selected

    def _collect_evidence(self, end: int) -> tuple[Evidence, ...]:
        return tuple(
            replace(
                evidence,
                windows=tuple(
                    replace(
                        window,
                        samples=(0,) * len(window.steps),
                        lengths=(),
                        squares=(),
                        baseline_own_seconds=float(self._first_own[window.rank]),
                    )
                    for window in evidence.windows
                ),
            )
            for evidence in super()._collect_evidence(end)
        )

    @cached_property
    def _first_own(self) -> Values:
        """Own work of each rank in the fastest of the job's first windows, (ranks,), as ranks report it."""
        scenario, job = self.scenario, self.world.job
        noise = NoiseSource(self.world, scenario.noise_model, scenario.seed, scenario.salt)
        numbers = range(1, BASELINE_WINDOWS * WINDOW_STEPS + 1)
        steps = [noise.draw_step(number, create_rng(scenario.seed, number, salt=scenario.salt)) for number in numbers]
        windows = np.array(steps).reshape(BASELINE_WINDOWS, WINDOW_STEPS, job.ranks)
        fastest = np.median(windows.max(axis=2), axis=1).argmin()
        return np.asarray(job.own_seconds * np.median(windows[fastest], axis=0))

    def _estimate(self, observation: Observation) -> Observation:
        self._memory = shadow.advance_estimate(self._memory, observation, self.rules, self._means)
        return replace(observation, estimate=None if self._memory is None else self._memory.estimate)

    def _run_steps(self, observation: Observation) -> PassResult:
        return evaluate_watched_job(observation, self.rules)

    def _record_incidents(self, desired: DesiredState, second: int) -> None:
        self.questions += desired.requests.evidence_name not in {"", self.desired.requests.evidence_name}
        known = {incident.name for _, incident in self.incidents}
        for incident in desired.state.incidents.current:
            if incident.cause in SLOWNESS_CAUSES and incident.name not in known:
                self.incidents.append((second, incident))
                self.alarms.append((second, incident.cause))

    def _compute_pause(self) -> int:
        if self.desired.requests.evidence is not None:
            return INVESTIGATION_INTERVAL_SECONDS
        faults = () if self._memory is None else self._memory.estimate.faults
        is_calm = not self.desired.state.incidents.open and all(fault.probability < DOUBTFUL for fault in faults)
        return self.pass_intervals.every if is_calm else PASS_INTERVAL_SECONDS

"""What the operator receives of simulated ranks: sidecars' heartbeats, and Prometheus; with the real readers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pacekeeper_operator.decide.decision import Decision
from pacekeeper_operator.decide.stragglers import straggler
from pacekeeper_operator.observe import rank_metrics
from pacekeeper_operator.observe.prometheus import JOB_EXPRESSIONS, PrometheusClient, PrometheusSample
from pacekeeper_operator.observe.prometheus_access import QueryRows
from pacekeeper_operator.state.job_metrics import JobMetrics
from simulation.faults.control_plane import PrometheusFails, PrometheusFailure
from simulation.faults.ranks import NodeIsSlow
from simulation.faults.triggers import AtTime
from simulation.generator import OPERATOR_SETTINGS
from simulation.prometheus import EXPORTER_NAMESPACE, MEMORY_METRIC, XID_BASELINE_SECONDS
from simulation.run import run_schedule
from simulation.schedule import Aim, FaultInjection, Schedule
from simulation.simulated_job import SimulatedJob
from simulation.workers.worker import SIDECAR_PROCESS
from simulation.world import EPOCH, NAMESPACE, WorldSettings
from testing.simulated.simulated_workers import SimulatedTeam

JOB = (NAMESPACE, "j")


def sample_prometheus(team: SimulatedTeam, dcgm: str = "") -> PrometheusSample:
    async def ask(query: str, _seconds: float) -> QueryRows:
        rows: QueryRows = team.world.prometheus.run_query(query)
        return rows

    return team.world.run(PrometheusClient("http://prometheus", dcgm, "Hostname", ask).sample(team.world.now()))


def collect_metrics(team: SimulatedTeam) -> JobMetrics:
    values = {
        name: rank_metrics.read_rank_rows(heartbeat.rank_metrics)
        for name, heartbeat in team.endpoint.heartbeats.items()
    }
    return rank_metrics.summarize_ranks(
        rank_metrics.select_plan_rows(values, team.endpoint.plan), team.endpoint.plan, JobMetrics()
    )


def test_all_metrics_exist_and_show_the_slow_rank() -> None:
    team = SimulatedTeam()
    team.world.nodes["node-1"].slow = 2.0
    team.start_and_train("a", "b", steps=45)
    team.wait(5.0)
    found = collect_metrics(team)
    assert found.unreported_members == ()
    assert found.slowest_rank == 1
    assert (found.slowdown, found.relative_time) == pytest.approx((2 / 1.5, 2.0), rel=0.02)
    assert found.step_seconds is not None
    assert found.throughput == pytest.approx(16 / found.step_seconds, rel=0.01)
    assert found.uniform_slowdown == pytest.approx(1.0, abs=0.05)


def test_a_rank_that_becomes_slow_is_reported_between_two_polls() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=45)
    team.wait(1.0)
    polls: list[float] = []
    answer = team.endpoint.call

    async def call(method: str, path: str, query: Any, body: Any, token: str, leader: str) -> Any:
        if path == "/v1/plan" and query["wait"] == "0" and body["worker"] == team["b"].name:
            polls.append(team.world.now())
        return await answer(method, path, query, body, token, leader)

    team.endpoint.call = call  # type: ignore[assignment,method-assign]
    team.wait(10.0)
    assert polls == []
    team.world.nodes["node-1"].slow = 2.0
    team.wait(10.0)
    assert polls
    found = collect_metrics(team)
    assert found.relative_time is not None
    assert found.relative_time > 1.2


def test_prometheus_shows_reporting_ranks() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=12)
    team.wait(5.0)
    found = {name: values[JOB] for name, values in sample_prometheus(team).job_values.items()}
    assert found.keys() == JOB_EXPRESSIONS.keys()
    assert (found["reporting_ranks"], found["scrape_age"] <= 5.0) == (2, True)
    assert team.newest_round.step - 15 <= found["min_step"] <= team.newest_round.step


def test_a_silent_sidecar_has_no_series() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=12)
    team["b"].pause(SIDECAR_PROCESS)
    team.wait(5.0)
    assert sample_prometheus(team).job_values["reporting_ranks"] == {JOB: 1}
    team.world.network.cut("prometheus", "node-0")
    team.wait(5.0)
    assert sample_prometheus(team).job_values["reporting_ranks"] == {}


@pytest.mark.parametrize("failure", [None, PrometheusFailure.DOWN])
def test_a_slow_node_is_found_for_any_prometheus_failure(
    failure: PrometheusFailure | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, decided = straggler._decide_remedy, list[tuple[float, Decision]]()

    def record_decision(observation: Any, *rest: Any) -> Decision | None:
        decision = decide(observation, *rest)
        if decision is not None:
            decided.append((observation.now - EPOCH, decision))
        return decision

    monkeypatch.setattr(straggler, "_decide_remedy", record_decision)
    slow = FaultInjection(AtTime(60.0), NodeIsSlow(factor=2.0), 60.0)
    away = [] if failure is None else [FaultInjection(AtTime(1.0), PrometheusFails(how=failure), None)]
    jobs = (SimulatedJob(replicas=4, spares=1),)
    outcome = run_schedule(
        Schedule(3, Aim.SAFETY, WorldSettings(nodes=8, operator=OPERATOR_SETTINGS), jobs, (*away, slow))
    )
    assert outcome.violations == ()
    at, decision = decided[0]
    assert decision.cause.value == "straggler"
    assert 60.0 < at <= 80.0, "eight of its steps take 15 s"


@pytest.mark.parametrize("error", ["down", "silent"])
def test_prometheus_may_be_unavailable(error: str) -> None:
    team = SimulatedTeam()
    team.world.prometheus.failure = error
    with pytest.raises(OSError, match="Prometheus"):
        team.world.prometheus.run_query("")


def test_outdated_metrics_expire() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=12)
    team.wait(5.0)
    team.world.prometheus.failure = "stale"
    team.wait(60.0)
    assert sample_prometheus(team).job_values["scrape_age"][JOB] > 55.0
    team.world.prometheus.failure = "empty"
    assert sample_prometheus(team).job_values["reporting_ranks"] == {}


def test_a_false_series_affects_only_its_own_ranks() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=12)
    team.wait(5.0)
    team["b"].wrong_metrics = "foreign"
    team.wait(5.0)
    assert len(team.get_heartbeat("b").rank_metrics) > 1
    assert collect_metrics(team).relative_time == pytest.approx(1.0, rel=0.05)
    team["b"].wrong_metrics = "huge"
    team.wait(5.0)
    assert collect_metrics(team).slowdown == pytest.approx(2.0, rel=0.01)
    assert all(math.isfinite(value) for value in vars(collect_metrics(team)).values() if isinstance(value, float))


def test_a_restarted_exporter_shows_earlier_errors_only_after_a_while() -> None:
    team = SimulatedTeam()
    prometheus = team.world.prometheus
    prometheus.add_exporter("node-1", old_error=MEMORY_METRIC)
    (old,) = sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values
    assert (old.value, old.previous_value) == (2.0, 2.0)
    prometheus.show_exporter("node-1", present=False)
    assert sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values == ()
    team.wait(XID_BASELINE_SECONDS + 10.0)
    prometheus.show_exporter("node-1", present=True)
    (back,) = sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values
    assert (back.value, back.previous_value) == (2.0, None)
    team.wait(XID_BASELINE_SECONDS + 1.0)
    (known,) = sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values
    assert (known.value, known.previous_value) == (2.0, 2.0)
    prometheus.count_xid("node-1", "0", 48)
    assert {
        (found.value, found.previous_value) for found in sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values
    } == {
        (2.0, 2.0),
        (48.0, 0.0),
    }


def test_xids_are_trusted_where_the_scrape_names_the_node() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    assert sample_prometheus(team, EXPORTER_NAMESPACE).gpu_untrusted_reason == ""
    team["b"].raise_gpu_error(79)
    (value,) = sample_prometheus(team, EXPORTER_NAMESPACE).gpu_values
    assert (value.node, value.value, value.trusted) == ("node-1", 79.0, True)
    team.world.prometheus.names_nodes = False
    seen = sample_prometheus(team, EXPORTER_NAMESPACE)
    assert (seen.gpu_values[0].trusted, "no witness" in seen.gpu_untrusted_reason) == (False, True)

"""What the operator hears of simulated ranks: by their sidecars' heartbeats, and by Prometheus; the real readers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pacekeeper_operator.decide import straggler
from pacekeeper_operator.decision import Decision
from pacekeeper_operator.observation import Metrics
from pacekeeper_operator.observe import figures
from pacekeeper_operator.observe.prometheus import FIGURES, Prometheus, Sample
from pacekeeper_operator.observe.prometheus_access import Rows
from simulation.faults.control_plane import PrometheusFails, Silence
from simulation.faults.moments import At
from simulation.faults.ranks import NodeIsSlow
from simulation.generator import OPERATOR
from simulation.prometheus import BEFORE_SECONDS, EXPORTER, MEMORY_METRIC
from simulation.run import run
from simulation.schedule import Aim, JobSettings, Schedule, Stroke
from simulation.workers.worker import SIDECAR
from simulation.world import EPOCH, NAMESPACE, WorldSettings
from tests.support.simulated_workers import Team

JOB = (NAMESPACE, "j")


def sample(team: Team, dcgm: str = "") -> Sample:
    async def ask(query: str, _seconds: float) -> Rows:
        rows: Rows = team.world.prometheus.rows(query)
        return rows

    return team.world.run(Prometheus("http://prometheus", dcgm, "Hostname", ask).sample(team.world.now()))


def heard(team: Team) -> Metrics:
    told = {name: figures.read(beat.figures) for name, beat in team.desk.beats.items()}
    return figures.metrics(figures.of_plan(told, team.desk.plan), team.desk.plan, Metrics())


def test_every_figure_is_there_and_the_slow_rank_stands_out() -> None:
    team = Team()
    team.world.nodes["node-1"].slow = 2.0
    team.train("a", "b", steps=45)
    team.wait(5.0)
    found = heard(team)
    assert found.untold == ()
    assert found.slowest_rank == 1
    assert (found.slowdown, found.pace) == pytest.approx((2 / 1.5, 2.0), rel=0.02)
    assert found.step_seconds is not None
    assert found.throughput == pytest.approx(16 / found.step_seconds, rel=0.01)
    assert found.uniform == pytest.approx(1.0, abs=0.05)


def test_a_rank_that_becomes_slow_is_told_of_between_two_polls() -> None:
    team = Team()
    team.train("a", "b", steps=45)
    team.wait(1.0)
    polls: list[float] = []
    answer = team.desk.call

    async def call(method: str, path: str, query: Any, body: Any, token: str, leader: str) -> Any:
        if path == "/v1/plan" and query["wait"] == "0" and body["worker"] == team["b"].name:
            polls.append(team.world.now())
        return await answer(method, path, query, body, token, leader)

    team.desk.call = call  # type: ignore[assignment,method-assign]
    team.wait(10.0)
    assert polls == []
    team.world.nodes["node-1"].slow = 2.0
    team.wait(10.0)
    assert polls
    found = heard(team)
    assert found.pace is not None
    assert found.pace > 1.2


def test_what_prometheus_knows_are_signs_of_life() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team.wait(5.0)
    found = {name: values[JOB] for name, values in sample(team).figures.items()}
    assert found.keys() == FIGURES.keys()
    assert (found["ranks"], found["scrape_age"] <= 5.0) == (2, True)
    assert team.run.step - 15 <= found["least_step"] <= team.run.step


def test_a_sidecar_that_does_not_answer_has_no_series() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team["b"].freeze(SIDECAR)
    team.wait(5.0)
    assert sample(team).figures["ranks"] == {JOB: 1}
    team.world.network.cut("prometheus", "node-0")
    team.wait(5.0)
    assert sample(team).figures["ranks"] == {}


@pytest.mark.parametrize("how", [None, Silence.DOWN])
def test_a_slow_node_is_found_whatever_prometheus_does(how: Silence | None, monkeypatch: pytest.MonkeyPatch) -> None:
    decide, decided = straggler._decide, list[tuple[float, Decision]]()

    def note(observation: Any, *rest: Any) -> Decision | None:
        decision = decide(observation, *rest)
        if decision is not None:
            decided.append((observation.now - EPOCH, decision))
        return decision

    monkeypatch.setattr(straggler, "_decide", note)
    slow = Stroke(At(60.0), NodeIsSlow(factor=2.0), 60.0)
    away = [] if how is None else [Stroke(At(1.0), PrometheusFails(how=how), None)]
    jobs = (JobSettings(replicas=4, spares=1),)
    outcome = run(Schedule(3, Aim.SAFETY, WorldSettings(nodes=8, operator=OPERATOR), jobs, (*away, slow)))
    assert outcome.violations == ()
    at, decision = decided[0]
    assert decision.cause.value == "straggler"
    assert 60.0 < at <= 80.0, "eight of its steps take 15 s"


@pytest.mark.parametrize("silence", ["down", "silent"])
def test_prometheus_may_be_away(silence: str) -> None:
    team = Team()
    team.world.prometheus.silence = silence
    with pytest.raises(OSError, match="Prometheus"):
        team.world.prometheus.rows("")


def test_stale_figures_age() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team.wait(5.0)
    team.world.prometheus.silence = "stale"
    team.wait(60.0)
    assert sample(team).figures["scrape_age"][JOB] > 55.0
    team.world.prometheus.silence = "empty"
    assert sample(team).figures["ranks"] == {}


def test_lies_reach_the_operator_about_their_own_ranks_only() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team.wait(5.0)
    team["b"].figures_lie = "foreign"
    team.wait(5.0)
    assert len(team.beat("b").figures) > 1
    assert heard(team).pace == pytest.approx(1.0, rel=0.05)
    team["b"].figures_lie = "huge"
    team.wait(5.0)
    assert heard(team).slowdown == pytest.approx(2.0, rel=0.01)
    assert all(math.isfinite(value) for value in vars(heard(team)).values() if isinstance(value, float))


def test_an_exporter_that_comes_back_shows_what_was_before_only_once_it_has_been_back_for_a_while() -> None:
    team = Team()
    prometheus = team.world.prometheus
    prometheus.add_exporter("node-1", old_error=MEMORY_METRIC)
    (old,) = sample(team, EXPORTER).gpu
    assert (old.value, old.before) == (2.0, 2.0)
    prometheus.show_exporter("node-1", there=False)
    assert sample(team, EXPORTER).gpu == ()
    team.wait(BEFORE_SECONDS + 10.0)
    prometheus.show_exporter("node-1", there=True)
    (back,) = sample(team, EXPORTER).gpu
    assert (back.value, back.before) == (2.0, None)
    team.wait(BEFORE_SECONDS + 1.0)
    (known,) = sample(team, EXPORTER).gpu
    assert (known.value, known.before) == (2.0, 2.0)
    prometheus.count_xid("node-1", "0", 48)
    assert {(found.value, found.before) for found in sample(team, EXPORTER).gpu} == {(2.0, 2.0), (48.0, 0.0)}


def test_xids_are_vouched_for_where_the_scrape_names_the_node() -> None:
    team = Team()
    team.train("a", "b")
    assert sample(team, EXPORTER).unvouched == ""
    team["b"].gpu_error(79)
    (value,) = sample(team, EXPORTER).gpu
    assert (value.node, value.value, value.vouched) == ("node-1", 79.0, True)
    team.world.prometheus.names_nodes = False
    seen = sample(team, EXPORTER)
    assert (seen.gpu[0].vouched, "no witness" in seen.unvouched) == (False, True)

"""What the operator reads of simulated workers in Prometheus: the real reader, over figures that are made up."""

from __future__ import annotations

import math

import pytest

from pacekeeper_operator.observe.prometheus import FIGURES, Prometheus, Rows, Sample, Slowest
from simulation.prometheus import EXPORTER
from simulation.workers.worker import SIDECAR
from simulation.world import NAMESPACE
from tests.support.simulated_workers import Team

JOB = (NAMESPACE, "j")


def sample(team: Team, dcgm: str = "") -> Sample:
    async def ask(query: str) -> Rows:
        rows: Rows = team.world.prometheus.rows(query)
        return rows

    return team.world.run(Prometheus("http://prometheus", dcgm, "Hostname", ask).sample(team.world.now()))


def test_every_figure_is_there_and_the_slow_rank_stands_out() -> None:
    team = Team()
    team.world.nodes["node-1"].slow = 2.0
    team.train("a", "b", steps=45)
    team.wait(5.0)
    seen = sample(team)
    figures = {name: values[JOB] for name, values in seen.figures.items()}
    assert figures.keys() == FIGURES.keys()
    assert seen.slowest == {JOB: Slowest(team["b"].name, 1)}
    assert figures["slowdown"] == pytest.approx(2 / 1.5, rel=0.02)
    assert figures["pace"] == pytest.approx(2 / 1.5, rel=0.02)
    assert figures["throughput"] == pytest.approx(16 / figures["step_seconds"], rel=0.01)
    assert figures["uniform"] == pytest.approx(1.0, abs=0.05)
    assert (figures["ranks"], figures["scrape_age"] <= 5.0) == (2, True)
    assert team.run.step - 15 <= figures["least_step"] <= team.run.step


def test_a_sidecar_that_does_not_answer_has_no_series() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team["b"].freeze(SIDECAR)
    team.wait(5.0)
    assert sample(team).figures["ranks"] == {JOB: 1}
    team.world.network.cut("prometheus", "node-0")
    team.wait(5.0)
    assert sample(team).figures["ranks"] == {}


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


def test_lies_reach_the_operator_as_far_as_promql_lets_them() -> None:
    team = Team()
    team.train("a", "b", steps=12)
    team.wait(5.0)
    team.world.prometheus.lie = "huge"
    assert sample(team).figures["slowdown"][JOB] == pytest.approx(2.0, rel=0.01)
    team.world.prometheus.lie = "nan"
    seen = sample(team)
    assert (seen.figures["slowdown"][JOB], seen.slowest[JOB].rank) == (1.0, 0)
    assert all(math.isfinite(value) for values in seen.figures.values() for value in values.values())


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

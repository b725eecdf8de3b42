"""The bench of Incidents about slow ranks of watched jobs: what it observes, and its goals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bench import watched_stragglers
from bench.scripts.decisions.noise import NoiseModel
from bench.scripts.decisions.world import CALM, Segment, Strain, Timeline
from bench.watched_stragglers import (
    NAMED_SLOWDOWNS,
    SLOWDOWNS,
    JobResult,
    draw_calm_scenarios,
    observe_job,
    summarize_jobs,
)


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_a_slow_rank_of_a_watched_job_is_named_and_no_other(slowdown: float) -> None:
    scenario = next(draw_calm_scenarios(1.0))
    strain = CALM if slowdown == 1.0 else Strain(slow=((3, slowdown),))
    segments = (Segment(0, 120, CALM), Segment(120, 240, strain))
    job = replace(scenario.job, phase_every=0, phase_seconds=0)
    result = observe_job(replace(scenario, job=job, timeline=Timeline(segments), depth=slowdown))
    assert (result.false_incidents, result.failures) == ((), ())
    assert (result.named_after_seconds is not None) == (slowdown > 1.0)
    assert result.questions > 0


def test_too_many_false_incidents_and_a_rank_that_is_not_named_miss_the_goals() -> None:
    def build_jobs(false: int, named: float | None) -> list[JobResult]:
        return [
            JobResult(model, slowdown, hours, ("straggler",) * (false if slowdown == 1 else 0), named, 1, ())
            for model in NoiseModel
            for slowdown, hours in ((1.0, 10.0), *product(SLOWDOWNS, (seconds / 3600 for seconds in NAMED_SLOWDOWNS)))
        ]

    _, holds = summarize_jobs(build_jobs(false=0, named=5.0))
    assert all(holds.values())
    _, holds = summarize_jobs(build_jobs(false=1, named=5.0))
    assert not any(holds[f"{model}: false Incidents"] for model in NoiseModel), "one in ten hours"
    _, holds = summarize_jobs(build_jobs(false=0, named=None))
    assert not any(holds[f"{model}: 2 × is named"] for model in NoiseModel)
    assert not any(holds[f"{model}: 2 × from the start is named"] for model in NoiseModel)
    assert holds["no step fails"]


@pytest.mark.parametrize("value", ["many", "0"])
def test_a_size_that_is_no_number_names_the_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOURS", value)
    with pytest.raises(SystemExit, match=f"HOURS={value}: give a number"):
        watched_stragglers.main()

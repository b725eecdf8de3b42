"""What the figures in workers' heartbeats say of a job, and which of them wake it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import Heartbeat, RankMetrics, TrainingReport
from pacekeeper_operator.observe import rank_metrics as of_figures
from pacekeeper_operator.observe.rank_metrics import (
    NO_RANK_ROWS,
    RANK_ROW,
    RankRows,
    needs_immediate_pass,
    read_rank_rows,
    select_plan_rows,
)
from pacekeeper_operator.state.job_metrics import MIN_WAITING_SHARE, GpuValue, JobMetrics

PLAN = Plan(members=tuple(Member(f"w{n}", f"10.0.0.{n}", (2 * n, 2 * n + 1)) for n in range(2)))
"""Two workers of two ranks."""


def figures(rank: int, **changes: Any) -> RankMetrics:
    values: dict[str, Any] = {
        "steps": 32,
        "step_seconds": 0.1,
        "compute_seconds": 0.08,
        "compute_seconds_per_sample": 0.01,
        "wait_seconds": 0.02,
        "share": 8,
        "first_steps_seconds": 0.08,
    }
    return RankMetrics(rank, **(values | changes))


def metrics(heard: Mapping[str, RankRows], plan: Plan, known: JobMetrics) -> JobMetrics:
    return of_figures.summarize_ranks(select_plan_rows(heard, plan), plan, known)


def of(**changes_of_rank_3: Any) -> JobMetrics:
    ranks = [figures(0), figures(1), figures(2), figures(3, **changes_of_rank_3)]
    return metrics({"w0": read_rank_rows(ranks[:2]), "w1": read_rank_rows(ranks[2:])}, PLAN, JobMetrics())


def test_ranks_that_are_alike() -> None:
    found = of()
    assert (found.slowdown, found.relative_time, found.peer_slowdown) == pytest.approx((1.0, 1.0, 1.0))
    assert (found.step_seconds, found.seconds_per_sample, found.wait_share) == pytest.approx((0.1, 0.01, 0.2))
    assert (found.throughput, found.uniform_slowdown) == pytest.approx((4 * 8 / 0.1, 1.25))
    assert found.unreported_members == ()


def test_a_slow_rank_stands_out() -> None:
    found = of(compute_seconds=0.16, compute_seconds_per_sample=0.02, wait_seconds=0.0, step_seconds=0.16)
    assert found.slowdown == pytest.approx(0.16 / 0.10), "over the mean"
    assert found.relative_time == pytest.approx(2.0), "over its peers' median"
    assert found.peer_slowdown == pytest.approx(2.0), "its own work over an equal share at the median pace"
    assert (found.slowest_rank, found.least_waiting_rank, found.wait_share) == (3, 3, 0.0)
    assert found.throughput == pytest.approx(3 * 80 + 50)


def test_in_a_job_of_two_a_slow_rank_is_held_against_the_other() -> None:
    heard = {"w0": read_rank_rows([figures(0), figures(1, compute_seconds_per_sample=0.015)])}
    two = replace(PLAN, members=(Member("w0", "10.0.0.1", (0, 1)),))
    found = metrics(heard, two, JobMetrics())
    assert (found.relative_time, found.peer_slowdown, found.seconds_per_sample) == pytest.approx((1.5, 1.0, 0.01))
    well, slow = (read_rank_rows([figures(1, compute_seconds_per_sample=seconds)]) for seconds in (0.01, 0.0112))
    assert needs_immediate_pass(well, slow, found, 1.1), "it is looked at at once"
    assert needs_immediate_pass(slow, well, found, 1.1)


def test_shares_that_fit_leave_it_its_pace_and_mend_what_the_others_wait() -> None:
    found = of(compute_seconds=0.08, compute_seconds_per_sample=0.02, share=4)
    assert found.relative_time == pytest.approx(2.0)
    assert found.peer_slowdown == pytest.approx(0.08 / (0.01 * 7))


def test_of_how_many_steps_with_the_plans_shares_they_are() -> None:
    told = {"w0": read_rank_rows([figures(0), figures(1, steps=9)]), "w1": read_rank_rows([figures(2), figures(3)])}
    assert metrics(told, PLAN, JobMetrics()).steps == 9
    assert metrics(told, replace(PLAN, shares=(8, 8, 8, 8)), JobMetrics()).steps == 9
    assert metrics(told, replace(PLAN, shares=(9, 8, 7, 8)), JobMetrics()).steps == 0
    assert metrics({}, PLAN, JobMetrics()).steps == 0


def test_what_nobody_knows_is_none() -> None:
    silent = metrics({"w0": read_rank_rows([RankMetrics(0), RankMetrics(1)])}, PLAN, JobMetrics())
    assert silent == JobMetrics(unreported_members=("w1",)), "who tells that there is nothing yet has told"
    watched = metrics({"w0": read_rank_rows([figures(0, share=None), figures(1, share=None)])}, PLAN, JobMetrics())
    assert (watched.throughput, watched.peer_slowdown, watched.relative_time) == (None, None, 1.0)
    assert metrics({}, Plan(), JobMetrics()) == JobMetrics()


def test_what_prometheus_says_stays() -> None:
    known = JobMetrics(
        gpu_values=(GpuValue("n", "0", "XID", 79.0),), prometheus_error="away", reporting_ranks=4, queried_at=5.0
    )
    found = metrics({"w0": read_rank_rows([figures(0)])}, PLAN, known)
    assert (found.gpu_values, found.prometheus_error, found.reporting_ranks, found.queried_at) == (
        known.gpu_values,
        "away",
        4,
        5.0,
    )


class TestWhoSpeaks:
    def test_a_worker_for_its_own_ranks_only(self) -> None:
        lies = read_rank_rows([figures(0), figures(1), figures(2, compute_seconds_per_sample=1e9), figures(7)])
        found = metrics({"w0": lies, "w1": read_rank_rows([figures(2), figures(3)])}, PLAN, JobMetrics())
        assert found.relative_time == pytest.approx(1.0)

    def test_nobody_but_the_plans_members(self) -> None:
        found = metrics({"spare": read_rank_rows([figures(3, compute_seconds_per_sample=1.0)])}, PLAN, JobMetrics())
        assert found == JobMetrics(unreported_members=("w0", "w1"))

    def test_who_leaves_out_a_rank_has_not_told(self) -> None:
        found = metrics(
            {"w0": read_rank_rows([figures(0)]), "w1": read_rank_rows([figures(2), figures(3)])}, PLAN, JobMetrics()
        )
        assert found.unreported_members == ("w0",)

    def test_the_last_word_about_a_rank_counts(self) -> None:
        twice = read_rank_rows([figures(0, step_seconds=9.0), figures(0, step_seconds=0.2)])
        assert twice["step_seconds"].tolist() == [0.2]


class TestHostile:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("step_seconds", math.nan),
            ("step_seconds", math.inf),
            ("step_seconds", -1.0),
            ("compute_seconds", 1e13),
            ("compute_seconds", "fast"),
            ("share", 2**31 + 1),
            ("share", 0.5),
            ("rank", -1),
            ("rank", None),
        ],
    )
    def test_what_can_be_no_figure_is_refused_by_its_name(self, name: str, value: object) -> None:
        beat = Heartbeat(worker="w0", rank_metrics=(figures(0),)).to_json()
        beat["rank_metrics"][0][name] = value
        with pytest.raises(InputError, match=rf"rank_metrics\[0\].{name}"):
            Heartbeat.from_json(beat)

    def test_more_ranks_than_a_worker_can_have(self) -> None:
        beat = Heartbeat(worker="w0").to_json() | {"rank_metrics": [{"rank": n} for n in range(1025)]}
        with pytest.raises(InputError, match="1024"):
            Heartbeat.from_json(beat)

    @pytest.mark.parametrize("tiny", [5e-324, 1e-300, 0.0])
    @pytest.mark.parametrize("huge", [1e12])
    def test_no_figures_make_anything_but_numbers(self, tiny: float, huge: float) -> None:
        for own in (tiny, huge):
            said = [
                figures(n, step_seconds=own, compute_seconds=own, compute_seconds_per_sample=own, wait_seconds=huge)
                for n in range(2)
            ]
            found = metrics(
                {"w0": read_rank_rows([*said[:1], figures(1, first_steps_seconds=tiny)])}, PLAN, JobMetrics()
            )
            numbers = [value for value in vars(found).values() if isinstance(value, float)]
            assert all(math.isfinite(number) for number in numbers)


class TestMatters:
    """Of a worker with rank 0 and 1, in a job whose ranks take 0.01 s a sample; slow is 1.25 × that."""

    def test_a_rank_that_becomes_slow_or_is_so_no_more(self) -> None:
        last = JobMetrics(seconds_per_sample=0.01)
        well, slow = read_rank_rows([figures(0)]), read_rank_rows([figures(0, compute_seconds_per_sample=0.0125)])
        assert needs_immediate_pass(well, slow, last, 1.25)
        assert needs_immediate_pass(slow, well, last, 1.25)
        assert not needs_immediate_pass(
            well, read_rank_rows([figures(0, compute_seconds_per_sample=0.0124)]), last, 1.25
        )
        assert not needs_immediate_pass(
            slow, read_rank_rows([figures(0, compute_seconds_per_sample=0.04)]), last, 1.25
        ), "it is known"
        assert not needs_immediate_pass(well, slow, JobMetrics(), 1.25), "nothing to hold it against"

    def test_the_least_wait_of_all(self) -> None:
        waits, works = (
            read_rank_rows([figures(0, wait_seconds=0.1 * MIN_WAITING_SHARE)]),
            read_rank_rows([figures(0, wait_seconds=0.0)]),
        )
        assert needs_immediate_pass(works, waits, JobMetrics(wait_share=0.0, least_waiting_rank=0), 1.25), (
            "it was the one that waited least"
        )
        assert not needs_immediate_pass(works, waits, JobMetrics(wait_share=0.0, least_waiting_rank=1), 1.25), (
            "another one still does"
        )
        assert needs_immediate_pass(waits, works, JobMetrics(wait_share=0.5, least_waiting_rank=1), 1.25), (
            "not all wait any more"
        )
        assert not needs_immediate_pass(waits, waits, JobMetrics(wait_share=0.5, least_waiting_rank=1), 1.25)

    def test_nothing_said_is_no_news(self) -> None:
        assert not needs_immediate_pass(
            NO_RANK_ROWS, NO_RANK_ROWS, JobMetrics(seconds_per_sample=0.01, wait_share=0.5, least_waiting_rank=0), 1.25
        )


def test_forty_thousand_ranks_are_looked_at_in_a_moment() -> None:
    """By what it costs in memory and calls: as many rows as ranks, and no Python object a rank."""
    members = tuple(Member(f"w{n}", "10.0.0.1", tuple(range(8 * n, 8 * n + 8))) for n in range(5000))
    rows = np.zeros(40_000, RANK_ROW)
    rows["rank"], rows["compute_seconds_per_sample"], rows["step_seconds"] = range(40_000), 0.01, 0.1
    heard = {member.worker: rows[8 * n : 8 * n + 8] for n, member in enumerate(members)}
    found = metrics(heard, Plan(members=members), JobMetrics())
    assert (found.relative_time, found.unreported_members) == (1.0, ())


def test_a_rank_takes_no_more_of_a_heartbeat_than_the_operator_allows() -> None:
    from pacekeeper_operator.endpoint.server import (
        HEARTBEAT_BYTES_PER_RANK,
        HEARTBEAT_TOKENS_PER_RANK,
        _compute_heartbeat_limits,
    )

    full = figures(1023, **{name: 1.2345e-05 for name in RANK_ROW.names or () if name.endswith("seconds")})
    beat = Heartbeat(
        worker="w" * 253,
        rank_metrics=(full,) * 1024,
        unkillable_ranks=tuple(range(1024)),
        training=TrainingReport(refused="é" * 2000),
    )
    body = json.dumps(beat.to_json()).encode()
    most, most_marks = _compute_heartbeat_limits(1024)
    assert len(body) <= most
    assert body.count(b",") + body.count(b"{") + body.count(b"[") <= most_marks
    assert _compute_heartbeat_limits(1) == _compute_heartbeat_limits(100)
    assert (HEARTBEAT_BYTES_PER_RANK, HEARTBEAT_TOKENS_PER_RANK) <= (512, 16)

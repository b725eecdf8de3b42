"""The summary of metrics in heartbeats of workers, and which of them start a pass."""

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
from pacekeeper_operator.observe import rank_metrics
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
"""A plan of two workers with two ranks each."""


def build_metrics(rank: int, **changes: Any) -> RankMetrics:
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


def summarize_rank_rows(rows_by_worker: Mapping[str, RankRows], plan: Plan, known: JobMetrics) -> JobMetrics:
    return rank_metrics.summarize_ranks(select_plan_rows(rows_by_worker, plan), plan, known)


def summarize_ranks_with(**changes_of_rank_3: Any) -> JobMetrics:
    ranks = [build_metrics(0), build_metrics(1), build_metrics(2), build_metrics(3, **changes_of_rank_3)]
    return summarize_rank_rows({"w0": read_rank_rows(ranks[:2]), "w1": read_rank_rows(ranks[2:])}, PLAN, JobMetrics())


def test_equal_ranks_have_no_slowdown() -> None:
    found = summarize_ranks_with()
    assert (found.slowdown, found.relative_time, found.peer_slowdown) == pytest.approx((1.0, 1.0, 1.0))
    assert (found.step_seconds, found.seconds_per_sample, found.wait_share) == pytest.approx((0.1, 0.01, 0.2))
    assert (found.throughput, found.uniform_slowdown) == pytest.approx((4 * 8 / 0.1, 1.25))
    assert found.unreported_members == ()


def test_a_slow_rank_stands_out() -> None:
    found = summarize_ranks_with(
        compute_seconds=0.16, compute_seconds_per_sample=0.02, wait_seconds=0.0, step_seconds=0.16
    )
    assert found.slowdown == pytest.approx(0.16 / 0.10), "over the mean"
    assert found.relative_time == pytest.approx(2.0), "over its peers' median"
    assert found.peer_slowdown == pytest.approx(2.0), "its own work over an equal share at the median pace"
    assert (found.slowest_rank, found.least_waiting_rank, found.wait_share) == (3, 3, 0.0)
    assert found.throughput == pytest.approx(3 * 80 + 50)


def test_in_a_job_of_two_a_slow_rank_is_compared_with_the_other() -> None:
    rows_by_worker = {"w0": read_rank_rows([build_metrics(0), build_metrics(1, compute_seconds_per_sample=0.015)])}
    two = replace(PLAN, members=(Member("w0", "10.0.0.1", (0, 1)),))
    found = summarize_rank_rows(rows_by_worker, two, JobMetrics())
    assert (found.relative_time, found.peer_slowdown, found.seconds_per_sample) == pytest.approx((1.5, 1.0, 0.01))
    well, slow = (read_rank_rows([build_metrics(1, compute_seconds_per_sample=seconds)]) for seconds in (0.01, 0.0112))
    assert needs_immediate_pass(well, slow, found, 1.1), "a pass starts at once"
    assert needs_immediate_pass(slow, well, found, 1.1)


def test_fitting_shares_keep_the_relative_time_and_reduce_the_peer_slowdown() -> None:
    found = summarize_ranks_with(compute_seconds=0.08, compute_seconds_per_sample=0.02, share=4)
    assert found.relative_time == pytest.approx(2.0)
    assert found.peer_slowdown == pytest.approx(0.08 / (0.01 * 7))


def test_steps_count_only_with_the_shares_of_the_plan() -> None:
    rows_by_worker = {
        "w0": read_rank_rows([build_metrics(0), build_metrics(1, steps=9)]),
        "w1": read_rank_rows([build_metrics(2), build_metrics(3)]),
    }
    assert summarize_rank_rows(rows_by_worker, PLAN, JobMetrics()).steps == 9
    assert summarize_rank_rows(rows_by_worker, replace(PLAN, shares=(8, 8, 8, 8)), JobMetrics()).steps == 9
    assert summarize_rank_rows(rows_by_worker, replace(PLAN, shares=(9, 8, 7, 8)), JobMetrics()).steps == 0
    assert summarize_rank_rows({}, PLAN, JobMetrics()).steps == 0


def test_unknown_values_are_none() -> None:
    silent = summarize_rank_rows({"w0": read_rank_rows([RankMetrics(0), RankMetrics(1)])}, PLAN, JobMetrics())
    assert silent == JobMetrics(unreported_members=("w1",)), "a worker that reports empty metrics has reported"
    watched = summarize_rank_rows(
        {"w0": read_rank_rows([build_metrics(0, share=None), build_metrics(1, share=None)])}, PLAN, JobMetrics()
    )
    assert (watched.throughput, watched.peer_slowdown, watched.relative_time) == (None, None, 1.0)
    assert summarize_rank_rows({}, Plan(), JobMetrics()) == JobMetrics()


def test_values_of_prometheus_stay() -> None:
    known = JobMetrics(
        gpu_values=(GpuValue("n", "0", "XID", 79.0),), prometheus_error="away", reporting_ranks=4, queried_at=5.0
    )
    found = summarize_rank_rows({"w0": read_rank_rows([build_metrics(0)])}, PLAN, known)
    assert (found.gpu_values, found.prometheus_error, found.reporting_ranks, found.queried_at) == (
        known.gpu_values,
        "away",
        4,
        5.0,
    )


class TestReporters:
    def test_a_worker_reports_only_its_own_ranks(self) -> None:
        false_rows = read_rank_rows(
            [build_metrics(0), build_metrics(1), build_metrics(2, compute_seconds_per_sample=1e9), build_metrics(7)]
        )
        found = summarize_rank_rows(
            {"w0": false_rows, "w1": read_rank_rows([build_metrics(2), build_metrics(3)])}, PLAN, JobMetrics()
        )
        assert found.relative_time == pytest.approx(1.0)

    def test_only_members_of_the_plan_report(self) -> None:
        found = summarize_rank_rows(
            {"spare": read_rank_rows([build_metrics(3, compute_seconds_per_sample=1.0)])}, PLAN, JobMetrics()
        )
        assert found == JobMetrics(unreported_members=("w0", "w1"))

    def test_a_worker_that_omits_a_rank_is_unreported(self) -> None:
        found = summarize_rank_rows(
            {"w0": read_rank_rows([build_metrics(0)]), "w1": read_rank_rows([build_metrics(2), build_metrics(3)])},
            PLAN,
            JobMetrics(),
        )
        assert found.unreported_members == ("w0",)

    def test_the_last_row_of_a_rank_counts(self) -> None:
        twice = read_rank_rows([build_metrics(0, step_seconds=9.0), build_metrics(0, step_seconds=0.2)])
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
    def test_an_invalid_value_is_refused_by_its_name(self, name: str, value: object) -> None:
        heartbeat = Heartbeat(worker="w0", rank_metrics=(build_metrics(0),)).to_json()
        heartbeat["rank_metrics"][0][name] = value
        with pytest.raises(InputError, match=rf"rank_metrics\[0\].{name}"):
            Heartbeat.from_json(heartbeat)

    def test_more_ranks_than_a_worker_can_have_are_refused(self) -> None:
        heartbeat = Heartbeat(worker="w0").to_json() | {"rank_metrics": [{"rank": n} for n in range(1025)]}
        with pytest.raises(InputError, match="1024"):
            Heartbeat.from_json(heartbeat)

    @pytest.mark.parametrize("tiny", [5e-324, 1e-300, 0.0])
    @pytest.mark.parametrize("huge", [1e12])
    def test_extreme_metrics_give_finite_numbers(self, tiny: float, huge: float) -> None:
        for own in (tiny, huge):
            reported = [
                build_metrics(
                    n, step_seconds=own, compute_seconds=own, compute_seconds_per_sample=own, wait_seconds=huge
                )
                for n in range(2)
            ]
            found = summarize_rank_rows(
                {"w0": read_rank_rows([*reported[:1], build_metrics(1, first_steps_seconds=tiny)])}, PLAN, JobMetrics()
            )
            numbers = [value for value in vars(found).values() if isinstance(value, float)]
            assert all(math.isfinite(number) for number in numbers)


class TestImmediatePasses:
    """A worker has ranks 0 and 1. Ranks of its job take 0.01 s per sample, and slow ones 1.25 times that."""

    def test_a_rank_that_becomes_slow_or_recovers_starts_a_pass(self) -> None:
        last = JobMetrics(seconds_per_sample=0.01)
        well, slow = (
            read_rank_rows([build_metrics(0)]),
            read_rank_rows([build_metrics(0, compute_seconds_per_sample=0.0125)]),
        )
        assert needs_immediate_pass(well, slow, last, 1.25)
        assert needs_immediate_pass(slow, well, last, 1.25)
        assert not needs_immediate_pass(
            well, read_rank_rows([build_metrics(0, compute_seconds_per_sample=0.0124)]), last, 1.25
        )
        assert not needs_immediate_pass(
            slow, read_rank_rows([build_metrics(0, compute_seconds_per_sample=0.04)]), last, 1.25
        ), "it is known"
        assert not needs_immediate_pass(well, slow, JobMetrics(), 1.25), "no value to compare with"

    def test_a_change_of_the_least_waiting_rank_starts_a_pass(self) -> None:
        waits, works = (
            read_rank_rows([build_metrics(0, wait_seconds=0.1 * MIN_WAITING_SHARE)]),
            read_rank_rows([build_metrics(0, wait_seconds=0.0)]),
        )
        assert needs_immediate_pass(works, waits, JobMetrics(wait_share=0.0, least_waiting_rank=0), 1.25), (
            "it was the one that waited least"
        )
        assert not needs_immediate_pass(works, waits, JobMetrics(wait_share=0.0, least_waiting_rank=1), 1.25), (
            "another rank still waits least"
        )
        assert needs_immediate_pass(waits, works, JobMetrics(wait_share=0.5, least_waiting_rank=1), 1.25), (
            "not all wait any more"
        )
        assert not needs_immediate_pass(waits, waits, JobMetrics(wait_share=0.5, least_waiting_rank=1), 1.25)

    def test_empty_rows_start_no_pass(self) -> None:
        assert not needs_immediate_pass(
            NO_RANK_ROWS, NO_RANK_ROWS, JobMetrics(seconds_per_sample=0.01, wait_share=0.5, least_waiting_rank=0), 1.25
        )


@pytest.mark.parametrize(("last_step", "expected"), [(None, -1), (0, 0), (1234, 1234)])
def test_the_last_step_of_an_older_sender_is_unknown(last_step: int | None, expected: int) -> None:
    assert read_rank_rows([build_metrics(0, last_step=last_step)])["last_step"].tolist() == [expected]


def test_forty_thousand_ranks_are_summarized_without_objects_per_rank() -> None:
    """There are as many rows as ranks, and no Python object per rank."""
    members = tuple(Member(f"w{n}", "10.0.0.1", tuple(range(8 * n, 8 * n + 8))) for n in range(5000))
    rows = np.zeros(40_000, RANK_ROW)
    rows["rank"], rows["compute_seconds_per_sample"], rows["step_seconds"] = range(40_000), 0.01, 0.1
    rows_by_worker = {member.worker: rows[8 * n : 8 * n + 8] for n, member in enumerate(members)}
    found = summarize_rank_rows(rows_by_worker, Plan(members=members), JobMetrics())
    assert (found.relative_time, found.unreported_members) == (1.0, ())


def test_a_rank_takes_no_more_of_a_heartbeat_than_the_operator_allows() -> None:
    from pacekeeper_operator.endpoint.server import (
        HEARTBEAT_BYTES_PER_RANK,
        HEARTBEAT_TOKENS_PER_RANK,
        _compute_heartbeat_limits,
    )

    full = build_metrics(1023, **{name: 1.2345e-05 for name in RANK_ROW.names or () if name.endswith("seconds")})
    full = replace(full, last_step=10**12)
    heartbeat = Heartbeat(
        worker="w" * 253,
        rank_metrics=(full,) * 1024,
        unkillable_ranks=tuple(range(1024)),
        training=TrainingReport(refused="é" * 2000),
    )
    body = json.dumps(heartbeat.to_json()).encode()
    most, most_marks = _compute_heartbeat_limits(1024)
    assert len(body) <= most
    assert body.count(b",") + body.count(b"{") + body.count(b"[") <= most_marks
    assert _compute_heartbeat_limits(1) == _compute_heartbeat_limits(100)
    assert (HEARTBEAT_BYTES_PER_RANK, HEARTBEAT_TOKENS_PER_RANK) <= (512, 16)

"""Costs and verdicts, from fake readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.clusters import Usage
from tests.run.lanes import Result
from tests.run.parts import Part
from tests.run.slowdown import INTERVAL_SECONDS, USUAL_SECONDS, SlowdownMeter
from tests.run.summary import Counts, count_tests, exceeds_budget, extract_failures, format_table, summarize_run


def build_result(name: str, used: float, budget: float = 100, status: int = 0) -> Result:
    return Result(Part(name, "lane", budget, "true"), status, wall_seconds=61, processor_seconds=used)


@pytest.mark.parametrize(
    ("readings", "total"),
    [
        ([{"a": 10}, {"a": 12}, {"a": 15}], 5),  # usage before the run does not count
        ([{}, {"a": 3}, {"a": 4}], 4),  # a new cluster begins at zero
        ([{"a": 10}, {}, {"a": 2}], 2),  # deleted and created again
        ([{"a": 10}, {"a": 2}], 2),  # the same between two readings
        ([{"a": 1, "b": 1}, {"a": 2, "b": 4}], 4),
        ([{"a": 10}, {}], 0),
    ],
)
def test_usage_of_clusters_is_summed_over_restarts(readings: list[dict[str, float]], total: float) -> None:
    usage = Usage(readings[0])
    for reading in readings[1:]:
        usage.add(reading)
    assert usage.total == total


def test_only_the_budget_of_the_whole_run_can_fail_it() -> None:
    assert not exceeds_budget([build_result("a", 190), build_result("b", 110)])
    assert exceeds_budget([build_result("a", 190), build_result("b", 111)])


def test_the_table_lists_costs_and_budgets() -> None:
    table = format_table([build_result("unit", 50), build_result("distributed", 120, status=1)], wall_seconds=70)
    assert [line.split() for line in table.splitlines()] == [
        ["part", "wall", "processor", "budget", "share", "result"],
        ["unit", "1:01", "50", "s", "100", "s", "50%", "passed"],
        ["distributed", "1:01", "120", "s", "100", "s", "120%", "failed"],
        ["total", "1:10", "170", "s", "200", "s", "85%", "failed"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_parts_over_their_budget_are_named_and_failures_repeated(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text("long\n=== FAILURES ===\nwhy\n=== 1 failed in 2s ===\n")
    lines = summarize_run([build_result("a", 101), build_result("b", 7, status=1)], 70, tmp_path).splitlines()
    assert lines[:4] == ["b failed:", "b | === FAILURES ===", "b | why", "b | === 1 failed in 2s ==="]
    assert lines[-2:] == ["Over their budget: a.", "0 passed, 1 failed"]


def test_a_slow_machine_does_not_exceed_the_budget() -> None:
    measurements = iter([USUAL_SECONDS, 2 * USUAL_SECONDS, 9 * USUAL_SECONDS])
    meter = SlowdownMeter(lambda: next(measurements))
    assert meter.slowdown == 1
    meter.update(0.0)
    meter.update(INTERVAL_SECONDS / 2)  # not due
    meter.update(INTERVAL_SECONDS)
    meter.update(2 * INTERVAL_SECONDS)
    assert meter.slowdown == 2, "the median"
    used = build_result("a", 250)
    assert exceeds_budget([used])
    assert not exceeds_budget([used.normalize(meter.slowdown)])


def test_a_fast_machine_changes_nothing() -> None:
    meter = SlowdownMeter(lambda: USUAL_SECONDS / 2)
    meter.update(0.0)
    assert meter.slowdown == 1


def test_failed_tests_are_named_below_the_table(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text("=== FAILURES ===\n")
    (tmp_path / "b.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="1">'
        '<testcase classname="tests.m" name="good"/>'
        '<testcase classname="tests.m" name="bad"><failure message="assert 1 == 2&#10; +  where"/></testcase>'
        '<testcase classname="tests.m" name="worse"><error message="failed on setup"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert summarize_run([build_result("b", 7, status=1)], 70, tmp_path).splitlines()[-3:] == [
        "b FAILED tests.m::bad: assert 1 == 2 + where",
        "b FAILED tests.m::worse: failed on setup",
        "1 passed, 2 failed",
    ]


def test_a_part_that_fails_without_a_failed_test_counts_as_one(tmp_path: Path) -> None:
    assert count_tests(build_result("a", 1, status=2), tmp_path) == Counts(failed=1)
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>'
    )
    assert count_tests(build_result("a", 1, status=2), tmp_path) == Counts(passed=2, failed=1, skipped=1)
    assert count_tests(build_result("a", 1), tmp_path) == Counts(passed=2, skipped=1)


def test_a_failed_part_without_pytest_shows_its_last_lines() -> None:
    assert extract_failures("\n".join(map(str, range(100)))).splitlines() == [str(line) for line in range(40, 100)]

"""Whether a node is slow beside others; and words of probe pods, which may say anything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.node_probe import ProbeLink, ProbeMetrics
from pacekeeper_operator.decide.nodes.probe_measurements import (
    MAX_TERMINATION_MESSAGE_CHARACTERS,
    describe_slowness,
    read_measurements,
)

USUAL = ProbeMetrics(0.002, memory_bytes_per_second=30e9)
FAST, SLOW = 1e9, 6e6


def circle(**changed: ProbeMetrics) -> dict[str, ProbeMetrics]:
    """Hosts a and b, and their guest c."""
    found = {"a": USUAL, "b": linked(b_a=(FAST, FAST)), "c": linked(c_a=(FAST, FAST), c_b=(FAST, FAST))}
    return found | changed


def linked(**ways: tuple[float, float]) -> ProbeMetrics:
    """`c_a`: from c to a, and back."""
    return replace(USUAL, links=tuple(ProbeLink(name[-1], *ways[name], ping=1e-5) for name in ways))


class TestSlow:
    def test_alike_nobody_is(self) -> None:
        assert [describe_slowness(name, circle()) for name in "abc"] == ["", "", ""]

    def test_cores_are_held_against_the_median_of_the_others(self) -> None:
        found = circle(a=replace(USUAL, core_seconds=0.0027))
        assert "its cores take 1.4 times as long" in describe_slowness("a", found)
        assert describe_slowness("b", found) == describe_slowness("c", found) == ""
        assert describe_slowness("a", circle(a=replace(USUAL, core_seconds=0.0025))) == ""

    def test_time_in_which_nobody_else_worked_counts(self) -> None:
        words = describe_slowness("a", circle(a=replace(USUAL, held_back=0.5)))
        assert "2.0 times" in words
        assert "held back for 50%" in words
        assert describe_slowness("a", {name: replace(f, held_back=0.5) for name, f in circle().items()}) == "", (
            "all are, alike"
        )

    @pytest.mark.parametrize(
        ("out", "back", "words"),
        [(SLOW, FAST, "it sends 6 MB/s"), (FAST, SLOW, "it receives 6 MB/s")],
    )
    def test_a_slow_way_of_a_guest_is_told_by_both_hosts(self, out: float, back: float, words: str) -> None:
        found = circle(c=linked(c_a=(out, back), c_b=(out, back)))
        assert describe_slowness("c", found).startswith(words)
        assert describe_slowness("a", found) == describe_slowness("b", found) == ""

    def test_a_slow_host_is_not_held_against_its_guests(self) -> None:
        found = circle(b=linked(b_a=(SLOW, SLOW)), c=linked(c_a=(SLOW, SLOW), c_b=(FAST, FAST)))
        assert "it sends" in describe_slowness("a", found)
        assert describe_slowness("b", found) == describe_slowness("c", found) == ""

    def test_memory(self) -> None:
        assert "its memory takes" in describe_slowness("a", circle(a=replace(USUAL, memory_bytes_per_second=10e9)))

    def test_of_two_nobody_can_tell(self) -> None:
        found = {"a": replace(USUAL, core_seconds=1.0), "b": USUAL}
        assert describe_slowness("a", found) == ""

    def test_who_has_told_nothing_is_not_judged(self) -> None:
        assert describe_slowness("d", circle()) == ""


def busy(figures: ProbeMetrics, idle: float) -> ProbeMetrics:
    """Others left so many of eight cores."""
    return replace(figures, cores=8, idle_cores=idle)


class TestABusyNode:
    """What others compute there makes its figures bad, whatever they do elsewhere."""

    @pytest.mark.parametrize("others", [8.0, 1.0])
    def test_is_not_held_to_be_slow_by_its_cores(self, others: float) -> None:
        found = {name: busy(figures, others) for name, figures in circle().items()}
        slow_cores = replace(USUAL, core_seconds=0.004)
        assert describe_slowness("a", found | {"a": busy(slow_cores, 5.9)}) == ""
        assert "its cores take 2.0 times" in describe_slowness("a", found | {"a": busy(slow_cores, 6.1)})

    @pytest.mark.parametrize("others", [8.0, 1.0])
    def test_nor_by_its_memory_for_which_less_work_is_enough(self, others: float) -> None:
        found = {name: busy(figures, others) for name, figures in circle().items()}
        slow_memory = replace(USUAL, memory_bytes_per_second=10e9)
        assert describe_slowness("a", found | {"a": busy(slow_memory, 7.1)}) == ""
        assert "its memory takes" in describe_slowness("a", found | {"a": busy(slow_memory, 7.3)})

    def test_nor_for_time_that_it_had_to_wait_there(self) -> None:
        """Cores that are idle in between sum up, and yet none was to be had."""
        waited = replace(USUAL, core_seconds=0.004, held_back=0.7)
        assert describe_slowness("a", circle(a=busy(waited, 0.0))) == ""

    def test_but_for_what_a_quota_takes(self) -> None:
        throttled = replace(USUAL, held_back=0.72, throttled=0.8)
        assert "3.6 times as long" in describe_slowness("a", circle(a=busy(throttled, 0.0)))
        alike = {name: busy(replace(f, held_back=0.72, throttled=0.8), 0.0) for name, f in circle().items()}
        assert describe_slowness("a", alike) == ""

    def test_and_for_its_ways(self) -> None:
        found = circle(c=busy(linked(c_a=(SLOW, FAST), c_b=(SLOW, FAST)), 0.0))
        assert describe_slowness("c", found).startswith("it sends")


class TestReading:
    def test_figures(self) -> None:
        link = {"peer": "node-1", "up": 1.0, "down": 2.0, "ping": 0.1}
        figures, unfit = read_measurements(
            json.dumps({"core_seconds": 0.002, "links": [link], "of a later version": 7})
        )
        assert figures == ProbeMetrics(0.002, links=(ProbeLink("node-1", 1.0, 2.0, 0.1),))
        assert unfit == ""

    def test_unfit(self) -> None:
        assert read_measurements('{"unfit":"memory does not keep"}') == (None, "memory does not keep")

    @pytest.mark.parametrize(
        "words", ["", "passed", "[1]", "7", "{", "[" * 4000, '"x"', "{}" + " " * MAX_TERMINATION_MESSAGE_CHARACTERS]
    )
    def test_what_is_no_object_holds_none(self, words: str) -> None:
        assert read_measurements(words) == (None, "")

    @pytest.mark.parametrize(
        ("data", "field"),
        [
            ({}, "core_seconds"),
            ({"core_seconds": "fast"}, "core_seconds"),
            ({"core_seconds": -1}, "core_seconds"),
            ({"core_seconds": float("nan")}, "core_seconds"),
            ({"core_seconds": 1, "held_back": 2}, "held_back"),
            ({"core_seconds": 1, "cores": 10**400}, "cores"),
            ({"core_seconds": 1, "links": [{}] * 9}, "links"),
            ({"core_seconds": 1, "links": [{"peer": "a\n", "up": 1, "down": 1, "ping": 1}]}, "peer"),
            ({"core_seconds": 1, "links": {"peer": "a"}}, "links"),
            ({"unfit": ["x"]}, "unfit"),
        ],
    )
    def test_what_is_wrong_is_named(self, data: object, field: str) -> None:
        with pytest.raises(InputError, match=field):
            read_measurements(json.dumps(data))

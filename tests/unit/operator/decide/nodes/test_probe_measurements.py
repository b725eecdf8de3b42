"""Whether a node is slow compared with others, and reading the messages of probe pods, which may be invalid."""

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

NORMAL = ProbeMetrics(0.002, memory_bytes_per_second=30e9)
FAST, SLOW = 1e9, 6e6


def build_group(**changed: ProbeMetrics) -> dict[str, ProbeMetrics]:
    """Build the metrics of a group: servers a and b, and their client c."""
    found = {"a": NORMAL, "b": build_linked(b_a=(FAST, FAST)), "c": build_linked(c_a=(FAST, FAST), c_b=(FAST, FAST))}
    return found | changed


def build_linked(**links: tuple[float, float]) -> ProbeMetrics:
    """Build metrics with links. `c_a`: from c to a, and back."""
    return replace(NORMAL, links=tuple(ProbeLink(name[-1], *links[name], ping=1e-5) for name in links))


class TestSlow:
    def test_no_node_is_slow_if_all_are_equal(self) -> None:
        assert [describe_slowness(name, build_group()) for name in "abc"] == ["", "", ""]

    def test_cores_are_compared_with_the_median_of_the_others(self) -> None:
        found = build_group(a=replace(NORMAL, core_seconds=0.0027))
        assert "its cores take 1.4 times as long" in describe_slowness("a", found)
        assert describe_slowness("b", found) == describe_slowness("c", found) == ""
        assert describe_slowness("a", build_group(a=replace(NORMAL, core_seconds=0.0025))) == ""

    def test_time_held_back_counts(self) -> None:
        message = describe_slowness("a", build_group(a=replace(NORMAL, held_back=0.5)))
        assert "2.0 times" in message
        assert "held back for 50%" in message
        assert (
            describe_slowness("a", {name: replace(metrics, held_back=0.5) for name, metrics in build_group().items()})
            == ""
        ), "all nodes are equally held back"

    @pytest.mark.parametrize(
        ("up", "down", "message"),
        [(SLOW, FAST, "it sends 6 MB/s"), (FAST, SLOW, "it receives 6 MB/s")],
    )
    def test_a_slow_client_link_is_confirmed_by_both_servers(self, up: float, down: float, message: str) -> None:
        found = build_group(c=build_linked(c_a=(up, down), c_b=(up, down)))
        assert describe_slowness("c", found).startswith(message)
        assert describe_slowness("a", found) == describe_slowness("b", found) == ""

    def test_a_slow_server_does_not_make_its_clients_slow(self) -> None:
        found = build_group(b=build_linked(b_a=(SLOW, SLOW)), c=build_linked(c_a=(SLOW, SLOW), c_b=(FAST, FAST)))
        assert "it sends" in describe_slowness("a", found)
        assert describe_slowness("b", found) == describe_slowness("c", found) == ""

    def test_slow_memory_is_described(self) -> None:
        assert "its memory takes" in describe_slowness(
            "a", build_group(a=replace(NORMAL, memory_bytes_per_second=10e9))
        )

    def test_two_nodes_are_too_few_to_compare(self) -> None:
        found = {"a": replace(NORMAL, core_seconds=1.0), "b": NORMAL}
        assert describe_slowness("a", found) == ""

    def test_a_node_without_measurements_is_not_slow(self) -> None:
        assert describe_slowness("d", build_group()) == ""


def with_idle_cores(metrics: ProbeMetrics, idle: float) -> ProbeMetrics:
    """Return the metrics with `idle` of eight cores unused by others."""
    return replace(metrics, cores=8, idle_cores=idle)


class TestBusyNode:
    """Work of others on the node makes its metrics worse, independent of the work on other nodes."""

    @pytest.mark.parametrize("others", [8.0, 1.0])
    def test_a_busy_node_is_not_slow_by_its_cores(self, others: float) -> None:
        found = {name: with_idle_cores(metrics, others) for name, metrics in build_group().items()}
        slow_cores = replace(NORMAL, core_seconds=0.004)
        assert describe_slowness("a", found | {"a": with_idle_cores(slow_cores, 5.9)}) == ""
        assert "its cores take 2.0 times" in describe_slowness("a", found | {"a": with_idle_cores(slow_cores, 6.1)})

    @pytest.mark.parametrize("others", [8.0, 1.0])
    def test_a_node_with_little_work_is_not_slow_by_its_memory(self, others: float) -> None:
        found = {name: with_idle_cores(metrics, others) for name, metrics in build_group().items()}
        slow_memory = replace(NORMAL, memory_bytes_per_second=10e9)
        assert describe_slowness("a", found | {"a": with_idle_cores(slow_memory, 7.1)}) == ""
        assert "its memory takes" in describe_slowness("a", found | {"a": with_idle_cores(slow_memory, 7.3)})

    def test_a_busy_node_is_not_slow_by_time_held_back(self) -> None:
        """Short idle periods of cores add up, although no core was available."""
        held_back = replace(NORMAL, core_seconds=0.004, held_back=0.7)
        assert describe_slowness("a", build_group(a=with_idle_cores(held_back, 0.0))) == ""

    def test_a_busy_node_is_slow_by_throttled_time(self) -> None:
        throttled = replace(NORMAL, held_back=0.72, throttled=0.8)
        assert "3.6 times as long" in describe_slowness("a", build_group(a=with_idle_cores(throttled, 0.0)))
        all_throttled = {
            name: with_idle_cores(replace(metrics, held_back=0.72, throttled=0.8), 0.0)
            for name, metrics in build_group().items()
        }
        assert describe_slowness("a", all_throttled) == ""

    def test_a_busy_node_is_slow_by_its_links(self) -> None:
        found = build_group(c=with_idle_cores(build_linked(c_a=(SLOW, FAST), c_b=(SLOW, FAST)), 0.0))
        assert describe_slowness("c", found).startswith("it sends")


class TestReading:
    def test_metrics_are_read(self) -> None:
        link = {"peer": "node-1", "up": 1.0, "down": 2.0, "ping": 0.1}
        metrics, unfit = read_measurements(
            json.dumps({"core_seconds": 0.002, "links": [link], "of a later version": 7})
        )
        assert metrics == ProbeMetrics(0.002, links=(ProbeLink("node-1", 1.0, 2.0, 0.1),))
        assert unfit == ""

    def test_an_unfit_node_is_read(self) -> None:
        assert read_measurements('{"unfit":"memory does not keep"}') == (None, "memory does not keep")

    @pytest.mark.parametrize(
        "text", ["", "passed", "[1]", "7", "{", "[" * 4000, '"x"', "{}" + " " * MAX_TERMINATION_MESSAGE_CHARACTERS]
    )
    def test_text_that_is_no_object_contains_no_metrics(self, text: str) -> None:
        assert read_measurements(text) == (None, "")

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
    def test_the_error_names_the_invalid_field(self, data: object, field: str) -> None:
        with pytest.raises(InputError, match=field):
            read_measurements(json.dumps(data))

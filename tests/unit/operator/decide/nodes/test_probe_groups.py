"""Who is probed together, and which pod of a circle is started when."""

from __future__ import annotations

from pacekeeper_operator.decide.nodes.probe_groups import (
    MAX_PROBE_GROUP_NODES,
    PROBE_SERVER_START_SECONDS,
    ProbeGroupMember,
    ProbeLaunch,
    form_probe_groups,
    plan_probe_launches,
)
from pacekeeper_operator.decide.nodes.quarantine_steps import ProbePod

A, B, C, D = (ProbeGroupMember(f"pod-{name}", name) for name in "abcd")
CIRCLE = (A, B, C, D)
UP = {seat.pod: ProbePod("Running", node=seat.node, address=f"10.0.0.{i}") for i, seat in enumerate(CIRCLE)}


def due(*pods: str, waited: float = 0.0, **changed: ProbePod) -> list[ProbeLaunch]:
    there = {pod: UP[pod] for pod in pods} | {f"pod-{name}": pod for name, pod in changed.items()}
    return list(plan_probe_launches(CIRCLE, there, waited))


class TestLaunches:
    def test_a_host_comes_before_those_who_are_told_its_address(self) -> None:
        assert due() == [ProbeLaunch(A, {}, 3)]
        assert due(a=ProbePod("Pending", address="10.0.0.0")) == [], "its image is still being pulled"
        assert due("pod-a") == [ProbeLaunch(B, {"a": "10.0.0.0"}, 2)]
        both = {"a": "10.0.0.0", "b": "10.0.0.1"}
        assert due("pod-a", "pod-b") == [ProbeLaunch(C, both, 0), ProbeLaunch(D, both, 0)]
        assert due("pod-a", "pod-b", "pod-c", "pod-d") == []

    def test_a_host_that_does_not_come_is_done_without(self) -> None:
        pending = ProbePod("Pending")
        assert due(a=pending, waited=PROBE_SERVER_START_SECONDS) == [ProbeLaunch(B, {}, 2)]
        assert [launch.peers for launch in due("pod-b", a=pending, waited=PROBE_SERVER_START_SECONDS)] == [
            {"b": "10.0.0.1"}
        ] * 2
        assert len(due(a=pending, b=pending, waited=2 * PROBE_SERVER_START_SECONDS)) == 2

    def test_one_that_has_ended_is_nobodys_peer(self) -> None:
        ended = ProbePod("Failed", address="10.0.0.0")
        assert due(a=ended) == [ProbeLaunch(B, {}, 2)]

    def test_alone(self) -> None:
        assert list(plan_probe_launches((A,), {}, 0.0)) == [ProbeLaunch(A, {}, 0)]


class TestCircles:
    def test_all_are_in_one_and_none_is_too_small_or_too_large(self) -> None:
        for count in range(3, 40):
            names = [f"n{i}" for i in range(count)]
            found = form_probe_groups(names, [], lambda _: "alike")
            assert sorted(name for one in found for name in one) == sorted(names)
            assert all(3 <= len(one) <= MAX_PROBE_GROUP_NODES for one in found)

    def test_who_lacks_company_gets_the_best_of_its_kind(self) -> None:
        assert form_probe_groups(["n"], ["best", "good", "third"], lambda _: 0) == [("best", "good", "n")]
        kinds = {"n": "gpu", "best": "cpu", "good": "gpu"}
        assert form_probe_groups(["n"], ["best", "good"], kinds.__getitem__) == [("good", "n")]

    def test_kinds_are_apart(self) -> None:
        names = ["a1", "b1", "a2", "b2", "a3", "b3"]
        assert form_probe_groups(names, [], lambda name: name[0]) == [("a1", "a2", "a3"), ("b1", "b2", "b3")]

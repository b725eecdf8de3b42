"""Which nodes are probed together, and when each pod of a group starts."""

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
GROUP = (A, B, C, D)
UP = {
    member.pod: ProbePod("Running", node=member.node, address=f"10.0.0.{index}") for index, member in enumerate(GROUP)
}


def list_due(*pods: str, waited_seconds: float = 0.0, **changed: ProbePod) -> list[ProbeLaunch]:
    running = {pod: UP[pod] for pod in pods} | {f"pod-{name}": pod for name, pod in changed.items()}
    return list(plan_probe_launches(GROUP, running, waited_seconds))


class TestLaunches:
    def test_a_probe_server_starts_before_the_pods_that_receive_its_address(self) -> None:
        assert list_due() == [ProbeLaunch(A, {}, 3)]
        assert list_due(a=ProbePod("Pending", address="10.0.0.0")) == [], "its image is still being pulled"
        assert list_due("pod-a") == [ProbeLaunch(B, {"a": "10.0.0.0"}, 2)]
        both = {"a": "10.0.0.0", "b": "10.0.0.1"}
        assert list_due("pod-a", "pod-b") == [ProbeLaunch(C, both, 0), ProbeLaunch(D, both, 0)]
        assert list_due("pod-a", "pod-b", "pod-c", "pod-d") == []

    def test_a_probe_server_that_does_not_start_is_left_out(self) -> None:
        pending = ProbePod("Pending")
        assert list_due(a=pending, waited_seconds=PROBE_SERVER_START_SECONDS) == [ProbeLaunch(B, {}, 2)]
        assert [launch.peers for launch in list_due("pod-b", a=pending, waited_seconds=PROBE_SERVER_START_SECONDS)] == [
            {"b": "10.0.0.1"}
        ] * 2
        assert len(list_due(a=pending, b=pending, waited_seconds=2 * PROBE_SERVER_START_SECONDS)) == 2

    def test_a_pod_that_has_ended_is_no_peer(self) -> None:
        ended = ProbePod("Failed", address="10.0.0.0")
        assert list_due(a=ended) == [ProbeLaunch(B, {}, 2)]

    def test_a_single_pod_starts_without_peers(self) -> None:
        assert list(plan_probe_launches((A,), {}, 0.0)) == [ProbeLaunch(A, {}, 0)]


class TestGroups:
    def test_each_node_is_in_one_group_of_allowed_size(self) -> None:
        for count in range(3, 40):
            names = [f"n{index}" for index in range(count)]
            found = form_probe_groups(names, [], lambda _: "alike")
            assert sorted(name for group in found for name in group) == sorted(names)
            assert all(3 <= len(group) <= MAX_PROBE_GROUP_NODES for group in found)

    def test_a_small_group_is_filled_with_the_best_node_of_its_kind(self) -> None:
        assert form_probe_groups(["n"], ["best", "good", "third"], lambda _: 0) == [("best", "good", "n")]
        kinds = {"n": "gpu", "best": "cpu", "good": "gpu"}
        assert form_probe_groups(["n"], ["best", "good"], kinds.__getitem__) == [("good", "n")]

    def test_groups_contain_one_kind_of_node(self) -> None:
        names = ["a1", "b1", "a2", "b2", "a3", "b3"]
        assert form_probe_groups(names, [], lambda name: name[0]) == [("a1", "a2", "a3"), ("b1", "b2", "b3")]

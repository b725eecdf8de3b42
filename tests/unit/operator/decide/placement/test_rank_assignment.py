"""Rank assignments by where nodes are in the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.training_job import JobStatus, LeafCrossings
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.decide.placement import membership
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    build_fresh,
    build_job,
    build_policy,
    build_training,
    change_worker,
    with_pods,
)

LEAF = "fabric.topograph.run/tier-0"
ZONE = "topology.kubernetes.io/zone"


def with_labels(observation: Observation, labels: Mapping[str, Mapping[str, str]]) -> Observation:
    """Return the observation with these labels, by node."""
    cluster_view = observation.cluster_view
    nodes = {name: replace(node, labels=labels.get(name, {})) for name, node in cluster_view.nodes.items()}
    return replace(observation, cluster_view=replace(cluster_view, nodes=nodes))


def with_leaves(observation: Observation, names: str) -> Observation:
    """Put node-0 into the leaf of the first letter, and so on; "-": no label."""
    return with_labels(observation, {f"node-{n}": {LEAF: name} for n, name in enumerate(names) if name != "-"})


def build_ready(replicas: int, spares: int = 0, *, workers_per_node: int = 1, ranks: int = 1) -> Observation:
    """Build a job whose workers are all warm, before it has members; `ranks`: of each worker."""
    start = build_fresh(replicas, spares, job=build_job(replicas, spares, nproc_per_node=ranks))
    observation = start.with_desired(evaluate_job(start, build_policy()).desired)
    observation = with_pods(observation, state=LauncherState.WARM)
    for view in observation.workers:
        observation = change_worker(
            observation, view.name, pod={"node": f"node-{view.record.ordinal // workers_per_node}"}
        )
    return observation


def list_ordinals(observation: Observation) -> list[int]:
    """Return the ordinals of the workers in the order of their ranks after the step."""
    members = membership.update_membership(observation, build_policy()).plan.members
    assert [rank for member in members for rank in member.ranks] == list(range(len(members)))
    return [int(member.worker.split("-")[1][1:]) for member in members]


def with_lost(observation: Observation, *names: str) -> Observation:
    for name in names:
        record = observation.state.placement.find_worker(name)
        assert record is not None
        observation = observation.with_desired(
            observation.desired.with_worker(replace(record, leaving="it is lost", dead=True))
        )
        observation = change_worker(observation, name, gone=True)
    return observation


class TestFirstAssignment:
    def test_a_ring_leaves_each_leaf_once(self) -> None:
        assert list_ordinals(with_leaves(build_ready(6), "abcabc")) == [0, 3, 1, 4, 2, 5]

    def test_outer_tiers_hold_the_inner_ones_together(self) -> None:
        block = "fabric.topograph.run/tier-1"
        tiers = [("a", "x"), ("b", "y"), ("c", "x"), ("a", "x"), ("b", "y"), ("c", "x")]
        labels = {f"node-{n}": {LEAF: leaf, block: block_name} for n, (leaf, block_name) in enumerate(tiers)}
        assert list_ordinals(with_labels(build_ready(6), labels)) == [0, 3, 2, 5, 1, 4]

    def test_workers_of_one_node_are_neighbors(self) -> None:
        observation = with_leaves(build_ready(4, workers_per_node=2), "aa")
        observation = change_worker(observation, "j-w1-0", pod={"node": "node-1"})
        observation = change_worker(observation, "j-w2-0", pod={"node": "node-0"})
        assert list_ordinals(observation) == [0, 2, 1, 3]

    @pytest.mark.parametrize("names", ["------", "aaaaaa", "aabbcc", "abcdef"])
    def test_an_optimal_order_stays(self, names: str) -> None:
        assert list_ordinals(with_leaves(build_ready(6), names)) == [0, 1, 2, 3, 4, 5]

    def test_a_worker_of_unknown_location_comes_last(self) -> None:
        assert list_ordinals(with_leaves(build_ready(6), "a-ba-b")) == [0, 3, 2, 5, 1, 4]

    def test_labels_that_contradict_each_other_are_not_mixed(self) -> None:
        """Four nodes have a label of their leaf, and two of their zone, of which one has the name of a leaf."""
        labels = {f"node-{n}": {LEAF: name} for n, name in enumerate("abab")}
        labels |= {"node-4": {ZONE: "a"}, "node-5": {ZONE: "z"}}
        assert list_ordinals(with_labels(build_ready(6), labels)) == [0, 2, 1, 3, 4, 5]

    def test_labels_of_the_fabric_take_precedence(self) -> None:
        labels = {
            f"node-{n}": {LEAF: leaf, "rack": rack} for n, (leaf, rack) in enumerate(zip("aabb", "xyxy", strict=True))
        }
        observation = with_labels(build_ready(4), labels)
        assert list_ordinals(observation) == [0, 1, 2, 3]
        assert list_ordinals(
            replace(observation, cluster_view=replace(observation.cluster_view, levels=("rack",)))
        ) == [0, 2, 1, 3]

    def test_all_ranks_of_a_worker_stay_together_and_in_order(self) -> None:
        """The innermost axis of a mesh is within a worker, and stays there."""
        members = membership.update_membership(
            with_leaves(build_ready(4, ranks=2), "abab"), build_policy()
        ).plan.members
        assert [(member.worker, member.ranks) for member in members] == [
            ("j-w0-0", (0, 1)),
            ("j-w2-0", (2, 3)),
            ("j-w1-0", (4, 5)),
            ("j-w3-0", (6, 7)),
        ]

    def test_a_removed_node_has_no_location(self) -> None:
        observation = with_leaves(build_ready(4), "abab")
        nodes = {name: node for name, node in observation.cluster_view.nodes.items() if name != "node-0"}
        assert list_ordinals(replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))) == [
            1,
            3,
            2,
            0,
        ]


class TestReplacing:
    def test_the_nearest_spare_takes_the_ranks(self) -> None:
        assert list_ordinals(with_lost(with_leaves(build_training(4, 2), "aabbab"), "j-w3-0")) == [0, 1, 2, 5]
        assert list_ordinals(with_lost(with_leaves(build_training(4, 2), "aabbab"), "j-w0-0")) == [4, 1, 2, 3]

    def test_two_lost_workers_each_get_the_nearest_spare(self) -> None:
        assert list_ordinals(with_lost(with_leaves(build_training(4, 2), "aabbba"), "j-w0-0", "j-w3-0")) == [5, 1, 2, 4]

    def test_without_labels_the_first_spare_takes_the_ranks(self) -> None:
        assert list_ordinals(with_lost(build_training(4, 2), "j-w3-0")) == [0, 1, 2, 4]

    def test_without_a_spare_in_the_leaf_one_near_most_others_takes_the_ranks(self) -> None:
        assert list_ordinals(with_lost(with_leaves(build_training(4, 2), "abbbcb"), "j-w0-0")) == [5, 1, 2, 3]

    def test_no_other_worker_moves_even_if_labels_change(self) -> None:
        observation = with_leaves(build_training(4, 1), "ababa")
        assert membership.update_membership(observation, build_policy()) is observation.desired, (
            "the ranks hold their state where they are"
        )
        assert list_ordinals(with_lost(observation, "j-w3-0")) == [0, 1, 2, 4]

    def test_a_spare_takes_all_ranks_of_the_lost_worker_in_order(self) -> None:
        """Ranks that hold parts of a sharded model may not be exchanged, neither within a node nor between nodes."""
        observation = with_leaves(build_training(3, 1, job=build_job(3, 1, nproc_per_node=2)), "abaa")
        paired = tuple(replace(member, ranks=(2 * n, 2 * n + 1)) for n, member in enumerate(observation.plan.members))
        observation = observation.with_desired(observation.desired.with_plan(members=paired))
        assert membership.update_membership(observation, build_policy()) is observation.desired
        members = membership.update_membership(with_lost(observation, "j-w1-0"), build_policy()).plan.members
        assert [(member.worker, member.ranks) for member in members] == [
            ("j-w0-0", (0, 1)),
            ("j-w3-0", (2, 3)),
            ("j-w2-0", (4, 5)),
        ]

    def test_added_workers_are_ordered_among_themselves(self) -> None:
        observation = with_leaves(build_training(2, 3, job=build_job(5, 0)), "abbab")
        observation = observation.with_desired(membership.update_membership(observation, build_policy()))
        for name in ("j-w0-0", "j-w1-0"):
            observation = change_worker(observation, name, heartbeat={"checkpoint": {"request": 1}})
        assert list_ordinals(observation) == [0, 1, 2, 4, 3]


class TestLeafCrossings:
    def read_crossings(self, observation: Observation) -> LeafCrossings | None:
        return build_job_status(observation, build_policy(), JobStatus()).leaf_crossings

    def test_current_and_minimal_leaf_crossings_of_the_ring(self) -> None:
        assert self.read_crossings(with_leaves(build_training(4), "abab")) == LeafCrossings(now=4, best=2)
        assert self.read_crossings(with_leaves(build_training(4), "aabb")) == LeafCrossings(now=2, best=2)
        assert self.read_crossings(with_leaves(build_training(4), "aaaa")) == LeafCrossings(now=0, best=0)

    def test_without_labels_or_members_there_are_no_leaf_crossings(self) -> None:
        assert self.read_crossings(build_training()) is None
        assert self.read_crossings(with_leaves(build_ready(2), "ab")) is None, "no worker has ranks yet"

    def test_leaf_crossings_as_json(self) -> None:
        status = JobStatus(leaf_crossings=LeafCrossings(4, 2))
        assert status.to_patch()["leafCrossings"] == {"now": 4, "best": 2}
        assert JobStatus.parse(status.to_patch() | {"conditions": []}).leaf_crossings == LeafCrossings(4, 2)
        assert JobStatus().to_patch()["leafCrossings"] is None, "it is removed"

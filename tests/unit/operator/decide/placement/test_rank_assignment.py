"""Seats by where nodes are in the network."""

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


def labeled(world: Observation, labels: Mapping[str, Mapping[str, str]]) -> Observation:
    """`labels`: by node."""
    around = world.cluster_view
    nodes = {name: replace(node, labels=labels.get(name, {})) for name, node in around.nodes.items()}
    return replace(world, cluster_view=replace(around, nodes=nodes))


def leaves(world: Observation, names: str) -> Observation:
    """node-0 is in the leaf of the first letter, and so on; "-": no label."""
    return labeled(world, {f"node-{n}": {LEAF: name} for n, name in enumerate(names) if name != "-"})


def ready(replicas: int, spares: int = 0, *, to_a_node: int = 1, ranks: int = 1) -> Observation:
    """A job whose workers are all warm, before it has seats; so many workers to a node, and ranks to a worker."""
    start = build_fresh(replicas, spares, job=build_job(replicas, spares, nproc_per_node=ranks))
    world = start.with_desired(evaluate_job(start, build_policy()).desired)
    world = with_pods(world, state=LauncherState.WARM)
    for view in world.workers:
        world = change_worker(world, view.name, pod={"node": f"node-{view.record.ordinal // to_a_node}"})
    return world


def seats(world: Observation) -> list[int]:
    """Ordinals of the workers in the order of their seats, once the step has been taken."""
    members = membership.update_membership(world, build_policy()).plan.members
    assert [rank for member in members for rank in member.ranks] == list(range(len(members)))
    return [int(member.worker.split("-")[1][1:]) for member in members]


def lost(world: Observation, *names: str) -> Observation:
    for name in names:
        record = world.state.placement.find_worker(name)
        assert record is not None
        world = world.with_desired(world.desired.with_worker(replace(record, leaving="it is lost", dead=True)))
        world = change_worker(world, name, gone=True)
    return world


class TestFounding:
    def test_a_ring_leaves_each_leaf_once(self) -> None:
        assert seats(leaves(ready(6), "abcabc")) == [0, 3, 1, 4, 2, 5]

    def test_outer_tiers_hold_the_inner_ones_together(self) -> None:
        block = "fabric.topograph.run/tier-1"
        where = [("a", "x"), ("b", "y"), ("c", "x"), ("a", "x"), ("b", "y"), ("c", "x")]
        labels = {f"node-{n}": {LEAF: leaf, block: of} for n, (leaf, of) in enumerate(where)}
        assert seats(labeled(ready(6), labels)) == [0, 3, 2, 5, 1, 4]

    def test_workers_of_one_node_are_neighbours(self) -> None:
        world = leaves(ready(4, to_a_node=2), "aa")
        world = change_worker(world, "j-w1-0", pod={"node": "node-1"})
        world = change_worker(world, "j-w2-0", pod={"node": "node-0"})
        assert seats(world) == [0, 2, 1, 3]

    @pytest.mark.parametrize("names", ["------", "aaaaaa", "aabbcc", "abcdef"])
    def test_an_order_that_is_as_good_as_any_stays(self, names: str) -> None:
        assert seats(leaves(ready(6), names)) == [0, 1, 2, 3, 4, 5]

    def test_who_is_nowhere_known_comes_last(self) -> None:
        assert seats(leaves(ready(6), "a-ba-b")) == [0, 3, 2, 5, 1, 4]

    def test_labels_that_contradict_each_other_are_not_mixed(self) -> None:
        """Four say their leaf, two their zone, one of which has the name of a leaf."""
        labels = {f"node-{n}": {LEAF: name} for n, name in enumerate("abab")}
        labels |= {"node-4": {ZONE: "a"}, "node-5": {ZONE: "z"}}
        assert seats(labeled(ready(6), labels)) == [0, 2, 1, 3, 4, 5]

    def test_a_fabrics_own_labels_go_first(self) -> None:
        labels = {
            f"node-{n}": {LEAF: leaf, "rack": rack} for n, (leaf, rack) in enumerate(zip("aabb", "xyxy", strict=True))
        }
        world = labeled(ready(4), labels)
        assert seats(world) == [0, 1, 2, 3]
        assert seats(replace(world, cluster_view=replace(world.cluster_view, levels=("rack",)))) == [0, 2, 1, 3]

    def test_of_a_worker_with_several_ranks_all_of_them_move_together_and_stay_in_their_order(self) -> None:
        """A mesh's innermost axis is within a worker: it stays there."""
        members = membership.update_membership(leaves(ready(4, ranks=2), "abab"), build_policy()).plan.members
        assert [(member.worker, member.ranks) for member in members] == [
            ("j-w0-0", (0, 1)),
            ("j-w2-0", (2, 3)),
            ("j-w1-0", (4, 5)),
            ("j-w3-0", (6, 7)),
        ]

    def test_a_node_that_has_gone_meanwhile_is_nowhere(self) -> None:
        world = leaves(ready(4), "abab")
        nodes = {name: node for name, node in world.cluster_view.nodes.items() if name != "node-0"}
        assert seats(replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))) == [1, 3, 2, 0]


class TestReplacing:
    def test_the_nearest_spare_takes_the_seat(self) -> None:
        assert seats(lost(leaves(build_training(4, 2), "aabbab"), "j-w3-0")) == [0, 1, 2, 5]
        assert seats(lost(leaves(build_training(4, 2), "aabbab"), "j-w0-0")) == [4, 1, 2, 3]

    def test_two_at_once_each_get_their_own(self) -> None:
        assert seats(lost(leaves(build_training(4, 2), "aabbba"), "j-w0-0", "j-w3-0")) == [5, 1, 2, 4]

    def test_without_labels_the_first_spare(self) -> None:
        assert seats(lost(build_training(4, 2), "j-w3-0")) == [0, 1, 2, 4]

    def test_without_a_spare_in_its_leaf_one_beside_most_of_the_others(self) -> None:
        assert seats(lost(leaves(build_training(4, 2), "abbbcb"), "j-w0-0")) == [5, 1, 2, 3]

    def test_nobody_else_moves_whatever_the_labels_say_by_now(self) -> None:
        world = leaves(build_training(4, 1), "ababa")
        assert membership.update_membership(world, build_policy()) is world.desired, (
            "the ranks hold their state where they are"
        )
        assert seats(lost(world, "j-w3-0")) == [0, 1, 2, 4]

    def test_a_spare_takes_over_all_ranks_of_the_lost_one_as_they_were(self) -> None:
        """Where ranks hold parts of a sharded model, none may change places with another one, in its node or beyond."""
        world = leaves(build_training(3, 1, job=build_job(3, 1, nproc_per_node=2)), "abaa")
        held = tuple(replace(one, ranks=(2 * n, 2 * n + 1)) for n, one in enumerate(world.plan.members))
        world = world.with_desired(world.desired.with_plan(members=held))
        assert membership.update_membership(world, build_policy()) is world.desired
        members = membership.update_membership(lost(world, "j-w1-0"), build_policy()).plan.members
        assert [(member.worker, member.ranks) for member in members] == [
            ("j-w0-0", (0, 1)),
            ("j-w3-0", (2, 3)),
            ("j-w2-0", (4, 5)),
        ]

    def test_seats_that_are_added_are_ordered_among_themselves(self) -> None:
        world = leaves(build_training(2, 3, job=build_job(5, 0)), "abbab")
        world = world.with_desired(membership.update_membership(world, build_policy()))
        for name in ("j-w0-0", "j-w1-0"):
            world = change_worker(world, name, heartbeat={"checkpoint": {"request": 1}})
        assert seats(world) == [0, 1, 2, 4, 3]


class TestShown:
    def crossings(self, world: Observation) -> LeafCrossings | None:
        return build_job_status(world, build_policy(), JobStatus()).leaf_crossings

    def test_how_often_the_ring_leaves_a_leaf_and_how_often_it_would_at_best(self) -> None:
        assert self.crossings(leaves(build_training(4), "abab")) == LeafCrossings(now=4, best=2)
        assert self.crossings(leaves(build_training(4), "aabb")) == LeafCrossings(now=2, best=2)
        assert self.crossings(leaves(build_training(4), "aaaa")) == LeafCrossings(now=0, best=0)

    def test_nothing_where_nobody_says_where_nodes_are(self) -> None:
        assert self.crossings(build_training()) is None
        assert self.crossings(leaves(ready(2), "ab")) is None, "nobody has a seat yet"

    def test_on_the_wire(self) -> None:
        status = JobStatus(leaf_crossings=LeafCrossings(4, 2))
        assert status.to_patch()["leafCrossings"] == {"now": 4, "best": 2}
        assert JobStatus.parse(status.to_patch() | {"conditions": []}).leaf_crossings == LeafCrossings(4, 2)
        assert JobStatus().to_patch()["leafCrossings"] is None, "it is taken away again"

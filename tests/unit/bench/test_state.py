"""The pure parts of `bench state`: how much state there is memory for, its figures, and when a goal is reached."""

from __future__ import annotations

import json
import math

import pytest

from bench import state
from bench.scripts.state.hosts import SideFailedError
from bench.scripts.state.workload import LAYER_BYTES, count_layers
from bench.state import RestoreRoute

GB = 10**9


@pytest.mark.parametrize(
    ("left", "shared_left", "nbytes"),
    [
        (100 * GB, 100 * GB, GB),
        (16 * GB, 100 * GB, 9 * GB // 10),
        (100 * GB, GB, 9 * GB // 100),
        (0, 0, 0),
    ],
    ids=["plenty", "memory for less", "shared memory for less", "none"],
)
def test_a_rank_has_no_more_state_than_there_is_memory_for(left: int, shared_left: int, nbytes: int) -> None:
    assert state.compute_rank_bytes(GB, left, shared_left) == nbytes


def test_layers_have_the_requested_size() -> None:
    assert count_layers(GB) * LAYER_BYTES == pytest.approx(GB, rel=0.03)
    assert count_layers(1) == 1


def build_rank(snapshot_times: list[float], plain: list[float], next_to_copy: list[float]) -> dict[str, object]:
    return {"held": snapshot_times, "plain": plain, "copying": next_to_copy, "interval": 8, "digest": [1]}


def test_a_snapshots_stall_is_that_of_the_slower_rank_once_its_memory_is_allocated() -> None:
    one = build_rank([9.0, 8.0, 0.1, 0.2, 0.2, 0.1], [1.0, 2.0, 3.0], [2.0, 4.0, 2.0])
    other = build_rank([1.0, 1.0, 0.4, 0.1, 0.1, 0.1], [2.0, 2.0, 2.0], [3.0, 3.0, 1.0])
    assert state.compute_snapshot_statistics([one, other]) == {
        "stall_s": 0.2,
        "first_s": 9.0,
        "step_s": 2.0,
        "interval_steps": 8,
        "share": round(0.95 / 16, 5),
        "share_of_stalls": 0.2 / 16,
        "lost_beside_a_copy_s": 0.75,
    }


def test_a_checkpoints_stall_is_compared_with_the_copys_of_the_slower_rank() -> None:
    one = {"ours": [5.0, 0.2, 0.3, 0.2], "copy": [0.4, 0.1, 0.2, 0.1]}
    other = {"ours": [1.0, 0.3, 0.2, 0.3], "copy": [0.3, 0.2, 0.1, 0.2]}
    assert state.compute_checkpoint_statistics([one, other]) == {
        "stall_s": {"ours": 0.3, "copy": 0.2},
        "first_s": {"ours": 5.0, "copy": 0.4},
        "of_the_copy": {"ours": 1.5, "copy": 1.0},
    }


def evaluate_goals(share: float = 0.01, ours: float = 1.0, **routes: RestoreRoute) -> dict[str, bool]:
    good = {name: RestoreRoute([1.0]) for name in (*state.OUR_ROUTES, "torchft_pg")}
    return state.check_goals({"share": share}, {"stall_s": {"ours": ours, "copy": 1.0}}, good | routes)


def test_all_goals_are_reached_at_their_limits() -> None:
    assert all(evaluate_goals(share=0.01, ours=1.275).values())


@pytest.mark.parametrize(
    ("missed", "reached"),
    [
        ("snapshot_1_percent", evaluate_goals(share=0.0101)),
        ("checkpoint_the_copy", evaluate_goals(ours=1.276)),
        ("restored_bit_for_bit", evaluate_goals(lost_node=RestoreRoute([1.0], exact=False))),
        ("restored_bit_for_bit", evaluate_goals(crash=RestoreRoute())),
        ("restored_bit_for_bit", evaluate_goals(volume=RestoreRoute([1.0], failures=["once"]))),
    ],
)
def test_each_goal_can_be_missed_alone(missed: str, reached: dict[str, bool]) -> None:
    assert [name for name, its in reached.items() if not its] == [missed]


def test_a_side_that_fails_is_a_result_and_affects_no_goal() -> None:
    def fail() -> tuple[float, bool]:
        raise SideFailedError("no route")

    route = RestoreRoute()
    state.measure_attempt(route, lambda: (2.0, True))
    state.measure_attempt(route, fail)
    assert route.to_json() == {"median_s": 2.0, "seconds": [2.0], "bit_for_bit": True, "failures": ["no route"]}
    assert all(evaluate_goals(torchft_pg=route).values())


def test_a_restore_that_differed_once_is_not_exact() -> None:
    route = RestoreRoute()
    state.measure_attempt(route, lambda: (1.0, False))
    state.measure_attempt(route, lambda: (1.0, True))
    assert route.to_json()["bit_for_bit"] is False


def test_a_route_that_never_restored_has_no_time() -> None:
    assert RestoreRoute(failures=["why"]).median == math.inf
    assert json.loads(json.dumps(RestoreRoute(failures=["why"]).to_json()))["median_s"] is None

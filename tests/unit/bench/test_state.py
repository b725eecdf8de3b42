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


def test_layers_make_up_the_state_that_was_asked_for() -> None:
    assert count_layers(GB) * LAYER_BYTES == pytest.approx(GB, rel=0.03)
    assert count_layers(1) == 1


def rank(held: list[float], plain: list[float], beside: list[float]) -> dict[str, object]:
    return {"held": held, "plain": plain, "copying": beside, "interval": 8, "digest": [1]}


def test_a_snapshots_stall_is_that_of_the_slower_rank_once_its_memory_is_there() -> None:
    one = rank([9.0, 8.0, 0.1, 0.2, 0.2, 0.1], [1.0, 2.0, 3.0], [2.0, 4.0, 2.0])
    other = rank([1.0, 1.0, 0.4, 0.1, 0.1, 0.1], [2.0, 2.0, 2.0], [3.0, 3.0, 1.0])
    assert state.compute_snapshot_statistics([one, other]) == {
        "stall_s": 0.2,
        "first_s": 9.0,
        "step_s": 2.0,
        "interval_steps": 8,
        "share": round(0.95 / 16, 5),
        "share_of_stalls": 0.2 / 16,
        "lost_beside_a_copy_s": 0.75,
    }


def test_a_checkpoints_stall_is_held_against_the_copys_of_the_slower_rank() -> None:
    one = {"ours": [5.0, 0.2, 0.3, 0.2], "copy": [0.4, 0.1, 0.2, 0.1]}
    other = {"ours": [1.0, 0.3, 0.2, 0.3], "copy": [0.3, 0.2, 0.1, 0.2]}
    assert state.compute_checkpoint_statistics([one, other]) == {
        "stall_s": {"ours": 0.3, "copy": 0.2},
        "first_s": {"ours": 5.0, "copy": 0.4},
        "of_the_copy": {"ours": 1.5, "copy": 1.0},
    }


def held(share: float = 0.01, ours: float = 1.0, **ways: RestoreRoute) -> dict[str, bool]:
    good = {name: RestoreRoute([1.0]) for name in (*state.OUR_ROUTES, "torchft_pg")}
    return state.check_goals({"share": share}, {"stall_s": {"ours": ours, "copy": 1.0}}, good | ways)


def test_all_goals_are_reached_at_their_edges() -> None:
    assert all(held(share=0.01, ours=1.275).values())


@pytest.mark.parametrize(
    ("missed", "reached"),
    [
        ("snapshot_1_percent", held(share=0.0101)),
        ("checkpoint_the_copy", held(ours=1.276)),
        ("restored_bit_for_bit", held(lost_node=RestoreRoute([1.0], exact=False))),
        ("restored_bit_for_bit", held(crash=RestoreRoute())),
        ("restored_bit_for_bit", held(volume=RestoreRoute([1.0], failures=["once"]))),
    ],
)
def test_a_goal_that_is_missed_is_the_only_one(missed: str, reached: dict[str, bool]) -> None:
    assert [name for name, its in reached.items() if not its] == [missed]


def test_a_peer_that_fails_is_a_result_and_no_goal_of_ours() -> None:
    def fails() -> tuple[float, bool]:
        raise SideFailedError("no route")

    way = RestoreRoute()
    state.measure_attempt(way, lambda: (2.0, True))
    state.measure_attempt(way, fails)
    assert way.to_json() == {"median_s": 2.0, "seconds": [2.0], "bit_for_bit": True, "failures": ["no route"]}
    assert all(held(torchft_pg=way).values())


def test_what_once_came_back_otherwise_is_not_exact() -> None:
    way = RestoreRoute()
    state.measure_attempt(way, lambda: (1.0, False))
    state.measure_attempt(way, lambda: (1.0, True))
    assert way.to_json()["bit_for_bit"] is False


def test_a_way_that_never_led_back_has_no_time() -> None:
    assert RestoreRoute(failures=["why"]).median == math.inf
    assert json.loads(json.dumps(RestoreRoute(failures=["why"]).to_json()))["median_s"] is None

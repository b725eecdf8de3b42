"""Jobs without a pipeline, worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.whatif import RECORDED_SCENARIO, FixedSeconds, OperationSelection
from pacekeeper_analysis.whatif import analyze_window as analyse_window
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.data_parallel import (
    DATA,
    Instruction,
    RunWork,
    WaitForCollective,
    analyze_compute_seconds,
    build_ddp_program,
    build_fsdp_program,
    build_replacement_scenario,
    build_reshare_scenario,
    build_window,
    compute_transfer_seconds,
    estimate_local_sgd_step_seconds,
)

ONE_HALF_AS_FAST = np.tile([1.0, 1.0, 1.0, 2.0], (5, 1))


def test_each_remedy_has_a_gain_of_its_own() -> None:
    """One of four ranks takes twice as long: S is 1.6 (the mean contains the culprit), replacing wins 2, shares
    1.75."""
    whatif = analyze_compute_seconds(ONE_HALF_AS_FAST)
    assert whatif.slowdown == pytest.approx(1.6)
    assert whatif.decomposition is not None
    assert whatif.decomposition.slowdown_by_replica == pytest.approx([1.0, 1.0, 1.0, 1.6])
    assert whatif.compute_gain(build_replacement_scenario([3])) == pytest.approx(2.0)
    assert whatif.compute_gain(build_reshare_scenario(new=[8, 8, 8, 4], old=[7, 7, 7, 7])) == pytest.approx(1.75)


def test_fixed_cost_does_not_shrink_with_the_share() -> None:
    whatif = analyze_compute_seconds(ONE_HALF_AS_FAST)
    # Half the samples on rank 3: 0.4 s fixed and half of 1.6 s.
    assert whatif.simulate_scenario(
        build_reshare_scenario(new=[1, 1, 1, 0.5], old=[1, 1, 1, 1], fixed=0.4)
    ) == pytest.approx(1.2)


def test_a_loader_that_stalls_is_distinguished_from_a_slow_rank() -> None:
    data = np.zeros((5, 4))
    data[:, 1] = 1.0
    whatif = analyze_compute_seconds(np.ones((5, 4)), communication_seconds=0.25, data_seconds=data)
    assert whatif.decomposition is not None
    assert whatif.step_s == pytest.approx(2.25)
    assert whatif.decomposition.slowdown_by_type["data"] == pytest.approx(2.25 / 1.5)
    assert whatif.decomposition.slowdown_by_type["compute"] == pytest.approx(1.0)
    assert whatif.simulate_scenario(
        RECORDED_SCENARIO.with_change(OperationSelection(types=[DATA]), takes=FixedSeconds(0.0))
    ) == pytest.approx(1.25)


def test_local_sgd_by_steps_wins_nothing_against_a_rank_that_is_always_slow() -> None:
    whatif = analyze_compute_seconds(ONE_HALF_AS_FAST, communication_seconds=0.1)
    assert estimate_local_sgd_step_seconds(whatif, every=5, sync_seconds=0.5) == pytest.approx(2.1)
    # By the clock, seven samples' worth in the time of two: 4 / (1 + 1 + 1 + 1/2).
    by_clock = estimate_local_sgd_step_seconds(whatif, every=5, sync_seconds=0.5, by_clock=True)
    assert by_clock == pytest.approx(4 / 3.5 + 0.1)


def test_local_sgd_wins_against_slowness_that_moves() -> None:
    moving = np.ones((4, 4)) + np.eye(4)
    assert estimate_local_sgd_step_seconds(analyze_compute_seconds(moving), every=4, sync_seconds=0.0) == pytest.approx(
        1.25
    )


def test_ddp_hides_all_buckets_but_the_last() -> None:
    """Data 0.5, forward 1, three times backward 1 with a reduce of 0.8 after each, optimizer 0.2."""
    program = build_ddp_program(buckets=3)
    takes = {"data": 0.5, "forward-compute": 1.0, "backward-compute": 1.0, "all-reduce": 0.8, "optimizer": 0.2}
    assert build_window(program, build_table(program, takes)).compute_ideal_step_s() == pytest.approx(
        0.5 + 1 + 3 + 0.8 + 0.2
    )


def test_ddp_buckets_queue_when_the_network_is_slow() -> None:
    program = build_ddp_program(buckets=3)
    takes = {"data": 0.0, "forward-compute": 1.0, "backward-compute": 1.0, "all-reduce": 2.0, "optimizer": 0.0}
    # The first bucket is ready at 2; three reduces of 2 s follow.
    assert build_window(program, build_table(program, takes)).compute_ideal_step_s() == pytest.approx(8.0)


def test_fsdp_gathers_one_unit_ahead() -> None:
    """Two units. Gather 1, forward 2 each, gathers again before the backwards of 3 each, scatter 0.5."""
    program = build_fsdp_program(units=2)
    takes = {
        "data": 0.0,
        "forward-compute": 2.0,
        "backward-compute": 3.0,
        "all-gather": 1.0,
        "reduce-scatter": 0.5,
        "optimizer": 0.25,
    }
    # Gather 0-1, forwards 1-3-5 (the second gather is hidden), gather 5-6, backwards 6-9-12, scatter 12-12.5, 12.75.
    assert build_window(program, build_table(program, takes)).compute_ideal_step_s() == pytest.approx(12.75)


def test_hybrid_shards_wait_for_their_own_group_only() -> None:
    """Mesh (replicate 2, shard 2). Rank (0, 0) takes 10 s for its forward: its row waits; the other row until the
    reduce."""
    program = build_fsdp_program(units=1, shard_axes=(1,), replicate_axes=(0,))
    takes = {"forward-compute": 1.0, "backward-compute": 1.0}
    seconds = np.broadcast_to(build_table(program, takes, ranks=1)[:, None], (6 + 2, 2, 2, 1)).copy()
    timed = [instruction for instruction in program if not isinstance(instruction, WaitForCollective)]
    seconds[timed.index(RunWork("forward-compute")), 0, 0] = 10.0
    finish = build_window(program, seconds).simulate_finish([RECORDED_SCENARIO])
    assert finish.ravel() == pytest.approx([11.0] * 4)
    independent = RECORDED_SCENARIO.with_independent_replicas(OperationSelection(types=["all-reduce"]))
    assert build_window(program, seconds).simulate_finish([independent]).ravel() == pytest.approx(
        [11.0, 11.0, 2.0, 2.0]
    )


def test_figures_of_a_mesh_with_two_axes() -> None:
    """Mesh (replicate 2, shard 2), rank (1, 0) ten times as slow: only it makes the others wait."""
    program = build_fsdp_program(units=1, shard_axes=(1,), replicate_axes=(0,))
    takes = {"forward-compute": 1.0, "backward-compute": 1.0}
    seconds = np.broadcast_to(build_table(program, takes, ranks=1)[:, None], (6 + 2, 2, 2, 3)).copy()
    seconds[1:, 1, 0] *= 10.0
    whatif = analyse_window(build_window(program, seconds))
    assert whatif.step_s == pytest.approx(20.0)
    assert whatif.decomposition is not None
    # Ideal: 3.25 s each for forward and backward.
    assert whatif.decomposition.slowdown_by_replica == pytest.approx([1.0, 1.0, 20 / 6.5, 1.0])
    assert whatif.decomposition.worst_workers.workers == ((2, 0),)


def test_a_rank_that_is_slow_only_between_buckets_is_found() -> None:
    program = build_ddp_program(buckets=3)
    takes = {"data": 0.1, "forward-compute": 1.0, "backward-compute": 0.7, "all-reduce": 0.1, "optimizer": 0.1}
    seconds = np.repeat(build_table(program, takes, ranks=4), 9, axis=2)
    for row, instruction in enumerate(item for item in program if not isinstance(item, WaitForCollective)):
        if instruction.type == "backward-compute":
            seconds[row, 1] *= 1.5
    finding = diagnose_cause(analyse_window(build_window(program, seconds)))
    assert (finding.cause, finding.workers) == (SlowdownCause.SLOW_WORKER, ((1, 0),))


def test_times_that_are_all_zero_are_rejected() -> None:
    with pytest.raises(InputError, match="take no time at all"):
        analyze_compute_seconds(np.zeros((2, 2)))


def test_a_transfer_needs_no_common_clock() -> None:
    inside = np.array([[0.9, 0.2], [0.1, 0.6]])
    assert compute_transfer_seconds(inside) == pytest.approx(np.array([[0.1, 0.2]]))


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ([1.0, 2.0], r"\[step, rank\]"),
        ([[1.0, float("nan")]], "rank 1 at step 0"),
        ([[-1.0, 2.0]], "rank 0 at step 0"),
        (np.ones((0, 4)), "at least one of each"),
    ],
)
def test_bad_tables_are_rejected(compute: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analyze_compute_seconds(compute)


def test_bad_shares_are_rejected() -> None:
    with pytest.raises(ValueError, match="one share per rank"):
        build_reshare_scenario(new=[1, 2], old=[1, 0])


def test_a_program_that_waits_for_what_it_never_launched_is_rejected() -> None:
    with pytest.raises(ValueError, match="'gradients' before it is launched"):
        build_window([RunWork(), WaitForCollective("gradients")], np.ones((1, 2, 1)))


def build_table(program: Sequence[Instruction], takes: dict[str, float], ranks: int = 2) -> NDArray[np.float64]:
    """Return seconds [instruction, rank, step] that depend on the type only."""
    timed = [
        takes.get(instruction.type, 0.0) for instruction in program if not isinstance(instruction, WaitForCollective)
    ]
    return np.broadcast_to(np.array(timed)[:, None, None], (len(timed), ranks, 1)).copy()

"""Which rank is blamed for the others' waits: worked out by hand, and on ranks whose own delays are known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pacekeeper_analysis.stragglers.wait_attribution import (
    attribute_waits,
    find_slow_transfers,
    find_usual_transfer_times,
    measure_transfers,
)
from pacekeeper_rank.records import Collective
from testing.training.nested_ranks import NestedRanks


def build_ranks(*own: list[float], axes: list[int]) -> NestedRanks:
    """Data × tensor 2 × 2: own work of ranks 0-3 before each collective, along `axes`: 0 data, 1 tensor."""
    job = NestedRanks((2, 2), transfer=1.0)
    job.begin_step()
    for seconds, axis in zip(own, axes, strict=True):
        job.work(np.array(seconds))
        job.run_collective(axis)
    return job


def list_blames(job: NestedRanks) -> list[float]:
    return [round(float(seconds), 6) for seconds in attribute_waits(job.build_evidence()).seconds.sum(axis=1)]


def test_a_rank_that_was_delayed_elsewhere_passes_the_blame_on() -> None:
    """Rank 1 takes 5 s longer. Rank 0 waits for it in the tensor group, and afterward ranks 2 and 3 in their
    data groups: rank 2 for rank 0, which was delayed itself, rank 3 for rank 1."""
    job = build_ranks([1, 6, 1, 1], [0, 0, 0, 0], axes=[1, 0])
    assert job.waited.tolist() == [5, 0, 5, 5]
    assert list_blames(job) == [0, 15, 0, 0]


def test_the_own_time_of_the_last_rank_stays_with_it() -> None:
    """Rank 0 is delayed by rank 1 for 3 s and then takes 2 s by itself."""
    job = build_ranks([1, 4, 1, 1], [2, 0, 0, 0], axes=[1, 0])
    assert job.waited.tolist() == [3, 0, 5, 3]
    assert list_blames(job) == [2, 9, 0, 0]


def test_waits_that_both_had_delay_no_rank() -> None:
    """In both tensor groups one waits for the other alike; then rank 0 takes 2 s by itself, for which rank 2 waits."""
    job = build_ranks([0, 3, 0, 3], [2, 0, 0, 0], axes=[1, 0])
    assert job.waited.tolist() == [3, 0, 5, 0]
    assert list_blames(job) == [2, 3, 0, 3]


def test_blame_goes_back_through_several_groups() -> None:
    """Rank 3 delays 2 in a tensor group, that 0 in a data group, and that 1 in a tensor group."""
    job = NestedRanks((2, 2), transfer=1.0)
    job.begin_step()
    job.work(np.array([0.0, 0.0, 0.0, 4.0]))
    for ranks in ((2, 3), (0, 2), (0, 1)):
        job.enter_collective(ranks)
    assert job.waited.tolist() == [5, 6, 4, 0]
    assert list_blames(job) == [2, 0, 0, 12] or sum(list_blames(job)) == pytest.approx(15)
    assert list_blames(job)[3] >= 12, (
        "rank 2 and 0 enter their next collective a transfer later than who did not take part"
    )


@pytest.mark.parametrize("mesh", [(8,), (4, 2), (2, 2, 2), (3, 2, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_blames_sum_to_the_lost_time_and_the_slow_rank_gets_them(mesh: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    job = NestedRanks(mesh)
    world_size = len(job.now)
    slow_rank = int(random.integers(world_size))
    program = [*random.integers(len(mesh), size=int(random.integers(3, 9))), *range(len(mesh))]  # all meet in the end
    for _ in range(10):
        job.begin_step()
        for axis in program:
            own = random.normal(0.02, 0.001, world_size)
            own[slow_rank] += 0.01
            job.work(own)
            job.run_collective(int(axis))
    found = attribute_waits(job.build_evidence())
    assert found.lost_seconds == pytest.approx(job.waited.sum(), rel=1e-3)
    assert (found.seconds >= 0).all()
    by_rank = found.seconds.sum(axis=1)
    assert int(by_rank.argmax()) == slow_rank
    step_seconds = float(job.now.max() / 10)
    assert found.find_slow_ranks(step_seconds) == (slow_rank,)
    assert found.find_slow_ranks(10 * step_seconds) == (), "of a step of this duration it costs less than a tenth"


def test_ranks_that_take_turns_are_not_slow() -> None:
    job = NestedRanks((4, 2))
    for step in range(12):
        job.begin_step()
        for axis in (1, 0):
            own = np.full(8, 0.02)
            own[step % 8] += 0.02
            job.work(own)
            job.run_collective(axis)
    assert attribute_waits(job.build_evidence()).find_slow_ranks(float(job.now.max() / 12)) == ()


def build_pipeline(slow: int, replicas: int = 2) -> NestedRanks:
    """Two stages of `replicas` replicas, ranks (stage · replicas + replica); `slow` takes 0.01 s longer, of 0.02 s."""
    job = NestedRanks((2, replicas))
    for _ in range(8):
        job.begin_step()
        own = np.full(2 * replicas, 0.02)
        if slow >= 0:
            own[slow] += 0.01
        first = np.arange(2 * replicas) < replicas
        for stage, ends in ((first, (0, 1)), (~first, (1, 0))):
            job.work(np.where(stage, own, 0.0))
            for replica in range(replicas):
                source, destination = (end * replicas + replica for end in ends)
                job.enter_collective((source, destination), collectives=(Collective.SEND, Collective.RECV))
        job.run_collective(1)
    return job


def test_stages_of_a_pipeline_wait_for_each_other_by_their_nature() -> None:
    healthy = attribute_waits(build_pipeline(-1).build_evidence())
    assert healthy.lost_seconds > 0, "each stage waits for the other"
    assert healthy.find_slow_ranks(0.06) == ()
    assert healthy.roles.tolist() == [0, 0, 1, 1]
    for slow in range(4):
        assert attribute_waits(build_pipeline(slow).build_evidence()).find_slow_ranks(0.07) == (slow,)
    assert attribute_waits(build_pipeline(0, replicas=1).build_evidence()).find_slow_ranks(0.07) == (), (
        "a single stage has nothing to compare with"
    )


def test_computation_during_a_collective_is_no_wait() -> None:
    """All are inside of it for long; rank 1 is delayed by nothing, the others by the last 5 ms."""
    job = NestedRanks((3,))
    for _ in range(5):
        job.begin_step()
        job.work(np.array([0.01, 0.015, 0.01]))
        job.run_collective(0)
    for rows in job._rows:
        for at, row in enumerate(rows):
            rows[at] = (*row[:7], 0.0, *row[8:])  # entered when the step began
    assert attribute_waits(job.build_evidence()).find_slow_ranks(0.016) == (1,)


def test_collectives_that_some_member_has_not_reported_do_not_count() -> None:
    job = build_ranks([1, 6, 1, 1], [0, 0, 0, 0], axes=[1, 0])
    evidence = job.build_evidence(ranks_of_a_worker=2)
    assert attribute_waits(evidence[:1]).lost_seconds == pytest.approx(5.0), "only that of ranks 0 and 1"
    assert attribute_waits(()).lost_seconds == 0.0
    assert attribute_waits(()).find_slow_ranks(1.0) == ()
    job._rows[0].append(job._rows[0][0])
    assert attribute_waits(job.build_evidence()).lost_seconds == pytest.approx(10.0), (
        "one that a rank reports twice is left out"
    )


def test_a_group_whose_transfers_take_longer_than_those_of_its_like_is_named() -> None:
    job = NestedRanks((4, 2))
    random = np.random.default_rng(1)
    for _ in range(8):
        job.begin_step()
        for axis in (1, 0):
            job.work(random.normal(0.02, 1e-5, 8))
            job.run_collective(axis, slow=lambda ranks: 1.6 if tuple(ranks) == (4, 5) else 1.0)
    now = measure_transfers(job.build_evidence())
    slow = find_slow_transfers(now, find_usual_transfer_times(now))
    assert {now[kind].ranks: round(times, 1) for kind, times in slow.items()} == {(4, 5): 1.6}
    own = {kind: found.seconds_per_byte for kind, found in now.items()}
    assert find_slow_transfers(now, own) == {}
    assert len(find_slow_transfers(now, {kind: usual / 2 for kind, usual in own.items()})) == len(now)
    assert measure_transfers(()) == {}


def test_a_late_rank_is_no_slow_transfer() -> None:
    job = NestedRanks((4, 2))
    for _ in range(8):
        job.begin_step()
        own = np.full(8, 0.02)
        own[4] += 0.01
        job.work(own)
        job.run_collective(1, slow=lambda ranks: 1.6 if tuple(ranks) == (4, 5) else 1.0)
    now = measure_transfers(job.build_evidence())
    assert find_slow_transfers(now, find_usual_transfer_times(now)) == {}


def test_many_ranks_are_evaluated_in_a_moment() -> None:
    job = NestedRanks((32, 8))
    random = np.random.default_rng(0)
    for _ in range(16):
        job.begin_step()
        for at in range(100):
            own = random.normal(0.002, 2e-5, 256)
            own[77] += 0.001
            job.work(own)
            job.run_collective(0 if at % 10 == 9 else 1)
    evidence = job.build_evidence(8)
    began = time.process_time()
    found = attribute_waits(evidence)
    seconds = time.process_time() - began
    assert found.find_slow_ranks(float(job.now.max() / 16)) == (77,)
    assert found.lost_seconds == pytest.approx(job.waited.sum(), rel=1e-2)
    assert seconds < 2.0, "it takes 0.3 s, and 1.4 s with 1,024 ranks"

"""Ranks that are a little slow, window after window: found, told from luck, and what hostile figures make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.protocol.plan import Member
from pacekeeper_analysis.protocol.reports import Heartbeat, RankMetrics
from pacekeeper_operator.observe import gather
from pacekeeper_operator.observe.job_cache import JobCache, WorkerContact
from pacekeeper_operator.observe.persistent_slowness import (
    MAX_KEPT_WINDOWS,
    MIN_PERSISTENT_WINDOWS,
    RelativeTimeHistory,
    add_window,
)
from pacekeeper_operator.observe.rank_metrics import RANK_ROW, RankRows, read_rank_rows
from pacekeeper_operator.state.job_metrics import JobMetrics
from testing.operators.observations import NOW, build_training

THRESHOLD = 1.1
WINDOW_SECONDS = 3.2


def rows(paces: np.ndarray, share: np.ndarray | int = 8, steps: int = 32) -> RankRows:
    """Of ranks that take so many times 10 ms a sample."""
    told = np.zeros(len(paces), RANK_ROW)
    told["rank"], told["steps"], told["share"] = np.arange(len(paces)), steps, share
    told["step_seconds"], told["compute_seconds_per_sample"] = 0.1, 0.01 * paces
    return told


def watched(
    windows: int, noise: float, ranks: int = 4, slow: float = 1.0, since: int = 0, seed: int = 0, share: int = 8
) -> RelativeTimeHistory:
    """So many windows of ranks whose means differ by noise; rank 2 is slow from one of them on."""
    random, paces = np.random.default_rng(seed), RelativeTimeHistory()
    for window in range(windows):
        of = 1.0 + noise * random.standard_normal(ranks)
        of[2] *= slow if window >= since else 1.0
        paces = add_window(paces, rows(of, share), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    return paces


def test_a_rank_that_is_a_little_slow_is_found_after_some_windows() -> None:
    assert watched(MIN_PERSISTENT_WINDOWS - 1, 0.002, slow=1.08).persistent_slowness is None, (
        "nobody knows the noise yet"
    )
    found = watched(MIN_PERSISTENT_WINDOWS, 0.002, slow=1.08).persistent_slowness
    assert found is not None
    assert found.since == NOW
    assert found.relative_times.relative_times == {2: pytest.approx(1.08, abs=0.01)}
    assert found.relative_times.error == pytest.approx(0.002 * np.sqrt(32 * 1.5), rel=0.6), (
        "of a step, and its peers' median's"
    )


def test_since_when_it_is_slow() -> None:
    found = watched(12, 0.002, slow=1.08, since=8).persistent_slowness
    assert found is not None
    assert found.since == NOW + 8 * WINDOW_SECONDS


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("noise", "ranks"), [(0.014, 4), (0.03, 4), (0.03, 64), (0.03, 1024)])
def test_luck_is_none(noise: float, ranks: int, seed: int) -> None:
    paces = RelativeTimeHistory()
    random = np.random.default_rng(seed)
    for window in range(60):
        of = 1.0 + noise * random.standard_normal(ranks)
        of[random.integers(ranks)] += 0.25 * (random.random() < 0.1)  # a step in which it was held up
        paces = add_window(paces, rows(of), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
        assert paces.persistent_slowness is None


@pytest.mark.parametrize(
    "held_up",
    [
        (0.985, 0.993, 1.258, 1.0, 1.211, 1.264, 1.038),
        (1.27, 1.056, 1.007, 1.201, 0.978, 1.318),
        (1.023, 1.189, 1.01, 1.254, 0.979, 1.336, 0.997, 1.278),
    ],
)
def test_nor_is_one_that_a_single_step_of_every_other_window_has_held_up(held_up: tuple[float, ...]) -> None:
    """One of eight that takes three times as long: window after window by luck, and over at once."""
    random, paces = np.random.default_rng(0), RelativeTimeHistory()
    for window, pace in enumerate([*[1.0] * (MAX_KEPT_WINDOWS - len(held_up)), *held_up]):
        of = 1.0 + 0.03 * random.standard_normal(4)
        of[2] = pace
        paces = add_window(paces, rows(of), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
        assert paces.persistent_slowness is None


def test_more_noise_takes_more_windows() -> None:
    def until_found(noise: float, seed: int) -> int:
        return next(n for n in range(1, 100) if watched(n, noise, slow=1.08, seed=seed).persistent_slowness is not None)

    assert {until_found(0.002, seed) for seed in range(10)} == {MIN_PERSISTENT_WINDOWS}
    assert MIN_PERSISTENT_WINDOWS < np.mean([until_found(0.03, seed) for seed in range(10)]) < MAX_KEPT_WINDOWS


def test_a_rank_whose_work_varies_more_than_its_peers_is_none() -> None:
    """In some windows it is slow, and in as many fast."""
    found = 0
    for seed in range(100):
        random, paces = np.random.default_rng(seed), RelativeTimeHistory()
        for window in range(MAX_KEPT_WINDOWS):
            of = 1.0 + np.array([0.003, 0.003, 0.03, 0.003]) * random.standard_normal(4)
            paces = add_window(paces, rows(of), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
            found += paces.persistent_slowness is not None
    assert found <= 3


def test_in_a_job_of_two_a_rank_is_held_against_the_other() -> None:
    paces = RelativeTimeHistory()
    for window in range(MIN_PERSISTENT_WINDOWS):
        of = np.array([1.0, 1.06]) * (1 + 1e-3 * window)
        paces = add_window(paces, rows(of), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert paces.persistent_slowness is not None
    assert paces.persistent_slowness.relative_times.relative_times == {1: pytest.approx(1.06)}


def test_one_that_the_newest_window_does_not_show_is_as_slow_as_it_shows_there() -> None:
    paces = watched(8, 0.002, slow=1.08)
    found = add_window(paces, rows(np.array([1.0, 1.001, 1.002, 0.999])), 0, THRESHOLD, NOW + 30).persistent_slowness
    assert found is not None
    assert found.relative_times.relative_times == {2: pytest.approx(1.002, abs=0.003)}


def test_what_the_job_bears_is_left_alone() -> None:
    assert watched(MAX_KEPT_WINDOWS, 0.002, slow=1.03).persistent_slowness is None
    assert watched(MAX_KEPT_WINDOWS, 0.002, slow=1.045).persistent_slowness is not None


def test_one_that_has_recovered_is_found_no_more() -> None:
    """After two windows: one may be luck."""
    paces = watched(8, 0.002, slow=1.08)
    first = add_window(paces, rows(np.array([1.0, 1.001, 1.002, 0.999])), 0, THRESHOLD, NOW + 30)
    assert first.persistent_slowness is not None
    assert (
        add_window(first, rows(np.array([1.001, 1.002, 1.003, 0.998])), 0, THRESHOLD, NOW + 35).persistent_slowness
        is None
    )


def test_steps_that_have_been_looked_at_are_no_news() -> None:
    """Workers that have not spoken since, or a pass that comes too soon."""
    paces = watched(1, 0.002)
    told = rows(np.array([1.01, 1.02, 1.03, 1.04]))
    assert add_window(paces, told, 0, THRESHOLD, NOW + 0.9 * WINDOW_SECONDS) is paces
    paces = add_window(paces, told, 0, THRESHOLD, NOW + WINDOW_SECONDS)
    assert len(paces.windows) == 2
    silent = rows(np.array([1.02, 1.01, 1.03, 1.04]))
    assert add_window(paces, silent, 0, THRESHOLD, NOW + 9 * WINDOW_SECONDS) is paces


def test_figures_in_five_digits_are_the_same_by_chance() -> None:
    """Of a thousand quiet ranks some always are: they are no reason to wait for ever."""
    random, paces = np.random.default_rng(0), RelativeTimeHistory()
    for window in range(MIN_PERSISTENT_WINDOWS):
        told = rows(np.where(np.arange(1024) == 7, 1.08, 1.0) * (1.0 + 3e-4 * random.standard_normal(1024)))
        told["compute_seconds_per_sample"] = [float(f"{value:.5g}") for value in told["compute_seconds_per_sample"]]
        paces = add_window(paces, told, 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert paces.persistent_slowness is not None
    assert [*paces.persistent_slowness.relative_times.relative_times] == [7]


def test_who_was_not_heard_for_long_is_not_known() -> None:
    paces = watched(8, 0.002, slow=1.08)
    later = add_window(paces, rows(np.array([1.0, 1.001, 1.09, 1.002])), 0, THRESHOLD, NOW + 1000)
    assert (len(later.windows), later.persistent_slowness, later.needs_more_windows) == (1, None, True)


def test_other_members_are_not_the_same_ranks() -> None:
    other = add_window(watched(8, 0.002, slow=1.08), rows(np.array([1.0, 1.0, 1.09, 1.0])), 1, THRESHOLD, NOW + 60)
    assert (other.membership, len(other.windows), other.persistent_slowness) == (1, 1, None)


def test_ranks_of_few_samples_only_look_slow() -> None:
    """Of a step's work some is fixed: a rank that has got half the samples takes longer for each."""
    paces, small = watched(8, 0.002, slow=1.08), np.array([9, 9, 5, 9])
    told = rows(np.array([1.0, 1.001, 1.09, 1.002]), small)
    assert add_window(paces, told, 0, THRESHOLD, NOW + 60) == RelativeTimeHistory(has_similar_shares=False)
    assert not RelativeTimeHistory(has_similar_shares=False).needs_more_windows, "nothing more will be known of them"


def test_it_keeps_no_more_than_it_needs() -> None:
    paces = watched(200, 0.01)
    assert len(paces.windows) == len(paces.window_ends) == MAX_KEPT_WINDOWS


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lie", [0.0, 1e-300, 1e12, 1e300, float("inf"), float("nan")])
def test_no_figures_make_anything_but_numbers(lie: float) -> None:
    paces = RelativeTimeHistory()
    for window in range(8):
        told = rows(np.array([1.0, 1.001, 1.002, 1.003]) + 1e-4 * window)
        told["compute_seconds_per_sample"][1] = lie * (1 + 0.01 * window)
        paces = add_window(paces, told, 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert paces.persistent_slowness is None or all(
        np.isfinite([*paces.persistent_slowness.relative_times.relative_times.values()])
    )


def test_forty_thousand_ranks_of_a_script_that_lies_are_bounded() -> None:
    """Whatever they say, so many windows of four bytes a rank are kept."""
    paces = watched(2 * MAX_KEPT_WINDOWS, 0.01, ranks=40_000)
    assert sum(window.nbytes for window in paces.windows) == MAX_KEPT_WINDOWS * 40_000 * 4


def test_heartbeats_make_it() -> None:
    """Of a job's memory, by the figures that its workers send: one rank each."""
    world = build_training()
    memory = JobCache(world.job, world.desired)
    found = JobMetrics()
    for window in range(MIN_PERSISTENT_WINDOWS):
        now = NOW + window * WINDOW_SECONDS
        for member in world.plan.members:
            (rank,) = member.ranks
            seconds = 0.01 * (1.08 if rank == 2 else 1.0) * (1 + 1e-4 * window)
            figures = RankMetrics(rank, 32, 0.1, 8 * seconds, seconds, 0.02, 8, 0.1)
            memory.contacts[member.worker] = WorkerContact(Heartbeat(), now, rank_rows=read_rank_rows([figures]))
        found = gather.collect_metrics(memory, JobMetrics(), now)
    assert found.persistent_slowness is not None
    assert found.persistent_slowness.since == NOW
    assert found.persistent_slowness.relative_times.relative_times == {2: pytest.approx(1.08)}
    memory.update(desired=world.desired.with_plan(membership=2, members=(Member("w9", "10.0.0.9", (0,)),)))
    assert gather.collect_metrics(memory, JobMetrics(), NOW + 60).persistent_slowness is None


def test_a_member_that_is_not_heard_leaves_it_as_it_was() -> None:
    world = build_training()
    before = replace(watched(8, 0.002, slow=1.08), membership=world.plan.membership)
    memory = JobCache(world.job, world.desired)
    memory.relative_times = before
    assert before.persistent_slowness is not None
    assert gather.collect_metrics(memory, JobMetrics(), NOW + 60).persistent_slowness == before.persistent_slowness

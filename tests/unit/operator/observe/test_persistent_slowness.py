"""Ranks that are slightly slow in window after window: found, told apart from noise, and safe from false metrics."""

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


def build_rows(relative_times: np.ndarray, share: np.ndarray | int = 8, steps: int = 32) -> RankRows:
    """Build the rows of ranks that take `relative_times` times 10 ms per sample."""
    window_rows = np.zeros(len(relative_times), RANK_ROW)
    window_rows["rank"], window_rows["steps"], window_rows["share"] = np.arange(len(relative_times)), steps, share
    window_rows["step_seconds"], window_rows["compute_seconds_per_sample"] = 0.1, 0.01 * relative_times
    return window_rows


def build_history(
    windows: int, noise: float, ranks: int = 4, slow: float = 1.0, since: int = 0, seed: int = 0, share: int = 8
) -> RelativeTimeHistory:
    """Build a history of windows whose means differ by noise. Rank 2 is slow from window `since`."""
    random, history = np.random.default_rng(seed), RelativeTimeHistory()
    for window in range(windows):
        means = 1.0 + noise * random.standard_normal(ranks)
        means[2] *= slow if window >= since else 1.0
        history = add_window(history, build_rows(means, share), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    return history


def test_a_slightly_slow_rank_is_found_after_some_windows() -> None:
    assert build_history(MIN_PERSISTENT_WINDOWS - 1, 0.002, slow=1.08).persistent_slowness is None, (
        "the noise is not known yet"
    )
    found = build_history(MIN_PERSISTENT_WINDOWS, 0.002, slow=1.08).persistent_slowness
    assert found is not None
    assert found.since == NOW
    assert found.relative_times.relative_times == {2: pytest.approx(1.08, abs=0.01)}
    assert found.relative_times.error == pytest.approx(0.002 * np.sqrt(32 * 1.5), rel=0.6), (
        "of a step, and of the median of its peers"
    )


def test_the_finding_begins_with_the_first_slow_window() -> None:
    found = build_history(12, 0.002, slow=1.08, since=8).persistent_slowness
    assert found is not None
    assert found.since == NOW + 8 * WINDOW_SECONDS


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("noise", "ranks"), [(0.014, 4), (0.03, 4), (0.03, 64), (0.03, 1024)])
def test_noise_is_no_finding(noise: float, ranks: int, seed: int) -> None:
    history = RelativeTimeHistory()
    random = np.random.default_rng(seed)
    for window in range(60):
        means = 1.0 + noise * random.standard_normal(ranks)
        means[random.integers(ranks)] += 0.25 * (random.random() < 0.1)  # a step in which it was held up
        history = add_window(history, build_rows(means), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
        assert history.persistent_slowness is None


@pytest.mark.parametrize(
    "held_up",
    [
        (0.985, 0.993, 1.258, 1.0, 1.211, 1.264, 1.038),
        (1.27, 1.056, 1.007, 1.201, 0.978, 1.318),
        (1.023, 1.189, 1.01, 1.254, 0.979, 1.336, 0.997, 1.278),
    ],
)
def test_single_long_steps_in_some_windows_are_no_finding(held_up: tuple[float, ...]) -> None:
    """One step of eight takes three times as long, in successive windows by chance."""
    random, history = np.random.default_rng(0), RelativeTimeHistory()
    for window, pace in enumerate([*[1.0] * (MAX_KEPT_WINDOWS - len(held_up)), *held_up]):
        means = 1.0 + 0.03 * random.standard_normal(4)
        means[2] = pace
        history = add_window(history, build_rows(means), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
        assert history.persistent_slowness is None


def test_more_noise_takes_more_windows() -> None:
    def count_windows_until_found(noise: float, seed: int) -> int:
        return next(
            n for n in range(1, 100) if build_history(n, noise, slow=1.08, seed=seed).persistent_slowness is not None
        )

    assert {count_windows_until_found(0.002, seed) for seed in range(10)} == {MIN_PERSISTENT_WINDOWS}
    assert (
        MIN_PERSISTENT_WINDOWS
        < np.mean([count_windows_until_found(0.03, seed) for seed in range(10)])
        < MAX_KEPT_WINDOWS
    )


def test_a_rank_whose_work_varies_more_than_that_of_its_peers_is_no_finding() -> None:
    """In some windows it is slow, and in as many fast."""
    found = 0
    for seed in range(100):
        random, history = np.random.default_rng(seed), RelativeTimeHistory()
        for window in range(MAX_KEPT_WINDOWS):
            means = 1.0 + np.array([0.003, 0.003, 0.03, 0.003]) * random.standard_normal(4)
            history = add_window(history, build_rows(means), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
            found += history.persistent_slowness is not None
    assert found <= 3


def test_in_a_job_of_two_a_rank_is_compared_with_the_other() -> None:
    history = RelativeTimeHistory()
    for window in range(MIN_PERSISTENT_WINDOWS):
        means = np.array([1.0, 1.06]) * (1 + 1e-3 * window)
        history = add_window(history, build_rows(means), 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert history.persistent_slowness is not None
    assert history.persistent_slowness.relative_times.relative_times == {1: pytest.approx(1.06)}


def test_the_slowdown_is_that_of_the_newest_window() -> None:
    history = build_history(8, 0.002, slow=1.08)
    found = add_window(
        history, build_rows(np.array([1.0, 1.001, 1.002, 0.999])), 0, THRESHOLD, NOW + 30
    ).persistent_slowness
    assert found is not None
    assert found.relative_times.relative_times == {2: pytest.approx(1.002, abs=0.003)}


def test_a_slowdown_below_the_threshold_is_ignored() -> None:
    assert build_history(MAX_KEPT_WINDOWS, 0.002, slow=1.03).persistent_slowness is None
    assert build_history(MAX_KEPT_WINDOWS, 0.002, slow=1.045).persistent_slowness is not None


def test_a_recovered_rank_is_no_finding() -> None:
    """Two windows are needed: one may be chance."""
    history = build_history(8, 0.002, slow=1.08)
    first = add_window(history, build_rows(np.array([1.0, 1.001, 1.002, 0.999])), 0, THRESHOLD, NOW + 30)
    assert first.persistent_slowness is not None
    assert (
        add_window(
            first, build_rows(np.array([1.001, 1.002, 1.003, 0.998])), 0, THRESHOLD, NOW + 35
        ).persistent_slowness
        is None
    )


def test_evaluated_steps_are_not_added_again() -> None:
    """No worker has reported since, or a pass comes too soon."""
    history = build_history(1, 0.002)
    window_rows = build_rows(np.array([1.01, 1.02, 1.03, 1.04]))
    assert add_window(history, window_rows, 0, THRESHOLD, NOW + 0.9 * WINDOW_SECONDS) is history
    history = add_window(history, window_rows, 0, THRESHOLD, NOW + WINDOW_SECONDS)
    assert len(history.windows) == 2
    silent = build_rows(np.array([1.02, 1.01, 1.03, 1.04]))
    assert add_window(history, silent, 0, THRESHOLD, NOW + 9 * WINDOW_SECONDS) is history


def test_metrics_that_are_equal_by_rounding_are_added() -> None:
    """Some of a thousand ranks always repeat a value, which must not delay a window indefinitely."""
    random, history = np.random.default_rng(0), RelativeTimeHistory()
    for window in range(MIN_PERSISTENT_WINDOWS):
        window_rows = build_rows(
            np.where(np.arange(1024) == 7, 1.08, 1.0) * (1.0 + 3e-4 * random.standard_normal(1024))
        )
        window_rows["compute_seconds_per_sample"] = [
            float(f"{value:.5g}") for value in window_rows["compute_seconds_per_sample"]
        ]
        history = add_window(history, window_rows, 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert history.persistent_slowness is not None
    assert [*history.persistent_slowness.relative_times.relative_times] == [7]


def test_a_long_silence_begins_a_new_history() -> None:
    history = build_history(8, 0.002, slow=1.08)
    later = add_window(history, build_rows(np.array([1.0, 1.001, 1.09, 1.002])), 0, THRESHOLD, NOW + 1000)
    assert (len(later.windows), later.persistent_slowness, later.needs_more_windows) == (1, None, True)


def test_a_new_membership_begins_a_new_history() -> None:
    other = add_window(
        build_history(8, 0.002, slow=1.08), build_rows(np.array([1.0, 1.0, 1.09, 1.0])), 1, THRESHOLD, NOW + 60
    )
    assert (other.membership, len(other.windows), other.persistent_slowness) == (1, 1, None)


def test_unequal_shares_give_no_history() -> None:
    """Some work of a step is fixed, so a rank with half the samples takes longer for each."""
    history, small = build_history(8, 0.002, slow=1.08), np.array([9, 9, 5, 9])
    window_rows = build_rows(np.array([1.0, 1.001, 1.09, 1.002]), small)
    assert add_window(history, window_rows, 0, THRESHOLD, NOW + 60) == RelativeTimeHistory(has_similar_shares=False)
    assert not RelativeTimeHistory(has_similar_shares=False).needs_more_windows, "more windows would not help"


def test_the_number_of_windows_is_bounded() -> None:
    history = build_history(200, 0.01)
    assert len(history.windows) == len(history.window_ends) == MAX_KEPT_WINDOWS


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lie", [0.0, 1e-300, 1e12, 1e300, float("inf"), float("nan")])
def test_false_metrics_give_finite_numbers(lie: float) -> None:
    history = RelativeTimeHistory()
    for window in range(8):
        window_rows = build_rows(np.array([1.0, 1.001, 1.002, 1.003]) + 1e-4 * window)
        window_rows["compute_seconds_per_sample"][1] = lie * (1 + 0.01 * window)
        history = add_window(history, window_rows, 0, THRESHOLD, NOW + window * WINDOW_SECONDS)
    assert history.persistent_slowness is None or all(
        np.isfinite([*history.persistent_slowness.relative_times.relative_times.values()])
    )


def test_the_memory_of_forty_thousand_ranks_is_bounded() -> None:
    """A fixed number of windows of four bytes per rank is stored, for any reports."""
    history = build_history(2 * MAX_KEPT_WINDOWS, 0.01, ranks=40_000)
    assert sum(window.nbytes for window in history.windows) == MAX_KEPT_WINDOWS * 40_000 * 4


def test_heartbeats_build_the_history() -> None:
    """The cache of a job collects metrics that its workers send, for one rank each."""
    observation = build_training()
    cache = JobCache(observation.job, observation.desired)
    found = JobMetrics()
    for window in range(MIN_PERSISTENT_WINDOWS):
        now = NOW + window * WINDOW_SECONDS
        for member in observation.plan.members:
            (rank,) = member.ranks
            seconds = 0.01 * (1.08 if rank == 2 else 1.0) * (1 + 1e-4 * window)
            metrics = RankMetrics(rank, 32, 0.1, 8 * seconds, seconds, 0.02, 8, 0.1)
            cache.contacts[member.worker] = WorkerContact(Heartbeat(), now, rank_rows=read_rank_rows([metrics]))
        found = gather.collect_metrics(cache, JobMetrics(), now)
    assert found.persistent_slowness is not None
    assert found.persistent_slowness.since == NOW
    assert found.persistent_slowness.relative_times.relative_times == {2: pytest.approx(1.08)}
    cache.update(desired=observation.desired.with_plan(membership=2, members=(Member("w9", "10.0.0.9", (0,)),)))
    assert gather.collect_metrics(cache, JobMetrics(), NOW + 60).persistent_slowness is None


def test_a_silent_member_leaves_the_history_unchanged() -> None:
    observation = build_training()
    before = replace(build_history(8, 0.002, slow=1.08), membership=observation.plan.membership)
    cache = JobCache(observation.job, observation.desired)
    cache.relative_times = before
    assert before.persistent_slowness is not None
    assert gather.collect_metrics(cache, JobMetrics(), NOW + 60).persistent_slowness == before.persistent_slowness

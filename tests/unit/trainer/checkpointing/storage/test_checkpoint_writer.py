"""Which rank verifies which files, and how long ranks wait."""

from __future__ import annotations

import pytest

from pacekeeper.checkpointing.storage import checkpoint_writer
from pacekeeper.checkpointing.storage.checkpoint_writer import choose_verified_rank
from pacekeeper.launcher.settings import LauncherSettings


def test_a_rank_gives_up_a_checkpoint_before_the_stall_detector_reports_it() -> None:
    assert 0.9 * LauncherSettings.phase_deadline > checkpoint_writer._MAX_WRITE_WAIT_SECONDS


@pytest.mark.parametrize(
    "workers", ["a", "aa", "ab", "aabb", "abab", "abcd", "aaabbb", "aabbcc", "abcab", "aaabc", "aaaab"], ids=str
)
def test_each_ranks_files_are_verified_by_a_rank_on_another_worker_if_there_is_one(workers: str) -> None:
    ranks = range(len(workers))
    verified = [choose_verified_rank(list(workers), rank) for rank in ranks]
    assert sorted(verified) == list(ranks)
    largest = max(map(workers.count, workers))
    at_home = sum(workers[rank] == workers[verified[rank]] for rank in ranks)
    assert at_home == max(0, 2 * largest - len(workers)), "more than half of the ranks cannot all be verified elsewhere"
    if len(workers) > 1 and largest == len(workers):
        assert all(verified[rank] != rank for rank in ranks), "a process of its own reads them"

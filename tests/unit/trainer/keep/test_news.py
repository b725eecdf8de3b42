"""What rank 0 tells of checkpoints, and what its launcher makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.environment import Environment
from pacekeeper.keep.news import NO_NEWS, NewsFile, Nobody, culprit, open_news, read_news
from pacekeeper.runtime import Runtime


def test_a_failure_stands_beside_the_newest_that_is_kept_until_the_next_one_is(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    file = NewsFile(path)
    file.kept(10)
    kept = read_news(path)
    assert (kept.step, kept.failed_rank, kept.error) == (10, -1, "")
    file.failed("/checkpoints: full" + "!" * 1_000, 3)
    assert read_news(path) == replace(kept, failed_rank=3, error="/checkpoints: full" + "!" * 482)
    file.kept(30)
    assert (read_news(path).step, read_news(path).failed_rank, read_news(path).error) == (30, -1, "")


def test_a_new_round_knows_how_old_the_newest_is_where_it_was_kept_here(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    NewsFile(path).kept(10)
    NewsFile(path).failed("full", 0)
    before = read_news(path)
    NewsFile(path).found(10)
    assert read_news(path) == before
    NewsFile(path).found(40)
    found = read_news(path)
    assert (found.step, found.error) == (40, "")
    assert found.kept_ns > before.kept_ns, "kept by another worker: from now on it is as old as it has been seen here"


def test_the_age_is_never_negative_and_not_known_without_a_checkpoint() -> None:
    news = replace(NO_NEWS, step=5, kept_ns=10 * 10**9)
    assert (news.age(12.5), news.age(9.0), NO_NEWS.age(12.5)) == (2.5, 0.0, -1.0)


@pytest.mark.parametrize("content", ["", "[]", '{"step": "ten"}', '{"kept_ns": -1}', '{"kept_ns": NaN}', "\ufffd"])
def test_what_makes_no_sense_is_no_news(tmp_path: Path, content: str) -> None:
    path = tmp_path / "checkpoints.json"
    assert read_news(path) == NO_NEWS
    path.write_text(content)
    assert read_news(path) == NO_NEWS


def test_training_goes_on_where_nothing_can_be_told(tmp_path: Path) -> None:
    NewsFile(tmp_path / "missing" / "checkpoints.json").kept(10)


def test_only_rank_0_under_a_launcher_tells(tmp_path: Path) -> None:
    assert isinstance(open_news(Environment(rank=0, runtime=Runtime(tmp_path))), NewsFile)
    assert isinstance(open_news(Environment(rank=1, runtime=Runtime(tmp_path))), Nobody)
    assert isinstance(open_news(Environment(rank=0)), Nobody)


@pytest.mark.parametrize(
    ("reason", "rank"), [("rank 12: OSError: full; rank 13: OSError: full", 12), ("the store is gone", -1), ("", -1)]
)
def test_the_rank_that_failed_first_is_known_from_the_reason(reason: str, rank: int) -> None:
    assert culprit(reason) == rank

"""When `pacekeeper watch --profile` takes a window, and what it prints of it."""

from __future__ import annotations

from collections.abc import Mapping, Set

import pytest

from pacekeeper.watch.slow_rank_profile import (
    LIVE_PROFILE_PATIENCE_SECONDS,
    LIVE_PROFILE_SECONDS,
    MIN_LIVE_PROFILE_STEPS,
    SlowRankProfile,
)
from pacekeeper_analysis.profiling.pattern import RankPattern
from pacekeeper_analysis.protocol.requests import ProfileRequest
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_pattern

RANKS = 4


class Container:
    """Ranks that have answered, of which rank 2 spends 0.2 s a step in one function."""

    def __init__(self) -> None:
        self.requests: list[ProfileRequest] = []
        self.answered: set[int] = set()

    def request_profile(self, request: ProfileRequest) -> None:
        self.requests.append(request)

    def read_patterns(self, request: str, known: Set[int]) -> Mapping[int, RankPattern]:
        assert request == self.requests[-1].name
        work = {rank: {**HEALTHY_WORK, **({SLOW_FUNCTION: 0.2} if rank == 2 else {})} for rank in self.answered}
        return {rank: build_pattern(rank, work[rank], 0.6) for rank in self.answered - known}


@pytest.fixture
def container() -> Container:
    return Container()


@pytest.fixture
def profile(container: Container) -> SlowRankProfile:
    return SlowRankProfile(container)


def test_all_ranks_are_asked_for_the_same_steps_once_one_is_slow(
    container: Container, profile: SlowRankProfile
) -> None:
    assert profile.follow((), 100, 0.1, RANKS, 0.0) == ()
    assert profile.follow((2,), 100, None, RANKS, 0.0) == (), "no step has been judged"
    assert container.requests == []
    assert profile.follow((2,), 100, 0.1, RANKS, 0.0) == ()
    (request,) = container.requests
    assert request.first_step > 110, "far enough ahead"
    assert request.steps == LIVE_PROFILE_SECONDS / 0.1
    container.answered = {0, 1, 3}
    assert profile.follow((2,), 200, 0.1, RANKS, 20.0) == (), "one is missing"
    container.answered.add(2)
    sentences = profile.follow((), 210, 0.1, RANKS, 21.0)
    assert any("train.py:augment on rank 2" in sentence for sentence in sentences)
    assert profile.follow((2,), 300, 0.1, RANKS, 30.0) == ()
    assert len(container.requests) == 1, "it is known"
    profile.follow((1, 2), 300, 5.0, RANKS, 30.0)
    assert (container.requests[-1].steps, container.requests[-1].seconds) == (MIN_LIVE_PROFILE_STEPS, 160.0)
    assert len({request.name for request in container.requests}) == 2


@pytest.mark.parametrize("answered", [set(), {0, 1, 2}])
def test_ranks_that_do_not_answer_are_not_awaited_for_ever(
    answered: set[int], container: Container, profile: SlowRankProfile
) -> None:
    profile.follow((2,), 100, 0.1, RANKS, 0.0)
    container.answered = answered
    assert profile.follow((2,), 110, 0.1, RANKS, LIVE_PROFILE_PATIENCE_SECONDS - 1) == ()
    sentences = profile.follow((2,), 110, 0.1, RANKS, LIVE_PROFILE_PATIENCE_SECONDS + 30)
    assert bool(sentences) == bool(answered)

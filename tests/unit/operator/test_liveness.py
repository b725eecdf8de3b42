"""The operator calls itself dead when it no longer sees the cluster."""

from __future__ import annotations

from types import SimpleNamespace

import kopf
import pytest

from pacekeeper_operator.handlers.startup import LOOK_SECONDS, MISSED_EVENTS, watches


@pytest.fixture
def memo() -> kopf.Memo:
    long_ago = SimpleNamespace(started_at=-2 * LOOK_SECONDS)
    return kopf.Memo(operator=SimpleNamespace(watching=True, missed_events=0, memory=long_ago))


def test_watches_that_tell_are_alive(memo: kopf.Memo) -> None:
    assert watches(memo=memo) == 0


def test_changes_that_only_lists_have_shown_are_a_dead_watch(memo: kopf.Memo) -> None:
    memo.operator.missed_events = MISSED_EVENTS
    with pytest.raises(RuntimeError, match="the watch of pods is dead"):
        watches(memo=memo)


def test_a_watch_that_never_came_to_life_is_dead(memo: kopf.Memo) -> None:
    memo.operator.watching = False
    with pytest.raises(RuntimeError, match="no watch has told anything"):
        watches(memo=memo)

"""What the test cluster's programs need to be built."""

from __future__ import annotations

import os

import pytest

from testcluster.programs import format_compile_time


@pytest.mark.parametrize(
    ("processors", "words"), [(1, "about 9 minutes here"), (2, "about 4 minutes here"), (16, "about 1 minute here")]
)
def test_how_long_it_takes_is_said_of_the_machine_at_hand(
    processors: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert format_compile_time(9) == words

"""Requirements for building the test cluster's programs."""

from __future__ import annotations

import os

import pytest

from testcluster.programs import format_compile_time


@pytest.mark.parametrize(
    ("processors", "expected"), [(1, "about 9 minutes here"), (2, "about 4 minutes here"), (16, "about 1 minute here")]
)
def test_the_build_time_is_estimated_for_this_machine(
    processors: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert format_compile_time(9) == expected

"""Every instant has one owner; recorded spans are summed exactly, and samples share out the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.profiling.pattern import (
    MAX_RANK_PATTERN_BYTES,
    NOT_MEASURED,
    FunctionPattern,
    TimeOwner,
    encode_compact_json,
)
from pacekeeper_analysis.profiling.reduce import (
    OTHER_FUNCTIONS,
    UNSAMPLED_LOADER,
    KnownSpans,
    StackSamples,
    WindowRecording,
    reduce_window,
)

MS = 1_000_000
Given = Sequence[tuple[TimeOwner, str, float, float]]
"""Owner, name, start and end in ms."""


def build_spans(*given: tuple[TimeOwner, str, float, float]) -> KnownSpans:
    names = list(dict.fromkeys(name for _, name, _, _ in given))
    return KnownSpans(
        owner=np.array([owner for owner, *_ in given], np.uint8),
        start_ns=np.array([start * MS for *_, start, _ in given], np.int64),
        end_ns=np.array([end * MS for *_, end in given], np.int64),
        name=np.array([names.index(name) for _, name, _, _ in given], np.int64),
        names=names,
    )


def build_samples(*given: tuple[float, str], busy: float = 1.0) -> StackSamples:
    """At these ms, into these functions; `busy`: of the time between them the thread ran."""
    stacks = [("train.py:<module>", name) for name in dict.fromkeys(name for _, name in given)]
    at = np.array([ms * MS for ms, _ in given], np.int64)
    found = np.array([[stack[-1] for stack in stacks].index(name) for _, name in given], np.int64)
    return StackSamples(at, (at * busy).astype(np.int64), found, stacks)


def build_window(seen: StackSamples, known_spans: KnownSpans, seconds: float = 1.0, steps: int = 10) -> WindowRecording:
    each = np.full(steps, seconds / steps)
    return WindowRecording(2, 1, 100, each, each, np.zeros(0), 4, seen, known_spans)


def reduce_functions(given: WindowRecording) -> dict[tuple[str, TimeOwner], FunctionPattern]:
    return {(f.name, f.owner): f for f in reduce_window(given).function_patterns}


EVEN = build_samples(*[(ms + 10, "a" if ms < 500 else "b") for ms in range(0, 1000, 20)])


def test_samples_share_out_pythons_time() -> None:
    found = reduce_functions(build_window(EVEN, build_spans()))
    assert found["a", TimeOwner.PYTHON].share == pytest.approx(0.5)
    assert found["b", TimeOwner.PYTHON].share == pytest.approx(0.5)
    assert found["a", TimeOwner.PYTHON].error == pytest.approx(np.sqrt(0.25 / 50), rel=1e-3)
    assert found["a", TimeOwner.PYTHON].use == pytest.approx(1.0)


def test_a_function_that_sleeps_uses_no_processor() -> None:
    idle = build_samples(*[(ms + 10, "a") for ms in range(0, 1000, 20)], busy=0.0)
    ran = idle.ran_ns.copy()
    ran[-1] = 1
    assert reduce_functions(build_window(replace(idle, ran_ns=ran), build_spans()))["a", TimeOwner.PYTHON].use < 0.01
    unknown = reduce_functions(build_window(replace(idle, ran_ns=np.zeros(50, np.int64)), build_spans()))
    assert unknown["a", TimeOwner.PYTHON].use == NOT_MEASURED


def test_a_wait_for_peers_is_exact_and_has_no_other_owner() -> None:
    found = reduce_functions(build_window(EVEN, build_spans((TimeOwner.COLLECTIVE, "all_reduce", 500, 1000))))
    assert found["all_reduce", TimeOwner.COLLECTIVE] == (
        "all_reduce",
        TimeOwner.COLLECTIVE,
        0.5,
        0.0,
        NOT_MEASURED,
        NOT_MEASURED,
    )
    assert found["a", TimeOwner.PYTHON].share == pytest.approx(0.5)
    assert ("b", TimeOwner.PYTHON) not in found


def test_the_first_owner_has_the_instant() -> None:
    """A kernel over a wait over the loader over a collection: each has what those before it leave."""
    found = reduce_functions(
        build_window(
            EVEN,
            build_spans(
                (TimeOwner.GC, "gc", 0, 400),
                (TimeOwner.DATA, "", 0, 300),
                (TimeOwner.COLLECTIVE, "wait", 0, 200),
                (TimeOwner.GPU_MEMORY, "copy", 50, 150),
                (TimeOwner.GPU_COMPUTE, "gemm", 0, 100),
            ),
        )
    )
    shares = {name: f.share for (name, _), f in found.items()}
    assert shares["gemm"] == pytest.approx(0.1)
    assert shares["copy"] == pytest.approx(0.05)
    assert shares["wait"] == pytest.approx(0.05)
    assert found["a", TimeOwner.DATA].share == pytest.approx(0.1)
    assert shares["gc"] == pytest.approx(0.1)
    assert sum(f.share for f in found.values()) == pytest.approx(1.0)


def test_kernels_of_two_streams_count_once() -> None:
    found = reduce_functions(
        build_window(EVEN, build_spans((TimeOwner.GPU_COMPUTE, "x", 0, 600), (TimeOwner.GPU_COMPUTE, "y", 300, 800)))
    )
    assert found["x", TimeOwner.GPU_COMPUTE].share == pytest.approx(0.6)
    assert found["y", TimeOwner.GPU_COMPUTE].share == pytest.approx(0.2)


def test_samples_during_kernels_have_no_owner_independent_of_other_streams() -> None:
    """The GPU is busy for 900 ms with one kernel, and with short copies at the same time. The host is in "late" while
    it is idle, and launches from "a" before."""
    held = build_samples(*[(ms, "a") for ms in range(10, 900, 20)], *[(ms, "late") for ms in range(910, 1000, 20)])
    kernels = [(TimeOwner.GPU_COMPUTE, "gemm", 0, 900)] + [
        (TimeOwner.GPU_COMPUTE, "copy", ms, ms + 10) for ms in (50, 100)
    ]
    found = reduce_functions(build_window(held, build_spans(*kernels)))
    assert found["gemm", TimeOwner.GPU_COMPUTE].share == pytest.approx(0.9)
    assert found["late", TimeOwner.PYTHON].share == pytest.approx(0.1)
    assert ("a", TimeOwner.PYTHON) not in found


def test_spans_that_cover_all_and_more_are_the_whole_and_no_more() -> None:
    known_spans = build_spans((TimeOwner.GPU_COMPUTE, "gemm", 0, 900), (TimeOwner.DATA, "", 900, 1100))
    found = reduce_functions(build_window(EVEN, known_spans))
    assert sum(f.share for f in found.values()) == pytest.approx(1.0)
    assert found["gemm", TimeOwner.GPU_COMPUTE].share == pytest.approx(9 / 11)


def test_the_loader_counts_without_a_sample_in_it() -> None:
    found = reduce_functions(build_window(EVEN, build_spans((TimeOwner.DATA, "", 11, 29))))
    assert found[UNSAMPLED_LOADER, TimeOwner.DATA].share == pytest.approx(0.018)


def test_a_sample_after_a_pause_counts_little() -> None:
    """The sampler was paused for half a second: this time does not all belong to "late"."""
    held = build_samples(*[(ms + 10, "a") for ms in range(0, 500, 20)], (1000, "late"))
    assert reduce_functions(build_window(held, build_spans()))["late", TimeOwner.PYTHON].share < 0.1


def test_without_a_sample_all_time_is_others() -> None:
    nothing = StackSamples(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), [])
    assert reduce_functions(build_window(nothing, build_spans()))[
        OTHER_FUNCTIONS, TimeOwner.PYTHON
    ].share == pytest.approx(1.0)


def test_no_step_is_no_pattern() -> None:
    with pytest.raises(ValueError, match="without a step"):
        reduce_window(replace(build_window(EVEN, build_spans()), step_seconds=np.zeros(0)))


def test_own_work_that_follows_lengths_is_found() -> None:
    lengths = np.array([100.0, 200, 300, 150, 250, 120, 310, 90, 170, 220])
    given = replace(build_window(EVEN, build_spans()), own_seconds=lengths * 1e-3, lengths=lengths)
    assert reduce_window(given).follows_lengths == pytest.approx(1.0)
    assert reduce_window(replace(given, lengths=lengths[:5])).follows_lengths is None


@pytest.mark.parametrize("letter", ["x", "é", "\n"], ids=ascii)
def test_eight_kilobytes_hold_any_pattern(letter: str) -> None:
    chance = np.random.default_rng(0)
    stacks = [tuple(f"{letter * 40}/{i}-{depth}.py:f" for depth in range(30)) for i in range(300)]
    at = np.arange(1000, dtype=np.int64) * 20 * MS
    many = StackSamples(at, at, chance.integers(0, 300, 1000), stacks)
    found = reduce_window(build_window(many, build_spans((TimeOwner.COLLECTIVE, letter * 500, 0, 3000)), seconds=20.0))
    assert len(encode_compact_json(found.to_json())) <= MAX_RANK_PATTERN_BYTES
    assert found.statistics[:, 0].sum() == pytest.approx(1.0, abs=1e-3)
    assert len(found.functions) > 8

"""Damaged traces: an error that names the place, or the step left out and counted; never a wrong figure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacekeeper_analysis.whatif import (
    JobTrace,
    TraceError,
    TraceMetadata,
    analyze_window,
    build_trace_from_columns,
    build_window_from_trace,
)
from pacekeeper_analysis.whatif.causes import SlowdownCause
from pacekeeper_analysis.whatif.command import main
from pacekeeper_analysis.whatif.inputs.parquet import read_metadata, read_parquet, write_parquet
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import SyntheticJob
from pacekeeper_analysis.whatif.trace import FORWARD, OPERATION_TYPES, OPTIMIZER

SHAPE = JobShape(dp=2, pp=2, microbatches=3, steps=5)


@pytest.fixture(scope="module")
def trace() -> JobTrace:
    return SyntheticJob(SlowdownCause.SLOW_WORKER, SHAPE, strength=1.0, noise=0.02, seed=1).build_trace()


def find_row(trace: JobTrace, step: int, dp_rank: int, stage: int, optype: str, seq: int = 0) -> int:
    rows = (trace.step == step) & (trace.dp_rank == dp_rank) & (trace.stage == stage) & (trace.seq_id == seq)
    return int(np.flatnonzero(rows & (trace.optype == OPERATION_TYPES.index(optype)))[0])


def change_value(trace: JobTrace, column: str, row: int, value: float) -> JobTrace:
    values = getattr(trace, column).copy()
    values[row] = value
    return replace(trace, **{column: values})


def remove_row(trace: JobTrace, row: int) -> JobTrace:
    return trace.select_rows(np.arange(len(trace)) != row)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("duration", float("nan"), "step 2, dp_rank 1, stage 0, forward-compute 1: .*not a number"),
        ("duration", -0.5, "forward-compute 1: duration is negative"),
        ("duration", 1e9, "longer than a day"),
        ("start_ts", float("inf"), "not a number"),
        ("start_ts", 1e9, "starts more than a day"),
        ("dp_rank", 7, "dp_rank is outside of dp_size 2"),
        ("stage", -3, "stage is outside of pp_size 2"),
        ("mc", 4, "mc is outside of vpp_size 1"),
        ("seq_id", 99, "seq_id is out of order"),
        ("seq_id", -1, "seq_id is out of order"),
        ("seq_id", 0, "recorded twice"),
        ("optype", OPERATION_TYPES.index("gc"), "dp_rank 1, stage 0 has 2 operations forward-compute; .* have 3"),
        ("step", 77, "dp_rank 1, stage 0 has 2 operations forward-compute"),
    ],
)
def test_a_damaged_row_costs_its_step(trace: JobTrace, column: str, value: float, reason: str) -> None:
    damaged = change_value(trace, column, find_row(trace, 2, 1, 0, FORWARD, seq=1), value)
    whatif = analyze_window(build_window_from_trace(damaged))
    healthy = analyze_window(build_window_from_trace(trace.select_rows(trace.step != 2)))
    assert whatif.steps == (0, 1, 3, 4)
    assert whatif.slowdown == healthy.slowdown
    reasons = {skipped.step: skipped.reason for skipped in whatif.skipped}
    assert reasons.keys() == ({2, 77} if column == "step" else {2})
    assert re.search(reason, reasons[2])


def test_a_missing_row_costs_its_step(trace: JobTrace) -> None:
    whatif = analyze_window(build_window_from_trace(remove_row(trace, find_row(trace, 0, 0, 1, OPTIMIZER))))
    assert whatif.steps == (1, 2, 3, 4)
    assert "dp_rank 0, stage 1 has 0 operations optimizer" in whatif.skipped[0].reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.select_rows(t.optype != OPERATION_TYPES.index(OPTIMIZER)), "stage 0 has no operation optimizer"),
        (
            lambda t: t.select_rows(t.optype != OPERATION_TYPES.index("forward-send")),
            "0 forward-send for 3 computations that need one; rows are missing",
        ),
        (
            lambda t: t.select_rows((t.optype != OPERATION_TYPES.index("backward-compute")) | (t.seq_id < 2)),
            "3 forward-compute and 2 backward-compute",
        ),
        (
            lambda t: t.select_rows((t.optype != OPERATION_TYPES.index("optimizer-clip-main-grad")) | (t.stage == 0)),
            "different numbers of optimizer-clip-main-grad",
        ),
        (
            lambda t: t.select_rows((t.step == 0) & ~((t.dp_rank == 1) & (t.seq_id == 1))),
            "no step of the trace is complete",
        ),
        (lambda t: replace(t, duration=t.duration * np.nan), "no step of the trace is complete; .*not a number"),
        (lambda t: replace(t, metadata=TraceMetadata(3, 2)), "dp_size 3, but the trace has no row of dp_rank 2"),
        (lambda t: replace(t, metadata=TraceMetadata(2, 4)), "pp_size 4, but the trace has no row of stage 2"),
        (lambda t: replace(t, metadata=TraceMetadata(1, 2)), "dp_size 1, but .* rows are of a higher dp_rank"),
        (
            lambda t: replace(t, metadata=TraceMetadata(2, 2, vpp_size=2)),
            "vpp_size 2, but the trace has no row of model chunk",
        ),
    ],
)
def test_a_trace_that_cannot_be_analyzed_names_the_reason(
    trace: JobTrace, change: Callable[[JobTrace], JobTrace], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        build_window_from_trace(change(trace))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_size": 4, "pp_size": 2, "world_size": 9}, "world_size is 9, but .* is 8"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"dp_size": "four"}, "dp_size is 'four'"),
        ({"pp_size": 4}, "dp_size is missing"),
    ],
)
def test_metadata_that_contradicts_itself_is_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TraceMetadata.from_mapping(values)


def test_columns_are_checked(trace: JobTrace) -> None:
    columns = trace.to_columns()
    for broken, message in (
        ({name: column for name, column in columns.items() if name != "seq_id"}, "no column seq_id"),
        (columns | {"step": columns["step"][1:]}, "differ in length"),
        ({name: column[:0] for name, column in columns.items()}, "no rows"),
        (columns | {"duration": columns["duration"].astype(str)}, "column duration holds"),
        (columns | {"stage": columns["stage"].astype(float)}, "column stage holds float64"),
        (
            columns | {"optype": np.where(np.arange(len(trace)) == 5, "nap", columns["optype"])},
            "type 'nap' .1 such rows",
        ),
    ):
        with pytest.raises(TraceError, match=message):
            build_trace_from_columns(broken, trace.metadata)


def test_unreadable_files_are_named(trace: JobTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "trace-x.parquet"
    write_parquet(whole, trace)
    cut, empty, text = tmp_path / "cut.parquet", tmp_path / "empty.parquet", tmp_path / "text.parquet"
    cut.write_bytes(whole.read_bytes()[:-200])
    empty.write_bytes(b"")
    text.write_text("step,dp_rank\n")
    (tmp_path / "meta.yaml").write_text("dp_size: 2\npp_size: 2  # stages\n")
    (tmp_path / "bad.yaml").write_text("dp_size 2\n")
    for arguments, message in (
        ([cut, "--meta", tmp_path / "meta.yaml"], "not a readable parquet file"),
        ([empty, "--meta", tmp_path / "meta.yaml"], "is empty"),
        ([text, "--meta", tmp_path / "meta.yaml"], "unknown kind"),
        ([whole], "has no meta-x.yaml next to it"),
        ([whole, "--meta", tmp_path / "bad.yaml"], "bad.yaml, line 1: 'dp_size 2'"),
        ([tmp_path / "none.parquet"], "No such file"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_trace_is_the_same_after_it_was_written(trace: JobTrace, tmp_path: Path) -> None:
    write_parquet(tmp_path / "trace.parquet", trace)
    (tmp_path / "meta.json").write_text('{"dp_size": 2, "pp_size": 2}')
    read = read_parquet(tmp_path / "trace.parquet", read_metadata(tmp_path / "meta.json"))
    assert (
        analyze_window(build_window_from_trace(read)).slowdown
        == analyze_window(build_window_from_trace(trace)).slowdown
    )


MUTATIONS = 300


def test_mutated_traces_never_give_a_wrong_figure(trace: JobTrace) -> None:
    """Every figure comes from complete steps whose rows are as recorded: a damaged row's step is not among them."""
    rng = np.random.default_rng(11)
    expected = dict(zip(*compute_figures(trace), strict=True))
    survived = 0
    for _ in range(MUTATIONS):
        mutated, touched = mutate_trace(trace, rng)
        try:
            steps, seconds = compute_figures(mutated)
        except TraceError:
            continue
        survived += 1
        for step, value in zip(steps, seconds, strict=True):
            assert step not in touched
            assert value == expected[step]
    assert survived > MUTATIONS / 2


def compute_figures(trace: JobTrace) -> tuple[tuple[int, ...], list[float]]:
    whatif = analyze_window(build_window_from_trace(trace))
    return whatif.steps, [float(value) for value in whatif.step_s]


def mutate_trace(trace: JobTrace, rng: np.random.Generator) -> tuple[JobTrace, set[int]]:
    """Return the trace with a few kinds of damage, and the steps that they are in."""
    touched: set[int] = set()
    for _ in range(int(rng.integers(1, 4))):
        rows = rng.choice(len(trace), size=int(rng.integers(1, 6)), replace=False)
        touched |= {int(step) for step in trace.step[rows]}
        kind = int(rng.integers(6))
        if kind == 0:
            trace = trace.select_rows(~np.isin(np.arange(len(trace)), rows))
        elif kind == 1:
            trace = duplicate_rows(trace, rows)
        else:
            column = ("duration", "start_ts", "optype", "seq_id")[kind - 2]
            values = getattr(trace, column).copy()
            if column in ("duration", "start_ts"):
                values[rows] = rng.choice([np.nan, np.inf, -np.inf, 1e12] + ([-1.0] if column == "duration" else []))
            else:
                values[rows] = (
                    (values[rows] + 1) % len(OPERATION_TYPES) if column == "optype" else rng.choice([-5, 1000])
                )
            trace = replace(trace, **{column: values})
    return trace, touched


def duplicate_rows(trace: JobTrace, rows: np.ndarray) -> JobTrace:
    order = np.concatenate([np.arange(len(trace)), rows])
    return replace(trace, **{name: getattr(trace, name)[order] for name in trace.to_columns()})

"""The analysis reproduces the results that the authors of the method published for real traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.whatif import WhatIf, analyze_window, build_window_from_trace
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.inputs.parquet import read_metadata, read_parquet

RATIO = 2e-6
SECONDS = 1e-5


@pytest.fixture(scope="module")
def analyzed(published: Path) -> dict[str, WhatIf]:
    """The analysis of every published trace in the folder."""
    names = [path.stem.removeprefix("trace-") for path in sorted(published.glob("trace-*.parquet"))]
    return {name: analyze_trace(published, name) for name in names}


def analyze_trace(folder: Path, name: str) -> WhatIf:
    trace = read_parquet(folder / f"trace-{name}.parquet", read_metadata(folder / f"meta-{name}.yaml"))
    return analyze_window(build_window_from_trace(trace), trace.map_worker_ranks())


def read_expected(folder: Path, kind: str, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"{kind}-{name}.json").read_text())
    return values


def test_slowdowns_and_step_times_are_reproduced(published: Path, analyzed: dict[str, WhatIf]) -> None:
    for name, whatif in analyzed.items():
        result = read_expected(published, "result", name)
        steps = [str(step) for step in whatif.steps]
        assert whatif.skipped == ()
        assert whatif.slowdown == pytest.approx(result["blocking_slowdown"], abs=RATIO)
        assert whatif.launch_slowdown == pytest.approx(result["launch_slowdown"], abs=RATIO)
        assert steps == sorted(result["step_t_base"], key=int)
        for ours, theirs in (
            (whatif.window.measured_s, "step_t_base"),
            (whatif.step_s, "step_t_nodelay"),
            (np.full(len(steps), whatif.ideal_step_s), "step_t_noblk"),
        ):
            assert ours == pytest.approx(np.array([result[theirs][step] for step in steps]), abs=SECONDS)
        for ours, theirs in (
            (whatif.slowdown_per_step, "blocking_step_slowdown"),
            (whatif.launch_slowdown_per_step, "launch_step_slowdown"),
        ):
            assert ours == pytest.approx(np.array([result[theirs][step] for step in steps]), abs=RATIO)


def test_the_decomposition_is_reproduced(published: Path, analyzed: dict[str, WhatIf]) -> None:
    for name, whatif in analyzed.items():
        result = read_expected(published, "result", name)
        parts = whatif.decomposition
        if parts is None:
            assert result["blocking_decompose_by_optype"] is None
            continue
        assert parts.slowdown_by_type == pytest.approx(result["blocking_decompose_by_optype"], abs=RATIO)
        assert index_by_number(parts.slowdown_by_replica) == pytest.approx(
            result["blocking_decompose_by_dp_rank"], abs=RATIO
        )
        assert index_by_number(parts.slowdown_by_stage) == pytest.approx(
            result["blocking_decompose_by_stage"], abs=RATIO
        )
        for at, step in enumerate(map(str, whatif.steps)):
            of_types = {name: values[at] for name, values in parts.type_slowdown_per_step.items()}
            assert of_types == pytest.approx(result["blocking_decompose_by_optype_per_step"][step], abs=RATIO)
            of_replicas, of_stages = (
                index_by_number(parts.replica_slowdown_per_step[:, at]),
                index_by_number(parts.stage_slowdown_per_step[:, at]),
            )
            assert of_replicas == pytest.approx(result["blocking_decompose_by_dp_rank_per_step"][step], abs=RATIO)
            assert of_stages == pytest.approx(result["blocking_decompose_by_stage_per_step"][step], abs=RATIO)


def test_the_blame_is_reproduced(published: Path, analyzed: dict[str, WhatIf]) -> None:
    for name, whatif in analyzed.items():
        if whatif.decomposition is None:
            continue
        recorded, ideal = whatif.step_s.mean(), whatif.ideal_step_s
        parts = whatif.decomposition
        for kind, blame in (("mw", parts.worst_workers), ("ms", parts.last_stage)):
            result = read_expected(published, kind, name)
            single = (blame.only_step_s.mean() - ideal) / (recorded - ideal)
            assert blame.share == pytest.approx(result["rem"], abs=RATIO)
            assert single == pytest.approx(result["add"], abs=RATIO)
            assert blame.ideal_step_s.mean() == pytest.approx(result["trem"], abs=SECONDS)
            assert blame.only_step_s.mean() == pytest.approx(result["tadd"], abs=SECONDS)
            assert recorded == pytest.approx(result["tori"], abs=SECONDS)
            assert ideal == pytest.approx(result["tideal"], abs=SECONDS)


def test_the_causes_are_found(analyzed: dict[str, WhatIf]) -> None:
    """AR: one worker was slowed down on purpose. ST: the last stage has more to do."""
    if "AR" in analyzed:
        finding = diagnose_cause(analyzed["AR"])
        assert (finding.cause, finding.workers) == (SlowdownCause.SLOW_WORKER, ((0, 0),))
    if "ST" in analyzed:
        finding = diagnose_cause(analyzed["ST"])
        assert finding.cause is SlowdownCause.STAGE_IMBALANCE
        assert {stage for _, stage in finding.workers} == {3}


def index_by_number(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    return {str(number): float(value) for number, value in enumerate(values)}

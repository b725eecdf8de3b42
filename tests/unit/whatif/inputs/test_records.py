"""Windows from the records of Pacekeeper's own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.whatif import TraceError, analyze_window
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.command import main
from pacekeeper_analysis.whatif.data_parallel import build_replacement_scenario
from pacekeeper_analysis.whatif.inputs.records import build_window_from_evidence, build_window_from_records
from testing.training.rings import OWN_MS, REDUCE_MS, STEPS, build_records, write_ring


def test_records_of_a_job_with_a_slow_rank() -> None:
    whatif = analyze_window(build_window_from_records({rank: build_records(rank) for rank in range(4)}))
    assert whatif.steps == tuple(STEPS)
    assert whatif.step_s == pytest.approx(0.22)
    assert whatif.launch_slowdown == pytest.approx(1.0)
    # Ideal: loading 10 ms, the mean of 90, 90, 190 and 90 ms, the reduce.
    assert whatif.ideal_step_s == pytest.approx(0.010 + 0.115 + 0.020)
    assert whatif.simulate_scenario(build_replacement_scenario([2])) == pytest.approx(0.12)
    finding = diagnose_cause(whatif)
    assert (finding.cause, finding.workers) == (SlowdownCause.SLOW_WORKER, ((2, 0),))


def test_only_steps_that_all_ranks_have_are_used() -> None:
    records = {rank: build_records(rank, range(5 + rank, 10 + rank)) for rank in range(3)}
    assert build_window_from_records(records).steps == (7, 8, 9)


def test_evidence_of_sidecars_gives_the_same_figures() -> None:
    step_s = (max(OWN_MS) + REDUCE_MS) / 1e3
    count = len(STEPS)
    windows = [
        RankWindow(rank, tuple(STEPS), (step_s,) * count, (own / 1e3,) * count, (8,) * count)
        for rank, own in enumerate(OWN_MS)
    ]
    of_evidence = analyze_window(build_window_from_evidence(windows))
    assert of_evidence.slowdown == pytest.approx(0.22 / (0.125 + 0.020))
    assert of_evidence.compute_gain(build_replacement_scenario([2])) == pytest.approx(0.22 / 0.12)


def test_rings_are_read_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        write_ring(tmp_path / str(rank), rank)
    assert main([str(tmp_path / str(rank)) for rank in (3, 1, 0, 2)]) == 0
    assert "Worker dp 2 computes 2.11 times as long as its peers" in capsys.readouterr().out
    (tmp_path / "3").write_bytes((tmp_path / "3").read_bytes()[:-64])
    assert main([str(tmp_path / str(rank)) for rank in range(4)]) == 2
    assert "or truncated" in capsys.readouterr().err


def test_bad_records_are_rejected() -> None:
    with pytest.raises(TraceError, match="records of rank 0, 2; give those of every rank"):
        build_window_from_records({0: build_records(0), 2: build_records(2)})
    with pytest.raises(TraceError, match="records of rank none"):
        build_window_from_records({})
    with pytest.raises(TraceError, match="no step in common"):
        build_window_from_records({0: build_records(0, range(3)), 1: build_records(1, range(3, 6))})
    backwards = build_records(1)
    backwards["end_ns"][4] = 0
    with pytest.raises(TraceError, match="rank 1, step 6: a record ends before it begins"):
        build_window_from_records({0: build_records(0), 1: backwards})

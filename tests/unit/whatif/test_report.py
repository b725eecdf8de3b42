"""What people see: terminal, JSON, page, and timelines."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pacekeeper_analysis.whatif import WhatIf, analyze_window, build_window_from_trace
from pacekeeper_analysis.whatif.causes import CauseFinding, SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.command import main
from pacekeeper_analysis.whatif.inputs.parquet import write_parquet
from pacekeeper_analysis.whatif.report import perfetto
from pacekeeper_analysis.whatif.report.document import build_document
from pacekeeper_analysis.whatif.report.page import render_page
from pacekeeper_analysis.whatif.report.terminal import render_summary
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import SyntheticJob

SHAPE = JobShape(dp=3, pp=2, microbatches=4, steps=4)
KEYS = {
    "slowdown",
    "step_s",
    "ideal_step_s",
    "measured_step_s",
    "launch_slowdown",
    "waste",
    "per_step",
    "per_type",
    "per_dp",
    "per_stage",
    "per_worker",
    "m_w",
    "m_s",
    "cause",
    "skipped_steps",
}


@pytest.fixture(scope="module")
def slow() -> tuple[WhatIf, CauseFinding]:
    return analyze_job(SyntheticJob(SlowdownCause.SLOW_WORKER, SHAPE, strength=1.0, noise=0.01, seed=1))


@pytest.fixture(scope="module")
def healthy() -> tuple[WhatIf, CauseFinding]:
    return analyze_job(SyntheticJob(SlowdownCause.NONE, SHAPE, strength=0.0, noise=0.001, seed=1))


def analyze_job(case: SyntheticJob) -> tuple[WhatIf, CauseFinding]:
    whatif = analyze_window(build_window_from_trace(case.build_trace()))
    return whatif, diagnose_cause(whatif)


def test_the_document_holds_all_figures(slow: tuple[WhatIf, CauseFinding]) -> None:
    whatif, _ = slow
    content = json.loads(json.dumps(build_document(*slow), allow_nan=False))
    assert content.keys() == KEYS
    assert content["slowdown"] == pytest.approx(content["step_s"] / content["ideal_step_s"])
    assert content["waste"] == pytest.approx(1 - 1 / content["slowdown"])
    assert content["per_step"].keys() == {"0", "1", "2", "3"}
    assert np.shape(content["per_worker"]) == (SHAPE.dp, SHAPE.pp)
    assert content["per_worker"][1][0] == min(content["per_dp"][1], content["per_stage"][0])
    assert content["cause"].keys() == {"name", "confidence", "evidence"}
    assert content["cause"]["name"] == "slow-worker"
    assert whatif.decomposition is not None
    assert content["m_w"] == whatif.decomposition.worst_workers.share


def test_document_of_a_healthy_job_has_nothing_to_decompose(healthy: tuple[WhatIf, CauseFinding]) -> None:
    content = build_document(*healthy)
    assert content.keys() == KEYS
    assert content["cause"]["name"] == "none"
    for key in ("per_type", "per_dp", "per_stage", "per_worker", "m_w", "m_s"):
        assert content[key] is None


@pytest.mark.parametrize("width", [60, 100])
def test_terminal_fits_its_width(slow: tuple[WhatIf, CauseFinding], width: int) -> None:
    plain = render_summary(*slow, width=width, color=False)
    assert "\033" not in plain
    assert max(len(line) for line in plain.splitlines()) <= width
    assert "slow-worker" in plain
    assert re.search(r"dp_rank \d +stage \d", plain)
    colored = render_summary(*slow, width=width, color=True)
    assert re.sub(r"\033\[[\d;]*m", "", colored).split() != plain.split()
    assert "\033[48;5;196m" in colored


def test_terminal_of_many_ranks_shows_the_worst_of_each_column() -> None:
    case = SyntheticJob(
        SlowdownCause.SLOW_WORKER, JobShape(dp=150, pp=2, microbatches=2, steps=2), strength=1.0, noise=0.0, seed=1
    )
    text = render_summary(*analyze_job(case), width=80, color=False)
    *_, first, second = text.splitlines()
    assert (first + second).count("#") == 1


def test_the_terminal_of_a_healthy_job_is_short(healthy: tuple[WhatIf, CauseFinding]) -> None:
    text = render_summary(*healthy, width=80, color=False)
    assert "too small to have a cause" in text
    assert "operation type" not in text


def test_the_page_holds_its_data_and_needs_nothing_else(slow: tuple[WhatIf, CauseFinding]) -> None:
    html = render_page(*slow, title="</script><b>job & co")
    assert "</script><b>" not in html
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", html)
    (found,) = re.findall(r"^const data = (.*);$", html, flags=re.MULTILINE)
    data = json.loads(found)
    assert data["title"] == "</script><b>job & co"
    assert len(data["replica_steps"]) == SHAPE.dp
    of_forward = next(table for table in data["own_seconds"] if table["type"] == "forward-compute")
    assert of_forward["count"] == [4, 4]
    slowest = np.unravel_index(int(np.argmax(of_forward["mean"])), (SHAPE.dp, SHAPE.pp))
    assert [list(map(int, slowest))] == data["blamed"]


def test_the_page_of_a_healthy_job_has_no_culprit(healthy: tuple[WhatIf, CauseFinding]) -> None:
    (found,) = re.findall(r"^const data = (.*);$", render_page(*healthy, title="job"), flags=re.MULTILINE)
    assert json.loads(found)["per_worker"] is None


def test_perfetto_timelines_are_valid(slow: tuple[WhatIf, CauseFinding], tmp_path: Path) -> None:
    """By the trace event format: complete events with times in microseconds, named processes and threads."""
    whatif, _ = slow
    path = tmp_path / "timeline.json.gz"
    steps = perfetto.write_perfetto(path, whatif.window, whatif.slowdown_per_step)
    assert steps == whatif.steps
    content = json.loads(gzip.decompress(path.read_bytes()))
    named = {(event["pid"], event["tid"]) for event in content["traceEvents"] if event["name"] == "thread_name"}
    processes = {
        event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"
    }
    assert sorted(processes.values()) == sorted(f"dp {r} {kind}" for r in range(3) for kind in ("actual", "ideal"))
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * whatif.window.seconds.size
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        assert (event["pid"], event["tid"]) in named
        assert event["dur"] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        track.sort()
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in pairwise(track))
    ideal = [event for event in spans if processes[event["pid"]] == "dp 0 ideal" and event["args"]["step"] == 0]
    assert max(event["ts"] + event["dur"] for event in ideal) == pytest.approx(whatif.ideal_step_s * 1e6, abs=1.0)


def test_perfetto_of_a_long_window_keeps_the_slowest_steps(
    slow: tuple[WhatIf, CauseFinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    whatif, _ = slow
    monkeypatch.setattr(perfetto, "MAX_PERFETTO_EVENTS", 2 * 2 * len(whatif.window.operations) * SHAPE.dp)
    chosen = perfetto.choose_steps(whatif.window, np.array([1.0, 3.0, 1.5, 2.0]))
    assert chosen == [1, 3]


def test_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = SyntheticJob(SlowdownCause.STAGE_IMBALANCE, SHAPE, strength=1.0, noise=0.01, seed=1).build_trace()
    write_parquet(tmp_path / "trace-job.parquet", trace)
    (tmp_path / "meta-job.yaml").write_text("trial_name: job\ndp_size: 3\npp_size: 2\n")
    outputs = {name: tmp_path / f"out.{name}" for name in ("html", "json", "perfetto")}
    arguments = [text for name, path in outputs.items() for text in (f"--{name}", str(path))]
    assert main([str(tmp_path / "trace-job.parquet"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "stage-imbalance" in printed
    assert "\033" not in printed
    assert json.loads(outputs["json"].read_text())["cause"]["name"] == "stage-imbalance"
    assert "job: data 3, pipeline 2" in outputs["html"].read_text()
    assert outputs["perfetto"].stat().st_size > 1000

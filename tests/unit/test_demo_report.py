"""The demo's report shows what happened, and passes only if all faults were healed."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from demo import fabric, job, kube, shards, torchrun, traffic
from demo.faults import list_faults
from demo.report import (
    THROUGHPUT_TITLE,
    Curve,
    DemoReport,
    FaultOutcome,
    build_page,
    draw_picture,
    read_report,
    write_report,
)
from demo.view import build_table, format_optional
from pacekeeper_analysis.fabric.view import FabricLink, FabricView
from testcluster.settings import REPOSITORY

HEALED = FaultOutcome(
    fault="rank crash",
    how="SIGKILL",
    remedy="RestartRanks",
    injected_at=12.0,
    detected_s=0.1,
    decided_s=0.1,
    recovered_s=1.2,
    steps_lost=3,
    gain="trains again",
    healed=True,
    incident="gpt-r1-crash",
    reason="the job <stands> still",
)
REPORT = DemoReport(
    outcomes=(HEALED,),
    phase="Complete",
    steps=900,
    seconds=120.0,
    loss_before=5.5,
    loss_after=2.5,
    curves={"Training loss": [(0.0, 5.5), (60.0, 3.0), (120.0, 2.5)], "Step time (s)": []},
)


def test_the_demo_passes_only_if_complete_and_all_faults_are_healed() -> None:
    assert REPORT.passed
    assert not replace(REPORT, phase="Failed").passed
    assert not replace(REPORT, outcomes=(HEALED, replace(HEALED, healed=False))).passed


def test_an_unknown_restore_route_is_no_success() -> None:
    back = replace(HEALED, fault="link well again", remedy="Sync", detected_s=None, gain="AsyncEDiT → Sync")
    assert replace(REPORT, outcomes=(HEALED, back)).passed
    assert "AsyncEDiT → Sync" in build_page(replace(REPORT, outcomes=(HEALED, back)))
    assert not replace(REPORT, outcomes=(HEALED, replace(back, recovered_s=None, healed=False))).passed


def test_the_json_report_has_the_documented_keys(tmp_path: Path) -> None:
    write_report(REPORT, tmp_path)
    incident = json.loads((tmp_path / "report.json").read_text())["incidents"][0]
    assert {"fault", "remedy", "detected_s", "recovered_s", "steps_lost", "healed"} <= set(incident)


def test_the_page_is_self_contained_and_escaped() -> None:
    text = build_page(REPORT)
    assert "http" not in text
    assert "<script" not in text
    assert "the job &lt;stands&gt; still" in text
    assert text.count("<polyline") == 1, "one curve has data"
    assert "no data" in text


def test_the_throughput_picture_is_self_contained() -> None:
    curves: dict[str, Curve] = {THROUGHPUT_TITLE: [(0.0, 50.0), (12.0, 0.0), (14.0, 50.0)]}
    drawn = ElementTree.fromstring(draw_picture(replace(REPORT, curves=curves)))
    assert "1 rank crash" in [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert len(drawn.findall("{*}polyline")) == len(drawn.findall("{*}rect[@class='band']")) == 1
    assert draw_picture(REPORT) == "", "it is unknown"


def test_torchruns_line_is_drawn_next_to_a_report_that_is_read_again(tmp_path: Path) -> None:
    write_report(replace(REPORT, curves={THROUGHPUT_TITLE: [(3.0, 50.0), (12.0, 0.0), (14.0, 50.0)]}), tmp_path)
    text = read_report(tmp_path)
    assert (text.training_started_at, text.outcomes, text.seconds) == (3.0, REPORT.outcomes, REPORT.seconds)
    drawn = ElementTree.fromstring(draw_picture(text, torchrun=[(3.0, 48.0), (12.0, 0.0), (120.0, 0.0)]))
    assert [line.get("class") for line in drawn.findall("{*}polyline")] == ["reference", "curve"]
    assert "torchrun" in [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_torchruns_line_is_zero_while_it_restarts_and_after_it_stopped() -> None:
    lines = [(100.0, 2), (101.0, 4), (113.0, 2), (114.0, 4)]
    assert torchrun.compute_throughput(lines, end=150.0) == [
        *[(100.0, 512.0), (101.0, 512.0)],
        *[(101.0, 0.0), (113.0, 0.0)],
        *[(113.0, 512.0), (114.0, 512.0)],
        *[(114.0, 0.0), (150.0, 0.0)],
    ]


def test_torchrun_trains_as_the_demo_does() -> None:
    (training,) = (body for body in read_manifests("examples/gpt.yaml") if body["kind"] == "TrainingJob")
    (pod,) = (body for body in read_manifests("demo/torchrun.yaml") if body["kind"] == "Pod")
    command: list[str] = training["spec"]["template"]["spec"]["containers"][0]["command"]
    shared = ("--global-batch", "--context", "--width", "--steps", "--eval-every")
    options = {option: command[command.index(option) + 1] for option in shared}
    arguments: list[str] = pod["spec"]["containers"][0]["args"]
    assert {option: arguments[arguments.index(option) + 1] for option in shared} == options
    assert int(options["--global-batch"]) == torchrun.GLOBAL_BATCH


def read_manifests(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((REPOSITORY / path).read_text()))


def test_a_remedys_price_is_shown_next_to_what_was_expected(tmp_path: Path) -> None:
    priced = replace(HEALED, predicted_cost_s=5.0, measured_cost_s=8.5, predicted_gain_s=45.6)
    text = build_page(replace(REPORT, outcomes=(priced,)))
    assert '<td class="number">8.5 s (5.0 s)</td><td class="number">– (45.6 s)</td>' in text
    write_report(replace(REPORT, outcomes=(priced,)), tmp_path)
    (incident,) = json.loads((tmp_path / "report.json").read_text())["incidents"]
    assert (incident["predicted_cost_s"], incident["measured_cost_s"]) == (5.0, 8.5)


def build_links(load: int) -> FabricView:
    found = (FabricLink("l1", "s1", load, 0), FabricLink("l1", "s2", 0, 1))
    return FabricView("pods", 2, 1, 3, load, links=found, unit="Mbit/s")


def test_a_scenario_about_traffic_shows_the_links_before_and_after(tmp_path: Path) -> None:
    write_report(replace(REPORT, fabrics=(build_links(2), build_links(1))), tmp_path)
    picture = (tmp_path / "fabric.svg").read_text()
    assert picture in (tmp_path / "report.html").read_text()
    assert picture.index("pods, before") < picture.index("2 up, 0 down") < picture.index("pods, after")
    assert "fabric.svg" not in {path.name for path in write_without_fabric(tmp_path / "other")}


@pytest.mark.parametrize(
    ("paces", "after"),
    [
        ([0.4] * 12, 0.0),
        ([0.4] * 3 + [1.5] * 6 + [0.4] * 12, 9.0),
        ([0.4] * 3 + [1.5] * 6 + [0.4] * 8 + [0.6] * 4 + [0.4] * 4, 9.0),  # a processor is missing for a moment
        ([0.4] * 3 + [1.5] * 6 + [0.4] * 4 + [0.6] * 12, math.inf),
        ([0.4] * 3 + [1.5] * 9, math.inf),
    ],
)
def test_the_pace_has_recovered_where_it_stays_as_before_on_average(paces: list[float], after: float) -> None:
    assert traffic.compute_recovery_seconds(list(enumerate(paces)), 0.4) == after


def test_a_leaf_uses_the_spines_that_carry_traffic() -> None:
    assert fabric.find_busy_spines(build_links(9), "l1") == {"s1"}
    assert fabric.find_busy_spines(build_links(0), "l1") == fabric.find_busy_spines(build_links(9), "l2") == set()


def write_without_fabric(folder: Path) -> list[Path]:
    """Write a report without a fabric."""
    write_report(REPORT, folder)
    return list(folder.iterdir())


@pytest.mark.parametrize(
    ("saved", "step", "is_behind"),
    [(20, 24, True), (20, 30, True), (20, 23, False), (20, 31, False), (0, 5, False), (-1, 4, False)],
)
def test_shards_are_lost_when_their_newest_snapshot_is_on_peers(saved: int, step: int, is_behind: bool) -> None:
    assert shards.is_past_snapshot(saved, step) == is_behind


@pytest.mark.parametrize(
    ("steps_lost", "origin", "healed"),
    [(20, "Peer", True), (3, "Memory", True), (21, "Peer", False), (3, "Checkpoint", False), (3, "", False)],
)
def test_shards_are_restored_from_memory_and_cost_the_steps_between_two_snapshots(
    steps_lost: int, origin: str, healed: bool
) -> None:
    assert shards.check_outcome(replace(HEALED, steps_lost=steps_lost), origin).healed == healed


def test_the_job_of_the_shards_scenario_shares_one_model() -> None:
    _, training = yaml.safe_load_all(shards.build_manifest())
    assert training["spec"]["template"]["spec"]["containers"][0]["command"][-1] == "--shard"


def test_the_last_table_fits_80_columns_without_cutting_words() -> None:
    """The longest names and gains that the demo can show."""
    unknown = replace(HEALED, detected_s=None, decided_s=None, recovered_s=None, steps_lost=None, gain="", healed=False)
    longest = replace(HEALED, detected_s=123.4, decided_s=123.4, recovered_s=123.4, steps_lost=1234)
    outcomes = [replace(longest, fault=fault.name, remedy=max(fault.remedies, key=len)) for fault in list_faults()]
    outcomes += [replace(longest, gain="slowdown 10.00 → 10.00"), replace(longest, gain="AsyncEDiT → Sync"), unknown]
    shown = io.StringIO()
    Console(width=80, file=shown).print(build_table(outcomes))
    text = shown.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for outcome in outcomes:
        for word in (*outcome.fault.split(), outcome.remedy, *outcome.gain.split()):
            assert re.search(rf"(^| ){re.escape(word)}( |:|$)", text, re.MULTILINE), word
    assert re.search(r"NOT\b[^\n]*\n?[^\n]*HEALED", text)
    assert "–" in text


def test_an_unknown_slowdown_is_shown_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "get_object", lambda *_: {"status": {"phase": "Running"}})
    shown = job.DemoJobStatus.read()
    assert shown is not None
    assert format_optional(shown.slowdown, ".2f") == "–"

"""The page in a real browser: it runs without an error, and zooming, clicking, and keys do what they should."""

from __future__ import annotations

import re
from pathlib import Path

from pacekeeper_analysis.whatif import analyze_window, build_window_from_trace
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.report.page import render_page
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import SyntheticJob
from testing.browser import load_in_browser, needs_browser, read_notes

pytestmark = needs_browser

USE_THE_PAGE = """
const map = document.getElementById("map"), seen = [];
const note = () => seen.push(byId("worker-title").textContent + "; " + byId("range").textContent);
const pointer = (type, x, y) => { const box = map.getBoundingClientRect();
  map.dispatchEvent(new PointerEvent(type, {clientX: box.left + x, clientY: box.top + y, pointerId: 1})); };
map.setPointerCapture = () => {};
note();
byId("in").click(); note();
byId("reset").click();
pointer("pointerdown", 47, 5); pointer("pointerup", 47, 5); note();
map.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
map.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"})); note();
byId("worst").rows[0].click(); note();
document.documentElement.dataset.seen = seen.join("|");
"""


def test_the_heat_map_leads_to_the_worker(tmp_path: Path) -> None:
    case = SyntheticJob(
        SlowdownCause.SLOW_WORKER, JobShape(dp=64, pp=4, microbatches=4, steps=4), strength=1.0, noise=0.01, seed=1
    )
    whatif = analyze_window(build_window_from_trace(case.build_trace()))
    finding = diagnose_cause(whatif)
    worst = "Worker: dp rank {}, stage {}".format(*finding.workers[0])
    document = load_in_browser(render_page(whatif, finding, "job"), tmp_path, USE_THE_PAGE)
    start, zoomed, clicked, moved, from_table = read_notes(document).split("|")
    assert start == f"{worst}; "
    assert re.fullmatch(rf"{worst}; ranks \d+ to \d+", zoomed)
    assert clicked == "Worker: dp rank 0, stage 0; "
    assert moved == "Worker: dp rank 1, stage 1; "
    assert from_table == f"{worst}; "


def test_a_healthy_job_has_a_page_without_a_map(tmp_path: Path) -> None:
    case = SyntheticJob(
        SlowdownCause.NONE, JobShape(dp=2, pp=2, microbatches=2, steps=1), strength=0.0, noise=0.0, seed=1
    )
    whatif = analyze_window(build_window_from_trace(case.build_trace()))
    document = load_in_browser(render_page(whatif, diagnose_cause(whatif), "job"), tmp_path)
    assert re.search(r'id="map-card"[^>]*hidden', document)
    assert "No straggler" in document

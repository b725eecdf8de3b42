"""The page in a real browser: it draws what it should, is used by pointer and keys, and fits a phone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper_analysis.profiling.localize import localize_in_table
from pacekeeper_analysis.profiling.page import ProfilePage, write_profile_page
from pacekeeper_analysis.profiling.report import render_profile_html
from pacekeeper_analysis.profiling.table import read_table
from testing.browser import load_in_browser, needs_browser, read_notes, wrap_in_frame
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern

pytestmark = needs_browser

RECORDED = Path(__file__).with_name("recorded.json")
EVIL = "</script><img/src=x/onerror=document.documentElement.dataset.failed='markup'>" + "x" * 80
USE_THE_PAGE = """
const seen = [];
const frame = (which, name) => [...byId(which + "-flame").children].find(each => each.textContent.includes(name));
const key = name => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
seen.push(byId("verdict").querySelector("h2").textContent);
seen.push(byId("left-title").textContent.split(":")[0] + " next to " + byId("right-title").textContent.split(":")[0]);
seen.push([frame("left", "color"), frame("right", "_engine")].map(each => each.textContent[0]).join(""));
seen.push(byId("functions").rows[0].cells[0].textContent);
frame("left", "augment").click();
seen.push(frame("left", "augment").style.width, byId("left-details").textContent);
key("ArrowDown");
seen.push(document.activeElement.node.name);
key("Escape");
seen.push(document.activeElement.node.depth, zoomed);
byId("right").value = [...byId("right").options].find(option => option.textContent === "rank 1, early steps").value;
byId("right").onchange();
seen.push(byId("right-title").textContent.split(":")[0]);
const plot = document.querySelector(".plot svg");
plot.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
seen.push(byId("plot-details").textContent);
document.documentElement.dataset.seen = seen.join("|");
"""


def build_hostile_page() -> str:
    """Two ranks whose names are markup, and whose stacks are as deep as can be."""
    now = [
        build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank else HEALTHY_WORK, 0.6) for rank in range(2)
    ]
    now = [
        replace(one, names=(*one.names[:-1], EVIL), folded=((900, *[len(one.names) - 1] * 64), (100, 0))) for one in now
    ]
    sent = build_answers(now)
    table = read_table(sent)
    return render_profile_html(
        ProfilePage.from_json(write_profile_page(localize_in_table(table, 2), table, dict(sent))), EVIL
    )


def build_empty_page() -> str:
    table = read_table([])
    return render_profile_html(ProfilePage.from_json(write_profile_page(localize_in_table(table, 4), table, {})), "why")


def build_single_page() -> str:
    sent = build_answers([build_pattern(0, HEALTHY_WORK, 0.5)])
    table = read_table(sent)
    return render_profile_html(
        ProfilePage.from_json(write_profile_page(localize_in_table(table, 1), table, dict(sent))), "why"
    )


def build_recorded_page() -> str:
    return render_profile_html(ProfilePage.from_json(RECORDED.read_bytes()), "why")


def test_a_suspect_is_shown_next_to_a_usual_rank(tmp_path: Path) -> None:
    seen = read_notes(load_in_browser(build_recorded_page(), tmp_path, USE_THE_PAGE, width=1600)).split("|")
    assert seen[:2] == ["Code: ./train.py:color on rank 1", "rank 1 (suspect) next to rank 0"]
    assert seen[2:4] == ["▲▼", "color ./train.py"]
    assert seen[4] == "calc(100% - 1px)"
    assert seen[5].startswith("./train.py:augment: 23.1 ms of a step")
    assert "on the other side: +21.2 ms" in seen[5]
    assert seen[5].endswith("called by (a whole step) › train")
    assert seen[6:10] == ["./train.py:color", "0", "", "rank 1, early steps"]
    assert seen[10].startswith("./train.py:color, rank 1 (suspect): 36.")


@pytest.mark.parametrize("make", [build_recorded_page, build_hostile_page, build_empty_page, build_single_page])
def test_the_page_fits_a_phone(make: Callable[[], str], tmp_path: Path) -> None:
    wider, state = read_notes(load_in_browser(wrap_in_frame(make(), 360), tmp_path)).split("|")
    assert (wider, state) == ("0", "well")


def test_markup_in_names_is_shown_as_it_is_written(tmp_path: Path) -> None:
    script = "const there = [document.images.length, document.scripts.length, document.title];"
    script += "document.documentElement.dataset.seen = there.join('|');"
    images, scripts, title = read_notes(load_in_browser(build_hostile_page(), tmp_path, script)).split("|")
    assert (images, scripts, title) == ("0", "3", EVIL)  # scripts: the page's own, and two of this test


def test_a_single_rank_has_nothing_next_to_it(tmp_path: Path) -> None:
    document = load_in_browser(build_single_page(), tmp_path)
    assert "Nothing is kept to compare it with." in document

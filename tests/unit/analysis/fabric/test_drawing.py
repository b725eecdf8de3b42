"""The picture of a Fabric's links."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from pacekeeper_analysis.fabric.drawing import (
    LOAD_STEPS,
    MAX_HEAT_MAP_CELLS,
    MAX_LINES_DRAWN,
    MAX_NODES_PER_ROW,
    render_svg,
)
from pacekeeper_analysis.fabric.view import FabricLink, FabricView, LinkState

SVG = "{http://www.w3.org/2000/svg}"


def build_fabric(leaves: int, spines: int, load: int = 1, **changes: LinkState) -> FabricView:
    """changes: states of links, as l1s2=LinkState.DOWN."""
    links = tuple(
        FabricLink(f"l{leaf}", f"s{spine}", load, load, changes.get(f"l{leaf}s{spine}", LinkState.UP))
        for leaf in range(1, leaves + 1)
        for spine in range(1, spines + 1)
    )
    return FabricView("pods", spines, leaves, 9, load, load, len(changes), links)


def index_by_tooltip(picture: str) -> dict[str, ElementTree.Element]:
    """Index the elements that have a tooltip by its text."""
    root = ElementTree.fromstring(picture)
    return {
        group.findtext(f"{SVG}title", ""): group
        for group in root.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    }


def list_steps(link: ElementTree.Element) -> list[int]:
    """Return the steps of its halves, the lower one first."""
    found = [re.search(r"load-(\d)", path.get("class", "")) for path in link.iter(f"{SVG}path")]
    return [int(step[1]) for step in found if step]


def read_texts(picture: str) -> str:
    return " ".join(text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text"))


class TestLines:
    def test_each_end_shows_what_leaves_it(self) -> None:
        view = replace(build_fabric(1, 1), links=(FabricLink("l1", "s1", 4, 0),), max_load=4)
        link = index_by_tooltip(render_svg(view))["l1 – s1: 4 up, 0 down, Up"]
        assert list_steps(link) == [LOAD_STEPS, 0]
        lower, upper = link.iter(f"{SVG}path")
        begin = [float(path.get("d", "").removeprefix("M").split("L")[0].split()[1]) for path in (lower, upper)]
        assert begin[0] > begin[1], "leaves stand below"
        assert float(lower.get("stroke-width", 0)) > 2 * float(upper.get("stroke-width", 0))

    def test_all_links_and_all_names_are_drawn(self) -> None:
        tips = index_by_tooltip(render_svg(build_fabric(4, 3)))
        assert len([tip for tip in tips if "up" in tip]) == 12
        assert {"l1", "l4", "s1", "s3"} <= set(tips)

    def test_faults_are_shapes(self) -> None:
        tips = index_by_tooltip(render_svg(build_fabric(2, 2, l1s1=LinkState.DOWN, l2s2=LinkState.SLOW)))
        (dead,) = [group for tip, group in tips.items() if tip.endswith("Down")]
        (slow,) = [group for tip, group in tips.items() if tip.endswith("Slow")]
        (alive, _) = [group for tip, group in tips.items() if tip.endswith("Up")]
        assert [path.get("stroke-dasharray") for path in dead.iter(f"{SVG}path")] == ["4 4", None]
        assert list_steps(dead) == []
        assert slow.find(f"{SVG}circle") is not None
        assert alive.find(f"{SVG}circle") is None

    def test_before_and_after_have_one_scale_and_one_geometry(self) -> None:
        collided, apart = build_fabric(3, 3, load=4), build_fabric(3, 3, load=2, l2s2=LinkState.DOWN)
        picture = render_svg(apart, before=collided)
        assert picture.index("pods, before") < picture.index("pods, after")
        tips = index_by_tooltip(picture)
        assert list_steps(tips["l1 – s1: 4 up, 4 down, Up"]) == [5, 5]
        assert list_steps(tips["l1 – s1: 2 up, 2 down, Up"]) == [3, 3]
        ways = {next(group.iter(f"{SVG}path")).get("d") for tip, group in tips.items() if tip.startswith("l1 – s1")}
        assert len(ways) == 1

    def test_full_links_lie_over_others_and_faults_over_all(self) -> None:
        view = build_fabric(2, 2, l1s2=LinkState.DOWN)
        full = replace(view.links[0], up=9)
        picture = render_svg(replace(view, links=(full, *view.links[1:])))
        assert picture.index("l2 – s2") < picture.index("l1 – s1: 9 up") < picture.index("l1 – s2")


class TestHeatMap:
    def test_a_heat_map_replaces_lines_that_would_hide_each_other(self) -> None:
        assert MAX_LINES_DRAWN == 8 * 5
        assert "up," not in render_svg(build_fabric(7, 6))
        assert "up," in render_svg(build_fabric(8, 5))
        assert "up," not in render_svg(build_fabric(2, 1 + MAX_NODES_PER_ROW))

    @staticmethod
    def list_cells(picture: str) -> dict[tuple[int, int], int]:
        """Return steps by row and column."""
        found = {}
        for step, path in re.findall(r'class="link load-(\d)" d="([^"]*)"', picture):
            for column, row, length in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
                for shift in range(int(length)):
                    assert (int(row), int(column) + shift) not in found, "each cell once"
                    found[int(row), int(column) + shift] = int(step)
        return found

    def test_each_link_has_its_cell(self) -> None:
        view = build_fabric(64, 32, load=2, l2s3=LinkState.DOWN, l9s9=LinkState.SLOW)
        full = replace(view.links[5], up=10)
        picture = render_svg(replace(view, links=(*view.links[:5], full, *view.links[6:])))
        cells = self.list_cells(picture)
        assert len(cells) == 64 * 32 - 1
        assert (1, 2) not in cells
        assert {at for at, step in cells.items() if step == LOAD_STEPS} == {(0, 5)}
        assert set(cells.values()) == {1, LOAD_STEPS}
        assert "M2.25 1.25" in picture, "the cross of the dead one"
        assert "M8.5 8.5h0" in picture, "the dot of the slow one"

    def test_cells_are_read_one_by_one_where_loads_differ(self) -> None:
        view = build_fabric(20, 20)
        links = tuple(replace(link, up=1 + number % 5) for number, link in enumerate(view.links))
        cells = self.list_cells(render_svg(replace(view, links=links)))
        assert [cells[0, column] for column in range(6)] == [1, 2, 3, 4, 5, 1]

    def test_the_picture_of_the_largest_fabric_is_small_and_shows_the_worst(self) -> None:
        side = 2 * MAX_HEAT_MAP_CELLS
        links = tuple(
            FabricLink(f"l{leaf}", f"s{spine}", 1 + (leaf * spine) % 7, 0)
            for leaf in range(side)
            for spine in range(side)
        )
        full = replace(links[-1], down=70)
        picture = render_svg(FabricView("pods", side, side, 1, 70, 70, 0, (*links[:-1], full)))
        assert len(picture) < 400_000
        cells = self.list_cells(picture)
        assert len(cells) == MAX_HEAT_MAP_CELLS**2
        assert cells[MAX_HEAT_MAP_CELLS - 1, MAX_HEAT_MAP_CELLS - 1] == LOAD_STEPS
        assert "2 leaves × 2 spines" in read_texts(picture)

    def test_unlisted_links_are_mentioned(self) -> None:
        view = build_fabric(16, 16, load=3)
        assert "not listed: 3 at most" in read_texts(render_svg(replace(view, leaves=64)))
        assert "not listed" not in read_texts(render_svg(view))


class TestBoth:
    @pytest.mark.parametrize(
        "view", [FabricView("pods", 3), build_fabric(1, 1), build_fabric(300, 1), build_fabric(1, 300)]
    )
    def test_every_shape_has_a_picture(self, view: FabricView) -> None:
        root = ElementTree.fromstring(render_svg(view))
        _, _, width, height = map(float, root.get("viewBox", "").split())
        assert width > 0
        assert height > 0
        assert width < 1500

    def test_the_legend_has_the_unit_and_every_load(self) -> None:
        assert "in units of the lightest flow: none 1 2 3 dead slow" in read_texts(
            render_svg(build_fabric(3, 3, load=3))
        )
        assert "none 1 to 2 3 to 4 5 to 6 7 to 8 9 to 11 dead" in read_texts(render_svg(build_fabric(3, 3, load=11)))
        assert "in Mbit/s: none" in read_texts(render_svg(replace(build_fabric(3, 3), unit="Mbit/s")))
        assert "No routes are planned" in read_texts(render_svg(replace(build_fabric(3, 3), max_load=None)))

    def test_names_are_text(self) -> None:
        evil = '"><script>alert(1)</script>&'
        view = replace(build_fabric(1, 1), name=evil, links=(FabricLink(evil, "<b>", 1, 1),))
        root = ElementTree.fromstring(render_svg(view))
        assert not [element for element in root.iter() if element.tag.endswith(("script", "b"))]
        assert any(evil in (title.text or "") for title in root.iter(f"{SVG}title"))

    def test_the_picture_loads_nothing(self) -> None:
        picture = render_svg(build_fabric(3, 3))
        assert not re.search(r"href|url\(|@import|<script|<image", picture)

    def test_loads_differ_by_lightness(self) -> None:
        """For readers who see no colors, too; light and dark."""
        picture = render_svg(build_fabric(3, 3))
        light, dark = picture.split("@media")
        for style, sign in ((light, -1), (dark, 1)):
            found = [_compute_luminance(color) for color in re.findall(r"load-\d\{stroke:#([0-9a-f]{6})", style)]
            assert len(found) == LOAD_STEPS + 1
            ordered = sorted(found, reverse=sign < 0)
            assert found == ordered
            assert min(abs(a - b) for a, b in itertools.pairwise(found)) > 0.03


def _compute_luminance(color: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

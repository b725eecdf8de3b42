"""The links of a Fabric as a picture (SVG): few of them as lines, many as a heat map.

Spines are above, leaves below. A line's lower half shows what its leaf sends up, its upper half what its spine sends
down. As on a network weather map, each end shows what leaves it. Load is the width and lightness of one hue, and faults
are shapes, so that no two colors must be distinguished. The picture follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .view import FabricLink, FabricView, LinkState, list_leaves_and_spines

LOAD_STEPS = 5
"""Number of steps of load above zero."""
MAX_LINES_DRAWN, MAX_NODES_PER_ROW = 40, 16
"""Upper limits of leaves × spines, and of each of them. Above them, a heat map is drawn."""
MAX_HEAT_MAP_CELLS = 128
"""Upper limit of rows and columns of a heat map. With more leaves or spines, several share a cell."""
MAX_DRAWN_NAME_LENGTH = 12

_NODE_WIDTH = 92.0  # from one leaf's middle to the next
_LINK_HEIGHT = 210.0  # from the spines' middle to the leaves'
_BOX_SIZE = (78.0, 24.0)
_MARK_POSITION = 0.22
"""Position of the mark along a line: no two lines cross there."""
_MIN_PANEL_WIDTH = 300.0
_LEFT, _TOP = 92.0, 18.0  # names next to a heat map, and above it
_MARGIN, _GAP, _HEAD, _ROW = 16.0, 36.0, 52.0, 18.0
_CHARACTER_WIDTH = 6.2
"""Width of the legend's characters in pixels."""


def render_svg(after: FabricView, before: FabricView | None = None) -> str:
    """Render one self-contained SVG element, for a file or a part of a page.

    Both views are drawn to the same scale, so their loads have one unit.
    """
    titles = {after.name: after} if before is None else {f"{after.name}, before": before, f"{after.name}, after": after}
    frame = _build_frame(list(titles.values()))
    longer, shorter = sorted((len(frame.leaves), len(frame.spines)), reverse=True)
    draw = _draw_lines if longer <= MAX_NODES_PER_ROW and longer * shorter <= MAX_LINES_DRAWN else _draw_heat_map
    parts, x, bottom = [], _MARGIN, 0.0
    for title, view in titles.items():
        panel = draw(view, frame)
        header = f'<text class="title" y="-28">{escape(title)}</text><text class="soft" y="-11">{view.summary}</text>'
        parts.append(f'<g transform="translate({x:g} {_HEAD:g})">{header}{panel.content}</g>')
        x, bottom = x + panel.width + _GAP, max(bottom, _HEAD + panel.height + _GAP)
    width = x - _GAP + _MARGIN
    legend = _build_legend(list(titles.values()), frame, lines=draw is _draw_lines)
    rows = list(_arrange_legend_rows(legend, width - 2 * _MARGIN))
    for number, row in enumerate(rows):
        parts.append(f'<g transform="translate({_MARGIN:g} {bottom + number * _ROW:g})">{row}</g>')
    height = bottom + len(rows) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fabric" role="img" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}"><title>{escape(f"Links of the Fabric {after.name}")}</title><style>{_SVG_STYLE}</style>'
        f'<rect class="paper" width="{width:g}" height="{height:g}"/>{"".join(parts)}</svg>\n'
    )


_LIGHT_LOAD_COLORS = ("#c9d1da", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08306b")
_DARK_LOAD_COLORS = ("#3d4856", "#2f5f8f", "#3f82bd", "#64a8de", "#9dcdf2", "#e6f3ff")


def _build_color_rules(loads: Sequence[str], paper: str, ink: str, soft: str, box: str, fault: str) -> str:
    rules = {
        ".paper": f"fill:{paper}",
        "text": f"fill:{ink}",
        ".soft": f"fill:{soft}",
        ".box": f"fill:{box};stroke:{soft}",
        ".track": f"fill:{box}",
        ".dead": f"stroke:{soft}",
        ".mark": f"stroke:{fault};fill:{paper}",
        **{f".load-{step}": f"stroke:{color}" for step, color in enumerate(loads)},
    }
    return "".join(f".fabric {name}{{{rule}}}" for name, rule in rules.items())


_SVG_STYLE = (
    ".fabric{font:11px system-ui,sans-serif}.fabric .title{font-size:13px;font-weight:600}.fabric .link{fill:none}"
    + _build_color_rules(
        _LIGHT_LOAD_COLORS, paper="#ffffff", ink="#17202c", soft="#5b6878", box="#eef1f4", fault="#b3541e"
    )
    + "@media (prefers-color-scheme:dark){"
    + _build_color_rules(
        _DARK_LOAD_COLORS, paper="#14171f", ink="#e6ebf1", soft="#9aa8b8", box="#262f3a", fault="#f0945a"
    )
    + "}"
)


@dataclass(frozen=True)
class _DrawingFrame:
    """The common part of all panels of a picture."""

    leaves: Sequence[str]
    spines: Sequence[str]
    top: int  # the largest load of a link

    def step(self, load: int) -> int:
        """Return the step of a load, from 0 (none) to LOAD_STEPS."""
        return -(-load * LOAD_STEPS // self.top)

    def loads(self, step: int) -> range:
        """Return the loads of a step."""
        return range(self.top * (step - 1) // LOAD_STEPS + 1, self.top * step // LOAD_STEPS + 1)


def _build_frame(views: Sequence[FabricView]) -> _DrawingFrame:
    leaves, spines = list_leaves_and_spines(views)
    return _DrawingFrame(leaves, spines, max((link.load for view in views for link in view.links), default=0) or 1)


@dataclass(frozen=True)
class _Panel:
    width: float
    height: float
    content: str


# Few links


def _draw_lines(view: FabricView, frame: _DrawingFrame) -> _Panel:
    width = max(_MIN_PANEL_WIDTH, _NODE_WIDTH * max(len(frame.leaves), len(frame.spines)))
    above, below = (_compute_middles(names, width) for names in (frame.spines, frame.leaves))
    half = _BOX_SIZE[1] / 2
    ordered = sorted(view.links, key=lambda link: (link.state is not LinkState.UP, link.load))  # faults on top
    links = [_draw_link(link, frame, (below[link.leaf], _LINK_HEIGHT), (above[link.spine], half)) for link in ordered]
    boxes = [_draw_box(name, x, half) for name, x in above.items()] + [
        _draw_box(name, x, _LINK_HEIGHT) for name, x in below.items()
    ]
    return _Panel(width, _LINK_HEIGHT + half, "".join(links + boxes))


def _compute_middles(names: Sequence[str], width: float) -> dict[str, float]:
    return {name: width * (index + 0.5) / len(names) for index, name in enumerate(names)}


def _draw_link(link: FabricLink, frame: _DrawingFrame, leaf: tuple[float, float], spine: tuple[float, float]) -> str:
    middle, mark = _interpolate_point(leaf, spine, 0.5), _interpolate_point(leaf, spine, _MARK_POSITION)
    tooltip = f"{link.leaf} – {link.spine}: {link.up} up, {link.down} down, {link.state.value}"
    if link.state is LinkState.DOWN:
        shapes = f'<path class="link dead" stroke-dasharray="4 4" d="{_format_path(leaf, spine)}"/>{_draw_cross(*mark)}'
    else:
        shapes = _draw_stroke(frame.step(link.up), _format_path(leaf, middle)) + _draw_stroke(
            frame.step(link.down), _format_path(middle, spine)
        )
        shapes += _draw_circle(*mark) if link.state is LinkState.SLOW else ""
    return f"<g><title>{escape(tooltip)}</title>{shapes}</g>"


def _interpolate_point(start: tuple[float, float], end: tuple[float, float], fraction: float) -> tuple[float, float]:
    return start[0] + fraction * (end[0] - start[0]), start[1] + fraction * (end[1] - start[1])


def _draw_stroke(step: int, path: str) -> str:
    return f'<path class="link load-{step}" stroke-width="{1 + 1.4 * step:g}" d="{path}"/>'


def _format_path(start: tuple[float, float], end: tuple[float, float]) -> str:
    return f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"


def _draw_cross(x: float, y: float) -> str:
    return f'<path class="mark" stroke-width="2" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"/>'


def _draw_circle(x: float, y: float) -> str:
    return f'<circle class="mark" stroke-width="2" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _draw_box(name: str, x: float, y: float) -> str:
    width, height = _BOX_SIZE
    return (
        f'<g><title>{escape(name)}</title><rect class="box" x="{x - width / 2:.1f}" y="{y - height / 2:.1f}"'
        f' width="{width:g}" height="{height:g}" rx="4"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{_shorten_name(name)}</text></g>'
    )


def _shorten_name(name: str) -> str:
    """Shorten a name to its end, which distinguishes leaves of one row."""
    return escape(name if len(name) <= MAX_DRAWN_NAME_LENGTH else f"…{name[1 - MAX_DRAWN_NAME_LENGTH :]}")


# Many links


def _draw_heat_map(view: FabricView, frame: _DrawingFrame) -> _Panel:
    """Draw rows of leaves and columns of spines. Adjacent equal cells of a row are one stroke."""
    leaves_per_cell, spines_per_cell = _compute_cell_size(frame)
    rows, columns = math.ceil(len(frame.leaves) / leaves_per_cell), math.ceil(len(frame.spines) / spines_per_cell)
    row_of = {leaf: index // leaves_per_cell for index, leaf in enumerate(frame.leaves)}
    column_of = {spine: index // spines_per_cell for index, spine in enumerate(frame.spines)}
    steps: dict[tuple[int, int], int] = {}
    marked: dict[LinkState, set[tuple[int, int]]] = defaultdict(set)
    for link in view.links:
        cell = row_of[link.leaf], column_of[link.spine]
        if link.state is not LinkState.UP:
            marked[link.state].add(cell)
        if link.state is not LinkState.DOWN:
            steps[cell] = max(steps.get(cell, 0), frame.step(link.load))
    strokes: dict[int, list[str]] = defaultdict(list)
    for step, row, first, length in _find_equal_runs(steps):
        strokes[step].append(f"M{first} {row}.5h{length}")
    dead_path = "".join(f"M{column}.25 {row}.25l.5 .5m0-.5l-.5 .5" for row, column in sorted(marked[LinkState.DOWN]))
    slow_path = "".join(
        f"M{column}.5 {row}.5h0" for row, column in sorted(marked[LinkState.SLOW] - marked[LinkState.DOWN])
    )
    paths = [f'<path class="link load-{step}" d="{"".join(segments)}"/>' for step, segments in sorted(strokes.items())]
    paths.append(f'<path class="mark" stroke-width=".2" d="{dead_path}"/>')
    paths.append(f'<path class="mark" stroke-width=".5" stroke-linecap="round" d="{slow_path}"/>')
    size = min(18.0, max(5.0, 640 / max(rows, columns)))
    content = (
        f'<g transform="translate({_LEFT:g} {_TOP:g}) scale({size:.2f})" stroke-width=".9">'
        f'<rect class="track" width="{columns}" height="{rows}"/>{"".join(paths)}</g>'
        + "".join(_draw_axis_names(frame.leaves[::leaves_per_cell], size, down=True))
        + "".join(_draw_axis_names(frame.spines[::spines_per_cell], size, down=False))
    )
    return _Panel(max(_MIN_PANEL_WIDTH, _LEFT + columns * size), _TOP + rows * size, content)


def _compute_cell_size(frame: _DrawingFrame) -> tuple[int, int]:
    """Return how many leaves, and how many spines, share a cell."""
    return math.ceil(len(frame.leaves) / MAX_HEAT_MAP_CELLS), math.ceil(len(frame.spines) / MAX_HEAT_MAP_CELLS)


def _find_equal_runs(steps: dict[tuple[int, int], int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (step, row, first column, columns) of adjacent equal cells."""
    start: tuple[int, int, int] | None = None  # step, row, first column
    end = 0
    for (row, column), step in sorted(steps.items()):
        if start is not None and (start[0], start[1], end) != (step, row, column):
            yield *start, end - start[2]
            start = None
        start, end = start or (step, row, column), column + 1
    if start is not None:
        yield *start, end - start[2]


def _draw_axis_names(names: Sequence[str], size: float, down: bool) -> Iterator[str]:
    """Yield as many names as fit."""
    interval = math.ceil((11 if down else 30) / size)
    for index in range(0, len(names), interval):
        middle = (index + 0.5) * size
        x, y, anchor = (_LEFT - 6, _TOP + middle + 4, "end") if down else (_LEFT + middle, _TOP - 6, "middle")
        yield f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_shorten_name(names[index])}</text>'


# The legend


def _build_legend(views: Sequence[FabricView], frame: _DrawingFrame, lines: bool) -> Iterator[tuple[str, str]]:
    """Yield (sample, words) of each entry."""
    if any(view.max_load is not None for view in views):
        yield "", f"Load of a link, in {views[-1].unit}:"
        yield _draw_stroke(0, "M0 -4h22"), "none"
        for step in range(1, LOAD_STEPS + 1):
            if loads := frame.loads(step):
                label = f"{loads[0]}" if len(loads) == 1 else f"{loads[0]} to {loads[-1]}"
                yield _draw_stroke(step, "M0 -4h22"), label
    else:
        yield "", "No routes are planned, so the loads of links are unknown."
    yield f'<path class="link dead" stroke-dasharray="4 4" d="M0 -4h22"/>{_draw_cross(11, -4)}', "dead"
    yield f"{_draw_stroke(0, 'M0 -4h22')}{_draw_circle(11, -4)}", "slow"
    if lines:
        yield "", "Lower half of a line: up from the leaf; upper half: down from the spine."
        return
    yield "", "Of both directions, the fuller one."
    leaves_per_cell, spines_per_cell = _compute_cell_size(frame)
    if leaves_per_cell * spines_per_cell > 1:
        yield "", f"A cell is {leaves_per_cell} leaves × {spines_per_cell} spines, and shows the fullest link."
    max_unlisted_load = max((view.max_unlisted_load or 0 for view in views), default=0)
    if any(view.max_unlisted_load is not None for view in views):
        yield '<rect class="track" y="-10" width="22" height="12"/>', f"not listed: {max_unlisted_load} at most"


def _arrange_legend_rows(legend: Iterator[tuple[str, str]], width: float) -> Iterator[str]:
    """Yield rows with as many entries side by side as fit."""
    row, x = "", 0.0
    for sample, label in legend:
        label_x = 28.0 if sample else 0.0
        needed = label_x + _CHARACTER_WIDTH * len(label) + 16
        if row and x + needed > width:
            yield row
            row, x = "", 0.0
        row += f'<g transform="translate({x:g})">{sample}<text x="{label_x:g}">{escape(label)}</text></g>'
        x += needed
    yield row

"""The curves of the ablation as a picture: held-out loss along the run, on clean and on dirty data."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from .training import Curve

COLOURS = {
    "ddp": "#8a8a8a",
    "diloco": "#c2410c",
    "penalty": "#1d4ed8",
    "without_elimination": "#a21caf",
    "without_all": "#15803d",
    "published": "#b45309",
}
"""Sides that are drawn. Those without weights or clipping lie on the penalty's curve."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, NAMES, GAP = 330, 260, 44, 28, 26, 20, 30
HIGHEST = 1.0
"""Nats a byte above the lowest loss: the first steps are not drawn."""
LINES = 5


def picture(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """An SVG. curves: by data (a panel of each), by side."""
    of_all = [loss for its in curves.values() for curve in its.values() for _, loss in curve]
    lowest = min(of_all) - 0.05
    panels = [
        f'<g transform="translate({number * (WIDTH + GAP)} 0)">{"".join(_panel(title, its, lowest))}</g>'
        for number, (title, its) in enumerate(curves.items())
    ]
    width, height = len(curves) * (WIDTH + GAP), HEIGHT + NAMES
    names = [
        f'<text x="{LEFT + place * (width - LEFT) / len(COLOURS):.0f}" y="{HEIGHT + 12}" fill="{colour}">{side}</text>'
        for place, (side, colour) in enumerate(COLOURS.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="11" '
        'font-family="system-ui, sans-serif"><title>Held-out loss, nats a byte, by steps of a replica</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join([*panels, *names])}</svg>\n'
    )


def _panel(title: str, of_sides: Mapping[str, Curve], lowest: float) -> Iterator[str]:
    last = max(step for curve in of_sides.values() for step, _ in curve)

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT)

    def y(loss: float) -> float:
        return TOP + (1 - (loss - lowest) / HIGHEST) * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="{TOP - 12}" fill="#333">{html.escape(title)} data</text>'
    for line in range(LINES + 1):
        loss = lowest + HIGHEST * line / LINES
        yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#555">{loss:.2f}</text>'
    for step in (0, last // 2, last):
        yield f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555">{step}</text>'
    for side, colour in COLOURS.items():
        points = [(step, loss) for step, loss in of_sides.get(side, ()) if loss <= lowest + HIGHEST]
        drawn = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        yield f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.6"/>'

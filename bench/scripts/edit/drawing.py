"""The curves of the ablation as a picture: held-out loss along the run, on clean and on dirty data."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from .training import Curve

COLORS = {
    "ddp": "#8a8a8a",
    "diloco": "#c2410c",
    "penalty": "#1d4ed8",
    "without_elimination": "#a21caf",
    "without_all": "#15803d",
    "published": "#b45309",
}
"""Sides that are drawn. Those without weights or clipping lie on the penalty's curve."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND_HEIGHT, GAP = 330, 260, 44, 28, 26, 20, 30
MAX_LOSS_ABOVE_LOWEST = 1.0
"""Nats a byte above the lowest loss: the first steps are not drawn."""
GRID_LINES = 5


def draw_picture(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """An SVG. curves: by data (a panel of each), by side."""
    losses = [loss for by_side in curves.values() for curve in by_side.values() for _, loss in curve]
    lowest = min(losses) - 0.05
    panels = [
        f'<g transform="translate({number * (WIDTH + GAP)} 0)">{"".join(_draw_panel(title, by_side, lowest))}</g>'
        for number, (title, by_side) in enumerate(curves.items())
    ]
    width, height = len(curves) * (WIDTH + GAP), HEIGHT + LEGEND_HEIGHT
    names = [
        f'<text x="{LEFT + index * (width - LEFT) / len(COLORS):.0f}" y="{HEIGHT + 12}" fill="{color}">{side}</text>'
        for index, (side, color) in enumerate(COLORS.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="11" '
        'font-family="system-ui, sans-serif"><title>Held-out loss, nats a byte, by steps of a replica</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join([*panels, *names])}</svg>\n'
    )


def _draw_panel(title: str, by_side: Mapping[str, Curve], lowest: float) -> Iterator[str]:
    last = max(step for curve in by_side.values() for step, _ in curve)

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT)

    def y(loss: float) -> float:
        return TOP + (1 - (loss - lowest) / MAX_LOSS_ABOVE_LOWEST) * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="{TOP - 12}" fill="#333">{html.escape(title)} data</text>'
    for line in range(GRID_LINES + 1):
        loss = lowest + MAX_LOSS_ABOVE_LOWEST * line / GRID_LINES
        yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#555">{loss:.2f}</text>'
    for step in (0, last // 2, last):
        yield f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555">{step}</text>'
    for side, color in COLORS.items():
        points = [(step, loss) for step, loss in by_side.get(side, ()) if loss <= lowest + MAX_LOSS_ABOVE_LOWEST]
        coordinates = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        yield f'<polyline points="{coordinates}" fill="none" stroke="{color}" stroke-width="1.6"/>'

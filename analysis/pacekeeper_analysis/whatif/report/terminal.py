"""The analysis as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from pacekeeper_analysis.whatif.causes import CauseFinding, SlowdownCause
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.slowdown_statistics import Decomposition, WhatIf

HEAT_COLORS = (236, 58, 94, 136, 172, 208, 202, 196)
"""Palette of the heat map, from cold to hot (xterm's 256 colors)."""

HEAT_SHADES = " .:-=+*#"
"""The palette without color."""

SPARKLINE_BARS = "▁▂▃▄▅▆▇█"


def render_summary(whatif: WhatIf, finding: CauseFinding, *, width: int = 100, color: bool = True) -> str:
    """Render a summary of the analysis that fits `width` columns."""
    return "\n".join(_generate_lines(whatif, finding, width, color))


def _generate_lines(whatif: WhatIf, finding: CauseFinding, width: int, color: bool) -> Iterator[str]:
    bold = _BoldStyle(color)
    step, ideal = float(whatif.step_s.mean()), whatif.ideal_step_s
    yield f"{bold(f'Slowdown {whatif.slowdown:.3f}')}: stragglers waste {whatif.waste:.1%} of the time."
    yield f"A step takes {_format_seconds(step)}; without stragglers, {_format_seconds(ideal)}."
    if whatif.launch_slowdown is not None:
        error = whatif.launch_slowdown - 1.0
        side = "below" if error >= 0 else "above"
        yield f"Simulated: {abs(error):.1%} {side} the measured time of {len(whatif.steps)} steps."
    for warning in whatif.warnings:
        yield from _wrap_text(f"Warning: {warning}", width)
    yield ""
    certainty = f" (confidence {finding.confidence:.0%})" if finding.cause is not SlowdownCause.NONE else ""
    yield f"{bold('Cause')}: {finding.cause.value}{certainty}"
    yield from _wrap_text(finding.evidence[0].upper() + finding.evidence[1:] + ". " + finding.remedy, width)
    yield ""
    yield f"{bold('Slowdown by step')}, {whatif.steps[0]} to {whatif.steps[-1]}"
    yield "  " + _format_sparkline(whatif.slowdown_per_step, width - 2)
    if whatif.decomposition is not None:
        yield from _generate_decomposition(whatif.decomposition, width, color)
    if whatif.skipped:
        yield ""
        yield f"{bold('Left out')}: {len(whatif.skipped)} steps"
        for skipped in whatif.skipped[:3]:
            yield f"  step {skipped.step}: {skipped.reason}"


def _generate_decomposition(decomposition: Decomposition, width: int, color: bool) -> Iterator[str]:
    bold = _BoldStyle(color)
    yield ""
    yield f"{bold('Slowdown by operation type')}, all others ideal"
    ranked = sorted(decomposition.slowdown_by_type.items(), key=lambda item: -item[1])
    longest = max(len(name) for name, _ in ranked)
    highest = max(max(slowdown for _, slowdown in ranked) - 1.0, 1e-9)
    for name, slowdown in ranked[:6]:
        bar = "█" * round(max(slowdown - 1.0, 0.0) / highest * (width - longest - 12))
        yield f"  {name:<{longest}} {slowdown:6.3f} {bar}"
    yield ""
    worst, last = (
        f"{round(impact.share, 2) + 0.0:.0%}" for impact in (decomposition.worst_workers, decomposition.last_stage)
    )
    last_stage_text = f", the last stage {last}" if len(decomposition.slowdown_by_stage) > 1 else ""
    yield f"{bold('Slowest workers')}"
    yield from _wrap_text(f"The worst 3 % cause {worst} of the lost time{last_stage_text}.", width)
    for replica, stage in decomposition.worst_workers.workers[:5]:
        yield f"  dp_rank {replica:<4} stage {stage:<3} {decomposition.slowdown_by_worker[replica, stage]:.3f}"
    yield ""
    coolest, hottest = float(decomposition.slowdown_by_worker.min()), float(decomposition.slowdown_by_worker.max())
    yield f"{bold('Workers')}, dp_rank across, stage down; {coolest:.2f} to {hottest:.2f}"
    yield from _generate_heat_map(decomposition.slowdown_by_worker.T, width, color)


def _generate_heat_map(slowdown: Array, width: int, color: bool) -> Iterator[str]:
    """Generate the heat map of `slowdown` [stage, dp_rank].

    If the ranks do not fit, several share a column, which shows the worst of them.
    """
    stages, ranks = slowdown.shape
    cell = 2 if ranks * 2 <= width - 6 else 1
    columns = min(ranks, (width - 6) // cell)
    groups = np.array_split(np.arange(ranks), columns)
    worst = np.array([[row[group].max() for group in groups] for row in slowdown])
    top = max(float(worst.max()), 1.05)
    level = np.clip((worst - 1.0) / (top - 1.0) * (len(HEAT_SHADES) - 1), 0, len(HEAT_SHADES) - 1).round().astype(int)
    for stage in range(stages):
        runs = ((shade, cell * len(list(run))) for shade, run in groupby(level[stage].tolist()))
        cells = (
            f"\033[48;5;{HEAT_COLORS[shade]}m{' ' * length}\033[0m" if color else HEAT_SHADES[shade] * length
            for shade, length in runs
        )
        yield f"  {stage:>3} {''.join(cells)}"


def _format_sparkline(values: Array, width: int) -> str:
    groups = np.array_split(values, min(len(values), width))
    highest = np.array([group.max() for group in groups])
    low, high = min(float(highest.min()), 1.0), max(float(highest.max()), 1.05)
    return "".join(
        SPARKLINE_BARS[round((float(value) - low) / (high - low) * (len(SPARKLINE_BARS) - 1))] for value in highest
    )


def _wrap_text(text: str, width: int) -> Iterator[str]:
    line = " "
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            yield line
            line = " "
        line += " " + word
    yield line


def _format_seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.1f} ms"


class _BoldStyle:
    """Bold, if color is wanted."""

    def __init__(self, color: bool) -> None:
        self._colour = color

    def __call__(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._colour else text

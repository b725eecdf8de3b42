"""The demo's output: build/demo/report.json, and a self-contained report.html."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pacekeeper_analysis.fabric.drawing import render_svg
from pacekeeper_analysis.fabric.view import FabricView

THROUGHPUT_TITLE = "Samples a second"
"""Title of the throughput curve."""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class FaultOutcome:
    """One fault and its outcome. Times are seconds since the fault was injected."""

    fault: str
    how: str
    remedy: str
    injected_at: float  # seconds since the demo started
    detected_s: float | None
    decided_s: float | None
    recovered_s: float | None
    steps_lost: int | None
    gain: str
    healed: bool
    incident: str
    reason: str
    # Of the remedy, in seconds of training. None: not measured, or no price is known.
    predicted_cost_s: float | None = None
    measured_cost_s: float | None = None
    predicted_gain_s: float | None = None
    measured_gain_s: float | None = None


@dataclass(frozen=True)
class DemoReport:
    """The report. One that was read from a file has only the throughput curve."""

    outcomes: tuple[FaultOutcome, ...]
    phase: str
    steps: int
    seconds: float
    loss_before: float | None
    loss_after: float | None
    curves: dict[str, Curve]  # title (with unit) → points (seconds since the demo started, value)
    fabrics: tuple[FabricView, FabricView] | None = None  # before and after, in the traffic scenario

    @property
    def training_started_at(self) -> float:
        """When the job first trained, in seconds since the demo started."""
        return self.curves[THROUGHPUT_TITLE][0][0]

    @property
    def passed(self) -> bool:
        return self.phase == "Complete" and all(outcome.healed for outcome in self.outcomes)


def write_report(report: DemoReport, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "passed": report.passed,
        "phase": report.phase,
        "steps": report.steps,
        "seconds": round(report.seconds, 1),
        "loss_before": report.loss_before,
        "loss_after": report.loss_after,
        "incidents": [asdict(outcome) for outcome in report.outcomes],
        "samples_a_second": report.curves.get(THROUGHPUT_TITLE, ()),
    }
    (folder / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    (folder / "report.html").write_text(build_page(report))
    if picture := draw_picture(report):
        (folder / "throughput.svg").write_text(picture)
    if report.fabrics is not None:
        (folder / "fabric.svg").write_text(_draw_links(report.fabrics))


def read_report(folder: Path) -> DemoReport:
    """Read a report from a folder. Raises FileNotFoundError if there is none."""
    summary = json.loads((folder / "report.json").read_text())
    return DemoReport(
        outcomes=tuple(FaultOutcome(**outcome) for outcome in summary["incidents"]),
        curves={THROUGHPUT_TITLE: [(seconds, value) for seconds, value in summary["samples_a_second"]]},
        **{name: summary[name] for name in ("phase", "steps", "seconds", "loss_before", "loss_after")},
    )


def draw_picture(report: DemoReport, torchrun: Curve = ()) -> str:
    """Draw the throughput over the whole demo as a picture, with the faults' names below; "": it is unknown.

    `torchrun`: torchrun's throughput, drawn for comparison.
    """
    curve = report.curves.get(THROUGHPUT_TITLE, ())
    if not curve:
        return ""
    names = [f"{number} {outcome.fault}" for number, outcome in enumerate(report.outcomes, 1)]
    rows = [names[start : start + _NAMES_PER_ROW] for start in range(0, len(names), _NAMES_PER_ROW)]
    legend = "".join(
        f'<text class="axis" x="{_LEFT + column * (_WIDTH - _LEFT) / _NAMES_PER_ROW:.0f}" '
        f'y="{_HEIGHT + 16 * (row + 1)}">'
        f"{html.escape(name)}</text>"
        for row, row_names in enumerate(rows)
        for column, name in enumerate(row_names)
    )
    height = _HEIGHT + 16 * len(rows) + 8
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"
 font-family="system-ui, sans-serif"><title>{html.escape(THROUGHPUT_TITLE)}</title><style>{_STYLE}</style>
<rect width="{_WIDTH}" height="{height}" style="fill: var(--paper)"/>{_draw_curve(curve, report, torchrun)}{
        legend
    }</svg>
"""


def build_page(report: DemoReport) -> str:
    """Build the whole page, without scripts and external resources."""
    verdict = "All faults healed, job Complete" if report.passed else f"Not all healed; job {report.phase or 'unknown'}"
    rows = "".join(_format_row(number, outcome) for number, outcome in enumerate(report.outcomes, 1))
    charts = "".join(_draw_chart(title, curve, report) for title, curve in report.curves.items())
    links = ""
    if report.fabrics is not None:
        links = (
            f'<h2>Links of the network, before and after</h2><div class="scroll">{_draw_links(report.fabrics)}</div>'
        )
    loss = ""
    if report.loss_before is not None and report.loss_after is not None:
        loss = f" · loss {report.loss_before:.2f} → {report.loss_after:.2f}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Pacekeeper: a job that heals itself</title><style>{_STYLE}</style></head><body><main>
<h1>A job that heals itself</h1>
<p class="verdict {"good" if report.passed else "bad"}">{html.escape(verdict)}</p>
<p>{report.steps} steps in {report.seconds:.0f} s{loss}. Times count from the injection of the fault.</p>
<div class="scroll"><table><thead><tr><th>#</th><th>Fault</th><th>Made by</th><th>Remedy</th><th>Detected</th>
<th>Decided</th><th>Recovered</th><th>Steps lost</th><th>Gain</th><th>Cost (expected)</th><th>Won (expected)</th>
<th>Healed</th></tr></thead>
<tbody>{rows}</tbody></table></div>
{links}{charts}</main></body></html>
"""


_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b2130, #e8eaf0); --faint: light-dark(#667, #99a);
  --paper: light-dark(#fff, #14171f); --line: light-dark(#dde, #333a4a); --curve: light-dark(#1f5fd0, #7fb0ff);
  --mark: light-dark(#d0561f, #ff9a66); --good: light-dark(#11773c, #63d391); --bad: #d33; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1rem; margin: 28px 0 4px; }
.verdict { font-weight: 600; margin: 4px 0; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; white-space: nowrap; }
th, td { padding: 5px 8px; text-align: left; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: var(--faint); }
svg { width: 100%; min-width: 640px; height: auto; display: block; }
.axis { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--line); }
.curve { stroke: var(--curve); fill: none; stroke-width: 1.5; }
.reference { stroke: var(--bad); fill: none; stroke-width: 1.2; }
.reference-name { fill: var(--bad); font-size: 11px; font-weight: 600; }
.mark { stroke: var(--mark); stroke-dasharray: 3 3; }
.band { fill: var(--mark); opacity: .13; }
.number-mark { fill: var(--mark); font-size: 11px; font-weight: 600; }
"""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1040, 190, 48, 22, 16
_NAMES_PER_ROW = 4


def _draw_links(fabrics: tuple[FabricView, FabricView]) -> str:
    before, after = fabrics
    return render_svg(after, before)


def _format_row(number: int, outcome: FaultOutcome) -> str:
    cells = [
        f"<td>{number}</td><td>{html.escape(outcome.fault)}</td><td>{html.escape(outcome.how)}</td>",
        f'<td title="{html.escape(outcome.reason)}">{html.escape(outcome.remedy or "none")}</td>',
    ]
    cells += [
        f'<td class="number">{_format_seconds(value)}</td>'
        for value in (outcome.detected_s, outcome.decided_s, outcome.recovered_s)
    ]
    steps_lost = "" if outcome.steps_lost is None else str(outcome.steps_lost)
    healed = '<td class="good">yes</td>' if outcome.healed else '<td class="bad">no</td>'
    prices = "".join(
        f'<td class="number">{_format_price(measured, predicted)}</td>'
        for measured, predicted in (
            (outcome.measured_cost_s, outcome.predicted_cost_s),
            (outcome.measured_gain_s, outcome.predicted_gain_s),
        )
    )
    numbers = f'<td class="number">{steps_lost}</td><td>{html.escape(outcome.gain)}</td>{prices}'
    return f"<tr>{''.join(cells)}{numbers}{healed}</tr>"


def _format_price(measured: float | None, predicted: float | None) -> str:
    expected = "" if predicted is None else f" ({_format_seconds(predicted)})"
    return "" if measured is None and not expected else f"{_format_seconds(measured) or '–'}{expected}"


def _format_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _draw_chart(title: str, curve: Curve, report: DemoReport) -> str:
    if not curve:
        return f"<h2>{html.escape(title)}</h2><p>no data</p>"
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{_draw_curve(curve, report)}</svg>'
    return f'<h2>{html.escape(title)}</h2><div class="scroll">{drawing}</div>'


def _draw_curve(curve: Curve, report: DemoReport, torchrun: Curve = ()) -> str:
    """Draw one curve over the demo's time, with a band from each fault to its recovery, as content of an svg."""
    span = max(report.seconds, curve[-1][0], 1.0)
    values = sorted(value for _, value in curve)
    top = values[int(0.995 * (len(values) - 1))] * 1.1 or 1.0  # a single outlier must not flatten the rest

    def x(seconds: float) -> float:
        return _LEFT + seconds / span * (_WIDTH - _LEFT - 8)

    def y(value: float) -> float:
        return _TOP + (1 - min(value / top, 1.0)) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for fraction in (0.0, 0.5, 1.0):
        height = y(top * fraction)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{top * fraction:.3g}</text>'
        )
    for seconds in range(0, int(span) + 1, 30):
        parts.append(
            f'<text class="axis" x="{x(seconds):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{seconds} s</text>'
        )
    for number, outcome in enumerate(report.outcomes, 1):
        left = x(outcome.injected_at)
        tip = f"<title>{html.escape(f'{outcome.fault}: {outcome.remedy}. {outcome.reason}')}</title>"
        if outcome.recovered_s is not None:
            width = max(x(outcome.injected_at + outcome.recovered_s) - left, 1)
            band_height = _HEIGHT - _TOP - _BOTTOM
            parts.append(
                f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{band_height}">{tip}</rect>'
            )
        parts.append(
            f'<line class="mark" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">{tip}</line>'
        )
        parts.append(f'<text class="number-mark" x="{left + 3:.1f}" y="{_TOP - 4}">{number}</text>')
    if torchrun:
        parts.append(f'<text class="reference-name" x="{_WIDTH - 12}" y="{y(0) - 6}" text-anchor="end">torchrun</text>')
    for name, series in (("reference", torchrun), ("curve", curve)):
        points = " ".join(f"{x(seconds):.1f},{y(value):.1f}" for seconds, value in series)
        if points:
            parts.append(f'<polyline class="{name}" points="{points}"/>')
    return "".join(parts)

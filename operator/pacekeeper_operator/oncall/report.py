"""A job's life as one HTML page: how it has done, what its time was lost to, and each incident with what was considered
and what came of it. Pure.

The page has no script and loads nothing. Much of what it says are tenants' words: all of it is text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from ..api import IncidentCause, IncidentClass, format_time
from . import incidents as words
from .seen import LoadedIncident, LoadedJob
from .text import format_elapsed, strip_control_characters

MOVE_CAUSES = frozenset({IncidentCause.GPU_WARNING, IncidentCause.NODE_LEAVING})
"""The job trains on until its worker moves."""
TIMELINE_WIDTH, TIMELINE_HEIGHT, TIMELINE_MARGIN, TIMELINE_TOP, TIMELINE_BOTTOM = 1100, 96, 8, 20, 22
"""Of the timeline, in its own units."""
TIMELINE_TICKS = 6

_JOB_REPORT_STYLE = """
td, th { text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 640px; width: 100%; height: auto; display: block; }
.life { fill: var(--track); } .lost { fill: var(--bar); opacity: .55; } .slow { fill: var(--bar); opacity: .25; }
.axis { fill: var(--soft); font-size: 11px; } .name { fill: var(--accent); font-size: 11px; font-weight: 600; }
details { border-top: 1px solid var(--line); padding: 8px 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
details p { margin: 4px 0 4px 16px; overflow-wrap: anywhere; }
details h3 { font-size: 13px; margin: 8px 0 0 16px; color: var(--soft); }
.stage b { text-transform: capitalize; font-size: 18px !important; }
"""


@dataclass(frozen=True)
class CauseLoss:
    """What one kind of incident has cost a job."""

    cause: str
    incidents: int
    seconds: float  # of training, about
    steps: int


def render_page(seen: LoadedJob, incidents: Sequence[LoadedIncident], now: float) -> str:
    """`incidents`: the job's own; those whose retention is over are not among them."""
    own = sorted(incidents, key=lambda one: one.started_at)
    first = min([seen.status.start_time or now, *(one.started_at for one in own)])
    last = max(seen.status.completion_time or now, first + 1.0)
    title = f"{seen.job.name} in {seen.job.namespace}"
    sections = (
        _render_section("", f'<div class="figures">{_render_statistics(seen, own, first, last)}</div>'),
        _render_section("Its life", f'<div class="scroll">{_render_timeline(own, first, last)}</div>{_render_hint(own)}'),
        _render_section("What its time was lost to", _render_losses(compute_losses(own, last), last - first)),
        _render_section("Incidents", _render_overview(own, first) + "".join(_render_details(at, one) for at, one in enumerate(own, 1))),
    )
    style = files("pacekeeper_analysis.pages").joinpath("common.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape_text(title)}</title><style>{style}{_JOB_REPORT_STYLE}</style></head><body><main>
<header><h1>{_escape_text(title)}</h1><p class="hint">{_format_moment(first)} – {_format_moment(last)}</p></header>
{"".join(sections)}</main></body></html>
"""


def compute_losses(incidents: Sequence[LoadedIncident], end: float) -> list[CauseLoss]:
    """By cause, the dearest first. `end`: of the job, or now. Seconds since the epoch."""
    of_cause = defaultdict[str, list[LoadedIncident]](list)
    for one in incidents:
        of_cause[one.spec.cause].append(one)
    found = [
        CauseLoss(cause, len(of), sum(compute_lost_seconds(one, end) for one in of), sum(one.status.steps_lost or 0 for one in of))
        for cause, of in of_cause.items()
    ]
    return sorted(found, key=lambda loss: -loss.seconds)


def compute_lost_seconds(incident: LoadedIncident, end: float) -> float:
    """Of training: all of a standstill, and of slow steps what they take longer than they need. Where several overlap,
    each is counted in full."""
    status, spec = incident.status, incident.spec
    if spec.cause in MOVE_CAUSES:
        return 0.0
    over = status.recovered_seconds
    if over is None:
        over = 0.0 if status.outcome else max(0.0, end - incident.started_at)
    if spec.class_ is not IncidentClass.PERFORMANCE:
        return over
    slowdown = status.slowdown_before or 1.0
    return over * (1.0 - 1.0 / max(1.0, slowdown))


def _render_statistics(seen: LoadedJob, incidents: Sequence[LoadedIncident], first: float, last: float) -> str:
    told = seen.status
    goodput = "–" if told.goodput is None else f"{told.goodput:.0%}"
    of = f" of {told.total_steps}" if told.total_steps else ""
    lost = sum(one.status.steps_lost or 0 for one in incidents)
    shown = (
        ("stage", told.phase or "not looked at yet", "phase"),
        ("main", goodput, "of the time since the first step not lost to incidents"),
        ("", "–" if told.step is None else str(told.step), f"steps{of}"),
        ("", format_elapsed(last - first), "since it was taken up"),
        ("", str(len(incidents)), "incidents, as far as they are kept"),
        ("", str(told.restarts or 0), "restarts that count"),
        ("", str(lost), "steps lost"),
    )
    return "".join(
        f'<div class="{kind}"><b>{_escape_text(figure)}</b><span>{_escape_text(what)}</span></div>' for kind, figure, what in shown
    )


def _render_timeline(incidents: Sequence[LoadedIncident], first: float, last: float) -> str:
    """A bar from the beginning to the end, with a piece from each incident's first sign to its recovery."""

    def x(at: float) -> float:
        return TIMELINE_MARGIN + (min(max(at, first), last) - first) / (last - first) * (TIMELINE_WIDTH - 2 * TIMELINE_MARGIN)

    inner = TIMELINE_HEIGHT - TIMELINE_TOP - TIMELINE_BOTTOM
    parts = [f'<rect class="life" x="{TIMELINE_MARGIN}" y="{TIMELINE_TOP}" width="{TIMELINE_WIDTH - 2 * TIMELINE_MARGIN}" height="{inner}" rx="3"/>']
    for number, one in enumerate(incidents, 1):
        left, right = x(one.started_at), x(_compute_end(one, last))
        kind = "slow" if one.spec.class_ is IncidentClass.PERFORMANCE or one.spec.cause in MOVE_CAUSES else "lost"
        tip = f"<title>{_escape_text(f'{number} {one.spec.cause}: {one.spec.message}')}</title>"
        box = f'x="{left:.1f}" y="{TIMELINE_TOP}" width="{max(2.0, right - left):.1f}" height="{inner}"'
        parts.append(f'<rect class="{kind}" {box}>{tip}</rect>')
        parts.append(f'<text class="name" x="{left:.1f}" y="{TIMELINE_TOP - 6}">{number}</text>')
    for tick in range(TIMELINE_TICKS + 1):
        at = first + (last - first) * tick / TIMELINE_TICKS
        anchor = "start" if tick == 0 else "end" if tick == TIMELINE_TICKS else "middle"
        parts.append(
            f'<text class="axis" x="{x(at):.1f}" y="{TIMELINE_HEIGHT - 6}" text-anchor="{anchor}">{format_elapsed(at - first)}</text>'
        )
    return f'<svg viewBox="0 0 {TIMELINE_WIDTH} {TIMELINE_HEIGHT}" role="img" aria-label="incidents over time">{"".join(parts)}</svg>'


def _render_hint(incidents: Sequence[LoadedIncident]) -> str:
    told = (
        "From first sign to recovery: dark where it stood still, light where it trained on." if incidents else "None."
    )
    return f'<p class="hint">{told}</p>'


def _render_losses(found: Sequence[CauseLoss], life: float) -> str:
    rows = [
        (loss.cause, str(loss.incidents), format_elapsed(loss.seconds), f"{loss.seconds / life:.1%}", str(loss.steps))
        for loss in found
    ]
    return _render_table(("cause", "incidents", "time of training, about", "of its life", "steps"), rows)


def _render_overview(incidents: Sequence[LoadedIncident], first: float) -> str:
    rows = [
        (
            str(number),
            format_elapsed(one.started_at - first),
            one.spec.cause,
            words.name_target(one),
            one.status.remedy or "–",
            _format_delay(one, one.status.detected),
            _format_delay(one, one.status.decided),
            _format_delay(one, one.status.recovered),
            "" if one.status.steps_lost is None else str(one.status.steps_lost),
            one.status.outcome or "open",
        )
        for number, one in enumerate(incidents, 1)
    ]
    heads = ("#", "at", "cause", "who", "remedy", "detected", "decided", "recovered", "steps lost", "outcome")
    return _render_table(heads, rows)


def _render_details(number: int, incident: LoadedIncident) -> str:
    parts = [f"<p>{_escape_text(incident.spec.message)}</p>"]
    lists = (
        ("diagnosis", words.describe_diagnosis(incident)),
        ("considered", [words.format_price(one) for one in incident.status.considered]),
        ("outcome", [words.describe_outcome(incident)]),
        ("evidence", incident.spec.evidence),
    )
    for title, lines in lists:
        if lines:
            parts.append(f"<h3>{title}</h3>" + "".join(f"<p>{_escape_text(line)}</p>" for line in lines))
    return f"<details><summary>{number} {_escape_text(incident.name)}</summary>{''.join(parts)}</details>"


def _render_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="hint">None.</p>'
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(_render_cells("th", heads))}</tr></thead><tbody>'
        + "".join(f"<tr>{''.join(_render_cells('td', row))}</tr>" for row in rows)
        + "</tbody></table></div>"
    )


def _render_cells(tag: str, cells: Sequence[str]) -> Iterator[str]:
    return (f"<{tag}>{_escape_text(cell)}</{tag}>" for cell in cells)


def _render_section(title: str, content: str) -> str:
    return f'<section class="all">{f"<h2>{title}</h2>" if title else ""}{content}</section>'


def _compute_end(incident: LoadedIncident, last: float) -> float:
    if incident.status.recovered is not None:
        return incident.status.recovered
    return incident.started_at if incident.status.outcome else last


def _format_delay(incident: LoadedIncident, at: float | None) -> str:
    return "" if at is None else format_elapsed(max(0.0, at - incident.started_at))


def _format_moment(at: float) -> str:
    return f"{format_time(at)[:19]}Z"


def _escape_text(value: str) -> str:
    return escape(" ".join(map(strip_control_characters, value.splitlines())))

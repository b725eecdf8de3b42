"""A report about a job as one HTML page.

It has statistics, the lost time by cause, and each Incident with its remedies and outcome. Pure. The page has no script
and loads nothing. Much of its content comes from tenants, so all of it is escaped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..api.incident import IncidentCause, IncidentClass
from . import incidents as words
from .html_page import TABLE_STYLE, escape_text, format_moment, render_document, render_section, render_table
from .loaded_objects import LoadedIncident, LoadedJob
from .text import format_elapsed

MOVE_CAUSES = frozenset({IncidentCause.GPU_WARNING, IncidentCause.NODE_LEAVING})
"""Causes after which the job continues to train until its worker moves."""
TIMELINE_WIDTH, TIMELINE_HEIGHT, TIMELINE_MARGIN, TIMELINE_TOP, TIMELINE_BOTTOM = 1100, 96, 8, 20, 22
"""Dimensions of the timeline, in its own units."""
TIMELINE_TICKS = 6

_JOB_REPORT_STYLE = (
    f"{TABLE_STYLE}"
    + """
.scroll svg { min-width: 640px; width: 100%; height: auto; display: block; }
.life { fill: var(--track); } .lost { fill: var(--bar); opacity: .55; } .slow { fill: var(--bar); opacity: .25; }
.axis { fill: var(--soft); font-size: 11px; } .name { fill: var(--accent); font-size: 11px; font-weight: 600; }
details { border-top: 1px solid var(--line); padding: 8px 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
details p { margin: 4px 0 4px 16px; overflow-wrap: anywhere; }
details h3 { font-size: 13px; margin: 8px 0 0 16px; color: var(--soft); }
.stage b { text-transform: capitalize; font-size: 18px !important; }
"""
)


@dataclass(frozen=True)
class CauseLoss:
    """What one cause of Incidents has cost a job."""

    cause: str
    incidents: int
    seconds: float  # of training, estimated
    steps: int


def render_page(loaded: LoadedJob, incidents: Sequence[LoadedIncident], now: float) -> str:
    """Render the page. `incidents` are the job's own, within their retention."""
    ordered = sorted(incidents, key=lambda incident: incident.started_at)
    first = min([loaded.status.start_time or now, *(incident.started_at for incident in ordered)])
    last = max(loaded.status.completion_time or now, first + 1.0)
    title = f"{loaded.job.name} in {loaded.job.namespace}"
    sections = (
        render_section("", f'<div class="figures">{_render_statistics(loaded, ordered, first, last)}</div>'),
        render_section(
            "Timeline of incidents",
            f'<div class="scroll">{_render_timeline(ordered, first, last)}</div>{_render_hint(ordered)}',
        ),
        render_section("Lost time by cause", _render_losses(compute_losses(ordered, last), last - first)),
        render_section(
            "Incidents",
            _render_overview(ordered, first)
            + "".join(_render_details(number, incident) for number, incident in enumerate(ordered, 1)),
        ),
    )
    return render_document(
        title, f"{format_moment(first)} – {format_moment(last)}", "".join(sections), _JOB_REPORT_STYLE
    )


def compute_losses(incidents: Sequence[LoadedIncident], end: float) -> list[CauseLoss]:
    """Return the losses by cause, the highest first. `end` is that of the job, or now, in seconds since the epoch."""
    by_cause = defaultdict[str, list[LoadedIncident]](list)
    for incident in incidents:
        by_cause[incident.spec.cause].append(incident)
    losses = [
        CauseLoss(
            cause,
            len(of_cause),
            sum(compute_lost_seconds(incident, end) for incident in of_cause),
            sum(incident.status.steps_lost or 0 for incident in of_cause),
        )
        for cause, of_cause in by_cause.items()
    ]
    return sorted(losses, key=lambda loss: -loss.seconds)


def compute_lost_seconds(incident: LoadedIncident, end: float) -> float:
    """Return the lost seconds of training: all of a standstill, and the excess time of slow steps.

    If several Incidents overlap, each is counted in full.
    """
    status, spec = incident.status, incident.spec
    if spec.cause in MOVE_CAUSES:
        return 0.0
    duration = status.recovered_seconds
    if duration is None:
        duration = 0.0 if status.outcome else max(0.0, end - incident.started_at)
    if spec.class_ is not IncidentClass.PERFORMANCE:
        return duration
    slowdown = status.slowdown_before or 1.0
    return duration * (1.0 - 1.0 / max(1.0, slowdown))


def _render_statistics(loaded: LoadedJob, incidents: Sequence[LoadedIncident], first: float, last: float) -> str:
    status = loaded.status
    goodput = "–" if status.goodput is None else f"{status.goodput:.0%}"
    total = f" of {status.total_steps}" if status.total_steps else ""
    lost = sum(incident.status.steps_lost or 0 for incident in incidents)
    shown = (
        ("stage", status.phase or "not observed yet", "phase"),
        ("main", goodput, "of the time since the first step not lost to incidents"),
        ("", "–" if status.step is None else str(status.step), f"steps{total}"),
        ("", format_elapsed(last - first), "since its start"),
        ("", str(len(incidents)), "incidents within their retention"),
        ("", str(status.restarts or 0), "restarts counted by the budget"),
        ("", str(lost), "steps lost"),
    )
    return "".join(
        f'<div class="{kind}"><b>{escape_text(value)}</b><span>{escape_text(label)}</span></div>'
        for kind, value, label in shown
    )


def _render_timeline(incidents: Sequence[LoadedIncident], first: float, last: float) -> str:
    """Render a bar from the begin to the end, with a piece from each Incident's first sign to its recovery."""

    def x(at: float) -> float:
        return TIMELINE_MARGIN + (min(max(at, first), last) - first) / (last - first) * (
            TIMELINE_WIDTH - 2 * TIMELINE_MARGIN
        )

    bar_height = TIMELINE_HEIGHT - TIMELINE_TOP - TIMELINE_BOTTOM
    parts = [
        f'<rect class="life" x="{TIMELINE_MARGIN}" y="{TIMELINE_TOP}" '
        f'width="{TIMELINE_WIDTH - 2 * TIMELINE_MARGIN}" height="{bar_height}" rx="3"/>'
    ]
    for number, incident in enumerate(incidents, 1):
        left, right = x(incident.started_at), x(_compute_end(incident, last))
        kind = (
            "slow"
            if incident.spec.class_ is IncidentClass.PERFORMANCE or incident.spec.cause in MOVE_CAUSES
            else "lost"
        )
        tip = f"<title>{escape_text(f'{number} {incident.spec.cause}: {incident.spec.message}')}</title>"
        box = f'x="{left:.1f}" y="{TIMELINE_TOP}" width="{max(2.0, right - left):.1f}" height="{bar_height}"'
        parts.append(f'<rect class="{kind}" {box}>{tip}</rect>')
        parts.append(f'<text class="name" x="{left:.1f}" y="{TIMELINE_TOP - 6}">{number}</text>')
    for tick in range(TIMELINE_TICKS + 1):
        at = first + (last - first) * tick / TIMELINE_TICKS
        anchor = "start" if tick == 0 else "end" if tick == TIMELINE_TICKS else "middle"
        parts.append(
            f'<text class="axis" x="{x(at):.1f}" y="{TIMELINE_HEIGHT - 6}" '
            f'text-anchor="{anchor}">{format_elapsed(at - first)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {TIMELINE_WIDTH} {TIMELINE_HEIGHT}" role="img" aria-label="incidents over '
        f'time">{"".join(parts)}</svg>'
    )


def _render_hint(incidents: Sequence[LoadedIncident]) -> str:
    text = "From first sign to recovery: dark if training stood still, light if it continued." if incidents else "None."
    return f'<p class="hint">{text}</p>'


def _render_losses(losses: Sequence[CauseLoss], run_seconds: float) -> str:
    rows = [
        (
            loss.cause,
            str(loss.incidents),
            format_elapsed(loss.seconds),
            f"{loss.seconds / run_seconds:.1%}",
            str(loss.steps),
        )
        for loss in losses
    ]
    return render_table(("cause", "incidents", "training time, about", "share of its run", "steps"), rows)


def _render_overview(incidents: Sequence[LoadedIncident], first: float) -> str:
    rows = [
        (
            str(number),
            format_elapsed(incident.started_at - first),
            incident.spec.cause,
            words.name_target(incident),
            incident.status.remedy or "–",
            _format_delay(incident, incident.status.detected),
            _format_delay(incident, incident.status.decided),
            _format_delay(incident, incident.status.recovered),
            "" if incident.status.steps_lost is None else str(incident.status.steps_lost),
            incident.status.outcome or "open",
        )
        for number, incident in enumerate(incidents, 1)
    ]
    headers = ("#", "at", "cause", "who", "remedy", "detected", "decided", "recovered", "steps lost", "outcome")
    return render_table(headers, rows)


def _render_details(number: int, incident: LoadedIncident) -> str:
    parts = [f"<p>{escape_text(incident.spec.message)}</p>"]
    lists = (
        ("diagnosis", words.describe_diagnosis(incident)),
        ("considered", [words.format_price(price) for price in incident.status.considered]),
        ("outcome", [words.describe_outcome(incident)]),
        ("evidence", incident.spec.evidence),
    )
    for title, lines in lists:
        if lines:
            parts.append(f"<h3>{title}</h3>" + "".join(f"<p>{escape_text(line)}</p>" for line in lines))
    return f"<details><summary>{number} {escape_text(incident.name)}</summary>{''.join(parts)}</details>"


def _compute_end(incident: LoadedIncident, last: float) -> float:
    if incident.status.recovered is not None:
        return incident.status.recovered
    return incident.started_at if incident.status.outcome else last


def _format_delay(incident: LoadedIncident, at: float | None) -> str:
    return "" if at is None else format_elapsed(max(0.0, at - incident.started_at))

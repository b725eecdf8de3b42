"""Incidents in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..api import RemediationMode, IncidentOutcome, RemedyPrice, format_time
from .seen import LoadedIncident
from .text import format_count, format_elapsed, format_entries, format_paragraph, format_table

OUTCOME_MESSAGES = {
    IncidentOutcome.RECOVERED: "training goes on as before",
    IncidentOutcome.MITIGATED: "better than before the remedy, not as good as before the fault",
    IncidentOutcome.NOT_HELPED: "it has not helped",
    IncidentOutcome.RECOMMENDED: "nothing was done: remedies are only recommended",
    IncidentOutcome.FAILED: "the job has failed of it",
    IncidentOutcome.SUPERSEDED: "something else came before its end could be measured",
}


def format_overview(incidents: Sequence[LoadedIncident], now: float, *, namespaces: bool = False) -> str:
    """A table, in the order given."""
    heads = ["NAME", "WHO", "REMEDY", "OUTCOME", "RECOVERED", "AGE", "CULPRIT"]
    rows = [
        [
            one.name,
            name_target(one),
            one.status.remedy or "–",
            one.status.outcome or "open",
            _format_optional_duration(one.status.recovered_seconds),
            format_elapsed(now - one.started_at),
            one.status.diagnosis.culprit if one.status.diagnosis else "",
        ]
        for one in incidents
    ]
    if namespaces:
        heads, rows = ["NAMESPACE", *heads], [[one.namespace, *row] for one, row in zip(incidents, rows, strict=True)]
    return format_table(heads, rows)


def format_incident(incident: LoadedIncident) -> str:
    """One in full: what happened, when, what was thought of it, and what came of it."""
    spec, status = incident.spec, incident.status
    title = f"{incident.name} in {incident.namespace}: {spec.cause} of job {spec.job_ref.name}, round {spec.round}"
    parts = [title, format_paragraph(spec.message, "  "), format_entries(list(_iterate_timeline(incident)))]
    parts.append(_format_section("diagnosis", describe_diagnosis(incident)))
    parts.append(_format_section("considered", [format_price(one) for one in status.considered]))
    parts.append(_format_section("outcome", [describe_outcome(incident), *describe_recovery(incident)]))
    parts.append(_format_section("evidence", spec.evidence))
    return "\n\n".join(part for part in parts if part)


def summarize_incident(incident: LoadedIncident, now: float) -> str:
    """The same in a few sentences."""
    state = "open" if incident.is_open else f"{format_elapsed(now - incident.started_at)} ago"
    lines = [f"{incident.name} ({incident.spec.cause}, {state}): {incident.spec.message}"]
    lines += [f"    {line}" for line in describe_diagnosis(incident)]
    lines += [f"    {format_price(one)}" for one in incident.status.considered]
    lines.append(f"    {describe_progress(incident) if incident.is_open else describe_outcome(incident)}")
    return "\n".join(format_paragraph(line.strip(), "      ", "  " if line.startswith("    ") else "") for line in lines)


def describe_diagnosis(incident: LoadedIncident) -> list[str]:
    """Who is to blame, by whose word, and what to do; []: nobody has found out."""
    found = incident.status.diagnosis
    if found is None:
        return []
    told = f"; such evidence was right {found.confidence:.0%} of the times it was tried" if found.confidence else ""
    lines = [f"{found.culprit or 'nobody is named'}; kind of fault: {found.fault}{told}"]
    lines += [f"{witness.kind}: {witness.words}" for witness in found.witnesses]
    return [*lines, f"to do: {found.advice}"] if found.advice else lines


def format_price(one: RemedyPrice) -> str:
    """`RestartRanks: chosen; costs 5.0 s, wins all that the standstill costs (…)`."""
    parts = ["chosen"] if one.chosen else []
    if one.cost_seconds is not None:
        parts.append(f"costs {format_elapsed(one.cost_seconds)} of training" if one.cost_seconds else "costs nothing")
    parts.append("wins all" if one.gain_seconds is None else f"wins {format_elapsed(one.gain_seconds)}")
    return f"{one.name}: {', '.join(parts)}" + (f" ({one.reason})" if one.reason else "")


def describe_outcome(incident: LoadedIncident) -> str:
    status = incident.status
    if status.outcome is None:
        return f"still open; {describe_progress(incident)}"
    return f"{status.outcome}: {'; '.join([OUTCOME_MESSAGES[status.outcome], *_iterate_measurements(incident)])}"


def describe_recovery(incident: LoadedIncident) -> list[str]:
    """What its time went to: `Teardown 0.1 s, Wait 2.0 s, … Load 3.0 s (rank 3); the state came from: Memory`."""
    restart = incident.status.restart
    if restart is None or not restart.parts:
        return []
    told = (
        f"{one.name} {format_elapsed(one.seconds)}" + ("" if one.rank is None else f" (rank {one.rank})")
        for one in restart.parts
    )
    origin = f"; the state came from: {restart.restored_from}" if restart.restored_from else ""
    return [f"its time: {', '.join(told)}{origin}"]


def describe_progress(incident: LoadedIncident) -> str:
    """What the operator does about an open incident, or waits for."""
    status = incident.status
    if status.remedy is None:
        waits = next((f"; {one.name}: {one.reason}" for one in status.considered if one.reason), "")
        return f"no remedy is taken so far{waits}"
    if status.mode is RemediationMode.RECOMMEND:
        return f"{status.remedy} would be taken, but remedies are only recommended, or paused"
    if status.applied is None:
        return f"{status.remedy} is under way"
    return f"{status.remedy} is applied; whether it has helped is being measured"


def _format_section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(format_paragraph(line, "    ", "  ") for line in lines)]) if lines else ""


def name_target(incident: LoadedIncident) -> str:
    spec = incident.spec
    if spec.rank is not None:
        return f"rank {spec.rank}"
    return spec.worker or spec.node or "–"


def _iterate_timeline(incident: LoadedIncident) -> Iterator[tuple[str, str]]:
    status = incident.status
    first = status.first_sign
    if first is None:
        return
    yield "first sign", format_time(first)[:19] + "Z"
    moments = (
        ("detected", status.detected),
        ("decided", status.decided),
        ("applied", status.applied),
        ("recovered", status.recovered),
    )
    for name, at in moments:
        if at is not None:
            what = f": {status.remedy}" if name == "decided" and status.remedy else ""
            yield name, f"after {format_elapsed(max(0.0, at - first))}{what}"


def _iterate_measurements(incident: LoadedIncident) -> Iterator[str]:
    status = incident.status
    if status.recovered_seconds is not None:
        yield f"recovered {format_elapsed(status.recovered_seconds)} after the first sign"
    if status.steps_lost is not None:
        yield f"{format_count(status.steps_lost, 'step')} lost"
    if status.slowdown_before is not None and status.slowdown_after is not None:
        yield f"the slowdown went from {status.slowdown_before:.2f} to {status.slowdown_after:.2f}"
    if status.measured_gain is not None:
        said = f", {format_elapsed(status.predicted_gain)} were expected" if status.predicted_gain is not None else ""
        yield f"it has won {format_elapsed(status.measured_gain)} of training{said}"
    if status.message:
        yield status.message


def _format_optional_duration(seconds: float | None) -> str:
    return "" if seconds is None else format_elapsed(seconds)

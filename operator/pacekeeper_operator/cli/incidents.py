"""Incidents as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..api.formats import format_time
from ..api.incident import IncidentOutcome, RemedyPrice
from ..api.training_job import RemediationMode
from .loaded_objects import LoadedIncident
from .text import format_count, format_elapsed, format_entries, format_paragraph, format_table

OUTCOME_MESSAGES = {
    IncidentOutcome.RECOVERED: "training goes on as before",
    IncidentOutcome.MITIGATED: "better than before the remedy, not as good as before the fault",
    IncidentOutcome.INEFFECTIVE: "the remedy did not help",
    IncidentOutcome.RECOMMENDED: "nothing was done: remedies are only recommended",
    IncidentOutcome.OBSERVED: "nothing was done: the job is only watched",
    IncidentOutcome.FAILED: "the job failed because of it",
    IncidentOutcome.SUPERSEDED: "another event came before its recovery could be measured",
}


def format_overview(incidents: Sequence[LoadedIncident], now: float, *, namespaces: bool = False) -> str:
    """Format a table, in the given order."""
    headers = ["NAME", "WHO", "REMEDY", "OUTCOME", "RECOVERED", "AGE", "CULPRIT"]
    rows = [
        [
            incident.name,
            name_target(incident),
            incident.status.remedy or "–",
            incident.status.outcome or "open",
            _format_optional_duration(incident.status.recovered_seconds),
            format_elapsed(now - incident.started_at),
            incident.status.diagnosis.culprit if incident.status.diagnosis else "",
        ]
        for incident in incidents
    ]
    if namespaces:
        headers, rows = (
            ["NAMESPACE", *headers],
            [[incident.namespace, *row] for incident, row in zip(incidents, rows, strict=True)],
        )
    return format_table(headers, rows)


def format_incident(incident: LoadedIncident) -> str:
    """Format one Incident in full: what happened, when, which remedies were considered, and the outcome."""
    spec, status = incident.spec, incident.status
    title = f"{incident.name} in {incident.namespace}: {spec.cause} of job {spec.job_ref.name}, round {spec.round}"
    parts = [title, format_paragraph(spec.message, "  "), format_entries(list(_iterate_timeline(incident)))]
    parts.append(_format_section("diagnosis", describe_diagnosis(incident)))
    parts.append(_format_section("considered", [format_price(price) for price in status.considered]))
    parts.append(_format_section("outcome", [describe_outcome(incident), *describe_recovery(incident)]))
    parts.append(_format_section("evidence", spec.evidence))
    return "\n\n".join(part for part in parts if part)


def summarize_incident(incident: LoadedIncident, now: float) -> str:
    """Format one Incident in a few sentences."""
    state = "open" if incident.is_open else f"{format_elapsed(now - incident.started_at)} ago"
    lines = [f"{incident.name} ({incident.spec.cause}, {state}): {incident.spec.message}"]
    lines += [f"    {line}" for line in describe_diagnosis(incident)]
    lines += [f"    {format_price(price)}" for price in incident.status.considered]
    lines.append(f"    {describe_progress(incident) if incident.is_open else describe_outcome(incident)}")
    return "\n".join(
        format_paragraph(line.strip(), "      ", "  " if line.startswith("    ") else "") for line in lines
    )


def describe_diagnosis(incident: LoadedIncident) -> list[str]:
    """Return the culprit, the evidence, and the advice; []: there is no diagnosis."""
    diagnosis = incident.status.diagnosis
    if diagnosis is None:
        return []
    confidence = (
        f"; such evidence was right {diagnosis.confidence:.0%} of the times it was tried"
        if diagnosis.confidence
        else ""
    )
    lines = [f"{diagnosis.culprit or 'no culprit is named'}; kind of fault: {diagnosis.fault}{confidence}"]
    lines += [f"{signal.kind}: {signal.message}" for signal in diagnosis.signals]
    return [*lines, f"to do: {diagnosis.advice}"] if diagnosis.advice else lines


def format_price(price: RemedyPrice) -> str:
    """Format a remedy with its price, like `RestartRanks: chosen, costs 5.0 s of training, wins all (…)`."""
    parts = ["chosen"] if price.chosen else []
    if price.cost_seconds is not None:
        parts.append(
            f"costs {format_elapsed(price.cost_seconds)} of training" if price.cost_seconds else "costs nothing"
        )
    parts.append("wins all" if price.gain_seconds is None else f"wins {format_elapsed(price.gain_seconds)}")
    return f"{price.name}: {', '.join(parts)}" + (f" ({price.reason})" if price.reason else "")


def describe_outcome(incident: LoadedIncident) -> str:
    status = incident.status
    if status.outcome is None:
        return f"still open; {describe_progress(incident)}"
    return f"{status.outcome}: {'; '.join([OUTCOME_MESSAGES[status.outcome], *_iterate_measurements(incident)])}"


def describe_recovery(incident: LoadedIncident) -> list[str]:
    """Return the parts of the recovery.

    One is like `Teardown 0.1 s, Wait 2.0 s, … Load 3.0 s (rank 3); the state came from: Memory`.
    """
    restart = incident.status.restart
    if restart is None or not restart.parts:
        return []
    parts = (
        f"{part.name} {format_elapsed(part.seconds)}" + ("" if part.rank is None else f" (rank {part.rank})")
        for part in restart.parts
    )
    origin = f"; the state came from: {restart.restored_from}" if restart.restored_from else ""
    return [f"its time: {', '.join(parts)}{origin}"]


def describe_progress(incident: LoadedIncident) -> str:
    """Return what the operator does about an open Incident, or what it waits for."""
    status = incident.status
    if status.remedy is None:
        reason = next((f"; {price.name}: {price.reason}" for price in status.considered if price.reason), "")
        return f"no remedy is taken so far{reason}"
    if status.mode is RemediationMode.RECOMMEND:
        return f"{status.remedy} would be taken, but remedies are only recommended, or paused"
    if status.applied is None:
        return f"{status.remedy} is under way"
    return f"{status.remedy} is applied; its effect is being measured"


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
            remedy = f": {status.remedy}" if name == "decided" and status.remedy else ""
            yield name, f"after {format_elapsed(max(0.0, at - first))}{remedy}"


def _iterate_measurements(incident: LoadedIncident) -> Iterator[str]:
    status = incident.status
    if status.recovered_seconds is not None:
        yield f"recovered {format_elapsed(status.recovered_seconds)} after the first sign"
    if status.steps_lost is not None:
        yield f"{format_count(status.steps_lost, 'step')} lost"
    if status.slowdown_before is not None and status.slowdown_after is not None:
        yield f"the slowdown went from {status.slowdown_before:.2f} to {status.slowdown_after:.2f}"
    if status.measured_cost is not None and (status.measured_cost or status.predicted_cost):
        expected = _format_expectation(status.predicted_cost)
        yield f"the remedy has cost {format_elapsed(status.measured_cost)} of training{expected}"
    if status.measured_gain is not None:
        expected = _format_expectation(status.predicted_gain)
        yield f"the remedy has won {format_elapsed(status.measured_gain)} of training{expected}"
    if status.message:
        yield status.message


def _format_expectation(seconds: float | None) -> str:
    return "" if seconds is None else f", {format_elapsed(seconds)} were expected"


def _format_optional_duration(seconds: float | None) -> str:
    return "" if seconds is None else format_elapsed(seconds)

"""Watched jobs as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..api.watched_job import WatchedJobCondition, WatchedJobReason, WatchedJobStatus, WatchedRoundStatus
from .html_page import format_moment
from .loaded_objects import LoadedIncident, LoadedWatchedJob
from .text import format_elapsed, format_entries, format_paragraph, format_table

MAX_SHOWN_INCIDENTS = 5
"""Incidents of a job that are shown, newest first."""


def format_overview(jobs: Sequence[LoadedWatchedJob], *, namespaces: bool = False) -> str:
    """Format a table of watched jobs."""
    headers = ["NAME", "JOB", "PHASE", "RANKS", "STEP", "SLOWDOWN", "GOODPUT", "SAVINGS", "NOW"]
    rows = [
        [
            job.name,
            job.root,
            job.status.phase or "–",
            job.status.ranks or "–",
            "–" if job.status.step is None else str(job.status.step),
            "" if job.status.slowdown is None else f"{job.status.slowdown:.2f}",
            ""
            if job.status.account is None or job.status.account.goodput is None
            else f"{job.status.account.goodput:.0%}",
            _format_savings(job),
            job.status.waiting or next(iter(job.status.culprits), ""),
        ]
        for job in jobs
    ]
    if namespaces:
        headers = ["NAMESPACE", *headers]
        rows = [[job.namespace, *row] for job, row in zip(jobs, rows, strict=True)]
    stops = {
        condition.message
        for job in jobs
        for condition in job.status.conditions
        if condition.reason == WatchedJobReason.INJECTION_IS_OFF
    }
    # The messages differ in the ranks that run.
    return "\n".join([format_table(headers, rows), *(format_paragraph(stop) for stop in sorted(stops)[:1])])


def describe_injection(state: Mapping[str, str]) -> str:
    """Describe whether pods are watched. `state`: data of the ConfigMap; empty: there is none."""
    if not state.get("enabled"):
        return "pods are not watched: no operator has led with watch.enabled yet, or nodes still pull the image"
    if state["enabled"] == "true":
        return "new pods are watched in the namespaces that are labeled"
    since = f" since {state['disabledAt']}" if state.get("disabledAt") and state.get("reason") else ""
    reason = state.get("reason") or "a person has switched the watch off"
    return f"new pods are not watched{since}: {reason}"


def format_job(job: LoadedWatchedJob, incidents: Sequence[LoadedIncident]) -> str:
    """Format all that is known of one watched job. `incidents` are its own, the newest first."""
    title = f"{job.name} in {job.namespace}: {job.status.phase or 'not observed yet'}, {job.root}"
    parts = [title, format_entries([*_iterate_entries(job)])]
    shown = [
        f"{format_moment(incident.started_at)}  {incident.spec.message}" for incident in incidents[:MAX_SHOWN_INCIDENTS]
    ]
    if shown:
        parts.append("\n".join(format_paragraph(text, "  ") for text in shown))
    return "\n".join(parts)


def _describe_progress(status: WatchedJobStatus) -> str | None:
    """Return what the script reports of its progress; None: nothing."""
    steps = "" if status.total_steps is None else f" of {status.total_steps} steps"
    remaining = "" if status.remaining is None else f", {status.remaining} left"
    return None if status.progress is None else f"{status.progress}{steps}{remaining}"


def _format_savings(job: LoadedWatchedJob) -> str:
    """Return the GPU hours that remedies would have kept; "": none."""
    savings = job.status.potential_savings
    return "" if savings is None or not savings.saved else f"{savings.saved / 3600:.1f} h"


def _iterate_entries(job: LoadedWatchedJob) -> Iterator[tuple[str, str]]:
    status = job.status
    values = (
        ("team", job.spec.team),
        ("pods", status.pods),
        ("ranks", status.ranks),
        (
            "torch",
            status.torch and f"{status.torch}, Python {status.python or '–'}, recording {status.recording or '–'}",
        ),
        ("step", None if status.step is None else str(status.step)),
        ("step time", None if status.step_seconds is None else f"{status.step_seconds:.3f} s"),
        ("progress", _describe_progress(status)),
        ("waiting", status.waiting),
    )
    yield from ((name, value) for name, value in values if value)
    yield from (("suspect", culprit) for culprit in status.culprits)
    if status.account is not None and status.account.goodput is not None:
        lost = vars(status.account.lost)
        causes = [
            f"{name.replace('_', ' ')} {seconds / status.account.gpu_seconds:.1%}"
            for name, seconds in sorted(lost.items(), key=lambda item: -item[1])
            if seconds
        ]
        yield "goodput", f"{status.account.goodput:.1%} of {status.account.gpu_seconds / 3600:.1f} GPU hours"
        yield "lost", ", ".join(causes) or "nothing"
    if status.potential_savings is not None and _format_savings(job):
        hours, count = _format_savings(job), status.potential_savings.incidents
        yield "savings", f"remedies of {count} incidents would have kept {hours} of GPU time"
    yield from (("round", _describe_round(round_)) for round_ in status.rounds)
    for condition in status.conditions:
        good = "False" if condition.type == WatchedJobCondition.BROKEN else "True"
        if condition.status != good:
            yield condition.type, condition.message


def _describe_round(round_: WatchedRoundStatus) -> str:
    parts = [str(round_.round)]
    if round_.began is not None:
        parts.append(f"began {format_moment(round_.began)}")
    if round_.resumed_from is not None:
        parts.append(f"resumed from step {round_.resumed_from}")
    if round_.began is not None and round_.ended is not None:
        parts.append(
            f"ended after {format_elapsed(round_.ended - round_.began)}: {round_.cause or 'cause not observed'}"
        )
    return ", ".join(parts)

"""Jobs as text: their state, and its causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..api.conditions import ConditionStatus, JobCondition
from ..api.training_job import JobPhase, RemediationMode, RequestedSyncMode
from ..decide.lifecycle.status import TO_DO_AFTER_FAILURE
from . import incidents as words
from .loaded_objects import LoadedIncident, LoadedJob
from .text import format_elapsed, format_entries, format_paragraph, format_table

MAX_EXPLAINED_INCIDENTS = 3
"""Incidents that `why` explains."""
ENDED = (JobPhase.COMPLETE, JobPhase.FAILED)
BAD_IF_TRUE = (JobCondition.FAILED, JobCondition.INVALID_TEMPLATE, JobCondition.ACTION_BLOCKED, JobCondition.DEGRADED)
BAD_IF_FALSE = (JobCondition.PREFLIGHT, JobCondition.PATHS_IN_FORCE, JobCondition.METRICS_AVAILABLE)


def format_overview(jobs: Sequence[LoadedJob], *, namespaces: bool = False) -> str:
    """Format a table of jobs."""
    headers = ["NAME", "PHASE", "STEP", "DONE", "LEFT", "WORKERS", "SLOWDOWN", "GOODPUT", "MODE", "WHY"]
    rows = [
        [
            loaded.job.name,
            loaded.status.phase or "–",
            "–" if loaded.status.step is None else str(loaded.status.step),
            loaded.status.progress or "",
            loaded.status.remaining or "",
            loaded.status.workers.summary or "–",
            "" if loaded.status.slowdown is None else f"{loaded.status.slowdown:.2f}",
            "" if loaded.status.goodput is None else f"{loaded.status.goodput:.0%}",
            loaded.status.sync_mode or "",
            _choose_headline(loaded),
        ]
        for loaded in jobs
    ]
    if namespaces:
        headers = ["NAMESPACE", *headers]
        rows = [[loaded.job.namespace, *row] for loaded, row in zip(jobs, rows, strict=True)]
    return format_table(headers, rows)


def format_status(loaded: LoadedJob, incidents: Sequence[LoadedIncident], now: float) -> str:
    """Format the state of one job. `incidents` are its own, the newest first."""
    job, status = loaded.job, loaded.status
    title = f"{job.name} in {job.namespace}: {status.phase or 'not observed yet'}{_format_phase_duration(loaded, now)}"
    return "\n".join(
        [
            title,
            format_entries(
                [
                    *_iterate_statistics(loaded),
                    *_iterate_problems(loaded, incidents),
                    ("next", _describe_next(loaded, incidents)),
                ]
            ),
        ]
    )


def explain_job(loaded: LoadedJob, incidents: Sequence[LoadedIncident], now: float, pods: Sequence[str] = ()) -> str:
    """Explain why a job is slow, or does not train: what the operator has found, considered, and done.

    `pods` are the descriptions of pods that do not run.
    """
    job, status = loaded.job, loaded.status
    parts = [
        f"{job.name} in {job.namespace} is {status.phase or 'not observed yet'}{_format_phase_duration(loaded, now)}."
    ]
    parts += [format_paragraph(sentence) for sentence in _iterate_reasons(loaded)]
    parts += pods
    parts += [words.summarize_incident(incident, now) for incident in incidents[:MAX_EXPLAINED_INCIDENTS]]
    if len(incidents) > MAX_EXPLAINED_INCIDENTS:
        parts.append(f"{len(incidents) - MAX_EXPLAINED_INCIDENTS} older: kubectl pacekeeper incidents {job.name}")
    if len(parts) == 1:
        parts.append("No problem is known.")
    parts.append(format_paragraph(f"Next: {_describe_next(loaded, incidents)}."))
    return "\n\n".join(parts)


def describe_end(loaded: LoadedJob) -> str:
    """Return what is left to do for a job that has ended."""
    return "nothing: it completed" if loaded.status.phase is JobPhase.COMPLETE else f"nothing: {TO_DO_AFTER_FAILURE}"


def explain_unobserved(loaded: LoadedJob) -> str:
    """Return the remedy if no operator has observed the job."""
    return (
        f"no operator has observed generation {loaded.job.generation} of its spec yet. If that lasts, check that it "
        f"runs and watches namespace {loaded.job.namespace}: kubectl get pods -A -l app.kubernetes.io/name=pacekeeper"
    )


def _iterate_statistics(loaded: LoadedJob) -> Iterator[tuple[str, str]]:
    status, spec = loaded.status, loaded.job.spec
    if status.step is not None:
        checkpoint = (
            f"; the newest checkpoint is of step {status.last_checkpoint_step}" if status.last_checkpoint_step else ""
        )
        total = f" of {status.total_steps} ({status.progress})" if status.total_steps else ""
        remaining = f", about {status.remaining} left at its pace" if status.remaining else ""
        yield "step", f"{status.step}{total}{remaining}{checkpoint}"
    if (point := status.resumed_from) is not None and point.round > 1:
        source = f" ({point.source})" if point.source else ""
        yield "resumed", f"round {point.round} from step {point.step}{source}"
    if status.workers.desired:
        spares = f", {status.workers.spare} of {spec.spares} as spares" if spec.spares else ""
        round_ = f"; round {status.round}" if status.round else ""
        yield "workers", f"{status.workers.ready} of {status.workers.desired} train{spares}{round_}"
    if status.sync_mode is not None:
        source = (
            "chosen by the operator"
            if spec.sync_mode is RequestedSyncMode.AUTO
            else f"spec.syncMode is {spec.sync_mode}"
        )
        yield "mode", f"{status.sync_mode} ({source})"
    if status.slowdown is not None:
        bottleneck = f": {status.bottleneck} delays the others" if status.bottleneck else ""
        yield "slowdown", f"{status.slowdown:.2f}{bottleneck}"
    if status.goodput is not None:
        yield "goodput", f"{status.goodput:.0%} of the time went into steps that were not lost"
    if status.restarts:
        yield "restarts", f"{status.restarts}; {spec.remediation.max_restarts} within the window are allowed"
    if spec.remediation.mode is RemediationMode.RECOMMEND and status.phase not in ENDED:
        yield "remedies", f"only recommended: spec.remediation.mode; kubectl pacekeeper resume {loaded.job.name}"


def _iterate_problems(loaded: LoadedJob, incidents: Sequence[LoadedIncident]) -> Iterator[tuple[str, str]]:
    for condition in _find_bad_conditions(loaded):
        yield condition.type, _format_condition(condition)
    for incident in incidents:
        if incident.is_open:
            yield "incident", f"{incident.name}: {incident.spec.message}"


def _iterate_reasons(loaded: LoadedJob) -> Iterator[str]:
    running = loaded.find_condition(JobCondition.RUNNING)
    if running is not None and running.status != "True" and loaded.status.phase is not JobPhase.COMPLETE:
        yield f"It does not train: {_format_condition(running)}."
    for condition in _find_bad_conditions(loaded):
        yield (
            f"{condition.type}{'' if condition.status == 'True' else f' is {condition.status}'}: "
            f"{_format_condition(condition)}."
        )


def _describe_next(loaded: LoadedJob, incidents: Sequence[LoadedIncident]) -> str:
    """Return what the operator does, or waits for."""
    if loaded.is_unobserved:
        return explain_unobserved(loaded)
    if loaded.status.phase is JobPhase.FAILED:
        return describe_end(loaded)
    stalled = loaded.find_true_conditions(JobCondition.STALLED)
    if stalled:
        return f"nothing, until the cause is fixed: {_format_condition(stalled[0])}"
    open_incident = next((incident for incident in incidents if incident.is_open), None)
    if open_incident is not None:
        return words.describe_progress(open_incident)
    reconciling = loaded.find_true_conditions(JobCondition.RECONCILING)
    if reconciling:
        return f"it waits: {_format_condition(reconciling[0])}"
    by_phase = {JobPhase.COMPLETE: "nothing: it completed", JobPhase.SUSPENDED: "nothing, until spec.suspend is false"}
    return by_phase.get(loaded.status.phase or JobPhase.PENDING, "nothing is to be done")


def _find_bad_conditions(loaded: LoadedJob) -> list[ConditionStatus]:
    """Return the conditions that matter to a person. False conditions do not matter for a job that has ended."""
    conditions = [loaded.find_condition(type_) for type_ in BAD_IF_FALSE if loaded.status.phase not in ENDED]
    return [
        *loaded.find_true_conditions(*BAD_IF_TRUE),
        *(condition for condition in conditions if condition is not None and condition.status == "False"),
    ]


def _choose_headline(loaded: LoadedJob) -> str:
    if loaded.is_unobserved:
        return "NotObservedYet"
    conditions = [
        *loaded.find_true_conditions(JobCondition.STALLED, JobCondition.RECONCILING),
        *_find_bad_conditions(loaded),
    ]
    return next((condition.reason for condition in conditions if condition.type != JobCondition.METRICS_AVAILABLE), "")


def _format_condition(condition: ConditionStatus) -> str:
    return f"{condition.reason}: {condition.message}" if condition.message else condition.reason


def _format_phase_duration(loaded: LoadedJob, now: float) -> str:
    """Return how long the job has been in its phase, if a condition has the time."""
    condition = next(
        (candidate for candidate in loaded.status.conditions if candidate.type == loaded.status.phase), None
    )
    if condition is None or condition.status != "True" or condition.last_transition_time is None:
        return ""
    return f" for {format_elapsed(max(0.0, now - condition.last_transition_time))}"

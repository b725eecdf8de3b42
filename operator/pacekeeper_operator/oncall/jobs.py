"""Jobs in words: how they are, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..api import JobCondition, ConditionStatus, JobPhase, RemediationMode, RequestedSyncMode
from . import incidents as words
from .seen import LoadedIncident, LoadedJob
from .text import format_elapsed, format_entries, format_paragraph, format_table

MAX_EXPLAINED_INCIDENTS = 3
"""Incidents that `why` tells."""
ENDED = (JobPhase.COMPLETE, JobPhase.FAILED)
BAD_IF_TRUE = (JobCondition.FAILED, JobCondition.INVALID_TEMPLATE, JobCondition.HINDERED, JobCondition.DEGRADED)
BAD_IF_FALSE = (JobCondition.PREFLIGHT, JobCondition.PATHS_IN_FORCE, JobCondition.METRICS_AVAILABLE)


AFTER_FAILURE = (
    "nothing: a job that has failed does not begin again, and its template no longer counts. Mend the cause, delete "
    "the job, and apply it again: it goes on from its newest checkpoint, if it has one"
)


def format_overview(jobs: Sequence[LoadedJob], *, namespaces: bool = False) -> str:
    """A table of them."""
    heads = ["NAME", "PHASE", "STEP", "DONE", "LEFT", "WORKERS", "SLOWDOWN", "GOODPUT", "MODE", "WHY"]
    rows = [
        [
            seen.job.name,
            seen.status.phase or "–",
            "–" if seen.status.step is None else str(seen.status.step),
            seen.status.progress or "",
            seen.status.remaining or "",
            seen.status.workers.summary or "–",
            "" if seen.status.slowdown is None else f"{seen.status.slowdown:.2f}",
            "" if seen.status.goodput is None else f"{seen.status.goodput:.0%}",
            seen.status.sync_mode or "",
            _choose_headline(seen),
        ]
        for seen in jobs
    ]
    if namespaces:
        heads = ["NAMESPACE", *heads]
        rows = [[seen.job.namespace, *row] for seen, row in zip(jobs, rows, strict=True)]
    return format_table(heads, rows)


def format_status(seen: LoadedJob, incidents: Sequence[LoadedIncident], now: float) -> str:
    """How one job is. incidents: its own, the newest first."""
    job, told = seen.job, seen.status
    title = f"{job.name} in {job.namespace}: {told.phase or 'not looked at yet'}{_format_phase_duration(seen, now)}"
    return "\n".join([title, format_entries([*_iterate_statistics(seen), *_iterate_problems(seen, incidents), ("next", _describe_next(seen, incidents))])])


def explain_job(seen: LoadedJob, incidents: Sequence[LoadedIncident], now: float, pods: Sequence[str] = ()) -> str:
    """Why it is slow, or does not train: what the operator knows, has considered, and has done.

    pods: what the events of pods that do not run say.
    """
    job, told = seen.job, seen.status
    parts = [f"{job.name} in {job.namespace} is {told.phase or 'not looked at yet'}{_format_phase_duration(seen, now)}."]
    parts += [format_paragraph(sentence) for sentence in _iterate_reasons(seen)]
    parts += pods
    parts += [words.summarize_incident(one, now) for one in incidents[:MAX_EXPLAINED_INCIDENTS]]
    if len(incidents) > MAX_EXPLAINED_INCIDENTS:
        parts.append(f"{len(incidents) - MAX_EXPLAINED_INCIDENTS} older: kubectl pacekeeper incidents {job.name}")
    if len(parts) == 1:
        parts.append("Nothing is known that would hold it back.")
    parts.append(format_paragraph(f"Next: {_describe_next(seen, incidents)}."))
    return "\n\n".join(parts)


def after_end(seen: LoadedJob) -> str:
    """Return what is left to do for a job that has ended."""
    return "nothing: it has ended well" if seen.status.phase is JobPhase.COMPLETE else AFTER_FAILURE


def explain_unobserved(seen: LoadedJob) -> str:
    """What to do where no operator answers."""
    return (
        f"no operator has looked at generation {seen.job.generation} of its spec yet. If that lasts: does it run, and "
        f"may it see namespace {seen.job.namespace}? kubectl get pods -A -l app.kubernetes.io/name=pacekeeper"
    )


def _iterate_statistics(seen: LoadedJob) -> Iterator[tuple[str, str]]:
    told, spec = seen.status, seen.job.spec
    if told.step is not None:
        kept = f"; the newest checkpoint is of step {told.last_checkpoint_step}" if told.last_checkpoint_step else ""
        of = f" of {told.total_steps} ({told.progress})" if told.total_steps else ""
        left = f", about {told.remaining} left at its pace" if told.remaining else ""
        yield "step", f"{told.step}{of}{left}{kept}"
    if told.workers.desired:
        spares = f", {told.workers.spare} of {spec.spares} as spares" if spec.spares else ""
        round_ = f"; round {told.round}" if told.round else ""
        yield "workers", f"{told.workers.ready} of {told.workers.desired} train{spares}{round_}"
    if told.sync_mode is not None:
        wanted = "chosen by the operator" if spec.sync_mode is RequestedSyncMode.AUTO else f"spec.syncMode is {spec.sync_mode}"
        yield "mode", f"{told.sync_mode} ({wanted})"
    if told.slowdown is not None:
        held = f": {told.bottleneck} holds the others up" if told.bottleneck else ""
        yield "slowdown", f"{told.slowdown:.2f}{held}"
    if told.goodput is not None:
        yield "goodput", f"{told.goodput:.0%} of the time went into steps that lasted"
    if told.restarts:
        yield "restarts", f"{told.restarts}; {spec.remediation.max_restarts} within the window are allowed"
    if spec.remediation.mode is RemediationMode.RECOMMEND and told.phase not in ENDED:
        yield "remedies", f"only recommended: spec.remediation.mode; kubectl pacekeeper resume {seen.job.name}"


def _iterate_problems(seen: LoadedJob, incidents: Sequence[LoadedIncident]) -> Iterator[tuple[str, str]]:
    for condition in _find_bad_conditions(seen):
        yield condition.type, _format_condition(condition)
    for one in incidents:
        if one.is_open:
            yield "incident", f"{one.name}: {one.spec.message}"


def _iterate_reasons(seen: LoadedJob) -> Iterator[str]:
    running = seen.find_condition(JobCondition.RUNNING)
    if running is not None and running.status != "True" and seen.status.phase is not JobPhase.COMPLETE:
        yield f"It does not train: {_format_condition(running)}."
    for condition in _find_bad_conditions(seen):
        yield f"{condition.type}{'' if condition.status == 'True' else f' is {condition.status}'}: {_format_condition(condition)}."


def _describe_next(seen: LoadedJob, incidents: Sequence[LoadedIncident]) -> str:
    """What the operator does, or waits for."""
    if seen.is_unobserved:
        return explain_unobserved(seen)
    if seen.status.phase is JobPhase.FAILED:
        return after_end(seen)
    stalled = seen.find_true_conditions(JobCondition.STALLED)
    if stalled:
        return f"nothing, until somebody changes something: {_format_condition(stalled[0])}"
    waiting = next((one for one in incidents if one.is_open), None)
    if waiting is not None:
        return words.describe_progress(waiting)
    reconciling = seen.find_true_conditions(JobCondition.RECONCILING)
    if reconciling:
        return f"it waits: {_format_condition(reconciling[0])}"
    ends = {JobPhase.COMPLETE: "nothing: it has ended well", JobPhase.SUSPENDED: "nothing, until spec.suspend is false"}
    return ends.get(seen.status.phase or JobPhase.PENDING, "nothing is to be done")


def _find_bad_conditions(seen: LoadedJob) -> list[ConditionStatus]:
    """The conditions that matter to a person. What is not known or missing matters to no job that has ended."""
    found = [seen.find_condition(type_) for type_ in BAD_IF_FALSE if seen.status.phase not in ENDED]
    return [*seen.find_true_conditions(*BAD_IF_TRUE), *(one for one in found if one is not None and one.status == "False")]


def _choose_headline(seen: LoadedJob) -> str:
    if seen.is_unobserved:
        return "NotSeenYet"
    shown = [*seen.find_true_conditions(JobCondition.STALLED, JobCondition.RECONCILING), *_find_bad_conditions(seen)]
    return next((one.reason for one in shown if one.type != JobCondition.METRICS_AVAILABLE), "")


def _format_condition(condition: ConditionStatus) -> str:
    return f"{condition.reason}: {condition.message}" if condition.message else condition.reason


def _format_phase_duration(seen: LoadedJob, now: float) -> str:
    """For how long it has been in its phase, where a condition says that."""
    condition = next((one for one in seen.status.conditions if one.type == seen.status.phase), None)
    if condition is None or condition.status != "True":
        return ""
    return f" for {format_elapsed(max(0.0, now - condition.last_transition_time))}"

"""When a job restarts, ends, waits, and is deleted: fields that the kinds have in common."""

from __future__ import annotations

from typing import Any

from ..api.formats import format_duration
from ..api.names import DEFAULT_MANAGER, LABEL_QUEUE
from ..api.training_job import CleanPodPolicy
from .draft import ConversionRefused, Draft
from .fields import SourceFields, check_type
from .metadata import has_queue

MULTIKUEUE_MANAGER = "kueue.x-k8s.io/multikueue"
MAX_RESTARTS, MAX_EXIT_CODES = 1000, 16
"""The CRD's limits of spec.remediation."""
MIN_SCHEDULING_SECONDS, MAX_SCHEDULING_SECONDS = 10, 168 * 3600
"""The CRD's limits of spec.schedulingTimeout."""


def convert_restarts(draft: Draft, number: int | None, field: str) -> None:
    """Set how often faults may restart the job, if the source limits it."""
    if number is None:
        return
    if number == 0:
        draft.note_changed(
            "0: the first fault ended the job; now Pacekeeper repairs it, up to 10 times an hour. Set "
            "spec.remediation.maxRestarts: 0 if it is to fail",
            field,
        )
        return
    draft.set_spec("remediation.maxRestarts", min(number, MAX_RESTARTS), field)
    draft.note_changed(
        "counts the restarts within spec.remediation.restartWindow (1h), not those of the whole job", field
    )


def convert_deadlines(draft: Draft, fields: SourceFields) -> None:
    """Take activeDeadlineSeconds and ttlSecondsAfterFinished."""
    for name, minimum in (("activeDeadlineSeconds", 1), ("ttlSecondsAfterFinished", 0)):
        if (seconds := fields.take_number(name, minimum)) is not None:
            draft.set_spec(f"runPolicy.{name}", seconds, fields.get_path(name))


def convert_suspension(draft: Draft, fields: SourceFields) -> None:
    """Take `suspend`. In a queue, it is Kueue's own field in other kinds, and the user's in a TrainingJob."""
    path = fields.get_path("suspend")
    suspended = fields.take("suspend")
    if suspended is None:
        return
    if check_type(suspended, bool, path) and has_queue(draft):
        draft.note_changed(
            f"left out: the label {LABEL_QUEUE} holds the job until it is admitted; spec.suspend would not end",
            path,
        )
    elif suspended:
        draft.set_spec("suspend", True, path)
    else:
        draft.note_taken("left out, which means false", path)


def convert_manager(draft: Draft, fields: SourceFields) -> None:
    """Take `managedBy`."""
    manager, path = fields.take_text("managedBy"), fields.get_path("managedBy")
    if manager == MULTIKUEUE_MANAGER:
        draft.set_spec("managedBy", manager, path)
    elif manager == DEFAULT_MANAGER:
        draft.note_taken("left out, which means the same", path)
    elif manager:
        draft.note_changed(f"left out: {DEFAULT_MANAGER} runs the job, not {manager}", path)


def convert_clean_pod_policy(draft: Draft, fields: SourceFields) -> None:
    policy, path = fields.take_text("cleanPodPolicy"), fields.get_path("cleanPodPolicy")
    if policy and policy not in list(CleanPodPolicy):
        raise ConversionRefused(f"{path}: {policy!r} must be one of {', '.join(CleanPodPolicy)}")
    if policy:
        draft.set_spec("runPolicy.cleanPodPolicy", policy, path)


def convert_scheduling_timeout(draft: Draft, fields: SourceFields) -> None:
    """Take scheduleTimeoutSeconds of a PodGroup."""
    seconds, path = fields.take_number("scheduleTimeoutSeconds"), fields.get_path("scheduleTimeoutSeconds")
    if not seconds:
        return
    limited = min(max(seconds, MIN_SCHEDULING_SECONDS), MAX_SCHEDULING_SECONDS)
    draft.set_spec("schedulingTimeout", format_duration(limited), path)
    if limited != seconds:
        draft.note_changed(f"{seconds} s is {format_duration(limited)}, the nearest that is allowed", path)


def convert_restart_policy(draft: Draft, policy: str, path: str) -> None:
    """Note what becomes of a restartPolicy of the source's controller."""
    if policy == "ExitCode":
        draft.note_no_counterpart(
            "codes from 1 to 127 ended the job; now all codes restart the ranks. Name up to 16 that end it in "
            "spec.remediation.exitCodes.doNotRetry",
            path,
        )
    elif policy == "Never":
        draft.note_changed(
            "Never: a fault ended the job; now Pacekeeper repairs it. Set spec.remediation.maxRestarts: 0 against that",
            path,
        )
    elif policy:
        draft.note_changed(f"{policy}: Pacekeeper restarts ranks in place, and replaces lost workers", path)


def convert_failure_rules(draft: Draft, rules: list[Any], path: str) -> None:
    """Take the rules of a Job's podFailurePolicy: exit codes that end the job. Others have no counterpart."""
    codes: list[int] = []
    for i, rule in enumerate(rules):
        place = f"{path}[{i}]"
        fields = check_type(rule, dict, place)
        exit_codes = check_type(fields.get("onExitCodes") or {}, dict, f"{place}.onExitCodes")
        values = check_type(exit_codes.get("values") or [], list, f"{place}.onExitCodes.values")
        if (
            fields.get("action") == "FailJob"
            and exit_codes.get("operator") == "In"
            and not fields.get("onPodConditions")
        ):
            codes += [check_type(value, int, f"{place}.onExitCodes.values") for value in values]
            draft.note_taken("spec.remediation.exitCodes.doNotRetry", place)
        elif fields.get("action") == "Ignore" and fields.get("onPodConditions"):
            draft.note_taken("not needed: evictions and preemptions never count as restarts", place)
        else:
            draft.note_no_counterpart(
                f"there is no rule for {fields.get('action')} like this; see spec.remediation.exitCodes", place
            )
    codes = sorted(set(codes))
    if len(codes) > MAX_EXIT_CODES:
        draft.note_changed(f"only the first {MAX_EXIT_CODES} exit codes, which is the limit", path)
    if codes:
        draft.spec.setdefault("remediation", {})["exitCodes"] = {"doNotRetry": codes[:MAX_EXIT_CODES]}

"""Indexed Job (batch/v1): a pod per index, all of which have ranks of one job."""

from __future__ import annotations

from .draft import ConversionRefused, Draft
from .fields import SourceFields
from .metadata import convert_metadata
from .pod_templates import TemplateSource, convert_template
from .run_policies import (
    convert_deadlines,
    convert_failure_rules,
    convert_manager,
    convert_restarts,
    convert_suspension,
)

INDEXED = "Indexed"
JOB_VARIABLES = ("JOB_COMPLETION_INDEX",)


def convert_indexed_job(draft: Draft, source: SourceFields, container: str = "") -> None:
    """Convert an Indexed Job. `container` is the one with the ranks; "": see `choose_trainer`.

    Raises ConversionRefused.
    """
    convert_metadata(draft, source.take_fields("metadata"))
    spec = source.take_fields("spec")
    convert_suspension(draft, spec)
    convert_manager(draft, spec)
    convert_deadlines(draft, spec)
    convert_restarts(draft, spec.take_number("backoffLimit"), spec.get_path("backoffLimit"))
    draft.spec["replicas"], template = take_pods(draft, spec, default_mode="NonIndexed")
    path = spec.get_path("template")
    convert_template(
        draft,
        template,
        TemplateSource(path, container=container, variables=JOB_VARIABLES, host_names=(f"{draft.name}-",)),
    )
    spec.note_rest(draft)


def take_pods(draft: Draft, spec: SourceFields, default_mode: str) -> tuple[int, object]:
    """Take the fields of a Job that say which pods it has and when it ends; return their number and template.

    Raises ConversionRefused if they are no ranks of one job.
    """
    parallelism, completions = spec.take_number("parallelism", 1), spec.take_number("completions", 1)
    written_mode = spec.take_text("completionMode")
    mode = written_mode or default_mode
    pods = min(parallelism or 1, completions or parallelism or 1)
    if mode != INDEXED and pods > 1:
        raise ConversionRefused(
            f"{spec.get_path('completionMode')}: pods of a job that is not {INDEXED} have no ranks; set "
            f"completionMode: {INDEXED} if they are one training job, and leave the Job as it is otherwise"
        )
    if completions is not None and completions > pods:
        raise ConversionRefused(
            f"{spec.get_path('completions')}: {completions} exceeds parallelism: {pods}, but all ranks train at the "
            "same time; set both to the number of pods, or leave the Job as it is if its pods are independent"
        )
    for name, value in (("parallelism", parallelism), ("completions", completions)):
        if value is not None:
            draft.note_taken(f"spec.replicas: {pods}", spec.get_path(name))
    if written_mode:
        draft.note_taken("not needed: workers have ranks", spec.get_path("completionMode"))
    policy = spec.take_fields("podFailurePolicy")
    convert_failure_rules(draft, policy.take_list("rules"), policy.get_path("rules"))
    policy.note_rest(draft)
    for name, text in (
        ("successPolicy", "the job is complete when all its ranks have finished"),
        ("backoffLimitPerIndex", "faults are counted for the whole job, by spec.remediation.maxRestarts"),
        ("maxFailedIndexes", "the job fails as a whole"),
    ):
        if spec.take(name) is not None:
            draft.note_no_counterpart(text, spec.get_path(name))
    unneeded = [name for name in ("podReplacementPolicy", "manualSelector", "selector") if spec.take(name) is not None]
    if unneeded:
        draft.note_changed("left out: the operator knows its own pods", *map(spec.get_path, unneeded))
    if (template := spec.take("template")) is None:
        raise ConversionRefused(f"{spec.get_path('template')}: is missing; give a pod template")
    return pods, template

"""JobSet (jobset.x-k8s.io/v1alpha2): groups of Jobs, of which one kind has the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .commands import LaunchKind, read_command
from .draft import ConversionRefused, Draft
from .fields import SourceFields, check_type
from .indexed_jobs import INDEXED, JOB_VARIABLES, take_pods
from .merging import merge_templates
from .metadata import convert_metadata
from .pod_templates import TemplateSource, check_template, convert_template
from .ranks import NO_RANKS_FIELD, RanksField, count_gpus
from .run_policies import convert_deadlines, convert_manager, convert_restarts, convert_suspension

_PARAMETER_SERVERS = frozenset({"ps", "parameter-server", "parameter-servers", "param-server", "paramserver"})


@dataclass(frozen=True)
class ReplicatedJob:
    """A replicated job whose fields were taken, but for its template."""

    name: str
    path: str
    pods: int
    template: object
    template_path: str


@dataclass(frozen=True)
class JobSetSource:
    """What is known about a JobSet in addition to its fields."""

    ranks_job: str = ""  # the replicated job with the ranks; "": see `_choose_ranked_jobs`
    container: str = ""  # the container with the ranks; "": see `choose_trainer`
    ranks: RanksField = NO_RANKS_FIELD
    variables: tuple[str, ...] = JOB_VARIABLES
    pods: int | None = None  # of the replicated job with the ranks; None: as it says


def convert_jobset(draft: Draft, source: SourceFields, container: str = "") -> None:
    """Convert a JobSet. `container` is the one with the ranks; "": see `choose_trainer`.

    Raises ConversionRefused.
    """
    convert_metadata(draft, source.take_fields("metadata"))
    convert_jobset_spec(draft, source.take_fields("spec"), JobSetSource(container=container))


def convert_jobset_spec(draft: Draft, spec: SourceFields, source: JobSetSource) -> None:
    """Convert the spec of a JobSet, which may be that of a training runtime."""
    replicated_jobs = _take_replicated_jobs(draft, spec, source)
    ranked = _choose_ranked_jobs(replicated_jobs, source)
    for job in replicated_jobs:
        if job not in ranked:
            draft.note_no_counterpart(
                "has no ranks, and is left out; if the job needs it, apply it as a Job (and wait for its end if it "
                "prepares data)",
                job.path,
            )
    draft.spec["replicas"] = sum(job.pods for job in ranked)
    draft.note_taken(
        f"spec.replicas: {draft.spec['replicas']}",
        *(f"{job.path}.{field}" for job in ranked for field in ("name", "replicas")),
    )
    _convert_policies(draft, spec)
    templates = {job.template_path: job.template for job in ranked}
    host_names = tuple(f"{draft.name}-{job.name}-" for job in ranked)
    template_source = TemplateSource(
        ranked[-1].template_path, source.ranks, source.container, source.variables, host_names
    )
    convert_template(draft, merge_templates(draft, templates, template_source), template_source)
    spec.note_rest(draft)


def _take_replicated_jobs(draft: Draft, spec: SourceFields, source: JobSetSource) -> list[ReplicatedJob]:
    items, path = spec.take_list("replicatedJobs"), spec.get_path("replicatedJobs")
    if not items:
        raise ConversionRefused(f"{path}: is missing; give the replicated job whose pods train")
    result = []
    for i, item in enumerate(items):
        name = check_type(check_type(item, dict, f"{path}[{i}]").get("name"), str, f"{path}[{i}].name")
        if name in _PARAMETER_SERVERS:
            raise ConversionRefused(
                f"{path}[{name}]: a TrainingJob has only workers with ranks, and no parameter servers; use "
                "DistributedDataParallel or FSDP, or leave the JobSet as it is"
            )
        result.append(_take_replicated_job(draft, SourceFields(item, f"{path}[{name}]"), name, source))
    return result


def _take_replicated_job(draft: Draft, fields: SourceFields, name: str, source: JobSetSource) -> ReplicatedJob:
    fields.take("name")
    replicas = fields.take_number("replicas", 0)
    template = fields.take_fields("template")
    metadata = template.take("metadata")
    if metadata:
        draft.note_no_counterpart(
            "belongs to the Jobs; labels and annotations of pods are those of spec.template.metadata",
            template.get_path("metadata"),
        )
    job = template.take_fields("spec")
    if (limit := job.take_number("backoffLimit")) is not None:
        draft.note_taken(f"{limit}: spec.failurePolicy counts restarts of the whole job", job.get_path("backoffLimit"))
    for field in ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend", "managedBy"):
        if (value := job.take(field)) is not None:
            draft.note_no_counterpart(
                f"{value}: a TrainingJob has this for the whole job, in spec or spec.runPolicy", job.get_path(field)
            )
    pods, pod_template = take_pods(draft, job, default_mode=INDEXED)
    pods *= 1 if replicas is None else replicas
    if source.pods is not None and name == source.ranks_job:
        pods = source.pods
    if fields.take("groupName") is not None:
        draft.note_no_counterpart("a TrainingJob has one group", fields.get_path("groupName"))
    if fields.take("dependsOn") is not None:
        draft.note_no_counterpart(
            "workers start at the same time; apply the TrainingJob when what it depends on is ready",
            fields.get_path("dependsOn"),
        )
    job.note_rest(draft)
    template.note_rest(draft)
    fields.note_rest(draft)
    return ReplicatedJob(name, fields.path, pods, pod_template, job.get_path("template"))


def _choose_ranked_jobs(jobs: Sequence[ReplicatedJob], source: JobSetSource) -> list[ReplicatedJob]:
    """Return the replicated jobs whose pods have ranks.

    These are those that start torchrun or accelerate; else those with GPUs; else those that start Python; else all.
    """
    running = [job for job in jobs if job.pods and source.ranks_job in ("", job.name)]
    if not running:
        raise ConversionRefused(
            f"{jobs[0].path}.replicas: no replicated job with ranks has replicas; set those of the one that trains"
        )
    if source.ranks_job:
        return running
    for launchers in ((LaunchKind.TORCHRUN, LaunchKind.ACCELERATE), (), (LaunchKind.PYTHON,)):
        found = [job for job in running if _starts_ranks(job, launchers)]
        if found:
            return found
    return running


def _starts_ranks(job: ReplicatedJob, launchers: Sequence[LaunchKind]) -> bool:
    """Return whether a container starts one of the launchers, or, without launchers, has GPUs."""
    containers = check_template(job.template, job.template_path)["spec"]["containers"]
    return any(
        read_command(container).launcher in launchers if launchers else count_gpus(container)
        for container in containers
    )


def _convert_policies(draft: Draft, spec: SourceFields) -> None:
    convert_suspension(draft, spec)
    convert_manager(draft, spec)
    convert_deadlines(draft, spec)
    failure = spec.take_fields("failurePolicy")
    convert_restarts(draft, failure.take_number("maxRestarts"), failure.get_path("maxRestarts"))
    if failure.take("restartStrategy") is not None:
        draft.note_changed("left out: Pacekeeper restarts ranks in place", failure.get_path("restartStrategy"))
    if failure.take("rules") is not None:
        draft.note_no_counterpart(
            "there are no rules by cause; exit codes are in spec.remediation.exitCodes", failure.get_path("rules")
        )
    failure.note_rest(draft)
    success = spec.take_fields("successPolicy")
    operator = success.take_text("operator")
    if operator == "Any":
        draft.note_no_counterpart("the job is complete when all its ranks have finished", success.path)
    else:
        if operator:
            draft.note_taken(
                "not needed: the job is complete when all ranks have finished", success.get_path("operator")
            )
        if success.take("targetReplicatedJobs") is not None:
            draft.note_changed("left out: only the ranks count", success.get_path("targetReplicatedJobs"))
        success.note_rest(draft)
    for name, text in (
        ("network", "left out: workers reach each other by address, without a headless Service"),
        ("coordinator", "left out: the ranks choose their own coordinator"),
        ("startupPolicy", "left out: all workers start at the same time"),
    ):
        if spec.take(name) is not None:
            draft.note_changed(text, spec.get_path(name))

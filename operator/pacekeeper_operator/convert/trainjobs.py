"""TrainJob (trainer.kubeflow.org/v1alpha1) with its runtime: a template of a JobSet, and what the job changes in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..api.names import Object
from .draft import ConversionRefused, Draft
from .fields import SourceFields, check_type, is_empty
from .jobsets import JobSetSource, convert_jobset_spec
from .metadata import convert_labels, convert_metadata
from .ranks import RanksField
from .run_policies import (
    convert_deadlines,
    convert_manager,
    convert_restarts,
    convert_scheduling_timeout,
    convert_suspension,
)
from .runtime_changes import NODE, RUNTIME_FIELD_PREFIX, apply_changes, choose_node_container

CLUSTER_RUNTIME, RUNTIME = "ClusterTrainingRuntime", "TrainingRuntime"
TRAINER_VARIABLES = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "JOB_COMPLETION_INDEX",
)
_ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_OTHER_POLICIES = ("mpi", "flux", "jax", "xgboost", "openMPI")


def find_runtime_reference(body: Object) -> tuple[str, str]:
    """Return kind and name of the runtime of a TrainJob.

    Raises ConversionRefused.
    """
    spec = SourceFields(body, "").take_fields("spec")
    reference = spec.take_fields("runtimeRef")
    kind, name = reference.take_text("kind") or CLUSTER_RUNTIME, reference.take_text("name")
    if not name or kind not in (CLUSTER_RUNTIME, RUNTIME):
        raise ConversionRefused(f"{reference.path}: must name a {CLUSTER_RUNTIME} or a {RUNTIME}")
    return kind, name


def convert_trainjob(draft: Draft, source: SourceFields, runtime: Object | None, container: str = "") -> None:
    """Convert a TrainJob with its runtime. `container` is the one with the ranks; "": `node`.

    Raises ConversionRefused.
    """
    convert_metadata(draft, source.take_fields("metadata"))
    spec = source.take_fields("spec")
    reference = spec.take_fields("runtimeRef")
    if runtime is None:
        raise ConversionRefused(f"{reference.path}: the runtime that it names is missing; give its manifest by -f")
    draft.note_taken("its template is merged with the job's own fields", reference.path)
    runtime_spec = SourceFields(runtime.get("spec") or {}, f"{RUNTIME_FIELD_PREFIX}.spec")
    template = runtime_spec.take_fields("template")
    template_metadata = template.take_fields("metadata")
    for kind in ("labels", "annotations"):
        convert_labels(draft, template_metadata.take_object(kind), kind, template_metadata.get_path(kind))
        convert_labels(draft, spec.take_object(kind), kind, spec.get_path(kind))
    template_metadata.note_rest(draft)
    nodes, ranks = _take_ml_policy(draft, runtime_spec.take_fields("mlPolicy"))
    jobset_spec = check_type(template.take("spec") or {}, dict, template.get_path("spec"))
    template.note_rest(draft)
    jobs = check_type(jobset_spec.get("replicatedJobs") or [], list, f"{template.get_path('spec')}.replicatedJobs")
    node_job = _find_node_job(jobs, f"{template.get_path('spec')}.replicatedJobs")
    trainer = spec.take_fields("trainer")
    node_count = trainer.take_number("numNodes", 1)
    if node_count is not None:
        draft.note_taken(f"spec.replicas: {node_count}", trainer.get_path("numNodes"))
    if (processes := trainer.take("numProcPerNode")) is not None:
        if ranks.value and not ranks.is_default:
            draft.note_changed("the TrainJob's numProcPerNode comes first", ranks.path)
        ranks = replace(ranks, path=trainer.get_path("numProcPerNode"), value=processes, is_default=False)
    trainer_container = container or choose_node_container(node_job)
    apply_changes(draft, spec, trainer, jobs, str(node_job["name"]), trainer_container)
    pods = node_count or nodes
    if pods is None and draft.spec.get("minReplicas") is not None:
        raise ConversionRefused(
            f"{trainer.get_path('numNodes')}: an elastic job has no fixed size without it; set it to the number of "
            "workers that the job is to have"
        )
    _convert_group_policy(draft, runtime_spec.take_fields("podGroupPolicy"))
    if spec.take("initializer") is not None:
        draft.note_no_counterpart(
            "a TrainingJob loads no data set or model; run the initializer as a Job first, with the same claim",
            "spec.initializer",
        )
    convert_suspension(draft, spec)
    convert_manager(draft, spec)
    convert_deadlines(draft, spec)
    spec.note_rest(draft)
    jobset_source = JobSetSource(str(node_job["name"]), trainer_container, ranks, TRAINER_VARIABLES, pods)
    convert_jobset_spec(draft, SourceFields(jobset_spec, template.get_path("spec")), jobset_source)
    if draft.spec.get("minReplicas", 0) > draft.spec["replicas"]:
        raise ConversionRefused(
            f"{RUNTIME_FIELD_PREFIX}.spec.mlPolicy.torch.elasticPolicy.minNodes: exceeds the job's "
            f"{draft.spec['replicas']} nodes; raise spec.trainer.numNodes"
        )
    runtime_spec.note_rest(draft)


def _take_ml_policy(draft: Draft, policy: SourceFields) -> tuple[int | None, RanksField]:
    """Return the number of nodes, and what the policy says about ranks per node."""
    for name in _OTHER_POLICIES:
        if policy.take(name) is not None:
            raise ConversionRefused(
                f"{policy.get_path(name)}: only torch can be converted; use a runtime with mlPolicy.torch that starts "
                "torchrun, or leave the job as it is"
            )
    nodes = policy.take_number("numNodes", 1)
    if nodes is not None:
        draft.note_taken("spec.replicas, unless the TrainJob has numNodes", policy.get_path("numNodes"))
    torch_policy = policy.take("torch")
    ranks = RanksField()
    if torch_policy is not None:
        torch = SourceFields(torch_policy, policy.get_path("torch"))
        path, value = torch.get_path("numProcPerNode"), torch.take("numProcPerNode")
        ranks = RanksField(path, value or "auto", is_default=value is None, auto_counts_processors=True)
        elastic = torch.take_fields("elasticPolicy")
        if (smallest := elastic.take_number("minNodes", 1)) is not None:
            draft.set_spec("minReplicas", smallest, elastic.get_path("minNodes"))
        if elastic.take_number("maxNodes", 1) is not None:
            draft.note_no_counterpart("kubectl scale changes the job while it runs", elastic.get_path("maxNodes"))
        convert_restarts(draft, elastic.take_number("maxRestarts"), elastic.get_path("maxRestarts"))
        elastic.note_rest(draft)
        torch.note_rest(draft)
    policy.note_rest(draft)
    return nodes, ranks


def _find_node_job(jobs: list[Any], path: str) -> Object:
    """Return the replicated job with the ranks.

    Raises ConversionRefused.
    """
    bodies = [check_type(job, dict, path) for job in jobs]
    for job in bodies:
        labels = ((job.get("template") or {}).get("metadata") or {}).get("labels") or {}
        if labels.get(_ANCESTOR_LABEL) == "trainer":
            return job
    named = next((job for job in bodies if job.get("name") == NODE), None)
    if named is None:
        raise ConversionRefused(
            f"{path}: none has the label {_ANCESTOR_LABEL}: trainer, or the name {NODE}; is this the job's runtime?"
        )
    return named


def _convert_group_policy(draft: Draft, policy: SourceFields) -> None:
    coscheduling = policy.take_fields("coscheduling")
    convert_scheduling_timeout(draft, coscheduling)
    coscheduling.note_rest(draft)
    if not is_empty(policy.take("volcano")):
        draft.note_no_counterpart(
            "a scheduler's own gangs are not used; see spec.schedulingTimeout", policy.get_path("volcano")
        )
    policy.note_rest(draft)

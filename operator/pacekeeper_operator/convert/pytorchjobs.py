"""PyTorchJob (kubeflow.org/v1) of the Kubeflow Training Operator."""

from __future__ import annotations

from .draft import ConversionRefused, Draft
from .fields import SourceFields
from .merging import merge_templates
from .metadata import convert_metadata
from .pod_templates import TemplateSource, convert_template
from .ranks import RanksField
from .run_policies import (
    convert_clean_pod_policy,
    convert_deadlines,
    convert_manager,
    convert_restart_policy,
    convert_restarts,
    convert_scheduling_timeout,
    convert_suspension,
)

MASTER, WORKER = "Master", "Worker"
CONTAINER = "pytorch"
"""The container that the Training Operator requires, and gives the variables of the rendezvous."""
TRAINING_OPERATOR_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    *("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID"),
)
_RENDEZVOUS_FIELDS = ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone")


def convert_pytorchjob(draft: Draft, source: SourceFields, container: str = "") -> None:
    """Convert a PyTorchJob. `container` is the one with the ranks; "": `pytorch`.

    Raises ConversionRefused.
    """
    convert_metadata(draft, source.take_fields("metadata"))
    spec = source.take_fields("spec")
    elastic = spec.take("elasticPolicy")
    templates = _take_replicas(draft, spec.take_fields("pytorchReplicaSpecs"), is_elastic=elastic is not None)
    _convert_run_policy(draft, spec.take_fields("runPolicy"))
    ranks_field = RanksField("spec.nprocPerNode", spec.take("nprocPerNode") or "")
    if elastic is not None:
        policy = SourceFields(elastic, spec.get_path("elasticPolicy"))
        ranks_field = _convert_elastic_policy(draft, policy, ranks_field, masters=int(MASTER in templates))
    # The Training Operator's default.
    ranks_field = ranks_field if ranks_field.value else RanksField("nprocPerNode", "auto", is_default=True)
    paths = {f"spec.pytorchReplicaSpecs.{name}.template": template for name, template in templates.items()}
    host_names = tuple(f"{draft.name}-{name.lower()}-" for name in templates)
    template_source = TemplateSource(
        list(paths)[-1], ranks_field, container or CONTAINER, TRAINING_OPERATOR_VARIABLES, host_names
    )
    convert_template(draft, merge_templates(draft, paths, template_source), template_source)
    spec.note_rest(draft)


def _take_replicas(draft: Draft, replica_specs: SourceFields, *, is_elastic: bool) -> dict[str, object]:
    """Set `spec.replicas`, and return the templates, the workers' last."""
    templates: dict[str, object] = {}
    workers = 0
    for name in (MASTER, WORKER):
        replica = replica_specs.take(name)
        if replica is None:
            continue
        fields = SourceFields(replica, replica_specs.get_path(name))
        number = fields.take_number("replicas", 0)
        if (template := fields.take("template")) is None:
            raise ConversionRefused(f"{fields.get_path('template')}: is missing; give a pod template")
        if number is None and is_elastic:
            raise ConversionRefused(
                f"{fields.get_path('replicas')}: an elastic job has no fixed size without it; set it to the number of "
                "workers that the job is to have, and elasticPolicy.minReplicas to the smallest"
            )
        if number is not None:
            draft.note_taken(
                f"spec.replicas, which counts masters and workers: + {number}", fields.get_path("replicas")
            )
        number = 1 if number is None else number
        if number:
            workers += number
            templates[name] = template
        else:
            draft.note_no_counterpart("has no replicas, and is left out", fields.path)
        convert_restart_policy(draft, fields.take_text("restartPolicy"), fields.get_path("restartPolicy"))
        fields.note_rest(draft)
    if others := [name for name in ("PS", "Chief", "Evaluator", "Scheduler", "Server") if replica_specs.take(name)]:
        raise ConversionRefused(
            f"{replica_specs.get_path(others[0])}: a TrainingJob has only workers, and no parameter servers; "
            "use DistributedDataParallel or FSDP, or leave the job as it is"
        )
    replica_specs.note_rest(draft)
    if not templates:
        raise ConversionRefused(f"{replica_specs.path}: has neither Master nor Worker with replicas; give one")
    draft.spec["replicas"] = workers
    return templates


def _convert_run_policy(draft: Draft, policy: SourceFields) -> None:
    convert_clean_pod_policy(draft, policy)
    convert_deadlines(draft, policy)
    convert_restarts(draft, policy.take_number("backoffLimit"), policy.get_path("backoffLimit"))
    convert_suspension(draft, policy)
    convert_manager(draft, policy)
    scheduling = policy.take_fields("schedulingPolicy")
    convert_scheduling_timeout(draft, scheduling)
    if (available := scheduling.take_number("minAvailable")) is not None:
        path = scheduling.get_path("minAvailable")
        if available >= draft.spec["replicas"]:
            draft.note_taken("not needed: all workers are placed within spec.schedulingTimeout, or none", path)
        else:
            draft.note_no_counterpart("a job with fewer workers is declared by spec.minReplicas", path)
    for name, text in (
        ("queue", "this is a queue of a scheduler; with Kueue, set the label kueue.x-k8s.io/queue-name"),
        ("minResources", "the requests of the workers are used"),
        ("priorityClass", "set spec.template.spec.priorityClassName"),
    ):
        if (value := scheduling.take(name)) is not None:
            draft.note_no_counterpart(f"{value}: {text}", scheduling.get_path(name))
    scheduling.note_rest(draft)
    policy.note_rest(draft)


def _convert_elastic_policy(draft: Draft, policy: SourceFields, ranks_field: RanksField, *, masters: int) -> RanksField:
    """Take the elastic policy, and return what it and the source say about ranks per worker."""
    replicas = draft.spec["replicas"]
    smallest, largest = policy.take_number("minReplicas", 1), policy.take_number("maxReplicas", 1)
    if smallest is not None:
        if smallest + masters < replicas:
            draft.set_spec("minReplicas", smallest + masters, policy.get_path("minReplicas"))
        else:
            draft.note_taken("not needed: it is the number of workers", policy.get_path("minReplicas"))
    if largest is not None:
        if largest + masters > replicas:
            draft.note_no_counterpart(
                f"the job has {replicas} workers; kubectl scale changes that while it runs",
                policy.get_path("maxReplicas"),
            )
        else:
            draft.note_taken("not needed: it is the number of workers", policy.get_path("maxReplicas"))
    convert_restarts(draft, policy.take_number("maxRestarts"), policy.get_path("maxRestarts"))
    if policy.take("metrics") is not None:
        draft.note_no_counterpart("no autoscaler changes the job; kubectl scale does", policy.get_path("metrics"))
    rendezvous = [policy.get_path(name) for name in _RENDEZVOUS_FIELDS if policy.take(name) is not None]
    if rendezvous:
        draft.note_changed("left out: Pacekeeper has a rendezvous of its own", *rendezvous)
    processes = policy.take_number("nProcPerNode", 1)
    policy.note_rest(draft)
    if processes is None or ranks_field.value:
        if processes is not None:
            draft.note_no_counterpart("spec.nprocPerNode comes first", policy.get_path("nProcPerNode"))
        return ranks_field
    return RanksField(policy.get_path("nProcPerNode"), processes)

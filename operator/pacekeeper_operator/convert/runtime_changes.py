"""What a TrainJob changes in the template of its runtime: overrides, patches, and the fields of its trainer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..api.names import Object
from .draft import ConversionRefused, Draft
from .fields import SourceFields, check_type
from .merging import find_differences, merge_patch
from .metadata import convert_labels

NODE = "node"
"""The replicated job and the container with the ranks, by Kubeflow's convention."""
RUNTIME_FIELD_PREFIX = "runtime"
"""Where fields of the runtime are, in notes."""
_TRAINER_FIELDS: Mapping[str, str] = {
    "image": "image",
    "command": "command",
    "args": "args",
    "env": "env",
    "resourcesPerNode": "resources",
}
"""Fields of a TrainJob's trainer, and those of the container that they change."""


def apply_changes(
    draft: Draft, spec: SourceFields, trainer: SourceFields, jobs: list[Any], node: str, container: str
) -> None:
    """Change the replicated `jobs` of the runtime as the TrainJob's spec says, and note what is replaced.

    Overrides come first, then the trainer's own fields, which change a container of the job `node`.

    Raises ConversionRefused.
    """
    original = copy.deepcopy(jobs)
    templates = {job["name"]: _get_pod_template(job) for job in jobs}
    for field in ("podSpecOverrides", "podTemplateOverrides"):
        for i, item in enumerate(spec.take_list(field)):
            _apply_override(draft, item, f"spec.{field}[{i}]", templates)
    for i, item in enumerate(spec.take_list("runtimePatches")):
        _apply_runtime_patch(draft, SourceFields(item, f"spec.runtimePatches[{i}]"), templates)
    _apply_trainer(draft, trainer, templates[node], container)
    for before, after in zip(original, jobs, strict=True):
        path = f"{RUNTIME_FIELD_PREFIX}.spec.template.spec.replicatedJobs[{before['name']}]"
        if replaced := list(find_differences(before, after, path)):
            draft.note_changed("replaced by the TrainJob", *replaced)


def choose_node_container(replicated_job: Object) -> str:
    """Return the name of the container that the TrainJob's trainer changes; "": see `choose_trainer`."""
    names = [container.get("name") for container in _list_containers(_get_pod_template(replicated_job))]
    return NODE if NODE in names else ""


def _apply_trainer(draft: Draft, trainer: SourceFields, template: Object, container: str) -> None:
    patch: Object = {}
    for name, target in _TRAINER_FIELDS.items():
        if (value := trainer.take(name)) is not None:
            patch[target] = value
            draft.note_taken(f"{target} of the container in spec.template", trainer.get_path(name))
    trainer.note_rest(draft)
    containers = _list_containers(template)
    changed = [body for body in containers if body.get("name") == container or len(containers) == 1]
    if patch and not changed:
        raise ConversionRefused(
            f"{trainer.path}: the runtime has no container {container or NODE} that it changes; name it by --container"
        )
    for body in changed:
        if "resources" in patch:
            body.pop("resources", None)  # they are replaced as a whole
        body.update(merge_patch(body, patch))


def _apply_override(draft: Draft, item: object, path: str, templates: Mapping[str, Object]) -> None:
    """Apply an item of podTemplateOverrides, or of the older podSpecOverrides, which has no `spec`."""
    override = dict(check_type(item, dict, path))
    targets = [target.get("name") for target in override.pop("targetJobs", None) or ()]
    patch = override if "spec" in override or "metadata" in override else {"spec": override}
    for target in targets or templates:  # without targets, it is for all
        _patch_template(templates, target, patch, path)
    draft.note_taken(f"merged into the template of {', '.join(map(str, targets or templates))}", path)


def _apply_runtime_patch(draft: Draft, patch: SourceFields, templates: Mapping[str, Object]) -> None:
    for name in ("manager", "time"):
        if patch.take(name) is not None:
            draft.note_taken("not needed: the patch is merged", patch.get_path(name))
    runtime_spec = patch.take_fields("trainingRuntimeSpec")
    template = runtime_spec.take_fields("template")
    metadata, jobset_spec = template.take_fields("metadata"), template.take_fields("spec")
    for kind in ("labels", "annotations"):
        convert_labels(draft, metadata.take_object(kind), kind, metadata.get_path(kind))
    for i, item in enumerate(jobset_spec.take_list("replicatedJobs")):
        path = f"{jobset_spec.path}.replicatedJobs"
        target = check_type(check_type(item, dict, f"{path}[{i}]").get("name"), str, f"{path}[{i}].name")
        replicated_job = SourceFields(item, f"{path}[{target}]")
        replicated_job.take("name")
        job_template = replicated_job.take_fields("template")
        job = job_template.take_fields("spec")
        _patch_template(templates, target, job.take_object("template"), replicated_job.path)
        draft.note_taken("not needed: the patch is merged", replicated_job.get_path("name"))
        draft.note_taken(f"merged into the template of {target}", job.get_path("template"))
        for fields in (job, job_template, replicated_job):
            fields.note_rest(draft)
    for fields in (jobset_spec, metadata, template, runtime_spec, patch):
        fields.note_rest(draft)


def _patch_template(templates: Mapping[str, Object], target: object, patch: Object, path: str) -> None:
    if not isinstance(target, str) or target not in templates:
        raise ConversionRefused(
            f"{path}: the runtime has no replicated job {target!r}, but {', '.join(templates)}; name one of these"
        )
    templates[target].update(merge_patch(templates[target], patch))


def _get_pod_template(replicated_job: Object) -> Object:
    """Return the pod template, which may be changed.

    Raises ConversionRefused if there is none.
    """
    path = (
        f"{RUNTIME_FIELD_PREFIX}.spec.template.spec.replicatedJobs[{replicated_job.get('name')}].template.spec.template"
    )
    job_template = check_type(replicated_job.get("template") or {}, dict, path)
    job = check_type(job_template.get("spec") or {}, dict, path)
    return check_type(job.get("template"), dict, path)


def _list_containers(template: Object) -> list[Object]:
    spec = check_type(template.get("spec") or {}, dict, "spec of a pod template")
    return [body for body in spec.get("containers") or () if isinstance(body, dict)]

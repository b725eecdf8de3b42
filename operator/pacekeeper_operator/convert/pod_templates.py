"""The pod template: it stays as it is, but for what a worker of a TrainingJob cannot have, or needs in another form."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.errors import InputError

from ..api.names import GROUP, LABEL_JOB, LABEL_WORKER, TRAINER_CONTAINER, Object
from ..api.training_job import JobSpec, TrainingJob
from ..pods.trainer_container import SCRIPT_VARIABLE, find_trainer_container
from .commands import LaunchKind, find_variables, read_command
from .draft import ConversionRefused, Draft
from .fields import check_type, is_empty
from .ranks import NO_RANKS_FIELD, RanksField, set_ranks_per_worker

_MAIN_CONTAINERS, _INIT_CONTAINERS = "containers", "initContainers"
_WORKER_INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "jobset.sigs.k8s.io/job-index",
    "jobset.sigs.k8s.io/job-global-index",
)
_JOB_NAME_LABELS = (
    "batch.kubernetes.io/job-name",
    "job-name",
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
)
_CONTROLLER_LABELS = (
    *(*_WORKER_INDEX_LABELS, *_JOB_NAME_LABELS),
    *("batch.kubernetes.io/controller-uid", "controller-uid"),
    *("training.kubeflow.org/replica-type", "training.kubeflow.org/job-role", "training.kubeflow.org/operator-name"),
    *("jobset.sigs.k8s.io/replicatedjob-name", "jobset.sigs.k8s.io/replicatedjob-replicas"),
    *("jobset.sigs.k8s.io/job-key", "jobset.sigs.k8s.io/restart-attempt", "jobset.sigs.k8s.io/group-name"),
    "trainer.kubeflow.org/trainjob-ancestor-step",
)
"""Labels that the source's controller gives its pods. Workers of a TrainingJob do not have them."""
_FIELD_PATH = re.compile(r"metadata\.(?:labels|annotations)\['([^']+)'\]")
_INDEX_VARIABLES = ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
_SIZE_VARIABLES = ("WORLD_SIZE", "PET_NNODES")
_ADDRESS_VARIABLES: Mapping[str, str] = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "PET_MASTER_ADDR": "localhost",
    "PET_MASTER_PORT": "29500",
    "PET_RDZV_ENDPOINT": "localhost:29500",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ID": "none",
}
_RANKS_VARIABLE = "PET_NPROC_PER_NODE"
_RENDEZVOUS_VARIABLES = frozenset({*_INDEX_VARIABLES, *_SIZE_VARIABLES, *_ADDRESS_VARIABLES, "NODE_RANK", "NNODES"})


@dataclass(frozen=True)
class TemplateSource:
    """Where a pod template comes from, and what its controller adds to its pods."""

    path: str  # of the template in the source
    ranks: RanksField = NO_RANKS_FIELD
    container: str = ""  # the container with the ranks, by name; "": see `choose_trainer`
    variables: tuple[str, ...] = ()  # set by the source's controller
    host_names: tuple[str, ...] = ()  # starts of the names by which the source's pods reach each other


def convert_template(draft: Draft, template: object, source: TemplateSource) -> None:
    """Set `spec.template`, `spec.trainerContainer`, and `spec.nprocPerNode`. `spec.replicas` is set already.

    Raises ConversionRefused.
    """
    result = copy.deepcopy(check_template(template, source.path))
    spec = result["spec"]
    trainer = choose_trainer(spec, source)
    path = f"{source.path}.spec.{_MAIN_CONTAINERS}[{trainer['name']}]"
    set_ranks_per_worker(draft, trainer, path, source.ranks)
    _name_script(draft, trainer, path)
    if trainer["name"] == TRAINER_CONTAINER or len(spec[_MAIN_CONTAINERS]) == 1:
        draft.note_taken("has the ranks, and keeps its name", f"{path}.name")
    else:
        draft.set_spec("trainerContainer", trainer["name"], f"{path}.name")
    _convert_template_metadata(draft, result, source.path)
    _convert_pod_fields(draft, spec, f"{source.path}.spec")
    _replace_selectors(draft, spec, f"{source.path}.spec")
    _replace_field_references(draft, spec, f"{source.path}.spec")
    _convert_variables(draft, spec, trainer, source)
    _note_host_names(draft, spec, source)
    _note_storage(draft, spec, trainer)
    draft.spec["template"] = result
    draft.note_taken("spec.template, unchanged but for what is named here", source.path)


def _name_script(draft: Draft, trainer: Object, path: str) -> None:
    """Set the variable that names the script which the launcher starts, where a shell calls no torchrun."""
    if script := read_command(trainer).script:
        trainer["env"] = [*(trainer.get("env") or ()), {"name": SCRIPT_VARIABLE, "value": script}]
        draft.note_changed(
            f"added: {script}; the launcher takes the place of the first Python process that runs it. What the command "
            "starts otherwise runs as before. What comes before it may take as long as spec.schedulingTimeout (5m)",
            f"{path}.env[{SCRIPT_VARIABLE}]",
        )


def choose_trainer(spec: Object, source: TemplateSource) -> Object:
    """Return the container with the ranks.

    Raises ConversionRefused if there are several candidates.
    """
    containers: list[Object] = spec[_MAIN_CONTAINERS]
    names = [str(container["name"]) for container in containers]
    if source.container:
        if source.container not in names:
            raise ConversionRefused(
                f"{source.path}.spec.containers: there is no container {source.container}, but {', '.join(names)}; "
                "name the one with the ranks by --container"
            )
        return containers[names.index(source.container)]
    if (default := _find_default_trainer(containers)) is not None:
        return default
    launching = [
        container
        for container in containers
        if read_command(container).launcher in (LaunchKind.TORCHRUN, LaunchKind.ACCELERATE)
    ]
    if len(launching) == 1:
        return launching[0]
    raise ConversionRefused(
        f"{source.path}.spec.containers: each of {', '.join(names)} could have the ranks; name it by --container"
    )


def _find_default_trainer(containers: Sequence[Object]) -> Object | None:
    """Return the container that has the ranks if none is named; None: there are several candidates."""
    job = TrainingJob("", "", "", 0, JobSpec(template={"spec": {_MAIN_CONTAINERS: containers}}))
    try:
        return find_trainer_container(job)
    except InputError:
        return None


def check_template(template: object, path: str) -> Object:
    """Return a pod template whose containers, variables, and volumes have the types that conversions rely on.

    Raises ConversionRefused that names the field.
    """
    body = check_type(template, dict, path)
    spec = check_type(body.get("spec") or {}, dict, f"{path}.spec")
    _check_metadata(body.get("metadata"), f"{path}.metadata")
    if not spec.get(_MAIN_CONTAINERS):
        raise ConversionRefused(f"{path}.spec.containers: is missing; give the container that trains")
    for kind in (_MAIN_CONTAINERS, _INIT_CONTAINERS):
        for container, name in _check_named(spec, kind, f"{path}.spec"):
            place = f"{path}.spec.{kind}[{name}]"
            for field in ("command", "args"):
                for i, word in enumerate(_check_list(container, field, place)):
                    check_type(word, str, f"{place}.{field}[{i}]")
            for _ in _check_named(container, "env", place):
                pass
            for mount in _check_list(container, "volumeMounts", place):
                check_type(check_type(mount, dict, place).get("mountPath"), str, f"{place}.volumeMounts.mountPath")
            resources = check_type(container.get("resources") or {}, dict, f"{place}.resources")
            for quantities in ("limits", "requests"):
                check_type(resources.get(quantities) or {}, dict, f"{place}.resources.{quantities}")
    for _ in _check_named(spec, "volumes", f"{path}.spec"):
        pass
    return body


def _check_metadata(metadata: object, path: str) -> None:
    body = check_type({} if metadata is None else metadata, dict, path)
    for kind in ("labels", "annotations"):
        for key, value in check_type(body.get(kind) or {}, dict, f"{path}.{kind}").items():
            check_type(value, str, f"{path}.{kind}[{key}]")


def _check_list(body: Object, name: str, path: str) -> list[Any]:
    return check_type(body.get(name) or [], list, f"{path}.{name}")


def _check_named(body: Object, name: str, path: str) -> Iterator[tuple[Object, str]]:
    for i, item in enumerate(_check_list(body, name, path)):
        yield (
            check_type(item, dict, f"{path}.{name}[{i}]"),
            check_type(item.get("name"), str, f"{path}.{name}[{i}].name"),
        )


def _convert_template_metadata(draft: Draft, template: Object, path: str) -> None:
    """Remove what controllers and the API server have set, and the labels that are Pacekeeper's own."""
    metadata = template.get("metadata") or {}
    for kind in ("labels", "annotations"):
        entries = metadata.get(kind) or {}
        for key in list(entries):
            if key.startswith(f"{GROUP}/"):
                draft.note_changed(f"removed: the operator sets labels of {GROUP}", f"{path}.metadata.{kind}[{key}]")
                del entries[key]
            elif key in _CONTROLLER_LABELS:
                draft.note_changed("removed: the former controller's own", f"{path}.metadata.{kind}[{key}]")
                del entries[key]
    for name in list(metadata):
        if name not in ("labels", "annotations"):
            if not is_empty(metadata[name]):
                draft.note_no_counterpart("workers have names and owners of their own", f"{path}.metadata.{name}")
            del metadata[name]


def _convert_pod_fields(draft: Draft, spec: Object, path: str) -> None:
    policy = spec.pop("restartPolicy", None)
    if policy is not None and policy != "Never":
        draft.note_changed(
            f"{policy} is left out: Pacekeeper restarts ranks in place, and replaces lost workers",
            f"{path}.restartPolicy",
        )
    elif policy == "Never":
        draft.note_taken("left out, which means Never", f"{path}.restartPolicy")
    if spec.pop("subdomain", None) is not None:
        draft.note_changed(
            "left out: workers reach each other by address, without a headless Service", f"{path}.subdomain"
        )
    if spec.get("terminationGracePeriodSeconds") == 0:
        spec["terminationGracePeriodSeconds"] = 1
        draft.note_changed("1, the shortest that Pacekeeper takes", f"{path}.terminationGracePeriodSeconds")
    if "automountServiceAccountToken" not in spec and spec.get("serviceAccountName"):
        spec["automountServiceAccountToken"] = True
        draft.note_changed(
            "automountServiceAccountToken: true is written out, as Pacekeeper's default is false",
            f"{path}.serviceAccountName",
        )
    if "enableServiceLinks" not in spec:
        draft.note_changed(
            "is false without a value: there are no variables of Services, like REDIS_SERVICE_HOST; set true if "
            "the script needs them",
            f"{path}.enableServiceLinks",
        )


def _replace_selectors(draft: Draft, spec: Object, path: str) -> None:
    """Select this job's pods by Pacekeeper's label, where the source selects them by its controller's labels."""
    for name in ("affinity", "topologySpreadConstraints"):
        for selector in _iterate_label_selectors(spec.get(name)):
            labels, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
            replaced = [key for key in labels if key in _CONTROLLER_LABELS]
            for key in replaced:
                del labels[key]
                labels[LABEL_JOB] = draft.name
            for expression in [item for item in expressions if item.get("key") in _CONTROLLER_LABELS]:
                replaced.append(str(expression["key"]))
                if expression["key"] in _JOB_NAME_LABELS:
                    expression["key"] = LABEL_JOB
                    if "values" in expression:
                        expression["values"] = [draft.name]
                else:
                    expressions.remove(expression)
            if replaced:
                draft.note_changed(
                    f"selects by {LABEL_JOB}={draft.name} instead of {', '.join(replaced)}, which workers do not have",
                    f"{path}.{name}",
                )


def _iterate_label_selectors(value: object) -> Iterator[Object]:
    if isinstance(value, dict):
        if isinstance(selector := value.get("labelSelector"), dict):
            yield selector
        for part in value.values():
            yield from _iterate_label_selectors(part)
    elif isinstance(value, list):
        for part in value:
            yield from _iterate_label_selectors(part)


def _replace_field_references(draft: Draft, spec: Object, path: str) -> None:
    """Let variables that read an index or a name from a label of the source's controller read it from Pacekeeper's."""
    for kind in (_MAIN_CONTAINERS, _INIT_CONTAINERS):
        for container in spec.get(kind) or ():
            for variable in container.get("env") or ():
                reference = (variable.get("valueFrom") or {}).get("fieldRef") or {}
                match = _FIELD_PATH.fullmatch(str(reference.get("fieldPath", "")))
                if match is None or match[1] not in (*_WORKER_INDEX_LABELS, *_JOB_NAME_LABELS):
                    continue
                label = LABEL_JOB if match[1] in _JOB_NAME_LABELS else LABEL_WORKER
                reference["fieldPath"] = f"metadata.labels['{label}']"
                draft.note_changed(
                    f"reads the label {label} instead of {match[1]}, which workers do not have",
                    f"{path}.{kind}[{container['name']}].env[{variable['name']}]",
                )


def _convert_variables(draft: Draft, spec: Object, trainer: Object, source: TemplateSource) -> None:
    """Add the variables that commands refer to, and that the source's controller would have set.

    An init container gets no address: it could only wait for it.
    """
    for kind in (_MAIN_CONTAINERS, _INIT_CONTAINERS):
        for container in spec.get(kind) or ():
            path = f"{source.path}.spec.{kind}[{container['name']}]"
            own = {str(variable["name"]) for variable in container.get("env") or ()}
            for name in sorted(own & _RENDEZVOUS_VARIABLES) if container is trainer else ():
                draft.note_changed(
                    "is kept for the command; each rank gets its value from Pacekeeper's launcher",
                    f"{path}.env[{name}]",
                )
            needed = (
                find_variables(container) - own - (_ADDRESS_VARIABLES.keys() if kind == _INIT_CONTAINERS else set())
            )
            if added := [name for name in source.variables if name in needed]:
                container["env"] = [*(_build_variable(draft, name) for name in added), *(container.get("env") or ())]
                draft.note_changed(
                    "added, as the command refers to it; each rank gets its value from Pacekeeper's launcher",
                    *(f"{path}.env[{name}]" for name in added),
                )


def _build_variable(draft: Draft, name: str) -> Object:
    if name in _INDEX_VARIABLES:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{LABEL_WORKER}']"}}}
    if name in _SIZE_VARIABLES:
        return {"name": name, "value": str(draft.spec["replicas"])}
    if name == _RANKS_VARIABLE:
        return {"name": name, "value": str(draft.spec["nprocPerNode"])}
    return {"name": name, "value": _ADDRESS_VARIABLES[name]}


def _note_host_names(draft: Draft, spec: Object, source: TemplateSource) -> None:
    """Note init containers that refer to a pod of the source: they would wait for it without end."""
    for container in spec.get(_INIT_CONTAINERS) or ():
        text = " ".join([*(container.get("command") or ()), *(container.get("args") or ())])
        names = [match[0] for name in source.host_names if (match := re.search(rf"\b{re.escape(name)}[\d$]", text))]
        names += sorted(find_variables(container) & _ADDRESS_VARIABLES.keys())
        if names:
            draft.note_no_counterpart(
                f"refers to {names[0]}, which does not exist here; remove the container if it waits for other pods: "
                "workers wait for each other by themselves",
                f"{source.path}.spec.{_INIT_CONTAINERS}[{container['name']}].command",
            )


def _note_storage(draft: Draft, spec: Object, trainer: Object) -> None:
    """Say what to do about checkpoints. Which folder is for them cannot be seen in the source."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]
        for volume in spec.get("volumes") or ()
        if isinstance(volume.get("persistentVolumeClaim"), dict)
    }
    mounts = [
        mount
        for mount in trainer.get("volumeMounts") or ()
        if mount.get("name") in claims and not mount.get("readOnly")
    ]
    if not mounts:
        draft.note_no_counterpart(
            "there is no writable claim; a script that saves checkpoints needs storage that outlives a worker: set "
            "spec.checkpoint.volumeClaimName to a claim with ReadWriteMany",
            "spec.checkpoint",
        )
        return
    folders = ", ".join(f"{mount['mountPath']} (claim {claims[mount['name']].get('claimName')})" for mount in mounts)
    draft.note_no_counterpart(
        f"{folders}: mounted as before; the script's own checkpoints need nothing; for those of Pacekeeper's library, "
        f"set spec.checkpoint.path to a folder there, like {mounts[0]['mountPath'].rstrip('/')}/pacekeeper; more than "
        "one worker needs ReadWriteMany",
        "spec.checkpoint",
    )

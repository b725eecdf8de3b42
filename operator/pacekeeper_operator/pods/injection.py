"""Injection of the watch into pods of other controllers: which pods, and what is added. Pure.

The chart's `templates/watch.yaml` holds the same rules as a MutatingAdmissionPolicy, for Kubernetes 1.36 and later. One
table of pods tests both (`testing/kubernetes/injection_cases.py`).

Nothing that is added may break the job. One container of the pod is watched. What its owner wrote is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json

from ..api.names import API_VERSION, LABEL_JOB, LABEL_WATCH, LABEL_WATCHED, TOKEN_AUDIENCE, Object
from .resources import Resources, is_same_quantity, parse_resources

PAYLOAD_CONTAINER = "pacekeeper-payload"
ENVIRONMENT_CONTAINER = "pacekeeper-environment"
WATCH_CONTAINER = "pacekeeper-watch"
INJECTED_CONTAINERS = frozenset({PAYLOAD_CONTAINER, ENVIRONMENT_CONTAINER, WATCH_CONTAINER})
WATCH_MOUNT_ROOT = "/pacekeeper"
PAYLOAD_PATH = f"{WATCH_MOUNT_ROOT}/payload"
WATCH_RUNTIME_PATH = f"{WATCH_MOUNT_ROOT}/runtime"
BOOT_PATH = f"{PAYLOAD_PATH}/boot"
RECORDER_PATH = f"{PAYLOAD_PATH}/bin/environment_recorder"
IMAGE_PYTHONPATH_FILE = f"{WATCH_RUNTIME_PATH}/image_pythonpath"
WATCH_TOKEN_PATH = "/var/run/secrets/pacekeeper"
KUBEFLOW_PROGRESS_PORT = 9466
"""Port of the sidecar on the pod's loopback. Next to that of metrics, and below the ports that kernels choose."""
OWN_NAME_PREFIX = "pacekeeper-"
"""Prefix of the names of all volumes and containers that are added."""
UNPRIVILEGED_USER = 65532
"""User of the sidecar if the pod runs as root."""
WATCH_RESOURCES: Resources = {
    "requests": {"cpu": "1m", "memory": "16Mi"},
    "limits": {"cpu": "200m", "memory": "256Mi"},
}
DEFAULT_CONTROLLER_KINDS = ("Job", "PyTorchJob", "MPIJob", "RayCluster")
"""Kinds of controllers whose pods train. JobSets, TrainJobs, and Volcano's jobs have pods of a `Job`."""
RANK_VARIABLES = frozenset(
    {"MASTER_ADDR", "WORLD_SIZE", "PET_MASTER_ADDR", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT"}
)
"""Variables of torchrun and torch.distributed, which controllers of PyTorch jobs set."""
QOS_RESOURCES = ("cpu", "memory")
"""Resources that decide about the QoS class of a pod."""
COPIED_RESOURCES = ("cpu", "memory", "ephemeral-storage")

_BOOLEAN_OF_LABEL = "true"
PAYLOAD_VOLUME = f"{OWN_NAME_PREFIX}payload"
_WATCH_RUNTIME_VOLUME = f"{OWN_NAME_PREFIX}runtime"
_WATCH_TOKEN_VOLUME = f"{OWN_NAME_PREFIX}token"
_INJECTED_SECURITY_CONTEXT: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_COPIED_IDENTITY_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions")


@dataclass(frozen=True)
class InjectionRules:
    """What the platform configures about the injection."""

    image: str  # of the payload and the sidecar
    pull_policy: str = "IfNotPresent"
    kinds: tuple[str, ...] = DEFAULT_CONTROLLER_KINDS  # of controllers
    resources: Resources = field(default_factory=lambda: WATCH_RESOURCES)  # of the sidecar
    namespaces: str = f"{LABEL_WATCH}=enabled"  # label selector, as in a list of namespaces
    kubeflow_progress: bool = False  # scripts report their progress to the sidecar
    links: bool = False  # the sidecar samples the ranks' connections

    def __post_init__(self) -> None:
        for kind in ("requests", "limits"):
            for name in QOS_RESOURCES:
                if name not in self.resources.get(kind, {}):
                    raise InputError(f"resources.{kind}.{name} is missing; pods of QoS class Guaranteed need it")


@dataclass(frozen=True)
class OperatorAddress:
    """How sidecars reach the operator."""

    url: str
    authority: str  # PEM


@dataclass(frozen=True)
class InjectionRefusal:
    """The reason why a pod is not watched."""

    check: str  # name of the check, the same as the policy's match condition
    message: str


def build_injection_patch(pod: Object, rules: InjectionRules, operator: OperatorAddress) -> Sequence[Object]:
    """Build the JSON patch that adds the watch to a pod without a refusal.

    A pod that has it already gets only its PYTHONPATH corrected, since another mutator may have changed it.
    """
    index, container = _find_rank_container(pod)
    if _is_injected(pod):
        return list(_iterate_path_corrections(index, container))
    spec = pod["spec"]
    additions: list[Object] = []
    if not pod["metadata"].get("labels"):
        additions.append(_build_addition("/metadata/labels", {}))
    additions.append(_build_addition(f"/metadata/labels/{LABEL_WATCHED.replace('/', '~1')}", _BOOLEAN_OF_LABEL))
    additions += _append_all("/spec/volumes", spec.get("volumes"), _build_volumes())
    # First, so that init containers of the owner cannot delay them, and in this order: each needs the one before.
    if not spec.get("initContainers"):
        additions.append(_build_addition("/spec/initContainers", []))
    init_containers = [
        _build_payload_container(pod, container, rules),
        *(
            []
            if find_python_path(container)
            else [build_environment_container(container, IMAGE_PYTHONPATH_FILE, _build_mounts())]
        ),
        _build_sidecar_container(pod, container, rules, operator),
    ]
    additions += [
        _build_addition(f"/spec/initContainers/{place}", addition) for place, addition in enumerate(init_containers)
    ]
    root = f"/spec/containers/{index}"
    additions += _append_all(f"{root}/volumeMounts", container.get("volumeMounts"), _build_mounts())
    additions += _iterate_variable_changes(index, container)
    if _receives_progress(pod, rules):
        url = f"http://127.0.0.1:{KUBEFLOW_PROGRESS_PORT}"
        additions.append(_build_addition(f"{root}/env/-", {"name": "PACEKEEPER_KUBEFLOW_URL", "value": url}))
    return additions


def find_injection_refusal(pod: Object, rules: InjectionRules) -> InjectionRefusal | None:
    """Return why the pod is not watched; None: it is."""
    for name, find_reason in INJECTION_CHECKS:
        if reason := find_reason(pod, rules):
            return InjectionRefusal(name, reason)
    return None


def parse_injection_rules(text: str) -> InjectionRules:
    """Parse JSON: `image`, `pullPolicy`, `kinds`, `resources`, `namespaceSelector`, `kubeflowProgress`, and `links`.

    Raises InputError.
    """
    raw = parse_json(text)
    if not isinstance(raw, dict) or not isinstance(raw.get("image"), str) or not raw["image"]:
        raise InputError(f"{abbreviate_value(text)}: `image` is missing; name the image of the watch")
    kinds = raw.get("kinds", list(DEFAULT_CONTROLLER_KINDS))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise InputError(f"kinds: {abbreviate_value(kinds)} must be a list of kinds of controllers, like [Job]")
    policy = raw.get("pullPolicy", "IfNotPresent")
    if policy not in ("Always", "IfNotPresent", "Never"):
        raise InputError(f"pullPolicy: {abbreviate_value(policy)} must be Always, IfNotPresent, or Never")
    given = raw.get("resources")
    resources = WATCH_RESOURCES if given is None else parse_resources(json.dumps(given))
    selector = _format_selector(raw.get("namespaceSelector", {"matchLabels": {LABEL_WATCH: "enabled"}}))
    progress = raw.get("kubeflowProgress", False)
    links = raw.get("links", False)
    for name, value in (("kubeflowProgress", progress), ("links", links)):
        if not isinstance(value, bool):
            raise InputError(f"{name}: {abbreviate_value(value)} must be true or false")
    return InjectionRules(raw["image"], policy, tuple(kinds), resources, selector, progress, links)


def _format_selector(selector: object) -> str:
    """Return a LabelSelector as the text of a list's query. Raises InputError."""
    try:
        labels: Mapping[str, str] = selector.get("matchLabels") or {}  # type: ignore[attr-defined]  # else InputError
        expressions: Sequence[Mapping[str, Any]] = selector.get("matchExpressions") or ()  # type: ignore[attr-defined]
        parts = [f"{name}={value}" for name, value in labels.items()]
        return ",".join([*parts, *map(_format_requirement, expressions)])
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"namespaceSelector: {abbreviate_value(selector)} must be a LabelSelector, like "
            f'{{"matchLabels": {{"{LABEL_WATCH}": "enabled"}}}}'
        ) from error


def _format_requirement(expression: Mapping[str, Any]) -> str:
    key, values = expression["key"], ",".join(expression.get("values") or ())
    formats = {
        "In": f"{key} in ({values})",
        "NotIn": f"{key} notin ({values})",
        "Exists": key,
        "DoesNotExist": f"!{key}",
    }
    return str(formats[expression["operator"]])


def _refuse_worker(pod: Object, _rules: InjectionRules) -> str:
    is_worker = LABEL_JOB in _get_labels(pod) or any(
        owner.get("apiVersion") == API_VERSION for owner in pod["metadata"].get("ownerReferences") or ()
    )
    return "a TrainingJob or the operator created the pod" if is_worker else ""


def _refuse_disabled(pod: Object, _rules: InjectionRules) -> str:
    return f"the pod has the label {LABEL_WATCH}=disabled" if _get_labels(pod).get(LABEL_WATCH) == "disabled" else ""


def _refuse_without_controller(pod: Object, _rules: InjectionRules) -> str:
    if _find_controller_kind(pod):
        return ""
    return "no controller created the pod: the operator could not tell which job it belongs to"


def _refuse_other_kind(pod: Object, rules: InjectionRules) -> str:
    kind = _find_controller_kind(pod)
    if kind in rules.kinds or _is_labeled(pod):
        return ""
    return f"its controller is a {kind}, which is not in watch.kinds; label the pod {LABEL_WATCH}=enabled"


def _refuse_windows(pod: Object, _rules: InjectionRules) -> str:
    spec = pod["spec"]
    selected = (spec.get("nodeSelector") or {}).get("kubernetes.io/os", "linux")
    name = (spec.get("os") or {}).get("name", "linux")
    return "" if selected == name == "linux" else "the pod does not run on Linux"


def _refuse_shared_processes(pod: Object, _rules: InjectionRules) -> str:
    found = [name for name in ("shareProcessNamespace", "hostPID") if pod["spec"].get(name)]
    return f"{found[0]}: other processes could read the sidecar's token" if found else ""


def _refuse_without_ranks(pod: Object, _rules: InjectionRules) -> str:
    if _is_labeled(pod) or any(_suggests_ranks(container) for container in pod["spec"]["containers"]):
        return ""
    return f"no container has a GPU or a variable of torchrun; label the pod {LABEL_WATCH}=enabled"


def _refuse_taken_names(pod: Object, _rules: InjectionRules) -> str:
    if _is_injected(pod):
        return ""
    spec = pod["spec"]
    named = [*(spec.get("volumes") or ()), *(spec.get("initContainers") or ()), *spec["containers"]]
    taken = next((each["name"] for each in named if each["name"].startswith(OWN_NAME_PREFIX)), "")
    return f"the pod itself has a container or volume {taken}; rename it" if taken else ""


def _refuse_taken_paths(pod: Object, _rules: InjectionRules) -> str:
    if _is_injected(pod):
        return ""
    _, container = _find_rank_container(pod)
    paths = [mount["mountPath"] for mount in container.get("volumeMounts") or ()]
    taken = next((path for path in paths if f"{path}/".startswith(f"{WATCH_MOUNT_ROOT}/")), "")
    return f"container {container['name']} mounts {taken}; mount it elsewhere" if taken else ""


def _refuse_derived_python_path(pod: Object, _rules: InjectionRules) -> str:
    _, container = _find_rank_container(pod)
    variable = find_python_path(container)
    if variable is None or "valueFrom" not in variable[1]:
        return ""
    return f"PYTHONPATH of container {container['name']} is set by valueFrom; write its value"


_Check = Callable[[Object, InjectionRules], str]

INJECTION_CHECKS: tuple[tuple[str, _Check], ...] = (
    ("not-a-worker", _refuse_worker),
    ("not-disabled", _refuse_disabled),
    ("has-a-controller", _refuse_without_controller),
    ("trains", _refuse_other_kind),
    ("on-linux", _refuse_windows),
    ("has-own-processes", _refuse_shared_processes),
    ("may-have-ranks", _refuse_without_ranks),
    ("names-are-free", _refuse_taken_names),
    ("paths-are-free", _refuse_taken_paths),
    ("python-path-is-plain", _refuse_derived_python_path),
)
"""The checks in order. Their names are those of the policy's match conditions."""


def _find_rank_container(pod: Object) -> tuple[int, Object]:
    """Return index and container that is watched.

    It is the one that is watched already, else the first that suggests ranks. Without such a container it is the first
    one: the pod's label requests it.
    """
    containers = list(enumerate(pod["spec"]["containers"]))
    watched = [pair for pair in containers if _mounts_payload(pair[1])]
    return (*watched, *(pair for pair in containers if _suggests_ranks(pair[1])), *containers)[0]


def _mounts_payload(container: Object) -> bool:
    return any(mount["name"] == PAYLOAD_VOLUME for mount in container.get("volumeMounts") or ())


def _suggests_ranks(container: Object) -> bool:
    resources = container.get("resources") or {}
    has_gpus = any(is_gpu_resource(name) for name in resources.get("limits") or {})
    variables = {variable["name"] for variable in container.get("env") or ()}
    return has_gpus or bool(resources.get("claims")) or bool(variables & RANK_VARIABLES)


def is_gpu_resource(name: str) -> bool:
    """Return whether a resource is an accelerator: `nvidia.com/gpu`, `amd.com/gpu`, `nvidia.com/mig-1g.5gb`."""
    return name.endswith("/gpu") or name.startswith("nvidia.com/mig-")


def _is_injected(pod: Object) -> bool:
    return any(container["name"] == WATCH_CONTAINER for container in pod["spec"].get("initContainers") or ())


def _is_labeled(pod: Object) -> bool:
    return _get_labels(pod).get(LABEL_WATCH) == "enabled"


def _get_labels(pod: Object) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _find_controller_kind(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner["kind"] for owner in owners if owner.get("controller")), "")


def find_python_path(container: Object) -> tuple[int, Object] | None:
    """Return index and entry of the variable PYTHONPATH. The last one counts."""
    found = [pair for pair in enumerate(container.get("env") or ()) if pair[1]["name"] == "PYTHONPATH"]
    return found[-1] if found else None


def _iterate_variable_changes(index: int, container: Object) -> Iterator[Object]:
    """Yield the changes of the container's environment.

    Without a PYTHONPATH in `env`, the new one would hide that of the image or of `envFrom`. The environment recorder
    has written it to a file, and the boot code restores it.
    """
    variables = [{"name": "PACEKEEPER_WATCH_RUNTIME", "value": WATCH_RUNTIME_PATH}]
    if find_python_path(container) is None:
        variables.append({"name": "PYTHONPATH", "value": BOOT_PATH})
        variables.append({"name": "PACEKEEPER_IMAGE_PYTHONPATH", "value": IMAGE_PYTHONPATH_FILE})
    yield from _iterate_path_corrections(index, container)
    yield from _append_all(f"/spec/containers/{index}/env", container.get("env"), variables)


def _iterate_path_corrections(index: int, container: Object) -> Iterator[Object]:
    """Yield the replacement of a PYTHONPATH that does not begin with the boot folder."""
    found = find_python_path(container)
    if found is None:
        return
    place, variable = found
    rest = [part for part in variable.get("value", "").split(":") if part != BOOT_PATH]
    value = BOOT_PATH if rest in ([], [""]) else ":".join([BOOT_PATH, *rest])
    if value != variable.get("value", ""):
        # The whole entry: an empty value is not written, so there would be no field to replace.
        yield {"op": "replace", "path": f"/spec/containers/{index}/env/{place}", "value": variable | {"value": value}}


def _build_volumes() -> list[Object]:
    token = {"audience": TOKEN_AUDIENCE, "expirationSeconds": 3600, "path": "token"}
    return [
        {"name": PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": _WATCH_RUNTIME_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
        {"name": _WATCH_TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
    ]


def _build_mounts() -> list[Object]:
    return [
        {"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_PATH, "readOnly": True},
        {"name": _WATCH_RUNTIME_VOLUME, "mountPath": WATCH_RUNTIME_PATH},
    ]


def _build_payload_container(pod: Object, container: Object, rules: InjectionRules) -> Object:
    """Build the container that copies the payload and creates the folders of the ranks."""
    return {
        "name": PAYLOAD_CONTAINER,
        "image": rules.image,
        "imagePullPolicy": rules.pull_policy,
        "command": ["python", "-m", "pacekeeper.watch.payload", PAYLOAD_PATH],
        "env": [{"name": "PACEKEEPER_WATCH_RUNTIME", "value": WATCH_RUNTIME_PATH}],
        "volumeMounts": [
            {"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_PATH},
            {"name": _WATCH_RUNTIME_VOLUME, "mountPath": WATCH_RUNTIME_PATH},
        ],
        "resources": copy_resources(container),
        "securityContext": build_own_security_context(pod, container),
    }


def build_environment_container(container: Object, file: str, mounts: Sequence[Object]) -> Object:
    """Build the container that records the PYTHONPATH that the image of the container with the ranks sets.

    It runs in that image as the same user, and gets the same `envFrom`, which may set PYTHONPATH as well. `file`: where
    it is written, on one of the `mounts`.
    """
    context = container.get("securityContext") or {}
    identity = {name: context[name] for name in _COPIED_IDENTITY_FIELDS if name in context}
    optional = {name: container[name] for name in ("imagePullPolicy", "envFrom") if container.get(name)}
    return {
        "name": ENVIRONMENT_CONTAINER,
        "image": container.get("image", ""),
        "command": [RECORDER_PATH, file, "PYTHONPATH"],
        "volumeMounts": [*mounts],
        "resources": copy_resources(container),
        "securityContext": {**_INJECTED_SECURITY_CONTEXT, **identity},
        **optional,
    }


def _build_sidecar_container(
    pod: Object, container: Object, rules: InjectionRules, operator: OperatorAddress
) -> Object:
    """Build the native sidecar. It has no port and no probe, so that nothing waits for it."""
    port = str(KUBEFLOW_PROGRESS_PORT) if _receives_progress(pod, rules) else ""
    return {
        "name": WATCH_CONTAINER,
        "image": rules.image,
        "imagePullPolicy": rules.pull_policy,
        "command": ["python", "-m", "pacekeeper.sidecar"],
        "restartPolicy": "Always",
        "env": [
            {"name": "PACEKEEPER_WATCHED", "value": "1"},
            {"name": "PACEKEEPER_RUNTIME", "value": WATCH_RUNTIME_PATH},
            {
                "name": "PACEKEEPER_WORKER",
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
            },
            {"name": "PACEKEEPER_OPERATOR", "value": operator.url},
            {"name": "PACEKEEPER_CA", "value": operator.authority},
            {"name": "PACEKEEPER_TOKEN_FILE", "value": f"{WATCH_TOKEN_PATH}/token"},
            *([{"name": "PACEKEEPER_KUBEFLOW_PORT", "value": port}] if port else []),
            *([{"name": "PACEKEEPER_WATCH_LINKS", "value": "1"}] if rules.links else []),
        ],
        "volumeMounts": [
            {"name": _WATCH_RUNTIME_VOLUME, "mountPath": WATCH_RUNTIME_PATH},
            {"name": _WATCH_TOKEN_VOLUME, "mountPath": WATCH_TOKEN_PATH, "readOnly": True},
        ],
        "resources": _compute_sidecar_resources(pod, rules),
        "securityContext": build_own_security_context(pod, container),
    }


def _receives_progress(pod: Object, rules: InjectionRules) -> bool:
    """Return whether the sidecar receives the script's progress. In the node's network its port may be taken."""
    return rules.kubeflow_progress and not pod["spec"].get("hostNetwork")


def build_own_security_context(pod: Object, container: Object) -> Object:
    """Build the context of the containers that run Pacekeeper's image.

    They run as the user of the ranks, since they share files, but never as root. Without a user in the pod it is that
    of the image; some platforms choose one and refuse others.
    """
    pod_context, context = pod["spec"].get("securityContext") or {}, container.get("securityContext") or {}
    user = context.get("runAsUser", pod_context.get("runAsUser"))
    identity = {} if user is None else {"runAsUser": user or UNPRIVILEGED_USER}
    return {**_INJECTED_SECURITY_CONTEXT, "runAsNonRoot": True, **identity}


def copy_resources(container: Object) -> Object:
    """Return requests and limits of an init container: those of the watched container.

    They fit each quota and LimitRange that the container fits. An init container adds nothing to what the pod requests,
    as it runs before the others, and the QoS class stays the same.
    """
    resources = container.get("resources") or {}
    copied = {
        kind: {name: resources[kind][name] for name in COPIED_RESOURCES if name in resources[kind]}
        for kind in ("requests", "limits")
        if resources.get(kind)
    }
    return {kind: quantities for kind, quantities in copied.items() if quantities}


def _compute_sidecar_resources(pod: Object, rules: InjectionRules) -> Object:
    """Return requests and limits of the sidecar, with which the QoS class of the pod stays the same.

    | Pod | Requests | Limits |
    |---|---|---|
    | Guaranteed | the configured limits | the configured limits |
    | BestEffort, or with resources of the whole pod | none | none |
    | Burstable | the configured requests | of resources that each container limits: a quota may require that |
    """
    spec = pod["spec"]
    containers = [*spec["containers"], *(spec.get("initContainers") or ())]
    requests, limits = dict(rules.resources["requests"]), dict(rules.resources["limits"])
    if spec.get("resources") or not any(_list_quantities(container) for container in containers):
        return {}
    if all(_is_guaranteed(container) for container in containers):
        return {"requests": limits, "limits": limits}
    limited = {
        name: quantity
        for name, quantity in limits.items()
        if all(name in ((container.get("resources") or {}).get("limits") or {}) for container in containers)
    }
    return {"requests": requests, **({"limits": limited} if limited else {})}


def _list_quantities(container: Object) -> list[str]:
    """Return the requests and limits that decide about the QoS class."""
    resources = container.get("resources") or {}
    groups = [resources.get(kind) or {} for kind in ("requests", "limits")]
    return [quantities[name] for quantities in groups for name in QOS_RESOURCES if name in quantities]


def _is_guaranteed(container: Object) -> bool:
    resources = container.get("resources") or {}
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    return all(
        name in limits and is_same_quantity(str(requests.get(name, limits[name])), str(limits[name]))
        for name in QOS_RESOURCES
    )


def _append_all(path: str, present: Sequence[Object] | None, additions: Sequence[Object]) -> list[Object]:
    """Return the operations that append to a list, which may not exist yet."""
    created = [] if present else [_build_addition(path, [])]
    return [*created, *(_build_addition(f"{path}/-", addition) for addition in additions)]


def _build_addition(path: str, value: Any) -> Object:
    return {"op": "add", "path": path, "value": value}

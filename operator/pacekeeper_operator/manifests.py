"""Pure builders: from a job and the installation's settings to the objects that the API server is sent.

A worker is the user's pod template with what Pacekeeper adds to it; nothing that the user wrote is lost or changed.
What must not be in a template is refused, with the reason (`refused_template`), and never left out silently.
"""

from __future__ import annotations

import copy
import posixpath
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_analysis.errors import InputError

from .api import (
    ANNOTATION_AVOIDS,
    API_VERSION,
    LABEL_CIRCLE,
    LABEL_JOB,
    LABEL_PROBE,
    LABEL_WORKER,
    METRICS_PORT,
    METRICS_PORT_NAME,
    SIDECAR,
    TAINT_QUARANTINE,
    TOKEN_AUDIENCE,
    TRAINER,
    UNREAD,
    Job,
    Object,
)
from .probe import SECRET
from .resources import SIDECAR_RESOURCES, Resources
from .tolerations import Toleration

GPU = "nvidia.com/gpu"
RUNTIME_PATH = "/run/pacekeeper"
TOKEN_PATH = "/var/run/secrets/pacekeeper"
DEFAULT_MESSAGE_PATH = "/dev/termination-log"  # Kubernetes' own default of terminationMessagePath
DEFAULT_GRACE_SECONDS = 30  # Kubernetes' own default of terminationGracePeriodSeconds
PROBE_SECONDS = 120
"""A probe pod ends itself, should there be no operator to end it."""
MOST_LEVELS = 64
"""Of a template; Kubernetes' own fields need a dozen."""
TOO_DEEP = f"is nested in more than {MOST_LEVELS} levels; compare it with `kubectl explain pod.spec`"

_OURS = "pacekeeper-"
"""What the names of our volumes begin with: no container of the template may mount one, and none may be made there."""
_RUNTIME = f"{_OURS}runtime"
_TOKEN = f"{_OURS}token"
_CHECKPOINTS = f"{_OURS}checkpoints"
_NODE_PORTS = range(20_000, 29_000)
"""Metrics ports of workers in their node's network: below those that systems give out and that Services take."""
_HOSTNAME = "kubernetes.io/hostname"
_RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Installation:
    """What all workers of this installation have in common."""

    operator_url: str  # https://host:port
    authority: str  # PEM of the certificate authority behind `operator_url`
    sidecar_image: str = ""  # "": the trainer's own image, which has Pacekeeper in it
    sidecar_pull_policy: str = ""  # "": the API server's default
    sidecar_resources: Resources = field(default_factory=lambda: SIDECAR_RESOURCES)


@dataclass(frozen=True)
class ProbeImage:
    """What probe pods run."""

    name: str
    pull_policy: str = ""  # "": the API server's default
    pull_secrets: tuple[str, ...] = ()  # names of Secrets in the operator's namespace
    runtime_class: str = ""  # of those that look at GPUs; "": the nodes' default
    tolerations: tuple[Toleration, ...] = ()  # besides those that every probe pod has


@dataclass(frozen=True)
class ProbeTask:
    """What a probe pod is to do, together with others of its circle. `peers`: node → address of pods that it measures
    the way to. `guests`: how many others measure the way to it. `secret`: by which they know each other."""

    circle: str
    secret: str = ""
    gpus: int = 0
    peers: Mapping[str, str] = field(default_factory=dict)
    guests: int = 0


def worker_pod(
    job: Job,
    ordinal: int,
    incarnation: int,
    installation: Installation,
    *,
    spare: bool = False,
    avoid_nodes: Sequence[str] = (),
    unreliable_nodes: Sequence[str] = (),
    node_labels: Mapping[str, str] | None = None,
    tolerations: Sequence[Object] = (),
    pod_group: str = "",
    checkpoints_apart: bool = True,
) -> Object:
    """A worker: the user's template, the sidecar, and what both need of volumes and environment.

    `spare`: it is made to be one, and is kept off the nodes of the job's other workers. `avoid_nodes`: suspects by
    name, whether they are tainted (a template may tolerate everything) or not (mode Recommend). `unreliable_nodes`: it
    is placed there only where the scheduler finds no other node as good.
    `node_labels`, `tolerations`: of the nodes that its queue has given it. `pod_group`: with which it is placed.
    `checkpoints_apart`: as for `checkpoint_sub_path`.
    Raises InputError where the template is too large.
    """
    if UNREAD in job.spec.template:  # of a job that an operator without this limit has accepted
        raise InputError(f"spec.template: {job.spec.template[UNREAD]}")
    template = copy.deepcopy(dict(job.spec.template))
    metadata, spec = template.get("metadata") or {}, template["spec"]
    trainer = next(container for container in spec["containers"] if container["name"] == TRAINER)
    spec.setdefault("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
    spec.setdefault("automountServiceAccountToken", False)
    # Variables of Services: one by the name of pacekeeper-metrics would set PACEKEEPER_METRICS_PORT.
    spec.setdefault("enableServiceLinks", False)
    spec["restartPolicy"] = "Never"  # a worker is never reused: the launcher restarts ranks, the operator replaces pods
    if _shares_the_nodes_network(job):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")  # else the sidecar would not find the operator's name
    message_path = trainer.get("terminationMessagePath", DEFAULT_MESSAGE_PATH)
    environment = _environment(job, spec["terminationGracePeriodSeconds"], message_path)
    storage = _storage(job, trainer)
    name = worker_name(job, ordinal, incarnation)
    sidecar = _sidecar(trainer, environment, installation, metrics_port(job, name))
    trainer["env"] = [*environment, *trainer.get("env", [])]  # first, so that the user's variables may refer to ours
    mounts: list[Object] = [{"name": volume["name"], "mountPath": path} for path, volume in storage]
    for mount in mounts:
        if mount["name"] == _CHECKPOINTS:
            mount |= _checkpoint_mount(job, checkpoints_apart)
    trainer["volumeMounts"] = [*trainer.get("volumeMounts", []), *mounts]
    # A script that fails before there is a launcher to say why: its last lines are the pod's message.
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    spec["volumes"] = [*spec.get("volumes", []), *(volume for _, volume in storage), _token()]
    spec["initContainers"] = [sidecar, *spec.get("initContainers", [])]
    if node_labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **node_labels}
    if tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *tolerations]
    if pod_group:
        spec.setdefault("schedulingGroup", {"podGroupName": pod_group})
    _place(job, spec, spare, avoid_nodes)
    if unreliable_nodes:
        _prefer_others(spec, unreliable_nodes)
    avoids = ",".join(avoid_nodes)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {**metadata.get("labels", {}), LABEL_JOB: job.name, LABEL_WORKER: str(ordinal)},
            "annotations": {**metadata.get("annotations", {}), **({ANNOTATION_AVOIDS: avoids} if avoids else {})},
            "ownerReferences": [owned_by(job)],
        },
        "spec": spec,
    }


def worker_name(job: Job, ordinal: int, incarnation: int) -> str:
    """Never used twice by a job: a replacement has the next incarnation."""
    return f"{job.name}-w{ordinal}-{incarnation}"


def checkpoint_sub_path(job: Job, apart: bool) -> str:
    """The folder of the claim that is mounted at `spec.checkpoint.path`; "": the claim itself.

    Each job has its own, or that of the job whose checkpoints it takes over. `apart`: False of a job that an operator
    began which knew of no such folders: its checkpoints lie in the claim itself.
    """
    wish = job.spec.checkpoint
    if wish.sub_path is not None:
        return wish.sub_path
    if wish.adopt and not wish.adopt.startswith("/"):  # else it is a script, which has no folder of this kind
        return wish.adopt.rpartition("/")[2]
    return job.name if apart else ""


def checkpoint_folder(job: Job, apart: bool) -> str:
    """Names the folder that the job's checkpoints go to, alike for all jobs of its namespace; "": it writes none, or
    its template mounts what may be another folder in each pod.

    `apart`: as for `checkpoint_sub_path`.
    """
    wish = job.spec.checkpoint
    if wish.read_only:
        return ""
    if wish.volume_claim_name:
        return _folder(f"claim {wish.volume_claim_name}", checkpoint_sub_path(job, apart))
    try:
        return _mounted_folder(job.spec.template["spec"], wish.path)
    except (AttributeError, KeyError, StopIteration, TypeError):  # no pod template: `refused_template` says so
        return ""


def _mounted_folder(spec: Object, path: str) -> str:
    """As `checkpoint_folder`, of a path that lies on a volume of the template."""
    trainer = next(container for container in spec["containers"] if container["name"] == TRAINER)
    mounts = [mount for mount in trainer.get("volumeMounts") or () if _is_below(path, mount["mountPath"])]
    mount = max(mounts, key=lambda each: len(each["mountPath"]), default=None)
    if mount is None or mount.get("subPathExpr"):
        return ""
    volume = next(volume for volume in spec["volumes"] if volume["name"] == mount["name"])
    inside = f"{mount.get('subPath', '')}/{path[len(mount['mountPath'].rstrip('/')) :]}"
    if claim := volume.get("persistentVolumeClaim"):
        return _folder(f"claim {claim['claimName']}", inside)
    if nfs := volume.get("nfs"):
        return _folder(f"nfs {nfs['server']}:{nfs['path']}", inside)
    return ""


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _folder(volume: str, inside: str) -> str:
    return posixpath.normpath(f"{volume}/{inside}")


def _checkpoint_mount(job: Job, apart: bool) -> Object:
    """What the claim's mount has besides name and path."""
    folder, read_only = checkpoint_sub_path(job, apart), job.spec.checkpoint.read_only
    return {**({"subPath": folder} if folder else {}), **({"readOnly": True} if read_only else {})}


def metrics_port(job: Job, worker: str) -> int:
    """At which the sidecar of the worker with this name serves its metrics.

    In the node's network (`hostNetwork`) each worker has a port of its own. It is declared, so that the scheduler
    itself keeps two with one port on different nodes; a replacement, whose name is another, gets another one.
    """
    if not _shares_the_nodes_network(job):
        return METRICS_PORT
    return _NODE_PORTS[zlib.crc32(f"{job.namespace}/{worker}".encode()) % len(_NODE_PORTS)]


def refused_template(job: Job) -> str:
    """What of the template would get around what holds for all jobs, with the remedy; "": nothing.

    The API server's own checks (the CRD's rules, the dry run) come besides.
    """
    if UNREAD in job.spec.template:
        return f"spec.template: {job.spec.template[UNREAD]}"
    if _is_deeper(job.spec.template, MOST_LEVELS):
        return f"spec.template: {TOO_DEEP}"
    try:
        return next((f"spec.template.spec.{words}" for words in _refusals(job.spec.template["spec"])), "")
    except (AttributeError, KeyError, TypeError) as error:
        return f"spec.template: is not a pod template ({error!r}); compare it with `kubectl explain pod.spec`"


def _is_deeper(template: Mapping[str, Any], levels: int) -> bool:
    """Level by level, as no recursion goes as deep as a tenant may nest."""
    level: list[Any] = [template]
    for _ in range(levels):
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def uses_gpus(job: Job) -> bool:
    """Whether its ranks have GPUs, and so talk by NCCL."""
    try:
        containers: list[Mapping[str, Any]] = job.spec.template["spec"]["containers"]
        trainer = next(container for container in containers if container["name"] == TRAINER)
        return str(trainer["resources"]["limits"][GPU]) != "0"
    except (AttributeError, KeyError, StopIteration, TypeError):
        return False


def state_object(job: Job, content: Object, resource_version: str = "") -> Object:
    """The job's TrainingJobState. `resource_version`: of the one that it replaces, for compare-and-swap; "": there is
    none yet."""
    metadata: Object = {
        "name": job.name,
        "namespace": job.namespace,
        "labels": {LABEL_JOB: job.name},
        "ownerReferences": [owned_by(job)],
    }
    if resource_version:
        metadata["resourceVersion"] = resource_version
    return {"apiVersion": API_VERSION, "kind": "TrainingJobState", "metadata": metadata, **content}


def probe_pod(
    name: str, namespace: str, node: Object, owner: Object, kind: str, image: ProbeImage, task: ProbeTask
) -> Object:
    """A short-lived pod on a `node`: it succeeds if the node can be used, and says how fast it is.

    It is bound to the node by name (a cordon keeps the scheduler away) and goes with its `owner`: the NodeQuarantine or
    NodeProbe (`kind`) that it serves.
    """
    limits = {"memory": "256Mi", **({GPU: str(task.gpus)} if task.gpus else {})}
    peers = [f"--peer={peer}={address}" for peer, address in task.peers.items()]
    container: Object = {
        "name": "probe",
        "image": image.name,
        **({"imagePullPolicy": image.pull_policy} if image.pull_policy else {}),
        "command": [
            *("python", "-m", "pacekeeper_operator.probe"),
            *(*peers, f"--guests={task.guests}", f"--gpus={task.gpus}"),
        ],
        "env": [_variable(SECRET, task.secret)],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": limits},
        "securityContext": dict(_RESTRICTED),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_PROBE: node["metadata"]["uid"], LABEL_CIRCLE: task.circle},
            "ownerReferences": [_reference(owner["metadata"], kind)],
        },
        "spec": {
            "nodeName": node["metadata"]["name"],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": PROBE_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": secret} for secret in image.pull_secrets],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532},
            "tolerations": [
                {"key": TAINT_QUARANTINE, "operator": "Exists"},
                {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"},
                *(dict(toleration) for toleration in image.tolerations),
            ],
            **({"runtimeClassName": image.runtime_class} if image.runtime_class and task.gpus else {}),
            "containers": [container],
        },
    }


def _refusals(spec: Object) -> Iterator[str]:
    if spec.get("nodeName"):
        yield (
            "nodeName: it would pass the scheduler by, and with it taints, cordons and resources; remove it and use "
            f"nodeSelector: {{{_HOSTNAME}: …}}"
        )
    for name in ("shareProcessNamespace", "hostPID"):
        if spec.get(name):
            yield f"{name}: with it other containers could read the sidecar's token; remove it"
    for i, toleration in enumerate(spec.get("tolerations") or ()):
        if toleration.get("key") == TAINT_QUARANTINE:
            yield f"tolerations[{i}]: {TAINT_QUARANTINE} marks nodes that are out of service; remove the toleration"
    yield from _refused_volumes(spec.get("volumes") or ())
    for name in ("initContainers", "containers", "ephemeralContainers"):
        for i, container in enumerate(spec.get(name) or ()):
            yield from (f"{name}[{i}].{words}" for words in _refused_container(container))


def _refused_volumes(volumes: Sequence[Object]) -> Iterator[str]:
    for i, volume in enumerate(volumes):
        if str(volume.get("name")).startswith(_OURS):
            yield f"volumes[{i}].name: {volume['name']} is Pacekeeper's own; rename the volume"
        for source in (volume.get("projected") or {}).get("sources") or ():
            if (source.get("serviceAccountToken") or {}).get("audience") == TOKEN_AUDIENCE:
                yield (
                    f"volumes[{i}].projected: audience {TOKEN_AUDIENCE} is for the sidecar alone; "
                    "remove the token, or use an audience of your own"
                )


def _refused_container(container: Object) -> Iterator[str]:
    if container.get("name") == SIDECAR:
        yield f"name: {SIDECAR} is the sidecar that Pacekeeper adds; remove the container, or rename it"
    for name in ("volumeMounts", "volumeDevices"):
        for i, mount in enumerate(container.get(name) or ()):
            if str(mount.get("name")).startswith(_OURS):
                yield f"{name}[{i}]: {mount['name']} is mounted by Pacekeeper where it is needed; remove the mount"


def _shares_the_nodes_network(job: Job) -> bool:
    return bool((job.spec.template.get("spec") or {}).get("hostNetwork"))


def _sidecar(trainer: Object, environment: list[Object], installation: Installation, port: int) -> Object:
    """A native sidecar: up before the trainer starts, ended after it, and no obstacle to the pod's completion."""
    identity = ("runAsUser", "runAsGroup", "runAsNonRoot")  # as the trainer's: they share files
    context = trainer.get("securityContext", {})
    sidecar: Object = {
        "name": SIDECAR,
        "image": installation.sidecar_image or trainer.get("image", ""),
        "command": ["python", "-m", "pacekeeper.sidecar"],
        "restartPolicy": "Always",
        "env": [
            *environment,
            _variable("PACEKEEPER_OPERATOR", installation.operator_url),
            _variable("PACEKEEPER_CA", installation.authority),
            _variable("PACEKEEPER_TOKEN_FILE", f"{TOKEN_PATH}/token"),
            _variable("PACEKEEPER_METRICS_PORT", port),
        ],
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": port}],
        "resources": {kind: dict(quantities) for kind, quantities in installation.sidecar_resources.items()},
        "securityContext": {**_RESTRICTED, **{key: context[key] for key in identity if key in context}},
        "startupProbe": _healthy(period=1, failures=60),
        "livenessProbe": _healthy(period=10, failures=3),
        "volumeMounts": [
            {"name": _RUNTIME, "mountPath": RUNTIME_PATH},
            {"name": _TOKEN, "mountPath": TOKEN_PATH, "readOnly": True},
        ],
    }
    policy = installation.sidecar_pull_policy if installation.sidecar_image else trainer.get("imagePullPolicy")
    if policy:
        sidecar["imagePullPolicy"] = policy
    return sidecar


def _healthy(period: int, failures: int) -> Object:
    """A probe of the sidecar; periods in seconds."""
    return {
        "httpGet": {"path": "/healthz", "port": METRICS_PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _environment(job: Job, grace_seconds: int, message_path: str) -> list[Object]:
    """Of trainer and sidecar; docs/architecture/environment.md lists it."""
    spec = job.spec
    hang_seconds, adopt = spec.detection.hang_seconds, spec.checkpoint.adopt
    adopted = adopt if "/" in adopt or not adopt else f"{job.namespace}/{adopt}"
    return [
        _variable("PACEKEEPER_RUNTIME", RUNTIME_PATH),
        _variable("PACEKEEPER_JOB", job.name),
        _variable("PACEKEEPER_JOB_UID", job.uid),
        _variable("PACEKEEPER_NAMESPACE", job.namespace),
        _from_pod("PACEKEEPER_WORKER", "metadata.name"),
        _from_pod("PACEKEEPER_NODE", "spec.nodeName"),
        _from_pod("PACEKEEPER_POD_IP", "status.podIP"),
        _variable("PACEKEEPER_NPROC", spec.nproc_per_node),
        _variable("PACEKEEPER_CHECKPOINT_PATH", spec.checkpoint.path),
        _variable("PACEKEEPER_CHECKPOINT_EVERY", spec.checkpoint.every_steps),
        _variable("PACEKEEPER_CHECKPOINT_KEEP", spec.checkpoint.keep),
        _variable("PACEKEEPER_CHECKPOINT_ADOPT", adopted),
        _variable("PACEKEEPER_CHECKPOINT_READ_ONLY", int(spec.checkpoint.read_only)),
        _variable("PACEKEEPER_HANG_SECONDS", "" if hang_seconds is None else f"{hang_seconds:g}"),
        _variable("PACEKEEPER_WINDOW_STEPS", spec.detection.window_steps),
        _variable("PACEKEEPER_GRACE_SECONDS", grace_seconds),
        _variable("PACEKEEPER_TERMINATION_LOG", message_path),
    ]


def _variable(name: str, value: str | int) -> Object:
    return {"name": name, "value": str(value)}


def _from_pod(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _storage(job: Job, trainer: Object) -> list[tuple[str, Object]]:
    """(mount path, volume) of what the trainer gets besides its own mounts."""
    # Memory volumes need no size limit of their own: what is in them counts against the containers' memory limits.
    storage: list[tuple[str, Object]] = [(RUNTIME_PATH, {"name": _RUNTIME, "emptyDir": {"medium": "Memory"}})]
    if all(mount["mountPath"].rstrip("/") != "/dev/shm" for mount in trainer.get("volumeMounts", [])):
        storage.append(("/dev/shm", {"name": f"{_OURS}shm", "emptyDir": {"medium": "Memory"}}))
    if claim := job.spec.checkpoint.volume_claim_name:
        volume = {"name": _CHECKPOINTS, "persistentVolumeClaim": {"claimName": claim}}
        storage.append((job.spec.checkpoint.path, volume))
    return storage


def _token() -> Object:
    """The sidecar's proof of who it is; the kubelet renews it before it expires."""
    token = {"audience": TOKEN_AUDIENCE, "expirationSeconds": 3600, "path": "token"}
    return {"name": _TOKEN, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _place(job: Job, spec: Object, spare: bool, avoid_nodes: Sequence[str]) -> None:
    """Adds our wishes to the template's own affinity.

    A spare on a worker's node would be lost with it: that is required. Workers are spread where the user has no wish of
    his own (he may want them close together).
    """
    affinity = spec.get("affinity") or {}
    others = {"labelSelector": {"matchLabels": {LABEL_JOB: job.name}}, "topologyKey": _HOSTNAME}
    users_choice = affinity.keys() & {"podAffinity", "podAntiAffinity"} or spec.get("topologySpreadConstraints")
    if spare:
        apart = affinity.setdefault("podAntiAffinity", {})
        apart.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(others)
    elif not users_choice:
        wish = {"weight": 100, "podAffinityTerm": others}
        affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    if avoid_nodes:
        required = affinity.setdefault("nodeAffinity", {}).setdefault(
            "requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]}
        )
        # The terms are alternatives, so each must exclude the nodes; the API server takes one name a requirement.
        excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoid_nodes]
        for term in required["nodeSelectorTerms"]:
            term["matchFields"] = [*term.get("matchFields", []), *excluded]
    if affinity:
        spec["affinity"] = affinity


def _prefer_others(spec: Object, nodes: Sequence[str]) -> None:
    """Add a preference for all nodes but these. Its weight is the least that there is, so that a preference of the
    template's own counts more."""
    names = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    wish = {"weight": 1, "preference": {"matchFields": names}}
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    wishes = of_nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    of_nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [*wishes, wish]
    spec["affinity"] = {**affinity, "nodeAffinity": of_nodes}


def owned_by(job: Job) -> Object:
    return _reference({"name": job.name, "uid": job.uid}, "TrainingJob")


def _reference(metadata: Mapping[str, Any], kind: str) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }

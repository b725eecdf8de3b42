"""Pure builders of the objects that the API server is sent, from a job and the installation's settings.

A worker is the user's pod template with additions of Pacekeeper; nothing that the user wrote is lost or changed. What
is not allowed in a template is refused with the reason (`find_template_refusal`), and never dropped silently.
"""

from __future__ import annotations

import copy
import posixpath
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import CLAIM_SCHEME

from ..api.names import (
    ANNOTATION_AVOIDED_NODES,
    ANNOTATION_TRAINER,
    API_VERSION,
    DROPPED_TEMPLATE_KEY,
    LABEL_JOB,
    LABEL_PROBE,
    LABEL_PROBE_GROUP,
    LABEL_WORKER,
    METRICS_PORT,
    METRICS_PORT_NAME,
    SIDECAR_CONTAINER,
    TAINT_QUARANTINE,
    TOKEN_AUDIENCE,
    Object,
)
from ..api.training_job import TrainingJob
from ..node_probe import PROBE_SECRET_VARIABLE
from .injection import INJECTED_CONTAINERS
from .resources import SIDECAR_RESOURCES, Resources
from .tolerations import Toleration
from .trainer_container import find_command_refusal, find_trainer_container, has_own_launcher
from .worker_payload import add_payload

GPU_RESOURCE = "nvidia.com/gpu"
RUNTIME_PATH = "/run/pacekeeper"
TOKEN_PATH = "/var/run/secrets/pacekeeper"
DEFAULT_MESSAGE_PATH = "/dev/termination-log"  # Kubernetes' own default of terminationMessagePath
DEFAULT_GRACE_SECONDS = 30  # Kubernetes' own default of terminationGracePeriodSeconds
PROBE_POD_DEADLINE_SECONDS = 120
"""Deadline after which a probe pod ends by itself, should there be no operator to delete it."""
MAX_TEMPLATE_LEVELS = 64
"""Levels of a template. Kubernetes' own fields need a dozen."""
TOO_DEEP_MESSAGE = f"is nested in more than {MAX_TEMPLATE_LEVELS} levels; compare it with `kubectl explain pod.spec`"

_VOLUME_PREFIX = "pacekeeper-"
"""Prefix of the names of our volumes. The template may not define volumes with this prefix, nor mount them."""
TOKEN_VOLUME = f"{_VOLUME_PREFIX}token"
RUNTIME_VOLUME = f"{_VOLUME_PREFIX}runtime"
_CHECKPOINT_VOLUME = f"{_VOLUME_PREFIX}checkpoints"
_HOST_NETWORK_METRICS_PORTS = range(20_000, 29_000)
"""Metrics ports of workers in their node's network. They lie below the ranges of ephemeral ports and of NodePorts."""
_HOSTNAME_LABEL = "kubernetes.io/hostname"
RESTRICTED_SECURITY_CONTEXT: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Installation:
    """The settings that all workers of this installation have in common."""

    operator_url: str  # https://host:port
    authority: str  # PEM of the certificate authority behind `operator_url`
    sidecar_image: str = ""  # "": the trainer's own image, which contains Pacekeeper
    sidecar_pull_policy: str = ""  # "": the API server's default
    sidecar_resources: Resources = field(default_factory=lambda: SIDECAR_RESOURCES)


@dataclass(frozen=True)
class ProbeImage:
    """The image of probe pods, and how they run it."""

    name: str
    pull_policy: str = ""  # "": the API server's default
    pull_secrets: tuple[str, ...] = ()  # names of Secrets in the operator's namespace
    runtime_class: str = ""  # of those that probe GPUs; "": the nodes' default
    tolerations: tuple[Toleration, ...] = ()  # in addition to those of every probe pod


@dataclass(frozen=True)
class NodeProbeTask:
    """The task of a probe pod, together with the others of its group.

    `peers` maps nodes to the addresses of pods to which it measures the path. `inbound_peers` is how many others
    measure the path to it. `secret` authenticates the pods of the group to each other.
    """

    group: str
    secret: str = ""
    gpus: int = 0
    peers: Mapping[str, str] = field(default_factory=dict)
    inbound_peers: int = 0


@dataclass(frozen=True)
class SchedulingConstraints:
    """The nodes for a worker, in addition to what its template says."""

    avoid_nodes: Sequence[str] = ()  # suspect nodes, tainted (a template may tolerate everything) or not (Recommend)
    unreliable_nodes: Sequence[str] = ()  # used only if the scheduler finds no other node as good
    node_labels: Mapping[str, str] = field(default_factory=dict)  # of the nodes that the job's queue assigned
    tolerations: Sequence[Object] = ()  # of the taints of these nodes
    pod_group: str = ""  # the PodGroup with which the worker is placed


ANY_NODE = SchedulingConstraints()


def build_worker_pod(
    job: TrainingJob,
    ordinal: int,
    incarnation: int,
    installation: Installation,
    *,
    spare: bool = False,
    scheduling: SchedulingConstraints = ANY_NODE,
) -> Object:
    """Build a worker: the user's template, the sidecar, and the volumes and variables that both need.

    `spare`: the worker is created as a spare, and kept off the nodes of the job's other workers.

    Raises InputError if the template is too large.
    """
    if DROPPED_TEMPLATE_KEY in job.spec.template:  # the job was accepted by an operator without this limit
        raise InputError(f"spec.template: {job.spec.template[DROPPED_TEMPLATE_KEY]}")
    template = copy.deepcopy(dict(job.spec.template))
    metadata, spec = template.get("metadata") or {}, template["spec"]
    trainer_name = find_trainer_container(job)["name"]
    trainer = next(container for container in spec["containers"] if container["name"] == trainer_name)
    spec.setdefault("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
    spec.setdefault("automountServiceAccountToken", False)
    # Variables of Services: one named pacekeeper-metrics would set PACEKEEPER_METRICS_PORT.
    spec.setdefault("enableServiceLinks", False)
    spec["restartPolicy"] = "Never"  # workers are never reused: the launcher restarts ranks, the operator pods
    if uses_host_network(job):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")  # else the sidecar cannot resolve the operator's name
    message_path = trainer.get("terminationMessagePath", DEFAULT_MESSAGE_PATH)
    environment = _build_environment(job, spec["terminationGracePeriodSeconds"], message_path)
    storage = _build_storage(job, trainer)
    name = build_worker_name(job, ordinal, incarnation)
    init_containers = [_build_sidecar(trainer, environment, installation, compute_metrics_port(job, name))]
    trainer["env"] = [*environment, *trainer.get("env", [])]  # first, so that the user's variables may refer to ours
    mounts: list[Object] = [{"name": volume["name"], "mountPath": path} for path, volume in storage]
    for mount in mounts:
        if mount["name"] == _CHECKPOINT_VOLUME:
            mount |= build_checkpoint_mount(job)
    trainer["volumeMounts"] = [*trainer.get("volumeMounts", []), *mounts]
    # If a script fails before a launcher can give the reason, its last lines are the pod's message.
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    spec["volumes"] = [*spec.get("volumes", []), *(volume for _, volume in storage), build_token_volume()]
    if installation.sidecar_image and not has_own_launcher(trainer):
        runtime = {"name": RUNTIME_VOLUME, "mountPath": RUNTIME_PATH}
        image, policy = installation.sidecar_image, installation.sidecar_pull_policy
        init_containers = [*add_payload(spec, trainer, image, policy, runtime), *init_containers]
    spec["initContainers"] = [*init_containers, *spec.get("initContainers", [])]
    if scheduling.node_labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **scheduling.node_labels}
    if scheduling.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *scheduling.tolerations]
    if scheduling.pod_group:
        spec.setdefault("schedulingGroup", {"podGroupName": scheduling.pod_group})
    _add_affinity(job, spec, spare, scheduling.avoid_nodes)
    if scheduling.unreliable_nodes:
        _add_node_preference(spec, scheduling.unreliable_nodes)
    avoided = ",".join(scheduling.avoid_nodes)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {**metadata.get("labels", {}), LABEL_JOB: job.name, LABEL_WORKER: str(ordinal)},
            "annotations": {
                **metadata.get("annotations", {}),
                ANNOTATION_TRAINER: trainer_name,
                **({ANNOTATION_AVOIDED_NODES: avoided} if avoided else {}),
            },
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": spec,
    }


def build_worker_name(job: TrainingJob, ordinal: int, incarnation: int) -> str:
    """Return the name of a worker. A job never uses one twice: a replacement has the next incarnation."""
    return f"{job.name}-w{ordinal}-{incarnation}"


def choose_checkpoint_sub_path(job: TrainingJob) -> str:
    """Return the folder of the claim that is mounted at `spec.checkpoint.path`, or below the URI; "": the root.

    Each job has its own folder, or that of the job whose checkpoints it adopts.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint.sub_path is not None:
        return checkpoint.sub_path
    if checkpoint.adopt and not checkpoint.adopt.startswith("/"):  # otherwise it is a script, which has no such folder
        return checkpoint.adopt.rpartition("/")[2]
    return job.name


def build_checkpoint_uri(job: TrainingJob) -> str:
    """Return the URI below which the job's checkpoints are stored; "": they are in a folder."""
    if job.spec.checkpoint.uses_server:
        return f"{CLAIM_SCHEME}{job.spec.checkpoint.volume_claim_name}/{choose_checkpoint_sub_path(job)}".rstrip("/")
    if not job.spec.checkpoint.uri:
        return ""
    return f"{job.spec.checkpoint.uri}/{choose_checkpoint_sub_path(job)}".rstrip("/")


def identify_checkpoint_folder(job: TrainingJob) -> str:
    """Return a key of the job's checkpoint folder, the same for all jobs of its namespace that use the folder.

    It is "" if the job writes no checkpoints, or if its template mounts what may be another folder in each pod.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint.read_only:
        return ""
    path = checkpoint.path
    if checkpoint.uri:
        uri = build_checkpoint_uri(job)
        if not uri.startswith("file://"):
            return uri
        path = uri.removeprefix("file://")
    elif checkpoint.volume_claim_name:
        return _join_folder(f"claim {checkpoint.volume_claim_name}", choose_checkpoint_sub_path(job))
    try:
        return _identify_mounted_folder(job.spec.template["spec"], find_trainer_container(job), path)
    except (InputError, AttributeError, KeyError, StopIteration, TypeError):
        # No pod template: `find_template_refusal` reports it.
        return ""


def _identify_mounted_folder(spec: Object, trainer: Object, path: str) -> str:
    """Return the key of a folder on a volume of the template, as `identify_checkpoint_folder` does."""
    mounts = [mount for mount in trainer.get("volumeMounts") or () if _is_below(path, mount["mountPath"])]
    mount = max(mounts, key=lambda candidate: len(candidate["mountPath"]), default=None)
    if mount is None or mount.get("subPathExpr"):
        return ""
    volume = next(volume for volume in spec["volumes"] if volume["name"] == mount["name"])
    sub_path = f"{mount.get('subPath', '')}/{path[len(mount['mountPath'].rstrip('/')) :]}"
    if claim := volume.get("persistentVolumeClaim"):
        return _join_folder(f"claim {claim['claimName']}", sub_path)
    if nfs := volume.get("nfs"):
        return _join_folder(f"nfs {nfs['server']}:{nfs['path']}", sub_path)
    return ""


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _join_folder(volume: str, sub_path: str) -> str:
    return posixpath.normpath(f"{volume}/{sub_path}")


def build_checkpoint_volume(job: TrainingJob) -> Object:
    """Build the volume of `spec.checkpoint.volumeClaimName`."""
    claim = {"claimName": job.spec.checkpoint.volume_claim_name}
    return {"name": _CHECKPOINT_VOLUME, "persistentVolumeClaim": claim}


def build_checkpoint_mount(job: TrainingJob) -> Object:
    """Return the fields of the claim's mount in addition to name and path."""
    folder, read_only = choose_checkpoint_sub_path(job), job.spec.checkpoint.read_only
    return {**({"subPath": folder} if folder else {}), **({"readOnly": True} if read_only else {})}


def compute_metrics_port(job: TrainingJob, worker: str) -> int:
    """Return the port at which the sidecar of this worker serves its metrics.

    In the node's network (`hostNetwork`) each worker has a port of its own. It is declared, so that the scheduler keeps
    two workers with the same port on different nodes. A replacement, which has another name, gets another port.
    """
    if not uses_host_network(job):
        return METRICS_PORT
    return _HOST_NETWORK_METRICS_PORTS[
        zlib.crc32(f"{job.namespace}/{worker}".encode()) % len(_HOST_NETWORK_METRICS_PORTS)
    ]


def find_template_refusal(job: TrainingJob) -> str:
    """Return what of the template would bypass the rules for all jobs, with the remedy; "": nothing.

    The API server's own checks (the CRD's rules, the dry run) come in addition.
    """
    if DROPPED_TEMPLATE_KEY in job.spec.template:
        return f"spec.template: {job.spec.template[DROPPED_TEMPLATE_KEY]}"
    if _is_deeper(job.spec.template, MAX_TEMPLATE_LEVELS):
        return f"spec.template: {TOO_DEEP_MESSAGE}"
    try:
        for refusal in _iterate_refusals(job.spec.template["spec"]):
            return f"spec.template.spec.{refusal}"
        refusal = find_command_refusal(find_trainer_container(job))
        return refusal and f"spec.template.spec.containers: {refusal}"
    except InputError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError) as error:
        return f"spec.template: is not a pod template ({error!r}); compare it with `kubectl explain pod.spec`"


def _is_deeper(template: Mapping[str, Any], levels: int) -> bool:
    """Return whether a template is nested more deeply.

    It works level by level, as recursion would fail at the depth that a tenant may nest.
    """
    level: list[Any] = [template]
    for _ in range(levels):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return True


def uses_gpus(job: TrainingJob) -> bool:
    """Return whether the job's ranks have GPUs, and so communicate by NCCL."""
    try:
        trainer = find_trainer_container(job)
        return str(trainer["resources"]["limits"][GPU_RESOURCE]) != "0"
    except (InputError, AttributeError, KeyError, TypeError):
        return False


def build_state_object(job: TrainingJob, content: Object, resource_version: str = "") -> Object:
    """Build the job's TrainingJobState.

    `resource_version` is that of the object that it replaces, for compare-and-swap; "": there is none yet.
    """
    metadata: Object = {
        "name": job.name,
        "namespace": job.namespace,
        "labels": {LABEL_JOB: job.name},
        "ownerReferences": [build_owner_reference(job)],
    }
    if resource_version:
        metadata["resourceVersion"] = resource_version
    return {"apiVersion": API_VERSION, "kind": "TrainingJobState", "metadata": metadata, **content}


def build_probe_pod(
    name: str, namespace: str, node: Object, owner: Object, kind: str, image: ProbeImage, task: NodeProbeTask
) -> Object:
    """Build a short-lived pod on a `node`: it succeeds if the node is usable, and reports how fast the node is.

    It is bound to the node by name (a cordon blocks the scheduler). It is deleted with its `owner`, the NodeQuarantine
    or NodeProbe (`kind`) that it serves.
    """
    limits = {"memory": "256Mi", **({GPU_RESOURCE: str(task.gpus)} if task.gpus else {})}
    peers = [f"--peer={peer}={address}" for peer, address in task.peers.items()]
    container: Object = {
        "name": "probe",
        "image": image.name,
        **({"imagePullPolicy": image.pull_policy} if image.pull_policy else {}),
        "command": [
            *("python", "-m", "pacekeeper_operator.node_probe"),
            *(*peers, f"--inbound-peers={task.inbound_peers}", f"--gpus={task.gpus}"),
        ],
        "env": [build_variable(PROBE_SECRET_VARIABLE, task.secret)],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": limits},
        "securityContext": dict(RESTRICTED_SECURITY_CONTEXT),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_PROBE: node["metadata"]["uid"], LABEL_PROBE_GROUP: task.group},
            "ownerReferences": [_build_reference(owner["metadata"], kind)],
        },
        "spec": {
            "nodeName": node["metadata"]["name"],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": PROBE_POD_DEADLINE_SECONDS,
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


def _iterate_refusals(spec: Object) -> Iterator[str]:
    if spec.get("nodeName"):
        yield (
            "nodeName: it would bypass the scheduler, and so taints, cordons, and resources; remove it and use "
            f"nodeSelector: {{{_HOSTNAME_LABEL}: …}}"
        )
    for name in ("shareProcessNamespace", "hostPID"):
        if spec.get(name):
            yield f"{name}: with it other containers could read the sidecar's token; remove it"
    for i, toleration in enumerate(spec.get("tolerations") or ()):
        if toleration.get("key") == TAINT_QUARANTINE:
            yield f"tolerations[{i}]: {TAINT_QUARANTINE} marks nodes that are out of service; remove the toleration"
    yield from _iterate_volume_refusals(spec.get("volumes") or ())
    for name in ("initContainers", "containers", "ephemeralContainers"):
        for i, container in enumerate(spec.get(name) or ()):
            yield from (f"{name}[{i}].{refusal}" for refusal in _iterate_container_refusals(container))


def _iterate_volume_refusals(volumes: Sequence[Object]) -> Iterator[str]:
    for i, volume in enumerate(volumes):
        if str(volume.get("name")).startswith(_VOLUME_PREFIX):
            yield f"volumes[{i}].name: {volume['name']} is Pacekeeper's own; rename the volume"
        for source in (volume.get("projected") or {}).get("sources") or ():
            if (source.get("serviceAccountToken") or {}).get("audience") == TOKEN_AUDIENCE:
                yield (
                    f"volumes[{i}].projected: audience {TOKEN_AUDIENCE} is for the sidecar alone; "
                    "remove the token, or use an audience of your own"
                )


def _iterate_container_refusals(container: Object) -> Iterator[str]:
    if container.get("name") in (SIDECAR_CONTAINER, *INJECTED_CONTAINERS):
        yield f"name: {container['name']} is a container that Pacekeeper adds; remove the container, or rename it"
    for name in ("volumeMounts", "volumeDevices"):
        for i, mount in enumerate(container.get(name) or ()):
            if str(mount.get("name")).startswith(_VOLUME_PREFIX):
                yield f"{name}[{i}]: {mount['name']} is mounted by Pacekeeper where it is needed; remove the mount"


def uses_host_network(job: TrainingJob) -> bool:
    """Return whether the workers have their nodes' addresses."""
    return bool((job.spec.template.get("spec") or {}).get("hostNetwork"))


def _build_sidecar(trainer: Object, environment: list[Object], installation: Installation, port: int) -> Object:
    """Build a native sidecar: it starts before the trainer, ends after it, and does not delay the pod's completion."""
    identity = ("runAsUser", "runAsGroup", "runAsNonRoot")  # the trainer's: they share files
    context = trainer.get("securityContext", {})
    sidecar: Object = {
        "name": SIDECAR_CONTAINER,
        "image": installation.sidecar_image or trainer.get("image", ""),
        "command": ["python", "-m", "pacekeeper.sidecar"],
        "restartPolicy": "Always",
        "env": [
            *environment,
            build_variable("PACEKEEPER_OPERATOR", installation.operator_url),
            build_variable("PACEKEEPER_CA", installation.authority),
            build_variable("PACEKEEPER_TOKEN_FILE", f"{TOKEN_PATH}/token"),
            build_variable("PACEKEEPER_METRICS_PORT", port),
        ],
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": port}],
        "resources": {kind: dict(quantities) for kind, quantities in installation.sidecar_resources.items()},
        "securityContext": {
            **RESTRICTED_SECURITY_CONTEXT,
            **{key: context[key] for key in identity if key in context},
        },
        "startupProbe": build_health_probe(METRICS_PORT_NAME, period=1, failures=60),
        "livenessProbe": build_health_probe(METRICS_PORT_NAME, period=10, failures=3),
        "volumeMounts": [
            {"name": RUNTIME_VOLUME, "mountPath": RUNTIME_PATH},
            {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True},
        ],
    }
    policy = installation.sidecar_pull_policy if installation.sidecar_image else trainer.get("imagePullPolicy")
    if policy:
        sidecar["imagePullPolicy"] = policy
    return sidecar


def build_health_probe(port: str, period: int, failures: int) -> Object:
    """Build a probe of the container that serves the port of this name. `period` is in seconds."""
    return {
        "httpGet": {"path": "/healthz", "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _build_environment(job: TrainingJob, grace_seconds: int, message_path: str) -> list[Object]:
    """Return the variables of trainer and sidecar. docs/architecture/environment.md lists them."""
    spec = job.spec
    hang_seconds, adopt = spec.detection.hang_seconds, spec.checkpoint.adopt
    checkpoint_uri = build_checkpoint_uri(job)
    adopted = adopt if "/" in adopt or not adopt else f"{job.namespace}/{adopt}"
    return [
        build_variable("PACEKEEPER_RUNTIME", RUNTIME_PATH),
        build_variable("PACEKEEPER_JOB", job.name),
        build_variable("PACEKEEPER_JOB_UID", job.uid),
        build_variable("PACEKEEPER_NAMESPACE", job.namespace),
        _build_pod_field_variable("PACEKEEPER_WORKER", "metadata.name"),
        _build_pod_field_variable("PACEKEEPER_NODE", "spec.nodeName"),
        _build_pod_field_variable("PACEKEEPER_POD_IP", "status.podIP"),
        build_variable("PACEKEEPER_NPROC", spec.nproc_per_node),
        build_variable("PACEKEEPER_CHECKPOINT_PATH", "" if checkpoint_uri else spec.checkpoint.path),
        build_variable("PACEKEEPER_CHECKPOINT_URI", checkpoint_uri),
        build_variable("PACEKEEPER_CHECKPOINT_EVERY", spec.checkpoint.every_steps),
        build_variable("PACEKEEPER_CHECKPOINT_KEEP", spec.checkpoint.keep),
        build_variable("PACEKEEPER_CHECKPOINT_ADOPT", adopted),
        build_variable("PACEKEEPER_CHECKPOINT_READ_ONLY", int(spec.checkpoint.read_only)),
        build_variable("PACEKEEPER_HANG_SECONDS", "" if hang_seconds is None else f"{hang_seconds:g}"),
        build_variable("PACEKEEPER_WINDOW_STEPS", spec.detection.window_steps),
        build_variable("PACEKEEPER_GRACE_SECONDS", grace_seconds),
        build_variable("PACEKEEPER_TERMINATION_LOG", message_path),
    ]


def build_variable(name: str, value: str | int) -> Object:
    """Build an environment variable of a container."""
    return {"name": name, "value": str(value)}


def _build_pod_field_variable(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _build_storage(job: TrainingJob, trainer: Object) -> list[tuple[str, Object]]:
    """Return (mount path, volume) of the volumes that the trainer gets in addition to its own mounts."""
    # Memory volumes need no size limit: their content counts against the containers' memory limits.
    storage: list[tuple[str, Object]] = [(RUNTIME_PATH, {"name": RUNTIME_VOLUME, "emptyDir": {"medium": "Memory"}})]
    if all(mount["mountPath"].rstrip("/") != "/dev/shm" for mount in trainer.get("volumeMounts", [])):
        storage.append(("/dev/shm", {"name": f"{_VOLUME_PREFIX}shm", "emptyDir": {"medium": "Memory"}}))
    if job.spec.checkpoint.volume_claim_name and not job.spec.checkpoint.uses_server:
        storage.append((job.spec.checkpoint.path, build_checkpoint_volume(job)))
    return storage


def build_token_volume() -> Object:
    """Build the volume of the sidecar's identity token. The kubelet renews it before it expires."""
    token = {"audience": TOKEN_AUDIENCE, "expirationSeconds": 3600, "path": "token"}
    return {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _add_affinity(job: TrainingJob, spec: Object, spare: bool, avoid_nodes: Sequence[str]) -> None:
    """Add affinity to the template's own.

    A spare on a worker's node would be lost with it, so another node is required. Workers are spread unless the user's
    template has a preference (the user may want them close together).
    """
    affinity = spec.get("affinity") or {}
    workers: Object = {"matchLabels": {LABEL_JOB: job.name}}
    if job.spec.checkpoint.uses_server:  # its pod has the job's label too, and keeps no worker off its node
        workers["matchExpressions"] = [{"key": LABEL_WORKER, "operator": "Exists"}]
    worker_term = {"labelSelector": workers, "topologyKey": _HOSTNAME_LABEL}
    users_choice = affinity.keys() & {"podAffinity", "podAntiAffinity"} or spec.get("topologySpreadConstraints")
    if spare:
        anti_affinity = affinity.setdefault("podAntiAffinity", {})
        anti_affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(worker_term)
    elif not users_choice:
        preference = {"weight": 100, "podAffinityTerm": worker_term}
        affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}
    if avoid_nodes:
        required = affinity.setdefault("nodeAffinity", {}).setdefault(
            "requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]}
        )
        # The terms are alternatives, so each must exclude the nodes. The API server accepts one name per requirement.
        excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoid_nodes]
        for term in required["nodeSelectorTerms"]:
            term["matchFields"] = [*term.get("matchFields", []), *excluded]
    if affinity:
        spec["affinity"] = affinity


def _add_node_preference(spec: Object, nodes: Sequence[str]) -> None:
    """Add a preference for all nodes but these.

    Its weight is the lowest, so that a preference of the template counts more.
    """
    expressions = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    preference = {"weight": 1, "preference": {"matchFields": expressions}}
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    preferences = node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    node_affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [*preferences, preference]
    spec["affinity"] = {**affinity, "nodeAffinity": node_affinity}


def build_owner_reference(job: TrainingJob) -> Object:
    return _build_reference({"name": job.name, "uid": job.uid}, job.kind)


def _build_reference(metadata: Mapping[str, Any], kind: str) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }

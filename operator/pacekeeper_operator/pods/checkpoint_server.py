"""The pod through which a job's workers reach a claim that only one node can mount. Pure.

It runs where the user's workers may run, as the user that they run as, and with no more rights.
"""

from __future__ import annotations

import copy
import hashlib

from pacekeeper_analysis.protocol.plan import CHECKPOINT_SERVER_PORT

from ..api.names import CHECKPOINT_SERVER_CONTAINER, LABEL_JOB, Object
from ..api.training_job import TrainingJob
from .manifests import (
    RESTRICTED_SECURITY_CONTEXT,
    RUNTIME_PATH,
    RUNTIME_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
    Installation,
    build_checkpoint_mount,
    build_checkpoint_volume,
    build_health_probe,
    build_owner_reference,
    build_token_volume,
    build_variable,
    choose_checkpoint_sub_path,
)
from .resources import Resources
from .trainer_container import find_trainer_container

CHECKPOINT_SERVER_RESOURCES: Resources = {
    "requests": {"cpu": "50m", "memory": "128Mi"},
    "limits": {"memory": "512Mi"},
}
"""The server holds one chunk of each request that it serves at a time. More workers need no more memory."""
_CLAIM_PATH = "/checkpoints"
_GRACE_SECONDS = 10
_OWN_IMAGE_GROUP = 65532
"""Group of the user of Pacekeeper's own image."""
_PORT_NAME = "checkpoints"
_NAME_PART, _NAME_DIGITS = "-checkpoints-", 8
_SCHEDULING_FIELDS = (
    *("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName", "preemptionPolicy"),
    "serviceAccountName",  # without its token: it may name pull secrets, and a platform may admit users by it
)
"""Fields of the template that hold for this pod as well."""
_POD_IDENTITY_FIELDS = (
    *("runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "fsGroupChangePolicy", "supplementalGroups"),
    *("supplementalGroupsPolicy", "seLinuxOptions"),
)
_CONTAINER_IDENTITY_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions")


def build_checkpoint_server_pod(job: TrainingJob, installation: Installation, name: str) -> Object:
    """Build the pod. `name`: see `build_checkpoint_server_name`. Raises InputError if no container trains.

    It takes the job's secret from the operator by its token, as a pod's variables may be read by more people.
    """
    template = copy.deepcopy(job.spec.template["spec"])
    trainer = find_trainer_container(job)
    spec: Object = {name: template[name] for name in _SCHEDULING_FIELDS if name in template}
    if node_affinity := (template.get("affinity") or {}).get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": node_affinity}
    spec |= {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _build_pod_security_context(template, trainer, installation),
        "volumes": [
            build_checkpoint_volume(job),
            {"name": RUNTIME_VOLUME, "emptyDir": {"medium": "Memory"}},
            build_token_volume(),
        ],
        "containers": [_build_container(job, trainer, installation, name)],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": spec,
    }


def build_checkpoint_server_name(job: TrainingJob, secret: str) -> str:
    """Return the name of the pod, which its successor has as well.

    A pod with another secret or another folder has another name. So it is none of the job's, and is deleted.
    """
    checkpoint = job.spec.checkpoint
    served = (secret, checkpoint.volume_claim_name, choose_checkpoint_sub_path(job), checkpoint.read_only)
    return f"{job.name}{_NAME_PART}{hashlib.sha256(repr(served).encode()).hexdigest()[:_NAME_DIGITS]}"


def is_checkpoint_server_name(job: TrainingJob, name: str) -> bool:
    """Return whether a pod of the job is a checkpoint server, and no worker."""
    return name.startswith(f"{job.name}{_NAME_PART}")


def _build_container(job: TrainingJob, trainer: Object, installation: Installation, name: str) -> Object:
    context = trainer.get("securityContext") or {}
    policy = installation.sidecar_pull_policy if installation.sidecar_image else trainer.get("imagePullPolicy")
    return {
        "name": CHECKPOINT_SERVER_CONTAINER,
        "image": installation.sidecar_image or trainer.get("image", ""),
        **({"imagePullPolicy": policy} if policy else {}),
        "command": ["python", "-m", "pacekeeper.checkpointing.server"],
        "env": [
            build_variable("PACEKEEPER_CHECKPOINT_PATH", _CLAIM_PATH),
            build_variable("PACEKEEPER_CHECKPOINT_PORT", CHECKPOINT_SERVER_PORT),
            build_variable("PACEKEEPER_WORKER", name),
            build_variable("PACEKEEPER_RUNTIME", RUNTIME_PATH),
            build_variable("PACEKEEPER_OPERATOR", installation.operator_url),
            build_variable("PACEKEEPER_CA", installation.authority),
            build_variable("PACEKEEPER_TOKEN_FILE", f"{TOKEN_PATH}/token"),
        ],
        "ports": [{"name": _PORT_NAME, "containerPort": CHECKPOINT_SERVER_PORT}],
        "resources": {kind: dict(quantities) for kind, quantities in CHECKPOINT_SERVER_RESOURCES.items()},
        "securityContext": {
            **RESTRICTED_SECURITY_CONTEXT,
            **{name: context[name] for name in _CONTAINER_IDENTITY_FIELDS if name in context},
        },
        "readinessProbe": build_health_probe(_PORT_NAME, period=5, failures=3),
        "livenessProbe": build_health_probe(_PORT_NAME, period=10, failures=6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": build_checkpoint_volume(job)["name"], "mountPath": _CLAIM_PATH, **build_checkpoint_mount(job)},
            {"name": RUNTIME_VOLUME, "mountPath": RUNTIME_PATH},
            {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True},
        ],
    }


def _build_pod_security_context(template: Object, trainer: Object, installation: Installation) -> Object:
    """Return the workers' user and groups.

    Where the image of the workers decides about them, Pacekeeper's own image has another user. It then needs a group
    that may write to the claim.
    """
    context = template.get("securityContext") or {}
    chosen = {name: context[name] for name in _POD_IDENTITY_FIELDS if name in context}
    has_user = "runAsUser" in context or "runAsUser" in (trainer.get("securityContext") or {})
    if installation.sidecar_image and not has_user:
        chosen.setdefault("fsGroup", _OWN_IMAGE_GROUP)
    return chosen

"""The launcher and the library for the ranks, in workers whose image has no Pacekeeper. Pure.

An init container copies them from Pacekeeper's own image. Python's boot code in the trainer's container then puts the
launcher in torchrun's place. What the user wrote is kept.
"""

from __future__ import annotations

from ..api.names import Object
from .injection import (
    BOOT_PATH,
    PAYLOAD_CONTAINER,
    PAYLOAD_PATH,
    PAYLOAD_VOLUME,
    RECORDER_PATH,
    build_environment_container,
    build_own_security_context,
    copy_resources,
    find_python_path,
)
from .trainer_container import translate_python_command

LAUNCHER_PATH = f"{PAYLOAD_PATH}/runtime/bin/pacekeeper"
PAYLOAD_SIZE_LIMIT = "1Gi"
"""Several times its size."""


def add_payload(spec: Object, trainer: Object, image: str, pull_policy: str, runtime: Object) -> list[Object]:
    """Add the payload to the trainer's container, and return the init containers that fill it, in their order.

    `spec`: the pod's, to which the volume is added. `image`: Pacekeeper's. `runtime`: the mount of the runtime folder.
    """
    pod = {"spec": spec}
    folder = runtime["mountPath"]
    mount = {"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_PATH}
    spec["volumes"] = [
        *spec.get("volumes", []),
        {"name": PAYLOAD_VOLUME, "emptyDir": {"sizeLimit": PAYLOAD_SIZE_LIMIT}},
    ]
    payload = {
        "name": PAYLOAD_CONTAINER,
        "image": image,
        **({"imagePullPolicy": pull_policy} if pull_policy else {}),
        "command": ["python", "-m", "pacekeeper.watch.payload", "--launcher", PAYLOAD_PATH],
        "volumeMounts": [mount],
        "resources": copy_resources(trainer),
        "securityContext": build_own_security_context(pod, trainer),
    }
    read_only_mount = mount | {"readOnly": True}
    python_path_file = f"{folder}/image_pythonpath"
    variables = [{"name": "PACEKEEPER_PAYLOAD", "value": PAYLOAD_PATH}]
    init_containers = [payload]
    found = find_python_path(trainer)
    if found is None:
        init_containers.append(build_environment_container(trainer, python_path_file, [read_only_mount, runtime]))
        variables.append({"name": "PYTHONPATH", "value": BOOT_PATH})
        variables.append({"name": "PACEKEEPER_IMAGE_PYTHONPATH", "value": python_path_file})
    else:
        index, variable = found
        value = variable.get("value", "")
        trainer["env"][index] = variable | {"value": f"{BOOT_PATH}:{value}" if value else BOOT_PATH}
    trainer["env"] = [*trainer.get("env", []), *variables]
    trainer["volumeMounts"] = [*trainer.get("volumeMounts", []), read_only_mount]
    arguments = translate_python_command(trainer)
    if arguments is not None:
        trainer["command"], trainer["args"] = [LAUNCHER_PATH, "run"], arguments
    _announce_end(trainer, folder)
    return init_containers


def _announce_end(trainer: Object, folder: str) -> None:
    """Have the kubelet tell the launcher that the container is to end: a shell above it passes no SIGTERM on.

    The program that records a variable creates the file, since an image may have no shell. A hook of the user's own is
    kept.
    """
    lifecycle = trainer.get("lifecycle") or {}
    if "preStop" not in lifecycle:
        command = [RECORDER_PATH, f"{folder}/terminating", "PACEKEEPER_PAYLOAD"]
        trainer["lifecycle"] = lifecycle | {"preStop": {"exec": {"command": command}}}

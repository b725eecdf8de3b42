"""Workers of images without Pacekeeper: what is added to the pod, and that nothing of the user's is lost."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.api.names import SIDECAR_CONTAINER
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods.injection import BOOT_PATH, ENVIRONMENT_CONTAINER, PAYLOAD_CONTAINER, PAYLOAD_PATH
from pacekeeper_operator.pods.manifests import RUNTIME_PATH, Installation, build_worker_pod
from pacekeeper_operator.pods.worker_payload import LAUNCHER_PATH
from testing.kubernetes.jobs import build_job_manifest

WITH_IMAGE = Installation("https://operator", "PEM", sidecar_image="pacekeeper:1", sidecar_pull_policy="Always")


def build_spec(command: list[str], installation: Installation = WITH_IMAGE, **trainer: Any) -> dict[str, Any]:
    body = build_job_manifest("j", command, trainer=trainer)
    body["metadata"] |= {"namespace": "n", "uid": "u"}
    spec: dict[str, Any] = build_worker_pod(TrainingJob.parse(body), 0, 0, installation)["spec"]
    return spec


def get_variables(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_the_launcher_comes_into_the_pod_before_the_sidecar_and_with_no_privilege() -> None:
    spec = build_spec(["torchrun", "train.py"])
    names = [container["name"] for container in spec["initContainers"]]
    assert names == [PAYLOAD_CONTAINER, ENVIRONMENT_CONTAINER, SIDECAR_CONTAINER]
    payload, environment, sidecar = spec["initContainers"]
    trainer = spec["containers"][0]
    assert (payload["image"], payload["imagePullPolicy"], sidecar["image"]) == (
        "pacekeeper:1",
        "Always",
        "pacekeeper:1",
    )
    assert environment["image"] == trainer["image"], "it records the environment of the image"
    for container in (payload, environment):
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        assert container["resources"] == trainer["resources"], "what a quota admits"
    assert trainer["command"] == ["torchrun", "train.py"]
    variables = get_variables(trainer)
    assert variables["PACEKEEPER_PAYLOAD"] == PAYLOAD_PATH
    assert variables["PYTHONPATH"] == BOOT_PATH
    assert variables["PACEKEEPER_IMAGE_PYTHONPATH"] == f"{RUNTIME_PATH}/image_pythonpath"
    mounts = {mount["mountPath"]: mount for mount in trainer["volumeMounts"]}
    assert mounts[PAYLOAD_PATH]["readOnly"]


def test_the_users_own_variables_and_hooks_are_kept() -> None:
    hook = {"exec": {"command": ["save"]}}
    spec = build_spec(
        ["torchrun", "t.py"],
        env=[{"name": "PYTHONPATH", "value": "/app"}],
        lifecycle={"preStop": hook, "postStart": hook},
    )
    assert [container["name"] for container in spec["initContainers"]] == [PAYLOAD_CONTAINER, SIDECAR_CONTAINER]
    trainer = spec["containers"][0]
    assert get_variables(trainer)["PYTHONPATH"] == f"{BOOT_PATH}:/app"
    assert trainer["lifecycle"] == {"preStop": hook, "postStart": hook}


def test_the_end_of_the_container_reaches_the_launcher_behind_a_shell() -> None:
    hook = build_spec(["bash", "train.sh"])["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[1] == f"{RUNTIME_PATH}/terminating"


def test_a_script_that_python_runs_gets_the_launcher() -> None:
    trainer = build_spec(["python", "train.py", "--lr", "1"])["containers"][0]
    assert trainer["command"] == [LAUNCHER_PATH, "run"]
    assert trainer["args"] == ["--python", "python", "train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("command", "installation"),
    [
        (["pacekeeper", "run", "train.py"], WITH_IMAGE),
        (["torchrun", "train.py"], Installation("https://operator", "PEM")),
    ],
)
def test_images_with_pacekeeper_get_no_payload(command: list[str], installation: Installation) -> None:
    """Their command says that they have it, or the platform has said so by naming no image."""
    spec = build_spec(command, installation)
    assert [container["name"] for container in spec["initContainers"]] == [SIDECAR_CONTAINER]
    assert "PYTHONPATH" not in get_variables(spec["containers"][0])

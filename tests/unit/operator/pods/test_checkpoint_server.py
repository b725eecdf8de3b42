"""The pod of the checkpoint server, from the template of a user."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pacekeeper.checkpointing.server.job_secret import ServerSettings
from pacekeeper_analysis.protocol.plan import CHECKPOINT_SERVER_PORT, CLAIM_SCHEME
from pacekeeper_operator.api.names import LABEL_JOB, LABEL_WORKER
from pacekeeper_operator.api.training_job import AccessMode, CheckpointSpec, JobSpec, TrainingJob
from pacekeeper_operator.pods import manifests
from pacekeeper_operator.pods.checkpoint_server import build_checkpoint_server_name, build_checkpoint_server_pod
from pacekeeper_operator.pods.manifests import Installation, build_worker_pod, identify_checkpoint_folder

INSTALLATION = Installation("https://10.96.0.50:8443", "PEM")
SECRET = "5a" * 32
TEMPLATE: dict[str, Any] = {
    "spec": {
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "training",
        "hostNetwork": True,
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000, "sysctls": [{"name": "a", "value": "b"}]},
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"required": 1}, "podAffinity": {"required": 2}},
        "containers": [
            {
                "name": "trainer",
                "image": "train:1",
                "imagePullPolicy": "Always",
                "command": ["pacekeeper", "run", "train.py"],
                "env": [{"name": "TOKEN", "value": "secret"}],
                "resources": {"limits": {"nvidia.com/gpu": 8}},
                "securityContext": {"runAsGroup": 3000, "privileged": True},
            }
        ],
    },
}


def build_job(template: dict[str, Any] = TEMPLATE, **checkpoint: Any) -> TrainingJob:
    spec = CheckpointSpec(volume_claim_name="claim", access_mode=AccessMode.READ_WRITE_ONCE, **checkpoint)
    return TrainingJob("team-a", "gpt", "uid-of-gpt", 1, JobSpec(template, checkpoint=spec))


NAME = build_checkpoint_server_name(build_job(), SECRET)


def build_pod(template: dict[str, Any] = TEMPLATE, installation: Installation = INSTALLATION) -> dict[str, Any]:
    return build_checkpoint_server_pod(build_job(template), installation, NAME)


def test_the_pod_runs_where_and_as_the_workers_may() -> None:
    template = copy.deepcopy(TEMPLATE)
    spec = build_pod(template)["spec"]
    assert template == TEMPLATE
    for field in ("priorityClassName", "imagePullSecrets", "serviceAccountName", "nodeSelector", "tolerations"):
        assert spec[field] == TEMPLATE["spec"][field], field
    assert spec["affinity"] == {"nodeAffinity": {"required": 1}}
    assert spec["securityContext"] == {"runAsUser": 1000, "fsGroup": 2000}
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec["restartPolicy"] == "Always", "the kubelet restarts a server that ends"
    assert "hostNetwork" not in spec
    (container,) = spec["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("train:1", "Always")
    assert container["securityContext"] == {**manifests.RESTRICTED_SECURITY_CONTEXT, "runAsGroup": 3000}
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert not any(variable["name"] == "TOKEN" for variable in container["env"])


@pytest.mark.parametrize(
    ("context", "groups"),
    [({}, {"fsGroup": 65532}), ({"fsGroup": 5}, {"fsGroup": 5}), ({"runAsUser": 7}, {"runAsUser": 7})],
)
def test_another_image_gets_a_group_that_may_write_unless_the_template_names_the_user(
    context: dict[str, int], groups: dict[str, int]
) -> None:
    template = {"spec": TEMPLATE["spec"] | {"securityContext": context}}
    spec = build_pod(template, Installation("https://a:1", "PEM", "sidecar:1", "IfNotPresent"))["spec"]
    assert spec["securityContext"] == groups
    assert (spec["containers"][0]["image"], spec["containers"][0]["imagePullPolicy"]) == ("sidecar:1", "IfNotPresent")


def test_the_server_understands_its_settings_and_mounts_the_jobs_folder() -> None:
    pod = build_pod()
    (container,), volumes = pod["spec"]["containers"], pod["spec"]["volumes"]
    given = ServerSettings.from_environment({variable["name"]: variable["value"] for variable in container["env"]})
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[given.folder] == {"name": volumes[0]["name"], "mountPath": given.folder, "subPath": "gpt"}
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert str(given.token_file.parent) in mounts
    assert str(given.secret_file.parent) in mounts
    assert (given.pod, given.operator, given.authority) == (NAME, "https://10.96.0.50:8443", "PEM")
    assert container["ports"][0]["containerPort"] == given.port == CHECKPOINT_SERVER_PORT
    assert SECRET not in str(pod), "who may read pods may not read checkpoints"
    read_only = build_checkpoint_server_pod(build_job(adopt="other", read_only=True), INSTALLATION, NAME)
    mount = read_only["spec"]["containers"][0]["volumeMounts"][0]
    assert (mount["subPath"], mount["readOnly"]) == ("other", True)


def test_workers_do_not_mount_the_claim_and_spares_share_the_servers_node() -> None:
    pod = build_worker_pod(build_job(), 2, 7, INSTALLATION, spare=True)
    trainer = pod["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value", "") for variable in trainer["env"]}
    assert variables["PACEKEEPER_CHECKPOINT_URI"] == f"{CLAIM_SCHEME}claim/gpt"
    assert variables["PACEKEEPER_CHECKPOINT_PATH"] == ""
    assert all("persistentVolumeClaim" not in volume for volume in pod["spec"]["volumes"])
    (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchExpressions"] == [{"key": LABEL_WORKER, "operator": "Exists"}]
    assert LABEL_WORKER not in build_pod()["metadata"]["labels"]
    assert build_job().selector == f"{LABEL_JOB}=gpt,{LABEL_WORKER}"


def test_jobs_of_both_access_modes_identify_one_folder_equally() -> None:
    many = TrainingJob("team-a", "gpt", "u", 1, JobSpec(TEMPLATE, checkpoint=CheckpointSpec(volume_claim_name="claim")))
    assert identify_checkpoint_folder(build_job()) == identify_checkpoint_folder(many) == "claim claim/gpt"


def test_a_server_of_another_folder_or_secret_has_another_name() -> None:
    jobs = [build_job(), build_job(sub_path="a"), build_job(read_only=True)]
    names = {build_checkpoint_server_name(job, secret) for job in jobs for secret in (SECRET, "00" * 32)}
    assert len(names) == 6
    assert len(build_checkpoint_server_name(build_job(), SECRET)) == len("gpt") + 21, "with 40 characters, 61 of 63"

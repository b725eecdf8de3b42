"""The pods that the operator builds from the template of a user."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_operator.api.training_job import CheckpointSpec, DetectionSpec, JobSpec, TrainingJob
from pacekeeper_operator.observe.views import view_pod
from pacekeeper_operator.pods.manifests import (
    Installation,
    NodeProbeTask,
    ProbeImage,
    SchedulingConstraints,
    build_probe_pod,
    build_worker_name,
    build_worker_pod,
    compute_metrics_port,
    find_template_refusal,
    identify_checkpoint_folder,
)

INSTALLATION = Installation("https://10.96.0.50:8443", "PEM")
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "mine"}},
    "spec": {
        "schedulerName": "volcano",
        "priorityClassName": "high",
        "schedulingGates": [{"name": "quota"}],
        "serviceAccountName": "training",
        "securityContext": {"runAsUser": 1000},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"operator": "Exists"}],
        "initContainers": [{"name": "fetch", "image": "fetch"}],
        "containers": [
            {"name": "logger", "image": "logger"},
            {
                "name": "trainer",
                "image": "train:1",
                "imagePullPolicy": "Always",
                "command": ["pacekeeper", "run", "train.py"],
                "env": [{"name": "HF_HOME", "value": "/data/hf"}],
                "resources": {"limits": {"nvidia.com/gpu": 8}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
}


def build_job(build_template: dict[str, Any] = TEMPLATE, **spec: Any) -> TrainingJob:
    return TrainingJob("team-a", "gpt", "uid-of-gpt", 1, JobSpec(build_template, **spec))


def build_pod(
    build_template: dict[str, Any] = TEMPLATE, installation: Installation = INSTALLATION, **spec: Any
) -> dict[str, Any]:
    return build_worker_pod(build_job(build_template, **spec), 2, 7, installation)


def build_template(**spec: Any) -> dict[str, Any]:
    """TEMPLATE with other fields of its spec."""
    return TEMPLATE | {"spec": TEMPLATE["spec"] | spec}


def find_container(body: dict[str, Any], name: str) -> dict[str, Any]:
    containers = body["spec"]["initContainers"] + body["spec"]["containers"]
    return next(found for found in containers if found["name"] == name)


def read_environment(body: dict[str, Any], name: str) -> dict[str, str]:
    return {
        item["name"]: item.get("value") or item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        for item in find_container(body, name)["env"]
    }


def read_mounts(body: dict[str, Any], name: str) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in find_container(body, name).get("volumeMounts", [])}


def find_missing(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return what of `wanted` is not in `found`. Items of lists must be there in the same order."""
    if isinstance(wanted, dict):
        return [
            fault
            for key, value in wanted.items()
            for fault in (find_missing(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
        ]
    if isinstance(wanted, list):
        rest = iter(found)
        return [
            f"{path}[{i}]" for i, item in enumerate(wanted) if all(find_missing(item, candidate) for candidate in rest)
        ]
    return [] if wanted == found else [f"{path}: {wanted!r} became {found!r}"]


def test_the_pod_contains_the_whole_template() -> None:
    body = build_worker_pod(
        build_job(), 2, 7, INSTALLATION, spare=True, scheduling=SchedulingConstraints(avoid_nodes=["node-1"])
    )
    assert find_missing(TEMPLATE, body) == []
    assert body["kind"] == "Pod"


def test_building_a_pod_does_not_change_the_template() -> None:
    before = copy.deepcopy(TEMPLATE)
    build_worker_pod(
        build_job(), 2, 7, INSTALLATION, spare=True, scheduling=SchedulingConstraints(avoid_nodes=["node-1"])
    )
    assert before == TEMPLATE


def test_a_worker_pod_names_its_job() -> None:
    metadata = build_pod()["metadata"]
    assert metadata["name"] == build_worker_name(build_job(), 2, 7) == "gpt-w2-7"
    assert metadata["namespace"] == "team-a"
    assert metadata["labels"] == {"team": "a", "pacekeeper.dev/job": "gpt", "pacekeeper.dev/worker": "2"}
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "pacekeeper.dev/v1alpha1",
            "kind": "TrainingJob",
            "name": "gpt",
            "uid": "uid-of-gpt",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def test_the_kubelet_never_restarts_the_trainer() -> None:
    assert build_pod()["spec"]["restartPolicy"] == "Never"


def test_the_sidecar_starts_first_and_outlives_the_trainer() -> None:
    first = build_pod()["spec"]["initContainers"][0]
    assert (first["name"], first["restartPolicy"]) == ("pacekeeper-sidecar", "Always")
    assert first["ports"] == [{"name": "pk-metrics", "containerPort": 9464}]
    for probe in ("startupProbe", "livenessProbe"):
        assert first[probe]["httpGet"] == {"path": "/healthz", "port": "pk-metrics"}
    assert first["resources"]["requests"], "it must not depend on what the trainer leaves over"


def test_the_sidecar_passes_restricted_pod_security() -> None:
    context = find_container(build_pod(), "pacekeeper-sidecar")["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_the_sidecar_runs_as_the_trainers_user() -> None:
    trainer = TEMPLATE["spec"]["containers"][1] | {"securityContext": {"runAsUser": 7, "privileged": True}}
    context = find_container(build_pod(build_template(containers=[trainer])), "pacekeeper-sidecar")["securityContext"]
    assert context["runAsUser"] == 7
    assert "privileged" not in context


def test_the_sidecar_comes_from_the_trainers_image_or_from_the_installations() -> None:
    own = find_container(build_pod(), "pacekeeper-sidecar")
    assert (own["image"], own["imagePullPolicy"]) == ("train:1", "Always")
    given = Installation("https://o", "PEM", "sidecar:2", "Never", {"requests": {"cpu": "1"}})
    other = find_container(build_pod(installation=given), "pacekeeper-sidecar")
    assert (other["image"], other["imagePullPolicy"]) == ("sidecar:2", "Never")
    assert other["resources"] == {"requests": {"cpu": "1"}}


def test_only_the_sidecar_has_credentials_for_the_operator() -> None:
    body = build_pod()
    token_volume = next(volume for volume in body["spec"]["volumes"] if volume["name"] == "pacekeeper-token")
    assert token_volume["projected"]["sources"] == [
        {"serviceAccountToken": {"audience": "pacekeeper", "expirationSeconds": 3600, "path": "token"}}
    ]
    for name in ("trainer", "logger", "fetch"):
        assert "pacekeeper-token" not in read_mounts(body, name).values()
    sidecar = read_environment(body, "pacekeeper-sidecar")
    assert sidecar["PACEKEEPER_OPERATOR"] == "https://10.96.0.50:8443"
    assert sidecar["PACEKEEPER_CA"] == "PEM"
    assert sidecar["PACEKEEPER_TOKEN_FILE"].rpartition("/")[0] in read_mounts(body, "pacekeeper-sidecar")
    assert not read_environment(body, "trainer").keys() & {
        "PACEKEEPER_OPERATOR",
        "PACEKEEPER_CA",
        "PACEKEEPER_TOKEN_FILE",
    }


def test_only_sidecar_and_trainer_share_the_runtime_folder() -> None:
    body = build_pod()
    assert "/run/pacekeeper" in read_mounts(body, "trainer")
    for name in ("logger", "fetch"):
        assert not [volume for volume in read_mounts(body, name).values() if volume.startswith("pacekeeper-")]


def add_container(kind: str = "containers", **fields: Any) -> dict[str, Any]:
    return build_template(**{kind: [*TEMPLATE["spec"][kind], {"name": "spy", "image": "spy", **fields}]})


def build_token_volume(audience: str) -> dict[str, Any]:
    return {"name": "mine", "projected": {"sources": [{"serviceAccountToken": {"audience": audience, "path": "t"}}]}}


REFUSED = {
    "node": (build_template(nodeName="node-1"), "nodeName: .* nodeSelector"),
    "processes": (build_template(shareProcessNamespace=True), "shareProcessNamespace: .* remove it"),
    "the node's processes": (build_template(hostPID=True), "hostPID: .* remove it"),
    "toleration": (
        build_template(
            tolerations=[{"operator": "Exists"}, {"key": "pacekeeper.dev/quarantine", "operator": "Exists"}]
        ),
        r"tolerations\[1\]: .* remove the toleration",
    ),
    "token": (
        add_container(volumeMounts=[{"name": "pacekeeper-token"}]),
        r"containers\[2\].volumeMounts\[0\]: .* remove",
    ),
    "runtime": (
        add_container("initContainers", volumeMounts=[{"name": "data"}, {"name": "pacekeeper-runtime"}]),
        r"initContainers\[1\].volumeMounts\[1\]: pacekeeper-runtime .* remove",
    ),
    "device": (
        add_container(volumeDevices=[{"name": "pacekeeper-shm"}]),
        r"containers\[2\].volumeDevices\[0\]: .* remove",
    ),
    "trainer": (
        build_template(
            containers=[TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "pacekeeper-token"}]}]
        ),
        r"containers\[0\].volumeMounts\[0\]: .* remove",
    ),
    "volume": (build_template(volumes=[{"name": "pacekeeper-token", "emptyDir": {}}]), r"volumes\[0\].name: .* rename"),
    "own token": (
        build_template(volumes=[{"name": "a"}, build_token_volume("pacekeeper")]),
        r"volumes\[1\].projected: .* audience of your own",
    ),
    "second sidecar": (
        build_template(initContainers=[{"name": "pacekeeper-sidecar", "image": "spy"}]),
        r"initContainers\[0\].name: pacekeeper-sidecar .* rename",
    ),
    "debugger": (
        build_template(ephemeralContainers=[{"name": "x", "volumeMounts": [{"name": "pacekeeper-token"}]}]),
        r"ephemeralContainers\[0\].volumeMounts\[0\]: .* remove",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_template_that_bypasses_the_rules_is_refused_with_field_and_remedy(
    given: dict[str, Any], message: str
) -> None:
    refused = find_template_refusal(build_job(given))
    assert re.fullmatch(rf"spec\.template\.spec\.{message}.*", refused), refused


@pytest.mark.parametrize(
    "given",
    [
        TEMPLATE,
        build_template(hostNetwork=True),
        build_template(volumes=None, initContainers=None, tolerations=None),
        build_template(volumes=[build_token_volume("vault"), build_token_volume("")]),
        build_template(shareProcessNamespace=False, hostPID=False),
        add_container("initContainers", restartPolicy="Always"),
    ],
    ids=["usual", "host network", "null", "tokens for others", "explicitly off", "a sidecar of the user's"],
)
def test_a_harmless_template_is_accepted(given: dict[str, Any]) -> None:
    assert find_template_refusal(build_job(given)) == ""


@pytest.mark.parametrize("given", [{}, {"spec": None}, {"spec": "x"}, build_template(volumes=[{"projected": "x"}])])
def test_an_invalid_template_is_refused_with_a_message(given: dict[str, Any]) -> None:
    assert "is not a pod template" in find_template_refusal(build_job(given))


def test_a_deeply_nested_template_is_refused() -> None:
    deep: Any = "x"
    for _ in range(9_000):
        deep = [deep]
    assert "is nested in more than 64 levels" in find_template_refusal(build_job(TEMPLATE | {"x": deep}))
    assert "is nested in more than 64 levels" in find_template_refusal(build_job(build_template(x=deep)))
    inner: Any = "x"
    for _ in range(40):
        inner = {"x": [inner]} if isinstance(inner, str) else {"x": inner}
    assert find_template_refusal(build_job(build_template(x=inner))) == ""


HOST_NETWORK = build_template(hostNetwork=True)


def test_in_the_host_network_each_worker_has_its_own_metrics_port() -> None:
    ports = set()
    for ordinal in range(5):
        body = build_worker_pod(build_job(HOST_NETWORK), ordinal, 0, INSTALLATION)
        port = compute_metrics_port(build_job(HOST_NETWORK), body["metadata"]["name"])
        assert find_container(body, "pacekeeper-sidecar")["ports"] == [{"name": "pk-metrics", "containerPort": port}]
        assert read_environment(body, "pacekeeper-sidecar")["PACEKEEPER_METRICS_PORT"] == str(port)
        assert 20_000 <= port < 29_000
        ports.add(port)
    assert len(ports) == 5
    again = build_worker_pod(build_job(HOST_NETWORK), 0, 1, INSTALLATION)["spec"]["initContainers"][0]["ports"][0][
        "containerPort"
    ]
    assert again not in ports, "a process that holds the port on that node does not hold that of the replacement"


def test_in_a_pod_network_a_worker_has_the_default_metrics_port() -> None:
    assert compute_metrics_port(build_job(), "gpt-w0-0") == 9464
    assert "dnsPolicy" not in build_pod()["spec"]


def test_in_the_host_network_the_dns_policy_resolves_services_unless_given() -> None:
    assert build_pod(HOST_NETWORK)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert build_pod(build_template(hostNetwork=True, dnsPolicy="None"))["spec"]["dnsPolicy"] == "None"


def test_pods_get_no_other_token_unless_the_user_wants_one() -> None:
    assert build_pod()["spec"]["automountServiceAccountToken"] is False
    assert build_pod(build_template(automountServiceAccountToken=True))["spec"]["automountServiceAccountToken"] is True


def test_services_of_the_namespace_set_no_variables_unless_the_user_wants_them() -> None:
    """A service with the name pacekeeper-metrics would set PACEKEEPER_METRICS_PORT."""
    assert build_pod()["spec"]["enableServiceLinks"] is False
    assert build_pod(build_template(enableServiceLinks=True))["spec"]["enableServiceLinks"] is True


def test_the_environment_is_that_of_the_architecture_document() -> None:
    text = Path(__file__).parents[4].joinpath("docs/architecture/environment.md").read_text()
    section = text[text.index("## Environment of a worker's containers") : text.index("## Environment of a rank")]
    documented = set(re.findall(r"`(PACEKEEPER_[A-Z_]+)", section))
    given = read_environment(build_pod(), "pacekeeper-sidecar")
    assert documented <= given.keys()
    only_sidecar = {"PACEKEEPER_OPERATOR", "PACEKEEPER_CA", "PACEKEEPER_TOKEN_FILE", "PACEKEEPER_METRICS_PORT"}
    assert read_environment(build_pod(), "trainer").keys() >= documented - only_sidecar


def test_the_environment_contains_the_values_of_the_spec() -> None:
    spec: dict[str, Any] = {
        "nproc_per_node": 8,
        "checkpoint": CheckpointSpec("/ckpt", 7, 2, "claim", adopt="other", read_only=True),
        "detection": DetectionSpec(window_steps=16, hang_seconds=9),
    }
    given = read_environment(build_pod(build_template(terminationGracePeriodSeconds=90), **spec), "trainer")
    assert given == {
        "PACEKEEPER_RUNTIME": "/run/pacekeeper",
        "PACEKEEPER_JOB": "gpt",
        "PACEKEEPER_JOB_UID": "uid-of-gpt",
        "PACEKEEPER_NAMESPACE": "team-a",
        "PACEKEEPER_WORKER": "metadata.name",
        "PACEKEEPER_NODE": "spec.nodeName",
        "PACEKEEPER_POD_IP": "status.podIP",
        "PACEKEEPER_NPROC": "8",
        "PACEKEEPER_CHECKPOINT_PATH": "/ckpt",
        "PACEKEEPER_CHECKPOINT_URI": "",
        "PACEKEEPER_CHECKPOINT_EVERY": "7",
        "PACEKEEPER_CHECKPOINT_KEEP": "2",
        "PACEKEEPER_CHECKPOINT_ADOPT": "team-a/other",
        "PACEKEEPER_CHECKPOINT_READ_ONLY": "1",
        "PACEKEEPER_HANG_SECONDS": "9",
        "PACEKEEPER_WINDOW_STEPS": "16",
        "PACEKEEPER_GRACE_SECONDS": "90",
        "PACEKEEPER_TERMINATION_LOG": "/dev/termination-log",
        "HF_HOME": "/data/hf",
    }


def test_hang_seconds_are_empty_where_they_are_learned() -> None:
    variable = next(
        item for item in find_container(build_pod(), "trainer")["env"] if item["name"] == "PACEKEEPER_HANG_SECONDS"
    )
    assert variable["value"] == ""


def test_the_grace_period_is_kubernetes_own_unless_given() -> None:
    assert build_pod()["spec"]["terminationGracePeriodSeconds"] == 30
    assert read_environment(build_pod(), "trainer")["PACEKEEPER_GRACE_SECONDS"] == "30"


def test_runtime_folder_and_shared_memory_are_in_memory() -> None:
    body = build_pod()
    media = {volume["name"]: volume.get("emptyDir", {}).get("medium") for volume in body["spec"]["volumes"]}
    assert media[read_mounts(body, "trainer")["/run/pacekeeper"]] == "Memory"
    assert media[read_mounts(body, "trainer")["/dev/shm"]] == "Memory"
    assert read_mounts(body, "pacekeeper-sidecar")["/run/pacekeeper"] == read_mounts(body, "trainer")["/run/pacekeeper"]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_a_users_own_shared_memory_stays(path: str) -> None:
    trainer = TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "data", "mountPath": path}]}
    body = build_pod(build_template(containers=[trainer]))
    assert read_mounts(body, "trainer")[path] == "data"
    assert "pacekeeper-shm" not in read_mounts(body, "trainer").values()
    assert all(volume["name"] != "pacekeeper-shm" for volume in body["spec"]["volumes"])


def test_the_claim_is_mounted_where_checkpoints_go() -> None:
    body = build_pod(checkpoint=CheckpointSpec("/ckpt", volume_claim_name="claim"))
    volume = next(found for found in body["spec"]["volumes"] if found["name"] == read_mounts(body, "trainer")["/ckpt"])
    assert volume["persistentVolumeClaim"] == {"claimName": "claim"}
    assert "/checkpoints" not in read_mounts(build_pod(), "trainer"), "without a claim the user provides the volume"


def read_checkpoint_mount(**checkpoint: Any) -> tuple[str | None, bool]:
    """Return the mounted folder of the claim, and whether it is read-only."""
    created_job = build_job(checkpoint=CheckpointSpec(volume_claim_name="claim", **checkpoint))
    trainer = find_container(build_worker_pod(created_job, 2, 7, INSTALLATION), "trainer")
    mount = next(found for found in trainer["volumeMounts"] if found["mountPath"] == "/checkpoints")
    return mount.get("subPath"), mount.get("readOnly", False)


def test_each_job_has_a_folder_of_its_own_on_a_claim() -> None:
    assert read_checkpoint_mount() == ("gpt", False)
    assert read_checkpoint_mount(sub_path="") == (None, False)
    assert read_checkpoint_mount(sub_path="sweeps/3", adopt="other") == ("sweeps/3", False)
    assert read_checkpoint_mount(adopt="other") == read_checkpoint_mount(adopt="team-b/other") == ("other", False)
    assert read_checkpoint_mount(adopt="/home/train.py") == ("gpt", False), "a script has no folder"
    assert read_checkpoint_mount(adopt="other", read_only=True) == ("other", True)


@pytest.mark.parametrize(
    ("checkpoint", "uri"),
    [
        ({}, "s3://bucket/team/gpt"),
        ({"sub_path": ""}, "s3://bucket/team"),
        ({"sub_path": "sweeps/3"}, "s3://bucket/team/sweeps/3"),
        ({"adopt": "other", "read_only": True}, "s3://bucket/team/other"),
    ],
)
def test_a_job_with_a_uri_mounts_no_folder_for_checkpoints(checkpoint: dict[str, Any], uri: str) -> None:
    spec = CheckpointSpec(uri="s3://bucket/team", **checkpoint)
    body = build_pod(checkpoint=spec)
    variables = read_environment(body, "trainer")
    assert (variables["PACEKEEPER_CHECKPOINT_URI"], variables["PACEKEEPER_CHECKPOINT_PATH"]) == (uri, "")
    assert "/checkpoints" not in read_mounts(body, "trainer")
    assert identify_checkpoint_folder(build_job(checkpoint=spec)) == ("" if spec.read_only else uri)


def identify_folder(volume: dict[str, Any], mount: dict[str, Any], path: str = "/data/checkpoints") -> str:
    trainer = TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "root", "mountPath": "/"} | mount]}
    volumes = [{"name": "root", "emptyDir": {}}, {"name": "v", **volume}]
    return identify_checkpoint_folder(
        build_job(build_template(containers=[trainer], volumes=volumes), checkpoint=CheckpointSpec(path))
    )


def test_jobs_that_write_to_one_folder_identify_it_equally() -> None:
    def identify_on_claim(**checkpoint: Any) -> str:
        return identify_checkpoint_folder(build_job(checkpoint=CheckpointSpec(volume_claim_name="c", **checkpoint)))

    assert identify_on_claim() == identify_on_claim(path="/elsewhere") == "claim c/gpt"
    assert identify_on_claim(sub_path="") == "claim c"
    assert identify_on_claim(read_only=True) == ""
    claim, nfs = {"persistentVolumeClaim": {"claimName": "c"}}, {"nfs": {"server": "nas", "path": "/export"}}
    at = {"name": "v", "mountPath": "/data/"}
    assert identify_folder(claim, at) == "claim c/checkpoints"
    assert identify_folder(claim, at | {"subPath": "gpt"}, path="/data") == identify_on_claim()
    assert identify_folder(nfs, at | {"subPath": "a"}) == "nfs nas:/export/a/checkpoints"
    assert identify_folder({"emptyDir": {}}, at) == identify_folder({"hostPath": {"path": "/mnt"}}, at) == ""
    assert identify_folder(claim, at | {"subPathExpr": "$(NODE)"}) == ""
    assert identify_folder(claim, at, path="/database") == "", "it lies outside of the mount"
    trainer = {"name": "trainer", "volumeMounts": [at]}
    mounted = build_template(containers=[trainer], volumes=[{"name": "v", **claim}])
    by_uri = build_job(mounted, checkpoint=CheckpointSpec(uri="file:///data", sub_path="gpt"))
    assert identify_checkpoint_folder(by_uri) == identify_on_claim()
    assert identify_checkpoint_folder(build_job({"spec": {"containers": 3}})) == ""


def list_affinity_terms(body: dict[str, Any], kind: str, strength: str) -> list[Any]:
    found = body["spec"].get("affinity", {}).get(kind, {}).get(f"{strength}DuringSchedulingIgnoredDuringExecution", [])
    return list(found)


OTHERS = {"labelSelector": {"matchLabels": {"pacekeeper.dev/job": "gpt"}}, "topologyKey": "kubernetes.io/hostname"}


def test_a_spare_never_shares_a_node_with_another_worker() -> None:
    own_affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}}
    body = build_worker_pod(build_job(build_template(affinity=own_affinity)), 4, 0, INSTALLATION, spare=True)
    assert list_affinity_terms(body, "podAntiAffinity", "required") == [{"topologyKey": "rack"}, OTHERS]


def test_workers_are_spread_unless_the_user_gives_an_affinity() -> None:
    body = build_pod()
    assert list_affinity_terms(body, "podAntiAffinity", "required") == []
    assert list_affinity_terms(body, "podAntiAffinity", "preferred") == [{"weight": 100, "podAffinityTerm": OTHERS}]
    pod_affinity: dict[str, Any] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert list_affinity_terms(build_pod(build_template(affinity=pod_affinity)), "podAntiAffinity", "preferred") == []
    assert "affinity" not in build_pod(build_template(topologySpreadConstraints=[{"maxSkew": 1}]))["spec"]


def test_suspect_nodes_are_avoided_in_every_alternative() -> None:
    own_affinity = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own_affinity}}
    for affinity in ({}, {"nodeAffinity": required}):
        body = build_worker_pod(
            build_job(build_template(affinity=affinity)),
            2,
            8,
            INSTALLATION,
            scheduling=SchedulingConstraints(avoid_nodes=["node-1", "node-2"]),
        )
        found = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        for term in found["nodeSelectorTerms"]:
            avoided = [item["values"] for item in term["matchFields"]]
            assert avoided == [["node-1"], ["node-2"]], "the API server accepts one name per requirement"
        assert view_pod(
            {**body, "metadata": {**body["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
        ).avoided_nodes == {"node-1", "node-2"}
        assert find_missing({"nodeSelectorTerms": own_affinity if affinity else []}, found) == []


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
USER_PREFERENCES = [
    {"weight": 5, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
]


@pytest.mark.parametrize(
    ("affinity", "before"),
    [({}, []), ({"nodeAffinity": None}, []), ({"nodeAffinity": {PREFERRED: USER_PREFERENCES}}, USER_PREFERENCES)],
)
def test_unreliable_nodes_are_only_a_preference_of_least_weight(affinity: Any, before: Any) -> None:
    wanted = build_job(build_template(affinity=affinity))
    body = build_worker_pod(
        wanted, 2, 8, INSTALLATION, spare=True, scheduling=SchedulingConstraints(unreliable_nodes=["node-1", "node-2"])
    )
    of_nodes = body["spec"]["affinity"]["nodeAffinity"]
    assert of_nodes.keys() == {PREFERRED}, "nothing is required"
    names = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("node-1", "node-2")]
    assert of_nodes[PREFERRED] == [*before, {"weight": 1, "preference": {"matchFields": names}}]
    assert list_affinity_terms(body, "podAntiAffinity", "required") == [OTHERS], "the requirement of a spare stays"
    if before:
        assert find_missing(wanted.spec.template, body) == []


def test_a_probe_has_the_runtime_class_for_gpus_and_the_tolerations() -> None:
    owner = {"metadata": {"name": "node-3", "uid": "u"}}
    image = ProbeImage("image", runtime_class="nvidia", tolerations=({"key": "gpu", "operator": "Exists"},))
    with_gpus, without = (
        build_probe_pod("probe", "system", owner, owner, "NodeProbe", image, NodeProbeTask("circle", gpus=gpus))["spec"]
        for gpus in (1, 0)
    )
    assert with_gpus["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in without, "a node without GPUs may not have it"
    assert {"key": "gpu", "operator": "Exists"} in without["tolerations"]


def test_a_probe_reaches_a_cordoned_node_and_cannot_stay() -> None:
    node = {"metadata": {"name": "node-3", "uid": "uid-of-node"}}
    quarantine = {"metadata": {"name": "node-3", "uid": "uid-of-quarantine"}}
    task = NodeProbeTask("circle", "s3cret", gpus=2, peers={"node-1": "10.0.0.1"}, inbound_peers=3)
    body = build_probe_pod("probe", "pacekeeper-system", node, quarantine, "NodeQuarantine", ProbeImage("image"), task)
    spec = body["spec"]
    (probe_container,) = spec["containers"]
    assert probe_container["command"][3:] == ["--peer=node-1=10.0.0.1", "--inbound-peers=3", "--gpus=2"]
    assert probe_container["env"] == [{"name": "PACEKEEPER_PROBE_SECRET", "value": "s3cret"}]
    assert probe_container["resources"]["limits"] == {"memory": "256Mi", "nvidia.com/gpu": "2"}
    assert body["metadata"]["labels"] == {"pacekeeper.dev/probe": "uid-of-node", "pacekeeper.dev/probe-group": "circle"}
    assert spec["nodeName"] == "node-3", "the scheduler would not go there"
    assert {item["key"] for item in spec["tolerations"]} == {
        "pacekeeper.dev/quarantine",
        "node.kubernetes.io/unschedulable",
    }
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 120)
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-of-quarantine"

"""What the operator makes of a user's template."""

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


def job(template: dict[str, Any] = TEMPLATE, **spec: Any) -> TrainingJob:
    return TrainingJob("team-a", "gpt", "uid-of-gpt", 1, JobSpec(template, **spec))


def pod(template: dict[str, Any] = TEMPLATE, installation: Installation = INSTALLATION, **spec: Any) -> dict[str, Any]:
    return build_worker_pod(job(template, **spec), 2, 7, installation)


def template(**spec: Any) -> dict[str, Any]:
    """TEMPLATE with other fields of its spec."""
    return TEMPLATE | {"spec": TEMPLATE["spec"] | spec}


def container(body: dict[str, Any], name: str) -> dict[str, Any]:
    everyone = body["spec"]["initContainers"] + body["spec"]["containers"]
    return next(found for found in everyone if found["name"] == name)


def environment(body: dict[str, Any], name: str) -> dict[str, str]:
    return {
        item["name"]: item.get("value") or item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        for item in container(body, name)["env"]
    }


def mounts(body: dict[str, Any], name: str) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container(body, name).get("volumeMounts", [])}


def lost(wanted: Any, found: Any, path: str = "") -> list[str]:
    """What of `wanted` is not in `found`; items of lists must be there in the same order."""
    if isinstance(wanted, dict):
        return [
            fault
            for key, value in wanted.items()
            for fault in (lost(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
        ]
    if isinstance(wanted, list):
        rest = iter(found)
        return [f"{path}[{i}]" for i, item in enumerate(wanted) if all(lost(item, candidate) for candidate in rest)]
    return [] if wanted == found else [f"{path}: {wanted!r} became {found!r}"]


def test_nothing_of_the_template_is_lost() -> None:
    body = build_worker_pod(
        job(), 2, 7, INSTALLATION, spare=True, scheduling=SchedulingConstraints(avoid_nodes=["node-1"])
    )
    assert lost(TEMPLATE, body) == []
    assert body["kind"] == "Pod"


def test_the_template_itself_stays_as_it_is() -> None:
    before = copy.deepcopy(TEMPLATE)
    build_worker_pod(job(), 2, 7, INSTALLATION, spare=True, scheduling=SchedulingConstraints(avoid_nodes=["node-1"]))
    assert before == TEMPLATE


def test_a_worker_says_whose_it_is() -> None:
    metadata = pod()["metadata"]
    assert metadata["name"] == build_worker_name(job(), 2, 7) == "gpt-w2-7"
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
    assert pod()["spec"]["restartPolicy"] == "Never"


def test_the_sidecar_starts_first_and_outlives_the_trainer() -> None:
    first = pod()["spec"]["initContainers"][0]
    assert (first["name"], first["restartPolicy"]) == ("pacekeeper-sidecar", "Always")
    assert first["ports"] == [{"name": "pk-metrics", "containerPort": 9464}]
    for probe in ("startupProbe", "livenessProbe"):
        assert first[probe]["httpGet"] == {"path": "/healthz", "port": "pk-metrics"}
    assert first["resources"]["requests"], "it must not live of what the trainer leaves over"


def test_the_sidecar_passes_restricted_pod_security() -> None:
    context = container(pod(), "pacekeeper-sidecar")["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_the_sidecar_runs_as_the_trainers_user() -> None:
    trainer = TEMPLATE["spec"]["containers"][1] | {"securityContext": {"runAsUser": 7, "privileged": True}}
    context = container(pod(template(containers=[trainer])), "pacekeeper-sidecar")["securityContext"]
    assert context["runAsUser"] == 7
    assert "privileged" not in context


def test_the_sidecar_comes_from_the_trainers_image_or_from_the_installations() -> None:
    own = container(pod(), "pacekeeper-sidecar")
    assert (own["image"], own["imagePullPolicy"]) == ("train:1", "Always")
    given = Installation("https://o", "PEM", "sidecar:2", "Never", {"requests": {"cpu": "1"}})
    other = container(pod(installation=given), "pacekeeper-sidecar")
    assert (other["image"], other["imagePullPolicy"]) == ("sidecar:2", "Never")
    assert other["resources"] == {"requests": {"cpu": "1"}}


def test_only_the_sidecar_can_speak_to_the_operator() -> None:
    body = pod()
    token = next(volume for volume in body["spec"]["volumes"] if volume["name"] == "pacekeeper-token")
    assert token["projected"]["sources"] == [
        {"serviceAccountToken": {"audience": "pacekeeper", "expirationSeconds": 3600, "path": "token"}}
    ]
    for name in ("trainer", "logger", "fetch"):
        assert "pacekeeper-token" not in mounts(body, name).values()
    sidecar = environment(body, "pacekeeper-sidecar")
    assert sidecar["PACEKEEPER_OPERATOR"] == "https://10.96.0.50:8443"
    assert sidecar["PACEKEEPER_CA"] == "PEM"
    assert sidecar["PACEKEEPER_TOKEN_FILE"].rpartition("/")[0] in mounts(body, "pacekeeper-sidecar")
    assert not environment(body, "trainer").keys() & {"PACEKEEPER_OPERATOR", "PACEKEEPER_CA", "PACEKEEPER_TOKEN_FILE"}


def test_only_sidecar_and_trainer_share_the_runtime_folder() -> None:
    body = pod()
    assert "/run/pacekeeper" in mounts(body, "trainer")
    for name in ("logger", "fetch"):
        assert not [volume for volume in mounts(body, name).values() if volume.startswith("pacekeeper-")]


def with_container(kind: str = "containers", **fields: Any) -> dict[str, Any]:
    return template(**{kind: [*TEMPLATE["spec"][kind], {"name": "spy", "image": "spy", **fields}]})


def token(audience: str) -> dict[str, Any]:
    return {"name": "mine", "projected": {"sources": [{"serviceAccountToken": {"audience": audience, "path": "t"}}]}}


REFUSED = {
    "node": (template(nodeName="node-1"), "nodeName: .* nodeSelector"),
    "processes": (template(shareProcessNamespace=True), "shareProcessNamespace: .* remove it"),
    "the node's processes": (template(hostPID=True), "hostPID: .* remove it"),
    "toleration": (
        template(tolerations=[{"operator": "Exists"}, {"key": "pacekeeper.dev/quarantine", "operator": "Exists"}]),
        r"tolerations\[1\]: .* remove the toleration",
    ),
    "token": (
        with_container(volumeMounts=[{"name": "pacekeeper-token"}]),
        r"containers\[2\].volumeMounts\[0\]: .* remove",
    ),
    "runtime": (
        with_container("initContainers", volumeMounts=[{"name": "data"}, {"name": "pacekeeper-runtime"}]),
        r"initContainers\[1\].volumeMounts\[1\]: pacekeeper-runtime .* remove",
    ),
    "device": (
        with_container(volumeDevices=[{"name": "pacekeeper-shm"}]),
        r"containers\[2\].volumeDevices\[0\]: .* remove",
    ),
    "trainer": (
        template(containers=[TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "pacekeeper-token"}]}]),
        r"containers\[0\].volumeMounts\[0\]: .* remove",
    ),
    "volume": (template(volumes=[{"name": "pacekeeper-token", "emptyDir": {}}]), r"volumes\[0\].name: .* rename"),
    "own token": (
        template(volumes=[{"name": "a"}, token("pacekeeper")]),
        r"volumes\[1\].projected: .* audience of your own",
    ),
    "second sidecar": (
        template(initContainers=[{"name": "pacekeeper-sidecar", "image": "spy"}]),
        r"initContainers\[0\].name: pacekeeper-sidecar .* rename",
    ),
    "debugger": (
        template(ephemeralContainers=[{"name": "x", "volumeMounts": [{"name": "pacekeeper-token"}]}]),
        r"ephemeralContainers\[0\].volumeMounts\[0\]: .* remove",
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_get_around_the_rules_is_refused_with_field_and_remedy(given: dict[str, Any], words: str) -> None:
    refused = find_template_refusal(job(given))
    assert re.fullmatch(rf"spec\.template\.spec\.{words}.*", refused), refused


@pytest.mark.parametrize(
    "given",
    [
        TEMPLATE,
        template(hostNetwork=True),
        template(volumes=None, initContainers=None, tolerations=None),
        template(volumes=[token("vault"), token("")]),
        template(shareProcessNamespace=False, hostPID=False),
        with_container("initContainers", restartPolicy="Always"),
    ],
    ids=["usual", "host network", "null", "tokens for others", "said to be off", "a sidecar of the user's"],
)
def test_what_harms_nobody_is_not_refused(given: dict[str, Any]) -> None:
    assert find_template_refusal(job(given)) == ""


@pytest.mark.parametrize("given", [{}, {"spec": None}, {"spec": "x"}, template(volumes=[{"projected": "x"}])])
def test_a_template_that_is_none_is_refused_in_words(given: dict[str, Any]) -> None:
    assert "is not a pod template" in find_template_refusal(job(given))


def test_a_template_that_is_nested_without_end_is_refused_and_a_usual_one_is_far_from_it() -> None:
    deep: Any = "x"
    for _ in range(9_000):
        deep = [deep]
    assert "is nested in more than 64 levels" in find_template_refusal(job(TEMPLATE | {"x": deep}))
    assert "is nested in more than 64 levels" in find_template_refusal(job(template(x=deep)))
    inner: Any = "x"
    for _ in range(40):
        inner = {"x": [inner]} if isinstance(inner, str) else {"x": inner}
    assert find_template_refusal(job(template(x=inner))) == ""


HOST_NETWORK = template(hostNetwork=True)


def test_in_the_nodes_network_each_worker_has_a_metrics_port_of_its_own_that_the_scheduler_knows() -> None:
    ports = set()
    for ordinal in range(5):
        body = build_worker_pod(job(HOST_NETWORK), ordinal, 0, INSTALLATION)
        port = compute_metrics_port(job(HOST_NETWORK), body["metadata"]["name"])
        assert container(body, "pacekeeper-sidecar")["ports"] == [{"name": "pk-metrics", "containerPort": port}]
        assert environment(body, "pacekeeper-sidecar")["PACEKEEPER_METRICS_PORT"] == str(port)
        assert 20_000 <= port < 29_000
        ports.add(port)
    assert len(ports) == 5
    again = build_worker_pod(job(HOST_NETWORK), 0, 1, INSTALLATION)["spec"]["initContainers"][0]["ports"][0][
        "containerPort"
    ]
    assert again not in ports, "what holds the port on that node does not hold the replacement's"


def test_with_a_network_of_its_own_a_worker_has_the_usual_port() -> None:
    assert compute_metrics_port(job(), "gpt-w0-0") == 9464
    assert "dnsPolicy" not in pod()["spec"]


def test_in_the_nodes_network_the_operators_name_is_found_unless_the_user_has_said_how_names_are() -> None:
    assert pod(HOST_NETWORK)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod(template(hostNetwork=True, dnsPolicy="None"))["spec"]["dnsPolicy"] == "None"


def test_pods_get_no_other_token_unless_the_user_wants_one() -> None:
    assert pod()["spec"]["automountServiceAccountToken"] is False
    assert pod(template(automountServiceAccountToken=True))["spec"]["automountServiceAccountToken"] is True


def test_services_of_the_namespace_set_no_variables_unless_the_user_wants_them() -> None:
    """One by the name of pacekeeper-metrics would set PACEKEEPER_METRICS_PORT."""
    assert pod()["spec"]["enableServiceLinks"] is False
    assert pod(template(enableServiceLinks=True))["spec"]["enableServiceLinks"] is True


def test_the_environment_is_that_of_the_architecture() -> None:
    text = Path(__file__).parents[4].joinpath("docs/architecture/environment.md").read_text()
    section = text[text.index("## Environment of a worker's containers") :]
    of_the_launcher = {"PACEKEEPER_ROUND", "PACEKEEPER_TRANSPORT", "PACEKEEPER_PATHS", "PACEKEEPER_NATIVE"}
    documented = set(re.findall(r"`(PACEKEEPER_[A-Z_]+)", section)) - of_the_launcher
    given = environment(pod(), "pacekeeper-sidecar")
    assert documented <= given.keys()
    only_sidecar = {"PACEKEEPER_OPERATOR", "PACEKEEPER_CA", "PACEKEEPER_TOKEN_FILE", "PACEKEEPER_METRICS_PORT"}
    assert environment(pod(), "trainer").keys() >= documented - only_sidecar


def test_the_environment_says_what_the_spec_says() -> None:
    spec: dict[str, Any] = {
        "nproc_per_node": 8,
        "checkpoint": CheckpointSpec("/ckpt", 7, 2, "claim", adopt="other", read_only=True),
        "detection": DetectionSpec(window_steps=16, hang_seconds=9),
    }
    given = environment(pod(template(terminationGracePeriodSeconds=90), **spec), "trainer")
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
    variable = next(item for item in container(pod(), "trainer")["env"] if item["name"] == "PACEKEEPER_HANG_SECONDS")
    assert variable["value"] == ""


def test_the_grace_period_is_kubernetes_own_unless_given() -> None:
    assert pod()["spec"]["terminationGracePeriodSeconds"] == 30
    assert environment(pod(), "trainer")["PACEKEEPER_GRACE_SECONDS"] == "30"


def test_runtime_folder_and_shared_memory_are_memory() -> None:
    body = pod()
    media = {volume["name"]: volume.get("emptyDir", {}).get("medium") for volume in body["spec"]["volumes"]}
    assert media[mounts(body, "trainer")["/run/pacekeeper"]] == "Memory"
    assert media[mounts(body, "trainer")["/dev/shm"]] == "Memory"
    assert mounts(body, "pacekeeper-sidecar")["/run/pacekeeper"] == mounts(body, "trainer")["/run/pacekeeper"]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_a_users_own_shared_memory_stays(path: str) -> None:
    trainer = TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "data", "mountPath": path}]}
    body = pod(template(containers=[trainer]))
    assert mounts(body, "trainer")[path] == "data"
    assert "pacekeeper-shm" not in mounts(body, "trainer").values()
    assert all(volume["name"] != "pacekeeper-shm" for volume in body["spec"]["volumes"])


def test_the_claim_is_mounted_where_checkpoints_go() -> None:
    body = pod(checkpoint=CheckpointSpec("/ckpt", volume_claim_name="claim"))
    volume = next(found for found in body["spec"]["volumes"] if found["name"] == mounts(body, "trainer")["/ckpt"])
    assert volume["persistentVolumeClaim"] == {"claimName": "claim"}
    assert "/checkpoints" not in mounts(pod(), "trainer"), "without a claim the place is the user's to fill"


def checkpoint_mount(**checkpoint: Any) -> tuple[str | None, bool]:
    """Folder of the claim that is mounted, and whether it is to be read only."""
    its = job(checkpoint=CheckpointSpec(volume_claim_name="claim", **checkpoint))
    trainer = container(build_worker_pod(its, 2, 7, INSTALLATION), "trainer")
    mount = next(found for found in trainer["volumeMounts"] if found["mountPath"] == "/checkpoints")
    return mount.get("subPath"), mount.get("readOnly", False)


def test_each_job_has_a_folder_of_its_own_on_a_claim() -> None:
    assert checkpoint_mount() == ("gpt", False)
    assert checkpoint_mount(sub_path="") == (None, False)
    assert checkpoint_mount(sub_path="sweeps/3", adopt="other") == ("sweeps/3", False)
    assert checkpoint_mount(adopt="other") == checkpoint_mount(adopt="team-b/other") == ("other", False)
    assert checkpoint_mount(adopt="/home/train.py") == ("gpt", False), "a script has none"
    assert checkpoint_mount(adopt="other", read_only=True) == ("other", True)


def folder_of(volume: dict[str, Any], mount: dict[str, Any], path: str = "/data/checkpoints") -> str:
    trainer = TEMPLATE["spec"]["containers"][1] | {"volumeMounts": [{"name": "root", "mountPath": "/"} | mount]}
    volumes = [{"name": "root", "emptyDir": {}}, {"name": "v", **volume}]
    return identify_checkpoint_folder(
        job(template(containers=[trainer], volumes=volumes), checkpoint=CheckpointSpec(path))
    )


def test_jobs_that_write_to_one_folder_name_it_alike() -> None:
    def on_claim(**checkpoint: Any) -> str:
        return identify_checkpoint_folder(job(checkpoint=CheckpointSpec(volume_claim_name="c", **checkpoint)))

    assert on_claim() == on_claim(path="/elsewhere") == "claim c/gpt"
    assert on_claim(sub_path="") == "claim c"
    assert on_claim(read_only=True) == ""
    claim, nfs = {"persistentVolumeClaim": {"claimName": "c"}}, {"nfs": {"server": "nas", "path": "/export"}}
    at = {"name": "v", "mountPath": "/data/"}
    assert folder_of(claim, at) == "claim c/checkpoints"
    assert folder_of(claim, at | {"subPath": "gpt"}, path="/data") == on_claim()
    assert folder_of(nfs, at | {"subPath": "a"}) == "nfs nas:/export/a/checkpoints"
    assert folder_of({"emptyDir": {}}, at) == folder_of({"hostPath": {"path": "/mnt"}}, at) == ""
    assert folder_of(claim, at | {"subPathExpr": "$(NODE)"}) == ""
    assert folder_of(claim, at, path="/database") == "", "it lies beside the mount"
    assert identify_checkpoint_folder(job({"spec": {"containers": 3}})) == ""


def terms(body: dict[str, Any], kind: str, strength: str) -> list[Any]:
    found = body["spec"].get("affinity", {}).get(kind, {}).get(f"{strength}DuringSchedulingIgnoredDuringExecution", [])
    return list(found)


OTHERS = {"labelSelector": {"matchLabels": {"pacekeeper.dev/job": "gpt"}}, "topologyKey": "kubernetes.io/hostname"}


def test_a_spare_never_shares_a_node_with_another_worker() -> None:
    mine = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}}
    body = build_worker_pod(job(template(affinity=mine)), 4, 0, INSTALLATION, spare=True)
    assert terms(body, "podAntiAffinity", "required") == [{"topologyKey": "rack"}, OTHERS]


def test_workers_are_spread_where_the_user_has_no_wish() -> None:
    body = pod()
    assert terms(body, "podAntiAffinity", "required") == []
    assert terms(body, "podAntiAffinity", "preferred") == [{"weight": 100, "podAffinityTerm": OTHERS}]
    near: dict[str, Any] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert terms(pod(template(affinity=near)), "podAntiAffinity", "preferred") == []
    assert "affinity" not in pod(template(topologySpreadConstraints=[{"maxSkew": 1}]))["spec"]


def test_suspect_nodes_are_avoided_in_every_alternative() -> None:
    mine = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": mine}}
    for affinity in ({}, {"nodeAffinity": required}):
        body = build_worker_pod(
            job(template(affinity=affinity)),
            2,
            8,
            INSTALLATION,
            scheduling=SchedulingConstraints(avoid_nodes=["node-1", "node-2"]),
        )
        found = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        for term in found["nodeSelectorTerms"]:
            avoided = [item["values"] for item in term["matchFields"]]
            assert avoided == [["node-1"], ["node-2"]], "the API server takes one name a requirement"
        assert view_pod(
            {**body, "metadata": {**body["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
        ).avoided_nodes == {"node-1", "node-2"}
        assert lost({"nodeSelectorTerms": mine if affinity else []}, found) == []


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
THEIRS = [{"weight": 5, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}]


@pytest.mark.parametrize(
    ("affinity", "before"), [({}, []), ({"nodeAffinity": None}, []), ({"nodeAffinity": {PREFERRED: THEIRS}}, THEIRS)]
)
def test_unreliable_nodes_are_a_preference_of_the_least_weight_and_no_more(affinity: Any, before: Any) -> None:
    wanted = job(template(affinity=affinity))
    body = build_worker_pod(
        wanted, 2, 8, INSTALLATION, spare=True, scheduling=SchedulingConstraints(unreliable_nodes=["node-1", "node-2"])
    )
    of_nodes = body["spec"]["affinity"]["nodeAffinity"]
    assert of_nodes.keys() == {PREFERRED}, "nothing is required"
    names = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("node-1", "node-2")]
    assert of_nodes[PREFERRED] == [*before, {"weight": 1, "preference": {"matchFields": names}}]
    assert terms(body, "podAntiAffinity", "required") == [OTHERS], "what a spare needs stays"
    if before:
        assert lost(wanted.spec.template, body) == []


def test_a_probe_gets_the_installations_runtime_where_it_looks_at_gpus_and_its_tolerations() -> None:
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
    (container,) = spec["containers"]
    assert container["command"][3:] == ["--peer=node-1=10.0.0.1", "--inbound-peers=3", "--gpus=2"]
    assert container["env"] == [{"name": "PACEKEEPER_PROBE_SECRET", "value": "s3cret"}]
    assert container["resources"]["limits"] == {"memory": "256Mi", "nvidia.com/gpu": "2"}
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

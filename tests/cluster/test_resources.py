"""The custom resources as a user meets them: kubectl against a real API server."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo import traffic
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods.manifests import (
    Installation,
    NodeProbeTask,
    ProbeImage,
    SchedulingConstraints,
    build_probe_pod,
    build_worker_pod,
)
from testing.kubernetes.chart import CHART, REPOSITORY, SYSTEM, run_helm
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace

TRAINER = {
    "name": "trainer",
    "image": "pacekeeper.dev/trainer:dev",
    "command": ["pacekeeper", "run", "train.py"],
    "resources": {"limits": {"cpu": "400m"}},
}


pytestmark = pytest.mark.usefixtures("resources")


@pytest.fixture(scope="module")
def shared_namespace(cluster: KubectlCluster) -> Iterator[str]:
    with scratch_namespace(cluster) as name:
        yield name


@pytest.fixture
def namespace(cluster: KubectlCluster, shared_namespace: str) -> Iterator[str]:
    """Without jobs and incidents of other tests."""
    yield shared_namespace
    if cluster.list("tj", shared_namespace) or cluster.list("inc", shared_namespace):
        cluster.kubectl("delete", "tj,inc", "--all", "--namespace", shared_namespace, "--timeout=120s")


def build_job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {"template": {"spec": {"schedulerName": "none", "containers": [copy.deepcopy(TRAINER)]}}} | spec,
    }


def change_field(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `body` with `value` at `path`, like `spec.template.spec.containers.0.name`."""
    body = copy.deepcopy(body)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = body
    for part in parents:
        target = target[part] if isinstance(part, int) else target.setdefault(part, {})
    target[last] = value
    return body


def apply_refused(cluster: KubectlCluster, body: dict[str, Any], namespace: str = "default") -> str:
    """The message of `kubectl apply` for a manifest that is refused; the test fails if it is not."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(body))
    return str(refused.value.stderr)


CONTAINER = "spec.template.spec.containers.0"
MISTAKES = {
    "name too long": ("metadata.name", "a" * 41, "metadata.name must have 1 to 40 characters"),
    "name with dots": ("metadata.name", "my.job", "metadata.name must have 1 to 40 characters a-z, 0-9 and -"),
    "no such container": ("spec.trainerContainer", "main", "spec.trainerContainer.* must name the container"),
    "no containers": ("spec.template.spec", {}, "spec.template.spec.containers: Required value"),
    "no template": ("spec", {"replicas": 1}, "spec.template: Required value"),
    "zero replicas": ("spec.replicas", 0, "spec.replicas.* greater than or equal to 1"),
    "more minReplicas than replicas": ("spec.minReplicas", 2, "spec.minReplicas.*raise spec.replicas"),
    "spares below zero": ("spec.spares", -1, "spec.spares.* greater than or equal to 0"),
    "no ranks": ("spec.nprocPerNode", 0, "spec.nprocPerNode.* greater than or equal to 1"),
    "a misspelt field": ("spec.replica", 4, 'unknown field "spec.replica"'),
    "unknown remedy": (
        "spec.remediation.allow",
        ["Reboot"],
        r"spec.remediation.allow\[0\].*Reboot.*\"RestartRanks\", \"ReplaceWorker\"",
    ),
    "a remedy twice": (
        "spec.remediation.allow",
        ["Rebalance", "Rebalance"],
        r"spec.remediation.allow\[1\]: Duplicate value",
    ),
    "unknown mode": ("spec.remediation.mode", "Observe", 'spec.remediation.mode.*"Act", "Recommend"'),
    "negative restarts": (
        "spec.remediation.maxRestarts",
        -1,
        "spec.remediation.maxRestarts.* greater than or equal to 0",
    ),
    "bad duration": ("spec.schedulingTimeout", "5 minutes", "spec.schedulingTimeout.*like 1h30m, 5m or 90s"),
    "duration without unit": ("spec.schedulingTimeout", 300, "spec.schedulingTimeout.*with their units, like 1h30m"),
    "empty duration": ("spec.schedulingTimeout", "", "spec.schedulingTimeout.*like 1h30m, 5m or 90s"),
    "preflight too short": ("spec.preflight", {"enabled": True, "timeout": "1s"}, "timeout.*between 10s and 1h"),
    "preflight without end": ("spec.preflight", {"validFor": "9000h"}, "validFor.*between 1m and 8760h"),
    "preflight without unit": ("spec.preflight", {"timeout": 60}, "timeout.*with their units"),
    "duration out of range": ("spec.schedulingTimeout", "1s", "spec.schedulingTimeout.*between 10s and 168h"),
    "bad restart window": ("spec.remediation.restartWindow", "1d", "spec.remediation.restartWindow.*like 1h30m"),
    "restart window out of range": ("spec.remediation.restartWindow", "10s", "restartWindow.*between 1m and 720h"),
    "no slowdown at all": ("spec.detection.stragglerSlowdown", 1.0, "spec.detection.stragglerSlowdown.*greater than 1"),
    "tiny window": ("spec.detection.windowSteps", 2, "spec.detection.windowSteps.* greater than or equal to 8"),
    "hang after a word": (
        "spec.detection.hangSeconds",
        "soon",
        "spec.detection.hangSeconds.*must be auto, or whole seconds",
    ),
    "hang after nothing": (
        "spec.detection.hangSeconds",
        0,
        "spec.detection.hangSeconds.*must be auto, or whole seconds",
    ),
    "relative checkpoints": ("spec.checkpoint.path", "checkpoints", "spec.checkpoint.path.*absolute path"),
    "climbing checkpoints": ("spec.checkpoint.path", "/data/../etc", "spec.checkpoint.path.*without \\.\\."),
    "checkpoints in memory": ("spec.checkpoint.path", "/dev/shm", "spec.checkpoint.path.*must outlive the worker"),
    "checkpoints never": ("spec.checkpoint.everySteps", 0, "spec.checkpoint.everySteps.* greater than or equal to 1"),
    "climbing out of a claim": ("spec.checkpoint.subPath", "a/../b", "spec.checkpoint.subPath.*inside the claim"),
    "no checkpoint kept": ("spec.checkpoint.keep", 0, "spec.checkpoint.keep.* greater than or equal to 1"),
    "bad claim": (
        "spec.checkpoint.volumeClaimName",
        "My_Claim",
        "spec.checkpoint.volumeClaimName.*name of a PersistentVolumeClaim",
    ),
    "checkpoints in a process": ("spec.checkpoint.uri", "memory://job", "spec.checkpoint.uri.*outlives the workers"),
    "credentials of a store": (
        "spec.checkpoint.uri",
        "s3://a:b@c/d",
        "spec.checkpoint.uri.*must not contain credentials",
    ),
    "a store and a claim": (
        "spec.checkpoint",
        {"uri": "s3://bucket", "volumeClaimName": "claim"},
        "spec.checkpoint.uri and spec.checkpoint.volumeClaimName exclude each other",
    ),
    "unknown clean-up": (
        "spec.runPolicy.cleanPodPolicy",
        "Some",
        'spec.runPolicy.cleanPodPolicy.*"Running", "All", "None"',
    ),
    "no time at all": (
        "spec.runPolicy.activeDeadlineSeconds",
        0,
        "spec.runPolicy.activeDeadlineSeconds.* greater than or equal to 1",
    ),
    "restart policy": (
        "spec.template.spec.restartPolicy",
        "Always",
        "spec.template.spec.restartPolicy must be Never or left out",
    ),
    "past the scheduler": ("spec.template.spec.nodeName", "node-1", "spec.template.spec.nodeName must be left out"),
    "our variable": (
        f"{CONTAINER}.env",
        [{"name": "PACEKEEPER_NPROC"}],
        r"containers\[0\].env.*PACEKEEPER_ are set by the operator.*remove",
    ),
    "our folder": (
        f"{CONTAINER}.volumeMounts",
        [{"name": "x", "mountPath": "/run/pacekeeper"}],
        "volumeMounts.*choose another mountPath",
    ),
    "our volume": (
        "spec.template.spec.volumes",
        [{"name": "pacekeeper-shm"}],
        "spec.template.spec.volumes.*rename the volume",
    ),
    "our port": (f"{CONTAINER}.ports", [{"containerPort": 9464}], "containers.*9464.*use another port"),
    "our sidecar": (
        "spec.template.spec.initContainers",
        [{"name": "pacekeeper-sidecar"}],
        "spec.template.spec.initContainers.*rename it",
    ),
    "our label": (
        "spec.template.metadata.labels",
        {"pacekeeper.dev/job": "x"},
        "spec.template.metadata.labels.*set by the operator; remove",
    ),
    "half a GPU": (f"{CONTAINER}.resources.limits", {"nvidia.com/gpu": "500m"}, "nvidia.com/gpu.*whole number of GPUs"),
}


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_is_refused_with_field_and_remedy(
    cluster: KubectlCluster, path: str, value: Any, message: str
) -> None:
    """Refused by the server: kubectl prints the same."""
    refused = cluster.reader.find_refusal("trainingjobs", change_field(build_job(), path, value), "default")
    assert re.search(message, refused, re.DOTALL), refused


def test_timeouts_are_set_as_documented(cluster: KubectlCluster) -> None:
    page = (REPOSITORY / "docs/running-jobs.md").read_text()
    names = set(re.findall(r"`(PACEKEEPER_[A-Z_]+_(?:SECONDS|MEGABYTES))`", page))
    names.remove("PACEKEEPER_HANG_SECONDS")  # without an operator; in its pods spec.detection.hangSeconds sets it
    assert len(names) == 7
    variables = [{"name": name, "value": "20"} for name in sorted(names)]
    cluster.kubectl(
        "apply",
        "--dry-run=server",
        "-f",
        "-",
        stdin=json.dumps(change_field(build_job(), f"{CONTAINER}.env", variables)),
    )


@pytest.mark.parametrize("gpus", [4, "4"])
def test_ranks_need_gpus_of_their_own(cluster: KubectlCluster, gpus: int | str) -> None:
    body = change_field(build_job(nprocPerNode=4), f"{CONTAINER}.resources.limits", {"nvidia.com/gpu": gpus})
    cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(body))
    body["spec"]["nprocPerNode"] = 5
    assert re.search(r"spec.nprocPerNode.*lower spec.nprocPerNode or raise that limit", apply_refused(cluster, body))


def test_checkpoint_claim_and_own_mount_exclude_one_another(cluster: KubectlCluster) -> None:
    body = build_job(checkpoint={"path": "/ckpt", "volumeClaimName": "claim"})
    body = change_field(body, f"{CONTAINER}.volumeMounts", [{"name": "mine", "mountPath": "/ckpt"}])
    assert re.search(r"spec.checkpoint.volumeClaimName.*remove that volumeMount", apply_refused(cluster, body))


def test_defaults(cluster: KubectlCluster) -> None:
    made = cluster.kubectl("create", "--dry-run=server", "-f", "-", "-o", "json", stdin=json.dumps(build_job()))
    spec = json.loads(made)["spec"]
    assert spec.pop("template") == build_job()["spec"]["template"], "the template stays as the user wrote it"
    assert spec == {
        "replicas": 1,
        "spares": 0,
        "nprocPerNode": 1,
        "suspend": False,
        "syncMode": "Auto",
        "schedulingTimeout": "5m",
        "managedBy": "pacekeeper.dev/operator",
        "checkpoint": {
            "path": "/checkpoints",
            "everySteps": 100,
            "keep": 3,
            "readOnly": False,
            "accessMode": "ReadWriteMany",
        },
        "preflight": {"enabled": False, "timeout": "5m", "validFor": "24h"},
        "detection": {
            "stragglerSlowdown": 1.1,
            "windowSteps": 32,
            "hangSeconds": "auto",
            "profile": {"sources": "Hash"},
        },
        "remediation": {
            "mode": "Act",
            "allow": [
                "RestartRanks",
                "ReplaceWorker",
                "Rebalance",
                "LocalSGD",
                "PlanGC",
                "BalanceLengths",
                "QuarantineNode",
                "PlanTraffic",
            ],
            "maxRestarts": 10,
            "restartWindow": "1h",
            "maxRoundsWithoutProgress": 3,
            "exitCodes": {},
        },
        "runPolicy": {"cleanPodPolicy": "Running"},
    }


FIXED = {
    "template": (f"{CONTAINER}.image", "other", "spec.template may change only while the job is suspended"),
    "template, unknown field": ("spec.template.spec.nodeSelector", {"a": "b"}, "spec.template may change only"),
    "ranks a worker": ("spec.nprocPerNode", 2, "spec.nprocPerNode may change only.*change spec.replicas instead"),
    "checkpoint folder": ("spec.checkpoint.path", "/other", "spec.checkpoint.path.*may change only while"),
    "checkpoint claim": (
        "spec.checkpoint.volumeClaimName",
        "other",
        "spec.checkpoint.path, volumeClaimName.*may change only",
    ),
    "folder of a claim": ("spec.checkpoint.subPath", "other", "subPath.*may change only"),
    "checkpoint interval": ("spec.checkpoint.everySteps", 7, "everySteps may change only while"),
}


@pytest.mark.parametrize(("path", "value", "message"), FIXED.values(), ids=FIXED.keys())
def test_the_worker_template_changes_only_in_suspension(
    cluster: KubectlCluster, namespace: str, path: str, value: Any, message: str
) -> None:
    cluster.apply(build_job(), namespace)
    change = change_field(build_job(), path, value)
    assert re.search(message, apply_refused(cluster, change, namespace), re.DOTALL)

    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    _set_phase(cluster, namespace, "Running")
    change["spec"]["suspend"] = True
    assert re.search("wait for the phase Suspended", apply_refused(cluster, change, namespace)), "workers still run"

    _set_phase(cluster, namespace, "Suspended")
    change["spec"]["suspend"] = False
    cluster.apply(change, namespace)


def test_the_controller_of_a_job_never_changes(cluster: KubectlCluster, namespace: str) -> None:
    body = build_job()
    body["spec"]["suspend"] = True
    cluster.apply(body, namespace)
    message = apply_refused(cluster, change_field(body, "spec.managedBy", "kueue.x-k8s.io/multikueue"), namespace)
    assert "spec.managedBy is immutable: delete the job and create it again" in message


def _set_phase(cluster: KubectlCluster, namespace: str, phase: str) -> None:
    patch = json.dumps({"status": {"phase": phase}})
    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


SWAPS: dict[str, tuple[str, str, Any, str, Any]] = {
    "node": ("spec.template.spec", "nodeSelector", {"a": "b"}, "runtimeClassName", "other"),
    "command": (CONTAINER, "command", ["pacekeeper"], "args", ["pacekeeper"]),
    "variable": (f"{CONTAINER}.env.0", "value", "1", "valueFrom", {"fieldRef": {"fieldPath": "spec.nodeName"}}),
    "volume": ("spec.template.spec.volumes.0", "emptyDir", {}, "hostPath", {"path": "/data"}),
    "toleration": ("spec.template.spec.tolerations.0", "effect", "NoSchedule", "operator", "Exists"),
    "affinity": ("spec.template.spec.affinity", "podAffinity", {}, "podAntiAffinity", {}),
}


@pytest.mark.parametrize(("path", "field", "value", "other_field", "other_value"), SWAPS.values(), ids=SWAPS.keys())
def test_one_field_of_the_template_for_another_is_a_change(
    cluster: KubectlCluster, namespace: str, path: str, field: str, value: Any, other_field: str, other_value: Any
) -> None:
    """CEL's == does not see it where the schema does not name the fields."""
    body = build_job()
    spec = body["spec"]["template"]["spec"]
    spec |= {"volumes": [{"name": "data"}], "tolerations": [{"key": "gpu"}]}
    spec["containers"][0] |= {"env": [{"name": "A"}]}
    del spec["containers"][0]["command"]
    cluster.apply(change_field(body, f"{path}.{field}", value), namespace)
    assert "spec.template may change only" in apply_refused(
        cluster, change_field(body, f"{path}.{other_field}", other_value), namespace
    )


def test_mutable_fields_of_a_live_job_can_change(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(build_job(), namespace)
    cluster.apply(
        build_job(
            replicas=3,
            minReplicas=2,
            spares=2,
            schedulingTimeout="90s",
            syncMode="EDiT",
            checkpoint={"keep": 9},
            detection={"stragglerSlowdown": 1.5, "windowSteps": 64, "hangSeconds": 30},
            remediation={"mode": "Recommend", "allow": ["RestartRanks"], "maxRestarts": 0, "restartWindow": "2h"},
            runPolicy={"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0, "cleanPodPolicy": "All"},
        ),
        namespace,
    )
    assert cluster.get("tj", "gpt", namespace)["metadata"]["generation"] == 2


def test_scale_changes_replicas_within_bounds(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(build_job(replicas=4, minReplicas=2), namespace)
    cluster.kubectl("scale", "tj", "gpt", "-n", namespace, "--replicas=3")
    assert cluster.get("tj", "gpt", namespace)["spec"]["replicas"] == 3
    for replicas, message in (
        (1, "spec.minReplicas must not exceed"),
        (0, "spec.replicas.* greater than or equal to 1"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            cluster.kubectl("scale", "tj", "gpt", "-n", namespace, f"--replicas={replicas}")
        assert re.search(message, refused.value.stderr)


def test_the_scale_subresource_has_the_replicas_and_the_selector(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(build_job(replicas=4), namespace)
    status = json.dumps({"status": {"workers": {"ready": 3}, "selector": "pacekeeper.dev/job=gpt"}})
    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--subresource=status", "--type=merge", "-p", status)
    path = f"/apis/pacekeeper.dev/v1alpha1/namespaces/{namespace}/trainingjobs/gpt/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 3, "selector": "pacekeeper.dev/job=gpt"}


def read_columns(cluster: KubectlCluster, namespace: str, *arguments: str) -> dict[str, str]:
    """The first row that `kubectl get` prints, by the columns' names."""
    header, row, *_ = cluster.kubectl("get", *arguments, "-n", namespace).splitlines()
    starts = [match.start() for match in re.finditer(r"\S+(?: \S+)*", header)]
    ends: list[int | None] = [*starts[1:], None]
    return {header[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)}


def test_columns_of_a_job(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(build_job(replicas=4, spares=1), namespace)
    status = {
        "phase": "Running",
        "step": 1200,
        "progress": "24%",
        "remaining": "5h20m",
        "round": 3,
        "workers": {"desired": 4, "ready": 4, "spare": 1, "summary": "4/4+1"},
        "slowdown": 1.04,
        "goodput": 0.97,
        "syncMode": "Sync",
        "restarts": 2,
        "bottleneck": "rank 2",
    }
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    shown = read_columns(cluster, namespace, "tj")
    heads = ["NAME", "PHASE", "STEP", "PROGRESS", "LEFT", "WORKERS", "SLOWDOWN", "GOODPUT", "MODE", "RESTARTS", "AGE"]
    assert list(shown) == heads
    expected = ["gpt", "Running", "1200", "24%", "5h20m", "4/4+1", "1.04", "0.97", "Sync", "2"]
    assert list(shown.values())[:-1] == expected
    wide = read_columns(cluster, namespace, "tj", "-o", "wide")
    assert (wide["ROUND"], wide["BOTTLENECK"]) == ("3", "rank 2")


def test_an_incident_is_written_once_and_its_columns_show_the_cause(cluster: KubectlCluster, namespace: str) -> None:
    spec = {
        "jobRef": {"name": "gpt", "uid": "u"},
        "cause": "node-lost",
        "class": "Infrastructure",
        "rank": 2,
        "node": "node-3",
    }
    body = {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "Incident",
        "metadata": {"name": "gpt-r3-node-lost"},
        "spec": spec,
    }
    cluster.apply(body, namespace)
    status = {"remedy": "ReplaceWorker", "outcome": "Recovered", "detectedSeconds": 1.5, "recoveredSeconds": 4.25}
    patch = json.dumps({"status": status})
    cluster.kubectl(
        "patch", "inc", "gpt-r3-node-lost", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch
    )
    shown = list(read_columns(cluster, namespace, "inc").values())
    assert shown[:-1] == [
        "gpt-r3-node-lost",
        "gpt",
        "node-lost",
        "2",
        "node-3",
        "ReplaceWorker",
        "Recovered",
        "1.5",
        "4.25",
    ]
    assert "spec is written once" in apply_refused(cluster, change_field(body, "spec.node", "node-4"), namespace)


def build_quarantine(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "NodeQuarantine",
        "metadata": {"name": "no-such-node"},
        "spec": {"reason": "XID 79"} | spec,
    }


def test_a_quarantine_waits_for_approval_which_cannot_be_withdrawn(cluster: KubectlCluster) -> None:
    try:
        cluster.apply(build_quarantine(nodeUID="one"))
        assert cluster.get("nq", "no-such-node")["spec"] == {
            "reason": "XID 79",
            "nodeUID": "one",
            "approved": False,
            "expiresAfter": "1h",
        }
        cluster.apply(build_quarantine(nodeUID="one", approved=True))
        assert "delete the NodeQuarantine to release" in apply_refused(
            cluster, build_quarantine(nodeUID="one", approved=False)
        )
        assert "spec.nodeUID cannot change" in apply_refused(cluster, build_quarantine(nodeUID="two", approved=True))
        assert "spec.expiresAfter" in apply_refused(
            cluster, build_quarantine(nodeUID="one", approved=True, expiresAfter="soon")
        )
    finally:
        cluster.kubectl("delete", "nq", "no-such-node")


def build_fabric(**spec: Any) -> dict[str, Any]:
    body = {"apiVersion": "pacekeeper.dev/v1alpha1", "kind": "Fabric", "metadata": {"name": "no-such-network"}}
    return {**body, "spec": {"spines": 4} | spec}


def test_a_fabric_with_its_defaults_its_columns_and_its_rules(cluster: KubectlCluster) -> None:
    try:
        cluster.apply(build_fabric())
        assert cluster.get("fabric", "no-such-network")["spec"] == {
            "spines": 4,
            "planes": 1,
            "uplink": {"capacity": "400G", "parallel": 1},
            "pathControl": {"mode": "Off", "ports": "20000-29999"},
        }
        status = {"flows": 640, "maxLoad": 5, "lowerBound": 4, "deadLinks": 1}
        patch = json.dumps({"status": status})
        cluster.kubectl("patch", "fabric", "no-such-network", "--subresource=status", "--type=merge", "-p", patch)
        shown = read_columns(cluster, "default", "fabric", "no-such-network")
        assert [shown[name] for name in ("FLOWS", "MAXLOAD", "BOUND", "DEAD")] == ["640", "5", "4", "1"]
        assert "needs spec.hops" in apply_refused(cluster, build_fabric(pathControl={"mode": "Probe"}))
        assert "the lower one first" in apply_refused(cluster, build_fabric(pathControl={"ports": "29999-20000"}))
        assert "like 400G" in apply_refused(cluster, build_fabric(uplink={"capacity": "fast"}))
        slow = {"leaf": "l1", "spine": "s1", "state": "Slow"}
        assert "a Slow link has a capacity" in apply_refused(cluster, build_fabric(exceptions=[slow]))
        assert "the name of a label" in apply_refused(cluster, build_fabric(levels=[{"nodeLabel": "not one"}]))
    finally:
        cluster.kubectl("delete", "fabric", "no-such-network", "--ignore-not-found")


def test_all_kinds_are_in_one_category(cluster: KubectlCluster) -> None:
    found = cluster.kubectl("api-resources", "--categories=pacekeeper", "-o", "name").split()
    nodes = ("nodehistories", "nodeprobes", "nodequarantines")
    plurals = ("fabrics", "incidents", *nodes, "profilewindows", "trainingjobs", "watchedjobs")
    assert sorted(found) == [f"{plural}.pacekeeper.dev" for plural in plurals]


def test_the_notes_of_the_chart_name_the_next_commands(cluster: KubectlCluster) -> None:
    arguments = ("--namespace", SYSTEM, "--kubeconfig", str(cluster.kubeconfig))
    notes = run_helm(
        "install", "another-name", str(CHART), "--dry-run=client", "--set", "crds.enabled=false", *arguments
    )
    after = notes[notes.index("NOTES:") :]
    assert "prometheus.url is not set: GPU errors are reported by the workers only" in after
    assert "rollout status deployment/another-name-pacekeeper" in after
    assert "kubectl apply -f examples/quickstart.yaml" in after
    assert "policy.mode=Act" not in after
    values = "crds.enabled=false,policy.mode=Recommend,policy.quarantine.mode=Act"
    looking = run_helm("install", "x", str(CHART), "--dry-run=client", "--set", values, *arguments)
    assert "Remedies: Recommend; quarantine of nodes: Recommend." in looking
    assert "helm upgrade x charts/pacekeeper -n pacekeeper-system --reuse-values --set policy.mode=Act" in looking


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_examples_and_their_pods_are_accepted(cluster: KubectlCluster, namespace: str, path: Path) -> None:
    text = path.read_text()
    made = json.loads(cluster.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", str(path), "-o", "json"))
    (body,) = [found for found in made["items"] if found["kind"] == "TrainingJob"]
    job = TrainingJob.parse(body)
    assert job.spec.checkpoint.volume_claim_name in {found["metadata"]["name"] for found in yaml.safe_load_all(text)}
    installation = Installation("https://10.96.0.50:8443", "PEM")
    for spare in (False, True):
        pod = build_worker_pod(
            job, 0, 0, installation, spare=spare, scheduling=SchedulingConstraints(avoid_nodes=["node-1", "node-2"])
        )
        cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.parametrize("name", traffic.NODES)
def test_jobs_of_the_traffic_demo_are_accepted(cluster: KubectlCluster, namespace: str, name: str) -> None:
    for body in traffic.build_manifests(name):
        cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(body))


@pytest.fixture
def restricted_namespace(cluster: KubectlCluster) -> Iterator[str]:
    with scratch_namespace(cluster) as name:
        cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        yield name


def test_worker_and_probe_pass_restricted_pod_security(cluster: KubectlCluster, restricted_namespace: str) -> None:
    path = REPOSITORY / "examples/gpt.yaml"
    (example,) = [found for found in yaml.safe_load_all(path.read_text()) if found["kind"] == "TrainingJob"]
    example["metadata"] |= {"namespace": restricted_namespace, "uid": "u"}
    node, image = {"metadata": {"name": "node-1", "uid": "u"}}, ProbeImage("pacekeeper.dev/operator:dev")
    pods = [
        build_worker_pod(TrainingJob.parse(example), 0, 0, Installation("https://10.96.0.50:8443", "PEM")),
        build_probe_pod("probe", restricted_namespace, node, node, "NodeProbe", image, NodeProbeTask("circle")),
    ]
    for pod in pods:
        cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(pod))
    pods[0]["spec"]["initContainers"][0]["securityContext"] = {}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pods[0]))
    assert "violates PodSecurity" in refused.value.stderr, "the namespace's policy is in force"

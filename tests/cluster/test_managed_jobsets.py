"""JobSets that the operator runs, next to the real controllers of JobSet, Kueue, and Kubeflow Trainer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testcluster.images import OPERATOR_IMAGE
from testing.kubernetes.chart import RELEASE, SYSTEM, render_chart
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_job_manifest, build_volume_claim
from testing.operators.operator_process import run_operator_process

# Kueue admits only jobs of kinds that it has found when it starts.
pytestmark = pytest.mark.usefixtures("resources", "jobset", "kubeflow_trainer", "kueue")

NAME, QUEUE, FLAVOR, TRAINER, RUNTIME = "managed", "team", "gpu-nodes", "pytorch", "torch-healed"
JOBSET_VERSION, KUEUE_VERSION = "jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta2"
TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
OPERATOR = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
NODE_LABELS = {"kubernetes.io/os": "linux"}
TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
QUOTA = {"cpu": "1", "memory": "8Gi"}
SCRIPT = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stops = torch.zeros(1)
while not stops.item():
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    stops.fill_(dist.get_rank() == 0 and os.path.exists("/shared/stop"))
    dist.broadcast(stops, 0)
"""


def build_pod_template(container: str, command: str) -> dict[str, Any]:
    mounts = [{"name": "code", "mountPath": "/code"}, {"name": "shared", "mountPath": "/shared"}]
    trainer = {"name": container, "volumeMounts": mounts}
    # The path hides that of the image, which has Pacekeeper.
    job = build_job_manifest(NAME, ["sh", "-c", command], environment={"PYTHONPATH": "/code"}, trainer=trainer)
    template: dict[str, Any] = job["spec"]["template"]
    template["spec"] |= {
        "restartPolicy": "Never",
        "securityContext": {},  # the ranks run as the image's user
        "volumes": [
            {"name": "code", "configMap": {"name": NAME}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": NAME}},
        ],
    }
    return template


def build_jobset() -> dict[str, Any]:
    command = "cd /code; python -m torch.distributed.run --nnodes=2 --nproc-per-node=1 train.py"
    template = build_pod_template(TRAINER, command)
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": template}
    return {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "metadata": {"name": NAME, "labels": {"kueue.x-k8s.io/queue-name": QUEUE}},
        "spec": {
            "managedBy": "pacekeeper.dev/operator",
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def build_trainjob() -> list[dict[str, Any]]:
    """Return a runtime whose JobSets the operator runs, and a TrainJob of it."""
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": build_pod_template("node", "set by the TrainJob")},
        },
    }
    template = {"spec": {"managedBy": "pacekeeper.dev/operator", "replicatedJobs": [node]}}
    runtime = {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainingRuntime",
        "metadata": {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": template},
    }
    command = ["sh", "-c", "cd /code; torchrun train.py"]
    trainjob = {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": NAME, "labels": {"kueue.x-k8s.io/queue-name": QUEUE}},
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": RUNTIME},
            "trainer": {"numNodes": 2, "numProcPerNode": 1, "command": command},
        },
    }
    return [runtime, trainjob]


def create_queue(cluster: KubectlCluster, namespace: str) -> None:
    """Create a queue that admits nothing yet, and whose flavor has labels and a toleration."""
    quotas = [{"name": name, "nominalQuota": quantity} for name, quantity in QUOTA.items()]
    resources = {"coveredResources": list(QUOTA), "flavors": [{"name": FLAVOR, "resources": quotas}]}
    cluster_queue = {"namespaceSelector": {}, "stopPolicy": "Hold", "resourceGroups": [resources]}
    for kind, name, spec in (
        ("ResourceFlavor", FLAVOR, {"nodeLabels": NODE_LABELS, "tolerations": [TOLERATION]}),
        ("ClusterQueue", QUEUE, cluster_queue),
        ("LocalQueue", QUEUE, {"clusterQueue": QUEUE}),
    ):
        cluster.apply({"apiVersion": KUEUE_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}, namespace)


def set_stop_policy(cluster: KubectlCluster, policy: str) -> None:
    cluster.kubectl("patch", "clusterqueue", QUEUE, "--type=merge", "-p", json.dumps({"spec": {"stopPolicy": policy}}))


@contextmanager
def run_operator(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """Run an operator that runs JobSets, and yield the TrainingJob that it will create in a namespace of its own."""
    settings = {
        "PACEKEEPER_JOBSETS_ENABLED": "true",
        "PACEKEEPER_SIDECAR_IMAGE": OPERATOR_IMAGE,
        "PACEKEEPER_SIDECAR_PULL_POLICY": "Never",
    }
    with run_operator_process(cluster, settings=settings), scratch_namespace(cluster) as namespace:
        code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {"train.py": SCRIPT}}
        for body in (code, build_volume_claim(NAME)):
            cluster.apply(body, namespace)
        create_queue(cluster, namespace)
        yield ClusterJob(cluster, namespace, NAME)


def delete_owner(job: ClusterJob, kind: str) -> None:
    job.cluster.kubectl("delete", kind, NAME, "-n", job.namespace, "--ignore-not-found", "--timeout=120s")


@pytest.fixture
def job_of_jobset(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """The TrainingJob of a JobSet that waits in a queue."""
    with run_operator(cluster) as job:
        cluster.apply(build_jobset(), job.namespace)
        yield job
        delete_owner(job, "jobset")


@pytest.fixture
def job_of_trainjob(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """The TrainingJob of a TrainJob that waits in a queue."""
    with run_operator(cluster) as job:
        for body in build_trainjob():
            cluster.apply(body, job.namespace)
        yield job
        delete_owner(job, "trainjob")


def read_jobset_status(job: ClusterJob) -> dict[str, Any]:
    return dict(job.cluster.get("jobset", NAME, job.namespace).get("status", {}))


def read_condition(body: dict[str, Any], kind: str) -> str:
    conditions = body.get("status", {}).get("conditions", ())
    return next((str(item["status"]) for item in conditions if item["type"] == kind), "")


def find_workload(job: ClusterJob) -> dict[str, Any]:
    """Return the only Workload of the namespace; {}: there is none yet."""
    workloads = job.cluster.list("workloads.kueue.x-k8s.io", job.namespace)
    assert len(workloads) < 2, "the TrainingJob is not queued a second time"
    return dict(workloads[0]) if workloads else {}


def test_a_managed_jobset_is_queued_trains_heals_is_evicted_and_completes(job_of_jobset: ClusterJob) -> None:
    job = job_of_jobset
    job.wait_until(job.exists, 120, "the operator has created the TrainingJob")
    job.wait_for_phase("Suspended")
    job.wait_until(lambda: find_workload(job), 120, "Kueue has the JobSet's Workload")
    assert job.list_pods() == []

    set_stop_policy(job.cluster, "None")
    job.wait_for_step(10, timeout=120)
    pod = job.read()["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (NODE_LABELS, [TOLERATION])
    assert job.cluster.list("job", job.namespace) == [], "JobSet's own controller leaves it alone"
    job.wait_until(lambda: read_jobset_status(job)["replicatedJobsStatus"][0]["ready"] == 1, 120, "the JobSet is ready")

    job.crash_rank(1)
    incident = job.wait_until_incident_ended("crash", known=())
    assert incident["status"]["outcome"] == "Recovered", incident
    job.wait_until(lambda: read_jobset_status(job)["restarts"] == 1, 120, "the JobSet counts the restart")

    set_stop_policy(job.cluster, "HoldAndDrain")
    job.wait_until(lambda: read_condition(find_workload(job), "QuotaReserved") == "False", 120, "the quota is returned")
    assert job.list_pods() == []
    set_stop_policy(job.cluster, "None")
    job.wait_for_step(10, timeout=120)

    (job.find_claim_folder() / "stop").touch()
    job.wait_until(lambda: read_jobset_status(job).get("terminalState") == "Completed", 120, "the JobSet is complete")
    job.wait_until(lambda: read_condition(find_workload(job), "Finished") == "True", 120, "Kueue has noticed")
    job.cluster.kubectl("delete", "jobset", NAME, "-n", job.namespace)
    job.wait_until_deleted(timeout=120)


def test_a_queued_trainjob_trains_heals_is_evicted_and_completes(job_of_trainjob: ClusterJob) -> None:
    job = job_of_trainjob

    def has_condition(kind: str) -> bool:
        return read_condition(job.cluster.get("trainjob", NAME, job.namespace), kind) == "True"

    set_stop_policy(job.cluster, "None")
    job.wait_until(job.exists, 120, "the operator has created the TrainingJob")
    job.wait_for_step(10, timeout=120)
    spec = job.read()["spec"]
    pod = spec["template"]["spec"]
    assert (spec["replicas"], pod["nodeSelector"], pod["tolerations"]) == (2, NODE_LABELS, [TOLERATION])
    assert job.cluster.list("job", job.namespace) == [], "JobSet's own controller leaves it alone"
    job.crash_rank(1)
    incident = job.wait_until_incident_ended("crash", known=())
    assert incident["status"]["outcome"] == "Recovered", incident

    set_stop_policy(job.cluster, "HoldAndDrain")
    job.wait_until(lambda: read_condition(find_workload(job), "QuotaReserved") == "False", 120, "the quota is returned")
    job.wait_until(lambda: has_condition("Suspended"), 120, "the TrainJob is suspended")
    assert job.list_pods() == []
    set_stop_policy(job.cluster, "None")
    job.wait_for_step(10, timeout=120)
    (job.find_claim_folder() / "stop").touch()
    job.wait_until(lambda: has_condition("Complete"), 120, "the TrainJob is complete")
    delete_owner(job, "trainjob")
    job.wait_until_deleted(timeout=120)


@pytest.fixture
def rights(cluster: KubectlCluster) -> Iterator[None]:
    """The operator's account has the rights on jobs, and their limits, of a chart that runs JobSets."""
    names = (f"{RELEASE}-jobs",)
    rendered = render_chart("--set", "jobSets.enabled=true")
    objects = [found for found in rendered if found["metadata"]["name"] in names]
    assert len(objects) == 4, "role, policy, and the bindings of both"
    for found in objects:
        cluster.apply(found)
    yield
    for found in objects:
        cluster.kubectl("delete", found["kind"].lower(), found["metadata"]["name"])


@pytest.mark.usefixtures("rights")
def test_the_operator_may_create_and_change_only_jobs_of_jobsets(cluster: KubectlCluster, namespace: str) -> None:
    def write(*arguments: str, user: str = OPERATOR, body: dict[str, Any] | None = None) -> str:
        stdin = None if body is None else json.dumps(body)
        try:
            cluster.kubectl(*arguments, "-n", namespace, f"--as={user}", stdin=stdin)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)
        return ""

    suspended = build_jobset()
    suspended["spec"]["suspend"] = True
    cluster.apply(suspended, namespace)
    owner = {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "name": NAME,
        "uid": cluster.get("jobset", NAME, namespace)["metadata"]["uid"],
        "controller": True,
    }
    own, users = (build_job_manifest(name, ["pacekeeper"]) for name in ("own", "users"))
    own["metadata"]["ownerReferences"] = [owner]
    cluster.apply(users, namespace)
    # The policy takes effect some time after its creation.
    wait_for(
        lambda: (
            "a JobSet controls"
            in write("create", "-f", "-", "--dry-run=server", body=users | {"metadata": {"name": "x"}})
        ),
        120,
        "the policy denies",
    )
    assert write("create", "-f", "-", body=own) == ""
    change = ("patch", "--type=merge", "-p", '{"spec": {"suspend": true}}', "trainingjob")
    assert write(*change, "own") == ""
    assert "a JobSet controls" in write(*change, "users")
    claim = json.dumps({"metadata": {"ownerReferences": [owner]}, "spec": {"suspend": True}})
    assert "a JobSet controls" in write("patch", "--type=merge", "-p", claim, "trainingjob", "users")
    assert write("auth", "can-i", "patch", f"jobsets/{NAME}", "--subresource=status") == ""
    assert "cannot patch" in write("patch", "--type=merge", "-p", '{"spec": {"suspend": false}}', "jobset", NAME)

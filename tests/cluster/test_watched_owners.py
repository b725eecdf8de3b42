"""Watched jobs of real controllers: a JobSet of two replicated jobs in a queue of Kueue, and a TrainJob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pacekeeper_operator.api.names import LABEL_WATCHED
from pacekeeper_operator.pods.resources import parse_quantity
from testcluster import faults
from testcluster.images import UNPRIVILEGED_USER_ID
from testing.kubernetes.cluster import KubectlCluster, wait_for
from testing.kubernetes.injection_cases import RULES
from testing.operators.watch_installation import labeled_namespace, run_injecting_operator, watch_label

pytestmark = pytest.mark.usefixtures("resources", "jobset", "kubeflow_trainer", "kueue")

NAME, TRAINJOB, QUEUE, URGENT = "train", "bert", "team", "urgent"
REPLICATED_JOBS = ("leader", "workers")
REQUESTS = {"cpu": "20m", "memory": "256Mi"}
QUOTA = {"cpu": "40m", "memory": "512Mi"}
"""What both pods request by their templates, and no more."""
START_SECONDS = 120
KUEUE_VERSION, JOBSET_VERSION = "kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2"
TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
SCRIPT = """
import os, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = "0.0.0.0" if rank == 0 else os.environ["MASTER_ADDR"]
dist.init_process_group("gloo", init_method=f"tcp://{master}:29500", rank=rank, world_size=world_size)
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.AdamW([parameter])
while True:
    time.sleep(0.1)
    dist.all_reduce(parameter.data)
    parameter.grad = torch.ones(4)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def watched_namespace(
    cluster: KubectlCluster,
    resources: None,  # noqa: ARG001  # in this order
    jobset: None,  # noqa: ARG001
    kubeflow_trainer: None,  # noqa: ARG001
    kueue: None,  # noqa: ARG001
) -> Iterator[str]:
    with (
        run_injecting_operator(cluster, RULES.image, PACEKEEPER_WATCH_ENABLED="true"),
        labeled_namespace(cluster, **watch_label("enabled")) as namespace,
    ):
        create_queue(cluster, namespace)
        yield namespace
        cluster.kubectl("delete", "jobsets,jobs", "--all", "-n", namespace, "--timeout=120s")


def create_queue(cluster: KubectlCluster, namespace: str) -> None:
    """Create a queue that admits nothing yet."""
    quotas = [{"name": name, "nominalQuota": quantity} for name, quantity in QUOTA.items()]
    flavors = [{"name": "default", "resources": quotas}]
    cluster_queue = {
        "namespaceSelector": {},
        "stopPolicy": "Hold",
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(QUOTA), "flavors": flavors}],
    }
    for kind, name, content in (
        ("ResourceFlavor", "default", {}),
        ("WorkloadPriorityClass", URGENT, {"value": 100}),
        ("ClusterQueue", QUEUE, {"spec": cluster_queue}),
        ("LocalQueue", QUEUE, {"spec": {"clusterQueue": QUEUE}}),
    ):
        cluster.apply({"apiVersion": KUEUE_VERSION, "kind": kind, "metadata": {"name": name}, **content}, namespace)


def open_queue(cluster: KubectlCluster) -> None:
    cluster.kubectl("patch", "clusterqueue", QUEUE, "--type=merge", "-p", '{"spec": {"stopPolicy": "None"}}')


def build_job_spec(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    container = {
        "name": "pytorch",
        "image": RULES.image,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": REQUESTS},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsUser": UNPRIVILEGED_USER_ID},
        "containers": [container],
    }
    return {"backoffLimit": 0, "template": {"spec": spec}}


def build_environment(rank: int, world_size: int, master: str) -> dict[str, str]:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": master, "MASTER_PORT": "29500"}
    return environment | {"GLOO_SOCKET_IFNAME": "eth0", "HOME": "/tmp"}


def build_jobset(master: str) -> dict[str, Any]:
    replicated_jobs = []
    for rank, name in enumerate(REPLICATED_JOBS):
        spec = build_job_spec(["python", "-c", SCRIPT], build_environment(rank, 2, master))
        replicated_jobs.append({"name": name, "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "metadata": {"name": NAME, "labels": {"kueue.x-k8s.io/queue-name": QUEUE}},
        "spec": {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": replicated_jobs},
    }


def build_urgent_job() -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": URGENT}
    spec = {"suspend": True} | build_job_spec(["sleep", "1"], {})
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": URGENT, "labels": labels}, "spec": spec}


def build_trainjob() -> list[dict[str, Any]]:
    """Return a runtime, and a TrainJob of it with one rank."""
    job = build_job_spec(["set by the TrainJob"], build_environment(0, 1, "127.0.0.1"))
    job["template"]["spec"]["containers"][0]["name"] = "node"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": job}}
    runtime = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}}
    trainjob = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": "torch"},
        "trainer": {"command": ["python", "-c", SCRIPT]},
    }
    return [
        {"apiVersion": TRAINER_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
        for kind, metadata, spec in (
            ("TrainingRuntime", {"name": "torch", "labels": {"trainer.kubeflow.org/framework": "torch"}}, runtime),
            ("TrainJob", {"name": TRAINJOB}, trainjob),
        )
    ]


def create_master_service(cluster: KubectlCluster, namespace: str) -> str:
    """Create a Service that leads to rank 0, and return its address."""
    spec = {
        "selector": {"jobset.sigs.k8s.io/replicatedjob-name": REPLICATED_JOBS[0]},
        "ports": [{"port": 29500, "targetPort": 29500}],
    }
    cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "master"}, "spec": spec}, namespace)
    return str(cluster.get("service", "master", namespace)["spec"]["clusterIP"])


def list_training_pods(cluster: KubectlCluster, namespace: str) -> list[dict[str, Any]]:
    return cluster.list("pod", namespace, f"jobset.sigs.k8s.io/jobset-name={NAME}")


def read_watched_job(cluster: KubectlCluster, namespace: str) -> dict[str, Any]:
    """Return the only WatchedJob; {}: there is none yet."""
    jobs = cluster.list("watchedjob", namespace)
    assert len(jobs) < 2, "both replicated jobs are one training, in each of its rounds"
    return dict(jobs[0]) if jobs else {}


def wait_for_round(cluster: KubectlCluster, namespace: str, number: int) -> dict[str, Any]:
    """Wait until all ranks train in the round, and return the WatchedJob."""

    def find() -> dict[str, Any] | None:
        job = read_watched_job(cluster, namespace)
        status = job.get("status", {})
        rounds = status.get("rounds", ())
        trains = len(rounds) >= number and "firstStep" in rounds[-1] and status["phase"] == "Watched"
        return job if trains else None

    return wait_for(
        find, START_SECONDS, f"round {number} trains", situation=lambda: str(read_watched_job(cluster, namespace))
    )


def find_workload(cluster: KubectlCluster, namespace: str) -> dict[str, Any] | None:
    """Return the JobSet's Workload; None: Kueue has not created it yet."""
    owned = [
        item
        for item in cluster.list("workloads.kueue.x-k8s.io", namespace)
        if any(owner["kind"] == "JobSet" for owner in item["metadata"].get("ownerReferences", ()))
    ]
    return owned[0] if owned else None


def find_condition(cluster: KubectlCluster, namespace: str, kind: str) -> dict[str, Any]:
    conditions = (find_workload(cluster, namespace) or {}).get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def test_a_jobset_in_a_queue_is_one_watched_job_through_admission_restart_and_preemption(
    cluster: KubectlCluster, watched_namespace: str
) -> None:
    namespace = watched_namespace
    cluster.apply(build_jobset(create_master_service(cluster, namespace)), namespace)
    wait_for(lambda: find_workload(cluster, namespace), 120, "Kueue has the JobSet's Workload")
    assert cluster.get("jobset", NAME, namespace)["spec"]["suspend"] is True
    assert list_training_pods(cluster, namespace) == []

    open_queue(cluster)
    job = wait_for_round(cluster, namespace, 1)
    root = cluster.get("jobset", NAME, namespace)
    assert job["spec"]["root"] == {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "name": NAME,
        "uid": root["metadata"]["uid"],
    }
    assert job["status"]["ranks"] == "2/2"
    check_quota(cluster, namespace)

    # A lost rank: the failure policy restarts the whole JobSet.
    (worker,) = (
        pod["metadata"]["name"]
        for pod in list_training_pods(cluster, namespace)
        if f"{NAME}-{REPLICATED_JOBS[1]}" in pod["metadata"]["name"]
    )
    faults.kill_container(namespace, worker, "pytorch")
    job = wait_for_round(cluster, namespace, 2)
    (first, _) = job["status"]["rounds"]
    situation = (first, [incident["spec"] for incident in cluster.list("incident", namespace)])
    assert first["cause"].startswith(f"rank 1 on {worker} ended without an exception"), situation
    (crash,) = cluster.list("incident", namespace)
    assert (crash["spec"]["cause"], crash["spec"]["rank"]) == ("crash", 1)

    # A job of higher priority: Kueue suspends the JobSet, and its pods are deleted.
    cluster.apply(build_urgent_job(), namespace)
    wait_for(lambda: find_condition(cluster, namespace, "Preempted"), 120, "Kueue preempts the JobSet")
    cluster.kubectl("wait", f"job/{URGENT}", "--for=condition=Complete", "-n", namespace, "--timeout=120s")
    job = wait_for_round(cluster, namespace, 3)
    causes = [incident["spec"]["cause"] for incident in cluster.list("incident", namespace)]
    assert sorted(causes) == ["crash", "worker-lost"], "the preemption is no crash"
    second = job["status"]["rounds"][1]
    assert "its pod was deleted" in second["cause"]
    lost = job["status"]["account"]["lost"]
    assert lost.get("hang", 0.0) == 0.0, lost


def check_quota(cluster: KubectlCluster, namespace: str) -> None:
    """The pods request more than the quota has, and Kueue counts what their templates request."""
    workload = find_workload(cluster, namespace)
    assert workload is not None
    usages = [item["resourceUsage"] for item in workload["status"]["admission"]["podSetAssignments"]]
    assert usages == [REQUESTS, REQUESTS]
    pods = list_training_pods(cluster, namespace)
    assert all(LABEL_WATCHED in pod["metadata"]["labels"] for pod in pods)
    requested = sum(
        parse_quantity(container["resources"]["requests"]["cpu"])
        for pod in pods
        for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"])
        if container.get("restartPolicy") == "Always" or container in pod["spec"]["containers"]
    )
    assert requested > parse_quantity(QUOTA["cpu"])


@pytest.fixture
def trainjob(cluster: KubectlCluster, watched_namespace: str) -> Iterator[dict[str, Any]]:
    for body in build_trainjob():
        cluster.apply(body, watched_namespace)
    yield cluster.get("trainjob", TRAINJOB, watched_namespace)
    cluster.kubectl("delete", "trainjob", TRAINJOB, "-n", watched_namespace, "--timeout=120s")


def test_a_trainjob_is_the_root_of_its_watched_job(
    cluster: KubectlCluster, watched_namespace: str, trainjob: dict[str, Any]
) -> None:
    root = {"apiVersion": TRAINER_VERSION, "kind": "TrainJob", "name": TRAINJOB, "uid": trainjob["metadata"]["uid"]}

    def has_trained() -> bool:
        jobs = [job for job in cluster.list("watchedjob", watched_namespace) if job["spec"]["root"] == root]
        return any("firstStep" in round_ for job in jobs for round_ in job.get("status", {}).get("rounds", ()))

    wait_for(
        has_trained,
        START_SECONDS,
        "its rank trains",
        situation=lambda: str(cluster.list("watchedjob", watched_namespace)),
    )

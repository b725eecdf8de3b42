"""Converted manifests of other kinds: the API server takes them, and they heal in images without Pacekeeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testcluster.images import OPERATOR_IMAGE, TRAINER_IMAGE
from testcluster.settings import VOLUMES
from testing.kubernetes.chart import REPOSITORY
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_volume_claim
from testing.operators.operator_process import run_operator_process

pytestmark = pytest.mark.usefixtures("resources")

MANIFESTS = REPOSITORY / "tests/unit/operator/convert/manifests"
SHARED = "shared"
"""Name of the claim and of its volume."""
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
assert "pacekeeper" not in {name.split(".")[0] for name in sys.modules}, "the image has no Pacekeeper"
folder = f"/shared/{os.environ['NAME']}"
os.makedirs(folder, exist_ok=True)
def leave(*_):
    open(f"{folder}/left-{os.environ['HOSTNAME']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if os.path.exists(f"{folder}/state.pt"):
    model.load_state_dict(torch.load(f"{folder}/state.pt"))
stops = torch.zeros(1)
while not stops.item():
    time.sleep(0.1)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{folder}/new.pt")
        os.replace(f"{folder}/new.pt", f"{folder}/state.pt")
        stops.fill_(os.path.exists("/shared/stop"))
    dist.broadcast(stops, 0)
"""
SHELL_COMMAND = [
    "sh",
    "-c",
    "set -e; echo prepares; torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=unused:29500 "
    "/code/train.py; until test -e /shared/upload; do sleep 0.2; done; echo uploads > /shared/uploaded-$HOSTNAME",
]
"""A shell that calls torchrun, with a rendezvous that nothing serves, and a command after it."""
BY_SHELL, BY_PYTHON = "pytorchjob", "job"


def build_template(name: str, container: str, command: list[str], *others: dict[str, Any]) -> dict[str, Any]:
    """Build a pod template whose image has no Pacekeeper: its PYTHONPATH hides that of the test image.

    The ranks run as the image's user, which is root, and the sidecar as its own. `others`: further containers.
    """
    trainer = {
        "name": container,
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": "PYTHONPATH", "value": "/code"}, {"name": "NAME", "value": name}],
        "resources": {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"cpu": "400m", "memory": "2Gi"}},
        "volumeMounts": [{"name": "code", "mountPath": "/code"}, {"name": SHARED, "mountPath": "/shared"}],
    }
    volumes = [
        {"name": "code", "configMap": {"name": "code"}},
        {"name": SHARED, "persistentVolumeClaim": {"claimName": SHARED}},
    ]
    return {"spec": {"terminationGracePeriodSeconds": 10, "containers": [*others, trainer], "volumes": volumes}}


def build_sources() -> dict[str, list[dict[str, Any]]]:
    """Build a job of each kind, of two workers, by name; a TrainJob comes with its runtime."""
    logger = {
        "name": "logger",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "trap exit TERM; sleep 1000 & wait"],
    }

    def build_indexed_job(name: str, container: str, command: list[str]) -> dict[str, Any]:
        template = build_template(name, container, command)
        return {"completionMode": "Indexed", "parallelism": 2, "completions": 2, "template": template}

    def build_object(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}

    replicas = {
        role: {"replicas": 1, "restartPolicy": "OnFailure", "template": template}
        for role in ("Master", "Worker")
        for template in [build_template(BY_SHELL, "pytorch", SHELL_COMMAND, logger)]
    }
    worker = {"replicas": 2, "template": build_template("launch", "pytorch", [
        "python", "-m", "torch.distributed.launch", "--nproc_per_node=1", "--nnodes=2", "--node_rank=$(RANK)",
        "--master_addr=$(MASTER_ADDR)", "/code/train.py",
    ])}  # fmt: skip
    by_index = "torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$JOB_COMPLETION_INDEX /code/train.py"
    runtime_template = {"replicatedJobs": [{"name": "node", "template": {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"template": build_template("trainjob", "node", ["sleep", "1"])},
    }}]}  # fmt: skip
    runtime = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": runtime_template}}
    trainer = {"command": ["torchrun", "/code/train.py"], "numNodes": 2, "numProcPerNode": 1}
    jobset_job = {"name": "workers", "template": {"spec": build_indexed_job("jobset", "main", ["sh", "-c", by_index])}}
    by_python = build_indexed_job(BY_PYTHON, "main", ["python", "-u", "/code/train.py"])
    kubeflow, trainer_api = "kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1"
    return {
        BY_SHELL: [build_object(kubeflow, "PyTorchJob", BY_SHELL, {"pytorchReplicaSpecs": replicas})],
        "launch": [build_object(kubeflow, "PyTorchJob", "launch", {"pytorchReplicaSpecs": {"Worker": worker}})],
        "trainjob": [
            build_object(trainer_api, "ClusterTrainingRuntime", "torch", runtime),
            build_object(trainer_api, "TrainJob", "trainjob", {"runtimeRef": {"name": "torch"}, "trainer": trainer}),
        ],
        "jobset": [build_object("jobset.x-k8s.io/v1alpha2", "JobSet", "jobset", {"replicatedJobs": [jobset_job]})],
        BY_PYTHON: [build_object("batch/v1", "Job", BY_PYTHON, by_python)],
    }


def convert(cluster: KubectlCluster, source: Path) -> dict[str, Any]:
    converted: dict[str, Any] = yaml.safe_load(cluster.run_cli("convert", "-f", str(source)))
    return converted


@pytest.fixture
def jobs(cluster: KubectlCluster, tmp_path: Path) -> Iterator[dict[str, ClusterJob]]:
    """Five jobs that were converted by the command line, by the names of their sources."""
    settings = {"PACEKEEPER_SIDECAR_IMAGE": OPERATOR_IMAGE, "PACEKEEPER_SIDECAR_PULL_POLICY": "Never"}
    with run_operator_process(cluster, settings=settings), scratch_namespace(cluster) as namespace:
        code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"train.py": SCRIPT}}
        for body in (code, build_volume_claim(SHARED)):
            cluster.apply(body, namespace)
        jobs = {}
        for name, objects in build_sources().items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
            jobs[name] = ClusterJob.apply(cluster, namespace, convert(cluster, tmp_path / f"{name}.yaml"))
        yield jobs
        for job in jobs.values():
            job.delete()


def test_jobs_of_four_kinds_train_and_heal_in_an_image_without_pacekeeper(jobs: dict[str, ClusterJob]) -> None:
    """A killed rank is restarted. A deleted worker's ranks hear SIGTERM behind a shell, which goes on at the end."""
    seconds = {}
    for name, job in jobs.items():
        job.wait_for_step(10, timeout=120)
        job.crash_rank(1)
        status = job.wait_until_incident_ended("crash", known=())["status"]
        assert (status["remedy"], status["outcome"]) == ("RestartRanks", "Recovered"), (name, status)
        seconds[name] = status["recoveredSeconds"]
    print("recovered after", seconds)
    job = jobs[BY_SHELL]
    volume = job.cluster.get("persistentvolumeclaims", SHARED, job.namespace)["spec"]["volumeName"]
    shared = VOLUMES / str(volume)
    deleted = job.delete_worker(1)
    job.wait_until((shared / BY_SHELL / f"left-{deleted}").exists, 120, "the rank has heard SIGTERM")
    job.wait_until(lambda: job.find_worker(1) != deleted, 120, "the worker is replaced")
    job.wait_for_more_steps()
    workers = [job.find_worker(rank) for rank in range(2)]
    (shared / "stop").touch()
    for name, other in jobs.items():
        if name != BY_SHELL:
            other.wait_for_phase("Complete")
    job.wait_until(lambda: job.get_condition("Running")["reason"] == "RanksFinished", 120, "its ranks have finished")
    assert job.phase == "Running"
    (shared / "upload").touch()
    job.wait_for_phase("Complete")
    for worker in workers:
        assert (shared / f"uploaded-{worker}").exists(), "the job is complete after the shell's next command"


def test_the_api_server_takes_each_converted_manifest(cluster: KubectlCluster, resources: None, tmp_path: Path) -> None:  # noqa: ARG001  # the definitions
    sources = sorted(MANIFESTS.glob("*.yaml"))
    converted = cluster.run_cli("convert", *(f"--filename={source}" for source in sources))
    bodies = [body | {"metadata": {"name": body["metadata"]["name"]}} for body in yaml.safe_load_all(converted)]
    assert len(bodies) == len(sources)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(bodies))
    cluster.kubectl("apply", "--dry-run=server", "--filename", str(tmp_path / "all.yaml"))

"""The test cluster itself: it does what other tests and the demo build upon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import testcluster.cluster
from testcluster import cgroups, faults
from testcluster.settings import BRIDGE, LOGS, PROMETHEUS_URL, REPOSITORY, RUN, STATE, VOLUMES
from testcluster.shell import is_answering
from testing.kubernetes.cluster import KubectlCluster, wait_for

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SERVE = ["python", "-m", "http.server", "8000"]


@pytest.fixture(autouse=True)
def _only_testcluster() -> None:
    if os.environ.get("PACEKEEPER_USE_KUBECONFIG"):
        pytest.skip("these tests are about the cluster of `make cluster`")


@pytest.mark.usefixtures("apart")
def test_down_removes_everything_and_up_works_again() -> None:
    if testcluster.cluster.list_status() != "down":
        pytest.skip("the cluster is in use: `make cluster-down` first to have this tested too")
    testcluster.cluster.bring_up(2, ports=2)
    _start_python("testcluster", "down").wait(timeout=120)
    assert cgroups.list_pids(cgroups.CLUSTER_CGROUP, recursive=True) == []
    assert not cgroups.get_controller_folder("cpu", cgroups.CLUSTER_CGROUP).exists()
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(STATE) not in mounts
    assert str(RUN) not in mounts
    assert BRIDGE not in {link for _, link in socket.if_nameindex()}
    assert not [place for place in Path("/run/netns").iterdir() if place.name.startswith("pacekeeper-")]
    assert {entry.name for entry in STATE.iterdir()} <= {LOGS.name}


def test_every_node_is_ready(cluster: KubectlCluster) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output", "json"))["items"]
    ready = [
        node["metadata"]["name"]
        for node in nodes
        if any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in node["status"]["conditions"]
        )
    ]
    assert sorted(ready) == [f"node-{index}" for index in range(1, 7)]


@pytest.mark.usefixtures("cluster")
def test_up_again_restarts_nothing() -> None:
    before = _list_daemons()
    testcluster.cluster.bring_up()
    assert _list_daemons() == before


def test_pods_reach_one_another_and_the_api_server(cluster: KubectlCluster, namespace: str) -> None:
    download = (
        "import os, ssl, sys, urllib.request as request\n"
        "account = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "headers = {'Authorization': 'Bearer ' + open(account + 'token').read()}\n"
        "trusted = ssl.create_default_context(cafile=account + 'ca.crt')\n"
        "api = 'https://' + os.environ['KUBERNETES_SERVICE_HOST'] + '/version'\n"
        "print(request.urlopen(request.Request(api, headers=headers), context=trusted, timeout=60).status)\n"
        "for address in sys.argv[1:]: print(request.urlopen('http://' + address, timeout=60).status)\n"
    )
    cluster.apply(_build_pod("server", SERVE, node="node-1", labels={"app": "server"}), namespace)
    cluster.apply(_build_pod("client", ["sleep", "1000"], node="node-2"), namespace)
    cluster.apply(_build_service("server"), namespace)
    address = _wait_for_address(cluster, namespace, "server")
    _wait_for_address(cluster, namespace, "client")
    service = cluster.get("service", "server", namespace)["spec"]["clusterIP"]
    wait_for(lambda: is_answering(f"http://{service}"), 120, "the service answers the machine itself")
    where = ["exec", "client", "--namespace", namespace, "--"]
    assert cluster.kubectl(*where, "python", "-c", download, f"{address}:8000", service).split() == ["200"] * 3


def test_a_restricted_pod_imports_torch_and_the_packages(cluster: KubectlCluster, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    imports = "import torch, pacekeeper, pacekeeper_operator, os; print(torch.ones(2).sum().item(), os.getuid())"
    pod = _build_pod("torch", ["python", "-c", imports], image="operator", security=RESTRICTED)
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "scratch", "mountPath": "/tmp"}]
    pod["spec"]["volumes"] = [{"name": "scratch", "emptyDir": {}}]
    cluster.apply(pod, namespace)
    wait_for(lambda: _read_phase(cluster, namespace, "torch") in ("Succeeded", "Failed"), 120, "the pod ends")
    assert cluster.kubectl("logs", "torch", "--namespace", namespace).split() == ["2.0", "65532"]


def test_a_released_volume_comes_back_empty(cluster: KubectlCluster, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints"},
        "spec": {
            "storageClassName": "shared",
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    cluster.apply(claim, namespace)
    pod = _build_pod("writer", ["sh", "-c", "echo kept > /checkpoints/step-1"])
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
    pod["spec"]["volumes"] = [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    cluster.apply(pod, namespace)
    wait_for(lambda: _read_phase(cluster, namespace, "writer") == "Succeeded", 120, "the pod has written")
    volume = cluster.get("persistentvolumeclaim", "checkpoints", namespace)["spec"]["volumeName"]
    assert (VOLUMES / volume / "step-1").read_text() == "kept\n"
    cluster.kubectl("delete", "pod/writer", "pvc/checkpoints", "--namespace", namespace)
    wait_for(lambda: cluster.get("pv", volume)["status"]["phase"] == "Available", 120, f"{volume} is free again")
    assert list((VOLUMES / volume).iterdir()) == []


def test_prometheus_discovers_a_pod_by_its_port(cluster: KubectlCluster, namespace: str) -> None:
    metrics = "mkdir /tmp/www && cd /tmp/www && echo 'answer 42' > metrics && exec python -m http.server 8000"
    pod = _build_pod("metrics", ["sh", "-c", metrics], node="node-3")
    pod["spec"]["containers"][0]["ports"] = [{"name": "pk-metrics", "containerPort": 8000}]
    cluster.apply(pod, namespace)

    def target() -> Any:
        with urllib.request.urlopen(f"{PROMETHEUS_URL}/api/v1/targets?state=active", timeout=60) as answer:
            labels = [found["labels"] for found in json.load(answer)["data"]["activeTargets"]]
        return next((found for found in labels if found["namespace"] == namespace), None)

    found = wait_for(target, 120, "Prometheus has discovered the pod")
    assert (found["pod"], found["container"], found["node"]) == ("metrics", "main", "node-3")


def test_a_cpu_quota_slows_a_running_container(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(_build_pod("busy", ["python", "-c", "while True: pass"], cpu="400m"), namespace)
    _wait_for_address(cluster, namespace, "busy")
    assert faults.measure_millicores(namespace, "busy", "main") < 500
    faults.set_cpu_quota(namespace, "busy", "main", millicores=30)  # less than the kernel gives in a node's period
    before = read_throttled(namespace, "busy", "main")
    assert faults.measure_millicores(namespace, "busy", "main") < 50
    assert read_throttled(namespace, "busy", "main") > before, "by its quota, not by others"
    with pytest.raises(ValueError, match="the minimum is 1"):
        faults.set_cpu_quota(namespace, "busy", "main", millicores=0)


def test_a_node_is_lost_and_comes_back(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(_build_pod("server", SERVE, node="node-6"), namespace)
    address = _wait_for_address(cluster, namespace, "server")
    url = f"http://{address}:8000"
    wait_for(lambda: is_answering(url), 120, "the pod answers")
    faults.disconnect_node("node-6")
    try:
        assert not is_answering(url)
        assert len(faults.list_container_pids(namespace, "server", "main")) == 1, "it is unreachable, not dead"
    finally:
        faults.reconnect_node("node-6")
    wait_for(lambda: is_answering(url), 120, "the pod answers again")


def test_a_slow_link_slows_what_crosses_it(cluster: KubectlCluster, namespace: str) -> None:
    megabyte = (
        "mkdir /tmp/www && cd /tmp/www && head -c 1000000 /dev/zero > megabyte && exec python -m http.server 8000"
    )
    cluster.apply(_build_pod("server", ["sh", "-c", megabyte], node="node-5"), namespace)
    url = f"http://{_wait_for_address(cluster, namespace, 'server')}:8000/megabyte"
    wait_for(lambda: is_answering(url), 120, "the pod answers")
    faults.slow_link("node-5", "4mbit")
    try:
        slow_seconds = _time_download(url)
    finally:
        faults.clear_link("node-5")
    assert slow_seconds > 1.5, "8 Mbit at 4 Mbit a second, but for what the queue takes at once"
    assert _time_download(url) < slow_seconds / 2


def test_the_api_server_restarts_and_prometheus_goes_and_comes(cluster: KubectlCluster) -> None:
    before = _list_daemons()
    faults.restart_api_server()
    assert cluster.get("namespace", "default") is not None
    faults.stop_prometheus()
    assert not is_answering(f"{PROMETHEUS_URL}/-/ready")
    faults.start_prometheus()
    assert is_answering(f"{PROMETHEUS_URL}/-/ready")
    changed = {name for name, pids in _list_daemons().items() if before[name] != pids}
    assert changed == {"kube-apiserver", "prometheus"}


def test_a_crashed_container_is_back_within_seconds(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(_build_pod("server", SERVE, restart="Always"), namespace)
    _wait_for_address(cluster, namespace, "server")
    for crash in range(1, 6):  # the usual back-off would be 0, 10, 20, 40, 80 s
        faults.signal_process(faults.list_container_pids(namespace, "server", "main")[0], signal.SIGKILL)
        wait_for(partial(_has_restarted, cluster, namespace, "server", crash), 35, f"restart {crash}")


def test_up_restores_a_cluster_whose_processes_were_all_killed(cluster: KubectlCluster, namespace: str) -> None:
    cluster.apply(_build_pod("survivor", SERVE, node="node-2", restart="Always"), namespace)
    _wait_for_address(cluster, namespace, "survivor")
    cgroups.kill_cgroup(cgroups.CLUSTER_CGROUP)
    killed = _start_python("testcluster", "up")
    wait_for(lambda: len(_list_daemons()) >= 5, 120, "half of the daemons are up")
    killed.kill()
    killed.wait()
    testcluster.cluster.bring_up()
    wait_for(partial(_has_restarted, cluster, namespace, "survivor", 1), 120, "the pod runs again")
    address = _wait_for_address(cluster, namespace, "survivor")
    wait_for(lambda: is_answering(f"http://{address}:8000"), 120, "the pod answers")


def test_up_starts_a_kubelet_again_that_ends_because_its_containerd_is_busy(
    cluster: KubectlCluster, namespace: str
) -> None:
    daemons = _list_daemons()
    faults.signal_process(daemons["node-3-containerd"], signal.SIGSTOP)
    try:
        faults.signal_process(daemons["node-3-kubelet"], signal.SIGKILL)
        up = _start_python("testcluster", "up")
        first = wait_for(
            lambda: _find_new_daemon("node-3-kubelet", than=daemons["node-3-kubelet"]), 120, "there is a kubelet"
        )
        wait_for(lambda: _find_new_daemon("node-3-kubelet", than=first), 120, "there is another after it")
    finally:
        faults.signal_process(daemons["node-3-containerd"], signal.SIGCONT)
    assert up.wait(60) == 0
    cluster.apply(_build_pod("server", SERVE, node="node-3"), namespace)
    _wait_for_address(cluster, namespace, "server")


def read_throttled(namespace: str, pod: str, container: str) -> int:
    """In how many of its periods the container has come to its quota."""
    folder = cgroups.get_controller_folder("cpu", faults.find_container(namespace, pod, container).cgroup)
    fields = (folder / "cpu.stat").read_text().split()
    return int(fields[fields.index("nr_throttled") + 1])


def _build_pod(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    name: str,
    command: list[str],
    *,
    image: str = "dev",
    node: str | None = None,
    labels: dict[str, str] | None = None,
    security: dict[str, Any] | None = None,
    cpu: str | None = None,
    restart: str = "Never",
) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main", "image": f"pacekeeper.dev/{image}:dev", "command": command}
    container |= {"securityContext": security or {}, "resources": {"limits": {"cpu": cpu}} if cpu else {}}
    spec = {"restartPolicy": restart, "terminationGracePeriodSeconds": 0, "containers": [container], "nodeName": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels or {}}, "spec": spec}


def _build_service(app: str) -> dict[str, Any]:
    spec = {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": app}, "spec": spec}


def _wait_for_address(cluster: KubectlCluster, namespace: str, pod: str) -> str:
    """The pod's address, once its container runs."""

    def address() -> str | None:
        status = cluster.get("pod", pod, namespace)["status"]
        running = any("running" in container["state"] for container in status.get("containerStatuses", []))
        return status["podIP"] if running else None

    return wait_for(address, 120, f"pod {pod} runs")


def _read_phase(cluster: KubectlCluster, namespace: str, pod: str) -> str:
    return str(cluster.get("pod", pod, namespace)["status"]["phase"])


def _has_restarted(cluster: KubectlCluster, namespace: str, pod: str, times: int) -> bool:
    """Whether the pod's container runs, after that many restarts or more."""
    container = cluster.get("pod", pod, namespace)["status"]["containerStatuses"][0]
    return "running" in container["state"] and int(container["restartCount"]) >= times


def _time_download(url: str) -> float:
    started = time.monotonic()
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()
    return time.monotonic() - started


def _list_daemons() -> dict[str, int]:
    """Process ids by daemon, without the programs that they call, which come and go."""
    folders = cgroups.get_controller_folder("pids", f"{cgroups.CLUSTER_CGROUP}/daemons").iterdir()
    found = {
        folder.name: cgroups.list_pids(f"{cgroups.CLUSTER_CGROUP}/daemons/{folder.name}")
        for folder in folders
        if folder.is_dir()
    }
    return {name: min(pids) for name, pids in found.items() if pids}


def _find_new_daemon(daemon: str, *, than: int) -> int | None:
    found = _list_daemons().get(daemon)
    return found if found != than else None


def _start_python(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=REPOSITORY, stdout=subprocess.DEVNULL)

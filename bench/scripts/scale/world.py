"""A cluster of nodes that kwok plays, jobs whose sidecars speak, the operator as a process: what parts measure on.

Everything, the measurement itself included, has this machine's processors: figures are of two cores where it has two.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from . import prometheus
from .api import Api, connect_api
from .control_plane import ControlPlane, find_free_port, run_control_plane

REPOSITORY = Path(__file__).resolve().parents[3]
SYSTEM_NAMESPACE, JOB_NAMESPACE = "pacekeeper-system", "training"
API_PATH = "/apis/pacekeeper.dev/v1alpha1"
JOBS_PATH = f"{API_PATH}/namespaces/{JOB_NAMESPACE}/trainingjobs"
TOKEN_SECONDS = 7200
START_TIMEOUT_SECONDS = 900.0
MIN_MEMORY_BYTES = 512 * 2**20
"""The chart's limit; with more than a thousand workers half a MiB for each (docs/install.md)."""
PATIENT_SETTINGS = {"PACEKEEPER_LEASE_SECONDS": "30s"}
"""An operator's settings while jobs begin: the work of thousands of kubelets and sidecars leaves it too little of two
cores for a Lease of six seconds. What is measured is an operator as it is shipped."""
OPERATOR, SIDECARS = "operator", "sidecars"
TAKEN_AT = "taken_at"


@dataclass
class ScaleTestbed:
    """Use `create_testbed()`."""

    plane: ControlPlane
    api: Api
    prometheus: prometheus.StandIn
    prometheus_url: str
    ports: tuple[int, int, int]
    kubeconfig: Path
    memory: int
    """Bytes: the operator's limit, as its container would show it; nothing here holds it to that."""
    pid: int = 0
    """Of the operator."""
    sidecars: dict[str, float] = field(default_factory=dict)
    """The last reports of the processes of all sidecars: sums of counts, and the latest of times."""
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same of each process."""
    report_received: asyncio.Event = field(default_factory=asyncio.Event)

    def start_operator(self, settings: Mapping[str, str]) -> None:
        """`settings`: variables in addition to those that it needs here."""
        endpoint, liveness, metrics = self.ports
        environment = {name: value for name, value in os.environ.items() if name != "NETRC"} | {
            "HOME": str(self.plane.folder),  # a pod has no .netrc, which would be read for each call
            "KUBECONFIG": str(self.kubeconfig),
            "POD_NAME": f"operator-{time.monotonic_ns()}",  # another one each time, as in a new pod
            "PACEKEEPER_NAMESPACE": SYSTEM_NAMESPACE,
            "PACEKEEPER_ADDRESS": f"127.0.0.1:{endpoint}",
            "PACEKEEPER_PORT": str(endpoint),
            "PACEKEEPER_LIVENESS_PORT": str(liveness),
            "PACEKEEPER_METRICS_PORT": str(metrics),
            "PACEKEEPER_PROMETHEUS_URL": self.prometheus_url,
            "PACEKEEPER_DCGM_NAMESPACE": prometheus.DCGM_NAMESPACE,
            "PACEKEEPER_NETWORK_POLICIES": "false",
        }
        profile = os.environ.get("PROFILE")  # a file for cProfile's figures, which end in it when the operator does
        python_options = ["-m", "cProfile", "-o", profile, "-m"] if profile else ["-m"]
        cgroup_folder = self.plane.folder / "cgroup"
        cgroup_folder.mkdir(exist_ok=True)
        (cgroup_folder / "memory.max").write_text(f"{self.memory}\n")
        mount_command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" /sys/fs/cgroup && exec "$@"',
            str(cgroup_folder),
        ]
        command = [*mount_command, sys.executable, *python_options, "pacekeeper_operator"]
        self.pid = self.plane.start(OPERATOR, *command, environment=environment | dict(settings))
        self.plane.wait_for("the operator", f"http://127.0.0.1:{liveness}/healthz")

    def stop_operator(self) -> None:
        self.plane.stop(OPERATOR)

    def restart_operator(self, settings: Mapping[str, str]) -> None:
        """It gives its Lease back."""
        self.stop_operator()
        self.start_operator(settings)

    def kill_operator(self) -> None:
        """Without a shutdown."""
        self.plane.kill(OPERATOR)

    def read_metrics(self, *names: str) -> str:
        """Of these series; none: of all, which takes the operator of 1,000 jobs a tenth of a second."""
        query = urlencode([("name[]", name) for name in names])
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics?{query}", timeout=10) as response:
            return str(response.read().decode())

    async def make_job(self, name: str, workers: int, spares: int = 0) -> None:
        body = {
            "apiVersion": "pacekeeper.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": JOB_NAMESPACE},
            "spec": {
                "replicas": workers,
                "spares": spares,
                "schedulingTimeout": "30m",
                "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer", "command": ["pacekeeper"],
                                                      "resources": {"requests": {"cpu": "40"}}}]}},
            },
        }  # fmt: skip
        await self.api.call("POST", JOBS_PATH, body)

    async def wait_until_training(self, workers: int, sidecars: int = 0) -> None:
        """This many workers of all jobs are members, and this many sidecars report."""
        deadline, logged_at = time.monotonic() + START_TIMEOUT_SECONDS, 0.0
        while self.sidecars.get("training", 0) < workers or self.sidecars.get("sidecars", 0) < sidecars:
            self.plane.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not {workers} workers train within {START_TIMEOUT_SECONDS:.0f} s: {self.sidecars}")
            if time.monotonic() - logged_at > 10:
                logged_at = time.monotonic()
                log_progress(f"{self.sidecars}")
            await asyncio.sleep(0.5)

    async def wait_until(self, condition: Callable[[dict[str, float]], bool], seconds: float) -> bool:
        """Of what the processes of all sidecars report; False: not within this many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition(self.sidecars):
                    self.report_received.clear()
                    await self.report_received.wait()
        except TimeoutError:
            return False
        return True

    async def measure_idle_share(self, seconds: float) -> float:
        """Of a core, that the operator takes while nothing happens for `seconds`."""
        used_before, start = self.read_processor_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        return (self.read_processor_seconds() - used_before) / (time.monotonic() - start)

    def read_processor_seconds(self) -> float:
        """Of the operator, since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read_memory_mb(self) -> float:
        """Of the operator: what is resident now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def log_progress(message: str) -> None:
    print(f"   {time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


@asynccontextmanager
async def create_testbed(nodes: int, *, spares_apart: bool = False) -> AsyncIterator[ScaleTestbed]:
    """With `nodes` nodes, and no jobs and no operator yet. `spares_apart`: spares' sidecars have a process of their
    own, so that a plan for a spare does not wait behind the plans for thousands of others."""
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(run_control_plane())
        api = await stack.enter_async_context(connect_api(plane.url, plane.admin_token, plane.build_ssl_context()))
        stand_in = prometheus.StandIn(nodes)
        url = await stack.enter_async_context(prometheus.serve_stand_in(stand_in, find_free_port()))
        await _install_resources(api)
        log_progress(f"{nodes} nodes are made")
        await api.all(api.call("POST", "/api/v1/nodes", _build_node(i)) for i in range(nodes))
        token = await _create_token(api)
        kubeconfig = plane.write_kubeconfig("pacekeeper", token)
        testbed = ScaleTestbed(
            plane,
            api,
            stand_in,
            url,
            (find_free_port(), find_free_port(), find_free_port()),
            kubeconfig,
            max(MIN_MEMORY_BYTES, nodes * 2**19),
        )
        for group in ("spares", "others") if spares_apart else ("all",):
            await stack.enter_async_context(_run_sidecars(testbed, group))
        yield testbed


def format_node_name(index: int) -> str:
    return f"node-{index:05}"


def _build_node(index: int) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": format_node_name(index), "kubernetes.io/arch": "amd64"}
    address = f"127.1.{index // 250}.{1 + index % 250}"
    return {
        "metadata": {"name": format_node_name(index), "labels": labels},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    }


async def _install_resources(api: Api) -> None:
    """Resource definitions, namespaces, and the operator's account. Its rights are those of an administrator: that the
    chart's suffice, tests on the test cluster show."""
    for path in sorted((REPOSITORY / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    for namespace in (SYSTEM_NAMESPACE, JOB_NAMESPACE):
        await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        await api.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}})
    await api.call(
        "POST", f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts", {"metadata": {"name": "pacekeeper"}}
    )
    binding = {
        "metadata": {"name": "pacekeeper"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "pacekeeper", "namespace": SYSTEM_NAMESPACE}],
    }
    await api.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)


async def _create_token(api: Api) -> str:
    """The operator's: the API server bounds it as any account's (priority and fairness), where an administrator's is
    not bounded."""
    path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/pacekeeper/token"
    response = await api.call("POST", path, {"spec": {"expirationSeconds": TOKEN_SECONDS}})
    token: str = response["status"]["token"]
    return token


@asynccontextmanager
async def _run_sidecars(testbed: ScaleTestbed, group: str) -> AsyncIterator[None]:
    """The process of all sidecars, or of some: see `sidecars`."""
    plane, folder = testbed.plane, testbed.plane.folder / f"tokens-{group}"
    folder.mkdir(mode=0o700)
    config = {"api": plane.url, "authority": str(plane.authority), "token": plane.admin_token, "folder": str(folder)}
    with plane.get_log_path(f"{SIDECARS}-{group}").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.scripts.scale.sidecars", cwd=REPOSITORY,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(config | {'of': group})}\n".encode())
    reader_task = asyncio.create_task(_read_reports(testbed, process, group))
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
        reader_task.cancel()


async def _read_reports(testbed: ScaleTestbed, process: asyncio.subprocess.Process, group: str) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        testbed.reports[group] = json.loads(line)
        names = {name for report in testbed.reports.values() for name in report}
        testbed.sidecars = {
            name: (max if name == TAKEN_AT else sum)(report.get(name, 0) for report in testbed.reports.values())
            for name in names
        }
        testbed.report_received.set()

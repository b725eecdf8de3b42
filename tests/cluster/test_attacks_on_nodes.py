"""What a tenant does to have a node taken away from the others: by its workers' reports, by series, by the objects.

Everything here is done with what a tenant has: a job of its own, its workers' tokens, pods in its own namespace.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from pacekeeper_operator.api.names import TAINT_QUARANTINE
from pacekeeper_operator.observe.prometheus import PrometheusClient
from testcluster.images import DEV_IMAGE
from testcluster.settings import PROMETHEUS_URL
from testing.kubernetes.cluster import KubectlCluster, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.operators.operator_process import OperatorProcess
from testing.operators.sidecar_calls import call_operator, create_sidecar_token

pytestmark = pytest.mark.usefixtures("resources")

NODE, VICTIM = "node-4", "node-6"
LONG = 100_000  # steps: until the test ends it
FALLEN_OFF_THE_BUS = 79
FORGED = f"""
DCGM_FI_DEV_XID_ERRORS{{Hostname="{VICTIM}",node="{VICTIM}",namespace="gpu-monitoring",gpu="0"}} 79
pacekeeper_rank_compute_seconds{{namespace="team-b",trainingjob="victim",pod="victim-w0-0",rank="0"}} 900
pacekeeper_rank_compute_seconds{{trainingjob="victim",rank="oops"}} NaN
"""


EXPORTER = """
import http.server
import os


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(os.environ["SERIES"].encode())


http.server.HTTPServer(("", 9464), Metrics).serve_forever()
"""


@pytest.fixture(autouse=True)
def released(cluster: KubectlCluster) -> Iterator[None]:
    yield
    cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=120s")


def is_untouched(cluster: KubectlCluster, node: str) -> bool:
    spec = cluster.get("node", node)["spec"]
    return not spec.get("unschedulable") and all(t["key"] != TAINT_QUARANTINE for t in spec.get("taints", ()))


def read_phase(cluster: KubectlCluster, node: str) -> str:
    found = cluster.get("nodequarantine", node) or {}
    return str(found.get("status", {}).get("phase", ""))


def send_forged_fault(job: ClusterJob, worker: str, name: str) -> None:
    """The worker reports that its GPU has failed; whether it is accepted at once does not matter here."""
    fault = {
        "name": name,
        "kind": "GpuError",
        "worker": worker,
        "round": 1,
        "noticed_at": time.time(),
        "xid": FALLEN_OFF_THE_BUS,
    }
    assert call_operator(job, "/v1/faults", create_sidecar_token(job, worker), fault)[0] in (202, 503)


def test_a_forged_gpu_error_quarantines_no_node_and_many_of_them_cause_one_probe(
    cluster: KubectlCluster, namespace: str, operator_process: OperatorProcess
) -> None:
    assert operator_process.is_leading()
    body = build_paced_job("liar", LONG, replicas=1, remediation={"allow": ["QuarantineNode"]})
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": NODE}  # which it wants to see gone
    job = ClusterJob.apply(cluster, namespace, body)
    job.wait_for_phase("Running", timeout=120)
    worker = job.find_worker(0)
    for number in range(5):
        send_forged_fault(job, worker, f"{worker}-forged-{number}")
    wait_for(lambda: read_phase(cluster, NODE) == "Cleared", 120, "the node is cleared by a probe pod")
    for number in range(5, 10):
        send_forged_fault(job, worker, f"{worker}-forged-{number}")
    incidents = [i for i in job.list_incidents() if i["spec"]["cause"] == "gpu-error"]
    assert len(incidents) == 1, "the forged fault was received, and repeated ones count as one"
    assert is_untouched(cluster, NODE)
    assert len(cluster.get("nodequarantine", NODE)["status"]["probes"]) == 1


def query_prometheus(text: str) -> list[dict[str, Any]]:
    url = f"{PROMETHEUS_URL}/api/v1/query?query={urllib.parse.quote(text)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


async def test_forged_series_count_only_for_their_own_pod(cluster: KubectlCluster, namespace: str) -> None:
    container = {
        "name": "main",
        "image": DEV_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", EXPORTER],
        "env": [{"name": "SERIES", "value": FORGED}],
        "ports": [{"name": "pk-metrics", "containerPort": 9464}],
    }
    labels = {"pacekeeper.dev/job": "liar", "app.kubernetes.io/name": "dcgm-exporter"}
    pod = {"metadata": {"name": "liar-w0-0", "labels": labels}, "spec": {"containers": [container]}}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", **pod}, namespace)

    own = f'DCGM_FI_DEV_XID_ERRORS{{namespace="{namespace}"}}'
    wait_for(lambda: bool(query_prometheus(own)), 120, "Prometheus has scraped the forged series")

    sample = await PrometheusClient(PROMETHEUS_URL, "gpu-monitoring", "Hostname").sample(time.time())
    assert not sample.error
    assert all(value.node != VICTIM for value in sample.gpu_values)
    assert not sample.get_metrics("team-b", "victim").slowdown
    assert not query_prometheus('pacekeeper_rank_compute_seconds{trainingjob="victim"}')


@pytest.mark.parametrize("resource", ["nodequarantines.pacekeeper.dev", "nodequarantines.pacekeeper.dev/status"])
def test_no_tenant_writes_quarantines(cluster: KubectlCluster, namespace: str, resource: str) -> None:
    account = f"{namespace}:default"
    binding = ["--clusterrole=edit", f"--serviceaccount={account}", "--namespace", namespace]
    cluster.kubectl("create", "rolebinding", "tenant", *binding)
    for verb in ("create", "patch", "update", "delete"):
        with pytest.raises(subprocess.CalledProcessError) as denied:  # kubectl exits with 1
            cluster.kubectl("auth", "can-i", verb, resource, f"--as=system:serviceaccount:{account}")
        assert denied.value.output.strip() == "no", verb

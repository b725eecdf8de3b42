"""A stand-in for MultiKueue in tests of TrainingJobs, and readers of the Workloads of any Kueue.

MultiKueue itself takes two clusters. The stand-in has the resource definition of Workloads in brief, and plays Kueue's
part of the protocol with a job's controller, as its documentation has it. The test decides what is admitted, and when.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacekeeper_operator.api.formats import format_time
from testcluster import api
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob

DEFINITIONS = Path(__file__).parents[2] / "tests/data/kueue/definitions.yaml"
GROUP = "kueue.x-k8s.io"


def find_workload(job: ClusterJob) -> dict[str, Any] | None:
    """Return the job's own Workload; None: there is none (yet)."""
    items = api.get_path(f"/apis/{GROUP}/v1beta1/namespaces/{job.namespace}/workloads")["items"]
    owned = [item for item in items if item["metadata"].get("ownerReferences", [{}])[0].get("name") == job.name]
    assert len(owned) < 2, "one job, one Workload"
    return dict(owned[0]) if owned else None


def find_workload_condition(job: ClusterJob, kind: str) -> dict[str, str]:
    """Return the condition; {}: it is not reported yet."""
    conditions = (find_workload(job) or {}).get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


@dataclass(frozen=True)
class QueueStandIn:
    cluster: KubectlCluster

    def admit(self, job: ClusterJob, **counts: int) -> None:
        """`counts`: pods, by set."""
        assignments = [{"name": name, "count": count} for name, count in counts.items()]
        conditions = {
            "QuotaReserved": ("True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            "Admitted": ("True", "Admitted", "The workload is admitted"),
        }
        self._set_conditions(job, conditions, {"clusterQueue": "all", "podSetAssignments": assignments})

    def send_to_worker_cluster(self, job: ClusterJob, namespace: str) -> ClusterJob:
        """As MultiKueue's adapter for jobs of any kind does, once the job is admitted: copies its Workload, which is
        admitted there, and the job itself. `namespace`: stands in for another cluster's."""
        workload, body = find_workload(job), job.read()
        assert workload is not None
        name = workload["metadata"]["name"]
        metadata = {"name": name, "namespace": namespace, "annotations": workload["metadata"]["annotations"]}
        self.cluster.apply({**workload, "metadata": metadata, "status": {}}, namespace)
        labels = {**body["metadata"]["labels"], f"{GROUP}/prebuilt-workload-name": name}
        spec = {field: value for field, value in body["spec"].items() if field != "managedBy"}
        copy = {**body, "metadata": {"name": job.name, "labels": labels}, "spec": spec}
        worker_job = ClusterJob.apply(
            self.cluster, namespace, {field: copy[field] for field in copy if field != "status"}
        )
        worker_job.wait_until(lambda: find_workload(worker_job), 120, "the copy has taken the Workload for its own")
        assignments = workload["status"]["admission"]["podSetAssignments"]
        self.admit(worker_job, **{assignment["name"]: assignment["count"] for assignment in assignments})
        return worker_job

    def copy_status_back(self, copy: ClusterJob, job: ClusterJob) -> None:
        """The copy's status is the job's."""
        self.cluster.kubectl(
            "patch", "tj", job.name, "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": copy.status}),
        )  # fmt: skip

    def _set_conditions(
        self, job: ClusterJob, updates: Mapping[str, tuple[str, str, str]], admission: Mapping[str, Any]
    ) -> None:
        body = find_workload(job)
        assert body is not None
        conditions = {condition["type"]: condition for condition in body.get("status", {}).get("conditions", ())}
        for kind, (value, reason, message) in updates.items():
            transition = {"lastTransitionTime": format_time(int(time.time()))}
            conditions[kind] = {"type": kind, "status": value, "reason": reason, "message": message, **transition}
        status = {"conditions": list(conditions.values()), "admission": admission}
        patch = {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}, "status": status}
        self.cluster.kubectl(
            "patch", "workload", body["metadata"]["name"], "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps(patch),
        )  # fmt: skip


@contextmanager
def install_queue_stand_in(cluster: KubectlCluster) -> Iterator[QueueStandIn]:
    cluster.kubectl("apply", "-f", str(DEFINITIONS))
    try:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", "-f", str(DEFINITIONS))
        yield QueueStandIn(cluster)
    finally:
        cluster.kubectl("delete", "-f", str(DEFINITIONS), "--timeout=120s")

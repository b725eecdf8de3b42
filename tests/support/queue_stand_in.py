"""A stand-in for Kueue, which cannot be had here: its resource definitions in brief, and its part of the protocol with
a job's controller, as its documentation has it. Whoever is admitted when is the test's to say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacekeeper_operator.api import format_time
from tests.support.cluster import KubectlCluster
from tests.support.jobs import ClusterJob

DEFINITIONS = Path(__file__).parents[1] / "data/kueue/definitions.yaml"
GROUP = "kueue.x-k8s.io"


@dataclass(frozen=True)
class QueueStandIn:
    cluster: KubectlCluster

    def create_flavor(self, name: str, labels: Mapping[str, str]) -> None:
        body = {"apiVersion": f"{GROUP}/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": name}}
        self.cluster.apply({**body, "spec": {"nodeLabels": dict(labels)}})

    def create_priority_class(self, name: str, value: int) -> None:
        body = {"apiVersion": f"{GROUP}/v1beta1", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
        self.cluster.apply({**body, "value": value})

    def get_workload(self, job: ClusterJob) -> dict[str, Any] | None:
        """The job's own; None: there is none (yet)."""
        found = self.cluster.kubectl("get", "workloads", "-n", job.namespace, "-o", "json")
        items: list[dict[str, Any]] = json.loads(found)["items"]
        owners = {body["metadata"]["name"]: body["metadata"].get("ownerReferences", [{}]) for body in items}
        mine = [body for body in items if owners[body["metadata"]["name"]][0].get("name") == job.name]
        assert len(mine) < 2, "one job, one Workload"
        return mine[0] if mine else None

    def get_condition(self, job: ClusterJob, kind: str) -> dict[str, str]:
        """{}: nobody has said anything."""
        conditions = (self.get_workload(job) or {}).get("status", {}).get("conditions", ())
        return next((found for found in conditions if found["type"] == kind), {})

    def get_condition_status(self, job: ClusterJob, kind: str) -> str:
        """The condition's status."""
        return self.get_condition(job, kind).get("status", "")

    def keep_pending(self, job: ClusterJob, why: str) -> None:
        self._set_conditions(job, {"QuotaReserved": ("False", "Pending", why)})

    def admit(self, job: ClusterJob, flavor: str, **counts: int) -> None:
        """`counts`: pods, by set."""
        sets = [{"name": name, "count": count, "flavors": {"cpu": flavor}} for name, count in counts.items()]
        told = {
            "QuotaReserved": ("True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            "Admitted": ("True", "Admitted", "The workload is admitted"),
            "Evicted": ("False", "QuotaReserved", "Previously: evicted"),
        }
        self._set_conditions(job, told, {"clusterQueue": "all", "podSetAssignments": sets})

    def evict(self, job: ClusterJob, reason: str, message: str) -> None:
        """From now on the job has to leave; its quota is its own until it says that it has left."""
        self._set_conditions(job, {"Evicted": ("True", reason, message)})

    def send_to_worker_cluster(self, job: ClusterJob, namespace: str) -> ClusterJob:
        """As MultiKueue's adapter for jobs of any kind does, once the job is admitted: copies its Workload, which is
        admitted there, and the job itself. `namespace`: stands in for another cluster's."""
        workload, body = self.get_workload(job), job.read()
        assert workload is not None
        name = workload["metadata"]["name"]
        kept = {"name": name, "namespace": namespace, "annotations": workload["metadata"]["annotations"]}
        self.cluster.apply({**workload, "metadata": kept, "status": {}}, namespace)
        labels = {**body["metadata"]["labels"], f"{GROUP}/prebuilt-workload-name": name}
        spec = {field: value for field, value in body["spec"].items() if field != "managedBy"}
        copy = {**body, "metadata": {"name": job.name, "labels": labels}, "spec": spec}
        sent = ClusterJob.apply(self.cluster, namespace, {field: copy[field] for field in copy if field != "status"})
        sent.wait_until(lambda: self.get_workload(sent), 30, "the copy has taken the Workload for its own")
        sets = workload["status"]["admission"]["podSetAssignments"]
        self.admit(sent, sets[0]["flavors"]["cpu"], **{each["name"]: each["count"] for each in sets})
        return sent

    def copy_status_back(self, copy: ClusterJob, job: ClusterJob) -> None:
        """What the copy's status says is the job's."""
        self.cluster.kubectl(
            "patch", "tj", job.name, "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": copy.status}),
        )  # fmt: skip

    def _set_conditions(
        self, job: ClusterJob, said: Mapping[str, tuple[str, str, str]], admission: Mapping[str, Any] | None = None
    ) -> None:
        body = self.get_workload(job)
        assert body is not None
        conditions = {found["type"]: found for found in body.get("status", {}).get("conditions", ())}
        for kind, (holds, reason, message) in said.items():
            now = {"lastTransitionTime": format_time(int(time.time()))}
            conditions[kind] = {"type": kind, "status": holds, "reason": reason, "message": message, **now}
        status: dict[str, Any] = {"conditions": list(conditions.values())}
        if admission is not None:
            status["admission"] = admission
        patch = {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}, "status": status}
        self.cluster.kubectl(
            "patch", "workload", body["metadata"]["name"], "-n", job.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps(patch),
        )  # fmt: skip


@contextmanager
def install_queue_stand_in(cluster: KubectlCluster) -> Iterator[QueueStandIn]:
    cluster.kubectl("apply", "-f", str(DEFINITIONS))
    try:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=20s", "-f", str(DEFINITIONS))
        yield QueueStandIn(cluster)
    finally:
        cluster.kubectl("delete", "-f", str(DEFINITIONS), "--timeout=50s", timeout=60)

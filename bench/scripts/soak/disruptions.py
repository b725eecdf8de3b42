"""Faults that can be made on the test cluster, drawn at random: each strikes one job, or all that is below them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pacekeeper_operator.api.names import SIDECAR_CONTAINER
from testcluster import faults, release
from testcluster.shell import ClusterError
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob

RANKS = 2
"""Of each job."""
SMALL_QUOTA, FULL_QUOTA = 40, 400
"""Thousandths of a core: a throttled trainer's, and what its manifest allows."""
SLOW_LINK = "20mbit"
FALLEN_OFF_THE_BUS = 79
UNDO_SECONDS = 60.0
OUTAGE_SECONDS = 20.0
"""Of storage and DNS: longer than the attempts that used to end a job."""
QUOTA = "no-pods"


@dataclass
class Disruptions:
    """`cleanups`: what ends the faults that last. `operators`: whether they are struck, too."""

    cluster: KubectlCluster
    random: random.Random
    cleanups: ExitStack
    operators: bool

    def draw(self) -> str:
        """The name of a fault."""
        return self.random.choice(self.kinds)

    @property
    def kinds(self) -> list[str]:
        """All of them."""
        return list(self._kinds)

    def make(self, name: str, job: ClusterJob) -> str:
        """Inject the fault of this name into this job or the cluster; return its description."""
        return self._kinds[name](job)

    @property
    def _kinds(self) -> dict[str, Callable[[ClusterJob], str]]:
        operator_kinds = {
            "operator killed": self._kill_operator,
            "operator deleted": self._delete_operator,
            "API server restarted": self._restart_api_server,  # another one leads when it is back
        }
        return {
            "rank killed": self._kill_rank,
            "rank stopped": self._stop_rank,
            "container stopped": self._stop_worker,
            "error raised": lambda job: self._request_script_fault(job, "raise"),
            "memory filled": lambda job: self._request_script_fault(job, "fill"),
            "rank waits indefinitely": lambda job: self._request_script_fault(job, "hang"),
            "sidecar killed": self._kill_sidecar,
            "worker deleted": lambda job: f"pod {job.delete_worker(self._draw_rank())}",
            "spare deleted": self._delete_spare,
            "node cordoned": self._cordon_node,
            "kubelet stopped": self._stop_kubelet,
            "processor taken": self._throttle_trainer,
            "link slowed": self._slow_link,
            "cable pulled": self._disconnect_node,
            "XID": self._set_xid,
            "Prometheus away": self._stop_prometheus,
            "exporters restarted": self._restart_exporters,
            "storage away at the start": self._remove_storage,
            "new pods denied": self._deny_new_pods,
            "two nodes without power": self._disconnect_two_nodes,
            **(operator_kinds if self.operators else {}),
        }

    def _draw_rank(self) -> int:
        return self.random.randrange(RANKS)

    def _draw_disconnectable_node(self, job: ClusterJob) -> str:
        """Not the leading operator's: Kubernetes itself would have to move the operator first, and none would lead for
        long enough that growth shows."""
        leader = release.find_leading_pod()
        leading = leader["spec"]["nodeName"] if leader else ""
        return self.random.choice([node for node in map(job.find_node, range(RANKS)) if node != leading])

    def _kill_rank(self, job: ClusterJob) -> str:
        rank = self._draw_rank()
        job.crash_rank(rank)
        return f"SIGKILL to rank {rank}"

    def _stop_rank(self, job: ClusterJob) -> str:
        rank = self._draw_rank()
        job.hang_rank(rank)
        return f"SIGSTOP to rank {rank}"

    def _stop_worker(self, job: ClusterJob) -> str:
        rank = self._draw_rank()
        job.stop_trainer(rank)
        return f"SIGSTOP to all of rank {rank}'s container"

    def _request_script_fault(self, job: ClusterJob, fault: str) -> str:
        rank = self._draw_rank()
        (job.find_checkpoint_folder() / f"fault-{rank}").write_text(fault)
        return f"rank {rank}"

    def _kill_sidecar(self, job: ClusterJob) -> str:
        worker = job.find_worker(self._draw_rank())
        faults.kill_container(job.namespace, worker, SIDECAR_CONTAINER)
        return f"SIGKILL to that of {worker}"

    def _delete_spare(self, job: ClusterJob) -> str:
        ranked = {member["worker"] for member in job.read_plan()["members"]}
        spare = next(name for pod in job.list_pods() if (name := pod["metadata"]["name"]) not in ranked)
        self.cluster.kubectl("delete", "pod", spare, "-n", job.namespace, "--wait=false")
        return f"pod {spare}"

    def _cordon_node(self, job: ClusterJob) -> str:
        """By a person, who means to drain it."""
        node = job.find_node(self._draw_rank())

        def undo() -> None:
            self.cluster.kubectl("uncordon", node)

        self.cleanups.callback(_retry_until_done, undo)
        self.cluster.kubectl("cordon", node)
        return node

    def _stop_kubelet(self, job: ClusterJob) -> str:
        node = self._draw_disconnectable_node(job)
        self.cleanups.callback(faults.resume_kubelet, node)
        faults.stop_kubelet(node)
        return f"SIGSTOP to that of {node}"

    def _throttle_trainer(self, job: ClusterJob) -> str:
        worker = job.find_worker(self._draw_rank())

        def undo() -> None:
            with suppress(ClusterError, OSError, ValueError):  # another one may be in its place
                faults.set_cpu_quota(job.namespace, worker, "trainer", FULL_QUOTA)

        self.cleanups.callback(undo)
        faults.set_cpu_quota(job.namespace, worker, "trainer", SMALL_QUOTA)
        return f"{SMALL_QUOTA}m for {worker}"

    def _slow_link(self, job: ClusterJob) -> str:
        node = job.find_node(self._draw_rank())
        self.cleanups.callback(faults.clear_link, node)
        faults.slow_link(node, SLOW_LINK)
        return f"{SLOW_LINK} for {node}"

    def _disconnect_node(self, job: ClusterJob) -> str:
        node = self._draw_disconnectable_node(job)
        self.cleanups.callback(faults.reconnect_node, node)
        faults.disconnect_node(node)
        return node

    def _set_xid(self, job: ClusterJob) -> str:
        node = job.find_node(self._draw_rank())
        self.cleanups.callback(_retry_until_done, lambda: faults.set_xid(node, 0))
        faults.set_xid(node, FALLEN_OFF_THE_BUS)
        return f"{FALLEN_OFF_THE_BUS} on {node}"

    def _restart_api_server(self, _job: ClusterJob) -> str:
        faults.restart_api_server()
        return "all jobs"

    def _stop_prometheus(self, _job: ClusterJob) -> str:
        self.cleanups.callback(faults.start_prometheus)
        faults.stop_prometheus()
        return "all jobs"

    def _restart_exporters(self, _job: ClusterJob) -> str:
        """GPU errors are absent for a moment, and each counter begins again at zero."""
        self.cluster.kubectl("delete", "pods", "-n", "gpu-monitoring", "--all", "--wait=false")
        return "all nodes"

    def _remove_storage(self, job: ClusterJob) -> str:
        """A rank crashes, and for some seconds every start ends with the same error."""
        (job.find_checkpoint_folder() / "outage").write_text(str(time.time() + OUTAGE_SECONDS))
        return f"for {OUTAGE_SECONDS:.0f} s; {self._kill_rank(job)}"

    def _deny_new_pods(self, job: ClusterJob) -> str:
        """A worker is deleted while a ResourceQuota lets no pod in."""
        self.cleanups.callback(
            _retry_until_done, lambda: self._run_kubectl(job, "delete", "quota", QUOTA, "--ignore-not-found")
        )
        self._run_kubectl(job, "create", "quota", QUOTA, "--hard=pods=0")
        return f"by a ResourceQuota; pod {job.delete_worker(self._draw_rank())} is deleted"

    def _disconnect_two_nodes(self, job: ClusterJob) -> str:
        """As when a rack loses its power. Not with the leading operator's node (`_draw_disconnectable_node`)."""
        leader = release.find_leading_pod()
        nodes = sorted({job.find_node(rank) for rank in range(RANKS)})
        if leader and leader["spec"]["nodeName"] in nodes:
            raise ClusterError(f"the leading operator runs on one of {nodes}")
        for node in nodes:
            self.cleanups.callback(faults.reconnect_node, node)
            faults.disconnect_node(node)
        return " and ".join(nodes)

    def _run_kubectl(self, job: ClusterJob, *arguments: str) -> None:
        self.cluster.kubectl(*arguments, "-n", job.namespace)

    def _kill_operator(self, _job: ClusterJob) -> str:
        leader = _find_leader()
        faults.kill_container(release.SYSTEM, leader, "operator")
        return f"SIGKILL to {leader}"

    def _delete_operator(self, _job: ClusterJob) -> str:
        leader = _find_leader()
        self.cluster.kubectl("delete", "pod", leader, "-n", release.SYSTEM, "--wait=false")
        return leader


def _find_leader() -> str:
    """Raises ClusterError if no operator leads now."""
    if not (leader := release.get_leader_name()):
        raise ClusterError("no operator leads")
    return leader


def _retry_until_done(undo: Callable[[], None]) -> None:
    """A node whose cable is back is not reached at once."""
    deadline = time.monotonic() + UNDO_SECONDS
    while True:
        try:
            return undo()
        except (ClusterError, OSError):
            if time.monotonic() > deadline:
                raise
        time.sleep(1.0)

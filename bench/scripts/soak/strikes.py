"""Faults that can be made on the test cluster, drawn at random: each strikes one job, or all that is below them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pacekeeper_operator.api import SIDECAR_CONTAINER
from testcluster import faults, release
from testcluster.shell import ClusterError
from tests.support.cluster import KubectlCluster
from tests.support.jobs import ClusterJob

RANKS = 2
"""Of each job."""
SMALL_QUOTA, FULL_QUOTA = 40, 400
"""Thousandths of a core: a throttled trainer's, and what its manifest allows."""
SLOW_LINK = "20mbit"
FALLEN_OFF_THE_BUS = 79
MEND_SECONDS = 60.0


@dataclass
class Disruptions:
    """`mends`: what ends the faults that last. `operators`: whether they are struck, too."""

    cluster: KubectlCluster
    random: random.Random
    mends: ExitStack
    operators: bool

    def draw(self) -> str:
        """The name of a fault."""
        return self.random.choice(self.kinds)

    @property
    def kinds(self) -> list[str]:
        """All of them."""
        return list(self._kinds)

    def make(self, name: str, job: ClusterJob) -> str:
        """The fault of this name, to this job or to what is below all; in words."""
        return self._kinds[name](job)

    @property
    def _kinds(self) -> dict[str, Callable[[ClusterJob], str]]:
        of_operators = {
            "operator killed": self._operator_killed,
            "operator deleted": self._operator_deleted,
            "API server restarted": self._api_server,  # another one leads when it is back
        }
        return {
            "rank killed": self._killed,
            "rank stopped": self._stopped,
            "container frozen": self._stop_worker,
            "error raised": lambda job: self._request_script_fault(job, "raise"),
            "memory filled": lambda job: self._request_script_fault(job, "fill"),
            "rank waits for ever": lambda job: self._request_script_fault(job, "hang"),
            "sidecar killed": self._sidecar_killed,
            "worker deleted": lambda job: f"pod {job.delete_worker(self._rank())}",
            "spare deleted": self._spare_deleted,
            "node cordoned": self._cordoned,
            "kubelet frozen": self._stop_kubelet,
            "processor taken": self._throttled,
            "link slowed": self._slowed,
            "cable pulled": self._unplugged,
            "XID": self._xid,
            "Prometheus away": self._prometheus,
            **(of_operators if self.operators else {}),
        }

    def _rank(self) -> int:
        return self.random.randrange(RANKS)

    def _node_to_cut_off(self, job: ClusterJob) -> str:
        """Not the leading operator's: Kubernetes itself would have to move the operator first, and none would lead for
        long enough that growth shows."""
        leader = release.find_leading_pod()
        leading = leader["spec"]["nodeName"] if leader else ""
        return self.random.choice([node for node in map(job.find_node, range(RANKS)) if node != leading])

    def _killed(self, job: ClusterJob) -> str:
        rank = self._rank()
        job.crash_rank(rank)
        return f"SIGKILL to rank {rank}"

    def _stopped(self, job: ClusterJob) -> str:
        rank = self._rank()
        job.hang_rank(rank)
        return f"SIGSTOP to rank {rank}"

    def _stop_worker(self, job: ClusterJob) -> str:
        rank = self._rank()
        job.stop_trainer(rank)
        return f"SIGSTOP to all of rank {rank}'s container"

    def _request_script_fault(self, job: ClusterJob, what: str) -> str:
        rank = self._rank()
        (job.find_checkpoint_folder() / f"fault-{rank}").write_text(what)
        return f"rank {rank}"

    def _sidecar_killed(self, job: ClusterJob) -> str:
        worker = job.find_worker(self._rank())
        faults.kill_container(job.namespace, worker, SIDECAR_CONTAINER)
        return f"SIGKILL to that of {worker}"

    def _spare_deleted(self, job: ClusterJob) -> str:
        ranked = {member["worker"] for member in job.read_plan()["members"]}
        spare = next(name for pod in job.list_pods() if (name := pod["metadata"]["name"]) not in ranked)
        self.cluster.kubectl("delete", "pod", spare, "-n", job.namespace, "--wait=false")
        return f"pod {spare}"

    def _cordoned(self, job: ClusterJob) -> str:
        """By a person, who means to drain it."""
        node = job.find_node(self._rank())

        def mend() -> None:
            self.cluster.kubectl("uncordon", node)

        self.mends.callback(_retry_until_done, mend)
        self.cluster.kubectl("cordon", node)
        return node

    def _stop_kubelet(self, job: ClusterJob) -> str:
        node = self._node_to_cut_off(job)
        self.mends.callback(faults.resume_kubelet, node)
        faults.stop_kubelet(node)
        return f"SIGSTOP to that of {node}"

    def _throttled(self, job: ClusterJob) -> str:
        worker = job.find_worker(self._rank())

        def mend() -> None:
            with suppress(ClusterError, OSError, ValueError):  # another one may be in its place
                faults.set_cpu_quota(job.namespace, worker, "trainer", FULL_QUOTA)

        self.mends.callback(mend)
        faults.set_cpu_quota(job.namespace, worker, "trainer", SMALL_QUOTA)
        return f"{SMALL_QUOTA}m for {worker}"

    def _slowed(self, job: ClusterJob) -> str:
        node = job.find_node(self._rank())
        self.mends.callback(faults.clear_link, node)
        faults.slow_link(node, SLOW_LINK)
        return f"{SLOW_LINK} for {node}"

    def _unplugged(self, job: ClusterJob) -> str:
        node = self._node_to_cut_off(job)
        self.mends.callback(faults.reconnect_node, node)
        faults.disconnect_node(node)
        return node

    def _xid(self, job: ClusterJob) -> str:
        node = job.find_node(self._rank())
        self.mends.callback(_retry_until_done, lambda: faults.set_xid(node, 0))
        faults.set_xid(node, FALLEN_OFF_THE_BUS)
        return f"{FALLEN_OFF_THE_BUS} on {node}"

    def _api_server(self, _job: ClusterJob) -> str:
        faults.restart_api_server()
        return "all jobs"

    def _prometheus(self, _job: ClusterJob) -> str:
        self.mends.callback(faults.start_prometheus)
        faults.stop_prometheus()
        return "all jobs"

    def _operator_killed(self, _job: ClusterJob) -> str:
        leader = _leader()
        faults.kill_container(release.SYSTEM, leader, "operator")
        return f"SIGKILL to {leader}"

    def _operator_deleted(self, _job: ClusterJob) -> str:
        leader = _leader()
        self.cluster.kubectl("delete", "pod", leader, "-n", release.SYSTEM, "--wait=false")
        return leader


def _leader() -> str:
    """Raises ClusterError where nobody leads now."""
    if not (leader := release.get_leader_name()):
        raise ClusterError("no operator leads")
    return leader


def _retry_until_done(mend: Callable[[], None]) -> None:
    """A node whose cable is back is not reached at once."""
    until = time.monotonic() + MEND_SECONDS
    while True:
        try:
            return mend()
        except (ClusterError, OSError):
            if time.monotonic() > until:
                raise
        time.sleep(1.0)

"""Faults that can be made on the test cluster, drawn at random: each strikes one job, or all that is below them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from testcluster import faults, release
from testcluster.shell import ClusterError
from tests.support.cluster import Cluster
from tests.support.jobs import Job

RANKS = 2
"""Of each job."""
QUARTER_CORE, FULL_QUOTA = 40, 400
"""Thousandths of a core: a throttled trainer's, and what its manifest allows."""
SLOW_LINK = "20mbit"
FALLEN_OFF_THE_BUS = 79


@dataclass
class Strikes:
    """`mends`: what ends the faults that last."""

    cluster: Cluster
    dice: random.Random
    mends: ExitStack

    def draw(self, job: Job) -> str:
        """Makes a fault, and says which."""
        name = self.dice.choice(list(self.kinds))
        return f"{name} ({job.name}): {self.kinds[name](job)}"

    @property
    def kinds(self) -> dict[str, Callable[[Job], str]]:
        return {
            "rank killed": self._killed,
            "rank stopped": self._stopped,
            "container frozen": self._frozen,
            "error raised": lambda job: self._asked(job, "raise"),
            "memory filled": lambda job: self._asked(job, "fill"),
            "rank waits for ever": lambda job: self._asked(job, "hang"),
            "worker deleted": lambda job: f"pod {job.delete_worker(self._rank())}",
            "processor taken": self._throttled,
            "link slowed": self._slowed,
            "cable pulled": self._unplugged,
            "XID": self._xid,
            "API server restarted": self._api_server,
            "Prometheus away": self._prometheus,
            "operator killed": self._operator_killed,
            "operator deleted": self._operator_deleted,
        }

    def _rank(self) -> int:
        return self.dice.randrange(RANKS)

    def _killed(self, job: Job) -> str:
        rank = self._rank()
        job.crash(rank)
        return f"SIGKILL to rank {rank}"

    def _stopped(self, job: Job) -> str:
        rank = self._rank()
        job.hang(rank)
        return f"SIGSTOP to rank {rank}"

    def _frozen(self, job: Job) -> str:
        rank = self._rank()
        job.freeze(rank)
        return f"SIGSTOP to all of rank {rank}'s container"

    def _asked(self, job: Job, what: str) -> str:
        rank = self._rank()
        (job.folder() / f"fault-{rank}").write_text(what)
        return f"rank {rank}"

    def _throttled(self, job: Job) -> str:
        worker = job.worker(self._rank())
        faults.set_cpu_quota(job.namespace, worker, "trainer", QUARTER_CORE)

        def mend() -> None:
            with suppress(ClusterError, ValueError):  # another one may be in its place
                faults.set_cpu_quota(job.namespace, worker, "trainer", FULL_QUOTA)

        self.mends.callback(mend)
        return f"{QUARTER_CORE}m for {worker}"

    def _slowed(self, job: Job) -> str:
        node = job.node(self._rank())
        faults.slow_link(node, SLOW_LINK)
        self.mends.callback(faults.clear_link, node)
        return f"{SLOW_LINK} for {node}"

    def _unplugged(self, job: Job) -> str:
        """Not the leading operator's node: Kubernetes itself would have to move the operator first."""
        leader = release.leading_pod()
        leading = leader["spec"]["nodeName"] if leader else ""
        node = next((node for node in map(job.node, range(RANKS)) if node != leading), "")
        if not node:
            return "no node but the operator's"
        faults.node_down(node)
        self.mends.callback(faults.node_up, node)
        return node

    def _xid(self, job: Job) -> str:
        node = job.node(self._rank())
        faults.set_xid(node, FALLEN_OFF_THE_BUS)
        self.mends.callback(faults.set_xid, node, 0)
        return f"{FALLEN_OFF_THE_BUS} on {node}"

    def _api_server(self, _job: Job) -> str:
        faults.restart_api_server()
        return "all jobs"

    def _prometheus(self, _job: Job) -> str:
        faults.stop_prometheus()
        self.mends.callback(faults.start_prometheus)
        return "all jobs"

    def _operator_killed(self, _job: Job) -> str:
        pids = faults.container_pids(release.SYSTEM, release.leader(), "operator")
        for pid in pids:
            faults.signal_process(pid, signal.SIGKILL)
        return "SIGKILL to the leader"

    def _operator_deleted(self, _job: Job) -> str:
        leader = release.leader()
        self.cluster.kubectl("delete", "pod", leader, "-n", release.SYSTEM, "--wait=false")
        return leader

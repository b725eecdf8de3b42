"""Versions, addresses, folders, and the layout of one node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.36.3"
HELM_VERSION = "4.2.4"  # a version that uses the libraries of KUBERNETES_VERSION; testcluster/go/clients/go.mod
HELM_3_VERSION = "3.21.4"  # the same
PROMETHEUS_VERSION = "3.15.0"
KWOK_VERSION = "0.8.0"
JOBSET_VERSION = "0.11.1"  # the version that KUEUE_VERSION and TRAINER_VERSION are built with
KUEUE_VERSION = "0.17.0"
TRAINER_VERSION = "2.2.0"

HOST_ADDRESS = "10.200.0.1"  # the machine's address on the bridge: the API server and Prometheus listen here
SERVICE_SUBNET = "10.96.0.0/16"
POD_SUBNET = "10.244.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
BRIDGE = "pacekeeper0"

API_PORT = 6443
ETCD_PORT = 12379
PROMETHEUS_PORT = 9090
API_URL = f"https://{HOST_ADDRESS}:{API_PORT}"
ETCD_URL = f"http://127.0.0.1:{ETCD_PORT}"
PROMETHEUS_URL = f"http://{HOST_ADDRESS}:{PROMETHEUS_PORT}"

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("PACEKEEPER_CACHE", Path.home() / ".cache/pacekeeper")).absolute()
CLUSTER_NAME = os.environ.get("PACEKEEPER_CLUSTER", "")
"""Name of a cluster that runs next to others (`isolation.py`); "": the machine's unnamed cluster."""
_SUFFIX = f"-{CLUSTER_NAME}" if CLUSTER_NAME else ""
STATE = Path(os.environ.get("PACEKEEPER_CLUSTER_DIR", f"/var/lib/pacekeeper-cluster{_SUFFIX}")).absolute()
RUN = Path(f"/run/pacekeeper-cluster{_SUFFIX}")  # sockets and container bundles: must be gone after a restart
CGROUP = f"pacekeeper{_SUFFIX}"  # every process of the cluster is below it
LOGS = STATE / "logs"
KUBECONFIG = STATE / "kubeconfig"
VOLUMES = STATE / "volumes"

DEFAULT_NODES = 6
MAX_NODES = 200  # node i has the address 10.200.0.(10 + i)


@dataclass(frozen=True)
class ClusterNode:
    """One worker node, numbered from 1."""

    index: int

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def address(self) -> str:
        return f"10.200.0.{10 + self.index}"

    @property
    def pod_subnet(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def namespace(self) -> str:
        """The name of the network namespace."""
        return f"pacekeeper-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the node's network cable. The node's end is eth0."""
        return f"pk-{self.name}"

    @property
    def cgroup(self) -> str:
        return f"{CGROUP}/{self.name}"

    @property
    def folder(self) -> Path:
        return STATE / "nodes" / self.name

    @property
    def run_folder(self) -> Path:
        return RUN / self.name

    @property
    def containerd_socket(self) -> Path:
        return self.run_folder / "containerd.sock"


def list_nodes(count: int) -> list[ClusterNode]:
    return [ClusterNode(index) for index in range(1, count + 1)]

"""Faults for tests and the demo, caused from outside the containers."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testcluster import api, cgroups, cluster, control_plane, fabric, network, prometheus
from testcluster.cables import Cable
from testcluster.node import list_kubelet_pids
from testcluster.programs import Programs
from testcluster.shell import ClusterError

_MIN_QUOTA_US, _MAX_PERIOD_US = 1000, 1_000_000  # the kernel's limits


@dataclass(frozen=True)
class Container:
    """A running container. `cgroup` is relative to the root of the tree."""

    node: str
    cgroup: str

    def pids(self) -> list[int]:
        """Return the process IDs on the machine, oldest first: the first is the container's PID 1."""
        start_times = {pid: _read_start_time(pid) for pid in cgroups.list_pids(self.cgroup)}
        return sorted(
            (pid for pid, start_time in start_times.items() if start_time), key=lambda pid: (start_times[pid], pid)
        )


def find_container(namespace: str, pod: str, container: str) -> Container:
    pod_body = api.get_path(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    status = pod_body["status"]
    statuses = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
    ids = {entry["name"]: entry.get("containerID", "").removeprefix("containerd://") for entry in statuses}
    if not ids.get(container):
        raise ClusterError(f"pod {namespace}/{pod} has no started container {container!r}; it has: {', '.join(ids)}")
    node = pod_body["spec"]["nodeName"]
    base = cgroups.get_controller_folder("cpu", cluster.get_member(node).cgroup)
    for folder in base.glob(f"kubepods/**/{ids[container]}"):
        return Container(node, f"{cluster.get_member(node).cgroup}/{folder.relative_to(base)}")
    raise ClusterError(f"container {namespace}/{pod}/{container} does not run (no cgroup below {base}/kubepods)")


def list_container_pids(namespace: str, pod: str, container: str) -> list[int]:
    """Return the process IDs on the machine, oldest first: the first is the container's PID 1."""
    return find_container(namespace, pod, container).pids()


def list_rank_pids(namespace: str, pod: str, container: str) -> list[int]:
    """Return the process IDs of the ranks of a worker on the machine: each leads a process group, as PID 1 does."""
    _, *others = list_container_pids(namespace, pod, container)
    ranks = []
    for pid in others:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                ranks.append(pid)
    return ranks


def signal_process(pid: int, signum: signal.Signals) -> None:
    """Send a signal: SIGKILL for a crash, SIGSTOP for a hang."""
    os.kill(pid, signum)


def kill_container(namespace: str, pod: str, container: str) -> None:
    """Send SIGKILL to all of a container's processes."""
    for pid in list_container_pids(namespace, pod, container):
        with suppress(ProcessLookupError):  # the first one's death kills the others
            signal_process(pid, signal.SIGKILL)


def measure_millicores(namespace: str, pod: str, container: str, seconds: float = 2.0) -> float:
    """Measure a running container's CPU use over `seconds`, in millicores."""
    cgroup = find_container(namespace, pod, container).cgroup
    before, started = cgroups.read_cpu_seconds(cgroup), time.monotonic()
    time.sleep(seconds)
    return 1000 * (cgroups.read_cpu_seconds(cgroup) - before) / (time.monotonic() - started)


def set_cpu_quota(namespace: str, pod: str, container: str, millicores: int) -> None:
    """Limit a running container to `millicores` / 1000 of a CPU, unknown to Kubernetes: a straggler."""
    minimum = 1000 * _MIN_QUOTA_US // _MAX_PERIOD_US
    if millicores < minimum:
        raise ValueError(f"millicores={millicores}: the minimum is {minimum}")
    folder = cgroups.get_controller_folder("cpu", find_container(namespace, pod, container).cgroup)
    period_file = folder / ("cpu.max" if cgroups.is_v2() else "cpu.cfs_period_us")
    period_us = max(int(period_file.read_text().split()[-1]), 1000 * _MIN_QUOTA_US // millicores)
    quota_us = max(_MIN_QUOTA_US, period_us * millicores // 1000)
    try:
        if cgroups.is_v2():
            (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise ValueError(f"millicores={millicores}: the kernel rejects it, is it above the pod's own limit?") from error


def throttle_node(node: str, millicores: int | None) -> None:
    """Limit all pods of the node together to `millicores` / 1000 of a CPU, as a throttled machine; None: no limit.

    The kernel rejects less than the limit of a single pod (cgroup v1).
    """
    folder = cgroups.get_controller_folder("cpu", cluster.get_member(node).cgroup)
    quota_us = -1 if millicores is None else 100 * millicores
    if cgroups.is_v2():
        (folder / "cpu.max").write_text(f"{'max' if millicores is None else quota_us} 100000")
    else:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))


def stop_kubelet(node: str) -> None:
    """Stop a node's kubelet. Its pods run on, but are not reported, and cannot be ended or started."""
    _signal_kubelet(node, signal.SIGSTOP)


def resume_kubelet(node: str) -> None:
    _signal_kubelet(node, signal.SIGCONT)


def disconnect_node(node: str) -> None:
    """Unplug all of the node's network cables: it is unreachable."""
    _set_node_cables(node, up=False)


def reconnect_node(node: str) -> None:
    _set_node_cables(node, up=True)


def slow_link(node: str, rate: str) -> None:
    """Limit each of the node's cables to `rate` in both directions (in tc's format: 50mbit)."""
    slow_egress(node, rate)
    slow_ingress(node, rate)


def slow_egress(node: str, rate: str) -> None:
    """Limit what the node sends to `rate`."""
    for cable in _list_cables(node):
        cable.near.limit_rate(rate)


def slow_ingress(node: str, rate: str) -> None:
    """Limit what the node receives to `rate`."""
    for cable in _list_cables(node):
        cable.far.limit_rate(rate)


def slow_pair(first_node: str, second_node: str, rate: str) -> None:
    """Limit the traffic between the pods of two nodes to `rate`, in both directions. Other traffic is not limited."""
    for source, destination in ((first_node, second_node), (second_node, first_node)):
        for cable in _list_cables(source):
            cable.near.limit_rate_to_subnet(cluster.get_member(destination).pod_subnet, rate)


def clear_link(node: str) -> None:
    slow_link(node, "")


def cut_uplink(leaf: str, spine: str, *, propagate: bool = True) -> None:
    """Cut the fabric's link between them, visible to its leaf.

    `propagate`: to the other leaves, too. Otherwise, what they send over that spine to that leaf is lost.
    """
    fabric.get_network().cut_link(*fabric.parse_link(leaf, spine), propagate=propagate)


def slow_uplink(leaf: str, spine: str, rate: str) -> None:
    """Limit the fabric's link between them to `rate` in both directions (50mbit, 1gbit)."""
    fabric.check_rate(rate)
    fabric.get_network().slow_link(*fabric.parse_link(leaf, spine), rate)


def heal_uplink(leaf: str, spine: str) -> None:
    """Restore the fabric's link between them, and announce it."""
    fabric.get_network().heal_link(*fabric.parse_link(leaf, spine), fabric.get_rate())


def shape_uplinks(rate: str) -> None:
    """Set the rate of all links between the fabric's leaves and spines (50mbit, 1gbit); "": no limit."""
    fabric.set_all_rates(rate)


def reseed_hashes(seed: int) -> None:
    """Make the fabric's leaves choose differently among equal spines, as switches do after a boot."""
    fabric.get_network().reseed_hashes(seed)


def _signal_kubelet(node: str, signum: signal.Signals) -> None:
    for pid in list_kubelet_pids(cluster.get_member(node)):
        signal_process(pid, signum)


def _set_node_cables(node: str, up: bool) -> None:
    for cable in _list_cables(node):
        cable.far.set_plugged(up)
    fabric.update_routes()


def _list_cables(node: str) -> list[Cable]:
    """Return all cables of the node: to the bridge, and into a fabric."""
    member = cluster.get_member(node)
    return [network.get_cable(member), *fabric.list_cables(member)]


def set_xid(node: str, code: int) -> None:
    """Set the last XID of the node's GPU 0 in its stand-in exporter (`dcgm-exporter.yaml`); 0: none."""
    pods = api.get_path(f"/api/v1/namespaces/gpu-monitoring/pods?fieldSelector=spec.nodeName={node}")["items"]
    if not pods:
        raise ClusterError(f"no exporter runs on {node}: kubectl apply -f testcluster/dcgm-exporter.yaml")
    url = f"http://{pods[0]['status']['podIP']}:9400/gpus/0/DCGM_FI_DEV_XID_ERRORS"
    urllib.request.urlopen(urllib.request.Request(url, data=str(code).encode(), method="PUT"), timeout=5).close()


def stop_prometheus() -> None:
    prometheus.build_prometheus(Programs()).stop()


def start_prometheus() -> None:
    """Start Prometheus, and wait until it answers queries."""
    prometheus.ensure_prometheus(Programs())


def restart_api_server() -> None:
    """Kill the API server and start it again. Wait until it is ready."""
    programs = Programs()
    control_plane.build_api_server(programs).stop()
    control_plane.ensure_api_server(programs)


def _read_start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since the boot; 0 if it does not exist."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(after_name[19])  # field 22 of stat; the second field is the name

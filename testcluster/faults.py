"""Faults for tests and the demo, made from outside the containers."""

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
        """Process ids on the machine, the oldest process (the container's first) first."""
        ages = {pid: _read_start_time(pid) for pid in cgroups.list_pids(self.cgroup)}
        return sorted((pid for pid, started in ages.items() if started), key=lambda pid: (ages[pid], pid))


def find_container(namespace: str, pod: str, container: str) -> Container:
    found = api.get_path(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    status = found["status"]
    statuses = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
    ids = {entry["name"]: entry.get("containerID", "").removeprefix("containerd://") for entry in statuses}
    if not ids.get(container):
        raise ClusterError(f"pod {namespace}/{pod} has no started container {container!r}; it has: {', '.join(ids)}")
    node = found["spec"]["nodeName"]
    base = cgroups.get_controller_folder("cpu", cluster.get_member(node).cgroup)
    for folder in base.glob(f"kubepods/**/{ids[container]}"):
        return Container(node, f"{cluster.get_member(node).cgroup}/{folder.relative_to(base)}")
    raise ClusterError(f"container {namespace}/{pod}/{container} does not run (no cgroup below {base}/kubepods)")


def list_container_pids(namespace: str, pod: str, container: str) -> list[int]:
    """Process ids on the machine, the oldest process (the container's first) first."""
    return find_container(namespace, pod, container).pids()


def signal_process(pid: int, number: signal.Signals) -> None:
    """SIGKILL makes a crash, SIGSTOP a hang."""
    os.kill(pid, number)


def kill_container(namespace: str, pod: str, container: str) -> None:
    """SIGKILL to all of its processes."""
    for pid in list_container_pids(namespace, pod, container):
        with suppress(ProcessLookupError):  # the first one takes the others with it
            signal_process(pid, signal.SIGKILL)


def measure_millicores(namespace: str, pod: str, container: str, seconds: float = 2.0) -> float:
    """What a running container uses of a CPU, in thousandths, measured for so long."""
    cgroup = find_container(namespace, pod, container).cgroup
    before, started = cgroups.read_cpu_seconds(cgroup), time.monotonic()
    time.sleep(seconds)
    return 1000 * (cgroups.read_cpu_seconds(cgroup) - before) / (time.monotonic() - started)


def set_cpu_quota(namespace: str, pod: str, container: str, millicores: int) -> None:
    """Give a running container `millicores` / 1000 of a CPU, without a word to Kubernetes: a straggler."""
    least = 1000 * _MIN_QUOTA_US // _MAX_PERIOD_US
    if millicores < least:
        raise ValueError(f"millicores={millicores}: the least is {least}")
    folder = cgroups.get_controller_folder("cpu", find_container(namespace, pod, container).cgroup)
    in_force = folder / ("cpu.max" if cgroups.is_v2() else "cpu.cfs_period_us")
    period_us = max(int(in_force.read_text().split()[-1]), 1000 * _MIN_QUOTA_US // millicores)
    quota_us = max(_MIN_QUOTA_US, period_us * millicores // 1000)
    try:
        if cgroups.is_v2():
            (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise ValueError(f"millicores={millicores}: the kernel refuses it, more than the pod's own limit?") from error


def throttle_node(node: str, millicores: int | None) -> None:
    """Give all pods of the node together `millicores` / 1000 of a CPU, as a throttled machine does; None: all again.

    The kernel refuses less than what a single pod is limited to (cgroup v1).
    """
    folder = cgroups.get_controller_folder("cpu", cluster.get_member(node).cgroup)
    quota_us = -1 if millicores is None else 100 * millicores
    if cgroups.is_v2():
        (folder / "cpu.max").write_text(f"{'max' if millicores is None else quota_us} 100000")
    else:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))


def stop_kubelet(node: str) -> None:
    """Its pods run on, and nobody hears of them, nor can end or begin one."""
    _signal_kubelet(node, signal.SIGSTOP)


def resume_kubelet(node: str) -> None:
    _signal_kubelet(node, signal.SIGCONT)


def disconnect_node(node: str) -> None:
    """Pull all of the node's network cables: then nothing reaches it and nothing comes from it."""
    _set_node_cables(node, up=False)


def reconnect_node(node: str) -> None:
    _set_node_cables(node, up=True)


def slow_link(node: str, rate: str) -> None:
    """Slow each of the node's cables down, both ways, to `rate` (in tc's words: 50mbit)."""
    slow_egress(node, rate)
    slow_ingress(node, rate)


def slow_egress(node: str, rate: str) -> None:
    """The same of what it sends."""
    for cable in _list_cables(node):
        cable.near.limit_rate(rate)


def slow_ingress(node: str, rate: str) -> None:
    """The same of what it receives."""
    for cable in _list_cables(node):
        cable.far.limit_rate(rate)


def slow_pair(one: str, other: str, rate: str) -> None:
    """The same of the way between the pods of two nodes, both ways; each has its own speed with all others."""
    for source, destination in ((one, other), (other, one)):
        for cable in _list_cables(source):
            cable.near.limit_rate_to_subnet(cluster.get_member(destination).pod_subnet, rate)


def clear_link(node: str) -> None:
    slow_link(node, "")


def cut_uplink(leaf: str, spine: str, *, propagate: bool = True) -> None:
    """The fabric's link between them carries nothing any more, and its leaf sees it.

    told: so do the other leaves. Else what they send by that spine to that leaf is lost.
    """
    fabric.get_network().cut_link(*fabric.parse_link(leaf, spine), propagate=propagate)


def slow_uplink(leaf: str, spine: str, rate: str) -> None:
    """Slow the fabric's link between them down, both ways, to `rate` (50mbit, 1gbit)."""
    fabric.check_rate(rate)
    fabric.get_network().slow_link(*fabric.parse_link(leaf, spine), rate)


def heal_uplink(leaf: str, spine: str) -> None:
    """The fabric's link between them is as all others, and everybody knows it."""
    fabric.get_network().heal_link(*fabric.parse_link(leaf, spine), fabric.get_rate())


def shape_uplinks(rate: str) -> None:
    """All links between the fabric's leaves and spines, from now on (50mbit, 1gbit); "": as fast as memory."""
    fabric.set_all_rates(rate)


def reseed_hashes(seed: int) -> None:
    """The fabric's leaves choose otherwise among equal spines, as switches do after a boot."""
    fabric.get_network().reseed_hashes(seed)


def _signal_kubelet(node: str, number: signal.Signals) -> None:
    for pid in list_kubelet_pids(cluster.get_member(node)):
        signal_process(pid, number)


def _set_node_cables(node: str, up: bool) -> None:
    for cable in _list_cables(node):
        cable.far.set_plugged(up)
    fabric.update_routes()


def _list_cables(node: str) -> list[Cable]:
    """All that the node has: to the bridge, and into a fabric."""
    member = cluster.get_member(node)
    return [network.get_cable(member), *fabric.list_cables(member)]


def set_xid(node: str, code: int) -> None:
    """The last XID of the node's GPU 0, as its stand-in exporter (`dcgm-exporter.yaml`) shows it; 0: there was none."""
    pods = api.get_path(f"/api/v1/namespaces/gpu-monitoring/pods?fieldSelector=spec.nodeName={node}")["items"]
    if not pods:
        raise ClusterError(f"no exporter runs on {node}: kubectl apply -f testcluster/dcgm-exporter.yaml")
    url = f"http://{pods[0]['status']['podIP']}:9400/gpus/0/DCGM_FI_DEV_XID_ERRORS"
    urllib.request.urlopen(urllib.request.Request(url, data=str(code).encode(), method="PUT"), timeout=5).close()


def stop_prometheus() -> None:
    prometheus.build_prometheus(Programs()).stop()


def start_prometheus() -> None:
    """Returns when it answers queries again."""
    prometheus.ensure_prometheus(Programs())


def restart_api_server() -> None:
    """Kill the API server and start it again; returns when it is ready."""
    programs = Programs()
    control_plane.build_api_server(programs).stop()
    control_plane.ensure_api_server(programs)


def _read_start_time(pid: int) -> int:
    """When the process started, in clock ticks since the machine did; 0 if it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(after_name[19])  # field 22 of stat, whose second is the name

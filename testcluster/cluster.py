"""The whole cluster: up, down, status.

`up` creates everything that is missing, and leaves alone what runs as it should. So it also repairs, and can be killed
at any point and run again. `down` ends and removes everything below the cluster's cgroup, folders, and names.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from testcluster import (
    api,
    cgroups,
    control_plane,
    credentials,
    fabric,
    images,
    network,
    network_policies,
    node,
    prometheus,
    volumes,
)
from testcluster.programs import Programs
from testcluster.settings import (
    API_URL,
    DEFAULT_NODES,
    KUBECONFIG,
    LOGS,
    MAX_NODES,
    PROMETHEUS_URL,
    RUN,
    STATE,
    ClusterNode,
    list_nodes,
)
from testcluster.shell import ClusterError, log_progress, log_step, run_command, wait_for, write_if_changed

_NODE_COUNT_FILE = STATE / "node-count"
_GOING_DOWN_FILE = STATE / "going-down"  # exists while `down` runs, so that an interrupted one is completed first
_PODS_CPU_WEIGHT_FACTOR = 4
"""CPU weight of all pods together, in processes of the machine: there are many pods."""
_MAX_PARALLEL_STARTS = max(2, os.cpu_count() or 2)


def bring_up(count: int | None = None, ports: int | None = None, gangs: bool | None = None) -> None:
    """Bring the cluster up with `count` nodes (None: as many as it has, or six), or repair the present one.

    `ports`: of each node into a leaf–spine fabric; 0: no fabric; None: unchanged, initially none. `gangs`: whether the
    scheduler places pods of a PodGroup together; None: unchanged, initially not.
    """
    with _hold_lock(), log_step("Cluster"):
        programs = Programs()
        if _GOING_DOWN_FILE.exists():
            _tear_down()
        members = _choose_members(count)
        if gangs is not None:
            control_plane.choose_gangs(gangs)
        credentials.ensure_credentials()
        network.ensure_bridge()
        cgroups.create_cgroup(cgroups.CLUSTER_CGROUP)
        cgroups.set_cpu_weight(cgroups.CLUSTER_CGROUP, _PODS_CPU_WEIGHT_FACTOR)
        archive, spec = images.build_archive(programs.pause), images.build_runtime_spec(programs)
        with ThreadPoolExecutor(_MAX_PARALLEL_STARTS) as pool:
            with log_step("API server"):
                server = pool.submit(control_plane.ensure_api_server, programs)
                runtimes = [pool.submit(node.ensure_runtime, n, members, programs, archive, spec) for n in members]
                server.result()
            control_plane.ensure_controllers(programs)
            with log_step(f"containerd of {len(members)} nodes"):
                for runtime in runtimes:
                    runtime.result()
            fabric.ensure_fabric(members, ports)
        with log_step(f"Nodes {', '.join(n.name for n in members)}"):
            for member in members:
                node.ensure_kubelet(member, programs)
            control_plane.apply_objects(programs)
            volumes.ensure_recycler()
            prometheus.ensure_prometheus(programs)
            network_policies.ensure_enforcement(len(members))
            wait_for(lambda: _are_all_ready(members, programs), 120, "all nodes Ready", LOGS / "node-*-kubelet.log")
            fabric.label_nodes(members)


def tear_down() -> None:
    """End and remove the cluster. Only the logs stay."""
    with _hold_lock(), log_step("Cluster down"):
        _tear_down()


def list_members() -> list[ClusterNode]:
    """Return the nodes of the cluster that is up, or was before it died."""
    return list_nodes(int(_NODE_COUNT_FILE.read_text())) if _NODE_COUNT_FILE.exists() else []


def get_member(name: str) -> ClusterNode:
    for candidate in list_members():
        if candidate.name == name:
            return candidate
    raise ClusterError(
        f"no node {name!r}; there are: {', '.join(n.name for n in list_members()) or 'none (cluster is down)'}"
    )


def list_status() -> str:
    """Return a readable status: one line per daemon and node."""
    pids_by_daemon = {
        folder.name: cgroups.list_pids(f"{cgroups.CLUSTER_CGROUP}/daemons/{folder.name}")
        for folder in _list_daemon_folders()
    }
    if not pids_by_daemon:
        return "down"
    try:
        ready = api.list_ready_nodes()
    except api.ApiUnavailable:
        ready = set()
    lines = [
        f"{name:32} {'running, pid ' + str(pids[0]) if pids else 'DEAD'}"
        for name, pids in sorted(pids_by_daemon.items())
    ]
    lines += [f"{member.name:32} {'Ready' if member.name in ready else 'NOT READY'}" for member in list_members()]
    return "\n".join([*lines, f"API server {API_URL}", f"Prometheus {PROMETHEUS_URL}", f"KUBECONFIG {KUBECONFIG}"])


def _choose_members(count: int | None) -> list[ClusterNode]:
    current = len(list_members())
    node_count = count or current or DEFAULT_NODES
    if node_count < current:
        raise ClusterError(f"the cluster has {current} nodes: `python -m testcluster down` first, to have {node_count}")
    if node_count > MAX_NODES:
        raise ClusterError(f"--nodes {node_count}: at most {MAX_NODES}, the addresses allow no more")
    if not current:
        shutil.rmtree(LOGS, ignore_errors=True)  # the previous cluster's logs were kept for its post-mortem
    write_if_changed(_NODE_COUNT_FILE, str(node_count))
    return list_nodes(node_count)


def _are_all_ready(members: list[ClusterNode], programs: Programs) -> bool:
    """Return whether all nodes are Ready, with live kubelets: a dead one's node stays Ready for most of a minute.

    A kubelet exits if its containerd is busy for five seconds, and expects a service manager to restart it. So restart
    it here.
    """
    for member in members:
        node.ensure_kubelet(member, programs)
    try:
        return {member.name for member in members} <= api.list_ready_nodes() and all(
            map(api.is_kubelet_healthy, members)
        )
    except api.ApiUnavailable:
        return False


def _list_daemon_folders() -> list[Path]:
    parent = cgroups.get_controller_folder("pids", f"{cgroups.CLUSTER_CGROUP}/daemons")
    return [folder for folder in parent.iterdir() if folder.is_dir()] if parent.exists() else []


@contextmanager
def _hold_lock() -> Iterator[None]:
    """Hold the lock that allows one `up` or `down` at a time on this machine. Raises ClusterError without root."""
    if os.geteuid() != 0:
        raise ClusterError("namespaces and cgroups need root: run it with sudo")
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE.parent / f"{STATE.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_progress("another `up` or `down` is running: waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        STATE.mkdir(parents=True, exist_ok=True)
        yield


def _tear_down() -> None:
    _GOING_DOWN_FILE.touch()
    cgroups.kill_cgroup(cgroups.CLUSTER_CGROUP)
    _unmount_all()
    fabric.remove_fabric()
    network.remove_nodes(list_nodes(MAX_NODES))
    cgroups.remove_cgroup(cgroups.CLUSTER_CGROUP)
    _remove_files()
    _GOING_DOWN_FILE.unlink()


def _unmount_all() -> None:
    """Unmount what kubelets and containerds left in the cluster's folders: container roots, volumes, namespaces."""
    for mount in reversed(_list_mounts()):
        run_command("umount", "--lazy", mount)
    if remaining := _list_mounts():
        raise ClusterError(f"still mounted, so nothing is removed: {', '.join(remaining)}")


def _list_mounts() -> list[str]:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [mount for mount in mounts if Path(mount).is_relative_to(STATE) or Path(mount).is_relative_to(RUN)]


def _remove_files() -> None:
    for address in RUN.glob("*/containerd/io.containerd.runtime.v2.task/k8s.io/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)  # the shim's socket
    for result in Path("/var/lib/cni/results").glob("*"):
        if str(RUN) in result.read_text():
            result.unlink()
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(STATE):
            link.unlink()
    shutil.rmtree(RUN, ignore_errors=True)
    for entry in STATE.iterdir():
        if entry not in (LOGS, _GOING_DOWN_FILE):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

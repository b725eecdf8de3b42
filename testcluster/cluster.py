"""The whole cluster: up, down, status.

`up` makes everything that is missing and leaves alone what runs as it should, so it also repairs, and it may be killed
at any point and run again. `down` ends and removes all that is below our cgroup, our folders and our names.
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
from testcluster.shell import ClusterError, run_command, log_progress, log_step, wait_for, write_if_changed

_NODE_COUNT_FILE = STATE / "node-count"
_GOING_DOWN_FILE = STATE / "going-down"  # there while `down` is at work, so that one that was killed is finished first
_PODS_CPU_WEIGHT_FACTOR = 4
"""So many processes of the machine all pods together are worth: there are many of them."""
_MAX_PARALLEL_STARTS = max(2, os.cpu_count() or 2)


def bring_up(count: int | None = None, ports: int | None = None, gangs: bool | None = None) -> None:
    """Bring the cluster up with `count` nodes (as many as it has, or six), or repair the one that is there.

    ports: of each node into a leaf–spine fabric; 0: there is none; None: as it is, and none at first.
    gangs: whether the scheduler places pods of a PodGroup together; None: as it is, and not at first.
    """
    with _hold_lock(), log_step("Cluster"):
        programs = Programs()
        if _GOING_DOWN_FILE.exists():
            _tear_down()
        wanted = _choose_members(count)
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
                runtimes = [pool.submit(node.ensure_runtime, n, wanted, programs, archive, spec) for n in wanted]
                server.result()
            control_plane.ensure_controllers(programs)
            with log_step(f"containerd of {len(wanted)} nodes"):
                for runtime in runtimes:
                    runtime.result()
            fabric.ensure_fabric(wanted, ports)
        with log_step(f"Nodes {', '.join(n.name for n in wanted)}"):
            for member in wanted:
                node.ensure_kubelet(member, programs)
            control_plane.apply_objects(programs)
            volumes.ensure_recycler()
            prometheus.ensure_prometheus(programs)
            network_policies.ensure_enforcement(len(wanted))
            wait_for(lambda: _are_all_ready(wanted, programs), 120, "all nodes Ready", LOGS / "node-*-kubelet.log")
            fabric.label_nodes(wanted)


def tear_down() -> None:
    """End and remove the cluster. Only the logs stay."""
    with _hold_lock(), log_step("Cluster down"):
        _tear_down()


def list_members() -> list[ClusterNode]:
    """The nodes of the cluster that is up (or was, before it died)."""
    return list_nodes(int(_NODE_COUNT_FILE.read_text())) if _NODE_COUNT_FILE.exists() else []


def get_member(name: str) -> ClusterNode:
    for candidate in list_members():
        if candidate.name == name:
            return candidate
    raise ClusterError(
        f"no node {name!r}; there are: {', '.join(n.name for n in list_members()) or 'none (cluster is down)'}"
    )


def list_status() -> str:
    """One line a daemon and node, for people."""
    running = {folder.name: cgroups.list_pids(f"{cgroups.CLUSTER_CGROUP}/daemons/{folder.name}") for folder in _list_daemon_folders()}
    if not running:
        return "down"
    try:
        ready = api.list_ready_nodes()
    except api.ApiUnavailable:
        ready = set()
    lines = [
        f"{name:32} {'running, pid ' + str(pids[0]) if pids else 'DEAD'}" for name, pids in sorted(running.items())
    ]
    lines += [f"{member.name:32} {'Ready' if member.name in ready else 'NOT READY'}" for member in list_members()]
    return "\n".join([*lines, f"API server {API_URL}", f"Prometheus {PROMETHEUS_URL}", f"KUBECONFIG {KUBECONFIG}"])


def _choose_members(count: int | None) -> list[ClusterNode]:
    present = len(list_members())
    wanted = count or present or DEFAULT_NODES
    if wanted < present:
        raise ClusterError(f"the cluster has {present} nodes: `python -m testcluster down` first, to have {wanted}")
    if wanted > MAX_NODES:
        raise ClusterError(f"--nodes {wanted}: at most {MAX_NODES}, the addresses allow no more")
    if not present:
        shutil.rmtree(LOGS, ignore_errors=True)  # those of the cluster before, kept until now for its post-mortem
    write_if_changed(_NODE_COUNT_FILE, str(wanted))
    return list_nodes(wanted)


def _are_all_ready(wanted: list[ClusterNode], programs: Programs) -> bool:
    """Whether all are Ready, and on the word of kubelets that live: a dead one's node stays Ready for most of a minute.

    A kubelet that finds its containerd busy for five seconds ends, and waits for its service manager: for us.
    """
    for member in wanted:
        node.ensure_kubelet(member, programs)
    try:
        return {member.name for member in wanted} <= api.list_ready_nodes() and all(map(api.is_kubelet_healthy, wanted))
    except api.ApiUnavailable:
        return False


def _list_daemon_folders() -> list[Path]:
    parent = cgroups.get_controller_folder("pids", f"{cgroups.CLUSTER_CGROUP}/daemons")
    return [folder for folder in parent.iterdir() if folder.is_dir()] if parent.exists() else []


@contextmanager
def _hold_lock() -> Iterator[None]:
    """Only one `up` or `down` at a time on this machine."""
    if os.geteuid() != 0:
        raise ClusterError("namespaces and cgroups need root: run it with sudo")
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE.parent / f"{STATE.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_progress("another `up` or `down` is at work: waiting for its end")
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
    """Unmount what kubelets and containerds left below our folders: a container's root, volumes, namespaces."""
    for place in reversed(_list_mounts()):
        run_command("umount", "--lazy", place)
    if left := _list_mounts():
        raise ClusterError(f"still mounted, so nothing is removed: {', '.join(left)}")


def _list_mounts() -> list[str]:
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if Path(place).is_relative_to(STATE) or Path(place).is_relative_to(RUN)]


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

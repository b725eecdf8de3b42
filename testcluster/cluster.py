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
    Node,
    nodes,
)
from testcluster.shell import ClusterError, run, say, step, wait_for, write

_COUNT = STATE / "node-count"
_GOING_DOWN = STATE / "going-down"  # there while `down` is at work, so that one that was killed is finished first
_WORTH = 4
"""So many processes of the machine all pods together are worth: there are many of them."""
_PARALLEL = max(2, os.cpu_count() or 2)


def up(count: int | None = None, ports: int | None = None, gangs: bool | None = None) -> None:
    """Bring the cluster up with `count` nodes (as many as it has, or six), or repair the one that is there.

    ports: of each node into a leaf–spine fabric; 0: there is none; None: as it is, and none at first.
    gangs: whether the scheduler places pods of a PodGroup together; None: as it is, and not at first.
    """
    with _exclusive(), step("Cluster"):
        programs = Programs()
        if _GOING_DOWN.exists():
            _tear_down()
        wanted = _members(count)
        if gangs is not None:
            control_plane.choose_gangs(gangs)
        credentials.ensure()
        network.ensure_host()
        cgroups.create(cgroups.OURS)
        cgroups.favor(cgroups.OURS, _WORTH)
        archive, spec = images.archive(programs.pause), images.runtime_spec(programs)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            with step("API server"):
                server = pool.submit(control_plane.ensure_api_server, programs)
                runtimes = [pool.submit(node.ensure_runtime, n, wanted, programs, archive, spec) for n in wanted]
                server.result()
            control_plane.ensure_controllers(programs)
            with step(f"containerd of {len(wanted)} nodes"):
                for runtime in runtimes:
                    runtime.result()
            fabric.ensure(wanted, ports)
        with step(f"Nodes {', '.join(n.name for n in wanted)}"):
            for member in wanted:
                node.ensure_kubelet(member, programs)
            control_plane.apply_objects(programs)
            volumes.ensure()
            prometheus.ensure(programs)
            network_policies.ensure(len(wanted))
            wait_for(lambda: _all_ready(wanted, programs), 120, "all nodes Ready", LOGS / "node-*-kubelet.log")
            fabric.label_nodes(wanted)


def down() -> None:
    """End and remove the cluster. Only the logs stay."""
    with _exclusive(), step("Cluster down"):
        _tear_down()


def members() -> list[Node]:
    """The nodes of the cluster that is up (or was, before it died)."""
    return nodes(int(_COUNT.read_text())) if _COUNT.exists() else []


def member(name: str) -> Node:
    for candidate in members():
        if candidate.name == name:
            return candidate
    raise ClusterError(
        f"no node {name!r}; there are: {', '.join(n.name for n in members()) or 'none (cluster is down)'}"
    )


def status() -> str:
    """One line a daemon and node, for people."""
    running = {folder.name: cgroups.pids(f"{cgroups.OURS}/daemons/{folder.name}") for folder in _daemon_folders()}
    if not running:
        return "down"
    try:
        ready = api.ready_nodes()
    except api.Unavailable:
        ready = set()
    lines = [
        f"{name:32} {'running, pid ' + str(pids[0]) if pids else 'DEAD'}" for name, pids in sorted(running.items())
    ]
    lines += [f"{member.name:32} {'Ready' if member.name in ready else 'NOT READY'}" for member in members()]
    return "\n".join([*lines, f"API server {API_URL}", f"Prometheus {PROMETHEUS_URL}", f"KUBECONFIG {KUBECONFIG}"])


def _members(count: int | None) -> list[Node]:
    present = len(members())
    wanted = count or present or DEFAULT_NODES
    if wanted < present:
        raise ClusterError(f"the cluster has {present} nodes: `python -m testcluster down` first, to have {wanted}")
    if wanted > MAX_NODES:
        raise ClusterError(f"--nodes {wanted}: at most {MAX_NODES}, the addresses allow no more")
    if not present:
        shutil.rmtree(LOGS, ignore_errors=True)  # those of the cluster before, kept until now for its post-mortem
    write(_COUNT, str(wanted))
    return nodes(wanted)


def _all_ready(wanted: list[Node], programs: Programs) -> bool:
    """Whether all are Ready, and on the word of kubelets that live: a dead one's node stays Ready for most of a minute.

    A kubelet that finds its containerd busy for five seconds ends, and waits for its service manager: for us.
    """
    for member in wanted:
        node.ensure_kubelet(member, programs)
    try:
        return {member.name for member in wanted} <= api.ready_nodes() and all(map(api.kubelet_answers, wanted))
    except api.Unavailable:
        return False


def _daemon_folders() -> list[Path]:
    parent = cgroups.controller("pids", f"{cgroups.OURS}/daemons")
    return [folder for folder in parent.iterdir() if folder.is_dir()] if parent.exists() else []


@contextmanager
def _exclusive() -> Iterator[None]:
    """Only one `up` or `down` at a time on this machine."""
    if os.geteuid() != 0:
        raise ClusterError("namespaces and cgroups need root: run it with sudo")
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE.parent / f"{STATE.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another `up` or `down` is at work: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        STATE.mkdir(parents=True, exist_ok=True)
        yield


def _tear_down() -> None:
    _GOING_DOWN.touch()
    cgroups.kill(cgroups.OURS)
    _unmount_all()
    fabric.remove()
    network.remove(nodes(MAX_NODES))
    cgroups.remove(cgroups.OURS)
    _remove_files()
    _GOING_DOWN.unlink()


def _unmount_all() -> None:
    """Unmount what kubelets and containerds left below our folders: a container's root, volumes, namespaces."""
    for place in reversed(_our_mounts()):
        run("umount", "--lazy", place)
    if left := _our_mounts():
        raise ClusterError(f"still mounted, so nothing is removed: {', '.join(left)}")


def _our_mounts() -> list[str]:
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
        if entry not in (LOGS, _GOING_DOWN):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

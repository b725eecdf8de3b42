"""One worker node: containerd, kubelet, and kube-proxy in the node's network namespace, each with its own folders."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from testcluster import cgroups, credentials, images, network
from testcluster.daemons import Daemon
from testcluster.programs import Programs
from testcluster.settings import DNS_SERVICE, POD_SUBNET, ClusterNode
from testcluster.shell import run_command, write_if_changed

_EVICTION_SIGNALS = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
_UNUSED_SNAPSHOTTERS = ("aufs", "btrfs", "devmapper", "zfs")


def ensure_runtime(
    node: ClusterNode, nodes: Iterable[ClusterNode], programs: Programs, archive: bytes, runtime_spec: str
) -> None:
    """Ensure the node's network, cgroups, and containerd with all images. It needs no API server."""
    network.ensure_node(node, nodes)
    for path in (node.cgroup, _get_shim_cgroup(node)):
        cgroups.create_cgroup(path)
    daemon = build_containerd(node, programs, runtime_spec)
    daemon.ensure_running()
    daemon.wait_for(
        partial(_is_listening, node.containerd_socket), timeout=30, what=f"containerd of {node.name} listens"
    )
    _import_images(node, programs, archive)


def ensure_kubelet(node: ClusterNode, programs: Programs) -> None:
    build_kubelet(node, programs).ensure_running()
    build_proxy(node, programs).ensure_running()


def build_containerd(node: ClusterNode, programs: Programs, runtime_spec: str) -> Daemon:
    spec = write_if_changed(node.folder / "runtime-spec.json", runtime_spec)
    network_plugin = write_if_changed(
        node.folder / "cni" / "pacekeeper.conflist", json.dumps(_build_network_plugin(node), indent=1)
    )
    config = write_if_changed(
        node.folder / "containerd.toml",
        _build_containerd_config(node, programs.cni_folder, spec, network_plugin.parent),
    )
    files = runtime_spec + config.read_text() + network_plugin.read_text()
    command = (programs["containerd"], "--config", str(config))
    return Daemon(f"{node.name}-containerd", command, node.namespace, files)


def build_kubelet(node: ClusterNode, programs: Programs) -> Daemon:
    config = write_if_changed(node.folder / "kubelet.yaml", yaml.safe_dump(_build_kubelet_config(node)))
    command = (
        programs["kubelet"],
        f"--config={config}",
        f"--kubeconfig={credentials.build_kubelet_user(node).kubeconfig}",
        f"--root-dir={node.folder / 'kubelet'}",
        f"--cert-dir={node.folder / 'kubelet' / 'pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    )
    return Daemon(_get_kubelet_name(node), command, node.namespace, config.read_text())


def list_kubelet_pids(node: ClusterNode) -> list[int]:
    return cgroups.list_pids(Daemon(_get_kubelet_name(node), ()).cgroup)


def _get_kubelet_name(node: ClusterNode) -> str:
    return f"{node.name}-kubelet"


def build_proxy(node: ClusterNode, programs: Programs) -> Daemon:
    config = write_if_changed(node.folder / "kube-proxy.yaml", yaml.safe_dump(_build_proxy_config(node)))
    command = (programs["kube-proxy"], f"--config={config}")
    return Daemon(f"{node.name}-kube-proxy", command, node.namespace, config.read_text())


def _build_kubelet_config(node: ClusterNode) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(credentials.CA)}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        # Its own root: with a shared one, each kubelet takes the others' pods for orphans and kills them.
        "cgroupRoot": f"/{node.cgroup}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # Crash back-off would hide the recovery times that tests measure.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        # The default of 100 ms is longer than a training step: a limited worker would run some steps at full speed.
        "cpuCFSQuotaPeriod": "10ms",
        "featureGates": {"KubeletCrashLoopBackOffMax": True, "CustomCPUCFSQuotaPeriod": True},
        # The disk is the machine's: pods are not evicted and images not removed because of it.
        "evictionHard": dict.fromkeys(_EVICTION_SIGNALS, "0%"),
        "imageGCHighThresholdPercent": 100,
        "podLogsDir": str(node.folder / "pod-logs"),
        "volumePluginDir": str(node.folder / "volume-plugins"),
        "serializeImagePulls": False,
    }


def _build_proxy_config(node: ClusterNode) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "bindAddress": node.address,
        "hostnameOverride": node.name,
        "clusterCIDR": POD_SUBNET,
        "clientConnection": {"kubeconfig": str(credentials.PROXY.kubeconfig)},
        "conntrack": {"maxPerCore": 0},  # the limit is the machine's, not a node's
        "oomScoreAdj": 0,
    }


def _build_network_plugin(node: ClusterNode) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pod_subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(node.folder / "addresses"),
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": node.namespace, "plugins": [bridge]}


def _build_containerd_config(node: ClusterNode, cni_folder: Path, runtime_spec: Path, network_plugins: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = "{node.folder}/containerd"
state = "{node.run_folder}/containerd"
disabled_plugins = {json.dumps([f"io.containerd.snapshotter.v1.{name}" for name in _UNUSED_SNAPSHOTTERS])}

[grpc]
  address = "{node.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{node.folder}/opt"

[{cri}]
  sandbox_image = "{images.PAUSE_IMAGE}"
  netns_mounts_under_state_dir = true
  # runc may not lower oom_score_adj where CAP_SYS_RESOURCE is missing.
  restrict_oom_score_adj = true

[{cri}.cni]
  bin_dir = "{cni_folder}"
  conf_dir = "{network_plugins}"

[{cri}.containerd]
  default_runtime_name = "runc"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{runtime_spec}"

[{cri}.containerd.runtimes.runc.options]
  Root = "{node.run_folder}/runc"
  ShimCgroup = "/{_get_shim_cgroup(node)}"
  SystemdCgroup = false
"""


def _get_shim_cgroup(node: ClusterNode) -> str:
    """Return the cgroup of shims. Containers outlive a restart of containerd, so it must not be containerd's own."""
    return f"{node.cgroup}/shims"


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def _import_images(node: ClusterNode, programs: Programs, archive: bytes) -> None:
    imported = node.folder / "imported-images"
    digest = hashlib.sha256(archive).hexdigest()
    if imported.exists() and imported.read_text() == digest:
        return
    file = node.folder / "images.tar"
    file.write_bytes(archive)
    ctr = (programs["ctr"], "--address", node.containerd_socket)
    run_command(*ctr, "--namespace", "k8s.io", "images", "import", file)
    file.unlink()
    imported.write_text(digest)

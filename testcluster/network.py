"""The nodes' network: a bridge on the machine, and per node a namespace with a cable (veth pair) to it.

Pods of node i have addresses in 10.244.i.0/24, behind the node's address. Nothing leaves the machine: nodes have no
default route. So a lookup of a name or an image registry fails at once instead of timing out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from testcluster.cables import Cable, CableEnd
from testcluster.settings import BRIDGE, CLUSTER_NAME, HOST_ADDRESS, SERVICE_SUBNET, STATE, ClusterNode
from testcluster.shell import ClusterError, is_successful, run_command, write_if_changed

# What six nodes need of the machine, and what kubelets set themselves. `down` restores the values.
_WANTED_SYSCTLS = {
    "net.ipv4.ip_forward": "1",
    "fs.inotify.max_user_instances": "8192",  # each kubelet takes a dozen of the default 128
    "fs.inotify.max_user_watches": "524288",
}
_SYSCTLS_OF_KUBELET = ("vm.overcommit_memory", "vm.panic_on_oom", "kernel.panic", "kernel.panic_on_oops")
_SAVED_SYSCTLS = STATE / "sysctls.json"


def ensure_bridge() -> None:
    """Create the machine's own end: bridge and forwarding."""
    _ensure_sysctls()
    _ensure_bridge_filter()
    if not _has_link(BRIDGE):
        run_command("ip", "link", "add", BRIDGE, "type", "bridge")
    run_command("ip", "address", "replace", f"{HOST_ADDRESS}/24", "dev", BRIDGE)
    run_command("ip", "link", "set", BRIDGE, "up")
    for rule in _build_forward_rules():  # the default policy may be DROP: Docker sets it
        if not is_successful("iptables", "-w", "-C", *rule):
            run_command("iptables", "-w", "-I", *rule)


def ensure_node(node: ClusterNode, nodes: Iterable[ClusterNode]) -> None:
    """Ensure namespace, cable, and routes of a node. A cable that was cut or slowed is restored."""
    namespace_file = Path("/run/netns", node.namespace)
    if not os.path.ismount(namespace_file):
        namespace_file.unlink(missing_ok=True)  # left by an `ip netns add` that was killed half-way
        run_command("ip", "netns", "add", node.namespace)
    if not (_has_link(node.link) and is_successful("ip", "-n", node.namespace, "link", "show", "eth0")):
        if _has_link(node.link):
            run_command("ip", "link", "delete", node.link)
        run_command("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    run_command("ip", "link", "set", node.link, "master", BRIDGE, "up")
    for end in (get_cable(node).near, get_cable(node).far):
        end.limit_rate("")
    commands = ["link set lo up", f"address replace {node.address}/24 dev eth0", "link set eth0 up"]
    commands += [f"route replace {SERVICE_SUBNET} via {HOST_ADDRESS}"]  # kube-proxy rewrites the destination on its way
    # Routes of a data network take precedence over these.
    commands += [f"route replace {peer.pod_subnet} via {peer.address} metric 100" for peer in nodes if peer != node]
    run_command("ip", "-n", node.namespace, "-batch", "-", stdin="\n".join(commands) + "\n")
    # Pods of one node communicate over its bridge, which bypasses the IP tables of services and policies unless it is
    # set to call them. With a data network, requests and answers may take different routes.
    filter_settings = ("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.eth0.rp_filter=0")
    settings = ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1", *filter_settings)
    run_command("nsenter", f"--net=/run/netns/{node.namespace}", "sysctl", "-qw", *settings)
    run_command("ip", "route", "replace", node.pod_subnet, "via", node.address)
    if node.index == 1:  # the machine itself reaches services through one node's kube-proxy
        run_command("ip", "route", "replace", SERVICE_SUBNET, "via", node.address)


def get_cable(node: ClusterNode) -> Cable:
    """Return the cable from the node to the bridge."""
    return Cable(CableEnd(node.namespace, "eth0"), CableEnd("", node.link))


def remove_nodes(nodes: Iterable[ClusterNode]) -> None:
    for node in nodes:
        if _has_link(node.link):
            run_command("ip", "link", "delete", node.link)
        if Path("/run/netns", node.namespace).exists():
            run_command("ip", "netns", "delete", node.namespace)
    if _has_link(BRIDGE):
        run_command("ip", "link", "delete", BRIDGE)
    for rule in _build_forward_rules():
        if is_successful("iptables", "-w", "-C", *rule):
            run_command("iptables", "-w", "-D", *rule)
    _restore_sysctls()


def _build_forward_rules() -> list[list[str]]:
    return [["FORWARD", direction, BRIDGE, "-j", "ACCEPT"] for direction in ("-i", "-o")]


def _has_link(name: str) -> bool:
    """Return whether this process's network namespace has the link: /sys shows the one in which it was mounted."""
    return name in {link for _, link in socket.if_nameindex()}


def _get_sysctl_file(name: str) -> Path:
    return Path("/proc/sys", *name.split("."))


def _ensure_sysctls() -> None:
    if not _SAVED_SYSCTLS.exists():
        names = [*_WANTED_SYSCTLS, *_SYSCTLS_OF_KUBELET]
        write_if_changed(
            _SAVED_SYSCTLS, json.dumps({name: _get_sysctl_file(name).read_text().strip() for name in names})
        )
    for name, minimum in _WANTED_SYSCTLS.items():
        if int(_get_sysctl_file(name).read_text()) < int(minimum):
            _get_sysctl_file(name).write_text(minimum)


def _ensure_bridge_filter() -> None:
    """Ensure the kernel's bridge filter, which is built in, or a module that may not be loaded yet."""
    if Path("/proc/sys/net/bridge").exists():
        return
    if not shutil.which("modprobe") or not is_successful("modprobe", "br_netfilter"):
        raise ClusterError("the kernel's module br_netfilter is not loaded: `modprobe br_netfilter`, as root, loads it")


def _restore_sysctls() -> None:
    if _SAVED_SYSCTLS.exists() and not CLUSTER_NAME:  # other clusters may still need machine-wide settings
        for name, value in json.loads(_SAVED_SYSCTLS.read_text()).items():
            _get_sysctl_file(name).write_text(value)

"""A leaf–spine network of the test's own, with hosts or pods below its leaves (testcluster/leaf_spine.py)."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from testcluster import leaf_spine as switched
from testcluster.leaf_spine import Machine
from testcluster.shell import run_command


@dataclass(frozen=True)
class FabricHost:
    """A machine below a leaf, or a pod on one; `namespace`: its name; `node`: that of the machine that a pod is on."""

    namespace: str
    leaf: int
    address: str
    node: str = ""

    @property
    def number(self) -> int:
        """Last part of its address, and of its node's."""
        return int(self.address.rpartition(".")[2])

    def start(
        self, *command: str, user: int | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process on it. user: its id; None: root."""
        return subprocess.Popen(
            [*_build_command_prefix(self.namespace, user), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def run(self, *command: str, user: int | None = None, environment: dict[str, str] | None = None) -> str:
        """The same to its end; what it prints. Raises AssertionError with its last output if it fails."""
        process = self.start(*command, user=user, environment=environment)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"{command[0]} ends with {process.returncode}: {errors[-4000:]}"
        return output


@dataclass(frozen=True)
class HostedLeafSpine(switched.LeafSpine):
    """`hosts`: those of leaf 0 first. Those of leaf l are in 10.99.l.0/24; where they are pods, their nodes are in
    10.96.l.0/24."""

    hosts: tuple[FabricHost, ...] = ()

    @property
    def hops(self) -> dict[str, str]:
        """The spines' addresses, as a plan has them: by address, the spine's name, from s0 on."""
        return {address: f"s{spine}" for address, spine in self.spine_addresses.items()}

    def set_on_switches(self, setting: str, value: int) -> None:
        for switch in self.switches:
            run_command("ip", "netns", "exec", switch, "sysctl", "-qw", f"{setting}={value}")

    def filter_icmp(self) -> None:
        """No switch reports where packets end."""
        for switch in self.switches:
            run_command("ip", "netns", "exec", switch, "nft", _DROP_ICMP_RULES)

    def translate_addresses(self, leaf: int) -> None:
        """What the hosts of this leaf send to others comes from the leaf's own address there."""
        run_command("ip", "netns", "exec", self.get_leaf_namespace(leaf), "nft", _TRANSLATION_RULES.format(leaf=leaf))


_DROP_ICMP_RULES = (
    "add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o ip protocol icmp drop"
)
_DROP_INVALID_RULES = (
    "add table ip t; add chain ip t f { type filter hook forward priority 0; }; add rule ip t f ct state invalid drop"
)
"""As kube-proxy's nodes."""
_TRANSLATION_RULES = (
    "add table ip t; add chain ip t p {{ type nat hook postrouting priority 100; }}; "
    'add rule ip t p oifname "up*" ip saddr 10.99.{leaf}.0/24 snat to 10.97.{leaf}.1'
)


_numbers = itertools.count()


@contextmanager
def create_leaf_spine(
    leaves: int = 3, spines: int = 3, hosts: int = 1, *, pods: bool = False, planes: int = 1
) -> Iterator[HostedLeafSpine]:
    """`hosts` hosts below each leaf, each with a port in each plane. All links are as fast as memory.

    pods: hosts are pods, each on a node that routes, follows connections, and drops what belongs to none.
    """
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    prefix = f"pkf-{os.getpid()}-{next(_numbers)}"
    fabric_hosts = tuple(
        FabricHost(
            f"{prefix}-h{leaf}-{number}",
            leaf,
            f"10.99.{leaf}.{10 + number}",
            f"{prefix}-n{leaf}-{number}" if pods else "",
        )
        for leaf in range(leaves)
        for number in range(hosts)
    )
    fabric = HostedLeafSpine(prefix, leaves, spines, tuple(map(_build_machine, fabric_hosts)), planes, fabric_hosts)
    names = [name for host in fabric_hosts for name in (host.namespace, host.node) if name]
    try:
        for name in names:
            run_command("ip", "netns", "add", name)
        fabric.ensure()
        for host in fabric_hosts:
            if host.node:
                _run_ip_commands(host.node, _configure_node(host))
                run_command("ip", "netns", "exec", host.node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
                run_command("ip", "netns", "exec", host.node, "nft", _DROP_INVALID_RULES)
            _run_ip_commands(host.namespace, _configure_pod(host) if host.node else ["link set lo up"])
        yield fabric
    finally:
        for name in (*names, *fabric.switches):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _build_machine(host: FabricHost) -> Machine:
    address = f"10.96.{host.leaf}.{host.number}" if host.node else host.address
    return Machine(host.node or host.namespace, host.leaf, host.number, address, f"{host.address}/32")


def _configure_node(host: FabricHost) -> Iterator[str]:
    yield "link set lo up"
    yield f"link add pod type veth peer name eth0 netns {host.namespace}"
    yield "address add 169.254.1.1/32 dev pod"
    yield "link set pod up"
    yield f"route add {host.address}/32 dev pod"


def _configure_pod(host: FabricHost) -> Iterator[str]:
    yield "link set lo up"
    yield f"address add {host.address}/32 dev eth0"
    yield "link set eth0 up"
    yield "route add default via 169.254.1.1 dev eth0 onlink"


def _build_command_prefix(namespace: str, user: int | None = None) -> Sequence[str]:
    """What goes before a command to run it there."""
    as_user = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return ["ip", "netns", "exec", namespace, *as_user]


def _run_ip_commands(namespace: str, lines: Iterable[str]) -> None:
    """`lines`: commands of iproute2's `ip`."""
    run_command("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines))

"""A leaf–spine network of the test's own: namespaces that route, and choose among equal spines by the five-tuple.

Linux routes as switches do that hash addresses, protocol and ports (fib_multipath_hash_policy 3; policy 1 reuses the
socket's own random hash, which no switch sees), each leaf with a seed of its own. Needs root and iproute2; what runs on
the hosts needs neither.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from testcluster.shell import run

SWITCH_SETTINGS = {
    "net.ipv4.ip_forward": 1,
    "net.ipv4.fib_multipath_hash_policy": 3,
    "net.ipv4.fib_multipath_hash_fields": 0x37,  # both addresses, protocol, flow label, both ports
    "net.ipv4.icmp_ratelimit": 0,
    "net.ipv4.conf.all.rp_filter": 0,
}


@dataclass(frozen=True)
class FabricHost:
    """A machine below a leaf, or a pod on one; `namespace`: its name; `node`: that of the machine that a pod is on."""

    namespace: str
    leaf: int
    address: str
    node: str = ""

    @property
    def number(self) -> str:
        """Last part of its address, and of its node's."""
        return self.address.rpartition(".")[2]

    def start(
        self, *command: str, user: int | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process on it. user: its id; None: root."""
        return subprocess.Popen(
            [*_inside(self.namespace, user), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def run(self, *command: str, user: int | None = None, environment: dict[str, str] | None = None) -> str:
        """The same to its end; what it prints. Raises AssertionError with its last words where it fails."""
        process = self.start(*command, user=user, environment=environment)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, f"{command[0]} ends with {process.returncode}: {errors[-4000:]}"
        return output


@dataclass(frozen=True)
class LeafSpine:
    """`hosts`: those of leaf 0 first. Leaf l has 10.99.l.0/24; its cable to spine s is 10.98.l.2s – 10.98.l.2s+1.
    Where hosts are pods, their nodes are in 10.96.l.0/24."""

    prefix: str
    leaves: int
    spines: int
    hosts: tuple[FabricHost, ...]

    @property
    def hops(self) -> dict[str, str]:
        """The spines' addresses, as `Fabric.spec.hops` has them: by address, the spine's name."""
        return {
            f"10.98.{leaf}.{2 * spine + 1}": f"s{spine}" for leaf in range(self.leaves) for spine in range(self.spines)
        }

    def leaf(self, number: int) -> str:
        return f"{self.prefix}-l{number}"

    def spine(self, number: int) -> str:
        return f"{self.prefix}-s{number}"

    def sent(self, leaf: int) -> list[int]:
        """Bytes that a leaf has sent up to each spine so far."""
        links = json.loads(run("ip", "-n", self.leaf(leaf), "-s", "-j", "link", "show"))
        bytes_of = {link["ifname"]: int(link["stats64"]["tx"]["bytes"]) for link in links}
        return [bytes_of[f"up{spine}"] for spine in range(self.spines)]

    def shape(self, rate: str) -> None:
        """All links between leaves and spines, both ways. `rate`: in tc's words."""
        shaper = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        for leaf in range(self.leaves):
            for spine in range(self.spines):
                run("tc", "-n", self.leaf(leaf), "qdisc", "replace", "dev", f"up{spine}", *shaper)
                run("tc", "-n", self.spine(spine), "qdisc", "replace", "dev", f"down{leaf}", *shaper)

    def set_on_switches(self, setting: str, value: int) -> None:
        for switch in (*map(self.leaf, range(self.leaves)), *map(self.spine, range(self.spines))):
            run("ip", "netns", "exec", switch, "sysctl", "-qw", f"{setting}={value}")

    def swallow(self, spine: int, leaf: int) -> None:
        """What the spine passes on to this leaf is lost, and nobody is told."""
        run("ip", "netns", "exec", self.spine(spine), "nft", _LOSS.format(leaf=leaf))

    def filter_icmp(self) -> None:
        """No switch says where packets end."""
        for switch in (*map(self.leaf, range(self.leaves)), *map(self.spine, range(self.spines))):
            run("ip", "netns", "exec", switch, "nft", _SILENCE)

    def translate(self, leaf: int) -> None:
        """What the hosts of this leaf send to others comes from the leaf's own address there."""
        run("ip", "netns", "exec", self.leaf(leaf), "nft", _TRANSLATION.format(leaf=leaf))


_SILENCE = (
    "add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o ip protocol icmp drop"
)
_LOSS = (
    "add table ip t; add chain ip t f {{ type filter hook forward priority 0; }}; "
    'add rule ip t f oifname "down{leaf}" drop'
)
_STRICT = (
    "add table ip t; add chain ip t f { type filter hook forward priority 0; }; add rule ip t f ct state invalid drop"
)
"""As kube-proxy's nodes."""
_TRANSLATION = (
    "add table ip t; add chain ip t p {{ type nat hook postrouting priority 100; }}; "
    'add rule ip t p oifname "up*" ip saddr 10.99.{leaf}.0/24 snat to 10.97.{leaf}.1'
)


@contextmanager
def leaf_spine(leaves: int = 3, spines: int = 3, hosts: int = 1, *, pods: bool = False) -> Iterator[LeafSpine]:
    """So many hosts below each leaf. All links are as fast as memory.

    pods: hosts are pods, each on a node that routes, follows connections, and drops what belongs to none.
    """
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    prefix = f"pkf-{os.getpid()}"
    made = LeafSpine(
        prefix, leaves, spines,
        tuple(
            FabricHost(
                f"{prefix}-h{leaf}-{number}",
                leaf,
                f"10.99.{leaf}.{10 + number}",
                f"{prefix}-n{leaf}-{number}" if pods else "",
            )
            for leaf in range(leaves) for number in range(hosts)
        ),
    )  # fmt: skip
    switches = [*map(made.leaf, range(leaves)), *map(made.spine, range(spines))]
    nodes = [host.node for host in made.hosts if host.node]
    names = [*switches, *(host.namespace for host in made.hosts), *nodes]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        for leaf in range(leaves):
            _set_up(made.leaf(leaf), _cables(made, leaf))
        for number, switch in enumerate(switches):
            settings = {**SWITCH_SETTINGS, "net.ipv4.fib_multipath_hash_seed": 7001 + number}
            run(
                "ip", "netns", "exec", switch, "sysctl", "-qw", *(f"{name}={value}" for name, value in settings.items())
            )
        for leaf in range(leaves):
            _set_up(made.leaf(leaf), _leaf(made, leaf))
        for spine in range(spines):
            _set_up(made.spine(spine), _spine(made, spine))
        for host in made.hosts:
            if host.node:
                _set_up(host.node, _node(host))
                run("ip", "netns", "exec", host.node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
                run("ip", "netns", "exec", host.node, "nft", _STRICT)
            _set_up(host.namespace, _pod(host) if host.node else _host(host))
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _cables(made: LeafSpine, leaf: int) -> Iterator[str]:
    for spine in range(made.spines):
        yield f"link add up{spine} type veth peer name down{leaf} netns {made.spine(spine)}"
    for host in made.hosts:
        if host.leaf == leaf:
            yield f"link add {_port(host)} type veth peer name eth0 netns {host.node or host.namespace}"


def _leaf(made: LeafSpine, leaf: int) -> Iterator[str]:
    yield "link set lo up"
    yield f"address add 10.97.{leaf}.1/32 dev lo"
    yield "link add hosts type bridge"
    yield f"address add 10.99.{leaf}.1/24 dev hosts"
    yield f"address add 10.96.{leaf}.1/24 dev hosts"
    yield "link set hosts up"
    for host in made.hosts:
        if host.leaf == leaf:
            yield f"link set {_port(host)} master hosts up"
            if host.node:
                yield f"route add {host.address}/32 via 10.96.{leaf}.{host.number}"
    for spine in range(made.spines):
        yield f"address add 10.98.{leaf}.{2 * spine}/31 dev up{spine}"
        yield f"link set up{spine} up"
    ways = " ".join(f"nexthop via 10.98.{leaf}.{2 * spine + 1}" for spine in range(made.spines))
    for other in range(made.leaves):
        if other != leaf:
            yield f"route add 10.99.{other}.0/24 {ways}"
            yield f"route add 10.97.{other}.1/32 {ways}"


def _spine(made: LeafSpine, spine: int) -> Iterator[str]:
    yield "link set lo up"
    for leaf in range(made.leaves):
        yield f"address add 10.98.{leaf}.{2 * spine + 1}/31 dev down{leaf}"
        yield f"link set down{leaf} up"
        yield f"route add 10.99.{leaf}.0/24 via 10.98.{leaf}.{2 * spine}"
        yield f"route add 10.97.{leaf}.1/32 via 10.98.{leaf}.{2 * spine}"


def _host(host: FabricHost) -> Iterator[str]:
    yield "link set lo up"
    yield f"address add {host.address}/24 dev eth0"
    yield "link set eth0 up"
    yield f"route add default via 10.99.{host.leaf}.1"


def _node(host: FabricHost) -> Iterator[str]:
    yield "link set lo up"
    yield f"address add 10.96.{host.leaf}.{host.number}/24 dev eth0"
    yield "link set eth0 up"
    yield f"route add default via 10.96.{host.leaf}.1"
    yield f"link add pod type veth peer name eth0 netns {host.namespace}"
    yield "address add 169.254.1.1/32 dev pod"
    yield "link set pod up"
    yield f"route add {host.address}/32 dev pod"


def _pod(host: FabricHost) -> Iterator[str]:
    yield "link set lo up"
    yield f"address add {host.address}/32 dev eth0"
    yield "link set eth0 up"
    yield "route add default via 169.254.1.1 dev eth0 onlink"


def _port(host: FabricHost) -> str:
    """Of the leaf, to which the host's cable goes."""
    return f"to{host.number}"


def _inside(namespace: str, user: int | None = None) -> Sequence[str]:
    """What goes before a command to run it there."""
    as_user = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return ["ip", "netns", "exec", namespace, *as_user]


def _set_up(namespace: str, lines: Iterable[str]) -> None:
    """`lines`: commands of iproute2's `ip`."""
    run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines))

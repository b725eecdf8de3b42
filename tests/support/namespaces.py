"""A small network of the test's own: one namespace a host, a bridge between them, slow ways by the kernel's shapers.

Needs root and iproute2; the ranks and launchers in it need neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from testcluster.cables import End
from testcluster.shell import run

INTERFACE = "eth0"
NOBODY = "02:00:00:00:00:99"


@dataclass(frozen=True)
class Host:
    """`namespace`: its name; `port`: of the switch, to which its cable goes."""

    namespace: str
    address: str
    port: str

    def python(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """`python -m module` on this host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@dataclass(frozen=True)
class Network:
    switch: str
    hosts: tuple[Host, ...]

    def slow_egress(self, host: Host, rate: str) -> None:
        """All that it sends. `rate`: in tc's words."""
        run("tc", "-n", host.namespace, "qdisc", "replace", "dev", INTERFACE, "root", *_shaper(rate))

    def slow_ingress(self, host: Host, rate: str) -> None:
        """All that it receives."""
        run("tc", "-n", self.switch, "qdisc", "replace", "dev", host.port, "root", *_shaper(rate))

    def slow_pair(self, source: Host, destination: Host, rate: str, *, quick_acknowledgements: bool = False) -> None:
        """What one sends to the other; what acknowledges the other's waits in the same queue, or passes it by."""
        end = End(source.namespace, INTERFACE)
        end.limit_towards(f"{destination.address}/32", rate)
        if quick_acknowledgements:
            end.send_by("1:1", "u16", "0", "0xff80", "at", "2", priority=1)  # packets shorter than 128 bytes

    def lose(self, source: Host, destination: Host) -> None:
        """What the one sends to the other goes to an address that nobody has."""
        neighbour = ["neigh", "replace", destination.address, "lladdr", NOBODY, "dev", INTERFACE, "nud", "permanent"]
        run("ip", "-n", source.namespace, *neighbour)

    def mend(self, host: Host) -> None:
        """What it sends is as fast as before."""
        run("tc", "-n", host.namespace, "qdisc", "delete", "dev", INTERFACE, "root")


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """All ways are as fast as memory."""
    if os.geteuid() != 0:
        pytest.skip("namespaces and shapers need root")
    prefix = f"pk-{os.getpid()}"
    made = Network(
        f"{prefix}-switch", tuple(Host(f"{prefix}-{i}", f"10.217.0.{i + 1}", f"port{i}") for i in range(hosts))
    )
    try:
        run("ip", "netns", "add", made.switch)
        run("ip", "-n", made.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "bridge0", "up")
        for host in made.hosts:
            _plug_in(made, host)
        yield made
    finally:
        for name in (made.switch, *(host.namespace for host in made.hosts)):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _plug_in(made: Network, host: Host) -> None:
    run("ip", "netns", "add", host.namespace)
    cable = ["type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
    run("ip", "-n", made.switch, "link", "add", host.port, *cable)
    run("ip", "-n", made.switch, "link", "set", host.port, "master", "bridge0", "up")
    run("ip", "-n", host.namespace, "link", "set", "lo", "up")
    run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")


def _shaper(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]

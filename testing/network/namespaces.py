"""A small network of the test's own: one namespace a host, a bridge between them, slow routes by the kernel's shapers.

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

from testcluster.cables import CableEnd
from testcluster.shell import run_command

INTERFACE = "eth0"
UNUSED_HARDWARE_ADDRESS = "02:00:00:00:00:99"


@dataclass(frozen=True)
class NamespaceHost:
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
class NamespaceNetwork:
    switch: str
    hosts: tuple[NamespaceHost, ...]

    def slow_egress(self, host: NamespaceHost, rate: str) -> None:
        """All that it sends. `rate`: in tc's syntax."""
        run_command("tc", "-n", host.namespace, "qdisc", "replace", "dev", INTERFACE, "root", *_build_shaper(rate))

    def slow_ingress(self, host: NamespaceHost, rate: str) -> None:
        """All that it receives."""
        run_command("tc", "-n", self.switch, "qdisc", "replace", "dev", host.port, "root", *_build_shaper(rate))

    def slow_pair(
        self, source: NamespaceHost, destination: NamespaceHost, rate: str, *, quick_acknowledgements: bool = False
    ) -> None:
        """What one sends to the other; what acknowledges the other's waits in the same queue, or passes it by."""
        end = CableEnd(source.namespace, INTERFACE)
        end.limit_rate_to_subnet(f"{destination.address}/32", rate)
        if quick_acknowledgements:
            end.assign_lane("1:1", "u16", "0", "0xff80", "at", "2", priority=1)  # packets shorter than 128 bytes

    def drop_packets(self, source: NamespaceHost, destination: NamespaceHost) -> None:
        """What the one sends to the other goes to an unused address."""
        arguments = [
            "neigh",
            "replace",
            destination.address,
            "lladdr",
            UNUSED_HARDWARE_ADDRESS,
            "dev",
            INTERFACE,
            "nud",
            "permanent",
        ]
        run_command("ip", "-n", source.namespace, *arguments)

    def restore_speed(self, host: NamespaceHost) -> None:
        """What it sends is as fast as before."""
        run_command("tc", "-n", host.namespace, "qdisc", "delete", "dev", INTERFACE, "root")


@contextmanager
def create_network(hosts: int) -> Iterator[NamespaceNetwork]:
    """All routes are as fast as memory."""
    if os.geteuid() != 0:
        pytest.skip("namespaces and shapers need root")
    prefix = f"pk-{os.getpid()}"
    network = NamespaceNetwork(
        f"{prefix}-switch", tuple(NamespaceHost(f"{prefix}-{i}", f"10.217.0.{i + 1}", f"port{i}") for i in range(hosts))
    )
    try:
        run_command("ip", "netns", "add", network.switch)
        run_command("ip", "-n", network.switch, "link", "add", "bridge0", "type", "bridge")
        run_command("ip", "-n", network.switch, "link", "set", "bridge0", "up")
        for host in network.hosts:
            _add_host(network, host)
        yield network
    finally:
        for name in (network.switch, *(host.namespace for host in network.hosts)):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _add_host(network: NamespaceNetwork, host: NamespaceHost) -> None:
    run_command("ip", "netns", "add", host.namespace)
    cable = ["type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
    run_command("ip", "-n", network.switch, "link", "add", host.port, *cable)
    run_command("ip", "-n", network.switch, "link", "set", host.port, "master", "bridge0", "up")
    run_command("ip", "-n", host.namespace, "link", "set", "lo", "up")
    run_command("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    run_command("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")


def _build_shaper(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]

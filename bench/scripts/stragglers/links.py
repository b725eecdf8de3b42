"""A network of the ranks' own in which one link is slow: namespaces, and a bridge between them in one more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from testcluster.shell import is_successful, run_command

from .draws import SLOW_RANK

PREFIX = "pacekeeper-bench"
SWITCH = f"{PREFIX}-switch"
INTERFACE = "eth0"


@dataclass(frozen=True)
class Network:
    """One namespace and one address for each rank."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str = INTERFACE


@contextmanager
def create_network(ranks: int, rate: str) -> Iterator[Network | None]:
    """All links are as fast as memory but that of SLOW_RANK, `rate` (in tc's syntax) in both directions.

    None: this machine does not allow it; root and iproute2 are needed.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        yield None
        return
    network = Network(
        tuple(f"{PREFIX}-{rank}" for rank in range(ranks)), tuple(f"10.213.0.{rank + 1}" for rank in range(ranks))
    )
    try:
        _remove_network(network)
        _add_network(network, rate)
        yield network
    finally:
        _remove_network(network)


def _add_network(network: Network, rate: str) -> None:
    run_command("ip", "netns", "add", SWITCH)
    run_command("ip", "-n", SWITCH, "link", "add", "bridge0", "type", "bridge")
    run_command("ip", "-n", SWITCH, "link", "set", "bridge0", "up")
    for rank, (namespace, address) in enumerate(zip(network.namespaces, network.addresses, strict=True)):
        port = f"port{rank}"
        run_command("ip", "netns", "add", namespace)
        run_command(
            "ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace
        )
        run_command("ip", "-n", SWITCH, "link", "set", port, "master", "bridge0", "up")
        run_command("ip", "-n", namespace, "link", "set", "lo", "up")
        run_command("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
        run_command("ip", "-n", namespace, "link", "set", INTERFACE, "up")
        if rank == SLOW_RANK:
            for location, device in ((namespace, INTERFACE), (SWITCH, port)):
                tbf_options = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
                run_command("tc", "-n", location, "qdisc", "replace", "dev", device, *tbf_options)


def _remove_network(network: Network) -> None:
    """Deleting a namespace takes the links with it."""
    for namespace in (*network.namespaces, SWITCH):
        if is_successful("ip", "netns", "pids", namespace):
            run_command("ip", "netns", "delete", namespace)

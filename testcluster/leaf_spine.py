"""A leaf–spine network of routing namespaces, which choose among equal spines by the five-tuple.

Linux routes as switches do that hash addresses, protocol, and ports (fib_multipath_hash_policy 3). Policy 1 would reuse
the socket's own random hash, which no switch sees. Each switch has its own seed. Routes are those that a routing
protocol would compute from the links' state. Only the kernel keeps that state. If a link's leaf end is down, its leaf
has detected the failure. If its spine end is down as well, the failure has been announced to all others. It needs root,
iproute2, and Linux 6.11. Programs on the machines need none of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.cables import Cable, CableEnd
from testcluster.shell import is_successful, run_command

Link = tuple[int, int]
"""Numbers of a leaf and a spine."""
LOOPBACKS, CABLES = "10.97.0.0/16", "10.98.0.0/16"
"""Networks of the switches' addresses."""
_HASH_SETTINGS = {
    "net.ipv4.fib_multipath_hash_policy": 3,
    "net.ipv4.fib_multipath_hash_fields": 0x37,  # both addresses, protocol, flow label, both ports
}
_CONGESTION_SETTINGS = {"net.ipv4.tcp_congestion_control": "reno"}
"""Supported in every namespace. With BBR, a common default, flows that start and stop share links unevenly."""
_SWITCH_SETTINGS = {
    **_HASH_SETTINGS,
    "net.ipv4.ip_forward": 1,
    "net.ipv4.icmp_ratelimit": 0,
    "net.ipv4.conf.all.rp_filter": 0,
    "net.ipv4.conf.default.rp_filter": 0,
}
_HASH_SEED_SETTING, _FIRST_HASH_SEED = "net.ipv4.fib_multipath_hash_seed", 7001
_MAX_QUEUE_LATENCY = "100ms"
_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Machine:
    """A machine below a leaf, with a port (fab0, fab1) to its switch in each plane. Others create its namespace."""

    namespace: str
    leaf: int
    number: int  # unique below its leaf
    address: str  # of its ports
    prefix: str  # destinations that are routed to it: that address, or its pods


@dataclass(frozen=True)
class BrokenLinks:
    """Broken links and ports."""

    links: frozenset[Link] = frozenset()  # detected by their leaves
    announced: frozenset[Link] = frozenset()  # announced to all others, too
    ports: frozenset[tuple[str, int]] = frozenset()  # a machine's namespace, and the plane


@dataclass(frozen=True)
class LeafSpine:
    """A leaf–spine network. Leaves, spines, and machines are counted from 0.

    In each plane, each leaf has a switch, and a link to each spine. Spines are counted through all planes. Leaf l is
    10.97.l.1 in the first plane; its cable to spine s is 10.98.l.2s – 10.98.l.2s+1.
    """

    prefix: str
    leaves: int
    spines: int  # per plane
    machines: tuple[Machine, ...] = ()
    planes: int = 1

    # Structure

    @property
    def spine_addresses(self) -> dict[str, int]:
        """The addresses with which spines answer, as traceroute shows them."""
        return {self._spine_address(leaf, spine): spine for leaf, spine in self.links}

    @property
    def links(self) -> list[Link]:
        return [(leaf, spine) for leaf in range(self.leaves) for spine in range(self.planes * self.spines)]

    @property
    def switches(self) -> list[str]:
        """The names of the switches' namespaces."""
        leaves = [self.get_leaf_namespace(leaf, plane) for plane in range(self.planes) for leaf in range(self.leaves)]
        return [*leaves, *map(self.get_spine_namespace, range(self.planes * self.spines))]

    def get_leaf_namespace(self, number: int, plane: int = 0) -> str:
        """Return the name of a leaf's namespace."""
        return f"{self.prefix}-l{plane * self.leaves + number}"

    def get_spine_namespace(self, number: int) -> str:
        return f"{self.prefix}-s{number}"

    def list_cables(self, machine: Machine) -> list[Cable]:
        """Return a machine's cables, one per plane."""
        planes = range(self.planes)
        leaf = machine.leaf
        return [
            Cable(
                CableEnd(machine.namespace, _get_port_device(plane)),
                CableEnd(self.get_leaf_namespace(leaf, plane), _get_machine_device(machine)),
            )
            for plane in planes
        ]

    # Operations

    def ensure(self, rate: str = "") -> None:
        """Ensure that the network is complete and healthy. `rate`: of its links, in tc's format; "": no limit."""
        if not self._is_complete():
            self.remove()
            self._create_all()
        for number, switch in enumerate(self.switches):
            _set_sysctls(switch, {**_SWITCH_SETTINGS, _HASH_SEED_SETTING: _FIRST_HASH_SEED + number})
        for number, machine in enumerate(self.machines):
            filter_settings = {f"net.ipv4.conf.{name}.rp_filter": 0 for name in ("all", *self._ports)}
            seed = _FIRST_HASH_SEED + len(self.switches) + number
            _set_sysctls(
                machine.namespace,
                {**_HASH_SETTINGS, **_CONGESTION_SETTINGS, **filter_settings, _HASH_SEED_SETTING: seed},
            )
        for namespace, lines in self.list_interfaces().items():
            _run_ip_commands(namespace, lines)
        self.set_all_rates(rate)
        self.update_routes()

    def remove(self) -> None:
        for machine in self.machines:
            if (_NAMESPACES / machine.namespace).exists():
                for port in self._ports:
                    # Synchronously: the kernel deletes ports of a switch's namespace only after that namespace.
                    if is_successful("ip", "-n", machine.namespace, "link", "show", port):
                        run_command("ip", "-n", machine.namespace, "link", "delete", port)
                is_successful(
                    "ip", "-n", machine.namespace, "route", "flush", "type", "unreachable"
                )  # fails harmlessly in a new namespace, which has no table
        for switch in self.switches:
            if (_NAMESPACES / switch).exists():
                run_command("ip", "netns", "delete", switch)

    def update_routes(self) -> None:
        """Update all routes to the present state of the links."""
        for namespace, lines in self.compute_routes(self.find_broken()).items():
            _run_ip_commands(namespace, lines)

    def cut_link(self, leaf: int, spine: int, *, propagate: bool = True) -> None:
        """Cut a link, visible to its leaf.

        `propagate`: to all others, too. Otherwise, what they send to that leaf over that spine is lost.
        """
        leaf_end, spine_end = self._get_link_ends(leaf, spine)
        leaf_end.set_plugged(False)
        spine_end.set_plugged(not propagate)
        self.update_routes()

    def slow_link(self, leaf: int, spine: int, rate: str) -> None:
        """Limit a link in both directions. `rate`: in tc's format."""
        for end in self._get_link_ends(leaf, spine):
            end.limit_rate(rate, _MAX_QUEUE_LATENCY)

    def heal_link(self, leaf: int, spine: int, rate: str = "") -> None:
        """Restore a link at this rate, and announce it."""
        for end in self._get_link_ends(leaf, spine):
            end.set_plugged(True)
            end.limit_rate(rate, _MAX_QUEUE_LATENCY)
        self.update_routes()

    def set_all_rates(self, rate: str) -> None:
        """Set the rate of all links between leaves and spines, in both directions; "": no limit."""
        for leaf, spine in self.links:
            self.slow_link(leaf, spine, rate)

    def reseed_hashes(self, seed: int) -> None:
        """Make leaves choose differently among equal spines, each in its own way, also for existing connections."""
        for number in range(self.planes * self.leaves):
            _set_sysctls(
                self.switches[number], {_HASH_SEED_SETTING: _FIRST_HASH_SEED + len(self.switches) * (1 + seed) + number}
            )

    def read_sent_bytes(self, leaf: int) -> list[int]:
        """Return the bytes that a leaf has sent to each spine so far."""
        return self._read_bytes(leaf, "tx")

    def read_received_bytes(self, leaf: int) -> list[int]:
        """Return the bytes that a leaf has received from each spine so far."""
        return self._read_bytes(leaf, "rx")

    def _read_bytes(self, leaf: int, direction: str) -> list[int]:
        devices = [_read_devices(self.get_leaf_namespace(leaf, plane)) for plane in range(self.planes)]
        return [
            int(devices[plane][_get_uplink_device(spine)]["stats64"][direction]["bytes"])
            for plane in range(self.planes)
            for spine in self._get_plane_spines(plane)
        ]

    def find_broken(self) -> BrokenLinks:
        """Return what is broken at present."""
        up_devices = {
            switch: {name for name, device in _read_devices(switch).items() if "UP" in device["flags"]}
            for switch in self.switches
        }

        def is_down(end: CableEnd) -> bool:
            return end.device not in up_devices[end.namespace]

        ends = {link: self._get_link_ends(*link) for link in self.links}
        return BrokenLinks(
            frozenset(link for link, (leaf_end, _) in ends.items() if is_down(leaf_end)),
            frozenset(link for link, (_, spine_end) in ends.items() if is_down(spine_end)),
            frozenset(
                (machine.namespace, plane)
                for machine in self.machines
                for plane, cable in enumerate(self.list_cables(machine))
                if is_down(cable.far)
            ),
        )

    def list_rates(self) -> dict[Link, float]:
        """Return the present rate limits of links, in bits per second. Links without a limit are omitted."""
        rates: dict[Link, float] = {}
        for leaf in range(self.leaves):
            for plane in range(self.planes):
                shapers = json.loads(
                    run_command("tc", "-n", self.get_leaf_namespace(leaf, plane), "-j", "qdisc", "show")
                )
                limits = {
                    shaper["dev"]: 8.0 * shaper["options"]["rate"] for shaper in shapers if shaper["kind"] == "tbf"
                }
                rates |= {
                    (leaf, spine): limits[_get_uplink_device(spine)]
                    for spine in self._get_plane_spines(plane)
                    if _get_uplink_device(spine) in limits
                }
        return rates

    # Routing: pure

    def compute_routes(self, broken: BrokenLinks) -> dict[str, list[str]]:
        """Return lines of `ip` by namespace: the routes that a routing protocol would compute."""
        routes = {machine.namespace: list(self._iterate_machine_routes(machine, broken)) for machine in self.machines}
        for plane in range(self.planes):
            for leaf in range(self.leaves):
                routes[self.get_leaf_namespace(leaf, plane)] = list(self._iterate_leaf_routes(leaf, plane, broken))
            for spine in self._get_plane_spines(plane):
                routes[self.get_spine_namespace(spine)] = list(self._iterate_spine_routes(spine, plane, broken))
        return routes

    def _iterate_machine_routes(self, machine: Machine, broken: BrokenLinks) -> Iterator[str]:
        def list_next_hops(planes: Iterable[int]) -> list[str]:
            return [
                f"via {self._leaf_address(machine.leaf, plane)} dev {_get_port_device(plane)} onlink"
                for plane in planes
            ]

        plugged_planes = [plane for plane in range(self.planes) if (machine.namespace, plane) not in broken.ports]
        for prefix in (LOOPBACKS, CABLES):
            yield _build_route(prefix, list_next_hops(plugged_planes))
        for destination in self.machines:
            if destination != machine:
                yield _build_route(
                    destination.prefix,
                    list_next_hops(p for p in plugged_planes if self._can_reach(machine.leaf, destination, p, broken)),
                )

    def _iterate_leaf_routes(self, leaf: int, plane: int, broken: BrokenLinks) -> Iterator[str]:
        def up(spines: Iterable[int]) -> list[str]:
            return [f"via {self._spine_address(leaf, spine)} dev {_get_uplink_device(spine)}" for spine in spines]

        for machine in self.machines:
            if machine.leaf != leaf:
                is_reachable = self._can_reach(leaf, machine, plane, broken)
                next_spines = self._list_routes(leaf, machine.leaf, plane, broken) if is_reachable else []
                yield _build_route(machine.prefix, up(next_spines))
            elif (machine.namespace, plane) in broken.ports:
                yield _build_route(machine.prefix, [])
            else:
                yield _build_route(machine.prefix, [f"via {machine.address} dev {_get_machine_device(machine)} onlink"])
        for other_leaf in range(self.leaves):
            if other_leaf != leaf:
                yield _build_route(
                    f"{self._leaf_address(other_leaf, plane)}/32",
                    up(self._list_routes(leaf, other_leaf, plane, broken)),
                )

    def _iterate_spine_routes(self, spine: int, plane: int, broken: BrokenLinks) -> Iterator[str]:
        for leaf in range(self.leaves):
            is_up = (leaf, spine) not in broken.announced
            via, device = f"10.98.{leaf}.{2 * spine}", _get_downlink_device(leaf)
            if is_up:
                # A static entry: a spine without the announcement must lose packets, not report that it cannot deliver.
                yield (
                    f"neighbour replace {via} lladdr {_build_hardware_address(leaf, spine)} dev {device} nud permanent"
                )
            for prefix in (f"{self._leaf_address(leaf, plane)}/32", *self._list_prefixes(leaf)):
                yield _build_route(prefix, [f"via {via} dev {device}"] if is_up else [])

    def _can_reach(self, leaf: int, machine: Machine, plane: int, broken: BrokenLinks) -> bool:
        """Return whether a leaf has a route to a machine in this plane."""
        if (machine.namespace, plane) in broken.ports:
            return False
        return leaf == machine.leaf or bool(self._list_routes(leaf, machine.leaf, plane, broken))

    def _list_routes(self, leaf: int, target: int, plane: int, broken: BrokenLinks) -> list[int]:
        """Return the spines over which a leaf sends to another one."""
        spines = self._get_plane_spines(plane)
        return [
            spine for spine in spines if (leaf, spine) not in broken.links and (target, spine) not in broken.announced
        ]

    def _list_prefixes(self, leaf: int) -> list[str]:
        return [machine.prefix for machine in self.machines if machine.leaf == leaf]

    # Names and addresses: pure

    def list_interfaces(self) -> dict[str, list[str]]:
        """Return lines of `ip` by namespace: devices that are up, and their addresses."""
        commands: dict[str, list[str]] = {switch: ["link set lo up"] for switch in self.switches}
        for plane in range(self.planes):
            for leaf in range(self.leaves):
                loopback = [f"address replace {self._leaf_address(leaf, plane)}/32 dev lo"]
                commands[self.get_leaf_namespace(leaf, plane)] += loopback
        for leaf, spine in self.links:
            leaf_end, spine_end = self._get_link_ends(leaf, spine)
            commands[leaf_end.namespace] += _build_plug_commands(leaf_end, f"10.98.{leaf}.{2 * spine}/31")
            commands[spine_end.namespace] += _build_plug_commands(spine_end, f"{self._spine_address(leaf, spine)}/31")
        for machine in self.machines:
            commands[machine.namespace] = []
            for cable in self.list_cables(machine):
                commands[cable.near.namespace] += _build_plug_commands(cable.near, f"{machine.address}/32")
                commands[cable.far.namespace] += [f"link set {cable.far.device} up"]
        return commands

    @property
    def _ports(self) -> list[str]:
        return [_get_port_device(plane) for plane in range(self.planes)]

    def _get_plane_spines(self, plane: int) -> range:
        return range(plane * self.spines, (plane + 1) * self.spines)

    def _get_link_ends(self, leaf: int, spine: int) -> tuple[CableEnd, CableEnd]:
        """Return both ends of a link: the leaf's, the spine's."""
        return CableEnd(self.get_leaf_namespace(leaf, spine // self.spines), _get_uplink_device(spine)), CableEnd(
            self.get_spine_namespace(spine), _get_downlink_device(leaf)
        )

    def _leaf_address(self, leaf: int, plane: int) -> str:
        return f"10.97.{leaf}.{1 + plane}"

    def _spine_address(self, leaf: int, spine: int) -> str:
        """Return the address of a spine's port to a leaf."""
        return f"10.98.{leaf}.{2 * spine + 1}"

    # Creation

    def _is_complete(self) -> bool:
        """Return whether all namespaces and cables exist. A cable has both ends or none."""
        if not all((_NAMESPACES / switch).is_mount() for switch in self.switches):
            return False
        ends = [self._get_link_ends(*link)[0] for link in self.links]
        ends += [cable.far for machine in self.machines for cable in self.list_cables(machine)]
        devices = {namespace: _read_devices(namespace) for namespace in {end.namespace for end in ends}}
        return all(end.device in devices[end.namespace] for end in ends)

    def _create_all(self) -> None:
        for switch in self.switches:
            run_command("ip", "netns", "add", switch)
        commands: dict[str, list[str]] = {}
        for leaf, spine in self.links:
            leaf_end, spine_end = self._get_link_ends(leaf, spine)
            commands.setdefault(leaf_end.namespace, []).append(
                f"link add {leaf_end.device} address {_build_hardware_address(leaf, spine)} "
                f"type veth peer name {spine_end.device} netns {spine_end.namespace}"
            )
        for machine in self.machines:
            for cable in self.list_cables(machine):
                commands[cable.far.namespace].append(
                    f"link add {cable.far.device} type veth peer name {cable.near.device} netns {machine.namespace}"
                )
        for namespace, lines in commands.items():
            _run_ip_commands(namespace, lines)


def _get_uplink_device(spine: int) -> str:
    """Return a leaf's end of the cable to a spine."""
    return f"up{spine}"


def _get_downlink_device(leaf: int) -> str:
    """Return a spine's end of the cable to a leaf."""
    return f"down{leaf}"


def _get_machine_device(machine: Machine) -> str:
    """Return a leaf's end of the cable to a machine."""
    return f"to{machine.number}"


def _get_port_device(plane: int) -> str:
    """Return a machine's port."""
    return f"fab{plane}"


def _build_hardware_address(leaf: int, spine: int) -> str:
    """Return the hardware address of a leaf's port to a spine."""
    return f"02:98:00:00:{leaf:02x}:{spine:02x}"


def _build_plug_commands(end: CableEnd, address: str) -> list[str]:
    return [f"address replace {address} dev {end.device}", f"link set {end.device} up"]


def _build_route(prefix: str, next_hops: Sequence[str]) -> str:
    """Build a route with equal next hops. Without any, it is unreachable, so that no other route applies."""
    if not next_hops:
        return f"route replace unreachable {prefix}"
    return f"route replace {prefix} " + " ".join(f"nexthop {next_hop}" for next_hop in next_hops)


def _read_devices(namespace: str) -> dict[str, Any]:
    """Return the devices of a namespace by name."""
    return {
        device["ifname"]: device
        for device in json.loads(run_command("ip", "-n", namespace, "-s", "-j", "link", "show"))
    }


def _set_sysctls(namespace: str, settings: Mapping[str, int | str]) -> None:
    # nsenter, not `ip netns exec`, which mounts /sys again.
    values = [f"{name}={value}" for name, value in settings.items()]
    run_command("nsenter", f"--net={_NAMESPACES / namespace}", "sysctl", "-qw", *values)


def _run_ip_commands(namespace: str, lines: Iterable[str]) -> None:
    """Run commands of iproute2's `ip`."""
    run_command("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")

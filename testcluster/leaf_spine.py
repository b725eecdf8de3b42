"""A leaf–spine network of namespaces that route, and choose among equal spines by the five-tuple.

Linux routes as switches do that hash addresses, protocol and ports (fib_multipath_hash_policy 3; policy 1 reuses the
socket's own random hash, which no switch sees), each switch with a seed of its own. Routes are what a routing protocol
would make of the links' state, and that state is kept by the kernel alone: where a link's leaf end is down, its leaf
has seen it; where its spine end is down as well, all others have been told. Needs root, iproute2 and Linux 6.11; what
runs on the machines needs neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.cables import Cable, CableEnd
from testcluster.shell import run_command, is_successful

Link = tuple[int, int]
"""A leaf's number and a spine's."""
LOOPBACKS, CABLES = "10.97.0.0/16", "10.98.0.0/16"
"""Where the switches' addresses are."""
_HASH_SETTINGS = {
    "net.ipv4.fib_multipath_hash_policy": 3,
    "net.ipv4.fib_multipath_hash_fields": 0x37,  # both addresses, protocol, flow label, both ports
}
_CONGESTION_SETTINGS = {"net.ipv4.tcp_congestion_control": "reno"}
"""Which every namespace may have. With BBR, usual on some machines, flows that start and stop share links unevenly."""
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
    """Below a leaf, with a port (fab0, fab1) to its switch in each plane. Its namespace is others' to make."""

    namespace: str
    leaf: int
    number: int  # no other below its leaf has it
    address: str  # of its ports
    prefix: str  # what is sent to it: to that address, or to its pods


@dataclass(frozen=True)
class BrokenLinks:
    """What carries nothing."""

    links: frozenset[Link] = frozenset()  # their leaves know it
    announced: frozenset[Link] = frozenset()  # and so does everybody else
    ports: frozenset[tuple[str, int]] = frozenset()  # a machine's namespace, and the plane


@dataclass(frozen=True)
class LeafSpine:
    """Leaves, spines and machines are counted from 0. Each leaf has a switch, and a link to each spine, in each plane;
    spines are counted through all planes. Leaf l is 10.97.l.1 in the first plane; its cable to spine s is 10.98.l.2s –
    10.98.l.2s+1.
    """

    prefix: str
    leaves: int
    spines: int  # of each plane
    machines: tuple[Machine, ...] = ()
    planes: int = 1

    # What it is

    @property
    def spine_addresses(self) -> dict[str, int]:
        """The addresses that answer for spines, as traceroute shows them."""
        return {self._spine_address(leaf, spine): spine for leaf, spine in self.links}

    @property
    def links(self) -> list[Link]:
        return [(leaf, spine) for leaf in range(self.leaves) for spine in range(self.planes * self.spines)]

    @property
    def switches(self) -> list[str]:
        """Names of their namespaces."""
        leaves = [self.get_leaf_namespace(leaf, plane) for plane in range(self.planes) for leaf in range(self.leaves)]
        return [*leaves, *map(self.get_spine_namespace, range(self.planes * self.spines))]

    def get_leaf_namespace(self, number: int, plane: int = 0) -> str:
        """Name of its namespace."""
        return f"{self.prefix}-l{plane * self.leaves + number}"

    def get_spine_namespace(self, number: int) -> str:
        return f"{self.prefix}-s{number}"

    def list_cables(self, machine: Machine) -> list[Cable]:
        """One in each plane."""
        planes = range(self.planes)
        leaf = machine.leaf
        return [Cable(CableEnd(machine.namespace, _get_port_device(p)), CableEnd(self.get_leaf_namespace(leaf, p), _get_machine_device(machine))) for p in planes]

    # What can be done

    def ensure(self, rate: str = "") -> None:
        """All of it is there, and whole. `rate`: of its links, in tc's words; "": as fast as memory."""
        if not self._is_complete():
            self.remove()
            self._create_all()
        for number, switch in enumerate(self.switches):
            _set_sysctls(switch, {**_SWITCH_SETTINGS, _HASH_SEED_SETTING: _FIRST_HASH_SEED + number})
        for number, machine in enumerate(self.machines):
            unfiltered = {f"net.ipv4.conf.{name}.rp_filter": 0 for name in ("all", *self._ports)}
            seed = _FIRST_HASH_SEED + len(self.switches) + number
            _set_sysctls(machine.namespace, {**_HASH_SETTINGS, **_CONGESTION_SETTINGS, **unfiltered, _HASH_SEED_SETTING: seed})
        for namespace, lines in self.list_interfaces().items():
            _run_ip_commands(namespace, lines)
        self.set_all_rates(rate)
        self.update_routes()

    def remove(self) -> None:
        for machine in self.machines:
            if (_NAMESPACES / machine.namespace).exists():
                for port in self._ports:
                    # Here and now: those that go with a switch's namespace go a moment after it.
                    if is_successful("ip", "-n", machine.namespace, "link", "show", port):
                        run_command("ip", "-n", machine.namespace, "link", "delete", port)
                is_successful(
                    "ip", "-n", machine.namespace, "route", "flush", "type", "unreachable"
                )  # a new one has no table
        for switch in self.switches:
            if (_NAMESPACES / switch).exists():
                run_command("ip", "netns", "delete", switch)

    def update_routes(self) -> None:
        """Everybody knows what there is to know of the links."""
        for namespace, lines in self.compute_routes(self.find_broken()).items():
            _run_ip_commands(namespace, lines)

    def cut_link(self, leaf: int, spine: int, *, propagate: bool = True) -> None:
        """The link carries nothing, and its leaf sees it. told: so do all others; else what they send to that leaf by
        that spine is lost."""
        up, down = self._get_link_ends(leaf, spine)
        up.set_plugged(False)
        down.set_plugged(not propagate)
        self.update_routes()

    def slow_link(self, leaf: int, spine: int, rate: str) -> None:
        """The link, both ways. `rate`: in tc's words."""
        for end in self._get_link_ends(leaf, spine):
            end.limit_rate(rate, _MAX_QUEUE_LATENCY)

    def heal_link(self, leaf: int, spine: int, rate: str = "") -> None:
        """The link is there, at this rate, and everybody knows it."""
        for end in self._get_link_ends(leaf, spine):
            end.set_plugged(True)
            end.limit_rate(rate, _MAX_QUEUE_LATENCY)
        self.update_routes()

    def set_all_rates(self, rate: str) -> None:
        """All links between leaves and spines, both ways. `rate`: in tc's words; "": as fast as memory."""
        for leaf, spine in self.links:
            self.slow_link(leaf, spine, rate)

    def reseed_hashes(self, seed: int) -> None:
        """Leaves choose otherwise among equal spines, each in a way of its own, for connections that there are, too."""
        for number in range(self.planes * self.leaves):
            _set_sysctls(self.switches[number], {_HASH_SEED_SETTING: _FIRST_HASH_SEED + len(self.switches) * (1 + seed) + number})

    def read_sent_bytes(self, leaf: int) -> list[int]:
        """Bytes that a leaf has sent up to each spine so far."""
        return self._read_bytes(leaf, "tx")

    def read_received_bytes(self, leaf: int) -> list[int]:
        """The same of what it got from each."""
        return self._read_bytes(leaf, "rx")

    def _read_bytes(self, leaf: int, direction: str) -> list[int]:
        found = [_read_devices(self.get_leaf_namespace(leaf, plane)) for plane in range(self.planes)]
        return [
            int(found[plane][_get_uplink_device(spine)]["stats64"][direction]["bytes"])
            for plane in range(self.planes)
            for spine in self._get_plane_spines(plane)
        ]

    def find_broken(self) -> BrokenLinks:
        """As it is now."""
        up = {
            switch: {name for name, its in _read_devices(switch).items() if "UP" in its["flags"]} for switch in self.switches
        }

        def is_down(end: CableEnd) -> bool:
            return end.device not in up[end.namespace]

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
        """Bits a second that links are held to now; those that are as fast as memory are left out."""
        found: dict[Link, float] = {}
        for leaf in range(self.leaves):
            for plane in range(self.planes):
                shapers = json.loads(run_command("tc", "-n", self.get_leaf_namespace(leaf, plane), "-j", "qdisc", "show"))
                held = {one["dev"]: 8.0 * one["options"]["rate"] for one in shapers if one["kind"] == "tbf"}
                found |= {(leaf, spine): held[_get_uplink_device(spine)] for spine in self._get_plane_spines(plane) if _get_uplink_device(spine) in held}
        return found

    # Which way things go: pure

    def compute_routes(self, broken: BrokenLinks) -> dict[str, list[str]]:
        """By namespace, as lines of `ip`: what a routing protocol would have made of what is broken."""
        found = {machine.namespace: list(self._iterate_machine_routes(machine, broken)) for machine in self.machines}
        for plane in range(self.planes):
            for leaf in range(self.leaves):
                found[self.get_leaf_namespace(leaf, plane)] = list(self._iterate_leaf_routes(leaf, plane, broken))
            for spine in self._get_plane_spines(plane):
                found[self.get_spine_namespace(spine)] = list(self._iterate_spine_routes(spine, plane, broken))
        return found

    def _iterate_machine_routes(self, machine: Machine, broken: BrokenLinks) -> Iterator[str]:
        def through(planes: Iterable[int]) -> list[str]:
            return [f"via {self._leaf_address(machine.leaf, plane)} dev {_get_port_device(plane)} onlink" for plane in planes]

        plugged = [plane for plane in range(self.planes) if (machine.namespace, plane) not in broken.ports]
        for prefix in (LOOPBACKS, CABLES):
            yield _build_route(prefix, through(plugged))
        for other in self.machines:
            if other != machine:
                yield _build_route(other.prefix, through(p for p in plugged if self._can_reach(machine.leaf, other, p, broken)))

    def _iterate_leaf_routes(self, leaf: int, plane: int, broken: BrokenLinks) -> Iterator[str]:
        def up(spines: Iterable[int]) -> list[str]:
            return [f"via {self._spine_address(leaf, spine)} dev {_get_uplink_device(spine)}" for spine in spines]

        for machine in self.machines:
            if machine.leaf != leaf:
                there = self._can_reach(leaf, machine, plane, broken)
                ways = self._list_routes(leaf, machine.leaf, plane, broken) if there else []
                yield _build_route(machine.prefix, up(ways))
            elif (machine.namespace, plane) in broken.ports:
                yield _build_route(machine.prefix, [])
            else:
                yield _build_route(machine.prefix, [f"via {machine.address} dev {_get_machine_device(machine)} onlink"])
        for other in range(self.leaves):
            if other != leaf:
                yield _build_route(f"{self._leaf_address(other, plane)}/32", up(self._list_routes(leaf, other, plane, broken)))

    def _iterate_spine_routes(self, spine: int, plane: int, broken: BrokenLinks) -> Iterator[str]:
        for leaf in range(self.leaves):
            there = (leaf, spine) not in broken.announced
            via, device = f"10.98.{leaf}.{2 * spine}", _get_downlink_device(leaf)
            if there:
                # Nobody need ask for it: a spine that has not been told is to lose things, not to say that it does.
                yield f"neighbour replace {via} lladdr {_build_hardware_address(leaf, spine)} dev {device} nud permanent"
            for prefix in (f"{self._leaf_address(leaf, plane)}/32", *self._list_prefixes(leaf)):
                yield _build_route(prefix, [f"via {via} dev {device}"] if there else [])

    def _can_reach(self, leaf: int, machine: Machine, plane: int, broken: BrokenLinks) -> bool:
        """Whether a leaf knows a way to a machine in this plane."""
        if (machine.namespace, plane) in broken.ports:
            return False
        return leaf == machine.leaf or bool(self._list_routes(leaf, machine.leaf, plane, broken))

    def _list_routes(self, leaf: int, other: int, plane: int, broken: BrokenLinks) -> list[int]:
        """The spines by which a leaf sends to another one."""
        spines = self._get_plane_spines(plane)
        return [spine for spine in spines if (leaf, spine) not in broken.links and (other, spine) not in broken.announced]

    def _list_prefixes(self, leaf: int) -> list[str]:
        return [machine.prefix for machine in self.machines if machine.leaf == leaf]

    # Names and addresses: pure

    def list_interfaces(self) -> dict[str, list[str]]:
        """By namespace, as lines of `ip`: devices that are up, and their addresses."""
        found: dict[str, list[str]] = {switch: ["link set lo up"] for switch in self.switches}
        for plane in range(self.planes):
            for leaf in range(self.leaves):
                own = [f"address replace {self._leaf_address(leaf, plane)}/32 dev lo"]
                found[self.get_leaf_namespace(leaf, plane)] += own
        for leaf, spine in self.links:
            up, down = self._get_link_ends(leaf, spine)
            found[up.namespace] += _build_plug_commands(up, f"10.98.{leaf}.{2 * spine}/31")
            found[down.namespace] += _build_plug_commands(down, f"{self._spine_address(leaf, spine)}/31")
        for machine in self.machines:
            found[machine.namespace] = []
            for cable in self.list_cables(machine):
                found[cable.near.namespace] += _build_plug_commands(cable.near, f"{machine.address}/32")
                found[cable.far.namespace] += [f"link set {cable.far.device} up"]
        return found

    @property
    def _ports(self) -> list[str]:
        return [_get_port_device(plane) for plane in range(self.planes)]

    def _get_plane_spines(self, plane: int) -> range:
        return range(plane * self.spines, (plane + 1) * self.spines)

    def _get_link_ends(self, leaf: int, spine: int) -> tuple[CableEnd, CableEnd]:
        """Of a link: the leaf's, the spine's."""
        return CableEnd(self.get_leaf_namespace(leaf, spine // self.spines), _get_uplink_device(spine)), CableEnd(self.get_spine_namespace(spine), _get_downlink_device(leaf))

    def _leaf_address(self, leaf: int, plane: int) -> str:
        return f"10.97.{leaf}.{1 + plane}"

    def _spine_address(self, leaf: int, spine: int) -> str:
        """Of its port to a leaf."""
        return f"10.98.{leaf}.{2 * spine + 1}"

    # Making it

    def _is_complete(self) -> bool:
        """All namespaces and cables: a cable has both ends or none."""
        if not all((_NAMESPACES / switch).is_mount() for switch in self.switches):
            return False
        ends = [self._get_link_ends(*link)[0] for link in self.links]
        ends += [cable.far for machine in self.machines for cable in self.list_cables(machine)]
        found = {namespace: _read_devices(namespace) for namespace in {end.namespace for end in ends}}
        return all(end.device in found[end.namespace] for end in ends)

    def _create_all(self) -> None:
        for switch in self.switches:
            run_command("ip", "netns", "add", switch)
        cables: dict[str, list[str]] = {}
        for leaf, spine in self.links:
            up, down = self._get_link_ends(leaf, spine)
            cables.setdefault(up.namespace, []).append(
                f"link add {up.device} address {_build_hardware_address(leaf, spine)} "
                f"type veth peer name {down.device} netns {down.namespace}"
            )
        for machine in self.machines:
            for cable in self.list_cables(machine):
                cables[cable.far.namespace].append(
                    f"link add {cable.far.device} type veth peer name {cable.near.device} netns {machine.namespace}"
                )
        for namespace, lines in cables.items():
            _run_ip_commands(namespace, lines)


def _get_uplink_device(spine: int) -> str:
    """Of a leaf: its end of the cable to a spine."""
    return f"up{spine}"


def _get_downlink_device(leaf: int) -> str:
    """Of a spine: its end of the cable to a leaf."""
    return f"down{leaf}"


def _get_machine_device(machine: Machine) -> str:
    """Of a leaf: its end of the cable to a machine."""
    return f"to{machine.number}"


def _get_port_device(plane: int) -> str:
    """Of a machine: its port."""
    return f"fab{plane}"


def _build_hardware_address(leaf: int, spine: int) -> str:
    """Of a leaf's port to a spine."""
    return f"02:98:00:00:{leaf:02x}:{spine:02x}"


def _build_plug_commands(end: CableEnd, address: str) -> list[str]:
    return [f"address replace {address} dev {end.device}", f"link set {end.device} up"]


def _build_route(prefix: str, next_hops: Sequence[str]) -> str:
    """To all of these alike. Where there is none, nothing else takes its place."""
    if not next_hops:
        return f"route replace unreachable {prefix}"
    return f"route replace {prefix} " + " ".join(f"nexthop {way}" for way in next_hops)


def _read_devices(namespace: str) -> dict[str, Any]:
    """By name."""
    return {device["ifname"]: device for device in json.loads(run_command("ip", "-n", namespace, "-s", "-j", "link", "show"))}


def _set_sysctls(namespace: str, settings: Mapping[str, int | str]) -> None:
    # nsenter, not `ip netns exec`, which mounts /sys anew.
    values = [f"{name}={value}" for name, value in settings.items()]
    run_command("nsenter", f"--net={_NAMESPACES / namespace}", "sysctl", "-qw", *values)


def _run_ip_commands(namespace: str, lines: Iterable[str]) -> None:
    """`lines`: commands of iproute2's `ip`."""
    run_command("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")

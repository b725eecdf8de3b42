"""Routes of a leaf–spine network: followed from machine to machine, by each path that hashing may choose."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

import pytest

from testcluster.leaf_spine import BrokenLinks, LeafSpine, Link, Machine

LOST = "lost"


def fabric(leaves: int = 3, spines: int = 3, planes: int = 1) -> LeafSpine:
    """Two machines below each leaf, each with a subnet of pods behind it."""
    machines = tuple(
        Machine(f"m{leaf}{number}", leaf, number, f"10.200.{leaf}.{number}", f"10.244.{10 * leaf + number}.0/24")
        for leaf in range(leaves)
        for number in (0, 1)
    )
    return LeafSpine("t", leaves, spines, machines, planes)


def cut(*links: Link, told: bool = True) -> BrokenLinks:
    return BrokenLinks(frozenset(links), frozenset(links if told else ()))


def ends(made: LeafSpine, machine: Machine, other: Machine, broken: BrokenLinks) -> set[str]:
    """Where packets from one machine to the other's pods may end, over all choices: a namespace, or LOST."""
    routes = {name: _parsed(lines) for name, lines in made.compute_routes(broken).items()}
    cables = _cables(made)
    address = IPv4Network(other.prefix)[7]
    return set(_walk(routes, cables, broken, machine.namespace, address, 10))


def _walk(
    routes: Mapping[str, Mapping[IPv4Network, Sequence[str]]],
    cables: Mapping[tuple[str, str], tuple[str, Link | None]],
    broken: BrokenLinks,
    at: str,
    to: IPv4Address,
    hops: int,
) -> Iterator[str]:
    assert hops, f"packets for {to} go round in circles"
    found = [devices for prefix, devices in routes[at].items() if to in prefix]
    if not found:  # the machine itself has it
        yield at
    for device in itertools.chain.from_iterable(found):
        there, link = cables[at, device]
        if link in broken.links:
            yield LOST
        else:
            yield from _walk(routes, cables, broken, there, to, hops - 1)


def _parsed(lines: Sequence[str]) -> dict[IPv4Network, list[str]]:
    """Devices, by prefix."""
    matches = [re.fullmatch(r"route replace (unreachable )?(\S+)(.*)", line) for line in lines]
    return {IPv4Network(m[2]): re.findall(r"dev (\S+)", m[3]) for m in matches if m}


def _cables(made: LeafSpine) -> dict[tuple[str, str], tuple[str, Link | None]]:
    """By namespace and device: the namespace at the other end, and the link."""
    found: dict[tuple[str, str], tuple[str, Link | None]] = {}
    for leaf, spine in made.links:
        switch = made.get_leaf_namespace(leaf, spine // made.spines)
        found[switch, f"up{spine}"] = made.get_spine_namespace(spine), (leaf, spine)
        found[made.get_spine_namespace(spine), f"down{leaf}"] = switch, (leaf, spine)
    for machine in made.machines:
        for cable in made.list_cables(machine):
            found[cable.near.namespace, cable.near.device] = cable.far.namespace, None
            found[cable.far.namespace, cable.far.device] = cable.near.namespace, None
    return found


@pytest.mark.parametrize("planes", [1, 2])
def test_everybody_reaches_everybody_whatever_hashing_chooses(planes: int) -> None:
    made = fabric(planes=planes)
    for machine, other in itertools.permutations(made.machines, 2):
        assert ends(made, machine, other, BrokenLinks()) == {other.namespace}


def test_a_leaf_sends_by_all_spines_of_its_plane() -> None:
    made = fabric(planes=2)
    routes = made.compute_routes(BrokenLinks())
    (line,) = (line for line in routes[made.get_leaf_namespace(0, plane=1)] if " 10.244.10.0/24 " in line)
    assert re.findall(r"via (\S+) dev (\S+)", line) == [
        ("10.98.0.7", "up3"),
        ("10.98.0.9", "up4"),
        ("10.98.0.11", "up5"),
    ]


@pytest.mark.parametrize("links", [*itertools.combinations(fabric().links, 2)], ids=str)
def test_nothing_is_lost_by_links_that_everybody_knows_to_be_cut(links: Sequence[Link]) -> None:
    made, broken = fabric(), cut(*links)
    for machine, other in itertools.permutations(made.machines, 2):
        assert ends(made, machine, other, broken) == {other.namespace}


def test_what_others_send_by_a_cut_of_which_they_are_not_told_is_lost() -> None:
    made, broken = fabric(), cut((0, 2), told=False)
    below, _, elsewhere, *_ = made.machines
    assert ends(made, elsewhere, below, broken) == {LOST, below.namespace}
    assert ends(made, below, elsewhere, broken) == {elsewhere.namespace}, "its own leaf sees it"


def test_a_leaf_without_links_is_known_to_be_unreachable() -> None:
    made, broken = fabric(), cut((1, 0), (1, 1), (1, 2))
    first, neighbor, cut_off, *_ = made.machines
    assert ends(made, first, cut_off, broken) == set()
    assert ends(made, first, neighbor, broken) == {neighbor.namespace}
    assert "route replace unreachable 10.244.10.0/24" in made.compute_routes(broken)[first.namespace]


def test_a_machine_that_has_lost_a_port_is_reached_by_the_other_plane_alone() -> None:
    made = fabric(planes=2)
    first, neighbor, far, *_ = made.machines
    broken = BrokenLinks(ports=frozenset({(first.namespace, 0)}))
    for other in (neighbor, far):
        assert ends(made, other, first, broken) == {first.namespace}
        assert ends(made, first, other, broken) == {other.namespace}
        (line,) = (line for line in made.compute_routes(broken)[other.namespace] if f" {first.prefix} " in line)
        assert re.findall(r"dev (\S+)", line) == ["fab1"]


def test_one_spine_and_one_leaf_are_a_network_too() -> None:
    for made in (fabric(spines=1), fabric(leaves=1)):
        for machine, other in itertools.permutations(made.machines, 2):
            assert ends(made, machine, other, BrokenLinks()) == {other.namespace}


def test_no_address_is_given_twice_and_each_spine_answers_towards_each_leaf() -> None:
    made = fabric(planes=2)
    lines = [line for lines in made.list_interfaces().values() for line in lines]
    given = [match[1] for line in lines if (match := re.match(r"address replace (\S+)/", line))]
    of_machines = {machine.address for machine in made.machines}
    of_switches = [address for address in given if address not in of_machines]
    assert len(of_switches) == len(set(of_switches)) == 6 + 2 * len(made.links)
    assert sorted(made.spine_addresses.values()) == sorted([*range(6)] * 3)
    assert set(made.spine_addresses) < set(of_switches)

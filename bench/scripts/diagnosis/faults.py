"""The faults: how each begins and ends on the hosts, and what is true about it.

Each strikes in PLACES ways, on other ranks and by other amounts, so that nothing is tuned to one of them. What slows
ranks down is measured in what they usually need, so that it is as deep on any machine: steps take 1.2 to 3 times as
long. What costs less than a tenth is let be (`detection.stragglerSlowdown`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pacekeeper_analysis.diagnose.finding import FaultClass, Finding

from .hosts import HOSTS, RANKS, RANKS_A_HOST, HostedJob, add_noisy_neighbors, drop, heal, quota, slow

PLACES = 3
VICTIMS = (3, 4, 6)
"""The rank of a fault of one rank, by place."""
STRENGTHS = (1.0, 0.8, 1.6)
SLOW = 0.5
"""Part of a step that a slow script adds to it, at strength 1."""
PAIRS = ((0, 1), (3, 2), (1, 3))
"""Source and destination hosts of a slow link: of gradients, of gradients, of activations."""
RATES = ("200mbit", "300mbit", "40mbit")
SIDES = ((0, "200mbit"), (2, "250mbit"), (3, "150mbit"))
HOGS = 3

ALL, GROUP, PAIR = "all ranks", "links of rank", "between rank"
"""How findings call all of them, those of a group, and two whose direction is not known (yet)."""


@dataclass(frozen=True)
class Truth:
    """Who is to blame: one of `ranks` (() : all of them alike), or what `source` sends to `destination` (hosts)."""

    classes: frozenset[FaultClass]
    ranks: tuple[int, ...] = ()
    source: int | None = None
    destination: int | None = None
    function: str = ""

    @property
    def is_of_links(self) -> bool:
        return self.source is not None or self.destination is not None

    def is_named(self, finding: Finding) -> bool:
        """Whether the culprit's words name it, and nobody else."""
        if self.is_of_links:
            return self._names_link(finding.culprit)
        if self.function and self.function in finding.culprit and (not self.ranks or self._names_rank(finding.culprit)):
            return True
        return self._names_rank(finding.culprit) if self.ranks else ALL in finding.culprit

    def is_blamed(self, ranks: frozenset[int]) -> bool:
        """By a rule that knows nothing but ranks."""
        if self.is_of_links:
            return False
        return ranks <= set(self.ranks) if self.ranks else len(ranks) == RANKS

    def is_class(self, finding: Finding) -> bool:
        return finding.fault in self.classes

    def _names_rank(self, words: str) -> bool:
        named = {int(number) for number in re.findall(r"\d+", words.rpartition("rank")[2])}
        return "rank" in words and bool(named) and named <= set(self.ranks)

    def _names_link(self, words: str) -> bool:
        """By a side, or by a pair of ranks: a pair has to have the guilty hosts at its ends."""
        hosts = [int(number) // RANKS_A_HOST for number in re.findall(r"\d+", words)]
        guilty = {self.source, self.destination} - {None}
        if words.startswith((GROUP, PAIR)):
            return guilty <= set(hosts)
        if len(hosts) == 1:
            side = self.source if "sender" in words else self.destination if "receiver" in words else None
            return side == hosts[0] and (self.source is None or self.destination is None)
        if len(hosts) != 2:
            return False
        return self.source in (None, hosts[0]) and self.destination in (None, hosts[1])


@dataclass(frozen=True)
class InjectedFault:
    """`strike`, `heal`: of a job, by place."""

    name: str
    strike: Callable[[HostedJob, int], None]
    heal: Callable[[HostedJob, int], None]
    truths: Callable[[int], tuple[Truth, ...]]
    hangs: bool = False

    @property
    def is_of_links(self) -> bool:
        return any(truth.is_of_links for truth in self.truths(0))


def catalogue() -> tuple[InjectedFault, ...]:
    return (*_hangs(), *_iterate_host_faults(), *_iterate_script_faults(), *_iterate_link_faults())


def _hangs() -> Iterator[InjectedFault]:
    of_script = frozenset({FaultClass.CODE})
    yield InjectedFault(
        "stopped process",
        lambda job, place: os.kill(job.host_of(VICTIMS[place]).pid_of(VICTIMS[place]), signal.SIGSTOP),
        lambda _job, _place: None,
        _build_rank_truth(frozenset({FaultClass.HARDWARE, FaultClass.UNKNOWN})),
        hangs=True,
    )
    yield _build_script_fault("deadlock in Python", "deadlock", of_script, hangs=True)
    yield _build_script_fault("mismatched collective", "mismatch", of_script, hangs=True)
    yield _build_script_fault("hang in a tensor group", "tensor-hang", of_script, hangs=True)
    for name, source, destination in (("pair", 1, 0), ("egress", 2, None), ("ingress", None, 3)):
        truth = Truth(frozenset({FaultClass.NETWORK}), source=source, destination=destination)

        yield InjectedFault(f"dropped {name}", _drop(source, destination), _heal_links, _always(truth), hangs=True)


def _iterate_host_faults() -> Iterator[InjectedFault]:
    machine = frozenset({FaultClass.CONFIGURATION, FaultClass.HARDWARE})

    def hosts(place: int) -> tuple[int, ...]:
        return (VICTIMS[place] // RANKS_A_HOST,)

    def throttle(job: HostedJob, which: tuple[int, ...], part: float | None) -> None:
        for number in which:
            quota(job.hosts[number], None if part is None else part * job.usual.cores[number])

    def of_host(classes: frozenset[FaultClass]) -> Callable[[int], tuple[Truth, ...]]:
        return lambda place: (Truth(classes, job_ranks(hosts(place))),)

    everywhere = tuple(range(HOSTS))
    yield InjectedFault(
        "quota on one host",
        lambda job, place: throttle(job, hosts(place), QUOTAS[place]),
        lambda job, place: throttle(job, hosts(place), None),
        of_host(frozenset({FaultClass.CONFIGURATION})),
    )
    yield InjectedFault(
        "quota on all hosts",
        lambda job, place: throttle(job, everywhere, QUOTAS[place]),
        lambda job, _place: throttle(job, everywhere, None),
        lambda _place: (Truth(frozenset({FaultClass.CONFIGURATION})),),
    )
    yield InjectedFault(
        "hog beside one host",
        lambda job, place: add_noisy_neighbors(job.hosts, hosts(place)[0], HOGS),
        lambda job, place: add_noisy_neighbors(job.hosts, hosts(place)[0], 0),
        of_host(machine),
    )


QUOTAS = (0.85, 0.8, 0.75)
"""Part of the processor time that the ranks of a host need."""


def _iterate_script_faults() -> Iterator[InjectedFault]:
    code, data = frozenset({FaultClass.CODE}), frozenset({FaultClass.DATA})
    yield _build_script_fault("sleep by turns", "turns", code, everywhere=True)
    yield _build_script_fault("garbage", "garbage", code, everywhere=True)
    yield _build_script_fault("slow loader on one", "loader", data)
    yield _build_script_fault("slow loader on all", "loader", data, everywhere=True)
    yield _build_script_fault("lengths", "lengths", data, everywhere=True)
    yield _build_script_fault("slow function on one", "slow-function", code, function="augment_sample")
    yield _build_script_fault(
        "slow function on all", "slow-function", code, everywhere=True, function="augment_sample", part=0.4
    )
    yield _build_script_fault("synchronisation in each step", "synchronise", code, everywhere=True, function="log_metrics")


def _iterate_link_faults() -> Iterator[InjectedFault]:
    network = frozenset({FaultClass.NETWORK})

    def pair(place: int) -> Truth:
        return Truth(network, source=PAIRS[place][0], destination=PAIRS[place][1])

    def slow_pair(job: HostedJob, place: int) -> None:
        source, destination = PAIRS[place]
        slow(job.hosts[source], RATES[place], to=job.hosts[destination])

    yield InjectedFault("slow link", slow_pair, _heal_links, lambda place: (pair(place),))
    yield InjectedFault(
        "slow egress",
        lambda job, place: slow(job.hosts[SIDES[place][0]], SIDES[place][1]),
        _heal_links,
        lambda place: (Truth(network, source=SIDES[place][0]),),
    )
    yield InjectedFault(
        "slow ingress",
        lambda job, place: slow(job.hosts[SIDES[place][0]], SIDES[place][1], egress=False),
        _heal_links,
        lambda place: (Truth(network, destination=SIDES[place][0]),),
    )
    loader = _build_script_fault("", "loader", frozenset({FaultClass.DATA}))

    def both(job: HostedJob, place: int) -> None:
        slow_pair(job, place)
        loader.strike(job, place)

    def mend_both(job: HostedJob, place: int) -> None:
        _heal_links(job, place)
        loader.heal(job, place)

    yield InjectedFault("slow link and slow rank", both, mend_both, lambda place: (pair(place), *loader.truths(place)))


def _build_script_fault(
    name: str,
    kind: str,
    classes: frozenset[FaultClass],
    *,
    everywhere: bool = False,
    function: str = "",
    part: float = 1.0,
    hangs: bool = False,
) -> InjectedFault:
    """What the script itself does (`job.strike`), on the victim or on all ranks."""

    def ranks(place: int) -> tuple[int, ...]:
        return tuple(range(RANKS)) if everywhere else (VICTIMS[place],)

    def strike(job: HostedJob, place: int) -> None:
        for rank in ranks(place):
            job.strike(rank, {"kind": kind, "seconds": part * SLOW * STRENGTHS[place] * job.usual.step_seconds})

    def mend(job: HostedJob, place: int) -> None:
        for rank in ranks(place):
            job.strike(rank, {})

    def truths(place: int) -> tuple[Truth, ...]:
        return (Truth(classes, () if everywhere else ranks(place), function=function),)

    return InjectedFault(name, strike, mend, truths, hangs)


def _build_rank_truth(classes: frozenset[FaultClass]) -> Callable[[int], tuple[Truth, ...]]:
    return lambda place: (Truth(classes, (VICTIMS[place],)),)


def job_ranks(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of these hosts."""
    return tuple(rank for host in hosts for rank in range(RANKS_A_HOST * host, RANKS_A_HOST * (host + 1)))


def _always(*truths: Truth) -> Callable[[int], tuple[Truth, ...]]:
    return lambda _place: truths


def _drop(source: int | None, destination: int | None) -> Callable[[HostedJob, int], None]:
    def strike(job: HostedJob, _place: int) -> None:
        for one in job.hosts:
            for other in job.hosts:
                if one is not other and source in (None, one.number) and destination in (None, other.number):
                    drop(one, other)

    return strike


def _heal_links(job: HostedJob, _place: int) -> None:
    for host in job.hosts:
        heal(host)

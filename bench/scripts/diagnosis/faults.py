"""The faults: how each begins and ends on the hosts, and what is true about it.

Each is injected in PLACES variants, on other ranks and by other amounts, so that nothing is tuned to one of them. What
slows ranks down is measured in what they usually need, so that it is as deep on any machine: steps take 1.2 to 3 times
as long. What costs less than a tenth is tolerated (`detection.stragglerSlowdown`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pacekeeper_analysis.failures.finding import FaultClass, Finding

from .hosts import (
    HOSTS,
    RANKS,
    RANKS_A_HOST,
    HostedJob,
    add_noisy_neighbors,
    drop_packets,
    restore_host,
    set_cpu_quota,
    slow_link,
)

PLACES = 3
VICTIM_RANKS = (3, 4, 6)
"""The rank of a fault of one rank, by place."""
STRENGTHS = (1.0, 0.8, 1.6)
SLOW_STEP_SHARE = 0.5
"""Part of a step that a slow script adds to it, at strength 1."""
SLOW_LINK_HOSTS = ((0, 1), (3, 2), (1, 3))
"""Source and destination hosts of a slow link: of gradients, of gradients, of activations."""
SLOW_LINK_RATES = ("200mbit", "300mbit", "40mbit")
SLOW_SIDES = ((0, "200mbit"), (2, "250mbit"), (3, "150mbit"))
NOISY_NEIGHBORS = 3

ALL_RANKS, GROUP_LINKS, RANK_PAIR = "all ranks", "links of rank", "between rank"
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
        """Whether the message of the diagnosis names the culprit, and no other worker."""
        if self.is_of_links:
            return self._names_link(finding.culprit)
        if self.function and self.function in finding.culprit and (not self.ranks or self._names_rank(finding.culprit)):
            return True
        return self._names_rank(finding.culprit) if self.ranks else ALL_RANKS in finding.culprit

    def is_blamed(self, ranks: frozenset[int]) -> bool:
        """By a rule that names only ranks."""
        if self.is_of_links:
            return False
        return ranks <= set(self.ranks) if self.ranks else len(ranks) == RANKS

    def is_class(self, finding: Finding) -> bool:
        return finding.fault in self.classes

    def _names_rank(self, culprit: str) -> bool:
        named_ranks = {int(number) for number in re.findall(r"\d+", culprit.rpartition("rank")[2])}
        return "rank" in culprit and bool(named_ranks) and named_ranks <= set(self.ranks)

    def _names_link(self, culprit: str) -> bool:
        """By a side, or by a pair of ranks: a pair has to have the guilty hosts at its ends."""
        hosts = [int(number) // RANKS_A_HOST for number in re.findall(r"\d+", culprit)]
        guilty_hosts = {self.source, self.destination} - {None}
        if culprit.startswith((GROUP_LINKS, RANK_PAIR)):
            return guilty_hosts <= set(hosts)
        if len(hosts) == 1:
            side = self.source if "sender" in culprit else self.destination if "receiver" in culprit else None
            return side == hosts[0] and (self.source is None or self.destination is None)
        if len(hosts) != 2:
            return False
        return self.source in (None, hosts[0]) and self.destination in (None, hosts[1])


@dataclass(frozen=True)
class InjectedFault:
    """`strike`, `undo`: of a job, by place."""

    name: str
    strike: Callable[[HostedJob, int], None]
    undo: Callable[[HostedJob, int], None]
    truths: Callable[[int], tuple[Truth, ...]]
    hangs: bool = False

    @property
    def is_of_links(self) -> bool:
        return any(truth.is_of_links for truth in self.truths(0))


def list_faults() -> tuple[InjectedFault, ...]:
    return (*_iterate_hangs(), *_iterate_host_faults(), *_iterate_script_faults(), *_iterate_link_faults())


def _iterate_hangs() -> Iterator[InjectedFault]:
    script_classes = frozenset({FaultClass.CODE})
    yield InjectedFault(
        "stopped process",
        lambda job, place: os.kill(job.find_host(VICTIM_RANKS[place]).read_pid(VICTIM_RANKS[place]), signal.SIGSTOP),
        lambda _job, _place: None,
        _build_rank_truth(frozenset({FaultClass.HARDWARE, FaultClass.UNKNOWN})),
        hangs=True,
    )
    yield _build_script_fault("deadlock in Python", "deadlock", script_classes, hangs=True)
    yield _build_script_fault("mismatched collective", "mismatch", script_classes, hangs=True)
    yield _build_script_fault("hang in a tensor group", "tensor-hang", script_classes, hangs=True)
    for name, source, destination in (("pair", 1, 0), ("egress", 2, None), ("ingress", None, 3)):
        truth = Truth(frozenset({FaultClass.NETWORK}), source=source, destination=destination)

        yield InjectedFault(
            f"dropped {name}",
            _build_drop(source, destination),
            _restore_links,
            _build_constant_truth(truth),
            hangs=True,
        )


def _iterate_host_faults() -> Iterator[InjectedFault]:
    machine_classes = frozenset({FaultClass.CONFIGURATION, FaultClass.HARDWARE})

    def list_hosts(place: int) -> tuple[int, ...]:
        return (VICTIM_RANKS[place] // RANKS_A_HOST,)

    def throttle(job: HostedJob, numbers: tuple[int, ...], part: float | None) -> None:
        for number in numbers:
            set_cpu_quota(job.hosts[number], None if part is None else part * job.usual.cores[number])

    def build_truth(classes: frozenset[FaultClass]) -> Callable[[int], tuple[Truth, ...]]:
        return lambda place: (Truth(classes, list_host_ranks(list_hosts(place))),)

    all_hosts = tuple(range(HOSTS))
    yield InjectedFault(
        "quota on one host",
        lambda job, place: throttle(job, list_hosts(place), CPU_QUOTA_SHARES[place]),
        lambda job, place: throttle(job, list_hosts(place), None),
        build_truth(frozenset({FaultClass.CONFIGURATION})),
    )
    yield InjectedFault(
        "quota on all hosts",
        lambda job, place: throttle(job, all_hosts, CPU_QUOTA_SHARES[place]),
        lambda job, _place: throttle(job, all_hosts, None),
        lambda _place: (Truth(frozenset({FaultClass.CONFIGURATION})),),
    )
    yield InjectedFault(
        "hog next to one host",
        lambda job, place: add_noisy_neighbors(job.hosts, list_hosts(place)[0], NOISY_NEIGHBORS),
        lambda job, place: add_noisy_neighbors(job.hosts, list_hosts(place)[0], 0),
        build_truth(machine_classes),
    )


CPU_QUOTA_SHARES = (0.85, 0.8, 0.75)
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
    yield _build_script_fault(
        "synchronization in each step", "synchronize", code, everywhere=True, function="log_metrics"
    )


def _iterate_link_faults() -> Iterator[InjectedFault]:
    network = frozenset({FaultClass.NETWORK})

    def build_link_truth(place: int) -> Truth:
        return Truth(network, source=SLOW_LINK_HOSTS[place][0], destination=SLOW_LINK_HOSTS[place][1])

    def slow_pair(job: HostedJob, place: int) -> None:
        source, destination = SLOW_LINK_HOSTS[place]
        slow_link(job.hosts[source], SLOW_LINK_RATES[place], to=job.hosts[destination])

    yield InjectedFault("slow link", slow_pair, _restore_links, lambda place: (build_link_truth(place),))
    yield InjectedFault(
        "slow egress",
        lambda job, place: slow_link(job.hosts[SLOW_SIDES[place][0]], SLOW_SIDES[place][1]),
        _restore_links,
        lambda place: (Truth(network, source=SLOW_SIDES[place][0]),),
    )
    yield InjectedFault(
        "slow ingress",
        lambda job, place: slow_link(job.hosts[SLOW_SIDES[place][0]], SLOW_SIDES[place][1], egress=False),
        _restore_links,
        lambda place: (Truth(network, destination=SLOW_SIDES[place][0]),),
    )
    loader = _build_script_fault("", "loader", frozenset({FaultClass.DATA}))

    def inject_both(job: HostedJob, place: int) -> None:
        slow_pair(job, place)
        loader.strike(job, place)

    def undo_both(job: HostedJob, place: int) -> None:
        _restore_links(job, place)
        loader.undo(job, place)

    yield InjectedFault(
        "slow link and slow rank",
        inject_both,
        undo_both,
        lambda place: (build_link_truth(place), *loader.truths(place)),
    )


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

    def list_ranks(place: int) -> tuple[int, ...]:
        return tuple(range(RANKS)) if everywhere else (VICTIM_RANKS[place],)

    def inject(job: HostedJob, place: int) -> None:
        for rank in list_ranks(place):
            job.strike(
                rank, {"kind": kind, "seconds": part * SLOW_STEP_SHARE * STRENGTHS[place] * job.usual.step_seconds}
            )

    def undo(job: HostedJob, place: int) -> None:
        for rank in list_ranks(place):
            job.strike(rank, {})

    def list_truths(place: int) -> tuple[Truth, ...]:
        return (Truth(classes, () if everywhere else list_ranks(place), function=function),)

    return InjectedFault(name, inject, undo, list_truths, hangs)


def _build_rank_truth(classes: frozenset[FaultClass]) -> Callable[[int], tuple[Truth, ...]]:
    return lambda place: (Truth(classes, (VICTIM_RANKS[place],)),)


def list_host_ranks(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of these hosts."""
    return tuple(rank for host in hosts for rank in range(RANKS_A_HOST * host, RANKS_A_HOST * (host + 1)))


def _build_constant_truth(*truths: Truth) -> Callable[[int], tuple[Truth, ...]]:
    return lambda _place: truths


def _build_drop(source: int | None, destination: int | None) -> Callable[[HostedJob, int], None]:
    def inject(job: HostedJob, _place: int) -> None:
        for sender in job.hosts:
            for receiver in job.hosts:
                if (
                    sender is not receiver
                    and source in (None, sender.number)
                    and destination in (None, receiver.number)
                ):
                    drop_packets(sender, receiver)

    return inject


def _restore_links(job: HostedJob, _place: int) -> None:
    for host in job.hosts:
        restore_host(host)

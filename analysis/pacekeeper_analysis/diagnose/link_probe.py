"""The active test of a link between two workers: who is to send to whom in which second, and what the answers say.

    probe = layout("probe-7", source, destination, others)   # for Plan.probe
    told = judge(answers, source.worker, destination.worker)

What is slow is told by the ratio to controls, pairs of other workers that are measured in the same seconds: the load of
the training that goes on meanwhile is on all of them, and cancels out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Self

from ..plan import ProbeRequest, ProbeTarget
from ..reports import LinkProbe

MIN_SLOW_PROBE_RATIO = 1.5
"""× a control's time for the same bytes. Of the pairs beside the suspect only those share its fault that are nearer to
it than to the controls: how many times the usual they take is at least the root of what the suspect takes."""
MIN_SLOW_PING_RATIO, MIN_PING_EXCESS_SECONDS = 4.0, 0.005
"""× a control's time for a ping, and so much more than it at least: a busy processor takes milliseconds to answer."""
MAX_COMPARED_BYTES_PER_SECOND = 1e9
"""Bytes a second: faster transfers are limited by the launchers' own processors, and are as good as each other."""
MAX_CONTROL_WORKERS = 4


class LinkProbeVerdict(StrEnum):
    """What of source → destination is slow."""

    LINK = "Link"  # only this way
    SENDER = "Sender"  # all that the source sends
    RECEIVER = "Receiver"  # all that the destination receives
    REVERSED = "Reversed"  # not this way, but the way back, whose queue the acknowledgements of this one stand in
    NOTHING = "Nothing"  # none of it now: it was congestion, or the host
    UNTOLD = "Untold"  # too few workers or answers to tell, or answers that contradict each other


@dataclass(frozen=True)
class ProbeParty:
    """A worker that takes part. `address`: host:port of its launcher's probe port."""

    worker: str
    address: str


@dataclass(frozen=True)
class LinkProbeResult:
    """`words`: for people."""

    verdict: LinkProbeVerdict
    words: str


def plan_probe(name: str, source: ProbeParty, destination: ProbeParty, others: Sequence[ProbeParty]) -> ProbeRequest:
    """Turns of a second; pairs of one turn have no worker in common, so that none slows the other down.

    others: members on other nodes than both, two of them are enough to tell (with one, the control has its own turn);
    with four, two control pairs run beside what is tested.
    """
    s, d = source, destination
    x, y, z, w = [*others[:MAX_CONTROL_WORKERS], *[None] * MAX_CONTROL_WORKERS][:MAX_CONTROL_WORKERS]
    turns: list[list[tuple[ProbeParty | None, ProbeParty | None]]]
    if y is None:
        turns = [[(s, d)], [(s, x)], [(x, d)], [(d, x)], [(d, s)]]
    else:
        turns = [[(s, d), (x, y)], [(s, x), (y, d), (z, w)], [(s, y), (x, d), (w, z)], [(d, s), (y, x)]]
    targets: dict[str, list[ProbeTarget]] = defaultdict(list)
    for slot, pairs in enumerate(turns):
        for one, other in pairs:
            if one is not None and other is not None:
                targets[one.worker].append(ProbeTarget(other.worker, other.address, slot))
    return ProbeRequest(name, tuple(targets), tuple(map(tuple, targets.values())))


def estimate_probe_seconds(probe: ProbeRequest) -> float:
    """That its turns take."""
    return 1.0 + max((target.slot for targets in probe.targets for target in targets), default=-1)


def evaluate_probe(answers: Mapping[str, Sequence[LinkProbe]], source: str, destination: str) -> LinkProbeResult:
    """`answers`: worker → what its launcher measured. What a worker says of its own sending is all that is believed."""
    measured: dict[tuple[str, str], list[LinkProbe]] = defaultdict(list)
    for worker, probes in answers.items():
        for probe in probes:
            if probe.target != worker:
                measured[worker, probe.target].append(probe)
    tested = {pair for pair in measured if pair[0] == source or pair[1] == destination} | {(destination, source)}
    controls = [pair for pair in measured if pair not in tested and not _has_failed(measured[pair])]
    suspect = measured.get((source, destination))
    if suspect is None or not controls:
        return LinkProbeResult(LinkProbeVerdict.UNTOLD, "the probe was not answered by those who would have to")
    rate = median(_get_rate(measured[pair]) for pair in controls)
    ping = median(_get_ping(measured[pair]) for pair in controls)
    sends = [pair for pair in measured if pair[0] == source and pair[1] != destination]
    receives = [pair for pair in measured if pair[1] == destination and pair[0] != source]
    shown = _ProbeSlowness.from_probes(suspect, rate, ping)
    as_slow = {pair: _ProbeSlowness.from_probes(measured[pair], rate, ping).is_like(shown) for pair in (*sends, *receives)}
    back = measured.get((destination, source), ())
    back_rate, back_ping = rate, ping
    if all(sender == destination for sender, _ in controls):  # of three workers: its side may slow the control, too
        working = [its for its in measured.values() if not _has_failed(its)]
        back_rate, back_ping = max(map(_get_rate, working)), min(map(_get_ping, working))
    if back and not shown.is_slow and _ProbeSlowness.from_probes(back, back_rate, back_ping).is_slow:
        told = f"{destination} → {source} {_describe_probes(back)}; others {back_rate / 1e6:.0f} MB/s"
        return LinkProbeResult(LinkProbeVerdict.REVERSED, told)
    verdict = _choose_verdict(shown.is_slow, [as_slow[pair] for pair in sends], [as_slow[pair] for pair in receives])
    told = ", ".join(f"{a} → {b} {_describe_probes(measured[a, b])}" for a, b in ((source, destination), *sends, *receives))
    return LinkProbeResult(verdict, f"{told}; controls {rate / 1e6:.0f} MB/s, {ping * 1e3:.2f} ms")


def _choose_verdict(suspect: bool, sends: Sequence[bool], receives: Sequence[bool]) -> LinkProbeVerdict:
    if not suspect:
        return LinkProbeVerdict.NOTHING
    if not sends or not receives:
        return LinkProbeVerdict.UNTOLD
    if not any(sends) and not any(receives):
        return LinkProbeVerdict.LINK
    if all(sends) and not any(receives):
        return LinkProbeVerdict.SENDER
    if all(receives) and not any(sends):
        return LinkProbeVerdict.RECEIVER
    return LinkProbeVerdict.UNTOLD


@dataclass(frozen=True)
class _ProbeSlowness:
    """A pair's times over the controls'."""

    transfer: float
    ping: float  # 1 where it is not longer by MIN_PING_EXCESS_SECONDS

    @classmethod
    def from_probes(cls, probes: Sequence[LinkProbe], rate: float, ping: float) -> Self:
        """`rate`, `ping`: the controls', bytes/s and s. What did not come through at all is slow: theirs did."""
        if _has_failed(probes):
            return cls(math.inf, math.inf)
        longer = _get_ping(probes) - ping >= MIN_PING_EXCESS_SECONDS
        return cls(rate / _get_rate(probes), _get_ping(probes) / ping if longer else 1.0)

    @property
    def is_slow(self) -> bool:
        return self.transfer >= MIN_SLOW_PROBE_RATIO or self.ping >= MIN_SLOW_PING_RATIO

    def is_like(self, other: _ProbeSlowness) -> bool:
        """Slow in the way in which `other` is, and nearer to it than to the controls."""
        by_transfer = other.transfer >= MIN_SLOW_PROBE_RATIO and self.transfer >= max(MIN_SLOW_PROBE_RATIO, math.sqrt(other.transfer))
        return by_transfer or (other.ping >= MIN_SLOW_PING_RATIO and self.ping >= max(MIN_SLOW_PING_RATIO, math.sqrt(other.ping)))


def _has_failed(probes: Sequence[LinkProbe]) -> bool:
    return all(probe.failed or not probe.bytes_per_second for probe in probes)


def _get_rate(probes: Sequence[LinkProbe]) -> float:
    return min(MAX_COMPARED_BYTES_PER_SECOND, max(probe.bytes_per_second for probe in probes))


def _get_ping(probes: Sequence[LinkProbe]) -> float:
    return median(probe.ping_seconds if probe.ping_seconds else math.inf for probe in probes)


def _describe_probes(probes: Sequence[LinkProbe]) -> str:
    if _has_failed(probes):
        return f"failed ({probes[-1].failed[:80] or 'nothing came through'})"
    return f"{_get_rate(probes) / 1e6:.0f} MB/s, {_get_ping(probes) * 1e3:.2f} ms"

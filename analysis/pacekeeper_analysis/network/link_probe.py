"""The active test of a link between two workers: the plan of who sends to whom in which second, and the evaluation.

    probe = plan_probe("probe-7", source, destination, others)   # for Plan.probe
    result = evaluate_probe(answers, source.worker, destination.worker)

A link is slow by its ratio to controls: pairs of other workers that are measured in the same seconds. The load of the
ongoing training is on all of them, so it cancels out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Self

from ..protocol.reports import LinkProbe
from ..protocol.requests import ProbeRequest, ProbeTarget

MIN_SLOW_PROBE_RATIO = 1.5
"""Multiple of a control's time for the same bytes from which on a pair is slow.

Other pairs share the suspect's fault only if they are nearer to it than to the controls: their ratio is at least the
square root of the suspect's.
"""
MIN_SLOW_PING_RATIO, MIN_PING_EXCESS_SECONDS = 4.0, 0.005
"""Multiple of a control's ping time from which on a ping is slow, and the smallest excess.

A busy CPU takes milliseconds to answer.
"""
MAX_COMPARED_BYTES_PER_SECOND = 1e9
"""Bytes per second above which transfers count as equal, because the launchers' CPUs limit them."""
MAX_CONTROL_WORKERS = 4


class LinkProbeVerdict(StrEnum):
    """The slow part of source → destination."""

    LINK = "Link"  # only this direction
    SENDER = "Sender"  # everything that the source sends
    RECEIVER = "Receiver"  # everything that the destination receives
    REVERSED = "Reversed"  # only the reverse direction, whose queue delays this direction's acknowledgements
    NOTHING = "Nothing"  # nothing now: it was congestion, or the host
    INCONCLUSIVE = "Inconclusive"  # not decidable: too few workers or answers, or contradictory answers


@dataclass(frozen=True)
class ProbeParty:
    """A worker that takes part. `address` is host:port of its launcher's probe port."""

    worker: str
    address: str


@dataclass(frozen=True)
class LinkProbeResult:
    """The result of a probe. `words` are for people."""

    verdict: LinkProbeVerdict
    message: str


def plan_probe(name: str, source: ProbeParty, destination: ProbeParty, others: Sequence[ProbeParty]) -> ProbeRequest:
    """Plan a probe in turns of one second. Pairs of one turn share no worker, so that none slows another down.

    `others` are members on other nodes than both. Two of them are sufficient. With one, the control has its own turn.
    With four, two control pairs run at the same time as the tested pair.
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
        for sender, receiver in pairs:
            if sender is not None and receiver is not None:
                targets[sender.worker].append(ProbeTarget(receiver.worker, receiver.address, slot))
    return ProbeRequest(name, tuple(targets), tuple(map(tuple, targets.values())))


def estimate_probe_seconds(probe: ProbeRequest) -> float:
    """Return the seconds that the probe's turns take."""
    return 1.0 + max((target.slot for targets in probe.targets for target in targets), default=-1)


def evaluate_probe(answers: Mapping[str, Sequence[LinkProbe]], source: str, destination: str) -> LinkProbeResult:
    """Evaluate a probe. `answers` maps each worker to its launcher's measurements.

    A worker is trusted only about what it sends itself.
    """
    measured: dict[tuple[str, str], list[LinkProbe]] = defaultdict(list)
    for worker, probes in answers.items():
        for probe in probes:
            if probe.target != worker:
                measured[worker, probe.target].append(probe)
    tested = {pair for pair in measured if pair[0] == source or pair[1] == destination} | {(destination, source)}
    controls = [pair for pair in measured if pair not in tested and not _has_failed(measured[pair])]
    suspect = measured.get((source, destination))
    if suspect is None or not controls:
        return LinkProbeResult(
            LinkProbeVerdict.INCONCLUSIVE, "the workers needed for a verdict did not answer the probe"
        )
    rate = median(_get_rate(measured[pair]) for pair in controls)
    ping = median(_get_ping(measured[pair]) for pair in controls)
    sends = [pair for pair in measured if pair[0] == source and pair[1] != destination]
    receives = [pair for pair in measured if pair[1] == destination and pair[0] != source]
    slowness = _ProbeSlowness.from_probes(suspect, rate, ping)
    is_similar = {
        pair: _ProbeSlowness.from_probes(measured[pair], rate, ping).is_like(slowness) for pair in (*sends, *receives)
    }
    reverse = measured.get((destination, source), ())
    reverse_rate, reverse_ping = rate, ping
    if all(sender == destination for sender, _ in controls):  # three workers: its side may slow the control, too
        working = [results for results in measured.values() if not _has_failed(results)]
        reverse_rate, reverse_ping = max(map(_get_rate, working)), min(map(_get_ping, working))
    if reverse and not slowness.is_slow and _ProbeSlowness.from_probes(reverse, reverse_rate, reverse_ping).is_slow:
        message = f"{destination} → {source} {_describe_probes(reverse)}; others {reverse_rate / 1e6:.0f} MB/s"
        return LinkProbeResult(LinkProbeVerdict.REVERSED, message)
    verdict = _choose_verdict(
        slowness.is_slow, [is_similar[pair] for pair in sends], [is_similar[pair] for pair in receives]
    )
    message = ", ".join(
        f"{a} → {b} {_describe_probes(measured[a, b])}" for a, b in ((source, destination), *sends, *receives)
    )
    return LinkProbeResult(verdict, f"{message}; controls {rate / 1e6:.0f} MB/s, {ping * 1e3:.2f} ms")


def _choose_verdict(suspect: bool, sends: Sequence[bool], receives: Sequence[bool]) -> LinkProbeVerdict:
    if not suspect:
        return LinkProbeVerdict.NOTHING
    if not sends or not receives:
        return LinkProbeVerdict.INCONCLUSIVE
    if not any(sends) and not any(receives):
        return LinkProbeVerdict.LINK
    if all(sends) and not any(receives):
        return LinkProbeVerdict.SENDER
    if all(receives) and not any(sends):
        return LinkProbeVerdict.RECEIVER
    return LinkProbeVerdict.INCONCLUSIVE


@dataclass(frozen=True)
class _ProbeSlowness:
    """A pair's times relative to the controls'."""

    transfer: float
    ping: float  # 1 if the excess is below MIN_PING_EXCESS_SECONDS

    @classmethod
    def from_probes(cls, probes: Sequence[LinkProbe], rate: float, ping: float) -> Self:
        """Compare a pair with the controls' `rate` (bytes/s) and `ping` (s). A failed transfer counts as slow."""
        if _has_failed(probes):
            return cls(math.inf, math.inf)
        has_excess = _get_ping(probes) - ping >= MIN_PING_EXCESS_SECONDS
        return cls(rate / _get_rate(probes), _get_ping(probes) / ping if has_excess else 1.0)

    @property
    def is_slow(self) -> bool:
        return self.transfer >= MIN_SLOW_PROBE_RATIO or self.ping >= MIN_SLOW_PING_RATIO

    def is_like(self, other: _ProbeSlowness) -> bool:
        """Return whether this pair is slow in the same way as `other`, and nearer to it than to the controls."""
        by_transfer = other.transfer >= MIN_SLOW_PROBE_RATIO and self.transfer >= max(
            MIN_SLOW_PROBE_RATIO, math.sqrt(other.transfer)
        )
        return by_transfer or (
            other.ping >= MIN_SLOW_PING_RATIO and self.ping >= max(MIN_SLOW_PING_RATIO, math.sqrt(other.ping))
        )


def _has_failed(probes: Sequence[LinkProbe]) -> bool:
    return all(probe.failed or not probe.bytes_per_second for probe in probes)


def _get_rate(probes: Sequence[LinkProbe]) -> float:
    return min(MAX_COMPARED_BYTES_PER_SECOND, max(probe.bytes_per_second or 0.0 for probe in probes))


def _get_ping(probes: Sequence[LinkProbe]) -> float:
    return median(probe.ping_seconds if probe.ping_seconds else math.inf for probe in probes)


def _describe_probes(probes: Sequence[LinkProbe]) -> str:
    if _has_failed(probes):
        return f"failed ({probes[-1].failed[:80] or 'nothing came through'})"
    return f"{_get_rate(probes) / 1e6:.0f} MB/s, {_get_ping(probes) * 1e3:.2f} ms"

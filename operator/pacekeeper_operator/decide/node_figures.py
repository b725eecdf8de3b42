"""Whether a node is slow, by what probe pods have measured of it and of others at the same time.

Only ratios count: what is fast on one kind of machine is slow on another, and a load that all share cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json, read_dataclass

from ..api import ProbeMetrics

SLOW_COMPUTE_RATIO = 1.3
"""A node whose cores take so many times as long as the others' is slow."""
SLOW_NETWORK_RATIO = 2.0
"""The same of its best way out, and in: what virtual machines and switches give varies more than cores do."""
SLOW_MEMORY_RATIO = 2.0
MIN_IDLE_SHARE_FOR_CORES, MIN_IDLE_SHARE_FOR_MEMORY = 0.75, 0.9
"""Share of a node's cores that others must have left idle for its cores, and its memory, to be held against it.

A thread's own processor time grows with work on its core's other hardware thread (by a half, mostly; nothing bounds
it), with what all cores together leave of the clock, and with a full memory bus: so a healthy node that somebody
computes on looks slow. While three quarters are idle, most of some cores drawn at random have an idle sibling, and the
clock is little lower. Memory takes more: a few dozen threads of a large node fill a socket's bus.

How busy the others were is no help, since one kind of work disturbs more than another. Nor is the pressure: threads
that a quota holds back count as waiting. Nor the clock: it is the first core's only, of a moment."""
MIN_COMPARED_NODES = 2
"""Of two nodes nobody can tell which one is slow."""
MAX_TERMINATION_MESSAGE_CHARACTERS = 4096
"""Of a termination message, as the kubelet cuts it off."""
_MIN_MEASURED_VALUE = 1e-9


def describe_slowness(node: str, measurements: Mapping[str, ProbeMetrics]) -> str:
    """Why `node` is slow beside the others that were looked at with it; "": it is not, or that cannot be told."""
    own = measurements.get(node)
    if own is None:
        return ""
    pace = _compute_work_seconds if _is_idle(own, MIN_IDLE_SHARE_FOR_CORES) else _compute_quota_slowdown
    memory = {n: f.memory_bytes_per_second for n, f in measurements.items()} if _is_idle(own, MIN_IDLE_SHARE_FOR_MEMORY) else {}
    words = (
        _describe_longer_time("its cores take", {name: pace(found) for name, found in measurements.items()}, node),
        _describe_lower_rate("it sends", _find_best_send_rates(measurements), node, SLOW_NETWORK_RATIO),
        _describe_lower_rate("it receives", _find_best_receive_rates(measurements), node, SLOW_NETWORK_RATIO),
        _describe_lower_rate("its memory takes", memory, node, SLOW_MEMORY_RATIO),
    )
    held = own.held_back > 0.1
    why = f" (held back for {own.held_back:.0%} of the time, not by other work)" if words[0] and held else ""
    return "; ".join(filter(None, (f"{words[0]}{why}", *words[1:])))


def read_measurements(message: str) -> tuple[ProbeMetrics | None, str]:
    """The figures in a probe pod's termination message, and why it finds the node unfit; nothing, where the message
    holds none. Whatever it says, it is somebody else's word: raises InputError that names the field."""
    try:
        data = parse_json(message) if len(message) <= MAX_TERMINATION_MESSAGE_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return None, ""
    if "unfit" in data:
        unfit = data["unfit"]
        if not isinstance(unfit, str):
            raise InputError("unfit: must be words")
        return None, unfit
    return read_dataclass(ProbeMetrics, data, "figures"), ""


def read_failed_check(message: str) -> tuple[str, bool]:
    """The check in which a probe pod found the node unfit, and whether it had GPUs to look at; ("", False): it does not
    say. It is somebody else's word: what makes no sense is not said."""
    try:
        data = parse_json(message) if len(message) <= MAX_TERMINATION_MESSAGE_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return "", False
    check, gpus = data.get("check"), data.get("gpus")
    return check if isinstance(check, str) else "", isinstance(gpus, int) and gpus > 0


def _is_idle(measurements: ProbeMetrics, share: float) -> bool:
    """Also where nobody tells how many cores were."""
    return measurements.idle_cores >= share * measurements.cores


def _compute_work_seconds(measurements: ProbeMetrics) -> float:
    """Seconds that a piece of work takes where only neighbours are left out."""
    return measurements.core_seconds / max(1.0 - measurements.held_back, 0.01)


def _compute_quota_slowdown(measurements: ProbeMetrics) -> float:
    """How many times as long work takes by what quotas take of its time: no neighbour sets one."""
    return 1.0 / max(1.0 - min(measurements.held_back, measurements.throttled), 0.01)


def _find_best_send_rates(measurements: Mapping[str, ProbeMetrics]) -> dict[str, float]:
    """Node → the best that it sends to any other: a slow peer is not held against it. Bytes a second."""
    best: dict[str, float] = {}
    for name, found in measurements.items():
        for link in found.links:
            best[name] = max(best.get(name, 0.0), link.up)
            if link.peer in measurements:
                best[link.peer] = max(best.get(link.peer, 0.0), link.down)
    return best


def _find_best_receive_rates(measurements: Mapping[str, ProbeMetrics]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, found in measurements.items():
        for link in found.links:
            best[name] = max(best.get(name, 0.0), link.down)
            if link.peer in measurements:
                best[link.peer] = max(best.get(link.peer, 0.0), link.up)
    return best


def _describe_longer_time(what: str, seconds: Mapping[str, float], node: str) -> str:
    ratio = _compare_with_median(seconds, node)
    return f"{what} {ratio:.1f} times as long as the others'" if ratio >= SLOW_COMPUTE_RATIO else ""


def _describe_lower_rate(what: str, rates: Mapping[str, float], node: str, limit: float) -> str:
    ratio = _compare_with_median(rates, node)
    if not 0.0 <= ratio <= 1.0 / limit:
        return ""
    return f"{what} {rates[node] / 1e6:.0f} MB/s, which is {ratio:.0%} of what the others do"


def _compare_with_median(values: Mapping[str, float], node: str) -> float:
    """The node's value over the median of the others'; -1: nothing to hold it against."""
    others = [value for name, value in values.items() if name != node and value > _MIN_MEASURED_VALUE]
    if node not in values or len(others) < MIN_COMPARED_NODES:
        return -1.0
    return values[node] / statistics.median(others)

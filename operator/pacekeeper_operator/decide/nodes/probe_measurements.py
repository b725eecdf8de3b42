"""Probe measurements: whether a node is slow, compared with other nodes that probe pods measured at the same time.

Only ratios count: a fast value on one kind of machine is slow on another, and a load that all share cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json, read_dataclass

from ...api.node_probe import ProbeMetrics

SLOW_COMPUTE_RATIO = 1.3
"""Ratio of a node's core time to that of the others from which on the node is slow."""
SLOW_NETWORK_RATIO = 2.0
"""The same ratio for the best send and receive rates. Virtual machines and switches vary more than cores do."""
SLOW_MEMORY_RATIO = 2.0
MIN_IDLE_SHARE_FOR_CORES, MIN_IDLE_SHARE_FOR_MEMORY = 0.75, 0.9
"""Least share of a node's cores that other work must leave idle for its core times, and its memory rate, to count.

A thread's own processor time grows with work on its core's other hardware thread (by a half, mostly, but without a
bound). It also grows when all cores together lower the clock, and with a full memory bus. So a healthy node that runs
other work looks slow. While three quarters are idle, most of the cores that a probe gets have an idle sibling, and the
clock is only a little lower. Memory needs a higher share: a few dozen threads of a large node fill a socket's bus.

How busy the others were does not help, since one kind of work disturbs more than another. Nor does the CPU pressure:
threads that a quota throttles count as waiting. Nor does the clock: it is the first core's only, at one moment."""
MIN_COMPARED_NODES = 2
"""Least number of other nodes to compare with. Between two nodes, a comparison does not show which one is slow."""
MAX_TERMINATION_MESSAGE_CHARACTERS = 4096
"""Length at which the kubelet truncates a termination message."""
MIN_REPORTED_HELD_BACK_SHARE = 0.1
"""Least share of the time for which a probe was held back, for messages to name it."""
_MIN_MEASURED_VALUE = 1e-9


def describe_slowness(node: str, measurements: Mapping[str, ProbeMetrics]) -> str:
    """Return why `node` is slower than the others that were probed with it; "": it is not, or this is not known."""
    own_metrics = measurements.get(node)
    if own_metrics is None:
        return ""
    measure = _compute_work_seconds if _is_idle(own_metrics, MIN_IDLE_SHARE_FOR_CORES) else _compute_quota_slowdown
    memory = (
        {n: f.memory_bytes_per_second for n, f in measurements.items()}
        if _is_idle(own_metrics, MIN_IDLE_SHARE_FOR_MEMORY)
        else {}
    )
    descriptions = (
        _describe_longer_time(
            "its cores take", {name: measure(metrics) for name, metrics in measurements.items()}, node
        ),
        _describe_lower_rate("it sends", _find_best_send_rates(measurements), node, SLOW_NETWORK_RATIO),
        _describe_lower_rate("it receives", _find_best_receive_rates(measurements), node, SLOW_NETWORK_RATIO),
        _describe_lower_rate("its memory takes", memory, node, SLOW_MEMORY_RATIO),
    )
    is_held_back = own_metrics.held_back > MIN_REPORTED_HELD_BACK_SHARE
    detail = (
        f" (held back for {own_metrics.held_back:.0%} of the time, not by other work)"
        if descriptions[0] and is_held_back
        else ""
    )
    return "; ".join(filter(None, (f"{descriptions[0]}{detail}", *descriptions[1:])))


def read_measurements(message: str) -> tuple[ProbeMetrics | None, str]:
    """Return the measurements in a probe pod's termination message, and why the pod finds the node unfit.

    (None, ""): the message holds neither. The message is not trusted. Raises InputError, which names the field.
    """
    try:
        data = parse_json(message) if len(message) <= MAX_TERMINATION_MESSAGE_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return None, ""
    if "unfit" in data:
        unfit_reason = data["unfit"]
        if not isinstance(unfit_reason, str):
            raise InputError("unfit: must be a string")
        return None, unfit_reason
    return read_dataclass(ProbeMetrics, data, "metrics"), ""


def read_failed_check(message: str) -> tuple[str, bool]:
    """Return the check in which a probe pod found the node unfit, and whether the pod had GPUs to check.

    ("", False): the message does not contain them. The message is not trusted: values of a wrong type are ignored.
    """
    try:
        data = parse_json(message) if len(message) <= MAX_TERMINATION_MESSAGE_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return "", False
    check, gpus = data.get("check"), data.get("gpus")
    return check if isinstance(check, str) else "", isinstance(gpus, int) and gpus > 0


def _is_idle(measurements: ProbeMetrics, share: float) -> bool:
    """Return whether other work left at least `share` of the cores idle; also if the number of cores is not known."""
    return measurements.idle_cores >= share * measurements.cores


def _compute_work_seconds(measurements: ProbeMetrics) -> float:
    """Return the seconds of a piece of work, without the time that other work on the node takes."""
    return measurements.core_seconds / max(1.0 - measurements.held_back, 0.01)


def _compute_quota_slowdown(measurements: ProbeMetrics) -> float:
    """Return how many times as long work takes because of quotas, which do not depend on other work on the node."""
    return 1.0 / max(1.0 - min(measurements.held_back, measurements.throttled), 0.01)


def _find_best_send_rates(measurements: Mapping[str, ProbeMetrics]) -> dict[str, float]:
    """Return each node's best send rate to any other, in bytes per second. A slow peer does not count against it."""
    best: dict[str, float] = {}
    for name, metrics in measurements.items():
        for link in metrics.links:
            best[name] = max(best.get(name, 0.0), link.up)
            if link.peer in measurements:
                best[link.peer] = max(best.get(link.peer, 0.0), link.down)
    return best


def _find_best_receive_rates(measurements: Mapping[str, ProbeMetrics]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, metrics in measurements.items():
        for link in metrics.links:
            best[name] = max(best.get(name, 0.0), link.down)
            if link.peer in measurements:
                best[link.peer] = max(best.get(link.peer, 0.0), link.up)
    return best


def _describe_longer_time(what: str, seconds: Mapping[str, float], node: str) -> str:
    ratio = _compare_with_median(seconds, node)
    if ratio is None or ratio < SLOW_COMPUTE_RATIO:
        return ""
    return f"{what} {ratio:.1f} times as long as the others'"


def _describe_lower_rate(what: str, rates: Mapping[str, float], node: str, limit: float) -> str:
    ratio = _compare_with_median(rates, node)
    if ratio is None or ratio > 1.0 / limit:
        return ""
    return f"{what} {rates[node] / 1e6:.0f} MB/s, which is {ratio:.0%} of what the others do"


def _compare_with_median(values: Mapping[str, float], node: str) -> float | None:
    """Return the node's value over the median of the others'; None: there is too little to compare with."""
    others = [value for name, value in values.items() if name != node and value > _MIN_MEASURED_VALUE]
    if node not in values or len(others) < MIN_COMPARED_NODES:
        return None
    return values[node] / statistics.median(others)

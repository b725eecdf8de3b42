"""Whether a node is slow, by what probe pods have measured of it and of others at the same time.

Only ratios count: what is fast on one kind of machine is slow on another, and a load that all share cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json, read

from ..api import ProbeFigures

COMPUTE_RATIO = 1.3
"""A node whose cores take so many times as long as the others' is slow."""
NETWORK_RATIO = 2.0
"""The same of its best way out, and in: what virtual machines and switches give varies more than cores do."""
MEMORY_RATIO = 2.0
FEWEST_OTHERS = 2
"""Of two nodes nobody can tell which one is slow."""
MAX_CHARACTERS = 4096
"""Of a termination message, as the kubelet cuts it off."""
_LEAST = 1e-9


def slow(node: str, figures: Mapping[str, ProbeFigures]) -> str:
    """Why `node` is slow beside the others that were looked at with it; "": it is not, or that cannot be told."""
    words = (
        _longer("its cores take", {name: _pace(found) for name, found in figures.items()}, node),
        _less("it sends", _ways_out(figures), node, NETWORK_RATIO),
        _less("it receives", _ways_in(figures), node, NETWORK_RATIO),
        _less("its memory takes", {n: f.memory_bytes_per_second for n, f in figures.items()}, node, MEMORY_RATIO),
    )
    held_back = figures[node].held_back if node in figures else 0.0
    why = f" (held back for {held_back:.0%} of the time, not by other work)" if words[0] and held_back > 0.1 else ""
    return "; ".join(filter(None, (f"{words[0]}{why}", *words[1:])))


def read_figures(message: str) -> tuple[ProbeFigures | None, str]:
    """The figures in a probe pod's termination message, and why it finds the node unfit; nothing, where the message
    holds none. Whatever it says, it is somebody else's word: raises InputError that names the field."""
    try:
        data = parse_json(message) if len(message) <= MAX_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return None, ""
    if "unfit" in data:
        unfit = data["unfit"]
        if not isinstance(unfit, str):
            raise InputError("unfit: must be words")
        return None, unfit
    return read(ProbeFigures, data, "figures"), ""


def _pace(figures: ProbeFigures) -> float:
    """Seconds that a piece of work takes where only neighbours are left out."""
    return figures.core_seconds / max(1.0 - figures.held_back, 0.01)


def _ways_out(figures: Mapping[str, ProbeFigures]) -> dict[str, float]:
    """Node → the best that it sends to any other: a slow peer is not held against it. Bytes a second."""
    best: dict[str, float] = {}
    for name, found in figures.items():
        for link in found.links:
            best[name] = max(best.get(name, 0.0), link.up)
            if link.peer in figures:
                best[link.peer] = max(best.get(link.peer, 0.0), link.down)
    return best


def _ways_in(figures: Mapping[str, ProbeFigures]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, found in figures.items():
        for link in found.links:
            best[name] = max(best.get(name, 0.0), link.down)
            if link.peer in figures:
                best[link.peer] = max(best.get(link.peer, 0.0), link.up)
    return best


def _longer(what: str, seconds: Mapping[str, float], node: str) -> str:
    ratio = _over_the_others(seconds, node)
    return f"{what} {ratio:.1f} times as long as the others'" if ratio >= COMPUTE_RATIO else ""


def _less(what: str, rates: Mapping[str, float], node: str, limit: float) -> str:
    ratio = _over_the_others(rates, node)
    if not 0.0 <= ratio <= 1.0 / limit:
        return ""
    return f"{what} {rates[node] / 1e6:.0f} MB/s, which is {ratio:.0%} of what the others do"


def _over_the_others(values: Mapping[str, float], node: str) -> float:
    """The node's value over the median of the others'; -1: nothing to hold it against."""
    others = [value for name, value in values.items() if name != node and value > _LEAST]
    if node not in values or len(others) < FEWEST_OTHERS:
        return -1.0
    return values[node] / statistics.median(others)

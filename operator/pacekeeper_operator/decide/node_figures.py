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
CORES_IDLE, MEMORY_IDLE = 0.75, 0.9
"""Share of a node's cores that others must have left idle for its cores, and its memory, to be held against it.

A thread's own processor time grows with work on its core's other hardware thread (by a half, mostly; nothing bounds
it), with what all cores together leave of the clock, and with a full memory bus: so a healthy node that somebody
computes on looks slow. While three quarters are idle, most of some cores drawn at random have an idle sibling, and the
clock is little lower. Memory takes more: a few dozen threads of a large node fill a socket's bus.

How busy the others were is no help, since one kind of work disturbs more than another. Nor is the pressure: threads
that a quota holds back count as waiting. Nor the clock: it is the first core's only, of a moment."""
FEWEST_OTHERS = 2
"""Of two nodes nobody can tell which one is slow."""
MAX_CHARACTERS = 4096
"""Of a termination message, as the kubelet cuts it off."""
_LEAST = 1e-9


def slow(node: str, figures: Mapping[str, ProbeFigures]) -> str:
    """Why `node` is slow beside the others that were looked at with it; "": it is not, or that cannot be told."""
    own = figures.get(node)
    if own is None:
        return ""
    pace = _pace if _idle(own, CORES_IDLE) else _pace_by_quota
    memory = {n: f.memory_bytes_per_second for n, f in figures.items()} if _idle(own, MEMORY_IDLE) else {}
    words = (
        _longer("its cores take", {name: pace(found) for name, found in figures.items()}, node),
        _less("it sends", _ways_out(figures), node, NETWORK_RATIO),
        _less("it receives", _ways_in(figures), node, NETWORK_RATIO),
        _less("its memory takes", memory, node, MEMORY_RATIO),
    )
    held = own.held_back > 0.1
    why = f" (held back for {own.held_back:.0%} of the time, not by other work)" if words[0] and held else ""
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


def read_check(message: str) -> tuple[str, bool]:
    """The check in which a probe pod found the node unfit, and whether it had GPUs to look at; ("", False): it does not
    say. It is somebody else's word: what makes no sense is not said."""
    try:
        data = parse_json(message) if len(message) <= MAX_CHARACTERS else None
    except InputError:
        data = None
    if not isinstance(data, dict):
        return "", False
    check, gpus = data.get("check"), data.get("gpus")
    return check if isinstance(check, str) else "", isinstance(gpus, int) and gpus > 0


def _idle(figures: ProbeFigures, share: float) -> bool:
    """Also where nobody tells how many cores were."""
    return figures.idle_cores >= share * figures.cores


def _pace(figures: ProbeFigures) -> float:
    """Seconds that a piece of work takes where only neighbours are left out."""
    return figures.core_seconds / max(1.0 - figures.held_back, 0.01)


def _pace_by_quota(figures: ProbeFigures) -> float:
    """How many times as long work takes by what quotas take of its time: no neighbour sets one."""
    return 1.0 / max(1.0 - min(figures.held_back, figures.throttled), 0.01)


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

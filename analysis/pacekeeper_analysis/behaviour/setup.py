"""What ranks' setups say against them: the static witnesses of a wrong setting, and those of a busy machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ..diagnose.finding import Signal, SignalKind
from .pattern import ProcessSetup

MIN_THROTTLED_SHARE = 0.05
"""Share of the periods (throttled) or of the time (delayed) from which it explains something."""
MIN_TRANSFERS_THROTTLED_SHARE = 0.25
"""Share of the periods from which a quota that holds a worker up holds up what its ranks send and receive, too."""
SLOW_VARIABLE_VALUES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "PYTHONDEVMODE": ("1",),
    "PYTHONASYNCIODEBUG": ("1",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_DEBUG": ("TRACE",),
}
"""Made for debugging, or for machines that can do no better."""
_SOCKET_VARIABLES = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")


def find_wrong_settings(setup: ProcessSetup) -> tuple[Signal, ...]:
    """What slows a rank down wherever it runs."""
    return tuple(Signal(SignalKind.SETTINGS, words) for words in _describe_wrong_settings(setup))


def compare_setups(setup: ProcessSetup, usual: Sequence[ProcessSetup], whose: str) -> tuple[Signal, ...]:
    """What is set otherwise than in all of `usual` alike; `whose` they are, for people."""
    return tuple(Signal(SignalKind.SETTINGS, words) for words in _describe_differences(setup, usual, whose))


def check_throttling(setup: ProcessSetup, usual: Sequence[ProcessSetup] = (), least: float = MIN_THROTTLED_SHARE) -> Signal | None:
    """Its processor quota holds it up, by `least` more than it does `usual`."""
    if setup.throttled < least + _compute_median([other.throttled for other in usual]):
        return None
    quota = f" of {setup.processors:g} processors" if setup.processors else ""
    words = f"the processor quota{quota} has held its worker up in {setup.throttled:.0%} of the periods"
    return Signal(SignalKind.PROCESS, words)


def check_scheduling_delay(setup: ProcessSetup, usual: Sequence[ProcessSetup] = ()) -> Signal | None:
    """Others have had the processors that it was ready to run on, more than with `usual`."""
    if setup.delayed < MIN_THROTTLED_SHARE + _compute_median([other.delayed for other in usual]):
        return None
    words = f"it was ready to run, and others had the processors, for {setup.delayed:.0%} of the time"
    return Signal(SignalKind.PROCESS, words)


def _describe_wrong_settings(setup: ProcessSetup) -> Iterator[str]:
    for given in setup.variables:
        name, _, value = given.partition("=")
        if value in SLOW_VARIABLE_VALUES.get(name, ()):
            yield f"{given} slows every step down"
        if given in _SOCKET_VARIABLES and setup.infiniband:
            yield f"{given} sends over sockets, although there is InfiniBand"
    if setup.anomalies:
        yield "autograd looks for anomalies in every step"
    ranks = max(setup.ranks, 1)
    if setup.threads == 1 and setup.processors >= 2 * ranks:
        yield f"operations have 1 thread, of {setup.processors / ranks:g} processors a rank"
    if setup.processors and setup.threads * ranks >= 2 * max(setup.processors, 1):
        yield f"operations of {ranks} ranks have {setup.threads} threads each, on {setup.processors:g} processors"


def _describe_differences(setup: ProcessSetup, usual: Sequence[ProcessSetup], whose: str) -> Iterator[str]:
    if not usual:
        return
    for name, words in (("threads", "threads of an operation"), ("processors", "processors")):
        others, mine = {getattr(other, name) for other in usual}, getattr(setup, name)
        if len(others) == 1 and mine and 0 not in others and mine not in others:
            yield f"{mine:g} {words}, {whose} {others.pop():g}"
    if setup.anomalies and not any(other.anomalies for other in usual):
        yield f"autograd looks for anomalies, unlike {whose}"
    common = set(usual[0].variables).intersection(*(other.variables for other in usual))
    known = set().union(*(other.variables for other in usual))
    for given in setup.variables:
        if given not in known:
            yield f"{given}, unlike {whose}"
    mine_named = {given.partition("=")[0] for given in setup.variables}
    for given in sorted(common):
        if given.partition("=")[0] not in mine_named:
            yield f"{given} is not set, unlike {whose}"


def _compute_median(values: Sequence[float]) -> float:
    return max(0.0, median(values)) if values else 0.0

"""Signals from the setups of ranks: wrong settings, and a busy machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ..failures.finding import Signal, SignalKind
from .pattern import ProcessSetup

MIN_THROTTLED_SHARE = 0.05
"""Share of the periods (throttled) or of the time (delayed) from which on it explains a slowdown."""
MIN_TRANSFERS_THROTTLED_SHARE = 0.25
"""Share of the periods from which on a throttled worker also sends and receives late."""
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
"""Values for debugging, or for machines without better options."""
_SOCKET_VARIABLES = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")


def find_wrong_settings(setup: ProcessSetup) -> tuple[Signal, ...]:
    """Return settings that slow a rank down on any machine."""
    return tuple(Signal(SignalKind.SETTINGS, message) for message in _describe_wrong_settings(setup))


def compare_setups(setup: ProcessSetup, usual: Sequence[ProcessSetup], compared_with: str) -> tuple[Signal, ...]:
    """Return settings that differ from all of `usual`, which agree. `compared_with` names these, for people."""
    return tuple(Signal(SignalKind.SETTINGS, message) for message in _describe_differences(setup, usual, compared_with))


def check_throttling(
    setup: ProcessSetup, usual: Sequence[ProcessSetup] = (), min_excess: float = MIN_THROTTLED_SHARE
) -> Signal | None:
    """Return a signal if the CPU quota throttles the worker, by `min_excess` more than it does `usual`."""
    usual_share = _compute_median([usual_setup.throttled for usual_setup in usual])
    if setup.throttled is None or setup.throttled < min_excess + usual_share:
        return None
    quota = f" of {setup.processors:g} processors" if setup.processors is not None else ""
    message = f"the processor quota{quota} has throttled its worker in {setup.throttled:.0%} of the periods"
    return Signal(SignalKind.PROCESS, message)


def check_scheduling_delay(setup: ProcessSetup, usual: Sequence[ProcessSetup] = ()) -> Signal | None:
    """Return a signal if others had the CPUs that the rank was ready to run on, more than with `usual`."""
    usual_share = _compute_median([usual_setup.delayed for usual_setup in usual])
    if setup.delayed is None or setup.delayed < MIN_THROTTLED_SHARE + usual_share:
        return None
    message = f"it was ready to run while others had the processors for {setup.delayed:.0%} of the time"
    return Signal(SignalKind.PROCESS, message)


def _describe_wrong_settings(setup: ProcessSetup) -> Iterator[str]:
    for variable in setup.variables:
        name, _, value = variable.partition("=")
        if value in SLOW_VARIABLE_VALUES.get(name, ()):
            yield f"{variable} slows every step down"
        if variable in _SOCKET_VARIABLES and setup.infiniband:
            yield f"{variable} sends over sockets, although there is InfiniBand"
    if setup.anomalies:
        yield "autograd anomaly detection is on in every step"
    ranks = setup.ranks or 1
    if setup.threads is None or setup.processors is None:
        return
    if setup.threads == 1 and setup.processors >= 2 * ranks:
        yield f"operations have 1 thread, but each rank has {setup.processors / ranks:g} processors"
    if setup.threads * ranks >= 2 * max(setup.processors, 1):
        yield f"operations of {ranks} ranks have {setup.threads} threads each, on {setup.processors:g} processors"


def _describe_differences(setup: ProcessSetup, usual: Sequence[ProcessSetup], compared_with: str) -> Iterator[str]:
    if not usual:
        return
    for name, label in (("threads", "threads of an operation"), ("processors", "processors")):
        usual_values, value = {getattr(usual_setup, name) for usual_setup in usual}, getattr(setup, name)
        if len(usual_values) == 1 and value is not None and not usual_values & {None, value}:
            yield f"{value:g} {label}, {compared_with} {usual_values.pop():g}"
    if setup.anomalies and not any(usual_setup.anomalies for usual_setup in usual):
        yield f"autograd anomaly detection is on, unlike {compared_with}"
    common_variables = set(usual[0].variables).intersection(*(usual_setup.variables for usual_setup in usual))
    usual_variables = set().union(*(usual_setup.variables for usual_setup in usual))
    for variable in setup.variables:
        if variable not in usual_variables:
            yield f"{variable}, unlike {compared_with}"
    set_names = {variable.partition("=")[0] for variable in setup.variables}
    for variable in sorted(common_variables):
        if variable.partition("=")[0] not in set_names:
            yield f"{variable} is not set, unlike {compared_with}"


def _compute_median(shares: Sequence[float | None]) -> float:
    return median(share or 0.0 for share in shares) if shares else 0.0

"""The result of a diagnosis: culprit, class of the fault, the signals that support it, and the confidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from ..protocol.decoding import MaxLength, Truncated, Within
from .confidence import estimate_confidence


def merge_findings(earlier: Finding | None, new: Finding) -> Finding:
    """Merge two findings: all signals, with the newest text of each kind.

    Class, culprit and advice come from the finding with the stronger signal, or from the newer one if they are equally
    strong. A finding without a culprit overrides only findings of its own class.
    """
    if earlier is None:
        return add_confidence(new)
    signals = {signal.kind: signal for signal in (*earlier.signals, *new.signals)}
    candidates = [finding for finding in (new, earlier) if finding.fault is not FaultClass.UNKNOWN] or [new]
    if len({finding.fault for finding in candidates}) > 1:
        candidates = [finding for finding in candidates if finding.culprit] or candidates
    leading = max(candidates, key=lambda finding: finding.strength)
    return add_confidence(replace(leading, signals=tuple(signals.values())))


def add_confidence(finding: Finding) -> Finding:
    """Return the finding with the measured confidence of its signals."""
    return replace(
        finding, confidence=estimate_confidence(finding.fault.value, [kind.value for kind in finding.signal_kinds])
    )


class FaultClass(StrEnum):
    """The class of a fault, which decides who repairs it."""

    HARDWARE = "Hardware"  # of a rank's machine: it follows the node
    NETWORK = "Network"  # a link, or one machine's connection to the others
    CONFIGURATION = "Configuration"  # the setup: quota, threads, sockets, flags
    CODE = "Code"  # the script's own actions
    DATA = "Data"  # its samples, or their source
    UNKNOWN = "Unknown"


class SignalKind(StrEnum):
    """The origin of a signal. Two signals of the same kind count as one."""

    TIMES = "Times"  # own work and steps of the ranks, by what-if analysis
    WAITS = "Waits"  # which rank waited for which, by the wait-for graph
    TRANSPORT = "Transport"  # the kernel's records of connections, or NCCL's records of transfers
    PROBE = "Probe"  # an active test, between launchers or by the operator's own pod
    STACK = "Stack"  # the call stack of a process
    PROCESS = "Process"  # process state in the kernel: stopped, gone, throttled, out of memory
    PROFILE = "Profile"  # what its functions did in a profile window
    GPU = "Gpu"  # NVML or DCGM
    NODE = "Node"  # a condition of the node, or reports of other jobs
    SETTINGS = "Settings"  # the settings of the job's start
    HISTORY = "History"  # the job's own earlier steps, or earlier incidents


SIGNAL_KINDS_BY_STRENGTH = (
    SignalKind.PROBE,
    SignalKind.GPU,
    SignalKind.NODE,
    SignalKind.PROCESS,
    SignalKind.PROFILE,
    SignalKind.STACK,
    SignalKind.SETTINGS,
    SignalKind.TRANSPORT,
    SignalKind.WAITS,
    SignalKind.TIMES,
    SignalKind.HISTORY,
)
"""Strongest first: tested or observed evidence precedes inferred evidence."""


@dataclass(frozen=True)
class Signal:
    """One piece of evidence, with a sentence for people."""

    kind: SignalKind
    message: Annotated[str, Truncated(2048)]


@dataclass(frozen=True)
class Finding:
    """The diagnosis of one incident.

    `confidence` is how often evidence of these kinds was right in `bench/diagnosis.py`. None means that it was never
    tried.
    """

    fault: FaultClass
    culprit: Annotated[str, Truncated(512)]  # "rank 3", "link 0 → 1", "train.py:load", "all ranks"; "": no culprit
    signals: Annotated[tuple[Signal, ...], MaxLength(16)] = ()
    confidence: Annotated[float | None, Within(0, 1)] = None
    advice: Annotated[str, Truncated(1024)] = ""  # recommended action, in a sentence for people

    @property
    def signal_kinds(self) -> frozenset[SignalKind]:
        return frozenset(signal.kind for signal in self.signals)

    @property
    def strength(self) -> int:
        """The strength of its strongest signal. 0 if it has none."""
        return max(
            (len(SIGNAL_KINDS_BY_STRENGTH) - SIGNAL_KINDS_BY_STRENGTH.index(kind) for kind in self.signal_kinds),
            default=0,
        )

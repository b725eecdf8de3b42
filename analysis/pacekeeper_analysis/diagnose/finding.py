"""What a diagnosis comes to: who or what is to blame, what kind of fault it is, by which witnesses, and how sure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from ..reading import Truncated, MaxLength, Within
from .confidence import estimate_confidence


def merge_findings(before: Finding | None, new: Finding) -> Finding:
    """What both say together: all witnesses, the newest words of each kind; class, culprit and advice of the one that
    the stronger witness speaks for, the newer one where they are as strong. One that names nobody clears
    those of its own class alone."""
    if before is None:
        return add_confidence(new)
    witnesses = {witness.kind: witness for witness in (*before.witnesses, *new.witnesses)}
    said = [finding for finding in (new, before) if finding.fault is not FaultClass.UNKNOWN] or [new]
    if len({finding.fault for finding in said}) > 1:
        said = [finding for finding in said if finding.culprit] or said
    leading = max(said, key=lambda finding: finding.strength)
    return add_confidence(replace(leading, witnesses=tuple(witnesses.values())))


def add_confidence(finding: Finding) -> Finding:
    """With the confidence that its evidence has."""
    return replace(finding, confidence=estimate_confidence(finding.fault.value, [kind.value for kind in finding.signal_kinds]))


class FaultClass(StrEnum):
    """What kind of fault it is, and so who mends it."""

    HARDWARE = "Hardware"  # of a rank's machine: it follows the node
    NETWORK = "Network"  # a link, or one machine's way to the others
    CONFIGURATION = "Configuration"  # how it is set up: quota, threads, sockets, flags
    CODE = "Code"  # what the script does
    DATA = "Data"  # its samples, or where they come from
    UNKNOWN = "Unknown"


class SignalKind(StrEnum):
    """Where a piece of evidence comes from. Two of the same kind count as one."""

    TIMES = "Times"  # own work and steps of the ranks, by what-if analysis
    WAITS = "Waits"  # who waited for whom, by the wait-for graph
    TRANSPORT = "Transport"  # the kernel's records of connections, or NCCL's of transfers
    PROBE = "Probe"  # an active test, between launchers or by the operator's own pod
    STACK = "Stack"  # where a process stands
    PROCESS = "Process"  # what the kernel says of it: stopped, gone, throttled, out of memory
    BEHAVIOUR = "Behaviour"  # what its functions did in a profiled window
    GPU = "Gpu"  # NVML or DCGM
    NODE = "Node"  # a condition of the node, or what other jobs say
    SETTINGS = "Settings"  # what the job was started with
    HISTORY = "History"  # the job's own earlier steps, or earlier incidents


SIGNAL_KINDS_BY_STRENGTH = (
    SignalKind.PROBE,
    SignalKind.GPU,
    SignalKind.NODE,
    SignalKind.PROCESS,
    SignalKind.BEHAVIOUR,
    SignalKind.STACK,
    SignalKind.SETTINGS,
    SignalKind.TRANSPORT,
    SignalKind.WAITS,
    SignalKind.TIMES,
    SignalKind.HISTORY,
)
"""Strongest first: what was tested or seen goes before what was inferred."""


@dataclass(frozen=True)
class Signal:
    """One piece of evidence, in a sentence for people."""

    kind: SignalKind
    words: Annotated[str, Truncated(2048)]


@dataclass(frozen=True)
class Finding:
    """The verdict of one incident. `confidence`: how often evidence of these kinds was right in `bench/diagnosis.py`;
    None: it was never tried."""

    fault: FaultClass
    culprit: Annotated[str, Truncated(512)]  # "rank 3", "link 0 → 1", "train.py:load", "all ranks"; "": nobody is named
    witnesses: Annotated[tuple[Signal, ...], MaxLength(16)] = ()
    confidence: Annotated[float | None, Within(0, 1)] = None
    advice: Annotated[str, Truncated(1024)] = ""  # what to do, in a sentence for people

    @property
    def signal_kinds(self) -> frozenset[SignalKind]:
        return frozenset(witness.kind for witness in self.witnesses)

    @property
    def strength(self) -> int:
        """Of its strongest witness; 0: it has none."""
        return max((len(SIGNAL_KINDS_BY_STRENGTH) - SIGNAL_KINDS_BY_STRENGTH.index(kind) for kind in self.signal_kinds), default=0)

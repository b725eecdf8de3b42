"""What a diagnosis comes to: who or what is to blame, what kind of fault it is, by which witnesses, and how sure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultClass(StrEnum):
    """What kind of fault it is, and so who mends it."""

    HARDWARE = "Hardware"  # of a rank's machine: it follows the node
    NETWORK = "Network"  # a link, or one machine's way to the others
    CONFIGURATION = "Configuration"  # how it is set up: quota, threads, sockets, flags
    CODE = "Code"  # what the script does
    DATA = "Data"  # its samples, or where they come from
    UNKNOWN = "Unknown"


class WitnessKind(StrEnum):
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


@dataclass(frozen=True)
class Witness:
    """One piece of evidence, in a sentence for people."""

    kind: WitnessKind
    words: str


@dataclass(frozen=True)
class Finding:
    """The verdict of one incident. `confidence`: how often evidence of these kinds was right in `bench/diagnosis.py`;
    None: it was never tried."""

    fault: FaultClass
    culprit: str  # for people: "rank 3", "link 0 → 1", "train.py:load", "all ranks"; "": nobody is named
    witnesses: tuple[Witness, ...] = ()
    confidence: float | None = None
    advice: str = ""  # what to do, in a sentence for people

    @property
    def kinds(self) -> frozenset[WitnessKind]:
        return frozenset(witness.kind for witness in self.witnesses)

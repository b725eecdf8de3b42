"""Faults in words, for the log."""

from __future__ import annotations

import signal

from pacekeeper_analysis.reports import FaultReport, FaultKind


def describe_fault(fault: FaultReport) -> str:
    """One line."""
    match fault.kind:
        case FaultKind.RANK_FAILED:
            memory = ", out of memory" if fault.out_of_memory else ""
            after = f"after step {fault.step}" if fault.step >= 0 else "before its first step"
            last = fault.error.strip().rpartition("\n")[2]
            if fault.ended_peer >= 0:
                after += f", waiting for rank {fault.ended_peer}, which had come to its end with code 0"
            ended = f"rank {fault.rank} {_describe_exit(fault.exit_code)}{memory} in round {fault.round} {after}"
            return f"{ended}: {last}" if last else ended
        case FaultKind.STALLED:
            waiting = max((rank.waiting_seconds for rank in fault.ranks), default=0.0)
            gone = f", no answer from {', '.join(fault.unreachable)}" if fault.unreachable else ""
            return f"no progress for {waiting:.1f} s in round {fault.round} behind step {fault.step}{gone}"
        case _:
            return f"{fault.kind} in round {fault.round}: {fault.error}".removesuffix(": ")


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-exit_code}"

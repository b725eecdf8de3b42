"""Text of faults, for the log."""

from __future__ import annotations

import signal

from pacekeeper_analysis.failures.crash import describe_reached_step
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport


def describe_fault(fault: FaultReport) -> str:
    """Format a fault as one line."""
    match fault.kind:
        case FaultKind.RANK_FAILED:
            memory = ", out of memory" if fault.out_of_memory else ""
            progress = describe_reached_step(fault.step)
            last_line = fault.error.strip().rpartition("\n")[2]
            if fault.ended_peer is not None:
                progress += f", waiting for rank {fault.ended_peer}, which had exited with code 0"
            summary = f"rank {fault.rank} {_describe_exit(fault.exit_code)}{memory} in round {fault.round} {progress}"
            return f"{summary}: {last_line}" if last_line else summary
        case FaultKind.STALLED:
            waiting = max((rank.waiting_seconds for rank in fault.ranks), default=0.0)
            unreachable = f", no answer from {', '.join(fault.unreachable)}" if fault.unreachable else ""
            progress = describe_reached_step(fault.step)
            return f"no progress for {waiting:.1f} s in round {fault.round} {progress}{unreachable}"
        case _:
            return f"{fault.kind} in round {fault.round}: {fault.error}".removesuffix(": ")


def _describe_exit(exit_code: int) -> str:
    if exit_code == 0:
        return "ended without a message; its exit code is not known"
    if exit_code > 0:
        return f"ended with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-exit_code}"

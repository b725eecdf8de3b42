"""Tells whether a rank failed because a peer was gone.

Such a failure is a consequence, not the cause of a round's end.
"""

from __future__ import annotations

import re
import signal

from ..protocol.reports import FaultReport

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|connection.{0,200}\bpeer|broken pipe|no route to host|nccl(Remote|System)Error"
    r"|remote process exited",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and the sockets below them when a peer is gone.

The search after each `connection` is limited to 200 characters, because scripts may write any text. A search to the end
of the line would take minutes for a MiB of that word.
"""
_WATCHDOG_ABORT = re.compile(
    r"watchdog thread terminated with exception|watchdog caught collective operation timeout"
    r"|ProcessGroupNCCL('s)? watchdog (got stuck|hang)",
    re.IGNORECASE,
)
"""Messages of the watchdog of torch's NCCL process group before it aborts its process."""
_OWN_LOADER_LOST = re.compile(r"DataLoader worker \(pid.{0,200}?\) (is killed|exited unexpectedly)")
"""Message of torch when a data loader process is gone. Its pipe may report a lost peer at the same time."""
_OWN_GPU_ERROR = re.compile(r"CUDA error: ")
"""The watchdog is often the first to see an error of the rank's own kernels."""


def is_peer_consequence(fault: FaultReport) -> bool:
    """Return whether the rank failed because a peer was gone. A peer that ended with success does not count."""
    return fault.ended_peer is None and not fault.out_of_memory and is_peer_loss(fault.exit_code, fault.error)


def is_peer_loss(exit_code: int, error: str) -> bool:
    """Return whether an exit indicates a lost peer.

    `exit_code` is negative for a signal. `error` is the last output of the rank to its standard error.
    """
    if _OWN_LOADER_LOST.search(error) is not None:
        return False
    if exit_code == -signal.SIGABRT:
        return _WATCHDOG_ABORT.search(error) is not None and _OWN_GPU_ERROR.search(error) is None
    return exit_code > 0 and _CONNECTION_LOST.search(error) is not None


def describe_reached_step(step: int | None) -> str:
    """Return when a rank stopped, by its last completed step; None: it has completed none."""
    return "before its first step" if step is None else f"after step {step}"

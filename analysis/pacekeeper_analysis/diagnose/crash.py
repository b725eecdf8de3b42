"""Whether a rank has failed because a peer was gone: a consequence, and never the best explanation of a round's end."""

from __future__ import annotations

import re
import signal

from ..reports import FaultReport

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|connection.{0,200}\bpeer|broken pipe|no route to host|nccl(Remote|System)Error"
    r"|remote process exited",
    re.IGNORECASE,
)
"""What gloo, NCCL and the sockets below them say when a peer has gone. It looks so far behind each `connection` only,
since scripts may write anything: to the end of the line, a MiB of that word would take minutes."""
_WATCHDOG_ABORT = re.compile(
    r"watchdog thread terminated with exception|watchdog caught collective operation timeout"
    r"|ProcessGroupNCCL('s)? watchdog (got stuck|hang)",
    re.IGNORECASE,
)
"""What the watchdog of torch's NCCL process group says before it aborts its process."""
_OWN_LOADER_LOST = re.compile(r"DataLoader worker \(pid.{0,200}?\) (is killed|exited unexpectedly)")
"""What torch says when a loader's process is gone, whose pipe may say in the same breath that its peer is."""
_OWN_GPU_ERROR = re.compile(r"CUDA error: ")
"""That watchdog is often the first to meet an error of the rank's own kernels."""


def is_peer_consequence(fault: FaultReport) -> bool:
    """Whether the rank failed because a peer was gone that had not come to its own good end."""
    return fault.ended_peer < 0 and not fault.out_of_memory and is_peer_loss(fault.exit_code, fault.error)


def is_peer_loss(exit_code: int, error: str) -> bool:
    """exit_code: negative: the signal. error: the last that the rank has written to its standard error."""
    if _OWN_LOADER_LOST.search(error) is not None:
        return False
    if exit_code == -signal.SIGABRT:
        return _WATCHDOG_ABORT.search(error) is not None and _OWN_GPU_ERROR.search(error) is None
    return exit_code > 0 and _CONNECTION_LOST.search(error) is not None

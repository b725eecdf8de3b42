"""Whether a rank has failed because a peer was gone: a consequence, and never the best explanation of a round's end."""

from __future__ import annotations

import re
import signal

_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|connection.{0,200}\bpeer|broken pipe|no route to host|nccl(Remote|System)Error"
    r"|remote process exited",
    re.IGNORECASE,
)
"""What gloo, NCCL and the sockets below them say when a peer has gone. It looks so far behind each `connection` only,
since scripts may write anything: to the end of the line, a MiB of that word would take minutes."""
_WATCHDOG = re.compile(
    r"watchdog thread terminated with exception|watchdog caught collective operation timeout"
    r"|ProcessGroupNCCL('s)? watchdog (got stuck|hang)",
    re.IGNORECASE,
)
"""What the watchdog of torch's NCCL process group says before it aborts its process."""
_OWN_GPU = re.compile(r"CUDA error: ")
"""That watchdog is often the first to meet an error of the rank's own kernels."""


def lost_a_peer(exit_code: int, error: str) -> bool:
    """exit_code: negative: the signal. error: the last that the rank has written to its standard error."""
    if exit_code == -signal.SIGABRT:
        return _WATCHDOG.search(error) is not None and _OWN_GPU.search(error) is None
    return exit_code > 0 and _CONNECTION.search(error) is not None

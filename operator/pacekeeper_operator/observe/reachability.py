"""Probes by which the operator checks whether a worker and its node are reachable.

A probe that could not be tried has no result (None). It shows nothing about the other
side: there was no free file descriptor, no free port, or no route, or the event loop was blocked.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from weakref import WeakKeyDictionary

from .. import file_limits
from ..api.names import METRICS_PORT

REACH_TIMEOUT_SECONDS = 0.4
REACH_TIMEOUT_SLACK_SECONDS = 0.2
"""A time-out that is detected later than this was not handled in time: an answer may be unread."""
REACH_LOOP_ITERATIONS = 8
"""Iterations of the event loop within which an answered connection is established."""
REACH_ATTEMPTS = 2
"""The second attempt replaces the retransmission of a lost packet."""
REACH_SLOT_TIMEOUT_SECONDS = 15.0
"""Longest wait of a probe for its slot."""
KUBELET_PORT = 10250
_LOCAL_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN}
)
"""Errors that concern this machine only."""
_probe_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Slots of all probes of this process, which share its file descriptors."""


async def can_reach_worker(address: str, port: int = METRICS_PORT) -> bool | None:
    """Return whether the sidecar's port accepts connections; None: it could not be tried.

    The port is that of `manifests.compute_metrics_port`.
    """
    return await _probe_in_slot(address, port)


async def can_reach_node(address: str) -> bool | None:
    """Return whether the kubelet's port accepts connections; None: it could not be tried."""
    return await _probe_in_slot(address, KUBELET_PORT)


async def _probe_in_slot(address: str, port: int) -> bool | None:
    loop = asyncio.get_running_loop()
    slots = _probe_slots.get(loop)
    if slots is None:
        slots = _probe_slots[loop] = asyncio.Semaphore(file_limits.read_file_limits().probes)
    try:
        async with asyncio.timeout(REACH_SLOT_TIMEOUT_SECONDS):
            await slots.acquire()
    except TimeoutError:
        return None
    try:
        return await _probe_port(address, port)
    finally:
        slots.release()


async def _probe_port(address: str, port: int) -> bool | None:
    """Return whether a port is reachable; None: it could not be tried.

    A refused connection counts as reachable. One attempt that failed due to the other side counts as unreachable.
    """
    loop, reachable = asyncio.get_running_loop(), None
    for _ in range(REACH_ATTEMPTS):
        began = loop.time()
        try:
            await _connect_once(address, port)
            return True
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            tried = loop.time() - began < REACH_TIMEOUT_SECONDS + REACH_TIMEOUT_SLACK_SECONDS
        except OSError as error:
            tried = not _is_local_error(error, address)
        reachable = False if tried else reachable
    return reachable


async def _connect_once(address: str, port: int) -> None:
    """Open a connection.

    Raises OSError, and TimeoutError if there is no answer within REACH_TIMEOUT_SECONDS after the kernel has sent the
    request. An answer that is unread because the event loop is busy counts.
    """
    connecting = asyncio.gather(asyncio.open_connection(address, port))
    try:
        for seconds in (
            0.0,
            REACH_TIMEOUT_SECONDS,
            *REACH_LOOP_ITERATIONS * (0.0,),
        ):  # after the first iteration it is under way
            await asyncio.wait({connecting}, timeout=seconds)
    finally:
        answered = connecting.done()
        connecting.cancel()
        await asyncio.wait({connecting})  # its file descriptor is free
        failure = connecting.exception()
    if not answered:
        raise TimeoutError
    if failure is not None:
        raise failure
    ((_, writer),) = connecting.result()
    writer.close()


def _is_local_error(error: OSError, address: str) -> bool:
    """Return whether the error shows nothing about the other side.

    A missing route may be reported by a router, because the other side is gone. If it is reported by this machine, it
    has no route for datagrams, either.
    """
    if isinstance(error, socket.gaierror) or error.errno in _LOCAL_ERRORS:
        return True
    if error.errno != errno.ENETUNREACH:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, KUBELET_PORT))  # sends nothing
    except OSError:
        return True
    return False

"""The operator's own look at a worker and its node: is anybody there?

"I could not try" is no answer: without a free file, a free port or a route of its own, or held up itself, the operator
learns nothing of the other side, and says so (None).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from weakref import WeakKeyDictionary

from .. import files
from ..api import METRICS_PORT

REACH_TIMEOUT_SECONDS = 0.4
REACH_TIMEOUT_SLACK_SECONDS = 0.2
"""A time-out that comes later than this was not looked after in time: an answer may lie there unread."""
REACH_LOOP_ITERATIONS = 8
"""Of the event loop: in fewer a connection that has been answered is made."""
REACH_ATTEMPTS = 2
"""The second try is the retransmission that a lost packet deserves."""
REACH_SLOT_TIMEOUT_SECONDS = 15.0
"""So long a probe may wait for its turn."""
KUBELET_PORT = 10250
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN})
"""Errors that speak of this machine only."""
_probe_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Of all probes of this process: what they share is its files."""


async def can_reach_worker(address: str, port: int = METRICS_PORT) -> bool | None:
    """Whether the sidecar's port (`manifests.metrics_port`) can be connected to; None: that could not be tried."""
    return await _probe_in_slot(address, port)


async def can_reach_node(address: str) -> bool | None:
    """Whether the kubelet's port can be connected to; None: that could not be tried."""
    return await _probe_in_slot(address, KUBELET_PORT)


async def _probe_in_slot(address: str, port: int) -> bool | None:
    loop = asyncio.get_running_loop()
    turns = _probe_slots.get(loop)
    if turns is None:
        turns = _probe_slots[loop] = asyncio.Semaphore(files.read_file_limits().probes)
    try:
        async with asyncio.timeout(REACH_SLOT_TIMEOUT_SECONDS):
            await turns.acquire()
    except TimeoutError:
        return None
    try:
        return await _probe_port(address, port)
    finally:
        turns.release()


async def _probe_port(address: str, port: int) -> bool | None:
    """A refused connection is an answer too: somebody is there. One try that came to nothing by the other side's fault
    is an answer; where both were kept from being any, there is none."""
    loop, answer = asyncio.get_running_loop(), None
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
        answer = False if tried else answer
    return answer


async def _connect_once(address: str, port: int) -> None:
    """Raises TimeoutError where no answer has come TIMEOUT_SECONDS after the kernel has asked: one that lies there
    unread, because the event loop has much to do, counts. Raises OSError."""
    connecting = asyncio.gather(asyncio.open_connection(address, port))
    try:
        for seconds in (0.0, REACH_TIMEOUT_SECONDS, *REACH_LOOP_ITERATIONS * (0.0,)):  # after the first turn it is under way
            await asyncio.wait({connecting}, timeout=seconds)
    finally:
        answered = connecting.done()
        connecting.cancel()
        await asyncio.wait({connecting})  # its file is free
        failure = connecting.exception()
    if not answered:
        raise TimeoutError
    if failure is not None:
        raise failure
    ((_, writer),) = connecting.result()
    writer.close()


def _is_local_error(error: OSError, address: str) -> bool:
    """Whether it says nothing of the other side. That there is no route may be a router's word, who knows that the
    place is gone; or this machine's, which then has none for datagrams either."""
    if isinstance(error, socket.gaierror) or error.errno in _LOCAL_ERRORS:
        return True
    if error.errno != errno.ENETUNREACH:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asks:
            asks.connect((address, KUBELET_PORT))  # sends nothing
    except OSError:
        return True
    return False

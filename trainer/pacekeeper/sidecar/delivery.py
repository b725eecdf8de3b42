"""Delivers to an operator that may be away for hours: each delivery is repeated until it is accepted or rejected."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable

from .operator_client import OperatorUnavailable, RequestRejected

log = logging.getLogger(__name__)


async def deliver_report(sending: Awaitable[None], name: str, backoff: RetryBackoff) -> bool:
    """Return whether `sending` is settled: accepted, or rejected for good. If not, return after a delay."""
    try:
        await sending
    except RequestRejected as error:
        log.error("%s dropped: %s", name, error)
    except OperatorUnavailable as error:
        await backoff.sleep(f"{name} not accepted", error)
        return False
    backoff.reset()
    return True


class RetryBackoff:
    """Delays that double from 0.2 s to 5 s, with jitter, so that thousands of sidecars do not reconnect at once."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    async def sleep(self, problem: str, error: Exception) -> None:
        if self._next == self._first:
            log.warning("%s: %s", problem, error)
        await asyncio.sleep(self._next * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, self._longest)

"""Writes a job's status next to its passes, one write at a time, so that the last one wins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import kopf

from .. import metrics
from ..async_runtime import OperatorRuntime
from ..limits import Backoff

STATUS_WRITE_WAIT_SECONDS = 0.02
"""Maximum seconds that a pass waits for its status write: a busy API server must not delay it further."""
FIRST_STATUS_BACKOFF_SECONDS, LONGEST_STATUS_BACKOFF_SECONDS = 0.5, 30.0
log = logging.getLogger(__name__)


@dataclass
class StatusWriter:
    """The status writer of one job. A failed write fails no pass: it is retried with backoff."""

    runtime: OperatorRuntime
    wake: Callable[[], None]
    """Requests a pass: there is a status to write, or to write again."""
    name: str = ""
    _writing: asyncio.Task[None] | None = None
    _has_deferred: bool = False  # a write was deferred while this one ran
    _backoff: Backoff = field(
        default_factory=lambda: Backoff(FIRST_STATUS_BACKOFF_SECONDS, LONGEST_STATUS_BACKOFF_SECONDS)
    )

    def defer_if_busy(self) -> bool:
        """Return whether nothing can be written now: a write runs, or rests after a failure.

        At its end a pass is woken, which builds the status again.
        """
        self._has_deferred = self._writing is not None and not self._writing.done()
        return self._has_deferred

    @property
    def has_failed(self) -> bool:
        """Return whether the last write failed. The API server may have executed it all the same."""
        return self._backoff.is_failing

    async def write(self, work: Callable[[], Coroutine[Any, Any, None]], *, waits: bool = True) -> None:
        """Start a write, unless `defer_if_busy` is true. `waits`: wait for it for a moment."""
        self._writing = self.runtime.start_task(self._write(work()), f"{self.name}: its status")
        if not waits:
            return
        with suppress(TimeoutError):
            await self.runtime.run_with_timeout(STATUS_WRITE_WAIT_SECONDS, asyncio.wait({self._writing}))

    async def close(self) -> None:
        """Cancel a running write. The API server may still execute it."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._backoff.record_success()
        except Exception as error:
            pause, self._has_deferred = self._backoff.record_failure(), True
            metrics.STATUS_FAILURES.inc()
            is_expected = isinstance(error, kopf.TemporaryError | kopf.PermanentError)
            log.log(
                logging.WARNING if is_expected else logging.ERROR,
                "%s: writing the status failed: %s; retrying in %.1f s",
                self.name,
                error,
                pause,
                exc_info=None if is_expected else error,
            )
            await self.runtime.sleep(pause)
        if self._has_deferred:
            self._has_deferred = False
            self.wake()

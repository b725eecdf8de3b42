"""Writes a job's status beside its passes, one word after the other, so that the last one is the last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import kopf

from .. import metrics
from ..limits import Backoff
from ..runtime import OperatorRuntime

STATUS_WRITE_WAIT_SECONDS = 0.02
"""So long a pass waits for its word to be written, where it does: for an API server that has much to do, no longer."""
FIRST_STATUS_BACKOFF_SECONDS, LONGEST_STATUS_BACKOFF_SECONDS = 0.5, 30.0
log = logging.getLogger(__name__)


@dataclass
class StatusWriter:
    """Of one job. What fails fails no pass: it is tried again, ever more slowly."""

    runtime: OperatorRuntime
    wake: Callable[[], None]
    """A pass is wanted: there is something to say, or to say again."""
    name: str = ""
    _writing: asyncio.Task[None] | None = None
    _has_deferred: bool = False  # something was to be said meanwhile
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_STATUS_BACKOFF_SECONDS, LONGEST_STATUS_BACKOFF_SECONDS))

    def defer_if_busy(self) -> bool:
        """Whether nothing can be written now: the last one is under way, or rests because it has failed. At its end a
        pass is woken: what is to be said then is found out anew."""
        self._has_deferred = self._writing is not None and not self._writing.done()
        return self._has_deferred

    @property
    def has_failed(self) -> bool:
        """Whether the last one did: it may have been carried out all the same."""
        return self._backoff.is_failing

    async def write(self, work: Callable[[], Coroutine[Any, Any, None]], *, waits: bool = True) -> None:
        """Unless it `withholds`. `waits`: for a moment, for the word to be written."""
        self._writing = self.runtime.start_task(self._write(work()), f"{self.name}: its status")
        if not waits:
            return
        with suppress(TimeoutError):
            await self.runtime.run_with_timeout(STATUS_WRITE_WAIT_SECONDS, asyncio.wait({self._writing}))

    async def close(self) -> None:
        """Ends what is under way: the API server may have done it all the same."""
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
            known = isinstance(error, kopf.TemporaryError | kopf.PermanentError)
            log.log(
                logging.WARNING if known else logging.ERROR,
                "%s: its status could not be written: %s; tried again in %.1f s",
                self.name,
                error,
                pause,
                exc_info=None if known else error,
            )
            await self.runtime.sleep(pause)
        if self._has_deferred:
            self._has_deferred = False
            self.wake()

"""Writes a job's status beside its passes, one word after the other, so that the last one is the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..runtime import Runtime

QUICK_SECONDS = 0.02
"""So long a pass waits for its word to be written: for an API server that has much to do, no longer."""


@dataclass
class StatusWriter:
    """Of one job."""

    runtime: Runtime
    wake: Callable[[], None]
    """A pass is wanted: there is something to say, or to say again."""
    name: str = ""
    _writing: asyncio.Task[Exception | None] | None = None
    _withheld: bool = False  # something was to be said meanwhile

    async def write(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Withheld while the last one is under way. Raises what has kept this one, or the last one, from being written:
        then it is to be tried again."""
        if self._writing is not None and not self._writing.done():
            self._withheld = True
            return
        self._raise_failure()
        self._writing = self.runtime.start(self._write(work()), f"{self.name}: its status")
        with suppress(TimeoutError):
            await self.runtime.within(QUICK_SECONDS, asyncio.wait({self._writing}))
        if self._writing.done():
            self._raise_failure()

    async def close(self) -> None:
        """Ends what is under way: the API server may have done it all the same."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, work: Coroutine[Any, Any, None]) -> Exception | None:
        try:
            await work
        except Exception as error:
            self._withheld = True
            return error
        finally:
            if self._withheld:
                self._withheld = False
                self.wake()
        return None

    def _raise_failure(self) -> None:
        """Once."""
        failure = self._writing.result() if self._writing is not None else None
        self._writing = None
        if failure is not None:
            raise failure

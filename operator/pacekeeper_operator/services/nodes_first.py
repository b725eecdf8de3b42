"""Where hundreds of nodes fail at once, holding them goes before all else that jobs want done: that takes the API
server more time than they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime import Runtime

FEW = 16
"""So many nodes that wait to be held keep nothing else waiting."""
FIRST_SECONDS, LOOK_SECONDS = 20.0, 0.1
"""So long, in one go, more of them go before all else; which looks so often whether they are done."""


class NodesFirst:
    """How many wait: nodes to be looked after, and suspicions to be raised."""

    def __init__(self, runtime: Runtime) -> None:
        self.behind = 0
        """Nodes that wait to be looked after, as counted last."""
        self._asking = 0
        self._many_since = math.inf
        self._runtime = runtime

    async def calm(self) -> None:
        """Returns when only a few wait, or after FIRST_SECONDS."""
        while self._asking + self.behind > FEW:
            self._many_since = min(self._many_since, self._runtime.monotonic())
            if self._runtime.monotonic() - self._many_since >= FIRST_SECONDS:
                return
            await self._runtime.sleep(LOOK_SECONDS)

    def count(self, behind: int) -> None:
        """So many nodes wait to be looked after."""
        self.behind = behind
        if self._asking + behind <= FEW:
            self._many_since = math.inf

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A suspicion is being raised."""
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1

"""The time that Python's garbage collections take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

GCReport = Callable[[int, int, int], None]
"""Takes start and end of a collection (ns of time.monotonic_ns), and its generation (2: all objects)."""


def time_collections(
    report: GCReport, min_ns: int = 0, on_begin: Callable[[int], None] | None = None
) -> Callable[[], None]:
    """Call `report` after each collection of this process that took at least `min_ns`; return what ends this.

    `on_begin`: called before each collection, with its generation. The youngest generation is collected many times a
    step: both callbacks must be fast, and must not raise.
    """
    clock, start_ns = time.monotonic_ns, 0

    def collecting(event: str, info: dict[str, int]) -> None:
        nonlocal start_ns
        if event == "start":
            if on_begin is not None:
                on_begin(info["generation"])
            start_ns = clock()
        elif (now := clock()) - start_ns >= min_ns:
            report(start_ns, now, info["generation"])

    gc.callbacks.append(collecting)
    return lambda: gc.callbacks.remove(collecting)

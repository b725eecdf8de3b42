"""A clock for ranks on one machine, by which only the work that their script declares takes time.

What ranks record of themselves is then exact, however busy the machine is. Each rank's clock is its own, and goes on by
`work`. Where ranks wait for each other, it goes on to when the last of them came, as real ones do (Lamport, 1978): each
rank writes down when it came to its n-th collective, and a rank that has waited takes the latest of those. All ranks
must come to the same collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_MAX_COLLECTIVES = 1 << 20
_COUNTER_TYPE = np.dtype("<i8")


class FakeClock:
    """One rank's. `folder` is shared by the ranks."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        path = folder / "arrivals"
        with path.open("ab") as file:
            file.truncate(ranks * _MAX_COLLECTIVES * _COUNTER_TYPE.itemsize)
        self._arrivals = np.memmap(path, _COUNTER_TYPE, "r+", shape=(ranks, _MAX_COLLECTIVES))
        self._rank = rank
        self._collectives = 0
        self._now = 10**9

    def nanoseconds(self) -> int:
        return self._now

    def work(self, seconds: float) -> None:
        """This rank is busy with work of its own for `seconds`."""
        self._now += round(seconds * 1e9)

    def arrive(self) -> None:
        """To the next collective."""
        self._collectives += 1
        self._arrivals[self._rank, self._collectives] = self._now

    def wait_for_arrivals(self) -> None:
        """The newest collective is over: all have come to it, or are about to."""
        if self._collectives == 0:
            return
        while not (arrivals := self._arrivals[:, self._collectives]).all():
            time.sleep(0)
        self._now = max(self._now, int(arrivals.max()))


def install_fake_clock(folder: Path, rank: int, ranks: int) -> FakeClock:
    """By this clock the rank's recorder records from now on; call it before the rank is watched."""
    from torch._C._distributed_c10d import Work

    from pacekeeper_rank import recorder_factory, torch_internals
    from pacekeeper_rank.collectives import collective_hooks, collective_monitor

    clock = FakeClock(folder, rank, ranks)
    hook, wait, engine = collective_hooks.hook_group, Work.wait, torch_internals.engine

    def hook_and_come(group: Any, enter: Callable[[Any], None], issued: Callable[[Any], None]) -> None:
        def come_and_enter(call: Any) -> None:
            clock.arrive()
            enter(call)

        hook(group, come_and_enter, issued)

    def wait_and_meet(work: Work, *arguments: Any, **options: Any) -> Any:
        try:
            return wait(work, *arguments, **options)
        finally:
            clock.wait_for_arrivals()

    class Engine:
        @staticmethod
        def queue_callback(callback: Callable[[], None]) -> None:
            def meet_and_call() -> None:
                clock.wait_for_arrivals()  # C++ has waited for the gradients
                callback()

            engine.queue_callback(meet_and_call if callback.__name__ == "backward_ended" else callback)

    Work.wait = wait_and_meet  # type: ignore[method-assign,assignment]
    for module in (collective_monitor, recorder_factory.native_recorder):
        if module is not None:
            vars(module).update(hook_group=hook_and_come, engine=Engine)
    time.monotonic_ns = clock.nanoseconds
    return clock

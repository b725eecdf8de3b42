"""The watch's edge: when a stall is to be reported, looks at the ranks' processes, and whether neighbours are there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.communicators import Communicator
from pacekeeper_analysis.records import Device
from pacekeeper_analysis.reports import GONE, Fault

from . import ras
from .rounds import RoundState
from .settings import LauncherSettings
from .stacks import StackFile, look_at, process_state
from .watch import BETWEEN_LOOKS, Look, Watch, step_seconds_of

STOPPED = "T"
"""State letter of a process that a signal has stopped."""
_PROBE_TIMEOUT = 1.0


class LocalRanks(Protocol):
    """What the ranks here have written (`ranks.RankProcesses`)."""

    def records(self, local_rank: int) -> NDArray[np.void]: ...

    def communicators(self, local_rank: int) -> Iterable[Communicator]: ...

    def transfers(self) -> str: ...


class Inspector:
    """Of one round. `notify`: takes a stall."""

    def __init__(
        self,
        settings: LauncherSettings,
        ranks: LocalRanks,
        notify: Callable[[Fault], None],
        earlier_step_seconds: float = 0.0,
    ) -> None:
        """`earlier_step_seconds`: the watch's."""
        self._settings = settings
        self._notify = notify
        self._pids: Mapping[int, int] = {}
        self._watch = Watch(
            settings, lambda local: step_seconds_of(ranks.records(local)), self._is_stopped, earlier_step_seconds
        )
        self._ranks = ranks
        self._inspection: asyncio.Task[None] | None = None
        self._question: asyncio.Task[str] | None = None
        self._answer = ""
        self._gone: frozenset[int] = frozenset()  # local ranks whose process was found gone

    def look(
        self,
        state: RoundState,
        ranks: Mapping[int, np.void],
        pids: Mapping[int, int],
        stacks: Mapping[int, StackFile],
        neighbours: Iterable[str],
        now: float,
        ended: Collection[int] = (),
    ) -> None:
        """Call it often. `ranks`: `records.STATE` by local rank; `ended`: local ranks that have exited with code 0;
        `now`: seconds, monotonic."""
        self._pids = pids
        if self._watch.look(ranks, now, ended) and (self._inspection is None or self._inspection.done()):
            self._watch.begin_report(now)
            self._ask_ras(ranks)
            inspection = self._inspect(state, dict(ranks), dict(pids), dict(stacks), list(neighbours), tuple(ended))
            self._inspection = asyncio.create_task(inspection)

    def stop(self) -> None:
        """The round is over."""
        for task in (self._inspection, self._question):
            if task is not None:
                task.cancel()

    def step_seconds(self, ranks: Mapping[int, np.void]) -> float:
        """For the next round, as the watch's."""
        return self._watch.step_seconds(ranks)

    def _ask_ras(self, ranks: Mapping[int, np.void]) -> None:
        """NCCL may take seconds to answer: the report does not wait, the next one of the stall has it."""
        uses_gpus = any(rank["device"] != Device.NONE for rank in ranks.values())
        if uses_gpus and ras.is_asked_by([int(rank["rank"]) for rank in ranks.values()]) and self._question is None:
            self._question = asyncio.create_task(ras.ask(os.environ))

    def _ras_words(self) -> str:
        """The newest answer so far."""
        if self._question is not None and self._question.done():
            self._answer, self._question = self._question.result(), None
        return self._answer

    def _is_stopped(self, local_rank: int) -> bool:
        pid = self._pids.get(local_rank)
        return pid is not None and process_state(pid)[0] == STOPPED

    async def _inspect(
        self,
        state: RoundState,
        ranks: dict[int, np.void],
        pids: dict[int, int],
        stacks: dict[int, StackFile],
        neighbours: list[str],
        ended: Collection[int],
    ) -> None:
        """Check every rank twice, and once whether the peer replicas can be reached; report the stall.

        A process found gone for the first time has only just ended. Its exit, which is about to be reported, says more.
        """
        probes = asyncio.gather(*(is_reachable(address, self._settings.neighbour_port) for address in neighbours))
        first = await _look_at_all(pids, stacks)
        await asyncio.sleep(BETWEEN_LOOKS)
        second = await _look_at_all(pids, stacks)
        reachable = await probes
        gone = frozenset(local for local in second if second[local].process_state in GONE and local not in ended)
        fresh, self._gone = gone - self._gone, gone
        if fresh:
            return
        unreachable = [address for address, there in zip(neighbours, reachable, strict=True) if not there]
        known = [each for local in ranks for each in self._ranks.communicators(local)]
        now, wall = time.monotonic(), time.time()
        fault = self._watch.report(state, ranks, (first, second), unreachable, known, now, wall, ended)
        self._notify(replace(fault, ras=self._ras_words(), transfers=self._ranks.transfers()))


async def _look_at_all(pids: Mapping[int, int], stacks: Mapping[int, StackFile]) -> dict[int, Look]:
    looks = await asyncio.gather(*(look_at(pid, stacks[local]) for local, pid in pids.items()))
    return dict(zip(pids, looks, strict=True))


async def is_reachable(address: str, port: int) -> bool:
    """Whether the host answers at all: a refused connection is an answer, silence is none."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except (TimeoutError, OSError):
        return False
    with contextlib.suppress(ConnectionError):
        writer.close()
    return True

"""The stall detector's I/O: when a stall is to be reported, sample the ranks' processes and probe the peers."""

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

from pacekeeper.health.stack_file import StackFile
from pacekeeper.health.stall_detector import (
    PROCESS_SAMPLE_INTERVAL_SECONDS,
    ProcessSample,
    RankInspection,
    StallDetector,
    estimate_step_seconds,
)
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.reports import EXITED_PROCESS_STATES, FaultReport
from pacekeeper_rank.records import Device

from ..rendezvous.rounds import RoundState
from ..settings import LauncherSettings
from . import nccl_ras
from .process_sampling import read_process_state, sample_process

STOPPED_PROCESS_STATE = "T"
"""State letter of a process that a signal has stopped."""
_PEER_PROBE_TIMEOUT_SECONDS = 1.0


class LocalRanks(Protocol):
    """What the ranks here have recorded (`ranks.rank_processes.RankProcesses`)."""

    def records(self, local_rank: int) -> NDArray[np.void]: ...

    def communicators(self, local_rank: int) -> Iterable[Communicator]: ...

    def describe_transfers(self) -> str: ...


class Inspector:
    """Inspects the ranks of one round. `notify` receives the fault of a stall."""

    def __init__(
        self,
        settings: LauncherSettings,
        ranks: LocalRanks,
        notify: Callable[[FaultReport], None],
        earlier_step_seconds: float | None = None,
    ) -> None:
        """`earlier_step_seconds`: as in `StallDetector`."""
        self._settings = settings
        self._notify = notify
        self._pids: Mapping[int, int] = {}
        self._stall_detector = StallDetector(
            settings, lambda local: estimate_step_seconds(ranks.records(local)), self._is_stopped, earlier_step_seconds
        )
        self._ranks = ranks
        self._inspection: asyncio.Task[None] | None = None
        self._ras_query: asyncio.Task[str] | None = None
        self._ras_report = ""
        self._exited_ranks: frozenset[int] = frozenset()  # local ranks whose process had exited at the last inspection

    def check(
        self,
        state: RoundState,
        ranks: Mapping[int, np.void],
        pids: Mapping[int, int],
        stacks: Mapping[int, StackFile],
        peers: Iterable[str],
        now: float,
        ended: Collection[int] = (),
    ) -> None:
        """Start an inspection if a stall is to be reported. Call it on every tick.

        `ranks`: `records.STATE` by local rank; `ended`: local ranks that have exited with code 0; `now`: seconds,
        monotonic.
        """
        self._pids = pids
        if self._stall_detector.check(ranks, now, ended) and (self._inspection is None or self._inspection.done()):
            self._stall_detector.begin_report(now)
            self._query_ras(ranks)
            inspection = self._inspect(state, dict(ranks), dict(pids), dict(stacks), list(peers), tuple(ended))
            self._inspection = asyncio.create_task(inspection)

    def stop(self) -> None:
        """Cancel inspections: the round is over."""
        for task in (self._inspection, self._ras_query):
            if task is not None:
                task.cancel()

    def step_seconds(self, ranks: Mapping[int, np.void]) -> float | None:
        """Return the step time for the next round's detector; None: unknown."""
        return self._stall_detector.step_seconds(ranks)

    def _query_ras(self, ranks: Mapping[int, np.void]) -> None:
        """Query NCCL's RAS.

        It may take seconds: this report does not wait, and the next one of the stall includes it.
        """
        uses_gpus = any(rank["device"] != Device.NONE for rank in ranks.values())
        if (
            uses_gpus
            and nccl_ras.is_querying_worker([int(rank["rank"]) for rank in ranks.values()])
            and self._ras_query is None
        ):
            self._ras_query = asyncio.create_task(nccl_ras.query_ras(os.environ))

    def _read_ras_report(self) -> str:
        """Return the newest answer so far."""
        if self._ras_query is not None and self._ras_query.done():
            self._ras_report, self._ras_query = self._ras_query.result(), None
        return self._ras_report

    def _is_stopped(self, local_rank: int) -> bool:
        pid = self._pids.get(local_rank)
        return pid is not None and read_process_state(pid)[0] == STOPPED_PROCESS_STATE

    async def _inspect(
        self,
        state: RoundState,
        ranks: dict[int, np.void],
        pids: dict[int, int],
        stacks: dict[int, StackFile],
        peers: list[str],
        ended: Collection[int],
    ) -> None:
        """Sample every rank twice, probe the peers once, and report the stall.

        A process that is found exited for the first time has only just exited. Its exit is about to be reported and has
        more information, so that no stall is reported.
        """
        probes = asyncio.gather(*(is_reachable(address, self._settings.peer_port) for address in peers))
        first = await _sample_processes(pids, stacks)
        await asyncio.sleep(PROCESS_SAMPLE_INTERVAL_SECONDS)
        second = await _sample_processes(pids, stacks)
        reachable = await probes
        exited = frozenset(
            local for local in second if second[local].process_state in EXITED_PROCESS_STATES and local not in ended
        )
        newly_exited, self._exited_ranks = exited - self._exited_ranks, exited
        if newly_exited:
            return
        unreachable = [address for address, answered in zip(peers, reachable, strict=True) if not answered]
        communicators = [communicator for local in ranks for communicator in self._ranks.communicators(local)]
        now, wall = time.monotonic(), time.time()
        found = RankInspection(first, second, unreachable, communicators)
        fault = self._stall_detector.build_fault(state, ranks, found, now, wall, ended)
        self._notify(replace(fault, ras=self._read_ras_report(), transfers=self._ranks.describe_transfers()))


async def _sample_processes(pids: Mapping[int, int], stacks: Mapping[int, StackFile]) -> dict[int, ProcessSample]:
    samples = await asyncio.gather(*(sample_process(pid, stacks[local]) for local, pid in pids.items()))
    return dict(zip(pids, samples, strict=True))


async def is_reachable(address: str, port: int) -> bool:
    """Return whether the host answers. A refused connection is an answer; a timeout is not."""
    try:
        async with asyncio.timeout(_PEER_PROBE_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except (TimeoutError, OSError):
        return False
    with contextlib.suppress(ConnectionError):
        writer.close()
    return True

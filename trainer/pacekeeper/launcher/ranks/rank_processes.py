"""The ranks of the present round: their processes, their output, and the states in their rings."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper import cgroup
from pacekeeper.health.stack_file import StackFile
from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.observe.collectives.nccl_transport import TransportReader, open_transport
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures.crash import is_peer_loss
from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.transport import describe_running_transfers
from pacekeeper_rank.forking.rank_start import RankStart

from ..rendezvous.rounds import RankObservation
from . import processes
from .end_signals import choose_rank_signal
from .log_files import (
    ERROR_FILE_VARIABLE,
    RankOutput,
    RankStream,
    copy_error_file,
    merge_error_texts,
    read_recorded_error,
)
from .warm_process import RankExited, RankForked, WarmProcess

_SIGKILL_EXIT_CODE = -signal.SIGKILL

log = logging.getLogger(__name__)


@dataclass
class _RankProcess:
    start: RankStart
    stdout: RankStream
    stderr: RankStream
    pid: int | None = None  # None: not forked yet
    exit_code: int | None = None
    end_details: str = ""  # additional information on its exit
    recorded_error: str = ""  # what torch's @record has written
    ring: RingReader | None = None
    transport: TransportReader | None = None

    @property
    def error_file(self) -> Path:
        return Path(self.start.environment[ERROR_FILE_VARIABLE])

    @property
    def is_gone(self) -> bool:
        return self.exit_code is not None and (self.pid is None or not processes.group_exists(self.pid))


@dataclass
class RankProcesses:
    """The ranks of one round on this worker, ordered by local rank. At most one round is here at a time."""

    warm: WarmProcess
    runtime: RuntimeFolder
    output: RankOutput = field(default_factory=RankOutput)
    open_stdin: Callable[[], int | None] = lambda: None
    """Returns a descriptor that the first rank reads. This class closes it."""
    _ranks: list[_RankProcess] = field(default_factory=list)
    _oom_kills: int = 0  # at the round's start

    def start(self, starts: Sequence[RankStart]) -> None:
        """Fork the ranks of a round. Those of the previous round must have exited."""
        assert all(rank.is_gone for rank in self._ranks)
        self._close_output()
        self._oom_kills = cgroup.count_oom_kills()
        self._ranks = []
        for local, start in enumerate(starts):
            self.runtime.transport(local).unlink(missing_ok=True)
            stdout, stderr = self.output.open(start, local, shares_console=len(starts) > 1)
            files = [stdout.write_end, stderr.write_end]
            if local == 0 and (stdin := self.open_stdin()) is not None:
                files.append(stdin)
            self.warm.fork(start, *files)
            for file in files:
                os.close(file)
            self._ranks.append(_RankProcess(start, stdout, stderr))

    def signal(self, signum: signal.Signals) -> None:
        """Send SIGKILL to all processes of a rank, and other signals to the rank itself.

        The rank gets the signal that it handles (`choose_rank_signal`). A rank that is any program may be a shell,
        which forwards no signals: its whole group gets it, as in torchrun.
        """
        for rank in self._ranks:
            if rank.pid is None:
                continue
            if signum is signal.SIGKILL or (rank.start.is_program and rank.exit_code is None):
                processes.kill_group(rank.pid, signum)
            elif rank.exit_code is None:
                with suppress(ProcessLookupError):  # it has exited, and the warm process has not reported it yet
                    os.kill(rank.pid, choose_rank_signal(signum, partial(processes.has_signal_handler, rank.pid)))

    def list_left_processes(self) -> dict[int, str]:
        """Return the processes in the groups of ranks that have exited, with their command lines."""
        groups = [rank.pid for rank in self._ranks if rank.exit_code is not None and rank.pid is not None]
        return {pid: command for group in groups for pid, command in processes.list_group_members(group).items()}

    def close(self) -> None:
        """Kill all remaining processes, and close the output."""
        self.signal(signal.SIGKILL)
        self._close_output()
        self.output.close()

    def _close_output(self) -> None:
        for rank in self._ranks:
            for stream in (rank.stdout, rank.stderr):
                stream.pump()
                stream.close()

    def receive_events(self) -> None:
        """Read the events of the warm process. Raises EOFError if it has exited."""
        ranks_by_key = {rank.start.key: rank for rank in self._ranks}
        for event in self.warm.read_events():
            rank = ranks_by_key[event.key]
            match event:
                case RankForked():
                    rank.pid = event.pid
                case RankExited():
                    rank.exit_code = event.code
                    rank.stderr.pump()  # its last output
                    if event.code:
                        rank.recorded_error = read_recorded_error(rank.error_file)

    def export_error(self, environment: Mapping[str, str]) -> None:
        """Copy the @record file of the rank that explains the end best to the launcher's own error file."""
        failed = [rank for rank in self._ranks if rank.recorded_error and rank.exit_code]
        failed.sort(key=lambda rank: is_peer_loss(rank.exit_code or 0, rank.recorded_error))
        for rank in failed[:1]:
            copy_error_file(rank.error_file, environment)

    def replace_warm_process(self, warm: WarmProcess, reason: str) -> None:
        """Replace a warm process that has exited. The kernel has killed its ranks. `reason`: why it has exited."""
        self.warm = warm
        for rank in self._ranks:
            if rank.exit_code is None:
                rank.exit_code, rank.end_details = _SIGKILL_EXIT_CODE, reason
                rank.stderr.pump()

    def states(self) -> dict[int, np.void]:
        """Return the present state (`records.STATE`) of each monitored rank, by local rank."""
        states = {local: _read_rank_state(rank, self.runtime, local) for local, rank in enumerate(self._ranks)}
        return {local: state for local, state in states.items() if state is not None}

    def pids(self) -> dict[int, int]:
        """Return the process IDs of the running ranks, by local rank."""
        return {
            local: rank.pid for local, rank in enumerate(self._ranks) if rank.pid is not None and rank.exit_code is None
        }

    def pids_by_rank(self) -> dict[int, int]:
        """Return the process IDs of the running ranks, by global rank."""
        return {self._ranks[local].start.rank: pid for local, pid in self.pids().items()}

    def stack_files(self) -> dict[int, StackFile]:
        return {local: StackFile(self.runtime.stack(local)) for local in range(len(self._ranks))}

    def records(self, local_rank: int) -> NDArray[np.void]:
        """Return the ring's records of a monitored rank (`records.RECORD`)."""
        ring = self._ranks[local_rank].ring
        assert ring is not None
        return ring.records()

    def communicators(self, local_rank: int) -> tuple[Communicator, ...]:
        """Return the communicators that a rank has used in this round."""
        return read_communicators(self.runtime.communicators_file(local_rank))

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes in order of local rank; None: the rank runs."""
        return [rank.exit_code for rank in self._ranks]

    def list_finished(self) -> frozenset[int]:
        """Return the local ranks that have exited with code 0."""
        return frozenset(local for local, rank in enumerate(self._ranks) if rank.exit_code == 0)

    def describe_transfers(self) -> str:
        """Describe what unfinished NCCL transfers of the ranks wait for; "": nothing, or unknown."""
        descriptions = []
        for local, rank in enumerate(self._ranks):
            if rank.transport is None:
                try:
                    rank.transport = open_transport(self.runtime.transport(local))
                except (InputError, OSError) as error:
                    log.warning("%s", error)
            if rank.transport is not None:
                running, communicators = rank.transport.operations(), rank.transport.communicators()
                descriptions.append(
                    describe_running_transfers(rank.start.rank, running, communicators, time.monotonic_ns())
                )
        return "\n".join(filter(None, descriptions))

    def observe(self) -> list[RankObservation]:
        """Return the ranks as `rounds.decide_commands` observes them."""
        states = self.states()
        some_failed = any(rank.exit_code for rank in self._ranks)
        memory_ran_out = some_failed and cgroup.count_oom_kills() > self._oom_kills
        ended_rank = min((rank.start.rank for rank in self._ranks if rank.exit_code == 0), default=None)
        return [
            _observe_rank(rank, states.get(local), memory_ran_out, ended_rank) for local, rank in enumerate(self._ranks)
        ]


def _observe_rank(
    rank: _RankProcess, state: np.void | None, memory_ran_out: bool, ended_rank: int | None
) -> RankObservation:
    """Observe a rank.

    `state`: None if it is not monitored. `memory_ran_out`: the kernel has killed a process of this worker for lack of
    memory in this round. `ended_rank`: a global rank that has exited with code 0.
    """
    step = None if state is None or state["step"] < 0 else int(state["step"])
    completed_step = state is not None and int(state["steps_in_round"]) > 0
    observation = RankObservation(
        rank.start.rank,
        rank.is_gone,
        rank.exit_code,
        completed_step=completed_step,
        step=step,
        monitored=state is not None,
        managed=state is not None and int(state["sync_mode"]) >= 0,
    )
    if not rank.exit_code:
        return observation
    tail = merge_error_texts(rank.stderr.tail(), rank.recorded_error)
    lost_peer = rank.start.environment.get("WORLD_SIZE") != "1" and is_peer_loss(rank.exit_code, tail)
    return replace(
        observation,
        error="\n".join(filter(None, (tail, rank.end_details))),
        out_of_memory=memory_ran_out and not lost_peer,  # of the rank itself, or of a child that it needed
        lost_peer=lost_peer and ended_rank is None,
        ended_peer=ended_rank if lost_peer else None,
    )


def _read_rank_state(rank: _RankProcess, runtime: RuntimeFolder, local_rank: int) -> np.void | None:
    """Return the rank's state; None until the library uses the ring of this round, or if the rank has damaged it."""
    try:
        ring = rank.ring or RingReader(runtime.ring(local_rank))
        state = ring.state()
    except (OSError, InputError):
        return None
    if rank.ring is None and (state["round"], state["rank"]) != (rank.start.round, rank.start.rank):
        return None
    rank.ring = ring
    return state if state["pid"] != 0 else None

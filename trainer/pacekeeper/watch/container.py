"""Reads a watched container: from the files of its processes, what a launcher and its ranks report in a TrainingJob.

`WatchedContainer.read` is called at each poll. It gives a heartbeat, the faults that are new, and the ranks'
descriptions. `pacekeeper watch` and the sidecar of a watched container use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pacekeeper.health.rank_rings import ObservedRank, RankRings
from pacekeeper.health.stall_detector import (
    RankInspection,
    StallDetector,
    estimate_step_seconds,
)
from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.profiling.pattern import RankPattern
from pacekeeper_analysis.protocol.reports import (
    EXITED_PROCESS_STATES,
    FaultKind,
    FaultReport,
    Heartbeat,
    LauncherState,
    RoundStart,
    StepProgress,
)
from pacekeeper_analysis.protocol.requests import ProfileRequest
from pacekeeper_analysis.protocol.watched_container import (
    AgentExits,
    BrokenReport,
    ProcessSamples,
    RankDescription,
    RankEnd,
    RankFailure,
)
from pacekeeper_analysis.protocol.watched_report import MAX_WATCHED_RANKS, MAX_WATCHED_WORLD_SIZE, StepSums
from pacekeeper_analysis.stragglers.defaults import DEFAULT_WINDOW_STEPS
from pacekeeper_rank.records import Collective, Device, Phase, RecordKind

from .rank_patterns import build_rank_pattern
from .runtime_files import RuntimeFiles
from .stack_inspection import STOPPED_STATES, StackInspection

PROCESS_SAMPLES_MAX_AGE_SECONDS = 2.0
"""Age from which on samples show nothing any more: the process monitor is gone."""
AGENT_REPORT_TIMEOUT_SECONDS = 2.0
"""Seconds in which an agent may report how a rank ended that left no message. torchrun polls its ranks every 0.1 s."""

SUM_DIGITS = 6
"""Decimal places of sums of seconds as they are sent: microseconds."""


@dataclass(frozen=True)
class ContainerState:
    """A container at one time."""

    heartbeat: Heartbeat
    ranks: tuple[RankDescription, ...] = ()  # of the present training and restart, by slot
    alive: frozenset[int] = frozenset()  # global ranks whose process lives
    faults: tuple[FaultReport, ...] = ()  # that are new: stalls, and ranks that failed, in the order of their ends
    broken: tuple[BrokenReport, ...] = ()  # processes in which the library has ended watching


@dataclass(frozen=True)
class _Settings:
    """Settings of the stall detector (`StallSettings`)."""

    worker: str
    incarnation: str
    hang_deadline: float | None = None
    phase_deadline: float = 1800.0


@dataclass(frozen=True)
class _Round:
    """The round of the stall detector (`StalledRound`)."""

    round: int
    membership: int | None = None


@dataclass(frozen=True)
class _Death:
    """A rank's process that is gone."""

    rank: RankDescription
    released_at: float  # when its lock was first found free; seconds since the epoch
    end: RankEnd | None  # None: a signal or os._exit ended it
    oom_kills: int  # in the container before its end


class WatchedContainer:
    """The reader of one container's runtime folder."""

    def __init__(self, folder: Path, worker: str = "local", window_steps: int = DEFAULT_WINDOW_STEPS) -> None:
        """`worker`: name of the container in reports. `window_steps`: longest window of steps."""
        self._runtime = RuntimeFolder(folder)
        self._files = RuntimeFiles(folder)
        self._worker = worker
        self.rings = RankRings(self._runtime, window_steps)
        """The ranks' rings, for evidence. Only the present ranks count."""
        self._key: tuple[object, ...] = ()
        self._described: dict[int, RankDescription] = {}
        self._ranks: dict[int, RankDescription] = {}
        self._states: dict[int, np.void] = {}
        self._detector: StallDetector | None = None
        self._inspection: StackInspection | None = None
        self._inspections = 0
        self._released: dict[tuple[int, int], float] = {}
        self._deaths: dict[tuple[int, int], _Death] = {}
        self._reported: set[tuple[int, int]] = set()
        self._is_over = False
        self._oom_kills = 0
        self._stopped: frozenset[int] = frozenset()
        """Slots whose process a signal has stopped."""

    def read(self, now: float, wall: float, *, is_over: bool = False) -> ContainerState:
        """Read the container. Call it several times a second.

        `now`: seconds of CLOCK_MONOTONIC, which the rings use; `wall`: seconds since the epoch. `is_over`: the
        container's command has ended, so that no process reports any more.
        """
        self._is_over = is_over
        samples = self._files.read_processes()
        described = self._files.read_ranks()
        self._note_replaced(described, wall)
        for slot, rank in described.items():
            self._check_life(slot, rank, samples, wall)
        self._select_ranks(described)
        self._read_rings()
        failures = self._collect_failures(wall)
        self._oom_kills = samples.oom_kills if samples is not None else self._oom_kills
        stall = self._check_stall(samples, now, wall)
        return ContainerState(
            heartbeat=self._build_heartbeat(now, wall),
            ranks=tuple(self._ranks.values()),
            alive=frozenset(rank.rank for slot, rank in self._ranks.items() if not self._is_dead(slot, rank)),
            faults=(*failures, *((stall,) if stall is not None else ())),
            broken=self._files.read_broken(),
        )

    def measure_first_step(self, now: float, wall: float) -> float:
        """Return when the last of the present ranks completed its first step. Call it once all have completed one.

        `now`, `wall`: as in `read`. The result is `wall` if the records of that step are gone.
        """
        ends = [_find_first_step_end(rank) for rank in map(self.rings.get_rank, self._states) if rank is not None]
        known = [_convert_time(end, now, wall) for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else wall

    def sum_steps(self) -> tuple[StepSums, ...]:
        """Return the sums over the measured steps of the present ranks, as of the last `read`."""
        resumed = self._find_first_step()
        observed = ((self._ranks[slot].rank, self.rings.get_rank(slot)) for slot in self._states)
        sums = ((rank, seen.measured) for rank, seen in observed if seen is not None and seen.measured.steps)
        return tuple(
            StepSums(
                rank,
                measured.last_step + resumed,
                measured.steps,
                round(max(0.0, measured.step_seconds), SUM_DIGITS),
                round(max(0.0, measured.compute_seconds), SUM_DIGITS),
            )
            for rank, measured in sums
            if rank < MAX_WATCHED_WORLD_SIZE and measured.last_step >= 0
        )[:MAX_WATCHED_RANKS]

    def get_ring_files(self) -> dict[int, Path]:
        """Return the rings of the present ranks, by global rank."""
        return {rank.rank: self._runtime.ring(slot) for slot, rank in self._ranks.items()}

    def request_profile(self, request: ProfileRequest) -> None:
        """Ask the present ranks for a profile window. `request`: with steps as they count them."""
        self._files.request_profile(request)

    def read_patterns(self, request: str, known: Set[int]) -> dict[int, RankPattern]:
        """Return what present ranks have answered, by global rank, without those that are `known`.

        An answer of another process than the rank's, and one without a complete step, does not count.
        """
        patterns = {}
        for slot, rank in self._ranks.items():
            recording = None if rank.rank in known else self._files.read_profile(slot)
            observed = self.rings.get_rank(slot)
            if recording is None or observed is None or (recording.request, recording.pid) != (request, rank.pid):
                continue
            pattern = build_rank_pattern(recording, observed.ring.records(), rank)
            if pattern is not None:
                patterns[rank.rank] = pattern
        return patterns

    def read_socket_ranks(self) -> dict[int, int]:
        """Return the present rank that holds each socket, by inode. No container can name ranks of another one."""
        present = {rank.rank for rank in self._ranks.values()}
        return {inode: rank for inode, rank in self._files.read_sockets().items() if rank in present}

    # ---- life and death -----------------------------------------------------------------------------------------

    def _is_dead(self, slot: int, rank: RankDescription) -> bool:
        return (slot, rank.pid) in self._deaths

    def _note_replaced(self, described: Mapping[int, RankDescription], wall: float) -> None:
        """Note the deaths of processes whose slot another one has taken since the last poll."""
        for slot, rank in described.items():
            earlier = self._described.get(slot)
            if earlier is not None and earlier.pid != rank.pid and not self._is_dead(slot, earlier):
                self._deaths[slot, earlier.pid] = _Death(earlier, wall, None, self._oom_kills)
        self._described.update(described)

    def _check_life(self, slot: int, rank: RankDescription, samples: ProcessSamples | None, wall: float) -> None:
        """Note a death: the lock is free, and no fresh sample shows the process.

        A script that closes all files loses the lock and lives, so that the lock alone proves nothing.
        """
        key = (slot, rank.pid)
        if key in self._deaths or self._files.is_locked(slot) is not False:
            return
        released_at = self._released.setdefault(key, wall)
        if not self._is_over and samples is not None and wall - samples.at < PROCESS_SAMPLES_MAX_AGE_SECONDS:
            process = samples.ranks.get(str(slot))
            is_seen = process is not None and process.pid == rank.pid and process.state not in EXITED_PROCESS_STATES
            if is_seen or samples.at <= released_at:
                return
        end = self._files.read_end(slot)
        own_end = end if end is not None and end.pid == rank.pid else None
        self._deaths[key] = _Death(rank, released_at, own_end, self._oom_kills)

    def _collect_failures(self, wall: float) -> Sequence[FaultReport]:
        """Return the faults of dead ranks that are not reported yet, in the order in which their locks were free."""
        exits = self._files.read_exits()
        by_pid = {failure.pid: failure for report in exits.values() for failure in report.failures.values()}
        faults = []
        in_order = sorted(self._deaths.items(), key=lambda item: (item[1].released_at, item[1].end is not None))
        for key, death in in_order:  # of one poll, those without a message first: a peer's end leaves one
            if key in self._reported:
                continue
            failure = by_pid.get(death.rank.pid)
            waits = not self._is_over and wall - death.released_at < AGENT_REPORT_TIMEOUT_SECONDS
            if waits and death.end is None and failure is None and not _is_reported(exits, death):
                break  # the agent may know more; what died later waits, so that the order stays
            is_failure = failure is not None or death.end is None or bool(death.end.kind)
            if waits and not is_failure:
                continue  # a script that ends by sys.exit(1) leaves no exception
            self._reported.add(key)
            if is_failure:
                faults.append(self._build_failure(key[0], death, failure))
        return faults

    def _build_failure(self, slot: int, death: _Death, failure: RankFailure | None) -> FaultReport:
        rank, state = death.rank, self._states.get(slot)
        is_own_state = state is not None and int(state["pid"]) == rank.pid
        step = int(state["step"]) if state is not None and is_own_state and state["step"] >= 0 else None
        exit_code = failure.exit_code if failure is not None else (1 if death.end is not None and death.end.kind else 0)
        error = "" if death.end is None else death.end.error
        if not error and failure is not None and exit_code > 0:  # of a signal, it only repeats the number
            error = failure.message
        is_killed = exit_code in (0, -9) and (death.end is None or not death.end.kind)
        return FaultReport(
            name=f"{self._worker}-r{rank.restart + 1}-{slot}-{rank.pid}-failed".lower(),
            kind=FaultKind.RANK_FAILED,
            worker=self._worker,
            round=rank.restart + 1,
            noticed_at=death.released_at,
            rank=rank.rank,
            exit_code=exit_code,
            out_of_memory=is_killed and self._oom_kills > death.oom_kills,
            completed_step=step is not None,
            step=step,
            error=error,
        )

    # ---- the present ranks --------------------------------------------------------------------------------------

    def _select_ranks(self, described: Mapping[int, RankDescription]) -> None:
        """Select the ranks of the present training: of the one with most live ranks, the newest restart."""
        alive = {slot: rank for slot, rank in described.items() if not self._is_dead(slot, rank)}
        if alive:
            counts = Counter(rank.training for rank in alive.values())
            newest = {
                training: max(r.started_at for r in alive.values() if r.training == training) for training in counts
            }
            training = max(counts, key=lambda each: (counts[each], newest[each]))
            restart = max(rank.restart for rank in alive.values() if rank.training == training)
        elif self._ranks or not described:
            return  # the last ranks stay the present ones until others begin
        else:
            last = max(described.values(), key=lambda rank: rank.started_at)
            training, restart = last.training, last.restart
        chosen = {
            slot: rank
            for slot, rank in sorted(described.items())
            if rank.training == training and rank.restart == restart
        }
        self._ranks = {slot: rank for slot, rank in chosen.items() if self._is_first_of_rank(rank, chosen)}
        key = (training, restart, *((slot, rank.pid) for slot, rank in self._ranks.items()))
        if key != self._key:
            self._key, self._inspection = key, None
            earlier = None if self._detector is None else self._detector.step_seconds(self._states)
            settings = _Settings(self._worker, str(restart + 1))
            self._detector = StallDetector(
                settings, self._measure_step_seconds, lambda slot: slot in self._stopped, earlier
            )
        self.rings.selected = frozenset(self._ranks)

    @staticmethod
    def _is_first_of_rank(rank: RankDescription, chosen: Mapping[int, RankDescription]) -> bool:
        return all(other.rank != rank.rank or other.slot >= rank.slot for other in chosen.values())

    def _read_rings(self) -> None:
        """Read the rings. A ring of another process than its slot's, or with an invalid state, does not count."""
        self._states = {}
        self.rings.refresh()
        for slot, rank in self._ranks.items():
            observed = self.rings.get_rank(slot)
            if observed is not None and _is_valid_state(observed.state, rank):
                self._states[slot] = observed.state

    def _measure_step_seconds(self, slot: int) -> float | None:
        observed = self.rings.get_rank(slot)
        return None if observed is None else estimate_step_seconds(observed.ring.records())

    # ---- stalls -------------------------------------------------------------------------------------------------

    def _check_stall(self, samples: ProcessSamples | None, now: float, wall: float) -> FaultReport | None:
        """Return the fault of a stall whose inspection is complete."""
        ended = [slot for slot, rank in self._ranks.items() if self._has_finished(slot, rank)]
        failed = [slot for slot, rank in self._ranks.items() if self._is_dead(slot, rank) and slot not in ended]
        self._stopped = _list_stopped(samples, self._ranks, wall)
        if self._detector is None or failed or not self._states:
            self._inspection = None  # a failure explains that the others wait
            return None
        is_due = self._detector.check(self._states, now, ended)
        if self._inspection is None:
            if not is_due:
                return None
            self._detector.begin_report(now)
            self._inspections += 1
            self._inspection = StackInspection(f"{self._worker}-{self._inspections}")
        pids = {slot: rank.pid for slot, rank in self._ranks.items() if slot in self._states and slot not in ended}
        if not self._inspection.advance(self._files, pids, now, wall):
            return None
        inspection, self._inspection = self._inspection, None
        if inspection.first is None or inspection.second is None:
            return None
        restart = next(iter(self._ranks.values())).restart
        known = [each for slot in self._states for each in read_communicators(self._runtime.communicators_file(slot))]
        found = RankInspection(inspection.first, inspection.second, (), known)
        fault = self._detector.build_fault(_Round(restart + 1), self._states, found, now, wall, ended)
        return replace(fault, name=f"{fault.name}-{self._inspections}")

    def _has_finished(self, slot: int, rank: RankDescription) -> bool:
        death = self._deaths.get((slot, rank.pid))
        return death is not None and death.end is not None and not death.end.kind

    # ---- the heartbeat ------------------------------------------------------------------------------------------

    def _build_heartbeat(self, now: float, wall: float) -> Heartbeat:
        heartbeat = Heartbeat(worker=self._worker)
        if not self._ranks:
            return heartbeat
        ranks = list(self._ranks.values())
        resumed = self._find_first_step()
        states = list(self._states.values())
        slowest = min(states, key=lambda state: int(state["step"]), default=None)
        step = None if slowest is None or slowest["step"] < 0 else int(slowest["step"]) + resumed
        return replace(
            heartbeat,
            state=self._find_stage(),
            round=ranks[0].restart + 1,
            restarts=ranks[0].restart,
            start=RoundStart(
                started_at=min(rank.started_at for rank in ranks),
                restored_step=max((rank.resumed_from for rank in ranks if rank.resumed_from is not None), default=None),
            ),
            progress=StepProgress(
                step,
                0 if slowest is None else max(0, int(slowest["steps_in_round"])),
                step_ended_at=None
                if step is None or slowest is None
                else _convert_time(slowest["step_end_ns"], now, wall),
            ),
            rank_metrics=tuple(metrics.metrics for metrics in self.rings.measure_metrics()),
        )

    def _find_first_step(self) -> int:
        """Return the step from which the present ranks have resumed. They count their own steps."""
        return max((rank.resumed_from or 0 for rank in self._ranks.values()), default=0)

    def _find_stage(self) -> LauncherState:
        if any(not self._is_dead(slot, rank) for slot, rank in self._ranks.items()):
            return LauncherState.RUNNING
        finished = all(self._has_finished(slot, rank) for slot, rank in self._ranks.items())
        return LauncherState.FINISHED if finished else LauncherState.FAILED


def _convert_time(end_ns: int, now: float, wall: float) -> float:
    """Convert nanoseconds of the rings' clock to seconds since the epoch; a rank may have written anything."""
    return wall - min(wall, max(0.0, now - int(end_ns) * 1e-9))


def _find_first_step_end(rank: ObservedRank) -> int | None:
    """Return the end of the first step in a rank's ring, nanoseconds; None: its record is gone."""
    records = rank.ring.records()
    steps = records[records["kind"] == RecordKind.STEP]
    return int(steps["end_ns"][0]) if len(steps) and records["index"][0] == 1 else None


def _is_valid_state(state: np.void, rank: RankDescription) -> bool:
    """Return whether a ring's state is of this rank, and has values that exist."""
    values = ((Phase, "phase"), (Collective, "collective"), (Device, "device"), (Collective, "device_collective"))
    return (
        state["pid"] == rank.pid
        and state["rank"] == rank.rank
        and all(int(state[name]) in frozenset(map(int, kind)) for kind, name in values)
        and min(int(state[name]) for name in ("sequence", "collectives_entered", "steps_in_round")) >= 0
    )


def _is_reported(exits: Mapping[int, AgentExits], death: _Death) -> bool:
    """Return whether an agent has reported the ends of this rank's round."""
    return any(report.at >= death.rank.started_at for report in exits.values())


def _list_stopped(samples: ProcessSamples | None, ranks: Mapping[int, RankDescription], wall: float) -> frozenset[int]:
    """Return the slots whose process a signal has stopped, by a fresh sample."""
    if samples is None or wall - samples.at >= PROCESS_SAMPLES_MAX_AGE_SECONDS:
        return frozenset()
    stopped = {slot for slot, sample in samples.ranks.items() if sample.state in STOPPED_STATES}
    return frozenset(slot for slot in ranks if str(slot) in stopped)

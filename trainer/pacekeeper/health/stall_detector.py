"""Detects that this worker's ranks make no progress, and reports the state of each. Pure.

It does not blame a rank: in a job that hangs, every worker stalls, and most of them only wait for the culprit. The
reports of all workers together show which rank that is (`pacekeeper_analysis.failures.hang`). The caller samples the
processes: the launcher itself (`launcher/health/inspection.py`), or what watches a container (`watch/container.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.failures.hang import OUTSIDE_COLLECTIVES_SECONDS
from pacekeeper_analysis.failures.repetition import find_least_step
from pacekeeper_analysis.protocol.communicators import Communicator, format_entered, truncate_communicators
from pacekeeper_analysis.protocol.reports import DEBUGGER_WAIT, FaultKind, FaultReport, RankState
from pacekeeper_rank.records import POLLED_DEVICE_FIELDS, Collective, Device, Phase, RecordKind

MIN_ARMED_STEPS = 5
"""Steps of the round before the training phase's deadline is derived from them."""
MIN_STALL_SECONDS, STALL_STEPS = 2.0, 10
"""The training phase's deadline: this many seconds, or this many of the rank's steps, whichever is longer."""
MIN_UNARMED_STALL_SECONDS, UNARMED_STALL_STEPS = 30.0, 100
"""The same for the first steps of a round, whose step time is known only from the previous round or the plan."""
MIN_LOAD_STALL_SECONDS, LOAD_STALL_WAITS = 60.0, 20
"""A loader's deadline: this many seconds, or this many times the round's longest wait for it, whichever is longer."""
RECENT_STEP_RECORDS = 32
PROCESS_SAMPLE_INTERVAL_SECONDS = 0.5
"""Seconds between the two samples that show whether a rank moves."""
PROCESS_SAMPLE_COST_TICKS = 2
"""Processor time that writing its stack at the first sample may cost the rank."""
MAX_HOST_WORK_SECONDS = 30.0
"""Seconds for which a rank whose GPU is idle may keep a processor busy at one place of its script: it counts as
working. After that, it counts as spinning for one of its own kernels that never ends."""
FIRST_STALL_REPORT_PAUSE_SECONDS, MAX_STALL_REPORT_PAUSE_SECONDS = 3.0, 15.0
"""Seconds until a lasting stall is reported again. The first value doubles up to the second."""


class StallSettings(Protocol):
    """Settings of the detector. Times are in seconds."""

    @property
    def worker(self) -> str: ...

    @property
    def incarnation(self) -> str: ...  # distinguishes this detector from an earlier one of the worker

    @property
    def hang_deadline(self) -> float | None: ...  # of the training phase; None: derived from the ranks' step times

    @property
    def phase_deadline(self) -> float: ...  # of every other phase


class StalledRound(Protocol):
    """The round whose ranks are stalled."""

    @property
    def round(self) -> int: ...

    @property
    def membership(self) -> int | None: ...


def compute_stall_deadline(
    phase: Phase,
    steps_in_round: int,
    step_seconds: float | None,
    settings: StallSettings,
    earlier_step_seconds: float | None = None,
    longest_load: float | None = None,
) -> float:
    """Return how long a rank may show no progress (seconds).

    `step_seconds`: the median of its recent steps, or of its synchronizations if those take longer; None: unknown.
    `earlier_step_seconds`: the same of the previous round, or of the plan if there was none here; None: unknown.
    `longest_load`: its longest wait for the loader in this round; None: none yet, and the first batch may take long.
    """
    if phase is Phase.LOAD and longest_load is not None:
        return min(settings.phase_deadline, max(MIN_LOAD_STALL_SECONDS, LOAD_STALL_WAITS * longest_load))
    if phase is not Phase.TRAIN:
        return settings.phase_deadline
    if settings.hang_deadline is not None:
        return settings.hang_deadline
    if steps_in_round >= MIN_ARMED_STEPS:
        return max(MIN_STALL_SECONDS, STALL_STEPS * (step_seconds or 0.0))
    if earlier_step_seconds is not None:
        return max(MIN_UNARMED_STALL_SECONDS, UNARMED_STALL_STEPS * earlier_step_seconds)
    return settings.phase_deadline


@dataclass(frozen=True)
class ProcessSample:
    """One sample of a rank's process. Processor time is in clock ticks."""

    process_state: str = ""  # letter of /proc/<pid>/stat; "": exited
    ticks: int = 0  # of the main thread
    stack: str = ""  # of the main thread, innermost call last
    helper_ticks: int = 0  # of its other threads, and of all descendant processes
    waits_for: str = ""  # what it waits for outside of the ranks (`wait_reasons.describe_wait`); "": nothing


@dataclass(frozen=True)
class RankInspection:
    """What an inspection of the ranks here has found."""

    first: Mapping[int, ProcessSample]  # by local rank
    second: Mapping[int, ProcessSample]  # PROCESS_SAMPLE_INTERVAL_SECONDS later
    unreachable: Collection[str] = ()  # peers that did not answer
    communicators: Collection[Communicator] = ()  # those that the ranks know

    def get_samples(self, local_rank: int) -> tuple[ProcessSample, ProcessSample]:
        """Return both samples of a rank's process."""
        return self.first.get(local_rank, ProcessSample()), self.second.get(local_rank, ProcessSample())


@dataclass
class _Progress:
    """A rank's state at its last change, and the time of that change (seconds, monotonic)."""

    state: bytes
    changed_at: float
    step_seconds: float | None = None  # measured only when it is needed; None: unknown
    is_measured: bool = False  # whether `step_seconds` was measured since the change


@dataclass
class StallDetector:
    """Detects stalls of one round's ranks.

    `measure_step_seconds`: returns a local rank's step time (`estimate_step_seconds`). `is_stopped`: returns whether a
    signal has stopped its process. Both are called only for a rank without progress.
    """

    settings: StallSettings
    measure_step_seconds: Callable[[int], float | None]
    is_stopped: Callable[[int], bool]
    earlier_step_seconds: float | None = None
    """The step time of the previous round, or the plan's if no round here got far enough; None: unknown."""
    _progress: dict[int, _Progress] = field(default_factory=dict)
    _reports: int = 0
    _reports_of_this_stall: int = 0
    _report_at: float = 0.0

    def check(self, ranks: Mapping[int, np.void], now: float, ended: Collection[int] = ()) -> bool:
        """Return whether a stall is to be reported now. Call it on every tick.

        `ranks`: `records.STATE` by local rank; `ended`: local ranks that have exited with code 0; `now`: seconds,
        monotonic.
        """
        # Ended ranks are checked, too: a report contains the time of their last progress.
        stalled = [local for local, rank in ranks.items() if self._is_stalled(local, rank, now) and local not in ended]
        if not stalled:
            self._reports_of_this_stall = 0
            self._report_at = 0.0
        return bool(stalled) and now >= self._report_at

    def begin_report(self, now: float) -> None:
        """Count a report, and schedule the next one of the same stall."""
        self._reports += 1
        self._report_at = now + min(
            FIRST_STALL_REPORT_PAUSE_SECONDS * 2 ** min(self._reports_of_this_stall, 10), MAX_STALL_REPORT_PAUSE_SECONDS
        )
        self._reports_of_this_stall += 1

    def build_fault(
        self,
        state: StalledRound,
        ranks: Mapping[int, np.void],
        found: RankInspection,
        now: float,
        wall: float,
        ended: Collection[int] = (),
    ) -> FaultReport:
        """Build the fault of the stall for which `begin_report` was last called.

        The fault contains those of the communicators that are in use now. `wall`: seconds since the epoch; `ended`: as
        in `check`.
        """
        patience = OUTSIDE_COLLECTIVES_SECONDS if self.settings.hang_deadline is None else self.settings.hang_deadline
        states = tuple(
            build_rank_state(
                rank,
                found.get_samples(local),
                self._progress[local].changed_at,
                now,
                overdue=now - self._progress[local].changed_at >= self._compute_deadline(local, rank),
                ended=local in ended,
                patience=patience,
            )
            for local, rank in ranks.items()
        )
        return FaultReport(
            name=f"{self.settings.worker}-{self.settings.incarnation}-r{state.round}-stalled-{self._reports}".lower(),
            kind=FaultKind.STALLED,
            worker=self.settings.worker,
            round=state.round,
            membership=0 if state.membership is None else state.membership,
            noticed_at=wall,
            step=find_least_step(rank.step for rank in states),
            completed_step=any(int(rank["steps_in_round"]) > 0 for rank in ranks.values()),
            ranks=states,
            unreachable=tuple(found.unreachable),
            communicators=_select_named_communicators(found.communicators, states),
        )

    def step_seconds(self, ranks: Mapping[int, np.void]) -> float | None:
        """Return the step time for the next round: the slowest rank's, or the earlier one if the round is young.

        None: unknown.
        """
        armed = [local for local, rank in ranks.items() if rank["steps_in_round"] >= MIN_ARMED_STEPS]
        if not armed:
            return self.earlier_step_seconds
        measured = (self.measure_step_seconds(local) for local in armed)
        return max((seconds for seconds in measured if seconds is not None), default=None)

    def _is_stalled(self, local_rank: int, rank: np.void, now: float) -> bool:
        content = _clear_polled_fields(rank)
        progress = self._progress.get(local_rank)
        if progress is None or progress.state != content:
            self._progress[local_rank] = _Progress(content, now)
            return False
        silent_seconds = now - progress.changed_at
        if silent_seconds < min(MIN_STALL_SECONDS, self.settings.hang_deadline or MIN_STALL_SECONDS):
            return False
        # A stopped process is stalled in any phase.
        if self.is_stopped(local_rank):
            return True
        return int(rank["phase"]) != Phase.FINISHED and silent_seconds >= self._compute_deadline(local_rank, rank)

    def _compute_deadline(self, local_rank: int, rank: np.void) -> float:
        progress = self._progress[local_rank]
        if not progress.is_measured:
            progress.step_seconds, progress.is_measured = self.measure_step_seconds(local_rank), True
        longest_load_ns = int(rank["longest_load_ns"])
        return compute_stall_deadline(
            Phase(int(rank["phase"])),
            int(rank["steps_in_round"]),
            progress.step_seconds,
            self.settings,
            self.earlier_step_seconds,
            longest_load_ns * 1e-9 if longest_load_ns > 0 else None,
        )


def build_rank_state(
    rank: np.void,
    samples: tuple[ProcessSample, ProcessSample],
    since: float,
    now: float,
    *,
    overdue: bool,
    ended: bool = False,
    patience: float = OUTSIDE_COLLECTIVES_SECONDS,
) -> RankState:
    """Build the report on one rank. `since`: its last progress; both times are seconds, monotonic.

    `samples`: of its process, PROCESS_SAMPLE_INTERVAL_SECONDS apart. `ended`: it has exited with code 0. `patience`:
    seconds for which it may wait for something outside of the ranks.
    """
    first, second = samples
    device = Device(int(rank["device"]))
    # CUDA spins while it waits: a busy processor proves progress only for a limited time.
    may_work = device is Device.NONE or (device is Device.IDLE and now - since < MAX_HOST_WORK_SECONDS)
    worked = (
        second.ticks - first.ticks > PROCESS_SAMPLE_COST_TICKS
        or second.helper_ticks - first.helper_ticks > PROCESS_SAMPLE_COST_TICKS
    )
    waits_for = second.waits_for if first.waits_for and device in (Device.NONE, Device.IDLE) else ""
    if DEBUGGER_WAIT in (first.waits_for, second.waits_for):
        waits_for = DEBUGGER_WAIT
    collective = Collective(int(rank["collective"]))
    waiting_since = since if collective is Collective.NONE else int(rank["collective_since_ns"]) * 1e-9
    has_peer = collective in (Collective.SEND, Collective.RECV) and rank["peer"] >= 0
    return RankState(
        rank=int(rank["rank"]),
        phase=Phase(int(rank["phase"])).name,
        phase_seconds=now - int(rank["phase_since_ns"]) * 1e-9,
        step=int(rank["step"]) if rank["step"] >= 0 else None,
        collective=collective.name,
        group=int(rank["group"]),
        sequence=int(rank["sequence"]),
        collectives_entered=int(rank["collectives_entered"]),
        waiting_seconds=now - waiting_since,
        process_state=second.process_state,
        moving=first.stack != second.stack or (worked and may_work),
        stack=second.stack,
        overdue=overdue,
        device=device.name,
        device_collective=Collective(int(rank["device_collective"])).name,
        device_group=int(rank["device_group"]),
        device_sequence=int(rank["device_sequence"]),
        peer=int(rank["peer"]) if has_peer else None,
        entered=format_entered(_read_entered_sequences(rank)),
        ended=ended,
        waits_for=waits_for,
        excused=bool(waits_for) and (now - since < patience or waits_for == DEBUGGER_WAIT),
    )


def _read_entered_sequences(rank: np.void) -> dict[int, int]:
    """Return the last sequence number that the rank has entered in each of its groups."""
    entries = rank["entered"][1:]
    return {int(entry["group"]): int(entry["sequence"]) for entry in entries[entries["group"] > 0]}


def _select_named_communicators(
    communicators: Collection[Communicator], states: Collection[RankState]
) -> tuple[Communicator, ...]:
    """Return the communicators that `states` refer to."""
    groups = {group for state in states for group in (state.group, state.device_group)}
    selected = {
        communicator.identity: communicator for communicator in communicators if communicator.identity in groups
    }
    return truncate_communicators(selected.values())


def estimate_step_seconds(records: NDArray[np.void]) -> float | None:
    """Return the median duration of the last training steps in seconds, or of the last synchronizations if longer.

    None: there are none.
    """
    training = records[records["phase"] == Phase.TRAIN]
    medians = (
        _compute_median_seconds(training[training["kind"] == kind])
        for kind in (RecordKind.STEP, RecordKind.SYNCHRONIZATION)
    )
    return max((seconds for seconds in medians if seconds is not None), default=None)


def _clear_polled_fields(rank: np.void) -> bytes:
    """Return the state without the fields whose change is not progress."""
    state = rank.copy()
    for name in POLLED_DEVICE_FIELDS:
        state[name] = 0
    content: bytes = state.tobytes()
    return content


def _compute_median_seconds(records: NDArray[np.void]) -> float | None:
    recent = records[-RECENT_STEP_RECORDS:]
    return median((recent["end_ns"] - recent["start_ns"]).tolist()) * 1e-9 if len(recent) else None

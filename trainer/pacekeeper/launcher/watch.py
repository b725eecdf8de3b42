"""Notices that this worker's ranks make no progress, and says what each of them is doing. Pure.

It accuses nobody: in a job that hangs, every worker stalls, and most of them only wait for the culprit. Which rank that
is follows from all workers' reports together (`pacekeeper_analysis.diagnose.hang`). Its edge, which looks at processes
and neighbours, is `inspection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.communicators import Communicator, truncate_communicators, format_entered
from pacekeeper_analysis.diagnose.hang import OUTSIDE_COLLECTIVES_SECONDS
from pacekeeper_analysis.records import POLLED_DEVICE_FIELDS, Collective, Device, RecordKind, Phase
from pacekeeper_analysis.reports import DEBUGGER_WAIT, FaultReport, FaultKind, RankState

from .rounds import RoundState
from .settings import LauncherSettings

MIN_ARMED_STEPS = 5
"""Steps of the round before the training phase's deadline is taken from them."""
MIN_STALL_SECONDS, STALL_STEPS = 2.0, 10
"""The training phase's deadline: so many seconds, or so many of the rank's steps where they are longer."""
MIN_UNARMED_STALL_SECONDS, UNARMED_STALL_STEPS = 30.0, 100
"""The same for the first steps of a round, whose step time is known from before it only."""
MIN_LOAD_STALL_SECONDS, LOAD_STALL_WAITS = 60.0, 20
"""A loader's deadline: so many seconds, or so many of the round's longest waits for it where they are longer."""
RECENT_STEP_RECORDS = 32
PROCESS_SAMPLE_INTERVAL_SECONDS = 0.5
"""Seconds between two looks at a rank that tell whether it moves."""
PROCESS_SAMPLE_COST_TICKS = 2
"""Processor time that the rank may be charged for writing its stack at the first look."""
MAX_HOST_WORK_SECONDS = 30.0
"""Seconds for which a rank whose GPU is idle may keep a processor busy at one place of its script: it works. After that
it spins for a kernel of its own that never ends."""
FIRST_STALL_REPORT_PAUSE_SECONDS, MAX_STALL_REPORT_PAUSE_SECONDS = 3.0, 15.0
"""Seconds until a stall that lasts is reported again; doubles up to the second."""


def compute_stall_deadline(
    phase: Phase,
    steps_in_round: int,
    step_seconds: float,
    settings: LauncherSettings,
    earlier_step_seconds: float = 0.0,
    longest_load: float = 0.0,
) -> float:
    """How long a rank may show no progress (seconds).

    step_seconds: the median of its recent steps, or of its synchronisations where those take longer.
    earlier_step_seconds: the same of the round before, or of the plan where there was none here; 0: unknown.
    longest_load: it has waited for its loader in this round; 0: it has not yet, and the first batch may take long.
    """
    if phase is Phase.LOAD and longest_load > 0:
        return min(settings.phase_deadline, max(MIN_LOAD_STALL_SECONDS, LOAD_STALL_WAITS * longest_load))
    if phase is not Phase.TRAIN:
        return settings.phase_deadline
    if settings.hang_deadline is not None:
        return settings.hang_deadline
    if steps_in_round >= MIN_ARMED_STEPS:
        return max(MIN_STALL_SECONDS, STALL_STEPS * step_seconds)
    if earlier_step_seconds > 0:
        return max(MIN_UNARMED_STALL_SECONDS, UNARMED_STALL_STEPS * earlier_step_seconds)
    return settings.phase_deadline


@dataclass(frozen=True)
class ProcessSample:
    """What one look at a rank's process has seen. Processor time is in clock ticks."""

    process_state: str = ""  # letter of /proc/<pid>/stat; "": gone
    ticks: int = 0  # of the main thread
    stack: str = ""  # of the main thread, innermost call last
    helper_ticks: int = 0  # of its other threads, and of all processes below it
    waits_for: str = ""  # what no rank gives (`waits.describe_wait`); "": nothing of the kind


@dataclass
class _Progress:
    """What a rank's state was when it last changed, and when that was (seconds, monotonic)."""

    state: bytes
    changed_at: float
    step_seconds: float | None = None  # asked for only when it matters


@dataclass
class StallDetector:
    """Watches the ranks of one round.

    `measure_step_seconds`: how long a step takes a local rank (`estimate_step_seconds`); `is_stopped`: whether a signal has stopped
    its process. Both are asked only about a rank that stands still.
    """

    settings: LauncherSettings
    measure_step_seconds: Callable[[int], float]
    is_stopped: Callable[[int], bool]
    earlier_step_seconds: float = 0.0
    """That of the round before, or the plan's where there was none here that got so far; 0: it is not known."""
    _progress: dict[int, _Progress] = field(default_factory=dict)
    _reports: int = 0
    _reports_of_this_stall: int = 0
    _report_at: float = 0.0

    def check(self, ranks: Mapping[int, np.void], now: float, ended: Collection[int] = ()) -> bool:
        """Whether a stall is to be reported now. Call it often.

        `ranks`: `records.STATE` by local rank; `ended`: local ranks that have exited with code 0; `now`: seconds,
        monotonic.
        """
        # Ended ranks are looked at, too: a report has the time of their last progress.
        stalled = [local for local, rank in ranks.items() if self._is_stalled(local, rank, now) and local not in ended]
        if not stalled:
            self._reports_of_this_stall = 0
            self._report_at = 0.0
        return bool(stalled) and now >= self._report_at

    def begin_report(self, now: float) -> None:
        """The next one of the same stall has time."""
        self._reports += 1
        self._report_at = now + min(FIRST_STALL_REPORT_PAUSE_SECONDS * 2 ** min(self._reports_of_this_stall, 10), MAX_STALL_REPORT_PAUSE_SECONDS)
        self._reports_of_this_stall += 1

    def build_fault(
        self,
        state: RoundState,
        ranks: Mapping[int, np.void],
        samples: tuple[Mapping[int, ProcessSample], Mapping[int, ProcessSample]],
        unreachable: Collection[str],
        communicators: Collection[Communicator],
        now: float,
        wall: float,
        ended: Collection[int] = (),
    ) -> FaultReport:
        """The stall that the last `begin_report` was for.

        `looks`: two at each rank's process, PROCESS_SAMPLE_INTERVAL_SECONDS apart; `unreachable`: neighbours that did not answer;
        `communicators`: that the ranks know of, of which those are told that they are in now; `wall`: seconds since the
        epoch; `ended`: as in `look`.
        """
        first, second = samples
        patience = OUTSIDE_COLLECTIVES_SECONDS if self.settings.hang_deadline is None else self.settings.hang_deadline
        states = tuple(
            build_rank_state(
                rank,
                first.get(local, ProcessSample()),
                second.get(local, ProcessSample()),
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
            membership=state.membership,
            noticed_at=wall,
            step=min(rank.step for rank in states),
            completed_step=any(int(rank["steps_in_round"]) > 0 for rank in ranks.values()),
            ranks=states,
            unreachable=tuple(unreachable),
            communicators=_select_named_communicators(communicators, states),
        )

    def step_seconds(self, ranks: Mapping[int, np.void]) -> float:
        """For the next round: how long a step takes the slowest rank here; what was known before, in a young round."""
        armed = [local for local, rank in ranks.items() if rank["steps_in_round"] >= MIN_ARMED_STEPS]
        return max((self.measure_step_seconds(local) for local in armed), default=self.earlier_step_seconds)

    def _is_stalled(self, local_rank: int, rank: np.void, now: float) -> bool:
        content = _clear_polled_fields(rank)
        progress = self._progress.get(local_rank)
        if progress is None or progress.state != content:
            self._progress[local_rank] = _Progress(content, now)
            return False
        silent = now - progress.changed_at
        if silent < min(MIN_STALL_SECONDS, self.settings.hang_deadline or MIN_STALL_SECONDS):
            return False
        # A stopped one is stalled whatever it was busy with.
        if self.is_stopped(local_rank):
            return True
        return int(rank["phase"]) != Phase.FINISHED and silent >= self._compute_deadline(local_rank, rank)

    def _compute_deadline(self, local_rank: int, rank: np.void) -> float:
        progress = self._progress[local_rank]
        if progress.step_seconds is None:
            progress.step_seconds = self.measure_step_seconds(local_rank)
        return compute_stall_deadline(
            Phase(int(rank["phase"])),
            int(rank["steps_in_round"]),
            progress.step_seconds,
            self.settings,
            self.earlier_step_seconds,
            int(rank["longest_load_ns"]) * 1e-9,
        )


def build_rank_state(
    rank: np.void,
    first: ProcessSample,
    second: ProcessSample,
    since: float,
    now: float,
    *,
    overdue: bool,
    ended: bool = False,
    patience: float = OUTSIDE_COLLECTIVES_SECONDS,
) -> RankState:
    """What is reported of one rank. `since`: when it last showed progress; both times are seconds, monotonic.

    `ended`: it has exited with code 0. `patience`: seconds that it may wait for what no rank gives.
    """
    device = Device(int(rank["device"]))
    # CUDA spins where it waits, so that a processor at work is no sign of life for ever.
    may_work = device is Device.NONE or (device is Device.IDLE and now - since < MAX_HOST_WORK_SECONDS)
    worked = second.ticks - first.ticks > PROCESS_SAMPLE_COST_TICKS or second.helper_ticks - first.helper_ticks > PROCESS_SAMPLE_COST_TICKS
    waits_for = second.waits_for if first.waits_for and device in (Device.NONE, Device.IDLE) else ""
    if DEBUGGER_WAIT in (first.waits_for, second.waits_for):
        waits_for = DEBUGGER_WAIT
    collective = Collective(int(rank["collective"]))
    waiting_since = since if collective is Collective.NONE else int(rank["collective_since_ns"]) * 1e-9
    return RankState(
        rank=int(rank["rank"]),
        phase=Phase(int(rank["phase"])).name,
        phase_seconds=now - int(rank["phase_since_ns"]) * 1e-9,
        step=int(rank["step"]),
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
        peer=int(rank["peer"]) if collective in (Collective.SEND, Collective.RECV) else -1,
        entered=format_entered(_read_entered_sequences(rank)),
        ended=ended,
        waits_for=waits_for,
        excused=bool(waits_for) and (now - since < patience or waits_for == DEBUGGER_WAIT),
    )


def _read_entered_sequences(rank: np.void) -> dict[int, int]:
    """How far the rank has come in each of its groups."""
    places = rank["entered"][1:]
    return {int(place["group"]): int(place["sequence"]) for place in places[places["group"] > 0]}


def _select_named_communicators(communicators: Collection[Communicator], states: Collection[RankState]) -> tuple[Communicator, ...]:
    """Those that `states` speak of."""
    named = {group for state in states for group in (state.group, state.device_group)}
    known = {each.identity: each for each in communicators if each.identity in named}
    return truncate_communicators(known.values())


def estimate_step_seconds(records: NDArray[np.void]) -> float:
    """Median duration of the last training steps, seconds, or of the last synchronisations if those take longer; 0:
    there was none."""
    training = records[records["phase"] == Phase.TRAIN]
    return max(_compute_median_seconds(training[training["kind"] == kind]) for kind in (RecordKind.STEP, RecordKind.SYNCHRONISATION))


def _clear_polled_fields(rank: np.void) -> bytes:
    """The state as far as a change in it is progress."""
    state = rank.copy()
    for name in POLLED_DEVICE_FIELDS:
        state[name] = 0
    content: bytes = state.tobytes()
    return content


def _compute_median_seconds(records: NDArray[np.void]) -> float:
    recent = records[-RECENT_STEP_RECORDS:]
    return median((recent["end_ns"] - recent["start_ns"]).tolist()) * 1e-9 if len(recent) else 0.0

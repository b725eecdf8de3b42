"""What the launchers of one membership agree on: which round runs, and who ended the last one. Pure.

The launcher of the first member is the host: it holds the `Meeting` and calls `advance` on every report. Every launcher
sends its `Report` when it changes and once a second, and gets its `View` of the meeting when that changes and once a
second. Both are states, not events: sent twice, late, or again over a new connection, they mean the same. The round's
number fences them: whoever speaks of an older round is not heard about the present one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Self

from pacekeeper_analysis.reading import Cut, Longest, Within, read
from pacekeeper_analysis.reports import Count, Name, Position

MOST_MISSING = 8
"""So many of the workers that have not come are named."""


class Status(StrEnum):
    """What a launcher's ranks are doing."""

    ENDING = "Ending"  # they have failed, left or been killed; not all are gone yet
    READY = "Ready"  # none is left: a new round may start here
    RUNNING = "Running"
    FINISHED = "Finished"  # all ended well


class Ending(IntEnum):
    """How a launcher's ranks came to end, best explanation of a round's end first."""

    LEFT = 0  # they left because they were told to
    SIGNAL = 1  # killed from outside the script
    ERROR = 2  # the script failed
    CONNECTION = 3  # the script, or NCCL's watchdog, failed because a peer was gone: most often a consequence
    ENDED = 4  # ended by their own launcher


@dataclass(frozen=True)
class Report:
    """What a launcher says of itself."""

    worker: Name
    incarnation: Name  # of the launcher's process: a restarted launcher is another one
    membership: Count
    status: Status
    round: Count  # the last one it has seen, by itself or in a view
    ending: Ending = Ending.ENDED  # of its ranks of `round`; meaningful when ENDING or READY
    ran: bool = False  # it has run a round of this membership
    restarts: Count = 0  # rounds of this membership after the first
    barren: Count = 0  # rounds in a row, up to `round`, without a completed step
    workers: Count = 1  # launchers of the membership, by its plan
    first_round: Count = 1  # the plan's: no round of the membership is below it
    restart_limit: Count = 0  # the plan's
    first_rank: Position = -1  # of its ranks in the job
    finished_round: Count = 0  # the last one in which all its ranks have ended well; 0: none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return read(cls, data)


class MeetingStage(StrEnum):
    GATHERING = "Gathering"  # waits until every launcher is ready
    RUNNING = "Running"
    FINISHED = "Finished"  # the ranks of all launchers ended well
    HALTED = "Halted"  # no further round without a new membership


@dataclass(frozen=True)
class View:
    """What the meeting tells one launcher."""

    membership: Count
    phase: MeetingStage = MeetingStage.GATHERING
    round: Count = 0  # that runs; while gathering, the last that ran or was seen
    port: Annotated[int, Within(0, 65535)] = 0  # of the round's store, on the host
    restarts: Count = 0
    included: bool = False  # this launcher (this incarnation of it) takes part in the round
    ended_by: Name = ""  # worker whose ranks ended the round before, as far as is known
    ending: Ending = Ending.ENDED  # how they ended it
    reason: Annotated[str, Cut(2_000)] = ""  # of HALTED
    # While gathering: the first workers of the round before that are not ready again.
    missing: Annotated[tuple[Name, ...], Longest(64)] = ()
    finished_rank: Position = -1  # one that had ended well when the round before ended; -1: none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return read(cls, data)


@dataclass(frozen=True)
class Meeting:
    """The host's state of one membership's meeting."""

    membership: int
    phase: MeetingStage = MeetingStage.GATHERING
    round: int = 0
    port: int = 0  # filled in by the host's edge when it has opened the store of a new round
    restarts: int = 0
    participants: Mapping[str, str] = field(default_factory=dict)  # worker → incarnation, of the round
    endings: tuple[tuple[str, Ending], ...] = ()  # how the round's launchers ended, in order of arrival
    finished_rank: int = -1  # one that had ended well when the round ended; -1: none
    reason: str = ""
    missing: tuple[str, ...] = ()  # of `participants`, the first that are not ready

    def view(self, worker: str, incarnation: str) -> View:
        # Whose ending explains best why the last round ended; of equals, the first to say so.
        ended_by, ending = min(self.endings, key=lambda item: item[1], default=("", Ending.ENDED))
        return View(
            membership=self.membership,
            phase=self.phase,
            round=self.round,
            port=self.port,
            restarts=self.restarts,
            included=self.participants.get(worker) == incarnation,
            ended_by=ended_by,
            ending=ending,
            finished_rank=self.finished_rank,
            reason=self.reason,
            missing=self.missing,
        )


def advance(meeting: Meeting, reports: Mapping[str, Report]) -> Meeting:
    """The meeting after the launchers' present `reports`: by worker, of this membership, of those in contact."""
    if meeting.phase is MeetingStage.RUNNING:
        ended = [report for report in reports.values() if _has_left(meeting, report)]
        if ended:
            meeting = replace(meeting, phase=MeetingStage.GATHERING, endings=(), finished_rank=-1, port=0)
        elif _all_finished(meeting, reports):
            return replace(meeting, phase=MeetingStage.FINISHED)
    if meeting.phase is MeetingStage.GATHERING:
        meeting = replace(
            meeting,
            endings=_endings(meeting, reports),
            finished_rank=_finished_rank(meeting, reports),
            missing=_missing(meeting, reports),
        )
        if reports and _all_ready(meeting, reports):
            return _next_round(meeting, reports)
    return meeting


def _has_left(meeting: Meeting, report: Report) -> bool:
    """Whether the launcher holds no running ranks of the meeting's round any more, or never did."""
    if meeting.participants.get(report.worker) != report.incarnation:
        return True
    return report.round >= meeting.round and report.status in {Status.ENDING, Status.READY}


def _all_finished(meeting: Meeting, reports: Mapping[str, Report]) -> bool:
    return all(
        (report := reports.get(worker)) is not None
        and report.status is Status.FINISHED
        and report.round == meeting.round
        for worker in meeting.participants
    )


def _endings(meeting: Meeting, reports: Mapping[str, Report]) -> tuple[tuple[str, Ending], ...]:
    """The endings of the meeting's last round, new ones behind those that were known."""
    known = dict(meeting.endings)
    for worker, report in reports.items():
        took_part = meeting.participants.get(worker) == report.incarnation
        if took_part and report.round == meeting.round and report.status in {Status.ENDING, Status.READY}:
            known.setdefault(worker, report.ending)
    return tuple(known.items())


def _finished_rank(meeting: Meeting, reports: Mapping[str, Report]) -> int:
    """Of the meeting's last round; as known before, where the launcher is no longer heard."""
    finished = [
        report.first_rank
        for worker, report in reports.items()
        if meeting.participants.get(worker) == report.incarnation and 0 < report.finished_round == meeting.round
    ]
    return min(finished, default=meeting.finished_rank)


def _missing(meeting: Meeting, reports: Mapping[str, Report]) -> tuple[str, ...]:
    """A few names are enough, and change seldom: everybody is told of each change."""
    ready = {worker for worker, report in reports.items() if report.status is Status.READY}
    return tuple(sorted(set(meeting.participants) - ready)[:MOST_MISSING])


def _all_ready(meeting: Meeting, reports: Mapping[str, Report]) -> bool:
    """Whether every launcher of the membership is ready and knows that the meeting's last round is over."""
    expected = max(report.workers for report in reports.values())
    ready = [r for r in reports.values() if r.status is Status.READY and r.round >= meeting.round]
    return len(ready) >= expected


def _next_round(meeting: Meeting, reports: Mapping[str, Report]) -> Meeting:
    """The round after the last one that any launcher has seen, or the end of restarting."""
    everyone = reports.values()
    again = any(report.ran for report in everyone)
    restarts = max(meeting.restarts, *(report.restarts for report in everyone)) + again
    limit = max(report.restart_limit for report in everyone)
    # A launcher that has seen a completed step speaks for all: steps are collective.
    barren = min(report.barren for report in everyone)
    reason = ""
    if barren >= 2:
        reason = f"{barren} rounds in a row ended without a completed step"
    elif restarts > limit:
        reason = f"the plan allows {limit} restarts in this membership, and they are used up"
    if reason:
        return replace(meeting, phase=MeetingStage.HALTED, reason=reason)
    first = max(report.first_round for report in everyone)
    return replace(
        meeting,
        phase=MeetingStage.RUNNING,
        round=max(first, 1 + max(meeting.round, *(report.round for report in everyone))),
        restarts=restarts,
        missing=(),
        participants={report.worker: report.incarnation for report in everyone},
    )

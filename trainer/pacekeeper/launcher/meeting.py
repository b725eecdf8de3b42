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

from pacekeeper_analysis.reading import Truncated, MaxLength, Within, read_dataclass
from pacekeeper_analysis.reports import Count, Name, Position

MAX_MISSING_WORKERS_NAMED = 8
"""So many of the workers that have not come are named."""


class ParticipantStatus(StrEnum):
    """What a launcher's ranks are doing."""

    ENDING = "Ending"  # they have failed, left or been killed; not all are gone yet
    READY = "Ready"  # none is left: a new round may start here
    RUNNING = "Running"
    FINISHED = "Finished"  # all ended well


class RanksEnding(IntEnum):
    """How a launcher's ranks came to end, best explanation of a round's end first."""

    LEFT = 0  # they left because they were told to
    SIGNAL = 1  # killed from outside the script
    ERROR = 2  # the script failed
    CONNECTION = 3  # the script, or NCCL's watchdog, failed because a peer was gone: most often a consequence
    ENDED = 4  # ended by their own launcher


@dataclass(frozen=True)
class ParticipantReport:
    """What a launcher says of itself."""

    worker: Name
    incarnation: Name  # of the launcher's process: a restarted launcher is another one
    membership: Count
    status: ParticipantStatus
    round: Count  # the last one it has seen, by itself or in a view
    ending: RanksEnding = RanksEnding.ENDED  # of its ranks of `round`; meaningful when ENDING or READY
    has_run: bool = False  # it has run a round of this membership
    restarts: Count = 0  # rounds of this membership after the first
    no_progress_rounds: Count = 0  # rounds in a row, up to `round`, without a completed step
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
        return read_dataclass(cls, data)


class RendezvousStage(StrEnum):
    GATHERING = "Gathering"  # waits until every launcher is ready
    RUNNING = "Running"
    FINISHED = "Finished"  # the ranks of all launchers ended well
    HALTED = "Halted"  # no further round without a new membership


@dataclass(frozen=True)
class RendezvousView:
    """What the meeting tells one launcher."""

    membership: Count
    stage: RendezvousStage = RendezvousStage.GATHERING
    round: Count = 0  # that runs; while gathering, the last that ran or was seen
    port: Annotated[int, Within(0, 65535)] = 0  # of the round's store, on the host
    restarts: Count = 0
    included: bool = False  # this launcher (this incarnation of it) takes part in the round
    ended_by: Name = ""  # worker whose ranks ended the round before, as far as is known
    ending: RanksEnding = RanksEnding.ENDED  # how they ended it
    reason: Annotated[str, Truncated(2_000)] = ""  # of HALTED
    # While gathering: the first workers of the round before that are not ready again.
    missing: Annotated[tuple[Name, ...], MaxLength(64)] = ()
    finished_rank: Position = -1  # one that had ended well when the round before ended; -1: none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return read_dataclass(cls, data)


@dataclass(frozen=True)
class Rendezvous:
    """The host's state of one membership's meeting."""

    membership: int
    stage: RendezvousStage = RendezvousStage.GATHERING
    round: int = 0
    port: int = 0  # filled in by the host's edge when it has opened the store of a new round
    restarts: int = 0
    participants: Mapping[str, str] = field(default_factory=dict)  # worker → incarnation, of the round
    endings: tuple[tuple[str, RanksEnding], ...] = ()  # how the round's launchers ended, in order of arrival
    finished_rank: int = -1  # one that had ended well when the round ended; -1: none
    reason: str = ""
    missing: tuple[str, ...] = ()  # of `participants`, the first that are not ready

    def build_view(self, worker: str, incarnation: str) -> RendezvousView:
        # Whose ending explains best why the last round ended; of equals, the first to say so.
        ended_by, ending = min(self.endings, key=lambda item: item[1], default=("", RanksEnding.ENDED))
        return RendezvousView(
            membership=self.membership,
            stage=self.stage,
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


def advance_rendezvous(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> Rendezvous:
    """The meeting after the launchers' present `reports`: by worker, of this membership, of those in contact."""
    if rendezvous.stage is RendezvousStage.RUNNING:
        ended = [report for report in reports.values() if _has_left(rendezvous, report)]
        if ended:
            rendezvous = replace(rendezvous, phase=RendezvousStage.GATHERING, endings=(), finished_rank=-1, port=0)
        elif _has_finished(rendezvous, reports):
            return replace(rendezvous, phase=RendezvousStage.FINISHED)
    if rendezvous.stage is RendezvousStage.GATHERING:
        rendezvous = replace(
            rendezvous,
            endings=_collect_endings(rendezvous, reports),
            finished_rank=_find_finished_rank(rendezvous, reports),
            missing=_list_missing_workers(rendezvous, reports),
        )
        if reports and _is_ready(rendezvous, reports):
            return _start_next_round(rendezvous, reports)
    return rendezvous


def _has_left(rendezvous: Rendezvous, report: ParticipantReport) -> bool:
    """Whether the launcher holds no running ranks of the meeting's round any more, or never did."""
    if rendezvous.participants.get(report.worker) != report.incarnation:
        return True
    return report.round >= rendezvous.round and report.status in {ParticipantStatus.ENDING, ParticipantStatus.READY}


def _has_finished(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> bool:
    return all(
        (report := reports.get(worker)) is not None
        and report.status is ParticipantStatus.FINISHED
        and report.round == rendezvous.round
        for worker in rendezvous.participants
    )


def _collect_endings(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> tuple[tuple[str, RanksEnding], ...]:
    """The endings of the meeting's last round, new ones behind those that were known."""
    known = dict(rendezvous.endings)
    for worker, report in reports.items():
        took_part = rendezvous.participants.get(worker) == report.incarnation
        if took_part and report.round == rendezvous.round and report.status in {ParticipantStatus.ENDING, ParticipantStatus.READY}:
            known.setdefault(worker, report.ending)
    return tuple(known.items())


def _find_finished_rank(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> int:
    """Of the meeting's last round; as known before, where the launcher is no longer heard."""
    finished = [
        report.first_rank
        for worker, report in reports.items()
        if rendezvous.participants.get(worker) == report.incarnation and 0 < report.finished_round == rendezvous.round
    ]
    return min(finished, default=rendezvous.finished_rank)


def _list_missing_workers(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> tuple[str, ...]:
    """A few names are enough, and change seldom: everybody is told of each change."""
    ready = {worker for worker, report in reports.items() if report.status is ParticipantStatus.READY}
    return tuple(sorted(set(rendezvous.participants) - ready)[:MAX_MISSING_WORKERS_NAMED])


def _is_ready(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> bool:
    """Whether every launcher of the membership is ready and knows that the meeting's last round is over."""
    expected = max(report.workers for report in reports.values())
    ready = [r for r in reports.values() if r.status is ParticipantStatus.READY and r.round >= rendezvous.round]
    return len(ready) >= expected


def _start_next_round(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> Rendezvous:
    """The round after the last one that any launcher has seen, or the end of restarting."""
    everyone = reports.values()
    again = any(report.has_run for report in everyone)
    restarts = max(rendezvous.restarts, *(report.restarts for report in everyone)) + again
    limit = max(report.restart_limit for report in everyone)
    # A launcher that has seen a completed step speaks for all: steps are collective.
    barren = min(report.no_progress_rounds for report in everyone)
    reason = ""
    if barren >= 2:
        reason = f"{barren} rounds in a row ended without a completed step"
    elif restarts > limit:
        reason = f"the plan allows {limit} restarts in this membership, and they are used up"
    if reason:
        return replace(rendezvous, phase=RendezvousStage.HALTED, reason=reason)
    first = max(report.first_round for report in everyone)
    return replace(
        rendezvous,
        phase=RendezvousStage.RUNNING,
        round=max(first, 1 + max(rendezvous.round, *(report.round for report in everyone))),
        restarts=restarts,
        missing=(),
        participants={report.worker: report.incarnation for report in everyone},
    )

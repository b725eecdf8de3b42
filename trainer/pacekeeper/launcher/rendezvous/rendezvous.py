"""What the launchers of one membership agree on: which round runs, and who ended the last one. Pure.

The launcher of the first member is the server: it holds the `Rendezvous` and calls `advance_rendezvous` on every
report.
Every launcher sends its `ParticipantReport` when it changes, and once a second. It receives its `RendezvousView` when
that changes, and once a second. Both are states, not events: duplicates, delays, and reconnects do not change their
meaning. The round's number fences them: a report on an older round does not affect the present one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Self

from pacekeeper_analysis.protocol.decoding import MaxLength, Truncated, Within, read_dataclass
from pacekeeper_analysis.protocol.reports import Count, Name, Position

MAX_MISSING_WORKERS_NAMED = 8
"""Maximum number of missing workers that a view names."""


class ParticipantStatus(StrEnum):
    """The state of a launcher's ranks."""

    ENDING = "Ending"  # they have failed, left, or been killed; some have not exited yet
    READY = "Ready"  # all have exited: a new round may start here
    RUNNING = "Running"
    FINISHED = "Finished"  # all exited with code 0


class RanksEnding(IntEnum):
    """How a launcher's ranks ended, ordered by how well it explains the end of a round, best first."""

    LEFT = 0  # they left on request
    SIGNAL = 1  # killed from outside the script
    ERROR = 2  # the script failed
    CONNECTION = 3  # the script, or NCCL's watchdog, failed because it lost a peer: usually a consequence
    ENDED = 4  # ended by their own launcher


@dataclass(frozen=True)
class ParticipantReport:
    """What a launcher reports about itself."""

    worker: Name
    incarnation: Name  # of the launcher's process: a restarted launcher has another one
    membership: Count
    status: ParticipantStatus
    round: Count  # the last one it has seen, locally or in a view
    ending: RanksEnding = RanksEnding.ENDED  # of its ranks in `round`; meaningful when ENDING or READY
    has_run: bool = False  # it has run a round of this membership
    restarts: Count = 0  # rounds of this membership after the first
    no_progress_rounds: Count = 0  # consecutive rounds, up to `round`, without a completed step
    workers: Count = 1  # number of launchers of the membership, from its plan
    first_round: Count = 1  # from the plan: no round of the membership has a lower number
    restart_limit: Count = 0  # from the plan
    first_rank: Position | None = None  # the lowest of its ranks in the job; None: it has none
    finished_round: Count = 0  # the last one in which all its ranks exited with code 0; 0: none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse a report. Raises InputError that names the field."""
        return read_dataclass(cls, data)


class RendezvousStage(StrEnum):
    GATHERING = "Gathering"  # waits until every launcher is ready
    RUNNING = "Running"
    FINISHED = "Finished"  # the ranks of all launchers exited with code 0
    HALTED = "Halted"  # no further round without a new membership


@dataclass(frozen=True)
class RendezvousView:
    """The state of the rendezvous, as one launcher receives it."""

    membership: Count
    stage: RendezvousStage = RendezvousStage.GATHERING
    round: Count = 0  # the running one; while gathering, the last that ran or was seen
    port: Annotated[int, Within(0, 65535)] = 0  # of the round's store, on the server
    restarts: Count = 0
    included: bool = False  # this incarnation of this launcher takes part in the round
    ended_by: Name = ""  # worker whose ranks ended the previous round, as far as is known
    ending: RanksEnding = RanksEnding.ENDED  # how they ended it
    reason: Annotated[str, Truncated(2_000)] = ""  # why it is HALTED
    # While gathering: the first workers of the previous round that are not ready again.
    missing: Annotated[tuple[Name, ...], MaxLength(64)] = ()
    finished_rank: Position | None = None  # one that had exited with code 0 when the previous round ended

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse a view. Raises InputError that names the field."""
        return read_dataclass(cls, data)


@dataclass(frozen=True)
class Rendezvous:
    """The server's state of one membership's rendezvous."""

    membership: int
    stage: RendezvousStage = RendezvousStage.GATHERING
    round: int = 0
    port: int = 0  # set by the server when it has opened the store of a new round
    restarts: int = 0
    participants: Mapping[str, str] = field(default_factory=dict)  # worker → incarnation, in the round
    endings: tuple[tuple[str, RanksEnding], ...] = ()  # how the round's launchers ended, in order of arrival
    finished_rank: int | None = None  # one that had exited with code 0 when the round ended
    reason: str = ""
    missing: tuple[str, ...] = ()  # the first of `participants` that are not ready

    def build_view(self, worker: str, incarnation: str) -> RendezvousView:
        # The ending that best explains why the last round ended; among equals, the first that was reported.
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
    """Return the rendezvous after the launchers' present `reports`.

    `reports`: by worker, of this membership, from the launchers that are connected.
    """
    if rendezvous.stage is RendezvousStage.RUNNING:
        ended = [report for report in reports.values() if _has_left(rendezvous, report)]
        if ended:
            rendezvous = replace(rendezvous, stage=RendezvousStage.GATHERING, endings=(), finished_rank=None, port=0)
        elif _has_finished(rendezvous, reports):
            return replace(rendezvous, stage=RendezvousStage.FINISHED)
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
    """Return whether the launcher has no running ranks of the present round, or never had."""
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


def _collect_endings(
    rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]
) -> tuple[tuple[str, RanksEnding], ...]:
    """Return the endings of the last round, new ones after the known ones."""
    endings = dict(rendezvous.endings)
    for worker, report in reports.items():
        took_part = rendezvous.participants.get(worker) == report.incarnation
        if (
            took_part
            and report.round == rendezvous.round
            and report.status in {ParticipantStatus.ENDING, ParticipantStatus.READY}
        ):
            endings.setdefault(worker, report.ending)
    return tuple(endings.items())


def _find_finished_rank(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> int | None:
    """Return the lowest rank that finished in the last round; the known one if its launcher has disconnected."""
    finished = [
        report.first_rank
        for worker, report in reports.items()
        if report.first_rank is not None
        and rendezvous.participants.get(worker) == report.incarnation
        and 0 < report.finished_round == rendezvous.round
    ]
    return min(finished, default=rendezvous.finished_rank)


def _list_missing_workers(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> tuple[str, ...]:
    """Return a few names only: every change of the list is sent to every launcher."""
    ready = {worker for worker, report in reports.items() if report.status is ParticipantStatus.READY}
    return tuple(sorted(set(rendezvous.participants) - ready)[:MAX_MISSING_WORKERS_NAMED])


def _is_ready(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> bool:
    """Return whether every launcher of the membership is ready and has seen the end of the last round."""
    expected = max(report.workers for report in reports.values())
    ready = [r for r in reports.values() if r.status is ParticipantStatus.READY and r.round >= rendezvous.round]
    return len(ready) >= expected


def _start_next_round(rendezvous: Rendezvous, reports: Mapping[str, ParticipantReport]) -> Rendezvous:
    """Start the round after the last one that any launcher has seen, or halt if no restart is allowed."""
    participants = reports.values()
    is_restart = any(report.has_run for report in participants)
    restarts = max(rendezvous.restarts, *(report.restarts for report in participants)) + is_restart
    restart_limit = max(report.restart_limit for report in participants)
    # One launcher that has seen a completed step is enough: steps are collective.
    no_progress_rounds = min(report.no_progress_rounds for report in participants)
    reason = ""
    if no_progress_rounds >= 2:
        reason = f"{no_progress_rounds} rounds in a row ended without a completed step"
    elif restarts > restart_limit:
        reason = f"the plan allows {restart_limit} restarts in this membership, and they are used up"
    if reason:
        return replace(rendezvous, stage=RendezvousStage.HALTED, reason=reason)
    first_round = max(report.first_round for report in participants)
    return replace(
        rendezvous,
        stage=RendezvousStage.RUNNING,
        round=max(first_round, 1 + max(rendezvous.round, *(report.round for report in participants))),
        restarts=restarts,
        missing=(),
        participants={report.worker: report.incarnation for report in participants},
    )

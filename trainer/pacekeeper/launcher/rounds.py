"""What the launcher does next: a pure state machine.

`decide` is called on every tick with all that the launcher sees, and answers with its next state and the commands that
the edge (`launcher.py`) carries out. It is level-triggered: it acts on what is seen, not on what has changed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pacekeeper_analysis.plan import WorkerRole, Stop, WorkerPlan
from pacekeeper_analysis.reports import FaultReport, FaultKind, LauncherState

from .meeting import RanksEnding, RendezvousStage, ParticipantReport, ParticipantStatus, RendezvousView
from .settings import LauncherSettings

PEER_LOSS_GRACE_SECONDS = 0.1
"""The launcher may see a rank that lost a peer just before it sees that peer's exit, also from another worker. The
other ranks are not killed for this duration."""
PEER_SILENCE_SECONDS = 2.0
"""Peers are heard once a second: who hears none for so long may have to end its ranks by the operator's silence."""
LEFT_EXIT_CODE = 143
"""Exit code of a rank, and of the launcher, that has left because it was told to: 128 + SIGTERM. It is not success."""


@dataclass(frozen=True)
class RankObservation:
    """One rank of the present round, as the launcher sees it."""

    rank: int
    is_gone: bool = False  # the process and everything in its process group
    exit_code: int | None = None  # negative: the signal; None: it runs
    out_of_memory: bool = False
    completed_step: bool = False  # in this round
    monitored: bool = False  # the script records what it does
    step: int = -1
    error: str = ""  # last lines of its standard error
    lost_peer: bool = False  # it failed because a peer was gone (diagnose.crash)
    ended_peer: int = -1  # rank that had exited with code 0 by then, where it failed for want of that
    managed: bool = False  # the library leaves with LEFT_EXIT_CODE once the ranks have agreed to


@dataclass(frozen=True)
class LauncherObservation:
    """All that the launcher sees at one moment."""

    wall_time: float  # seconds since the epoch, for what is reported
    plan: WorkerPlan | None = None
    view: RendezvousView | None = None  # the newest of the meeting that the launcher has joined
    ranks: Sequence[RankObservation] = ()
    end_requested: bool = False  # by a signal
    end_signal: int = signal.SIGTERM  # the one by which it is told to end
    operator_age: float = float("inf")  # seconds since the operator was heard
    peers_age: float = float("inf")  # seconds since a peer was heard in the meeting; 0 where there is none to hear


@dataclass(frozen=True)
class StartRound:
    """Fork the ranks of a round."""

    round: int
    port: int
    plan: WorkerPlan


@dataclass(frozen=True)
class TerminateRanks:
    """SIGTERM to the ranks: checkpoint, then leave."""


@dataclass(frozen=True)
class KillRanks:
    """SIGKILL to the ranks and to all that they have started."""


@dataclass(frozen=True)
class NotifyFault:
    """Hand a fault to the sidecar."""

    fault: FaultReport


@dataclass(frozen=True)
class ExitLauncher:
    """End the launcher."""

    code: int
    reason: str


LauncherCommand = StartRound | TerminateRanks | KillRanks | NotifyFault | ExitLauncher


@dataclass(frozen=True)
class RoundState:
    """What the launcher remembers from tick to tick. Times are seconds of the monotonic clock."""

    stage: LauncherState = LauncherState.WARM
    membership: int = -1  # that is followed; -1: none
    round: int = 0  # last seen, in any membership
    running: int = 0  # round whose ranks are here (running or ending); 0: none
    started: float = 0.0
    leaving_since: float | None = None  # when the ranks were told to leave (SIGTERM, suspension)
    ending_since: float | None = None  # when the round's end was noticed; None: the ranks run
    teardown_seconds: float = 0.0  # that the ranks of the last round took to be gone from then on
    kill_at: float = 0.0  # when ranks that are still there are killed; meaningful while they end
    killed_at: float | None = None
    ending: RanksEnding = RanksEnding.ENDED  # how the ranks of `round` ended
    failure: FaultReport | None = None  # of `round`, held back until the peers have said whose failure came first
    failed_at: float = 0.0
    has_run: bool = False  # a round of this membership
    finished_round: int = 0  # the last one in which all ranks here have ended well
    restarts: int = 0
    no_progress_rounds: int = 0  # rounds in a row without a completed step
    gathering_since: float = 0.0
    reported_faults: frozenset[str] = frozenset()  # names of the faults that are said once a round
    unkillable: tuple[int, ...] = ()  # ranks that are still there long after SIGKILL


@dataclass
class _RoundPass:
    """One call of `decide`: its state and commands as they come to be."""

    state: RoundState
    observation: LauncherObservation
    now: float
    settings: LauncherSettings
    commands: list[LauncherCommand] = field(default_factory=list)

    def update(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # the fields are those of RoundState

    def emit(self, command: LauncherCommand) -> None:
        self.commands.append(command)

    def notify_once(self, fault: FaultReport) -> None:
        if fault.name not in self.state.reported_faults:
            self.update(said=self.state.reported_faults | {fault.name})
            self.emit(NotifyFault(fault))

    def build_fault(self, kind: FaultKind, **details: object) -> FaultReport:
        rank = details.get("rank")
        about = str(kind) if rank is None else f"{kind}-{rank}"
        return FaultReport(
            name=f"{self.settings.worker}-{self.settings.incarnation}-r{self.state.round}-{about}".lower(),
            kind=kind,
            worker=self.settings.worker,
            round=self.state.round,
            noticed_at=self.observation.wall_time,
            membership=max(self.state.membership, 0),
            **details,  # type: ignore[arg-type]  # every caller names fields of Fault
        )


def decide_commands(state: RoundState, observation: LauncherObservation, now: float, settings: LauncherSettings) -> tuple[RoundState, list[LauncherCommand]]:
    """The launcher's next state, and what is to be done."""
    turn = _RoundPass(state, observation, now, settings)
    _evaluate_rank_exits(turn)
    _report_settled_failure(turn)
    if observation.end_requested:
        turn.notify_once(turn.build_fault(FaultKind.TERMINATING))
        _leave_job(turn, code=choose_exit_code(observation.end_signal), why=f"told to end ({format_signal(observation.end_signal)})")
    elif observation.plan is None:
        turn.update(stage=LauncherState.WARM)
    elif observation.plan.stop is Stop.FINISH and not turn.state.running:
        _leave_job(turn, code=0, why="the job has finished")
    elif observation.plan.role is WorkerRole.LEAVE:
        _leave_job(turn, code=LEFT_EXIT_CODE, why="the plan has no more work for this worker")
    elif observation.plan.stop is Stop.SUSPEND:
        _suspend_ranks(turn)
    elif observation.plan.role is WorkerRole.SPARE:
        _stand_by(turn)
    else:
        _run_as_member(turn, observation.plan)
    _kill_overdue_ranks(turn)
    return turn.state, turn.commands


def choose_exit_code(signum: int) -> int:
    """The launcher's where it is told to end by this signal: a shell's 130 for Ctrl-C, else that it has left."""
    return 128 + signum if signum == signal.SIGINT else LEFT_EXIT_CODE


def format_signal(signum: int) -> str:
    return signal.Signals(signum).name


def build_participant_report(state: RoundState, plan: WorkerPlan, settings: LauncherSettings) -> ParticipantReport:
    """What the launcher tells the meeting."""
    if state.stage is LauncherState.FINISHED:
        status = ParticipantStatus.FINISHED
    elif state.running and state.ending_since is None:
        status = ParticipantStatus.RUNNING
    elif state.stage is LauncherState.GATHERING and not state.running:
        status = ParticipantStatus.READY
    else:
        status = ParticipantStatus.ENDING
    return ParticipantReport(
        worker=settings.worker,
        incarnation=settings.incarnation,
        membership=state.membership,
        status=status,
        round=state.round,
        ending=state.ending,
        has_run=state.has_run,
        restarts=state.restarts,
        no_progress_rounds=state.no_progress_rounds,
        workers=plan.workers,
        first_round=plan.round,
        restart_limit=plan.restarts,
        first_rank=min(plan.ranks, default=-1),
        finished_round=state.finished_round,
    )


def _evaluate_rank_exits(turn: _RoundPass) -> None:
    """What the ranks' exits mean."""
    state, ranks = turn.state, turn.observation.ranks
    if not state.running:
        return
    if state.ending_since is None:
        exits = [rank for rank in ranks if rank.exit_code is not None]
        failures = [rank for rank in exits if rank.exit_code != 0]
        if state.leaving_since is not None and exits:
            turn.update(ending=RanksEnding.LEFT)
            _end_ranks(turn, patience=state.leaving_since + turn.settings.grace - turn.now)
        elif failures:
            _record_failure(turn, min(failures, key=_classify_ending))
        elif len(exits) == len(ranks):
            turn.update(stage=LauncherState.FINISHED, finished_round=state.running)
            _end_ranks(turn, patience=turn.settings.linger)
        return
    if state.killed_at is None and _is_possible_consequence(turn):
        better = [rank for rank in ranks if rank.exit_code and _classify_ending(rank) < RanksEnding.CONNECTION]
        if better:
            _record_failure(turn, min(better, key=_classify_ending))
    if all(rank.is_gone for rank in ranks):
        stays = state.stage in {LauncherState.FINISHED, LauncherState.LOST}
        turn.update(teardown_seconds=turn.now - state.ending_since)
        turn.update(running=0, ending_since=None, killed_at=None, unkillable=(), gathering_since=turn.now)
        turn.update(stage=state.stage if stays else LauncherState.GATHERING)


def _is_possible_consequence(turn: _RoundPass) -> bool:
    """Return whether the round ended because a rank, here or elsewhere, lost a peer: a rank here may explain it."""
    state, view = turn.state, turn.observation.view
    by_peers = state.ending is RanksEnding.ENDED and view is not None and view.ending is RanksEnding.CONNECTION
    return by_peers or state.ending is RanksEnding.CONNECTION


def _choose_patience(turn: _RoundPass, ending: RanksEnding) -> float:
    """Return the seconds that ranks have to end by themselves in a round that ends this way."""
    if ending is RanksEnding.LEFT:
        return turn.settings.settle_timeout
    return PEER_LOSS_GRACE_SECONDS if ending is RanksEnding.CONNECTION else 0.0


def _record_failure(turn: _RoundPass, rank: RankObservation) -> None:
    """The round ends here because of `rank`, the one of this worker's that explains it best."""
    ending = _classify_ending(rank)
    turn.update(ending=ending)
    if ending is RanksEnding.LEFT:
        turn.update(failure=None)
        _end_ranks(turn, patience=_choose_patience(turn, ending))
        return
    fault = turn.build_fault(
        FaultKind.RANK_FAILED,
        rank=rank.rank,
        exit_code=rank.exit_code,
        out_of_memory=rank.out_of_memory,
        completed_step=rank.completed_step,
        step=rank.step,
        ended_peer=rank.ended_peer,
        error=rank.error,
    )
    turn.update(failure=fault, failed_at=turn.now)
    _end_ranks(turn, patience=_choose_patience(turn, ending))


def _classify_ending(rank: RankObservation) -> RanksEnding:
    assert rank.exit_code is not None
    if rank.exit_code == LEFT_EXIT_CODE and rank.managed:
        return RanksEnding.LEFT
    if rank.lost_peer:
        return RanksEnding.CONNECTION
    return RanksEnding.SIGNAL if rank.exit_code < 0 else RanksEnding.ERROR


def _end_ranks(turn: _RoundPass, patience: float = 0.0) -> None:
    """The round is over here; what is left of it after `patience` seconds is killed."""
    state = turn.state
    if not state.running:
        return
    if state.ending_since is None:
        turn.update(ending_since=turn.now, kill_at=turn.now + patience)
        if state.ending is not RanksEnding.LEFT:
            turn.update(barren=0 if _has_made_progress(turn) else state.no_progress_rounds + 1)
    else:
        turn.update(kill_at=min(state.kill_at, turn.now + patience))


def _has_made_progress(turn: _RoundPass) -> bool:
    """Whether the round has completed a step, or ran long enough where that cannot be seen."""
    if any(rank.monitored for rank in turn.observation.ranks):
        return any(rank.completed_step for rank in turn.observation.ranks)
    return turn.now - turn.state.started >= turn.settings.unmonitored_step


def _kill_overdue_ranks(turn: _RoundPass) -> None:
    """Kills ranks whose time is over; gives up those that cannot be killed."""
    state = turn.state
    if not state.running or state.ending_since is None:
        return
    if state.killed_at is None:
        if turn.now >= state.kill_at:
            turn.update(killed_at=turn.now)
            turn.emit(KillRanks())
    elif turn.now - state.killed_at > turn.settings.kill_timeout:
        alive = tuple(rank.rank for rank in turn.observation.ranks if not rank.is_gone)
        turn.update(stage=LauncherState.FAILED, unkillable=alive)
        error = (
            f"ranks {list(alive)} are still there {turn.settings.kill_timeout:g} s after SIGKILL; "
            "no round can start on this worker: replace it"
        )
        turn.notify_once(turn.build_fault(FaultKind.ROUND_FAILED, error=error))


def _report_settled_failure(turn: _RoundPass) -> None:
    """Passes the failure on, unless the peers say that another worker's came first and this one followed from it."""
    state, view = turn.state, turn.observation.view
    if state.failure is None:
        return
    if view is not None and view.membership == state.membership and _is_settled(view, state.failure.round):
        if view.ended_by in {"", turn.settings.worker}:
            followed = state.ending is RanksEnding.CONNECTION and state.failure.ended_peer < 0
            turn.emit(NotifyFault(replace(state.failure, ended_peer=view.finished_rank) if followed else state.failure))
        turn.update(failure=None)
    elif turn.now - state.failed_at >= turn.settings.settle_timeout:
        turn.emit(NotifyFault(state.failure))
        turn.update(failure=None)


def _is_settled(view: RendezvousView, failed_round: int) -> bool:
    """Whether all launchers have said how the failed round ended on them."""
    return view.stage is RendezvousStage.HALTED or (view.stage is RendezvousStage.RUNNING and view.round > failed_round)


def _leave_job(turn: _RoundPass, code: int, why: str) -> None:
    """Lets the ranks checkpoint and leave, then exits. A launcher whose ranks had finished has succeeded."""
    if turn.state.running:
        _terminate_ranks(turn)
        return
    if turn.state.failure is not None:
        turn.emit(NotifyFault(turn.state.failure))
    if turn.state.stage is LauncherState.FINISHED:
        code, why = 0, "its ranks have finished"
    turn.emit(ExitLauncher(code, why))


def _terminate_ranks(turn: _RoundPass) -> None:
    """SIGTERM once; whoever is still there when the grace period is over is killed."""
    state = turn.state
    if state.leaving_since is None:
        turn.update(leaving_since=turn.now)
        if state.ending_since is None:
            turn.emit(TerminateRanks())
    elif turn.now - state.leaving_since >= turn.settings.grace:
        _end_ranks(turn)


def _suspend_ranks(turn: _RoundPass) -> None:
    if turn.state.running:
        _terminate_ranks(turn)
    elif turn.state.stage is not LauncherState.FINISHED:
        turn.update(stage=LauncherState.WARM, membership=-1, teardown_seconds=0.0)


def _stand_by(turn: _RoundPass) -> None:
    """A spare: warm, without ranks."""
    _end_ranks(turn)
    turn.update(membership=-1)
    if not turn.state.running:
        turn.update(stage=LauncherState.WARM, teardown_seconds=0.0)


def _run_as_member(turn: _RoundPass, plan: WorkerPlan) -> None:
    """A member: meets the others, and runs the rounds that the meeting agrees on."""
    if plan.membership != turn.state.membership:
        _join_membership(turn, plan)
    state, view = turn.state, turn.observation.view
    if view is not None and view.membership != state.membership:
        view = None
    if _is_out_of_contact(turn):
        _end_ranks(turn)
        turn.update(stage=LauncherState.LOST)
    elif state.running:
        if view is not None and not _is_current(view, state.running):
            _end_ranks(turn, patience=_choose_patience(turn, view.ending))
    else:
        _follow_view(view, turn, plan)


def _join_membership(turn: _RoundPass, plan: WorkerPlan) -> None:
    _end_ranks(turn)
    turn.update(
        membership=plan.membership, ran=False, restarts=0, barren=0, leaving_since=None, failure=None,
        ending=RanksEnding.ENDED, gathering_since=turn.now, said=frozenset(),
    )  # fmt: skip
    if not turn.state.running:
        turn.update(stage=LauncherState.GATHERING)


def _is_out_of_contact(turn: _RoundPass) -> bool:
    limit = turn.settings.contact_timeout
    if turn.observation.operator_age <= limit or turn.observation.peers_age <= limit:
        return False
    return turn.state.running > 0 or turn.state.stage is LauncherState.LOST


def is_partitioned(state: RoundState, observation: LauncherObservation) -> bool:
    """Whether its contact to the operator decides on its ranks, or will soon."""
    return observation.peers_age > PEER_SILENCE_SECONDS and (state.running > 0 or state.stage is LauncherState.LOST)


def _is_current(view: RendezvousView, running: int) -> bool:
    """Whether the meeting still wants the round whose ranks are here."""
    return view.stage in {RendezvousStage.RUNNING, RendezvousStage.FINISHED} and view.round == running and view.included


def _follow_view(view: RendezvousView | None, turn: _RoundPass, plan: WorkerPlan) -> None:
    """What a member without ranks does about the meeting's view."""
    state = turn.state
    finished = state.stage is LauncherState.FINISHED
    if view is None:
        if not finished:
            _wait_for_participants(turn, missing=())
        return
    turn.update(restarts=max(state.restarts, view.restarts))
    if view.stage is RendezvousStage.FINISHED:
        turn.emit(ExitLauncher(0, "the ranks of all workers have finished"))
    elif view.stage is RendezvousStage.HALTED:
        turn.update(stage=LauncherState.FAILED, round=max(state.round, view.round))
    elif view.stage is RendezvousStage.RUNNING and view.included and view.round > state.round:
        turn.update(
            stage=LauncherState.RUNNING, round=view.round, running=view.round, started=turn.now, ran=True,
            ending=RanksEnding.ENDED, said=frozenset(), leaving_since=None,
        )  # fmt: skip
        turn.emit(StartRound(view.round, view.port, plan))
    elif finished and _is_current(view, state.round):
        return  # the others are still at it
    else:
        turn.update(round=max(state.round, view.round))
        _wait_for_participants(turn, view.missing)


def _wait_for_participants(turn: _RoundPass, missing: tuple[str, ...]) -> None:
    if turn.state.stage is not LauncherState.GATHERING:
        turn.update(stage=LauncherState.GATHERING, gathering_since=turn.now)
    elif turn.now - turn.state.gathering_since >= turn.settings.gather_timeout:
        who = f": {', '.join(missing)}" if missing else ""
        error = f"the other launchers have not come together within {turn.settings.gather_timeout:g} s{who}"
        turn.notify_once(turn.build_fault(FaultKind.ROUND_FAILED, error=error, missing=missing))

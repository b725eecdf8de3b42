"""What the launcher does next: a pure state machine.

`decide` is called on every tick with all that the launcher sees, and answers with its next state and the commands that
the edge (`launcher.py`) carries out. It is level-triggered: it acts on what is seen, not on what has changed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pacekeeper_analysis.plan import Role, Stop, WorkerPlan
from pacekeeper_analysis.reports import Fault, FaultKind, LauncherState

from .meeting import Ending, MeetingStage, Report, Status, View
from .settings import LauncherSettings

EXPLAIN_SECONDS = 0.1
"""The launcher may see a rank that lost a peer just before it sees that peer's exit, also from another worker. The
other ranks are not killed for this duration."""
ALONE_SECONDS = 2.0
"""Peers are heard once a second: who hears none for so long may have to end its ranks by the operator's silence."""
LEFT_EXIT_CODE = 143
"""Exit code of a rank, and of the launcher, that has left because it was told to: 128 + SIGTERM. It is not success."""


@dataclass(frozen=True)
class RankSeen:
    """One rank of the present round, as the launcher sees it."""

    rank: int
    gone: bool = False  # the process and everything in its process group
    exit_code: int | None = None  # negative: the signal; None: it runs
    out_of_memory: bool = False
    completed_step: bool = False  # in this round
    watched: bool = False  # the script records what it does
    step: int = -1
    error: str = ""  # last lines of its standard error
    lost_peer: bool = False  # it failed because a peer was gone (diagnose.crash)
    ended_peer: int = -1  # rank that had exited with code 0 by then, where it failed for want of that
    steered: bool = False  # the library leaves with LEFT_EXIT_CODE once the ranks have agreed to


@dataclass(frozen=True)
class Seen:
    """All that the launcher sees at one moment."""

    wall: float  # seconds since the epoch, for what is reported
    plan: WorkerPlan | None = None
    view: View | None = None  # the newest of the meeting that the launcher has joined
    ranks: Sequence[RankSeen] = ()
    told_to_end: bool = False  # by a signal
    end_signal: int = signal.SIGTERM  # the one by which it is told to end
    operator_age: float = float("inf")  # seconds since the operator was heard
    peers_age: float = float("inf")  # seconds since a peer was heard in the meeting; 0 where there is none to hear


@dataclass(frozen=True)
class Start:
    """Fork the ranks of a round."""

    round: int
    port: int
    plan: WorkerPlan


@dataclass(frozen=True)
class Terminate:
    """SIGTERM to the ranks: checkpoint, then leave."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL to the ranks and to all that they have started."""


@dataclass(frozen=True)
class Notify:
    """Hand a fault to the sidecar."""

    fault: Fault


@dataclass(frozen=True)
class Exit:
    """End the launcher."""

    code: int
    why: str


Command = Start | Terminate | Kill | Notify | Exit


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
    ending: Ending = Ending.ENDED  # how the ranks of `round` ended
    failure: Fault | None = None  # of `round`, held back until the peers have said whose failure came first
    failed_at: float = 0.0
    ran: bool = False  # a round of this membership
    finished_round: int = 0  # the last one in which all ranks here have ended well
    restarts: int = 0
    barren: int = 0  # rounds in a row without a completed step
    gathering_since: float = 0.0
    said: frozenset[str] = frozenset()  # names of the faults that are said once a round
    unkillable: tuple[int, ...] = ()  # ranks that are still there long after SIGKILL


@dataclass
class _Turn:
    """One call of `decide`: its state and commands as they come to be."""

    state: RoundState
    seen: Seen
    now: float
    settings: LauncherSettings
    commands: list[Command] = field(default_factory=list)

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # the fields are those of RoundState

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def notify_once(self, fault: Fault) -> None:
        if fault.name not in self.state.said:
            self.set(said=self.state.said | {fault.name})
            self.do(Notify(fault))

    def fault(self, kind: FaultKind, **details: object) -> Fault:
        rank = details.get("rank")
        about = str(kind) if rank is None else f"{kind}-{rank}"
        return Fault(
            name=f"{self.settings.worker}-{self.settings.incarnation}-r{self.state.round}-{about}".lower(),
            kind=kind,
            worker=self.settings.worker,
            round=self.state.round,
            noticed_at=self.seen.wall,
            membership=max(self.state.membership, 0),
            **details,  # type: ignore[arg-type]  # every caller names fields of Fault
        )


def decide(state: RoundState, seen: Seen, now: float, settings: LauncherSettings) -> tuple[RoundState, list[Command]]:
    """The launcher's next state, and what is to be done."""
    turn = _Turn(state, seen, now, settings)
    _look_at_ranks(turn)
    _settle_failure(turn)
    if seen.told_to_end:
        turn.notify_once(turn.fault(FaultKind.TERMINATING))
        _leave_for_good(turn, code=exit_code_of(seen.end_signal), why=f"told to end ({signal_name(seen.end_signal)})")
    elif seen.plan is None:
        turn.set(stage=LauncherState.WARM)
    elif seen.plan.stop is Stop.FINISH and not turn.state.running:
        _leave_for_good(turn, code=0, why="the job has finished")
    elif seen.plan.role is Role.LEAVE:
        _leave_for_good(turn, code=LEFT_EXIT_CODE, why="the plan has no more work for this worker")
    elif seen.plan.stop is Stop.SUSPEND:
        _suspend(turn)
    elif seen.plan.role is Role.SPARE:
        _rest(turn)
    else:
        _take_part(turn, seen.plan)
    _carry_out_ending(turn)
    return turn.state, turn.commands


def exit_code_of(signum: int) -> int:
    """The launcher's where it is told to end by this signal: a shell's 130 for Ctrl-C, else that it has left."""
    return 128 + signum if signum == signal.SIGINT else LEFT_EXIT_CODE


def signal_name(signum: int) -> str:
    return signal.Signals(signum).name


def report(state: RoundState, plan: WorkerPlan, settings: LauncherSettings) -> Report:
    """What the launcher tells the meeting."""
    if state.stage is LauncherState.FINISHED:
        status = Status.FINISHED
    elif state.running and state.ending_since is None:
        status = Status.RUNNING
    elif state.stage is LauncherState.GATHERING and not state.running:
        status = Status.READY
    else:
        status = Status.ENDING
    return Report(
        worker=settings.worker,
        incarnation=settings.incarnation,
        membership=state.membership,
        status=status,
        round=state.round,
        ending=state.ending,
        ran=state.ran,
        restarts=state.restarts,
        barren=state.barren,
        workers=plan.workers,
        first_round=plan.round,
        restart_limit=plan.restarts,
        first_rank=min(plan.ranks, default=-1),
        finished_round=state.finished_round,
    )


def _look_at_ranks(turn: _Turn) -> None:
    """What the ranks' exits mean."""
    state, ranks = turn.state, turn.seen.ranks
    if not state.running:
        return
    if state.ending_since is None:
        exits = [rank for rank in ranks if rank.exit_code is not None]
        failures = [rank for rank in exits if rank.exit_code != 0]
        if state.leaving_since is not None and exits:
            turn.set(ending=Ending.LEFT)
            _end_ranks(turn, patience=state.leaving_since + turn.settings.grace - turn.now)
        elif failures:
            _note_failure(turn, min(failures, key=_ending_of))
        elif len(exits) == len(ranks):
            turn.set(stage=LauncherState.FINISHED, finished_round=state.running)
            _end_ranks(turn, patience=turn.settings.linger)
        return
    if state.killed_at is None and _may_have_followed(turn):
        better = [rank for rank in ranks if rank.exit_code and _ending_of(rank) < Ending.CONNECTION]
        if better:
            _note_failure(turn, min(better, key=_ending_of))
    if all(rank.gone for rank in ranks):
        stays = state.stage in {LauncherState.FINISHED, LauncherState.LOST}
        turn.set(teardown_seconds=turn.now - state.ending_since)
        turn.set(running=0, ending_since=None, killed_at=None, unkillable=(), gathering_since=turn.now)
        turn.set(stage=state.stage if stays else LauncherState.GATHERING)


def _may_have_followed(turn: _Turn) -> bool:
    """Return whether the round ended because a rank, here or elsewhere, lost a peer: a rank here may explain it."""
    state, view = turn.state, turn.seen.view
    by_peers = state.ending is Ending.ENDED and view is not None and view.ending is Ending.CONNECTION
    return by_peers or state.ending is Ending.CONNECTION


def _patience(turn: _Turn, ending: Ending) -> float:
    """Return the seconds that ranks have to end by themselves in a round that ends this way."""
    if ending is Ending.LEFT:
        return turn.settings.settle
    return EXPLAIN_SECONDS if ending is Ending.CONNECTION else 0.0


def _note_failure(turn: _Turn, rank: RankSeen) -> None:
    """The round ends here because of `rank`, the one of this worker's that explains it best."""
    ending = _ending_of(rank)
    turn.set(ending=ending)
    if ending is Ending.LEFT:
        turn.set(failure=None)
        _end_ranks(turn, patience=_patience(turn, ending))
        return
    fault = turn.fault(
        FaultKind.RANK_FAILED,
        rank=rank.rank,
        exit_code=rank.exit_code,
        out_of_memory=rank.out_of_memory,
        completed_step=rank.completed_step,
        step=rank.step,
        ended_peer=rank.ended_peer,
        error=rank.error,
    )
    turn.set(failure=fault, failed_at=turn.now)
    _end_ranks(turn, patience=_patience(turn, ending))


def _ending_of(rank: RankSeen) -> Ending:
    assert rank.exit_code is not None
    if rank.exit_code == LEFT_EXIT_CODE and rank.steered:
        return Ending.LEFT
    if rank.lost_peer:
        return Ending.CONNECTION
    return Ending.SIGNAL if rank.exit_code < 0 else Ending.ERROR


def _end_ranks(turn: _Turn, patience: float = 0.0) -> None:
    """The round is over here; what is left of it after `patience` seconds is killed."""
    state = turn.state
    if not state.running:
        return
    if state.ending_since is None:
        turn.set(ending_since=turn.now, kill_at=turn.now + patience)
        if state.ending is not Ending.LEFT:
            turn.set(barren=0 if _was_useful(turn) else state.barren + 1)
    else:
        turn.set(kill_at=min(state.kill_at, turn.now + patience))


def _was_useful(turn: _Turn) -> bool:
    """Whether the round has completed a step, or ran long enough where that cannot be seen."""
    if any(rank.watched for rank in turn.seen.ranks):
        return any(rank.completed_step for rank in turn.seen.ranks)
    return turn.now - turn.state.started >= turn.settings.unwatched_step


def _carry_out_ending(turn: _Turn) -> None:
    """Kills ranks whose time is over; gives up those that cannot be killed."""
    state = turn.state
    if not state.running or state.ending_since is None:
        return
    if state.killed_at is None:
        if turn.now >= state.kill_at:
            turn.set(killed_at=turn.now)
            turn.do(Kill())
    elif turn.now - state.killed_at > turn.settings.kill_timeout:
        alive = tuple(rank.rank for rank in turn.seen.ranks if not rank.gone)
        turn.set(stage=LauncherState.FAILED, unkillable=alive)
        error = (
            f"ranks {list(alive)} are still there {turn.settings.kill_timeout:g} s after SIGKILL; "
            "no round can start on this worker: replace it"
        )
        turn.notify_once(turn.fault(FaultKind.ROUND_FAILED, error=error))


def _settle_failure(turn: _Turn) -> None:
    """Passes the failure on, unless the peers say that another worker's came first and this one followed from it."""
    state, view = turn.state, turn.seen.view
    if state.failure is None:
        return
    if view is not None and view.membership == state.membership and _is_settled(view, state.failure.round):
        if view.ended_by in {"", turn.settings.worker}:
            followed = state.ending is Ending.CONNECTION and state.failure.ended_peer < 0
            turn.do(Notify(replace(state.failure, ended_peer=view.finished_rank) if followed else state.failure))
        turn.set(failure=None)
    elif turn.now - state.failed_at >= turn.settings.settle:
        turn.do(Notify(state.failure))
        turn.set(failure=None)


def _is_settled(view: View, failed_round: int) -> bool:
    """Whether all launchers have said how the failed round ended on them."""
    return view.phase is MeetingStage.HALTED or (view.phase is MeetingStage.RUNNING and view.round > failed_round)


def _leave_for_good(turn: _Turn, code: int, why: str) -> None:
    """Lets the ranks checkpoint and leave, then exits. A launcher whose ranks had finished has succeeded."""
    if turn.state.running:
        _let_ranks_leave(turn)
        return
    if turn.state.failure is not None:
        turn.do(Notify(turn.state.failure))
    if turn.state.stage is LauncherState.FINISHED:
        code, why = 0, "its ranks have finished"
    turn.do(Exit(code, why))


def _let_ranks_leave(turn: _Turn) -> None:
    """SIGTERM once; whoever is still there when the grace period is over is killed."""
    state = turn.state
    if state.leaving_since is None:
        turn.set(leaving_since=turn.now)
        if state.ending_since is None:
            turn.do(Terminate())
    elif turn.now - state.leaving_since >= turn.settings.grace:
        _end_ranks(turn)


def _suspend(turn: _Turn) -> None:
    if turn.state.running:
        _let_ranks_leave(turn)
    elif turn.state.stage is not LauncherState.FINISHED:
        turn.set(stage=LauncherState.WARM, membership=-1, teardown_seconds=0.0)


def _rest(turn: _Turn) -> None:
    """A spare: warm, without ranks."""
    _end_ranks(turn)
    turn.set(membership=-1)
    if not turn.state.running:
        turn.set(stage=LauncherState.WARM, teardown_seconds=0.0)


def _take_part(turn: _Turn, plan: WorkerPlan) -> None:
    """A member: meets the others, and runs the rounds that the meeting agrees on."""
    if plan.membership != turn.state.membership:
        _join(turn, plan)
    state, view = turn.state, turn.seen.view
    if view is not None and view.membership != state.membership:
        view = None
    if _is_out_of_contact(turn):
        _end_ranks(turn)
        turn.set(stage=LauncherState.LOST)
    elif state.running:
        if view is not None and not _is_current(view, state.running):
            _end_ranks(turn, patience=_patience(turn, view.ending))
    else:
        _act_on(view, turn, plan)


def _join(turn: _Turn, plan: WorkerPlan) -> None:
    _end_ranks(turn)
    turn.set(
        membership=plan.membership, ran=False, restarts=0, barren=0, leaving_since=None, failure=None,
        ending=Ending.ENDED, gathering_since=turn.now, said=frozenset(),
    )  # fmt: skip
    if not turn.state.running:
        turn.set(stage=LauncherState.GATHERING)


def _is_out_of_contact(turn: _Turn) -> bool:
    limit = turn.settings.contact_timeout
    if turn.seen.operator_age <= limit or turn.seen.peers_age <= limit:
        return False
    return turn.state.running > 0 or turn.state.stage is LauncherState.LOST


def is_alone(state: RoundState, seen: Seen) -> bool:
    """Whether its contact to the operator decides on its ranks, or will soon."""
    return seen.peers_age > ALONE_SECONDS and (state.running > 0 or state.stage is LauncherState.LOST)


def _is_current(view: View, running: int) -> bool:
    """Whether the meeting still wants the round whose ranks are here."""
    return view.phase in {MeetingStage.RUNNING, MeetingStage.FINISHED} and view.round == running and view.included


def _act_on(view: View | None, turn: _Turn, plan: WorkerPlan) -> None:
    """What a member without ranks does about the meeting's view."""
    state = turn.state
    finished = state.stage is LauncherState.FINISHED
    if view is None:
        if not finished:
            _gather(turn, missing=())
        return
    turn.set(restarts=max(state.restarts, view.restarts))
    if view.phase is MeetingStage.FINISHED:
        turn.do(Exit(0, "the ranks of all workers have finished"))
    elif view.phase is MeetingStage.HALTED:
        turn.set(stage=LauncherState.FAILED, round=max(state.round, view.round))
    elif view.phase is MeetingStage.RUNNING and view.included and view.round > state.round:
        turn.set(
            stage=LauncherState.RUNNING, round=view.round, running=view.round, started=turn.now, ran=True,
            ending=Ending.ENDED, said=frozenset(), leaving_since=None,
        )  # fmt: skip
        turn.do(Start(view.round, view.port, plan))
    elif finished and _is_current(view, state.round):
        return  # the others are still at it
    else:
        turn.set(round=max(state.round, view.round))
        _gather(turn, view.missing)


def _gather(turn: _Turn, missing: tuple[str, ...]) -> None:
    if turn.state.stage is not LauncherState.GATHERING:
        turn.set(stage=LauncherState.GATHERING, gathering_since=turn.now)
    elif turn.now - turn.state.gathering_since >= turn.settings.gather_timeout:
        who = f": {', '.join(missing)}" if missing else ""
        error = f"the other launchers have not come together within {turn.settings.gather_timeout:g} s{who}"
        turn.notify_once(turn.fault(FaultKind.ROUND_FAILED, error=error, missing=missing))

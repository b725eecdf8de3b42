"""What the launcher does next: a pure state machine.

The launcher calls `decide_commands` on every tick with its observation. The result is the next state and the commands
that `launcher.py` executes. It is level-triggered: it acts on the state that it observes, not on changes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pacekeeper_analysis.protocol.plan import Stop, WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState

from ..settings import LauncherSettings
from .rendezvous import ParticipantReport, ParticipantStatus, RanksEnding, RendezvousStage, RendezvousView

PEER_LOSS_GRACE_SECONDS = 0.1
"""The launcher may observe a rank that lost a peer just before it observes that peer's exit, also on another worker.
The other ranks are not killed for this duration."""
PEER_SILENCE_SECONDS = 2.0
"""Peers report once a second. Without a report for this duration, the contact to the operator decides on the ranks."""
LEFT_EXIT_CODE = 143
"""Exit code of a rank, and of the launcher, that left on request: 128 + SIGTERM. It is not success."""


@dataclass(frozen=True)
class RankObservation:
    """One rank of the present round, as the launcher observes it."""

    rank: int
    is_gone: bool = False  # the process and everything in its process group have exited
    exit_code: int | None = None  # negative: the signal; None: it runs
    out_of_memory: bool = False
    completed_step: bool = False  # in this round
    monitored: bool = False  # the script records its steps
    step: int | None = None  # the last completed one of the job; None: unknown
    error: str = ""  # last lines of its standard error
    lost_peer: bool = False  # it failed because it lost a peer (pacekeeper_analysis.failures.crash)
    ended_peer: int | None = None  # rank that had exited with code 0 before and whose absence made it fail
    managed: bool = False  # the library exits with LEFT_EXIT_CODE once the ranks have agreed to leave


@dataclass(frozen=True)
class LauncherObservation:
    """Everything that the launcher observes in one tick."""

    wall_time: float  # seconds since the epoch, for reports
    plan: WorkerPlan | None = None
    view: RendezvousView | None = None  # the newest of the rendezvous that the launcher has joined
    ranks: Sequence[RankObservation] = ()
    end_requested: bool = False  # by a signal
    end_signal: int = signal.SIGTERM  # the signal that requested it
    operator_age: float = float("inf")  # seconds since the last contact to the operator
    peers_age: float = float(
        "inf"
    )  # seconds since the last contact to a peer in the rendezvous; 0 if there are no peers


@dataclass(frozen=True)
class StartRound:
    """Start the ranks of a round."""

    round: int
    port: int
    plan: WorkerPlan


@dataclass(frozen=True)
class TerminateRanks:
    """Send SIGTERM to the ranks: they checkpoint, then leave."""


@dataclass(frozen=True)
class KillRanks:
    """Send SIGKILL to the ranks and to all processes that they have started."""


@dataclass(frozen=True)
class NotifyFault:
    """Hand a fault to the sidecar."""

    fault: FaultReport


@dataclass(frozen=True)
class ExitLauncher:
    """Exit the launcher."""

    code: int
    reason: str


LauncherCommand = StartRound | TerminateRanks | KillRanks | NotifyFault | ExitLauncher


@dataclass(frozen=True)
class RoundState:
    """The launcher's state between ticks. Times are seconds of the monotonic clock."""

    stage: LauncherState = LauncherState.WARM
    membership: int | None = None  # the present one; None: none
    round: int = 0  # the last one seen, in any membership
    running: int | None = None  # round whose ranks are here (running or ending); None: none
    started: float = 0.0
    leaving_since: float | None = None  # when the ranks were requested to leave (SIGTERM, suspension)
    ending_since: float | None = None  # when the round's end was noticed; None: the ranks run
    teardown_seconds: float = 0.0  # from then until all ranks of the last round had exited
    kill_at: float = 0.0  # when ranks that still run are killed; meaningful while they end
    killed_at: float | None = None
    ending: RanksEnding = RanksEnding.ENDED  # how the ranks of `round` ended
    failure: FaultReport | None = None  # of `round`, held back until the peers have reported whose failure came first
    failed_at: float = 0.0
    has_run: bool = False  # a round of this membership
    finished_round: int | None = None  # the last one in which all ranks here exited with code 0; None: none
    restarts: int = 0
    no_progress_rounds: int = 0  # consecutive rounds without a completed step
    gathering_since: float = 0.0
    reported_faults: frozenset[str] = frozenset()  # names of the faults that are reported once per round
    unkillable: tuple[int, ...] = ()  # ranks that still run long after SIGKILL


@dataclass
class _RoundPass:
    """The state and the commands of one call of `decide_commands`, while they are built."""

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
            self.update(reported_faults=self.state.reported_faults | {fault.name})
            self.emit(NotifyFault(fault))

    def build_fault(self, kind: FaultKind, **details: object) -> FaultReport:
        rank = details.get("rank")
        subject = str(kind) if rank is None else f"{kind}-{rank}"
        return FaultReport(
            name=f"{self.settings.worker}-{self.settings.incarnation}-r{self.state.round}-{subject}".lower(),
            kind=kind,
            worker=self.settings.worker,
            round=self.state.round,
            noticed_at=self.observation.wall_time,
            membership=0 if self.state.membership is None else self.state.membership,
            **details,  # type: ignore[arg-type]  # every caller names fields of FaultReport
        )


def decide_commands(
    state: RoundState, observation: LauncherObservation, now: float, settings: LauncherSettings
) -> tuple[RoundState, list[LauncherCommand]]:
    """Return the launcher's next state, and the commands to execute."""
    round_pass = _RoundPass(state, observation, now, settings)
    _evaluate_rank_exits(round_pass)
    _report_settled_failure(round_pass)
    if observation.end_requested:
        round_pass.notify_once(round_pass.build_fault(FaultKind.TERMINATING))
        _leave_job(
            round_pass,
            code=choose_exit_code(observation.end_signal),
            reason=f"received {format_signal(observation.end_signal)}",
        )
    elif observation.plan is None:
        round_pass.update(stage=LauncherState.WARM)
    elif observation.plan.stop is Stop.FINISH and round_pass.state.running is None:
        _leave_job(round_pass, code=0, reason="the job has finished")
    elif observation.plan.role is WorkerRole.LEAVE:
        _leave_job(round_pass, code=LEFT_EXIT_CODE, reason="the plan has no more work for this worker")
    elif observation.plan.stop is Stop.SUSPEND:
        _suspend_ranks(round_pass)
    elif observation.plan.role is WorkerRole.SPARE:
        _stand_by(round_pass)
    else:
        _run_as_member(round_pass, observation.plan)
    _kill_overdue_ranks(round_pass)
    return round_pass.state, round_pass.commands


def choose_exit_code(signum: int) -> int:
    """Return the launcher's exit code after this signal: 130 for SIGINT, as in a shell, else LEFT_EXIT_CODE."""
    return 128 + signum if signum == signal.SIGINT else LEFT_EXIT_CODE


def format_signal(signum: int) -> str:
    return signal.Signals(signum).name


def build_participant_report(state: RoundState, plan: WorkerPlan, settings: LauncherSettings) -> ParticipantReport:
    """Build what the launcher reports to the rendezvous of its membership."""
    assert state.membership is not None
    if state.stage is LauncherState.FINISHED:
        status = ParticipantStatus.FINISHED
    elif state.running is not None and state.ending_since is None:
        status = ParticipantStatus.RUNNING
    elif state.stage is LauncherState.GATHERING and state.running is None:
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
        first_rank=min(plan.ranks, default=None),
        finished_round=state.finished_round,
    )


def _evaluate_rank_exits(round_pass: _RoundPass) -> None:
    """Update the state after exits of ranks."""
    state, ranks = round_pass.state, round_pass.observation.ranks
    if state.running is None:
        return
    if state.ending_since is None:
        exits = [rank for rank in ranks if rank.exit_code is not None]
        failures = [rank for rank in exits if rank.exit_code != 0]
        if state.leaving_since is not None and exits:
            round_pass.update(ending=RanksEnding.LEFT)
            _end_ranks(round_pass, patience=state.leaving_since + round_pass.settings.grace - round_pass.now)
        elif failures:
            _record_failure(round_pass, min(failures, key=_classify_ending))
        elif len(exits) == len(ranks):
            round_pass.update(stage=LauncherState.FINISHED, finished_round=state.running)
            _end_ranks(round_pass, patience=round_pass.settings.linger)
        return
    if state.killed_at is None and _is_possible_consequence(round_pass):
        causes = [rank for rank in ranks if rank.exit_code and _classify_ending(rank) < RanksEnding.CONNECTION]
        if causes:
            _record_failure(round_pass, min(causes, key=_classify_ending))
    if all(rank.is_gone for rank in ranks):
        keeps_stage = state.stage in {LauncherState.FINISHED, LauncherState.LOST}
        round_pass.update(teardown_seconds=round_pass.now - state.ending_since)
        round_pass.update(
            running=None, ending_since=None, killed_at=None, unkillable=(), gathering_since=round_pass.now
        )
        round_pass.update(stage=state.stage if keeps_stage else LauncherState.GATHERING)


def _is_possible_consequence(round_pass: _RoundPass) -> bool:
    """Return whether the round ended because a rank, here or elsewhere, lost a peer. A rank here may explain it."""
    state, view = round_pass.state, round_pass.observation.view
    ended_by_peers = state.ending is RanksEnding.ENDED and view is not None and view.ending is RanksEnding.CONNECTION
    return ended_by_peers or state.ending is RanksEnding.CONNECTION


def _choose_patience(round_pass: _RoundPass, ending: RanksEnding) -> float:
    """Return the seconds that ranks have to exit by themselves in a round that ends this way."""
    if ending is RanksEnding.LEFT:
        return round_pass.settings.settle_timeout
    return PEER_LOSS_GRACE_SECONDS if ending is RanksEnding.CONNECTION else 0.0


def _record_failure(round_pass: _RoundPass, rank: RankObservation) -> None:
    """End the round here because of `rank`, the rank of this worker that explains it best."""
    ending = _classify_ending(rank)
    round_pass.update(ending=ending)
    if ending is RanksEnding.LEFT:
        round_pass.update(failure=None)
        _end_ranks(round_pass, patience=_choose_patience(round_pass, ending))
        return
    fault = round_pass.build_fault(
        FaultKind.RANK_FAILED,
        rank=rank.rank,
        exit_code=rank.exit_code,
        out_of_memory=rank.out_of_memory,
        completed_step=rank.completed_step,
        step=rank.step,
        ended_peer=rank.ended_peer,
        error=rank.error,
    )
    round_pass.update(failure=fault, failed_at=round_pass.now)
    _end_ranks(round_pass, patience=_choose_patience(round_pass, ending))


def _classify_ending(rank: RankObservation) -> RanksEnding:
    assert rank.exit_code is not None
    if rank.exit_code == LEFT_EXIT_CODE and rank.managed:
        return RanksEnding.LEFT
    if rank.lost_peer:
        return RanksEnding.CONNECTION
    return RanksEnding.SIGNAL if rank.exit_code < 0 else RanksEnding.ERROR


def _end_ranks(round_pass: _RoundPass, patience: float = 0.0) -> None:
    """End the round here. Ranks that still run after `patience` seconds are killed."""
    state = round_pass.state
    if state.running is None:
        return
    if state.ending_since is None:
        round_pass.update(ending_since=round_pass.now, kill_at=round_pass.now + patience)
        if state.ending is not RanksEnding.LEFT:
            round_pass.update(no_progress_rounds=0 if _has_made_progress(round_pass) else state.no_progress_rounds + 1)
    else:
        round_pass.update(kill_at=min(state.kill_at, round_pass.now + patience))


def _has_made_progress(round_pass: _RoundPass) -> bool:
    """Return whether the round completed a step, or ran long enough if the script records no steps."""
    if any(rank.monitored for rank in round_pass.observation.ranks):
        return any(rank.completed_step for rank in round_pass.observation.ranks)
    return round_pass.now - round_pass.state.started >= round_pass.settings.unmonitored_step


def _kill_overdue_ranks(round_pass: _RoundPass) -> None:
    """Kill ranks whose time is over. If they survive SIGKILL for too long, report the worker as failed."""
    state = round_pass.state
    if state.running is None or state.ending_since is None:
        return
    if state.killed_at is None:
        if round_pass.now >= state.kill_at:
            round_pass.update(killed_at=round_pass.now)
            round_pass.emit(KillRanks())
    elif round_pass.now - state.killed_at > round_pass.settings.kill_timeout:
        alive = tuple(rank.rank for rank in round_pass.observation.ranks if not rank.is_gone)
        round_pass.update(stage=LauncherState.FAILED, unkillable=alive)
        error = (
            f"ranks {list(alive)} are still running {round_pass.settings.kill_timeout:g} s after SIGKILL; "
            "no round can start on this worker: replace it"
        )
        round_pass.notify_once(round_pass.build_fault(FaultKind.ROUND_FAILED, error=error))


def _report_settled_failure(round_pass: _RoundPass) -> None:
    """Report the failure, unless the peers report that another worker's came first and this one followed from it."""
    state, view = round_pass.state, round_pass.observation.view
    if state.failure is None:
        return
    if view is not None and view.membership == state.membership and _is_settled(view, state.failure.round):
        if view.ended_by in {"", round_pass.settings.worker}:
            is_consequence = state.ending is RanksEnding.CONNECTION and state.failure.ended_peer is None
            fault = replace(state.failure, ended_peer=view.finished_rank) if is_consequence else state.failure
            round_pass.emit(NotifyFault(fault))
        round_pass.update(failure=None)
    elif round_pass.now - state.failed_at >= round_pass.settings.settle_timeout:
        round_pass.emit(NotifyFault(state.failure))
        round_pass.update(failure=None)


def _is_settled(view: RendezvousView, failed_round: int) -> bool:
    """Return whether all launchers have reported how the failed round ended on them."""
    return view.stage is RendezvousStage.HALTED or (view.stage is RendezvousStage.RUNNING and view.round > failed_round)


def _leave_job(round_pass: _RoundPass, code: int, reason: str) -> None:
    """Let the ranks checkpoint and leave, then exit. If the ranks had finished, the exit code is 0."""
    if round_pass.state.running is not None:
        _terminate_ranks(round_pass)
        return
    if round_pass.state.failure is not None:
        round_pass.emit(NotifyFault(round_pass.state.failure))
    if round_pass.state.stage is LauncherState.FINISHED:
        code, reason = 0, "its ranks have finished"
    round_pass.emit(ExitLauncher(code, reason))


def _terminate_ranks(round_pass: _RoundPass) -> None:
    """Send SIGTERM once, and end the ranks that still run after the grace period."""
    state = round_pass.state
    if state.leaving_since is None:
        round_pass.update(leaving_since=round_pass.now)
        if state.ending_since is None:
            round_pass.emit(TerminateRanks())
    elif round_pass.now - state.leaving_since >= round_pass.settings.grace:
        _end_ranks(round_pass)


def _suspend_ranks(round_pass: _RoundPass) -> None:
    if round_pass.state.running is not None:
        _terminate_ranks(round_pass)
    elif round_pass.state.stage is not LauncherState.FINISHED:
        round_pass.update(stage=LauncherState.WARM, membership=None, teardown_seconds=0.0)


def _stand_by(round_pass: _RoundPass) -> None:
    """Act as a spare: warm, without ranks."""
    _end_ranks(round_pass)
    round_pass.update(membership=None)
    if round_pass.state.running is None:
        round_pass.update(stage=LauncherState.WARM, teardown_seconds=0.0)


def _run_as_member(round_pass: _RoundPass, plan: WorkerPlan) -> None:
    """Act as a member: join the rendezvous, and run the rounds that it agrees on."""
    if plan.membership != round_pass.state.membership:
        _join_membership(round_pass, plan)
    state, view = round_pass.state, round_pass.observation.view
    if view is not None and view.membership != state.membership:
        view = None
    if _is_out_of_contact(round_pass):
        _end_ranks(round_pass)
        round_pass.update(stage=LauncherState.LOST)
    elif state.running is not None:
        if view is not None and not _is_current(view, state.running):
            _end_ranks(round_pass, patience=_choose_patience(round_pass, view.ending))
    else:
        _follow_view(view, round_pass, plan)


def _join_membership(round_pass: _RoundPass, plan: WorkerPlan) -> None:
    _end_ranks(round_pass)
    round_pass.update(
        membership=plan.membership, has_run=False, restarts=0, no_progress_rounds=0, leaving_since=None, failure=None,
        ending=RanksEnding.ENDED, gathering_since=round_pass.now, reported_faults=frozenset(),
    )  # fmt: skip
    if round_pass.state.running is None:
        round_pass.update(stage=LauncherState.GATHERING)


def _is_out_of_contact(round_pass: _RoundPass) -> bool:
    """Return whether another worker may have replaced this one.

    Once ranks have ended for that, only the operator can tell: peers may have been replaced, too.
    """
    observation, limit = round_pass.observation, round_pass.settings.contact_timeout
    if round_pass.state.stage is LauncherState.LOST:
        return observation.operator_age > limit
    return round_pass.state.running is not None and min(observation.operator_age, observation.peers_age) > limit


def is_partitioned(state: RoundState, observation: LauncherObservation) -> bool:
    """Return whether the launcher's contact to the operator decides on its ranks, or will soon."""
    return state.stage is LauncherState.LOST or (
        state.running is not None and observation.peers_age > PEER_SILENCE_SECONDS
    )


def _is_current(view: RendezvousView, running: int) -> bool:
    """Return whether the rendezvous still includes the round whose ranks are here."""
    return view.stage in {RendezvousStage.RUNNING, RendezvousStage.FINISHED} and view.round == running and view.included


def _follow_view(view: RendezvousView | None, round_pass: _RoundPass, plan: WorkerPlan) -> None:
    """Follow the rendezvous's view as a member without ranks."""
    state = round_pass.state
    finished = state.stage is LauncherState.FINISHED
    if view is None:
        if not finished:
            _wait_for_participants(round_pass, missing=())
        return
    round_pass.update(restarts=max(state.restarts, view.restarts))
    if view.stage is RendezvousStage.FINISHED:
        round_pass.emit(ExitLauncher(0, "the ranks of all workers have finished"))
    elif view.stage is RendezvousStage.HALTED:
        round_pass.update(stage=LauncherState.FAILED, round=max(state.round, view.round))
    elif view.stage is RendezvousStage.RUNNING and view.included and view.round > state.round and view.port is not None:
        round_pass.update(
            stage=LauncherState.RUNNING, round=view.round, running=view.round, started=round_pass.now, has_run=True,
            ending=RanksEnding.ENDED, reported_faults=frozenset(), leaving_since=None,
        )  # fmt: skip
        round_pass.emit(StartRound(view.round, view.port, plan))
    elif finished and _is_current(view, state.round):
        return  # other workers' ranks still run
    else:
        round_pass.update(round=max(state.round, view.round))
        _wait_for_participants(round_pass, view.missing)


def _wait_for_participants(round_pass: _RoundPass, missing: tuple[str, ...]) -> None:
    if round_pass.state.stage is not LauncherState.GATHERING:
        round_pass.update(stage=LauncherState.GATHERING, gathering_since=round_pass.now)
    elif round_pass.now - round_pass.state.gathering_since >= round_pass.settings.gather_timeout:
        names = f": {', '.join(missing)}" if missing else ""
        error = f"the other launchers have not joined within {round_pass.settings.gather_timeout:g} s{names}"
        round_pass.notify_once(round_pass.build_fault(FaultKind.ROUND_FAILED, error=error, missing=missing))

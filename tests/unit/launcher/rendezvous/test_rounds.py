"""What the launcher does next, without a process or a clock."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace

import pytest

from pacekeeper.launcher.rendezvous.rendezvous import ParticipantStatus, RanksEnding, RendezvousStage, RendezvousView
from pacekeeper.launcher.rendezvous.rounds import (
    ExitLauncher,
    KillRanks,
    LauncherCommand,
    LauncherObservation,
    NotifyFault,
    RankObservation,
    RoundState,
    StartRound,
    TerminateRanks,
    build_participant_report,
    decide_commands,
    is_partitioned,
)
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper_analysis.protocol.plan import Stop, WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState

SETTINGS = LauncherSettings(worker="w", address="127.0.0.1")
PLAN = WorkerPlan(
    version=1,
    membership=1,
    role=WorkerRole.MEMBER,
    ranks=(0, 1),
    world_size=4,
    workers=2,
    store="127.0.0.1:1",
    restarts=5,
)
ROUND_1 = RendezvousView(1, RendezvousStage.RUNNING, 1, port=9, included=True)
GATHERING = RendezvousView(1, RendezvousStage.GATHERING, 1)
ALIVE = (RankObservation(0), RankObservation(1))
GONE = (RankObservation(0, is_gone=True, exit_code=-9), RankObservation(1, is_gone=True, exit_code=-9))


@dataclass
class Machine:
    """The state machine with a hand on its clock; `seen` is the world as it was last shown."""

    now: float = 100.0
    state: RoundState = field(default_factory=RoundState)
    seen: LauncherObservation = field(
        default_factory=lambda: LauncherObservation(wall_time=0.0, operator_age=0.0, peers_age=0.0)
    )

    def see(self, after: float = 0.0, **changes: object) -> list[LauncherCommand]:
        """The commands, when the world has changed and `after` seconds have passed."""
        self.now += after
        self.seen = replace(self.seen, **changes)  # type: ignore[arg-type]  # fields of Seen
        self.state, commands = decide_commands(self.state, self.seen, self.now, SETTINGS)
        return commands

    def status(self) -> ParticipantStatus:
        return build_participant_report(self.state, self.seen.plan or PLAN, SETTINGS).status

    def stage(self) -> LauncherState:
        return self.state.stage


@pytest.fixture
def running() -> Machine:
    """A launcher whose two ranks run in round 1."""
    machine = Machine()
    machine.see(plan=PLAN)
    (start,) = machine.see(view=ROUND_1)
    assert start == StartRound(1, 9, PLAN)
    machine.see(ranks=ALIVE)
    assert (machine.stage(), machine.status()) == (LauncherState.RUNNING, ParticipantStatus.RUNNING)
    return machine


def notified(commands: list[LauncherCommand]) -> list[FaultKind]:
    return [command.fault.kind for command in commands if isinstance(command, NotifyFault)]


def failed(rank: int, exit_code: int, **fields: object) -> tuple[RankObservation, ...]:
    seen = [RankObservation(0), RankObservation(1)]
    seen[rank] = RankObservation(rank, exit_code=exit_code, **fields)  # type: ignore[arg-type]
    return tuple(seen)


def test_a_launcher_without_a_plan_is_warm() -> None:
    machine = Machine()
    assert machine.see() == []
    assert machine.stage() is LauncherState.WARM


def test_a_member_is_ready_until_the_meeting_starts_a_round() -> None:
    machine = Machine()
    assert machine.see(plan=PLAN) == []
    assert (machine.stage(), machine.status()) == (LauncherState.GATHERING, ParticipantStatus.READY)
    assert machine.see(view=replace(ROUND_1, included=False)) == []
    assert machine.see(view=replace(ROUND_1, membership=2)) == []


def test_a_round_is_started_once(running: Machine) -> None:
    assert running.see() == []


def test_a_failure_kills_the_rest_and_waits_for_the_peers_word(running: Machine) -> None:
    assert running.see(ranks=failed(1, -9, step=7, completed_step=True)) == [KillRanks()]
    assert running.status() is ParticipantStatus.ENDING
    assert running.see(ranks=GONE, view=GATHERING) == []
    assert running.status() is ParticipantStatus.READY
    notify, start = running.see(view=replace(ROUND_1, round=2, ended_by="w"))
    assert isinstance(notify, NotifyFault)
    fault = notify.fault
    assert (fault.rank, fault.exit_code, fault.step, fault.round, fault.completed_step) == (1, -9, 7, 1, True)
    assert isinstance(start, StartRound)


def test_a_failure_that_followed_from_a_peers_is_kept_quiet(running: Machine) -> None:
    running.see(ranks=failed(1, 1, lost_peer=True))
    running.see(ranks=GONE, view=GATHERING)
    assert notified(running.see(view=replace(ROUND_1, round=2, ended_by="other"))) == []
    assert notified(running.see(after=60)) == []


@pytest.mark.parametrize(("lost_peer", "ended_peer"), [(True, 2), (False, None)])
def test_who_failed_for_want_of_ranks_that_had_ended_well_elsewhere_says_so(
    running: Machine, lost_peer: bool, ended_peer: int | None
) -> None:
    running.see(ranks=failed(1, 1, lost_peer=lost_peer))
    running.see(after=1)
    running.see(ranks=GONE, view=GATHERING)
    told, _ = running.see(view=replace(ROUND_1, round=2, ended_by=SETTINGS.worker, finished_rank=2))
    assert isinstance(told, NotifyFault)
    assert told.fault.ended_peer == ended_peer


def test_finished_ranks_are_told_of_until_another_round_is_finished(running: Machine) -> None:
    running.see(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.see(view=replace(GATHERING, round=1))
    said = build_participant_report(running.state, PLAN, SETTINGS)
    assert (said.status, said.finished_round, said.first_rank) == (ParticipantStatus.READY, 1, 0)


def test_a_failure_is_told_when_the_peers_say_nothing(running: Machine) -> None:
    running.see(ranks=failed(1, 1))
    assert notified(running.see(ranks=GONE)) == []
    assert notified(running.see(after=SETTINGS.settle_timeout)) == [FaultKind.RANK_FAILED]
    assert notified(running.see(after=SETTINGS.settle_timeout)) == []


@pytest.mark.parametrize(
    ("first", "second", "ending", "rank"),
    [
        (RankObservation(0, exit_code=1, lost_peer=True), RankObservation(1, exit_code=-11), RanksEnding.SIGNAL, 1),
        (RankObservation(0, exit_code=1), RankObservation(1, exit_code=1, lost_peer=True), RanksEnding.ERROR, 0),
        (RankObservation(0, exit_code=-6, lost_peer=True), RankObservation(1, exit_code=1), RanksEnding.ERROR, 1),
    ],
)
def test_of_several_failures_the_best_explanation_is_told(
    running: Machine, first: RankObservation, second: RankObservation, ending: RanksEnding, rank: int
) -> None:
    running.see(ranks=(first, second))
    assert running.state.ending is ending
    assert running.state.failure is not None
    assert running.state.failure.rank == rank


def test_the_rank_whose_end_the_others_followed_from_may_be_heard_of_after_them(running: Machine) -> None:
    """The others are not killed before: all of them would look as if somebody had killed them."""
    assert running.see(ranks=failed(0, 1, lost_peer=True)) == []
    both = (
        RankObservation(0, is_gone=True, exit_code=1, lost_peer=True),
        RankObservation(1, is_gone=True, exit_code=-9, step=7),
    )
    running.see(ranks=both, after=0.02)
    assert (running.state.ending, running.state.failure and running.state.failure.rank) == (RanksEnding.SIGNAL, 1)
    assert [kind for _ in range(3) for kind in notified(running.see(after=5))] == [FaultKind.RANK_FAILED]


def test_the_rank_that_a_peers_ranks_followed_from_may_be_heard_of_after_them(running: Machine) -> None:
    """Its worker hears that the round is over before it sees why."""
    assert running.see(view=replace(GATHERING, ended_by="other", ending=RanksEnding.CONNECTION)) == []
    assert running.see(ranks=failed(1, -9), after=0.02) == [KillRanks()]
    assert build_participant_report(running.state, PLAN, SETTINGS).ending is RanksEnding.SIGNAL
    running.see(ranks=GONE, view=replace(GATHERING, ended_by=SETTINGS.worker, ending=RanksEnding.SIGNAL))
    told = running.see(view=replace(ROUND_1, round=2, ended_by=SETTINGS.worker, ending=RanksEnding.SIGNAL))
    assert notified(told) == [FaultKind.RANK_FAILED]


def test_without_a_better_explanation_the_others_are_killed_in_a_moment(running: Machine) -> None:
    running.see(ranks=failed(0, 1, lost_peer=True))
    assert running.see(after=0.2) == [KillRanks()]
    running.see(ranks=GONE)
    assert running.state.ending is RanksEnding.CONNECTION


def test_the_peers_end_a_round_without_a_fault(running: Machine) -> None:
    assert running.see(view=replace(GATHERING, ended_by="other", ending=RanksEnding.SIGNAL)) == [KillRanks()]
    assert notified(running.see(ranks=GONE, after=60)) == []
    assert running.state.ending is RanksEnding.ENDED


def test_ranks_get_time_when_a_peer_has_left_because_it_was_told_to(running: Machine) -> None:
    assert running.see(view=replace(GATHERING, ended_by="other", ending=RanksEnding.LEFT)) == []
    assert running.status() is ParticipantStatus.ENDING
    assert running.see(after=SETTINGS.settle_timeout) == [KillRanks()]


def test_a_rank_that_fails_while_the_others_leave_does_not_cost_them_their_time(running: Machine) -> None:
    left = replace(GATHERING, ended_by="other", ending=RanksEnding.LEFT)
    assert running.see(view=left) == []
    assert running.see(ranks=failed(1, 1), view=left, after=0.2) == []
    assert running.see(view=left, after=SETTINGS.settle_timeout) == [KillRanks()]


def test_no_round_before_the_killed_ranks_are_gone_and_a_fault_when_they_stay(running: Machine) -> None:
    running.see(ranks=failed(0, -9), view=GATHERING)
    stuck = (RankObservation(0, exit_code=-9, is_gone=True), RankObservation(1))
    started = running.see(ranks=stuck, view=replace(ROUND_1, round=2), after=1)
    assert not any(isinstance(command, StartRound) for command in started)
    commands = running.see(after=SETTINGS.kill_timeout)
    assert FaultKind.ROUND_FAILED in notified(commands)
    assert running.stage() is LauncherState.FAILED
    assert not any(isinstance(command, StartRound) for command in commands)
    assert FaultKind.ROUND_FAILED not in notified(running.see(after=60))
    assert list(running.state.unkillable) == [1]
    running.see(ranks=GONE)
    assert running.state.teardown_seconds == 1 + SETTINGS.kill_timeout + 60
    assert (list(running.state.unkillable), running.stage()) == ([], LauncherState.RUNNING), (
        "the kernel has let go of it"
    )


def test_a_new_membership_ends_the_ranks_before_it_is_joined(running: Machine) -> None:
    second = replace(PLAN, version=2, membership=2, round=2)
    assert running.see(plan=second) == [KillRanks()]
    assert running.status() is ParticipantStatus.ENDING
    running.see(ranks=GONE)
    assert (running.state.membership, running.status()) == (2, ParticipantStatus.READY)
    assert running.see(view=ROUND_1) == []  # of the old membership
    assert running.see(view=replace(ROUND_1, membership=2, round=2)) == [StartRound(2, 9, second)]


def test_a_new_version_of_the_same_membership_changes_nothing(running: Machine) -> None:
    assert running.see(plan=replace(PLAN, version=2, checkpoint_request=1)) == []


def test_sigterm_is_passed_on_once_and_answered_with_143(running: Machine) -> None:
    commands = running.see(end_requested=True)
    assert notified(commands) == [FaultKind.TERMINATING]
    assert TerminateRanks() in commands
    assert running.see(after=1) == []
    assert running.status() is ParticipantStatus.RUNNING, "the peers must not be killed while a checkpoint is written"
    assert running.see(ranks=failed(0, 143)) == []
    assert running.status() is ParticipantStatus.ENDING
    (end,) = running.see(ranks=tuple(replace(rank, exit_code=143, is_gone=True) for rank in ALIVE))
    assert isinstance(end, ExitLauncher)
    assert end.code == 143


def test_ranks_that_do_not_leave_are_killed_when_the_grace_period_ends(running: Machine) -> None:
    running.see(end_requested=True)
    assert running.see(after=SETTINGS.grace - 1) == []
    assert running.see(after=1) == [KillRanks()]


def test_a_rank_that_ends_well_after_sigterm_does_not_make_the_worker_look_finished(running: Machine) -> None:
    running.see(end_requested=True)
    ended = tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1))
    running.see(ranks=ended)
    (end,) = running.see()
    assert isinstance(end, ExitLauncher)
    assert end.code == 143


def test_a_rank_that_leaves_unasked_is_no_failure(running: Machine) -> None:
    """The library's ranks leave together when one of them is told to."""
    assert running.see(ranks=failed(0, 143, managed=True)) == []
    assert running.see(after=SETTINGS.settle_timeout) == [KillRanks()]
    assert notified(running.see(ranks=GONE, after=60)) == []
    assert running.state.ending is RanksEnding.LEFT


def test_the_same_code_of_a_script_that_is_only_watched_is_a_failure(running: Machine) -> None:
    assert running.see(ranks=failed(0, 143)) == [KillRanks()]
    (told,) = [command.fault for command in running.see(ranks=GONE, after=60) if isinstance(command, NotifyFault)]
    assert (told.kind, told.rank, told.exit_code) == (FaultKind.RANK_FAILED, 0, 143)


def test_finished_ranks_wait_for_the_others_and_exit_with_them(running: Machine) -> None:
    ended = tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1))
    running.see(ranks=ended)
    running.see()
    assert running.status() is ParticipantStatus.FINISHED
    assert running.see(after=600) == []
    (end,) = running.see(view=replace(ROUND_1, stage=RendezvousStage.FINISHED))
    assert isinstance(end, ExitLauncher)
    assert end.code == 0


def test_a_finished_launcher_is_ready_again_when_a_peer_fails(running: Machine) -> None:
    running.see(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.see()
    running.see(view=GATHERING)
    assert running.status() is ParticipantStatus.READY


def test_ctrl_c_ends_with_the_code_that_shells_know(running: Machine) -> None:
    running.see(end_requested=True, end_signal=signal.SIGINT)
    running.see(ranks=GONE)
    assert ExitLauncher(130, "received SIGINT") in [*running.see(), *running.see()]


def test_a_finished_launcher_that_is_told_to_end_has_succeeded(running: Machine) -> None:
    running.see(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.see()
    assert ExitLauncher(0, "its ranks have finished") in running.see(end_requested=True)


def test_what_a_finished_rank_has_left_running_gets_time_to_end_and_is_killed_then(running: Machine) -> None:
    ended = tuple(RankObservation(rank, is_gone=False, exit_code=0) for rank in (0, 1))
    assert running.see(ranks=ended) == []
    assert running.status() is ParticipantStatus.FINISHED
    assert running.see(after=SETTINGS.linger - 1) == []
    assert running.see(after=1) == [KillRanks()]
    assert running.status() is ParticipantStatus.FINISHED


@pytest.mark.parametrize(("operator", "peers", "lost"), [(9, 9, True), (9, 7, False), (7, 9, False)])
def test_ranks_end_only_without_operator_and_peers(running: Machine, operator: float, peers: float, lost: bool) -> None:
    commands = running.see(operator_age=operator, peers_age=peers)
    assert (running.stage() is LauncherState.LOST) == lost
    assert (KillRanks() in commands) == lost


def test_who_trains_and_hears_no_peer_is_alone(running: Machine) -> None:
    for age, alone in ((1.0, False), (3.0, True)):
        running.see(peers_age=age)
        assert is_partitioned(running.state, running.seen) is alone
    running.see(operator_age=9.0, peers_age=9.0)
    assert is_partitioned(running.state, running.seen), "so that it hears of the operator's return"
    waiting = Machine()
    waiting.see(plan=PLAN, peers_age=99.0)
    assert not is_partitioned(waiting.state, waiting.seen)


def test_a_lost_launcher_trains_again_only_once_the_operator_has_answered(running: Machine) -> None:
    """Its peers may have been replaced with it: a round of theirs would have the number of another one."""
    running.see(operator_age=9.0, peers_age=9.0)
    running.see(ranks=GONE)
    assert running.stage() is LauncherState.LOST
    running.see(operator_age=9.0, peers_age=0.0, after=100)
    assert (running.stage(), running.status()) == (LauncherState.LOST, ParticipantStatus.ENDING)
    assert is_partitioned(running.state, running.seen), "its sidecar asks the operator at once"
    running.see(operator_age=0.0, peers_age=0.0, after=1)
    assert (running.stage(), running.status()) == (LauncherState.GATHERING, ParticipantStatus.READY)


def test_a_launcher_without_ranks_is_never_lost() -> None:
    machine = Machine()
    machine.see(plan=PLAN, operator_age=99.0, peers_age=99.0)
    assert machine.stage() is LauncherState.GATHERING


def test_peers_that_do_not_come_are_complained_of_once() -> None:
    machine = Machine()
    machine.see(plan=PLAN)
    assert notified(machine.see(after=SETTINGS.gather_timeout)) == [FaultKind.ROUND_FAILED]
    assert notified(machine.see(after=SETTINGS.gather_timeout)) == []
    assert machine.status() is ParticipantStatus.READY, "it goes on waiting"


def test_who_has_not_come_is_named_where_the_meeting_knows(running: Machine) -> None:
    running.see(ranks=failed(0, 1))
    running.see(ranks=GONE, view=replace(GATHERING, missing=("other",)))
    (fault,) = (
        command.fault
        for command in running.see(after=SETTINGS.gather_timeout)
        if isinstance(command, NotifyFault) and command.fault.kind is FaultKind.ROUND_FAILED
    )
    assert fault.missing == ("other",)
    assert fault.error == "the other launchers have not joined within 60 s: other"


def test_a_halted_meeting_means_failed_until_the_next_membership(running: Machine) -> None:
    running.see(ranks=failed(0, 1))
    running.see(ranks=GONE, view=replace(GATHERING, stage=RendezvousStage.HALTED, reason="budget", ended_by="w"))
    assert running.stage() is LauncherState.FAILED
    running.see(plan=replace(PLAN, version=2, membership=2))
    assert running.stage() is LauncherState.GATHERING


@pytest.mark.parametrize(
    ("rank", "seconds", "barren"),
    [
        (RankObservation(0, exit_code=1, monitored=True, completed_step=True), 1, 0),
        (RankObservation(0, exit_code=1, monitored=True), 100, 1),
        (RankObservation(0, exit_code=1), 1, 1),
        (RankObservation(0, exit_code=1), 100, 0),
    ],
)
def test_a_round_without_a_step_is_barren_and_without_records_a_short_one(
    running: Machine, rank: RankObservation, seconds: float, barren: int
) -> None:
    running.see(ranks=(rank, RankObservation(1, monitored=rank.monitored)), after=seconds)
    assert running.state.no_progress_rounds == barren


def test_a_member_that_becomes_a_spare_ends_its_ranks_and_stays(running: Machine) -> None:
    assert running.see(plan=replace(PLAN, version=2, role=WorkerRole.SPARE)) == [KillRanks()]
    running.see(ranks=GONE, after=3)
    assert running.state.teardown_seconds == 0, "the next round that it takes part in follows from none of its own"
    assert running.stage() is LauncherState.WARM
    assert running.see(after=600) == []


def test_leaving_is_no_success_but_the_jobs_end_is() -> None:
    for plan, code in (
        (WorkerPlan(role=WorkerRole.LEAVE), 143),
        (WorkerPlan(role=WorkerRole.LEAVE, stop=Stop.FINISH), 0),
        (replace(PLAN, stop=Stop.FINISH), 0),
    ):
        (end,) = Machine().see(plan=plan)
        assert isinstance(end, ExitLauncher)
        assert end.code == code


def test_suspension_lets_the_ranks_leave_and_keeps_the_launcher_warm(running: Machine) -> None:
    assert running.see(plan=replace(PLAN, version=2, stop=Stop.SUSPEND)) == [TerminateRanks()]
    left = tuple(RankObservation(rank, is_gone=True, exit_code=143) for rank in (0, 1))
    running.see(ranks=left)
    assert running.see() == []
    assert running.stage() is LauncherState.WARM
    running.see(plan=replace(PLAN, version=3, membership=2), ranks=left)
    assert running.status() is ParticipantStatus.READY

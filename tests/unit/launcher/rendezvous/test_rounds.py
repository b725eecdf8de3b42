"""The launcher's next commands, without a process or a clock."""

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
    """The state machine with a clock that the test advances; `seen` is its last observation."""

    now: float = 100.0
    state: RoundState = field(default_factory=RoundState)
    seen: LauncherObservation = field(
        default_factory=lambda: LauncherObservation(wall_time=0.0, operator_age=0.0, peers_age=0.0)
    )

    def observe(self, after: float = 0.0, **changes: object) -> list[LauncherCommand]:
        """Return the commands after the observation has changed and `after` seconds have passed."""
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
    machine.observe(plan=PLAN)
    (start,) = machine.observe(view=ROUND_1)
    assert start == StartRound(1, 9, PLAN)
    machine.observe(ranks=ALIVE)
    assert (machine.stage(), machine.status()) == (LauncherState.RUNNING, ParticipantStatus.RUNNING)
    return machine


def list_faults(commands: list[LauncherCommand]) -> list[FaultKind]:
    return [command.fault.kind for command in commands if isinstance(command, NotifyFault)]


def build_failed_ranks(rank: int, exit_code: int, **fields: object) -> tuple[RankObservation, ...]:
    seen = [RankObservation(0), RankObservation(1)]
    seen[rank] = RankObservation(rank, exit_code=exit_code, **fields)  # type: ignore[arg-type]
    return tuple(seen)


def test_a_launcher_without_a_plan_is_warm() -> None:
    machine = Machine()
    assert machine.observe() == []
    assert machine.stage() is LauncherState.WARM


def test_a_member_is_ready_until_the_rendezvous_starts_a_round() -> None:
    machine = Machine()
    assert machine.observe(plan=PLAN) == []
    assert (machine.stage(), machine.status()) == (LauncherState.GATHERING, ParticipantStatus.READY)
    assert machine.observe(view=replace(ROUND_1, included=False)) == []
    assert machine.observe(view=replace(ROUND_1, membership=2)) == []


def test_a_round_is_started_once(running: Machine) -> None:
    assert running.observe() == []


def test_a_failure_kills_the_other_ranks_and_waits_for_the_peers_reports(running: Machine) -> None:
    assert running.observe(ranks=build_failed_ranks(1, -9, step=7, completed_step=True)) == [KillRanks()]
    assert running.status() is ParticipantStatus.ENDING
    assert running.observe(ranks=GONE, view=GATHERING) == []
    assert running.status() is ParticipantStatus.READY
    notify, start = running.observe(view=replace(ROUND_1, round=2, ended_by="w"))
    assert isinstance(notify, NotifyFault)
    fault = notify.fault
    assert (fault.rank, fault.exit_code, fault.step, fault.round, fault.completed_step) == (1, -9, 7, 1, True)
    assert isinstance(start, StartRound)


def test_a_failure_that_followed_from_a_peers_is_not_reported(running: Machine) -> None:
    running.observe(ranks=build_failed_ranks(1, 1, lost_peer=True))
    running.observe(ranks=GONE, view=GATHERING)
    assert list_faults(running.observe(view=replace(ROUND_1, round=2, ended_by="other"))) == []
    assert list_faults(running.observe(after=60)) == []


@pytest.mark.parametrize(("lost_peer", "ended_peer"), [(True, 2), (False, None)])
def test_a_failure_for_want_of_ranks_that_finished_elsewhere_names_that_worker(
    running: Machine, lost_peer: bool, ended_peer: int | None
) -> None:
    running.observe(ranks=build_failed_ranks(1, 1, lost_peer=lost_peer))
    running.observe(after=1)
    running.observe(ranks=GONE, view=GATHERING)
    notice, _ = running.observe(view=replace(ROUND_1, round=2, ended_by=SETTINGS.worker, finished_rank=2))
    assert isinstance(notice, NotifyFault)
    assert notice.fault.ended_peer == ended_peer


def test_finished_ranks_are_reported_until_another_round_is_finished(running: Machine) -> None:
    running.observe(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.observe(view=replace(GATHERING, round=1))
    report = build_participant_report(running.state, PLAN, SETTINGS)
    assert (report.status, report.finished_round, report.first_rank) == (ParticipantStatus.READY, 1, 0)


def test_a_failure_is_reported_when_the_peers_report_nothing(running: Machine) -> None:
    running.observe(ranks=build_failed_ranks(1, 1))
    assert list_faults(running.observe(ranks=GONE)) == []
    assert list_faults(running.observe(after=SETTINGS.settle_timeout)) == [FaultKind.RANK_FAILED]
    assert list_faults(running.observe(after=SETTINGS.settle_timeout)) == []


@pytest.mark.parametrize(
    ("first", "second", "ending", "rank"),
    [
        (RankObservation(0, exit_code=1, lost_peer=True), RankObservation(1, exit_code=-11), RanksEnding.SIGNAL, 1),
        (RankObservation(0, exit_code=1), RankObservation(1, exit_code=1, lost_peer=True), RanksEnding.ERROR, 0),
        (RankObservation(0, exit_code=-6, lost_peer=True), RankObservation(1, exit_code=1), RanksEnding.ERROR, 1),
    ],
)
def test_the_best_explanation_of_several_failures_is_reported(
    running: Machine, first: RankObservation, second: RankObservation, ending: RanksEnding, rank: int
) -> None:
    running.observe(ranks=(first, second))
    assert running.state.ending is ending
    assert running.state.failure is not None
    assert running.state.failure.rank == rank


def test_the_rank_that_caused_the_failures_may_be_observed_last(running: Machine) -> None:
    """The others are not killed before: all of them would appear as killed from outside."""
    assert running.observe(ranks=build_failed_ranks(0, 1, lost_peer=True)) == []
    both = (
        RankObservation(0, is_gone=True, exit_code=1, lost_peer=True),
        RankObservation(1, is_gone=True, exit_code=-9, step=7),
    )
    running.observe(ranks=both, after=0.02)
    assert (running.state.ending, running.state.failure and running.state.failure.rank) == (RanksEnding.SIGNAL, 1)
    assert [kind for _ in range(3) for kind in list_faults(running.observe(after=5))] == [FaultKind.RANK_FAILED]


def test_the_rank_that_caused_a_peers_failures_may_be_observed_last(running: Machine) -> None:
    """Its worker receives the end of the round before it observes the reason."""
    assert running.observe(view=replace(GATHERING, ended_by="other", ending=RanksEnding.CONNECTION)) == []
    assert running.observe(ranks=build_failed_ranks(1, -9), after=0.02) == [KillRanks()]
    assert build_participant_report(running.state, PLAN, SETTINGS).ending is RanksEnding.SIGNAL
    running.observe(ranks=GONE, view=replace(GATHERING, ended_by=SETTINGS.worker, ending=RanksEnding.SIGNAL))
    notice = running.observe(view=replace(ROUND_1, round=2, ended_by=SETTINGS.worker, ending=RanksEnding.SIGNAL))
    assert list_faults(notice) == [FaultKind.RANK_FAILED]


def test_without_a_better_explanation_the_others_are_killed_in_a_moment(running: Machine) -> None:
    running.observe(ranks=build_failed_ranks(0, 1, lost_peer=True))
    assert running.observe(after=0.2) == [KillRanks()]
    running.observe(ranks=GONE)
    assert running.state.ending is RanksEnding.CONNECTION


def test_the_peers_end_a_round_without_a_fault(running: Machine) -> None:
    assert running.observe(view=replace(GATHERING, ended_by="other", ending=RanksEnding.SIGNAL)) == [KillRanks()]
    assert list_faults(running.observe(ranks=GONE, after=60)) == []
    assert running.state.ending is RanksEnding.ENDED


def test_ranks_get_time_when_a_peer_leaves_on_request(running: Machine) -> None:
    assert running.observe(view=replace(GATHERING, ended_by="other", ending=RanksEnding.LEFT)) == []
    assert running.status() is ParticipantStatus.ENDING
    assert running.observe(after=SETTINGS.settle_timeout) == [KillRanks()]


def test_a_rank_that_fails_while_the_others_leave_does_not_shorten_their_time(running: Machine) -> None:
    left = replace(GATHERING, ended_by="other", ending=RanksEnding.LEFT)
    assert running.observe(view=left) == []
    assert running.observe(ranks=build_failed_ranks(1, 1), view=left, after=0.2) == []
    assert running.observe(view=left, after=SETTINGS.settle_timeout) == [KillRanks()]


def test_no_round_starts_before_the_killed_ranks_are_gone_and_a_fault_is_reported_when_they_stay(
    running: Machine,
) -> None:
    running.observe(ranks=build_failed_ranks(0, -9), view=GATHERING)
    stuck = (RankObservation(0, exit_code=-9, is_gone=True), RankObservation(1))
    started = running.observe(ranks=stuck, view=replace(ROUND_1, round=2), after=1)
    assert not any(isinstance(command, StartRound) for command in started)
    commands = running.observe(after=SETTINGS.kill_timeout)
    assert FaultKind.ROUND_FAILED in list_faults(commands)
    assert running.stage() is LauncherState.FAILED
    assert not any(isinstance(command, StartRound) for command in commands)
    assert FaultKind.ROUND_FAILED not in list_faults(running.observe(after=60))
    assert list(running.state.unkillable) == [1]
    running.observe(ranks=GONE)
    assert running.state.teardown_seconds == 1 + SETTINGS.kill_timeout + 60
    assert (list(running.state.unkillable), running.stage()) == ([], LauncherState.RUNNING), (
        "the kernel has let go of it"
    )


def test_a_new_membership_ends_the_ranks_before_it_is_joined(running: Machine) -> None:
    second = replace(PLAN, version=2, membership=2, round=2)
    assert running.observe(plan=second) == [KillRanks()]
    assert running.status() is ParticipantStatus.ENDING
    running.observe(ranks=GONE)
    assert (running.state.membership, running.status()) == (2, ParticipantStatus.READY)
    assert running.observe(view=ROUND_1) == []  # of the old membership
    assert running.observe(view=replace(ROUND_1, membership=2, round=2)) == [StartRound(2, 9, second)]


def test_a_new_version_of_the_same_membership_changes_nothing(running: Machine) -> None:
    assert running.observe(plan=replace(PLAN, version=2, checkpoint_request=1)) == []


def test_sigterm_is_passed_on_once_and_answered_with_143(running: Machine) -> None:
    commands = running.observe(end_requested=True)
    assert list_faults(commands) == [FaultKind.TERMINATING]
    assert TerminateRanks() in commands
    assert running.observe(after=1) == []
    assert running.status() is ParticipantStatus.RUNNING, "the peers must not be killed while a checkpoint is written"
    assert running.observe(ranks=build_failed_ranks(0, 143)) == []
    assert running.status() is ParticipantStatus.ENDING
    (end,) = running.observe(ranks=tuple(replace(rank, exit_code=143, is_gone=True) for rank in ALIVE))
    assert isinstance(end, ExitLauncher)
    assert end.code == 143


def test_ranks_that_do_not_leave_are_killed_when_the_grace_period_ends(running: Machine) -> None:
    running.observe(end_requested=True)
    assert running.observe(after=SETTINGS.grace - 1) == []
    assert running.observe(after=1) == [KillRanks()]


def test_a_rank_that_succeeds_after_sigterm_does_not_make_the_worker_look_finished(running: Machine) -> None:
    running.observe(end_requested=True)
    ended = tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1))
    running.observe(ranks=ended)
    (end,) = running.observe()
    assert isinstance(end, ExitLauncher)
    assert end.code == 143


def test_a_rank_that_leaves_without_a_request_is_no_failure(running: Machine) -> None:
    """The library's ranks leave together when one of them receives the signal."""
    assert running.observe(ranks=build_failed_ranks(0, 143, managed=True)) == []
    assert running.observe(after=SETTINGS.settle_timeout) == [KillRanks()]
    assert list_faults(running.observe(ranks=GONE, after=60)) == []
    assert running.state.ending is RanksEnding.LEFT


def test_the_same_exit_code_of_an_unmanaged_script_is_a_failure(running: Machine) -> None:
    assert running.observe(ranks=build_failed_ranks(0, 143)) == [KillRanks()]
    (notice,) = [command.fault for command in running.observe(ranks=GONE, after=60) if isinstance(command, NotifyFault)]
    assert (notice.kind, notice.rank, notice.exit_code) == (FaultKind.RANK_FAILED, 0, 143)


def test_finished_ranks_wait_for_the_others_and_exit_with_them(running: Machine) -> None:
    ended = tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1))
    running.observe(ranks=ended)
    running.observe()
    assert running.status() is ParticipantStatus.FINISHED
    assert running.observe(after=600) == []
    (end,) = running.observe(view=replace(ROUND_1, stage=RendezvousStage.FINISHED))
    assert isinstance(end, ExitLauncher)
    assert end.code == 0


def test_a_finished_launcher_is_ready_again_when_a_peer_fails(running: Machine) -> None:
    running.observe(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.observe()
    running.observe(view=GATHERING)
    assert running.status() is ParticipantStatus.READY


def test_ctrl_c_ends_with_the_exit_code_that_shells_expect(running: Machine) -> None:
    running.observe(end_requested=True, end_signal=signal.SIGINT)
    running.observe(ranks=GONE)
    assert ExitLauncher(130, "received SIGINT") in [*running.observe(), *running.observe()]


def test_a_finished_launcher_that_receives_sigterm_has_succeeded(running: Machine) -> None:
    running.observe(ranks=tuple(RankObservation(rank, is_gone=True, exit_code=0) for rank in (0, 1)))
    running.observe()
    assert ExitLauncher(0, "its ranks have finished") in running.observe(end_requested=True)


def test_processes_left_by_a_finished_rank_get_time_to_end_and_are_killed_then(running: Machine) -> None:
    ended = tuple(RankObservation(rank, is_gone=False, exit_code=0) for rank in (0, 1))
    assert running.observe(ranks=ended) == []
    assert running.status() is ParticipantStatus.FINISHED
    assert running.observe(after=SETTINGS.linger - 1) == []
    assert running.observe(after=1) == [KillRanks()]
    assert running.status() is ParticipantStatus.FINISHED


@pytest.mark.parametrize(("operator", "peers", "lost"), [(9, 9, True), (9, 7, False), (7, 9, False)])
def test_ranks_end_only_without_operator_and_peers(running: Machine, operator: float, peers: float, lost: bool) -> None:
    commands = running.observe(operator_age=operator, peers_age=peers)
    assert (running.stage() is LauncherState.LOST) == lost
    assert (KillRanks() in commands) == lost


def test_a_training_launcher_without_peers_is_partitioned(running: Machine) -> None:
    for age, partitioned in ((1.0, False), (3.0, True)):
        running.observe(peers_age=age)
        assert is_partitioned(running.state, running.seen) is partitioned
    running.observe(operator_age=9.0, peers_age=9.0)
    assert is_partitioned(running.state, running.seen), "so that it notices the operator's return"
    waiting = Machine()
    waiting.observe(plan=PLAN, peers_age=99.0)
    assert not is_partitioned(waiting.state, waiting.seen)


def test_a_lost_launcher_trains_again_only_once_the_operator_has_answered(running: Machine) -> None:
    """Its peers may have been replaced with it: a round of theirs would have the number of another one."""
    running.observe(operator_age=9.0, peers_age=9.0)
    running.observe(ranks=GONE)
    assert running.stage() is LauncherState.LOST
    running.observe(operator_age=9.0, peers_age=0.0, after=100)
    assert (running.stage(), running.status()) == (LauncherState.LOST, ParticipantStatus.ENDING)
    assert is_partitioned(running.state, running.seen), "its sidecar polls the operator at once"
    running.observe(operator_age=0.0, peers_age=0.0, after=1)
    assert (running.stage(), running.status()) == (LauncherState.GATHERING, ParticipantStatus.READY)


def test_a_launcher_without_ranks_is_never_lost() -> None:
    machine = Machine()
    machine.observe(plan=PLAN, operator_age=99.0, peers_age=99.0)
    assert machine.stage() is LauncherState.GATHERING


def test_missing_peers_are_reported_once() -> None:
    machine = Machine()
    machine.observe(plan=PLAN)
    assert list_faults(machine.observe(after=SETTINGS.gather_timeout)) == [FaultKind.ROUND_FAILED]
    assert list_faults(machine.observe(after=SETTINGS.gather_timeout)) == []
    assert machine.status() is ParticipantStatus.READY, "it goes on waiting"


def test_missing_workers_are_named_if_the_rendezvous_server_reports_them(running: Machine) -> None:
    running.observe(ranks=build_failed_ranks(0, 1))
    running.observe(ranks=GONE, view=replace(GATHERING, missing=("other",)))
    (fault,) = (
        command.fault
        for command in running.observe(after=SETTINGS.gather_timeout)
        if isinstance(command, NotifyFault) and command.fault.kind is FaultKind.ROUND_FAILED
    )
    assert fault.missing == ("other",)
    assert fault.error == "the other launchers have not joined within 60 s: other"


def test_a_halted_rendezvous_means_failed_until_the_next_membership(running: Machine) -> None:
    running.observe(ranks=build_failed_ranks(0, 1))
    running.observe(ranks=GONE, view=replace(GATHERING, stage=RendezvousStage.HALTED, reason="budget", ended_by="w"))
    assert running.stage() is LauncherState.FAILED
    running.observe(plan=replace(PLAN, version=2, membership=2))
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
def test_a_round_without_a_step_made_no_progress_and_without_records_a_short_one(
    running: Machine, rank: RankObservation, seconds: float, barren: int
) -> None:
    running.observe(ranks=(rank, RankObservation(1, monitored=rank.monitored)), after=seconds)
    assert running.state.no_progress_rounds == barren


def test_a_member_that_becomes_a_spare_ends_its_ranks_and_stays(running: Machine) -> None:
    assert running.observe(plan=replace(PLAN, version=2, role=WorkerRole.SPARE)) == [KillRanks()]
    running.observe(ranks=GONE, after=3)
    assert running.state.teardown_seconds == 0, "the next round that it takes part in follows from none of its own"
    assert running.stage() is LauncherState.WARM
    assert running.observe(after=600) == []


def test_leaving_is_no_success_but_the_jobs_end_is() -> None:
    for plan, code in (
        (WorkerPlan(role=WorkerRole.LEAVE), 143),
        (WorkerPlan(role=WorkerRole.LEAVE, stop=Stop.FINISH), 0),
        (replace(PLAN, stop=Stop.FINISH), 0),
    ):
        (end,) = Machine().observe(plan=plan)
        assert isinstance(end, ExitLauncher)
        assert end.code == code


def test_suspension_lets_the_ranks_leave_and_leaves_the_launcher_warm(running: Machine) -> None:
    assert running.observe(plan=replace(PLAN, version=2, stop=Stop.SUSPEND)) == [TerminateRanks()]
    left = tuple(RankObservation(rank, is_gone=True, exit_code=143) for rank in (0, 1))
    running.observe(ranks=left)
    assert running.observe() == []
    assert running.stage() is LauncherState.WARM
    running.observe(plan=replace(PLAN, version=3, membership=2), ranks=left)
    assert running.status() is ParticipantStatus.READY

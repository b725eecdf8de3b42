"""Simulated workers: what launchers, sidecars and ranks do under a plan that is made by hand."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.failures.hang import HangKind, diagnose_hang
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState, StartStage
from pacekeeper_analysis.protocol.requests import EvidenceRequest, Requests
from simulation.workers.worker import ALL_PROCESSES, LAUNCHER_PROCESS
from testing.simulated.simulated_workers import SimulatedTeam


def test_two_workers_train_under_a_plan() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=25)
    team.wait(4.0)
    one, other = team.get_heartbeat("a"), team.get_heartbeat("b")
    assert one.state is other.state is LauncherState.RUNNING
    assert one.round == other.round == 1
    assert one.progress.step is not None
    assert one.progress.step > 20
    assert (one.training.managed, one.training.global_batch, one.training.sync_mode, one.start.restored_step) == (
        True,
        16,
        "Sync",
        0,
    )
    assert one.start.started_at is not None
    assert one.start.first_step_at is not None
    assert one.start.first_step_at > one.start.started_at
    assert one.checkpoint.step == 20
    assert not team.endpoint.faults
    assert not team.exits


def test_rounds_that_start_in_an_outage_end_and_running_ones_continue() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=25)
    team.world.trainings.outage, team.world.trainings.outage_at_import = "OSError: away", True
    team.start("c")
    team.wait(10.0)
    assert team.exits == {"c": (1, "")}
    assert team.get_heartbeat("a").round == 1
    team["a"].crash_rank()
    team.wait(10.0)
    errors = {fault.error for fault in team.endpoint.faults}
    assert errors == {"ValueError: a bad sample", "OSError: away"}
    assert team["a"].training.outage_at > 0


def test_launchers_restart_after_a_crash_and_report_only_the_culprit() -> None:
    team = SimulatedTeam(every=0)
    team.start_and_train("a", "b", steps=30)
    version, before = team.endpoint.plan.version, team.newest_round.step
    team["b"].crash_rank(code=3)
    team.wait_until(lambda: team.get_heartbeat("a").round == team.get_heartbeat("b").round == 2)
    team.wait_for_steps(2)
    (fault,) = team.list_faults(FaultKind.RANK_FAILED)
    assert (team.find_letter(fault.worker), fault.exit_code, fault.completed_step, fault.round) == ("b", 3, True, 1)
    assert (team.endpoint.plan.version, team.get_heartbeat("a").restarts) == (version, 1)
    assert before - team.newest_round.training.snapshot_every <= team.newest_round.restored_step <= before, (
        "from the snapshot in memory"
    )


def test_the_first_step_reports_the_start_of_its_round() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].crash_rank()
    team.wait_until(lambda: team.get_heartbeat("a").round == 2 and team.get_heartbeat("a").start.first_step_at)
    heartbeat = team.get_heartbeat("a")
    assert [one.stage for one in heartbeat.start.stages] == list(StartStage)
    assert heartbeat.start.started_at is not None
    assert heartbeat.start.first_step_at is not None
    assert heartbeat.start.stages[-1].seconds == pytest.approx(
        heartbeat.start.first_step_at - heartbeat.start.started_at
    )
    assert heartbeat.start.origin in ("NOTHING", "MEMORY", "CHECKPOINT")


def test_two_rounds_without_a_step_end_the_launchers_permission() -> None:
    team = SimulatedTeam()
    team.start("a", "b")
    team["a"].script_fails = True
    team.wait_until(lambda: all(team.get_heartbeat(each).rendezvous_port for each in "ab"))
    team.assign_ranks("a", "b")
    team.wait_until(lambda: team.get_heartbeat("a").state is team.get_heartbeat("b").state is LauncherState.FAILED)
    team.wait_until(lambda: [fault.round for fault in team.list_faults(FaultKind.RANK_FAILED)] == [1, 2], within=5.0)


@pytest.mark.parametrize(
    ("where", "kind", "within"),
    [
        ("train", HangKind.NEVER_ENTERED, 15.0),
        ("loader", HangKind.NEVER_ENTERED, 90.0),
        ("stopped", HangKind.STOPPED, 15.0),
        ("kernel", HangKind.NEVER_ENTERED, 15.0),
        ("collective", HangKind.COMMUNICATION, 25.0),
    ],
)
def test_both_workers_report_a_hang_and_name_the_culprit(where: str, kind: HangKind, within: float) -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    if where == "kernel":
        team["b"].hang_rank_in_kernel()
    elif where == "stopped":
        team["b"].stop_rank()
    else:
        team["b"].hang_rank(where)
    team.wait_until(lambda: diagnose_hang(team.list_faults(FaultKind.STALLED), 2), within)
    found = diagnose_hang(team.list_faults(FaultKind.STALLED), 2)
    assert found is not None
    assert (found.kind, found.ranks) == (kind, () if where == "collective" else (1,))


def test_a_hang_in_the_first_steps_is_reported_later() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=1)
    team["b"].hang_rank()
    assert team.wait_until(lambda: diagnose_hang(team.list_faults(FaultKind.STALLED), 2), within=200.0) > 100.0


def test_a_dead_link_has_no_culprit_and_names_the_unreachable_worker() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team.world.network.cut("node-0", "node-1")
    team.wait_until(lambda: len({fault.worker for fault in team.list_faults(FaultKind.STALLED)}) == 2)
    assert {fault.unreachable for fault in team.list_faults(FaultKind.STALLED)} == {("10.0.0.1",), ("10.0.0.2",)}


def test_paused_ranks_continue() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team.world.network.cut("node-0", "node-1")
    team.wait(1.5)
    team.world.network.mend("node-0", "node-1")
    team["a"].pause(ALL_PROCESSES)
    team.wait(1.5)
    team["a"].resume(ALL_PROCESSES)
    team.wait_for_steps(5)
    assert (team.newest_round.round, team.endpoint.faults) == (1, [])


def test_a_sidecar_reports_its_unresponsive_launcher_each_second() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].pause(LAUNCHER_PROCESS)
    team.wait(18.0)
    assert {worker for worker, _ in team.endpoint.silences} == {team["b"].name}
    silences = sorted({int(seconds) for _, seconds in team.endpoint.silences if seconds >= 5})
    assert set(range(5, 15)) <= set(silences)
    team["b"].resume(LAUNCHER_PROCESS)
    team.wait_until(lambda: team.get_heartbeat("b").launcher_silent_seconds == 0, within=5.0)


def test_a_launcher_without_operator_and_peers_ends_its_ranks() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team.endpoint.is_unavailable = True
    team.world.network.cut("node-0", "node-1")
    team.wait(12.0)
    assert not team["a"].ranks
    assert team["a"].folder.heartbeat.state is LauncherState.LOST
    team.world.network.heal()
    team.wait(20.0)
    assert team.newest_round.round == 1, "both may have been replaced; only the operator can decide"
    team.endpoint.is_unavailable = False
    team.wait_until(lambda: team.newest_round.round == 2 and team.newest_round.sync_points > 0)


def test_another_membership_gives_ranks_to_a_spare() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=12)
    team.start("c")
    team.wait_until(lambda: team.get_heartbeat("c").state is LauncherState.WARM)
    team.assign_ranks("a", "c")
    team.wait_for_steps(3)
    assert (team.newest_round.round, [rank.worker for rank in team.newest_round.assigned_ranks]) == (
        2,
        [team["a"], team["c"]],
    )
    assert (team.get_heartbeat("b").state, team["b"].ranks) == (LauncherState.WARM, [])
    assert team.newest_round.restored_step > 0


def test_a_suspended_job_saves_its_last_step() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=13)
    team.change_plan(stop=Stop.SUSPEND)
    team.wait_until(lambda: team.get_heartbeat("a").state is team.get_heartbeat("b").state is LauncherState.WARM)
    newest = team.newest_round.training.volume.newest
    assert newest is not None
    assert newest.step == team.newest_round.step > 13 - 1
    team.change_plan(stop=Stop.NO)
    team.wait_for_steps(1)
    assert team.newest_round.restored_step == newest.step


def test_all_workers_of_a_complete_job_finish() -> None:
    team = SimulatedTeam(arguments=["--steps", "15"])
    team.start_and_train("a", "b")
    team.wait_until(lambda: len(team.exits) == 2)
    assert {code for code, _ in team.exits.values()} == {0}
    newest = team.newest_round.training.volume.newest
    assert newest is not None
    assert newest.step == 15
    assert {heartbeat.state for heartbeat in team.endpoint.heartbeats.values()} == {LauncherState.FINISHED}


def test_the_checkpoint_outlives_all_pods() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=13)
    for letter in "ab":
        team[letter].kill()
    newest = team.newest_round.training.volume.newest
    assert newest is not None
    assert newest.step == 10
    assert team.exits == {"a": (137, ""), "b": (137, "")}
    team.start_and_train("c", "d", steps=1)
    assert team.newest_round.restored_step == newest.step


def test_a_sigterm_saves_the_state_and_ends_the_worker() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=13)
    team["a"].terminate(30.0)
    team.wait_until(lambda: "a" in team.exits)
    newest = team.newest_round.training.volume.newest
    assert newest is not None
    assert team.exits["a"] == (143, "")
    assert newest.step == team.newest_round.step
    assert [team.find_letter(fault.worker) for fault in team.list_faults(FaultKind.TERMINATING)] == ["a"]


def test_a_worker_that_does_not_end_in_time_is_killed() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].hang_rank()
    team["a"].terminate(5.0)
    assert team.wait_until(lambda: "a" in team.exits) == pytest.approx(5.0, abs=0.2)
    assert team.exits["a"][0] == 137


def test_a_rank_that_cannot_be_killed_is_reported_and_blocks_its_pod() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].hang_rank_in_kernel()
    team.assign_ranks("a", "b")
    team.wait_until(lambda: team.get_heartbeat("b").unkillable_ranks == (1,))
    assert team.get_heartbeat("b").state is LauncherState.FAILED
    team["b"].kill()
    team.wait(5.0)
    assert "b" not in team.exits
    team.wait_until(lambda: "b" in team.exits, within=300.0)


def test_shares_change_the_times_of_steps() -> None:
    team = SimulatedTeam()
    team.world.nodes["node-1"].slow = 3.0
    team.start_and_train("a", "b", steps=10)
    slow = team["a"].ranks[0].build_window().step_seconds[-1]
    team.change_plan(shares=(12, 4))
    team.wait_for_steps(5)
    window = team["a"].ranks[0].build_window()
    assert window.step_seconds[-1] < 0.7 * slow
    assert (window.samples[-1], team["b"].ranks[0].build_window().samples[-1]) == (12, 4)


def test_a_plan_that_the_script_cannot_follow_is_refused() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team.change_plan(shares=(12, 5))
    team.wait_until(lambda: "do not make up 16 samples" in team.get_heartbeat("a").training.refused)
    team.change_plan(shares=(10, 6))
    team.wait_until(lambda: not team.get_heartbeat("a").training.refused)
    team["b"].refuses_requests = True
    team.change_plan(sync_mode=SyncMode.EDIT)
    team.wait_until(lambda: "in mode Sync only" in team.get_heartbeat("a").training.refused)


def test_in_async_edit_no_rank_waits_for_a_slow_one_and_no_sample_is_lost() -> None:
    team = SimulatedTeam(arguments=["--steps", "101"])
    team.world.nodes["node-1"].slow = 3.0
    team.start_and_train("a", "b", steps=25)
    before, started_at = team.newest_round.step, team.world.now()
    team.wait_for_steps(10)
    synchronous = (team.world.now() - started_at) / 10
    team.change_plan(sync_mode=SyncMode.ASYNC_EDIT, sync_seconds=12.0)
    team.wait_until(lambda: team.get_heartbeat("b").training.sync_mode == "AsyncEDiT")
    before, started_at = team.newest_round.step, team.world.now()
    team.wait_for_steps(30)
    assert (team.world.now() - started_at) / (team.newest_round.step - before) < 0.7 * synchronous
    fast, slow = team.newest_round.assigned_ranks
    assert fast.samples > slow.samples
    window = fast.build_window()
    assert (window.sync_mode, len(window.transfers) > 1) == ("AsyncEDiT", True)
    team.wait_until(lambda: len(team.exits) == 2, within=200.0)
    assert (team.newest_round.progress.samples, fast.samples + slow.samples) == (101 * 16, 101 * 16)


def test_steps_between_two_synchronizations_are_no_stall() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b", steps=25)
    team.change_plan(sync_mode=SyncMode.EDIT, sync_every=64)
    team.wait_until(lambda: team.get_heartbeat("b").training.sync_mode == "EDiT")
    first = team.get_heartbeat("b").progress.step or 0
    team.wait(20.0)
    assert (team.get_heartbeat("b").progress.step or 0) > first + 10, "a rank counts its own steps on"
    assert not team.endpoint.faults
    team["b"].hang_rank()
    team.wait_until(lambda: team.list_faults(FaultKind.STALLED), within=20.0)
    assert {team.find_letter(fault.worker) for fault in team.list_faults(FaultKind.STALLED)} == {"b"}


def test_failed_checkpoints_are_reported_and_repeated() -> None:
    team = SimulatedTeam(every=5)
    team.start_and_train("a", "b", steps=2)
    volume = team.newest_round.training.volume
    volume.fails = True
    team.wait_until(lambda: "No space left" in team.get_heartbeat("a").checkpoint.error)
    assert (team.get_heartbeat("a").checkpoint.failed_rank, team.get_heartbeat("b").checkpoint.error) == (0, "")
    volume.fails = False
    team.wait_until(lambda: team.get_heartbeat("a").checkpoint.error == "" and volume.newest is not None)


def test_a_requested_checkpoint_is_acknowledged_once_it_is_saved() -> None:
    team = SimulatedTeam(every=0)
    team.start_and_train("a", "b")
    team.change_plan(checkpoint_request=1)
    team.wait_until(
        lambda: team.get_heartbeat("a").checkpoint.request == team.get_heartbeat("b").checkpoint.request == 1
    )
    newest = team.newest_round.training.volume.newest
    assert newest is not None
    assert team.get_heartbeat("a").checkpoint.step == newest.step


def test_an_older_round_publishes_no_more_checkpoints() -> None:
    team = SimulatedTeam(every=5)
    team.start_and_train("a", "b", steps=6)
    old, volume = team.newest_round, team.newest_round.training.volume
    saved_steps = [checkpoint.step for checkpoint in volume.checkpoints]
    volume.owner = None  # a later round has started elsewhere
    old_step = old.step
    team.wait_until(lambda: old.step > old_step + 12)
    assert [checkpoint.step for checkpoint in volume.checkpoints] == saved_steps


def test_faults_of_ranks_are_reported() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].set_bad_loss(True)
    team.wait_until(lambda: (loss := team.get_heartbeat("b").training.bad_loss) is not None and loss.rank == 1)
    team["b"].set_bad_loss(False)
    team["b"].kill_rank_for_memory()
    team.wait_for_steps(2)
    (fault,) = team.list_faults(FaultKind.RANK_FAILED)
    assert (fault.exit_code, fault.out_of_memory) == (-9, True)
    team["a"].raise_gpu_error(79)
    team.wait_until(lambda: team.list_faults(FaultKind.GPU_ERROR), within=5.0)
    assert team.list_faults(FaultKind.GPU_ERROR)[0].xid == 79


def test_a_killed_sidecar_restarts_and_delivers_pending_reports() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].kill_sidecar()
    team["b"].crash_rank(code=7)
    team.wait_until(lambda: [fault.exit_code for fault in team.list_faults(FaultKind.RANK_FAILED)] == [7], within=10.0)
    assert team["b"].sidecar.serves


def test_two_ranks_of_a_worker_start_and_end_together() -> None:
    team = SimulatedTeam(ranks=2)
    team.start_and_train("a", "b")
    assert [rank.number for rank in team["b"].ranks] == [2, 3]
    team["b"].crash_rank(code=1, local=1)
    team.wait_until(lambda: team.get_heartbeat("b").round == 2)
    team.wait_for_steps(2)
    assert [fault.rank for fault in team.list_faults(FaultKind.RANK_FAILED)] == [3]
    assert team.newest_round.global_batch == 32


def test_requested_evidence_is_delivered() -> None:
    team = SimulatedTeam()
    team.world.nodes["node-1"].slow = 2.0
    team.start_and_train("a", "b", steps=12)
    version = team.endpoint.plan.version
    team.endpoint.give_requests(Requests(EvidenceRequest("why")))
    team.wait_until(lambda: len(team.endpoint.evidence) == 2, within=5.0)
    compute = {each.worker: each.windows[0].compute_seconds[-1] for each in team.endpoint.evidence}
    assert compute[team["b"].name] > 1.8 * compute[team["a"].name]
    assert team.endpoint.plan.version == version


def test_a_node_without_power_is_silent_and_a_killed_pod_is_not() -> None:
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team.world.network.set_power("node-1", on=False)
    team["b"].kill()
    team.wait(1.5)
    assert len(team["a"].ranks) == 1, "no peer has reported it"
    team = SimulatedTeam()
    team.start_and_train("a", "b")
    team["b"].kill()
    team.wait(1.5)
    assert not team["a"].ranks, "its kernel has closed its connections"


def test_a_run_is_a_function_of_its_seed() -> None:
    def record_run(seed: int) -> str:
        team = SimulatedTeam(seed)
        team.start_and_train("a", "b")
        team["b"].crash_rank()
        team.wait_for_steps(3)
        return team.world.log.digest()

    assert record_run(5) == record_run(5) != record_run(6)

"""Hangs: every launcher reports what its ranks do, and the verdict over all reports names the culprit, or no rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper.health import stall_detector
from pacekeeper_analysis.failures.hang import HangKind, HangVerdict, diagnose_hang
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from testing.training.launchers import LauncherTeam, create_team

PORT = 29413


def start_two_workers(one: LauncherTeam, step_seconds: float = 0.0) -> None:
    """Worker a with ranks 0 and 1, worker b with rank 2. step_seconds: from the operator."""
    one.start("a")
    one.start("b")
    members = one.build_members(a=[0, 1], b=[2])
    one.give_plan(
        Plan(version=1, membership=1, members=members, store_port=PORT, restarts=5, step_seconds=step_seconds)
    )


def list_stalls(one: LauncherTeam) -> list[FaultReport]:
    return [fault for worker in one.workers.values() for fault in worker.read_faults(FaultKind.STALLED)]


def diagnose_team(one: LauncherTeam) -> HangVerdict | None:
    return diagnose_hang(list_stalls(one), world_size=3)


def restart_ranks(one: LauncherTeam) -> None:
    """The operator's remedy: the same members in a new membership."""
    members = one.plan.members
    one.give_plan(Plan(version=2, membership=2, round=2, members=members, store_port=PORT, restarts=5))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stopped_rank_is_named_and_the_job_trains_again(tmp_path: Path, rank: int) -> None:
    faults = [{"rank": rank, "round": 1, "step": 8, "kind": "stop"}]
    with create_team(tmp_path, steps=20, faults=faults, step_seconds=0.1) as one:
        start_two_workers(one)
        one.wait_for(lambda: "round 1 stop" in one.read_diary(rank), "the rank stands still")
        found = one.wait_for(lambda: diagnose_team(one), "a verdict")
        assert (found.kind, found.ranks) == (HangKind.STOPPED, (rank,)), found
        restart_ranks(one)
        one.wait_for(lambda: any(line.startswith("round 2 step") for line in one.read_diary(rank)), "round 2 trains")
        assert [worker.wait() for worker in one.workers.values()] == [0, 0]


def test_a_rank_that_skips_a_collective_is_named_with_its_stack(tmp_path: Path) -> None:
    faults = [{"rank": 0, "round": 1, "step": 8, "kind": "skip"}]
    with create_team(tmp_path, steps=20, faults=faults) as one:
        start_two_workers(one)
        found = one.wait_for(lambda: diagnose_team(one), "a verdict")
        assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (0,)), found
        (state, *_) = [state for fault in list_stalls(one) for state in fault.ranks if state.rank == 0]
        assert (state.phase, state.step, state.collective, state.process_state) == ("TRAIN", 7, "NONE", "S")
        assert not state.moving
        innermost = state.stack.splitlines()[-1]
        assert "steps.py" in innermost
        assert innermost.endswith("in inject_fault"), state.stack
        waiting = next(state for fault in list_stalls(one) for state in fault.ranks if state.rank == 2)
        assert (waiting.collective, waiting.sequence) == ("ALL_REDUCE", 7)
        assert "all_reduce" in waiting.stack


@pytest.mark.parametrize(("backend", "kind"), [("nccl", HangKind.KERNEL), ("gloo", HangKind.NEVER_ENTERED)])
def test_a_rank_whose_kernel_never_ends_is_named_although_its_processor_spins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: HangKind
) -> None:
    """On a stand-in for a GPU. With NCCL its host has issued the collective that the others wait in, like theirs."""
    monkeypatch.setattr(stall_detector, "MAX_HOST_WORK_SECONDS", 4.0)
    faults = [{"rank": 2, "round": 1, "step": 8, "kind": "kernel"}]
    with create_team(tmp_path, steps=20, faults=faults) as one:
        one.environment["GPU"] = backend
        start_two_workers(one)
        found = one.wait_for(lambda: diagnose_team(one), "a verdict")
        assert (found.kind, found.ranks) == (kind, (2,)), found


def test_long_phases_of_one_rank_accuse_no_rank(tmp_path: Path) -> None:
    """Each three times the deadline: the peers stall and report it, and no verdict follows from it."""
    phases = {8: "COMPILE", 11: "CHECKPOINT"}
    fault = {"rank": 2, "round": 1, "kind": "phase", "seconds": 3.0}
    faults = [{**fault, "step": step, "phase": phase} for step, phase in phases.items()]
    with create_team(tmp_path, steps=14, faults=faults, hang_deadline=1.0) as one:
        start_two_workers(one)
        assert [worker.wait() for worker in one.workers.values()] == [0, 0], one.read_logs()
        stalled = {state.step for fault in one.workers["a"].read_faults(FaultKind.STALLED) for state in fault.ranks}
        assert {step - 1 for step in phases} <= stalled, "the peers have not reported their waits"
        assert one.workers["b"].read_faults(FaultKind.STALLED) == []
        assert diagnose_team(one) is None
        assert one.read_diary(2)[-1] == "round 1 end"


def test_a_loader_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detector, "MIN_LOAD_STALL_SECONDS", 2.5)
    faults = [{"rank": 2, "round": 1, "step": 8, "kind": "phase", "phase": "LOAD", "seconds": 3600}]
    with create_team(tmp_path, steps=20, faults=faults) as one:
        start_two_workers(one)
        found = one.wait_for(lambda: diagnose_team(one), "a verdict")
        assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (2,)), found
        assert "in phase LOAD" in found.evidence[0]


def test_a_hang_right_after_joining_is_detected_by_the_step_time_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, workers that have not seen five steps yet would wait for half an hour."""
    monkeypatch.setattr(stall_detector, "MIN_UNARMED_STALL_SECONDS", 1.0)
    faults = [{"rank": 2, "round": 1, "step": 3, "kind": "skip"}]
    with create_team(tmp_path, steps=12, faults=faults) as one:
        start_two_workers(one, step_seconds=0.01)
        found = one.wait_for(lambda: diagnose_team(one), "a verdict")
        assert (found.kind, found.ranks) == (HangKind.NEVER_ENTERED, (2,)), found


def test_a_stall_that_lasts_is_reported_again_under_another_name(tmp_path: Path) -> None:
    faults = [{"rank": 2, "round": 1, "step": 8, "kind": "stop"}]
    with create_team(tmp_path, steps=12, faults=faults, hang_deadline=0.4) as one:
        start_two_workers(one)
        one.wait_for(lambda: len(one.workers["a"].read_faults(FaultKind.STALLED)) >= 2, "a second report")
        first, second, *_ = sorted(one.workers["a"].read_faults(FaultKind.STALLED), key=lambda fault: fault.noticed_at)
        assert (first.name, first.round) != (second.name, second.round)
        assert [rank.rank for rank in first.ranks] == [rank.rank for rank in second.ranks] == [0, 1]

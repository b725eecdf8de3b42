"""What the controller of a local run decides."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacekeeper import local_folder
from pacekeeper.launcher.local_controller import (
    LOCAL_ADDRESS,
    LOCAL_WORKER,
    AdaptationState,
    LocalController,
    LocalDecision,
    evaluate_faults,
    evaluate_refusal,
    evaluate_step_times,
    open_local_runtime,
)
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.protocol.plan import Member, Plan, SyncMode
from pacekeeper_analysis.protocol.reports import (
    FaultKind,
    FaultReport,
    Heartbeat,
    LauncherState,
    RankState,
    RankWindow,
    TrainingReport,
)
from pacekeeper_analysis.stragglers.mode_changes import (
    MIN_MODE_CHANGE_VOTES,
    MIN_VOLATILE_VOTE_STEPS,
    SYNC_MODE_COOL_DOWN_SECONDS,
)
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Hysteresis

PLAN = Plan(version=3, membership=1, members=(Member(LOCAL_WORKER, LOCAL_ADDRESS, (0, 1, 2, 3)),), restarts=5)
BEAT = Heartbeat(
    worker=LOCAL_WORKER, state=LauncherState.RUNNING, round=2, restarts=1, training=TrainingReport(managed=True)
)


def build_stall(*stopped: int, round_: int = 2) -> FaultReport:
    """All ranks wait in a collective but those that are stopped."""
    ranks = tuple(
        RankState(rank, "TRAIN", 9.0, 7, "NONE" if rank in stopped else "ALL_REDUCE", 1, 7, 7, 3.0,
                  "T" if rank in stopped else "S", False)
        for rank in range(4)
    )  # fmt: skip
    return FaultReport("stall", FaultKind.STALLED, LOCAL_WORKER, round_, 0.0, ranks=ranks)


def test_a_hang_starts_the_next_membership_for_one_restart() -> None:
    outcome = evaluate_faults(PLAN, [build_stall(2)], [build_stall(2)], BEAT)
    assert outcome.plan == replace(PLAN, version=4, membership=2, round=3, restarts=3)
    assert "rank 2" in outcome.messages[0]


def test_a_stall_without_a_culprit_and_one_of_an_older_round_change_nothing() -> None:
    busy = build_stall()
    busy = replace(busy, ranks=(replace(busy.ranks[0], phase="EVALUATE", collective="NONE"), *busy.ranks[1:]))
    assert evaluate_faults(PLAN, [busy], [busy], BEAT).plan is PLAN
    old = build_stall(2, round_=1)
    assert evaluate_faults(PLAN, [old], [old], BEAT).plan is PLAN


def test_a_hang_without_a_restart_left_ends_the_run() -> None:
    assert evaluate_faults(PLAN, [build_stall(2)], [build_stall(2)], replace(BEAT, restarts=5)).give_up_reason


def test_a_failed_launcher_ends_the_run_with_the_scripts_message() -> None:
    fault = FaultReport(
        "f", FaultKind.RANK_FAILED, LOCAL_WORKER, 2, 0.0, rank=1, exit_code=1, error="Traceback\nValueError: no\n"
    )
    outcome = evaluate_faults(PLAN, [fault], [], replace(BEAT, state=LauncherState.FAILED))
    assert outcome.give_up_reason == "rank 1 ended with code 1 in round 2 before its first step: ValueError: no"


def test_a_failed_launcher_ends_the_run_even_if_the_script_reported_nothing() -> None:
    for faults in ([], [FaultReport("f", FaultKind.RANK_FAILED, LOCAL_WORKER, 2, 0.0, rank=1, exit_code=3)]):
        assert evaluate_faults(PLAN, faults, [], replace(BEAT, state=LauncherState.FAILED)).give_up_reason


def test_repeated_failures_at_the_same_step_end_the_run_by_the_limit() -> None:
    """One fault per round, each reported separately."""
    faults: list[FaultReport] = []
    messages, repetition = [], RepeatedFailure()
    for number in (1, 2, 3):
        faults.append(
            FaultReport(
                f"f{number}",
                FaultKind.RANK_FAILED,
                LOCAL_WORKER,
                number,
                0.0,
                rank=1,
                exit_code=3,
                step=59,
                completed_step=True,
            )
        )
        beat = replace(BEAT, round=number + 1)
        outcome = evaluate_faults(PLAN, faults, faults[-1:], beat, repetition, no_progress_limit=3)
        repetition = outcome.repetition
        messages.append(outcome.give_up_reason)
        assert not evaluate_faults(PLAN, faults, faults[-1:], beat, repetition, no_progress_limit=0).give_up_reason
    assert messages[:2] == ["", ""]
    assert "3 rounds have ended after step 59" in messages[2]
    assert "rank 1 ended with code 3" in messages[2]


def test_the_third_hang_at_a_step_has_more_time_and_is_the_last() -> None:
    """Of a rank that stands still outside of collectives, which is the script's."""
    repetition, given_up = RepeatedFailure(), ""
    for number, seconds in ((1, 3.0), (2, 3.0), (3, 3.0), (3, 400.0)):
        fault = build_stall(round_=number)
        outside = replace(fault.ranks[2], collective="NONE", waiting_seconds=seconds)
        fault = replace(fault, completed_step=True, ranks=(*fault.ranks[:2], outside, fault.ranks[3]))
        outcome = evaluate_faults(PLAN, [fault], [fault], replace(BEAT, round=number), repetition, no_progress_limit=3)
        repetition, given_up = outcome.repetition, outcome.give_up_reason
        assert (outcome.plan is PLAN) is (number == 3)
        assert bool(given_up) is (seconds > 300)
    assert "3 rounds have ended after step 7" in given_up
    assert "rank 2" in given_up


def build_windows(*seconds_per_sample: float, shares: tuple[int, ...] = (8, 8, 8, 8)) -> list[RankWindow]:
    steps = tuple(range(32))
    lasts = max(cost * share for cost, share in zip(seconds_per_sample, shares, strict=True))
    return [
        RankWindow(rank, steps, (lasts,) * 32, (cost * share,) * 32, (share,) * 32, sync_mode="Sync")
        for rank, (cost, share) in enumerate(zip(seconds_per_sample, shares, strict=True))
    ]


def build_volatile_windows(slow: float = 2.5) -> list[RankWindow]:
    """In each step another rank takes longer."""
    steps = tuple(range(32))
    own = 0.08 * np.where(np.random.default_rng(0).integers(0, 4, (32, 1)) == np.arange(4), slow, 1.0)
    lasts = tuple(own.max(axis=1))
    return [RankWindow(r, steps, lasts, tuple(own[:, r]), (8,) * 32, sync_mode="Sync") for r in range(4)]


def build_local_windows(windows: list[RankWindow]) -> list[RankWindow]:
    """The same own work under AsyncEDiT, with quick synchronizations."""
    return [
        replace(window, sync_mode="AsyncEDiT", step_seconds=window.compute_seconds, transfers=(0.001,) * 4)
        for window in windows
    ]


def evaluate_once(
    plan: Plan, given: list[RankWindow], adapting: AdaptationState | None = None, now: float = 0.0
) -> LocalDecision:
    return evaluate_step_times(plan, given, adapting or AdaptationState(), now)


def evaluate_repeatedly(
    plan: Plan, given: list[RankWindow], adapting: AdaptationState | None = None, now: float = 0.0
) -> LocalDecision:
    """Evaluate as often as a change of mode takes."""
    outcome = LocalDecision(plan, adaptation=adapting or AdaptationState())
    for number in range(MIN_MODE_CHANGE_VOTES):
        assert outcome.plan is plan
        later = [
            replace(each, steps=tuple(MIN_VOLATILE_VOTE_STEPS * number + step for step in each.steps)) for each in given
        ]
        outcome = evaluate_step_times(plan, later, outcome.adaptation, now)
    return outcome


def test_a_slow_rank_gets_a_smaller_share_at_once() -> None:
    outcome = evaluate_once(PLAN, build_windows(0.01, 0.01, 0.02, 0.01))
    assert outcome.plan.shares is not None
    assert sum(outcome.plan.shares) == 32
    assert outcome.plan.shares[2] == min(outcome.plan.shares)
    assert outcome.plan.version == 4
    assert outcome.plan.membership == PLAN.membership
    assert "rank 2 2.00 ×" in outcome.messages[0]


def test_equal_ranks_and_balanced_shares_stay_as_they_are() -> None:
    assert evaluate_once(PLAN, build_windows(0.01, 0.01, 0.01, 0.01)).plan is PLAN
    shares = evaluate_once(PLAN, build_windows(0.01, 0.01, 0.02, 0.01)).plan.shares
    assert shares is not None
    balanced = replace(PLAN, shares=shares)
    assert evaluate_repeatedly(balanced, build_windows(0.01, 0.01, 0.02, 0.01, shares=shares)).plan is balanced


def test_sequences_are_balanced_by_their_cost_and_not_changed_again() -> None:
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, (32, 4, 8))
    squares = np.square(lengths).sum(axis=2)
    given = [
        replace(
            window,
            step_seconds=tuple(1e-8 * squares.max(axis=1)),
            compute_seconds=tuple(1e-8 * squares[:, window.rank]),
            lengths=tuple(lengths[:, window.rank].sum(axis=1)),
            squares=tuple(squares[:, window.rank]),
        )
        for window in build_windows(0.01, 0.01, 0.01, 0.01)
    ]
    outcome = evaluate_once(PLAN, given)
    assert outcome.plan == replace(PLAN, version=4, sequence_cost=outcome.plan.sequence_cost)
    assert outcome.plan.sequence_cost is not None
    assert "BalanceLengths" in outcome.messages[-1]
    assert evaluate_once(outcome.plan, given).plan is outcome.plan, "as uneven as before, by the same cost"


def test_a_rank_that_has_recovered_gets_its_share_back() -> None:
    uneven = (9, 9, 5, 9)
    outcome = evaluate_once(replace(PLAN, shares=uneven), build_windows(0.01, 0.01, 0.01, 0.01, shares=uneven))
    assert outcome.plan.shares == (8, 8, 8, 8)


def test_unmonitored_shares_and_windows_over_a_change_are_not_changed() -> None:
    unknown = [replace(window, samples=(0,) * 32) for window in build_windows(0.01, 0.01, 0.012, 0.01)]
    assert evaluate_once(PLAN, unknown).plan is PLAN
    changed = [replace(w, samples=(4,) * 28 + w.samples[28:]) for w in build_windows(0.01, 0.01, 0.02, 0.01)]
    assert evaluate_once(PLAN, changed).plan is PLAN
    assert evaluate_once(PLAN, []).plan is PLAN


def test_intermittently_slow_ranks_lead_to_async_edit_after_several_evaluations() -> None:
    outcome = evaluate_repeatedly(PLAN, build_volatile_windows(), now=50.0)
    assert outcome.plan.sync_mode is SyncMode.ASYNC_EDIT
    assert outcome.plan.version == PLAN.version + 1
    assert outcome.adaptation == AdaptationState(Bottleneck.VOLATILE, hysteresis=Hysteresis().with_change(50.0))
    assert "come and go" in outcome.messages[0]


def test_an_evaluation_to_the_contrary_restarts_the_count() -> None:
    outcome = evaluate_once(PLAN, build_volatile_windows())
    outcome = evaluate_once(PLAN, build_windows(0.01, 0.01, 0.01, 0.01), outcome.adaptation)
    assert outcome.adaptation.change_votes == 0


ASYNC = replace(PLAN, sync_mode=SyncMode.ASYNC_EDIT)
AFTER_A_WHILE = AdaptationState(
    Bottleneck.VOLATILE, hysteresis=Hysteresis(first=SYNC_MODE_COOL_DOWN_SECONDS).with_change(0.0)
)


def test_sync_returns_when_no_rank_is_slow_and_the_mode_was_held_long_enough() -> None:
    calm = build_local_windows(build_windows(0.01, 0.01, 0.01, 0.01))
    assert evaluate_repeatedly(ASYNC, calm, AFTER_A_WHILE, now=SYNC_MODE_COOL_DOWN_SECONDS - 1).plan is ASYNC
    outcome = evaluate_repeatedly(ASYNC, calm, AFTER_A_WHILE, now=SYNC_MODE_COOL_DOWN_SECONDS)
    assert outcome.plan.sync_mode is SyncMode.SYNC
    assert outcome.adaptation.bottleneck is Bottleneck.NONE
    assert not outcome.adaptation.hysteresis.allows(SYNC_MODE_COOL_DOWN_SECONDS + 1)
    assert (
        evaluate_repeatedly(ASYNC, build_local_windows(build_volatile_windows()), AFTER_A_WHILE, now=1e6).plan is ASYNC
    )


def test_nothing_is_evaluated_while_the_ranks_are_in_another_mode_than_the_plan() -> None:
    assert evaluate_repeatedly(ASYNC, build_volatile_windows(), AFTER_A_WHILE, now=1e6).plan is ASYNC
    assert evaluate_repeatedly(PLAN, build_local_windows(build_windows(0.01, 0.01, 0.01, 0.01)), now=1e6).plan is PLAN
    mixed = [*build_volatile_windows()[:2], *build_local_windows(build_volatile_windows())[2:]]
    assert evaluate_repeatedly(PLAN, mixed).plan is PLAN


def test_a_mode_that_the_user_has_chosen_stays() -> None:
    fixed = replace(AFTER_A_WHILE, is_mode_fixed=True)
    assert (
        evaluate_repeatedly(ASYNC, build_local_windows(build_windows(0.01, 0.01, 0.01, 0.01)), fixed, now=1e6).plan
        is ASYNC
    )
    assert evaluate_repeatedly(PLAN, build_volatile_windows(), fixed, now=1e6).plan is PLAN
    shares = evaluate_once(PLAN, build_windows(0.01, 0.01, 0.02, 0.01), fixed).plan.shares
    assert shares is not None
    assert shares[2] == min(shares)


def build_refusal(reason: str, version: int) -> Heartbeat:
    return replace(BEAT, plan_version=version, training=replace(BEAT.training, refused=reason))


def test_a_refused_plan_is_reverted_and_nothing_else_is_tried() -> None:
    beat = build_refusal("plan 3: no replicas to average", ASYNC.version)
    before = replace(PLAN, version=2)
    outcome = evaluate_refusal(ASYNC, before, beat, AFTER_A_WHILE)
    assert outcome.plan == replace(PLAN, version=ASYNC.version + 1)
    assert "no replicas to average" in outcome.messages[0]
    again = evaluate_refusal(outcome.plan, ASYNC, replace(beat, plan_version=4), outcome.adaptation)
    assert again.plan is outcome.plan
    assert not again.messages
    assert evaluate_repeatedly(outcome.plan, build_volatile_windows(), outcome.adaptation).plan is outcome.plan


def test_an_answer_to_an_older_plan_is_no_refusal_of_this_one() -> None:
    beat = build_refusal("plan 2: …", ASYNC.version - 1)
    assert evaluate_refusal(ASYNC, PLAN, beat, AdaptationState()).plan is ASYNC
    assert evaluate_refusal(ASYNC, PLAN, replace(BEAT, plan_version=ASYNC.version), AdaptationState()).plan is ASYNC


@pytest.mark.parametrize("mode", [None, *SyncMode])
def test_the_first_plan_has_the_users_mode(mode: SyncMode | None, tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    LocalController(runtime, 2, 5, lambda reason: pytest.fail(reason), mode)
    assert json.loads(runtime.plan.read_text())["sync_mode"] == (mode or SyncMode.SYNC)


def test_each_membership_of_a_local_job_gets_a_secret_of_its_own(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    controller = LocalController(runtime, 2, 5, lambda reason: pytest.fail(reason))
    secrets = []
    for version, membership in ((2, 1), (3, 2), (4, 2)):
        controller._publish(replace(controller._plan, version=version, membership=membership))
        secrets.append(json.loads(runtime.plan.read_text())["secret"])
    assert secrets[0] != secrets[1] == secrets[2]
    assert [len(bytes.fromhex(secret)) for secret in secrets] == [32] * 3


NONSENSE = ["{", '{"state": "Dancing"}', '{"kind": 7}', "[1]", '"words"']


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("what", ["heartbeat", "fault"])
def test_nonsense_in_the_runtime_folder_ends_nothing(
    what: str, nonsense: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    controller = LocalController(runtime, 2, 5, lambda reason: pytest.fail(reason))
    plan = json.loads(runtime.plan.read_text())
    (runtime.heartbeat if what == "heartbeat" else runtime.fault("one")).write_text(nonsense)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(controller.run(), 0.3))  # it polls on, several times
    assert json.loads(runtime.plan.read_text()) == plan
    assert not runtime.fault("one").exists()
    assert len(caplog.records) <= 1, "the same is logged once"


class TestTheFolderOfARun:
    @pytest.fixture(autouse=True)
    def parent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(local_folder, "_SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(local_folder, "_MIN_SHARED_MEMORY_BYTES", 0)
        return tmp_path

    def test_the_folder_of_a_running_run_is_not_removed_even_if_its_process_is_invisible(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In another process namespace (`docker run --ipc=host`) no process has the first run's process id."""
        real = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: not str(path).startswith("/proc/") and real(path))
        with open_local_runtime() as first:
            with open_local_runtime() as second:
                assert first.root != second.root
                assert first.rings.is_dir()
            assert not second.root.exists()
            run_in_fork(lambda: local_folder._sweep_stale_folders(first.root.parent, "pacekeeper-run-"))
            assert first.rings.is_dir(), "a process of the first run does not remove it, either"
        assert not first.root.exists()

    def test_the_folder_of_a_killed_run_is_removed_and_one_being_removed_is_not_taken(
        self, parent: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead = parent / "pacekeeper-run-1-dead"
        (dead / "rings").mkdir(parents=True)
        others = parent / "pacekeeper-1-older"  # of a version that held no lock
        others.mkdir()
        flock, swept = fcntl.flock, list[str]()

        def sweep_first(file: int, how: int) -> None:
            """Another run that begins takes the first folder for one that was left behind."""
            if not swept and not dead.exists():
                swept.append(os.readlink(f"/proc/self/fd/{file}"))
                shutil.rmtree(swept[0])
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", sweep_first)
        with open_local_runtime() as runtime:
            assert not dead.exists()
            assert others.exists()
            assert swept != [str(runtime.root)]
            assert runtime.rings.is_dir()

    def test_without_file_locks_a_run_begins_and_removes_nothing(
        self, parent: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raise_no_locks(*_: object) -> None:
            raise OSError("no locks available")

        (parent / "pacekeeper-run-1-dead").mkdir()
        monkeypatch.setattr(fcntl, "flock", raise_no_locks)
        with open_local_runtime() as runtime:
            assert runtime.rings.is_dir()
        assert [path.name for path in parent.iterdir()] == ["pacekeeper-run-1-dead"]


def run_in_fork(call: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

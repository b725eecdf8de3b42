"""What the ranks of a framework's training agree on at each step, without a framework."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

from pacekeeper.integrations.framework_training import FrameworkTraining
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_rank.records import Phase, RecordKind
from testing.training.ranks import run_ranks

RANKS = 2


def test_a_checkpoint_that_the_plan_requests_is_written_once_by_all_in_the_same_step(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[list[int], int]:
        dist.init_process_group("gloo")
        training = FrameworkTraining()
        training.begin(40)
        requested: list[int] = []
        for step in range(41, 48):
            if step == 43 and rank == 0:
                write_json(RuntimeFolder(tmp_path).plan, WorkerPlan(version=2, checkpoint_request=3).to_json())
            if training.end_step().save:
                requested.append(step)
                training.publish_checkpoint(lambda: None)
        training.end()
        return requested, int(RingReader(RuntimeFolder(tmp_path).ring(rank)).state()["checkpoint_request"])

    first, second = run_ranks(rank_main, RANKS, runtime=tmp_path)
    assert first == second == ([44], 3)
    assert RuntimeFolder(tmp_path).refusal.read_text() == ""


def test_all_ranks_leave_after_a_checkpoint_if_one_receives_sigterm(tmp_path: Path) -> None:
    published: list[int] = []

    def rank_main(rank: int) -> tuple[int, object, list[int]]:
        dist.init_process_group("gloo")
        training = FrameworkTraining()
        training.begin(0)
        for step in range(1, 10):
            if step == 4 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if training.end_step().leave and step >= 7:  # the framework's checkpoint may come later
                try:
                    training.publish_checkpoint(lambda step=step: published.append(step))  # type: ignore[misc]
                except SystemExit as left:
                    return step, left.code, published
        raise AssertionError("no rank has left")

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(7, 143, [7])] * RANKS


def test_a_second_training_continues_the_step_count(tmp_path: Path) -> None:
    def rank_main(_: int) -> None:
        training = FrameworkTraining()
        for loss in (0.5, float("nan")):
            before = signal.getsignal(signal.SIGTERM)
            training.begin(2)
            for _step in range(2):
                training.optimizer_begins()
                training.end_step()
            training.report_loss(loss)
            training.enter_phase(Phase.EVALUATE)
            training.enter_phase(Phase.CHECKPOINT)
            training.end()
            assert signal.getsignal(signal.SIGTERM) is before

    run_ranks(rank_main, 1, runtime=tmp_path)
    ring = RingReader(RuntimeFolder(tmp_path).ring(0))
    records, state = ring.records(), ring.state()
    assert records[records["kind"] == RecordKind.STEP]["step"].tolist() == [3, 4, 7, 8]
    phases = records[records["kind"] == RecordKind.PHASE]["phase"].tolist()
    assert phases == [Phase.EVALUATE, Phase.CHECKPOINT] * 2
    assert (state["phase"], state["bad_loss_step"], state["restored_step"]) == (Phase.START, 8, 6)


def test_sigterm_is_handled_without_a_launcher() -> None:
    def rank_main(_: int) -> object:
        training = FrameworkTraining()
        training.begin(0)
        os.kill(os.getpid(), signal.SIGTERM)
        training.end_step()
        assert training.end_step().leave
        try:
            training.publish_checkpoint(lambda: None)
        except SystemExit as left:
            return left.code
        return None

    assert run_ranks(rank_main, 1) == [143]

"""Behavior windows of real ranks over gloo: what is slow in the script is found by its name."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pacekeeper as pk
from pacekeeper.observe.profiling import rank_profiler
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.failures.finding import FaultClass
from pacekeeper_analysis.profiling.localize import Localization, localize_fault
from pacekeeper_analysis.profiling.page import ProfilePage, write_profile_page
from pacekeeper_analysis.profiling.pattern import (
    MAX_PROFILE_ANSWER_BYTES,
    MAX_RANK_PATTERN_BYTES,
    ProfileAnswer,
    TimeOwner,
    encode_compact_json,
)
from pacekeeper_analysis.profiling.report import build_report_data
from pacekeeper_analysis.profiling.table import read_table
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.requests import ProfileRequest, SourceNaming, WorkerRequests
from testing.training.ranks import run_ranks

RANKS = 3
HEALTHY_STEPS = 130
"""Before the fault; the ranks' early window lies in them."""
FIRST_STEP = 140
WINDOW = ProfileRequest("profile-7", FIRST_STEP, steps=60, seconds=8.0, sources=SourceNaming.SHOW)
CHECKPOINT_STEP, COMPILE_STEP, SWITCH_STEP = 150, 160, 180
FILE = "./tests/distributed/test_profiling.py"


ByStep = Callable[[int, int], float]
"""Seconds, of rank and step."""


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._seconds(index))
        return torch.ones(16) * index


def augment_sample(seconds: float) -> None:
    time.sleep(seconds)


def compute_step(seconds: float) -> None:
    time.sleep(seconds)


def return_zero(_rank: int, _step: int) -> float:
    return 0.0


def delay_rank(slow: int, seconds: float, usual: float = 0.0) -> ByStep:
    """A rank that takes longer once all are settled."""
    return lambda rank, step: seconds if rank == slow and step > HEALTHY_STEPS else usual


def delay_all_ranks(seconds: float) -> ByStep:
    return lambda _rank, step: seconds if step > HEALTHY_STEPS else 0.0


def build_monitored_main(
    steps: int, augments: ByStep = return_zero, loads: ByStep = return_zero, at_step: ByStep = return_zero
) -> Callable[[int], None]:
    """One with only one line of Pacekeeper."""

    def rank_main(rank: int) -> None:
        rank_profiler.EARLY_PROFILE_MIN_SECONDS = 0.2
        rank_profiler.EARLY_PROFILE = replace(rank_profiler.EARLY_PROFILE, seconds=1.0)
        torch.set_num_threads(1)
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(Samples(lambda index: loads(rank, index)), batch_size=1)
        for step, x in enumerate(loader, start=1):
            if step > steps:
                break
            at_step(rank, step)
            compute_step(0.01)
            augment_sample(augments(rank, step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for thread in threading.enumerate():
            if thread.name == "pacekeeper-profile":  # it puts the window together
                thread.join()

    return rank_main


def build_managed_main(folder: Path, steps: int) -> Callable[[int], None]:
    """One with a job, whose rank 1 is slow once all are settled. In the window a checkpoint is due, something is
    compiled, and at last its mode is switched: each but the last takes as long as 20 steps."""

    def rank_main(rank: int) -> None:
        rank_profiler.EARLY_PROFILE_MIN_SECONDS = 0.2
        rank_profiler.EARLY_PROFILE = replace(rank_profiler.EARLY_PROFILE, seconds=1.0)
        torch.set_num_threads(1)
        torch.compile(torch.sin, backend="eager")(torch.ones(1))  # what it imports, it does not in a step
        job = pk.init(checkpoints=pk.Checkpoints(folder / "checkpoints", every=CHECKPOINT_STEP), snapshot_every=0)
        net = job.replicate(nn.Linear(16, 16))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        loader = job.dataloader(Samples(lambda _: 0.0), global_batch_size=RANKS, max_microbatch=1)
        job.register(net=net, optimizer=optimizer, loader=loader, slow=SlowToKeep())
        job.restore()
        for step in job.steps(loader, until=steps):
            for x in step.microbatches():
                compute_step(0.01)
                augment_sample(delay_rank(1, 0.02)(rank, step.number))
                if step.number == COMPILE_STEP:
                    x = torch.compile(torch.sin, backend=slow_to_compile)(x)
                (net(x).square().mean() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step.number == SWITCH_STEP:
                write_json(RuntimeFolder(folder).plan, replace(PLAN, version=8, sync_mode=SyncMode.EDIT).to_json())
        for thread in threading.enumerate():
            if thread.name == "pacekeeper-profile":
                thread.join()

    return rank_main


class SlowToKeep:
    def state_dict(self) -> dict[str, int]:
        time.sleep(0.6)
        return {}

    def load_state_dict(self, _state: dict[str, int]) -> None: ...


def slow_to_compile(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
    time.sleep(0.6)
    return graph.forward


PLAN = WorkerPlan(version=7, membership=1, role=WorkerRole.MEMBER)


def write_request(runtime: RuntimeFolder, profile: ProfileRequest = WINDOW) -> None:
    write_json(runtime.requests, WorkerRequests(profile.name, profile=profile).to_json())


def run_profile(
    folder: Path, main: Callable[[int], Any], profile: ProfileRequest = WINDOW
) -> tuple[Localization, dict[int, ProfileAnswer]]:
    runtime = RuntimeFolder(folder).create()
    write_json(runtime.plan, PLAN.to_json())
    write_request(runtime, profile)
    run_ranks(main, RANKS, folder)
    paths = {rank: runtime.pattern(profile.name, rank) for rank in range(RANKS)}
    raw = {rank: path.read_bytes() for rank, path in paths.items() if path.exists()}
    assert all(len(data) <= MAX_PROFILE_ANSWER_BYTES for data in raw.values())
    answers = {rank: ProfileAnswer.from_bytes(data) for rank, data in raw.items()}
    assert all(
        len(encode_compact_json(answer.pattern.to_json())) <= MAX_RANK_PATTERN_BYTES for answer in answers.values()
    )
    return localize_fault(sorted(raw.items()), RANKS), answers


def test_a_slow_function_of_one_rank_is_found_by_name(tmp_path: Path) -> None:
    slow = build_monitored_main(210, augments=delay_rank(1, 0.02))
    found, answers = run_profile(tmp_path, slow)
    assert (found.finding.fault, found.finding.culprit) == (FaultClass.CODE, f"{FILE}:augment_sample on rank 1")
    assert found.explained > 0.5
    assert {answer.pattern.first_step for answer in answers.values()} == {FIRST_STEP}
    assert {answer.pattern.steps for answer in answers.values()} == {WINDOW.steps}
    assert all(answer.baseline is not None for answer in answers.values())
    waiting = next(f for f in answers[0].pattern.function_patterns if f.owner is TimeOwner.COLLECTIVE)
    assert waiting.name == "all_reduce"
    assert waiting.share > 0.2
    assert any(stack.frames[-1] == f"{FILE}:augment_sample" for stack in answers[1].pattern.stacks)
    assert max(names_augment(found, answers))[1] == "rank 1 (suspect)"


def names_augment(found: Localization, answers: dict[int, ProfileAnswer]) -> list[tuple[int, str]]:
    """In each flame graph of the page, and whose it is."""
    raw = {rank: answer.to_bytes() for rank, answer in answers.items()}
    shown = build_report_data(ProfilePage.from_json(write_profile_page(found, read_table(raw.items()), raw)), "job")
    place = shown["names"].index(f"{FILE}:augment_sample")

    def count_samples(node: list[Any]) -> int:
        return node[1] if node[0] == place else sum(map(count_samples, node[2]))

    return [(count_samples(one["tree"]), one["label"]) for one in shown["patterns"]]


def test_a_slow_function_of_all_ranks_is_found_by_their_early_steps(tmp_path: Path) -> None:
    found, _ = run_profile(tmp_path, build_monitored_main(210, augments=delay_all_ranks(0.02)))
    assert (found.finding.fault, found.finding.culprit) == (FaultClass.CODE, f"{FILE}:augment_sample on all ranks")


def test_a_slow_loader_is_data(tmp_path: Path) -> None:
    found, _ = run_profile(tmp_path, build_monitored_main(210, loads=delay_rank(2, 0.025, usual=0.001)))
    assert found.finding.fault is FaultClass.DATA
    assert found.finding.culprit == f"{FILE}:Samples.__getitem__ on rank 2"


def test_a_profile_skips_a_checkpoint_and_a_compilation_and_ends_with_a_change_of_mode(tmp_path: Path) -> None:
    """Own files are hidden here, as in a job that does not show them."""
    found, answers = run_profile(
        tmp_path, build_managed_main(tmp_path, SWITCH_STEP + 10), replace(WINDOW, sources=SourceNaming.HASH)
    )
    assert found.finding.fault is FaultClass.CODE
    assert found.finding.culprit.endswith(":augment_sample on rank 1")
    assert found.reported == RANKS
    patterns = [answer.pattern for answer in answers.values()]
    assert {(pattern.first_step, pattern.mode) for pattern in patterns} == {(FIRST_STEP, "Sync")}
    (steps,) = {pattern.steps for pattern in patterns}
    assert SWITCH_STEP - FIRST_STEP < steps < WINDOW.steps
    seen = {frame.rpartition(":")[2] for pattern in patterns for stack in pattern.stacks for frame in stack.frames}
    assert "augment_sample" in seen
    assert not {"SlowToKeep.state_dict", "slow_to_compile"} & seen
    assert "test_profiling.py" not in json.dumps(answers[1].pattern.to_json())
    assert "test_profiling.py" not in str(answers[1].baseline)


def test_a_rank_that_dies_during_a_profile_costs_only_its_own_pattern(tmp_path: Path) -> None:
    """Its peers lose their connection to it, and the ranks whose window is complete by then report it."""

    def die(rank: int, step: int) -> float:
        if rank == 1 and step == FIRST_STEP + 20:
            time.sleep(1.0)
            os._exit(0)
        return 0.0

    runtime = RuntimeFolder(tmp_path).create()
    write_request(runtime, replace(WINDOW, steps=18))
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(build_monitored_main(210, at_step=die), RANKS, tmp_path)
    answers = {rank: runtime.pattern(WINDOW.name, rank).read_bytes() for rank in (0, 2)}
    found = localize_fault(answers.items(), RANKS)
    assert (found.reported, found.remarks[0]) == (2, "2 of 3 ranks have answered")


def test_a_profile_that_was_received_too_late_is_skipped(tmp_path: Path) -> None:
    late = replace(WINDOW, first_step=0, steps=1)
    runtime = RuntimeFolder(tmp_path).create()
    write_request(runtime, late)
    run_ranks(build_monitored_main(20), RANKS, tmp_path)
    assert not list(runtime.patterns.glob("*.json"))

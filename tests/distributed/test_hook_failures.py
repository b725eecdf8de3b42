"""A hook that fails ends the recording of its rank, and nothing else: the script gets what it gets without hooks."""

from __future__ import annotations

import atexit
import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.torch_internals import HashStore
from pacekeeper_rank import monitoring, native_recorder, torch_internals
from pacekeeper_rank.collectives import collective_hooks, dispatcher
from pacekeeper_rank.hook_guard import HookGuard
from pacekeeper_rank.monitoring import record_optimizer_steps, start_monitoring
from pacekeeper_rank.recorder import Recorder, Recording
from pacekeeper_rank.recorder_factory import open_recorder
from pacekeeper_rank.records import Phase, RecordKind
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch

HOOKS = (
    "a backward pass",
    "a broadcast",
    "a collective",
    "a fork",
    "a new process group",
    "an optimizer",
    "DataLoader",
    "destroy_process_group",
    "gc",
    "the end of a group",
    "the exit",
    "torch.compile",
    "torch.load",
    "torch.save",
    "Work.wait",
)
"""All but FSDP2's, which needs a GPU."""
STEPS = 4


class InjectedError(Exception):
    pass


def fail(*_: Any, **__: Any) -> NoReturn:
    raise InjectedError


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def run_script(folder: Path, compiles: bool = True) -> list[Any]:
    """Use all that has hooks, and return what a script sees of it. `compiles`: it takes longest."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group: Any = dist.new_group([0])
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    doubled: Any = torch.compile(double, backend="eager", dynamic=False) if compiles else double
    seen: list[Any] = []
    for batch in DataLoader(torch.randn(2 * STEPS, 4), batch_size=2):  # type: ignore[arg-type]
        loss = doubled(model(batch)).square().mean()
        loss.backward()
        summed = torch.ones(2)
        work = dist.all_reduce(summed, group=group, async_op=True)
        assert work is not None
        seen += [work.wait(), summed.tolist(), loss.item()]
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "state")
    seen.append({name: value.sum().item() for name, value in torch.load(folder / "state").items()})
    gc.collect()
    del model, optimizer, group, work
    gc.collect()
    dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        os._exit(7)
    return [*seen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def replace_attributes(owner: Any, **attributes: Any) -> None:
    """In this rank, a process of its own."""
    for name, value in attributes.items():
        setattr(owner, name, value)


def inject_failure(broken: str, part: str) -> set[str]:
    """Make the hook with this name fail, or the end of it; return the names of all hooks, as they are installed."""
    names = set()
    protect, bracket, build = HookGuard.protect, HookGuard.bracket, HookGuard.build_contexts

    def choose(hook: str, function: Callable[..., Any], is_affected: bool = True) -> Callable[..., Any]:
        names.add(hook)
        return functools.wraps(function)(fail) if hook == broken and is_affected else function

    def protect_broken(guard: HookGuard, hook: str, function: Any, **options: Any) -> Any:
        return protect(guard, hook, choose(hook, function), **options)

    def bracket_broken(guard: HookGuard, hook: str, function: Any, begin: Any, end: Any) -> Any:
        ends = [choose(hook, begin, part == "begin"), choose(hook, end, part == "end")]
        return bracket(guard, hook, function, *ends)

    replace_attributes(
        HookGuard,
        protect=protect_broken,
        bracket=bracket_broken,
        build_contexts=lambda guard, hook, create: build(guard, hook, choose(hook, create)),
    )
    return names


def break_in_c(broken: str, recorder: Recorder) -> None:
    """Make Python raise what C calls in this hook."""
    if broken == "a collective":
        replace_attributes(native_recorder, register_group=fail)
    elif broken == "a backward pass":
        recorder.notice_wait = lambda *_: None  # C leaves waits to Python while something listens
        replace_attributes(Recorder, reduced=fail)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the script sees without hooks."""
    folder = tmp_path_factory.mktemp("without")
    return run_ranks(lambda _: run_script(folder), 1)[0]


@pytest.mark.parametrize(
    ("native", "through_dispatcher", "part"),
    [(False, False, "begin"), (True, False, "end"), (False, True, "end")],
    ids=["Python", "C", "dispatcher"],
)
def test_a_failing_hook_ends_recording_and_not_the_script(
    native: bool, through_dispatcher: bool, part: str, expected: list[Any], tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[list[Any], list[str], bool, set[str]]:
        hook, failures, at_exit = HOOKS[rank], list[str](), list[Callable[[], Any]]()
        if through_dispatcher:
            replace_attributes(collective_hooks, HookOpName=None)
            if hook == "a collective":
                replace_attributes(dispatcher, _collect_tensors=fail)
        replace_attributes(atexit, register=at_exit.append)
        names = inject_failure(hook, part)
        runtime = RuntimeFolder(tmp_path)
        recorder = open_recorder(runtime.ring(rank), runtime.communicators_file(rank), native=native)
        start_monitoring(recorder, lambda name, error: failures.append(f"{name}: {type(error).__name__}"))
        record_optimizer_steps(recorder)
        if native:
            break_in_c(hook, recorder)
        folder = tmp_path / hook
        folder.mkdir()
        seen = run_script(folder, compiles=hook == "torch.compile")
        for leave in at_exit:
            leave()
        return seen, failures, recorder.guard.active, names

    answers = run_ranks(rank_main, len(HOOKS), tmp_path)
    in_c = {"a collective", "a backward pass"} if native else set()
    assert set().union(in_c, *(names for *_, names in answers)) - {"FSDP2"} == {*HOOKS}
    for hook, (seen, failures, is_active, _) in zip(HOOKS, answers, strict=True):
        assert seen == expected, hook
        if hook == "a fork":
            assert (failures, is_active) == ([], True), "it fails in the child, which is not the rank"
        else:
            assert (failures, is_active) == ([f"{hook}: InjectedError"], False)


def test_a_rank_whose_hooks_have_failed_records_steps_and_no_own_work(tmp_path: Path) -> None:
    """Waits for peers are not measured any longer: a rank that waits must not seem to work."""

    def rank_main(rank: int) -> None:
        runtime = RuntimeFolder(tmp_path)
        recorder = open_recorder(runtime.ring(rank), runtime.communicators_file(rank), native=rank == 1)
        start_monitoring(recorder, lambda *_: None)
        recorder.managed = True
        for step in range(6):
            if step == 3:
                recorder.guard.disable("a collective", InjectedError())
            recorder.end_step()
        recorder.finish()

    run_ranks(rank_main, 2, tmp_path)
    for rank in range(2):
        records = RingReader(RuntimeFolder(tmp_path).ring(rank)).records()
        steps, own = (
            records["step"][records["kind"] == kind].tolist() for kind in (RecordKind.STEP, RecordKind.COMPUTE)
        )
        assert (steps, own) == ([*range(6)], [0, 1, 2])


def test_steps_only(tmp_path: Path) -> None:
    """With a torch that cannot report collectives: steps, loading, and phases."""

    def rank_main(rank: int) -> str:
        replace_attributes(torch_internals, can_report_collectives=lambda: False)
        replace_attributes(monitoring, start_collective_monitor=fail)
        runtime = RuntimeFolder(tmp_path)
        recorder = open_recorder(runtime.ring(rank), runtime.communicators_file(rank))
        start_monitoring(recorder)
        record_optimizer_steps(recorder)
        run_script(tmp_path)
        recorder.finish()
        return recorder.recording

    assert run_ranks(rank_main, 1, tmp_path) == [Recording.STEPS_ONLY]
    records = RingReader(RuntimeFolder(tmp_path).ring(0)).records()
    assert set(records["kind"]) <= {RecordKind.STEP, RecordKind.DATA, RecordKind.PHASE, RecordKind.GC}
    assert records["step"][records["kind"] == RecordKind.STEP].tolist() == [*range(1, STEPS + 1)]
    assert (records["kind"] == RecordKind.DATA).sum() == STEPS + 1
    phases = set(records["phase"][records["kind"] == RecordKind.PHASE])
    assert {Phase.COMPILE, Phase.CHECKPOINT, Phase.RESTORE} <= phases

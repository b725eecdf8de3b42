"""The records of real ranks: a slow rank is measured as slow and its peers are not, under DDP and FSDP2."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from pacekeeper.observe.monitoring import get_recorder
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.monitoring import MIN_RECORDED_GC_NS
from pacekeeper_rank.records import SYMMETRIC_COLLECTIVES, Collective, Phase, RecordKind
from testing.training.fake_clock import FakeClock, install_fake_clock
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch

RANKS = 4
SLOW_RANK = 2
SECONDS_A_SAMPLE = tuple(0.012 if rank == SLOW_RANK else 0.004 for rank in range(RANKS))
"""Of each rank, by a clock by which nothing else takes time."""
SHARE = 4
STEPS = 8


class Layer(nn.Module):
    """A linear layer whose forward pass takes this time per sample; the backward pass takes no time."""

    def __init__(self, seconds: float, clock: FakeClock) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.seconds, self.clock = seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.work(self.seconds * len(x))
        y: Tensor = self.linear(x)
        return y


def make_model(rank: int, clock: FakeClock) -> nn.Module:
    return nn.Sequential(*[Layer(SECONDS_A_SAMPLE[rank] / 2, clock) for _ in range(2)])


def run_monitored_script(sharded: bool, folder: Path) -> Callable[[int], None]:
    """A script with only one line of Pacekeeper."""

    def rank_main(rank: int) -> None:
        clock = install_fake_clock(folder, rank, RANKS)
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        if sharded:
            from torch.distributed.fsdp import fully_shard

            model: Any = make_model(rank, clock)
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(make_model(rank, clock))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples: Any = torch.randn(STEPS * SHARE, 64)
        data = torch.utils.data.DataLoader(samples, batch_size=SHARE)
        for x in data:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return rank_main


def run_managed_script(sharded: bool, folder: Path) -> Callable[[int], None]:
    def rank_main(rank: int) -> None:
        clock = install_fake_clock(folder, rank, RANKS)
        import pacekeeper as pk

        job = pk.init(mesh={"shard": -1} if sharded else None)
        model = job.fully_shard(make_model(rank, clock)) if sharded else job.replicate(make_model(rank, clock))
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.dataloader(
            torch.randn(100, 64),
            global_batch_size=RANKS * SHARE,
            max_microbatch=SHARE,
            weight=lambda batch: torch.tensor(len(batch)),
        )
        for step in job.steps(loader, until=STEPS):
            for x in step.microbatches():
                (model(x).square().sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    return rank_main


def read_records(runtime: Path, rank: int) -> NDArray[np.void]:
    return RingReader(RuntimeFolder(runtime).ring(rank)).records()


def compute_median_ms(found: NDArray[np.void], kind: RecordKind) -> float:
    """Median over the steps behind the first one."""
    chosen = found[(found["kind"] == kind) & (found["phase"] == Phase.TRAIN)]
    assert len(chosen) == STEPS - 1
    return float(median(((chosen["end_ns"] - chosen["start_ns"]) / 1e6).tolist()))


Script = Callable[[bool, Path], Callable[[int], None]]
SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
SCRIPTS = pytest.mark.parametrize("script", [run_monitored_script, run_managed_script])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script, bool, str], Path]:
    """The runtime folder of a run of the script, with `PACEKEEPER_NATIVE` as given; each is run once."""

    @cache
    def folder_of(script: Script, sharded: bool, native: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        run_ranks(script(sharded, folder), RANKS, runtime=folder, environment={"PACEKEEPER_NATIVE": native})
        return folder

    return folder_of


FolderOf = Callable[[Script, bool, str], Path]


@SHARDED
@SCRIPTS
def test_a_slow_rank_is_measured_as_slow_and_its_peers_are_not(
    script: Script, sharded: bool, native: str, folder_of: FolderOf
) -> None:
    folder = folder_of(script, sharded, native)
    own = [1000 * SHARE * seconds for seconds in SECONDS_A_SAMPLE]
    for rank in range(RANKS):
        found = read_records(folder, rank)
        assert compute_median_ms(found, RecordKind.STEP) == pytest.approx(
            own[SLOW_RANK]
        )  # all are as slow as the slowest
        assert compute_median_ms(found, RecordKind.COMPUTE) == pytest.approx(own[rank])


@SHARDED
@SCRIPTS
def test_the_recorder_in_c_records_the_same_as_in_python(script: Script, sharded: bool, folder_of: FolderOf) -> None:
    """Field by field; but for the ends of collectives that may be noticed late, which is a race with gloo."""
    folders = [folder_of(script, sharded, native) for native in ("0", "1")]
    for rank in range(RANKS):
        in_python, in_c = (read_records(folder, rank) for folder in folders)
        for given in (in_python, in_c):
            raced = given["kind"] == RecordKind.COLLECTIVE
            for name in ("end_ns", "value", "flags"):
                given[name][raced] = 0
        fields = [name for name in in_c.dtype.names or () if name != "index"]
        assert sorted(in_c[fields].tolist()) == sorted(in_python[fields].tolist())
        assert len(in_c) > 4 * STEPS


@SHARDED
def test_the_last_to_enter_waits_least(sharded: bool, native: str, folder_of: FolderOf) -> None:
    """Lateness: the longest wait of a collective's group less one's own."""
    folder = folder_of(run_monitored_script, sharded, native)
    waits: dict[tuple[int, ...], dict[int, float]] = {}
    for rank in range(RANKS):
        found = read_records(folder, rank)
        collectives = found[(found["kind"] == RecordKind.COLLECTIVE) & (found["phase"] == Phase.TRAIN)]
        for record in collectives[np.isin(collectives["collective"], list(SYMMETRIC_COLLECTIVES))]:
            key = (int(record["group"]), int(record["sequence"]), int(record["collective"]), int(record["bytes"]))
            waits.setdefault(key, {})[rank] = float(record["end_ns"] - record["start_ns"])
    assert all(len(by_rank) == RANKS for by_rank in waits.values())  # the same collectives on all ranks
    assert {Collective(key[2]) for key in waits} == (
        {Collective.ALL_GATHER, Collective.REDUCE_SCATTER} if sharded else {Collective.ALL_REDUCE}
    )
    lateness = [sum(max(by_rank.values()) - by_rank[rank] for by_rank in waits.values()) for rank in range(RANKS)]
    assert max(range(RANKS), key=lateness.__getitem__) == SLOW_RANK
    later = SECONDS_A_SAMPLE[SLOW_RANK] - SECONDS_A_SAMPLE[0]
    assert lateness[SLOW_RANK] >= 1e9 * later * SHARE * (STEPS - 1)


@pytest.mark.usefixtures("native")
def test_every_collective_of_a_script_is_recorded(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        pair: Any = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(10))
        dist.broadcast(torch.ones(3), src=1)
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
            dist.barrier(group=pair)
        words: list[str] = [""] * 3
        dist.all_gather_object(words, "word")
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(4), dst=2)
        elif rank == 2:
            dist.recv(torch.ones(4), src=0)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        work.wait()
        time.sleep(0.05)  # the last callback comes from gloo's thread

    run_ranks(rank_main, 3, runtime=tmp_path)

    def kinds(rank: int) -> list[tuple[Collective, int]]:
        found = read_records(tmp_path, rank)
        found = found[found["kind"] == RecordKind.COLLECTIVE]
        found = found[np.argsort(found["start_ns"])]
        return [(Collective(record["collective"]), int(record["bytes"])) for record in found]

    first = [(Collective.ALL_REDUCE, 40), (Collective.BROADCAST, 12)]
    in_pair = [(Collective.ALL_REDUCE, 4), (Collective.BARRIER, 0)]
    last = [(Collective.BARRIER, 0), (Collective.ALL_REDUCE, 8)]
    gathers = [entry for entry in kinds(2) if entry[0] is Collective.ALL_GATHER]
    assert len(gathers) == 2  # sizes, then contents
    assert kinds(0) == [*first, *in_pair, *gathers, last[0], (Collective.SEND, 16), last[1]]
    assert kinds(1) == [*first, *in_pair, *gathers, *last]
    assert kinds(2) == [*first, *gathers, last[0], (Collective.RECV, 16), last[1]]
    groups = {rank: set(read_records(tmp_path, rank)["group"].tolist()) - {0} for rank in range(3)}
    world, in_pair_of, channel = groups[1] & groups[2], groups[1] - groups[2], groups[2] - groups[1]
    assert [len(found) for found in (world, in_pair_of, channel)] == [1, 1, 1]
    assert groups[0] == world | in_pair_of | channel, "what it sends to rank 2 is the same channel there"
    state = RingReader(RuntimeFolder(tmp_path).ring(0)).state()
    assert state["collective"] == Collective.NONE
    assert state["collectives_entered"] == len(kinds(0))


@pytest.mark.usefixtures("native")
def test_the_state_names_the_rank_that_never_entered(tmp_path: Path) -> None:
    """The evidence of a hang: the peers are inside a collective that the culprit has not entered."""

    def rank_main(rank: int) -> list[tuple[int, int]]:
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            rings = [RingReader(RuntimeFolder(tmp_path).ring(other)) for other in range(3)]
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                if all(rings[other].state()["collective"] == Collective.ALL_REDUCE for other in (0, 2)):
                    break
                time.sleep(0.005)
            seen = [(int(ring.state()["collective"]), int(ring.state()["collectives_entered"])) for ring in rings]
        dist.all_reduce(torch.ones(1))
        return seen if rank == 1 else []

    _, seen, _ = run_ranks(rank_main, 3, runtime=tmp_path)
    inside, outside = int(Collective.ALL_REDUCE), int(Collective.NONE)
    assert [collective for collective, _ in seen] == [inside, outside, inside]
    assert seen[1][1] < seen[0][1] == seen[2][1]


@pytest.mark.usefixtures("native")
def test_phases_garbage_and_data_are_recorded_and_no_part_of_the_steps(tmp_path: Path) -> None:
    class SlowData(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 100

        def __init__(self, clock: FakeClock) -> None:
            self.clock = clock

        def __getitem__(self, index: int) -> Tensor:
            self.clock.work(0.01)
            return torch.ones(4)

    def rank_main(rank: int) -> int:
        import gc

        clock = install_fake_clock(tmp_path, rank, 1)

        import pacekeeper as pk

        job = pk.init()
        model = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in job.steps(job.dataloader(SlowData(clock), 2, max_microbatch=2), until=4):
            for x in step.microbatches():
                (model(x).sum() / step.total_weight).backward()
            if step.number == 1:
                gc.callbacks.append(lambda *_: clock.work(0.05))
                gc.collect(0)  # of the young: part of the work
                gc.collect()
                gc.callbacks.pop()
            optimizer.step()
            if step.due("eval", every=2):
                with job.phase("eval"):
                    clock.work(0.2)
        return int(RingReader(RuntimeFolder(tmp_path).ring(rank)).state()["phase"])

    assert run_ranks(rank_main, 1, runtime=tmp_path) == [Phase.FINISHED]
    found = read_records(tmp_path, 0)
    duration = (found["end_ns"] - found["start_ns"]) / 1e9
    phases = found[found["kind"] == RecordKind.PHASE]
    assert phases["phase"].tolist().count(Phase.EVALUATE) == 2
    steps = duration[(found["kind"] == RecordKind.STEP) & (found["step"] > 1)]
    assert len(steps) == 3
    assert steps.tolist() == pytest.approx([0.02] * 3)
    data = duration[found["kind"] == RecordKind.DATA]
    assert data.tolist().count(0.02) == 4
    assert duration[found["kind"] == RecordKind.GC].tolist() == pytest.approx([0.05])


class Busy(torch.utils.data.Dataset[Tensor]):
    """Does in a DataLoader's worker what would be recorded in a rank, and returns which callbacks gc has there."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        import gc

        gc.collect()
        plain: Any = torch.ones(3, 1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in torch.utils.data.DataLoader(plain):
            model(x).sum().backward()
            optimizer.step()
        with get_recorder().run_phase(Phase.EVALUATE):
            pass
        return torch.tensor([len([each for each in gc.callbacks if "pacekeeper" in each.__module__])])


@pytest.mark.usefixtures("native")
def test_forked_children_of_a_rank_are_not_recorded(tmp_path: Path) -> None:
    """Nothing that a DataLoader's workers do is in the rank's records and state."""

    def rank_main(_: int) -> tuple[int, int]:
        import gc

        import pacekeeper.auto  # noqa: F401

        gc.disable()
        before = len(gc.callbacks)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(Busy(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        callbacks = 0
        for x in loader:
            callbacks += int(x.sum())
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        gc.callbacks.append(lambda *_: time.sleep(2 * MIN_RECORDED_GC_NS * 1e-9))
        gc.collect()
        return callbacks, len(gc.callbacks) - before

    assert run_ranks(rank_main, 1, runtime=tmp_path) == [(0, 1)]
    kinds = read_records(tmp_path, 0)["kind"].tolist()
    assert [kinds.count(kind) for kind in (RecordKind.STEP, RecordKind.GC, RecordKind.PHASE)] == [6, 1, 0]
    assert kinds.count(RecordKind.DATA) == 7, "the last one finds the end"
    state = RingReader(RuntimeFolder(tmp_path).ring(0)).state()
    assert (state["step"], state["phase"]) == (6, Phase.TRAIN)


@pytest.mark.usefixtures("native")
def test_keeping_state_is_a_phase_of_its_own_and_leaving_the_group_ends_the_training(tmp_path: Path) -> None:
    def phase() -> str:
        return Phase(int(RingReader(RuntimeFolder(tmp_path).ring(0)).state()["phase"])).name

    class PhaseRecorder(io.BytesIO):
        """A file that notes the phase in which it is used."""

        def write(self, data: Any) -> int:
            seen.append(phase())
            return super().write(data)

        def read(self, size: int | None = -1) -> bytes:
            seen.append(phase())
            return super().read(size)

    seen: list[str] = []

    def rank_main(rank: int) -> list[str]:  # noqa: ARG001  # there is one rank
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        dist.destroy_process_group()  # of the preparations
        assert phase() == "START"
        found = []
        for _ in range(2):
            dist.init_process_group("gloo")
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            file = PhaseRecorder()
            seen.clear()
            torch.save(model.state_dict(), file)
            file.seek(0)
            saved = set(seen)
            seen.clear()
            torch.load(file)
            found += [phase(), *saved, *set(seen)]
            dist.destroy_process_group()
            found.append(phase())
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        return found

    assert run_ranks(rank_main, 1, tmp_path)[0] == ["TRAIN", "CHECKPOINT", "RESTORE", "FINISHED"] * 2


def test_compiling_in_the_middle_of_training_is_a_phase_of_its_own(tmp_path: Path) -> None:
    def rank_main(_: int) -> None:
        import pacekeeper.auto  # noqa: F401

        model: Any = torch.compile(nn.Linear(4, 1), backend="eager", dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in (2, 2, 3, 3):  # another shape is compiled again
            model(torch.ones(size, 4)).sum().backward()
            optimizer.step()

    run_ranks(rank_main, 1, runtime=tmp_path)
    found = read_records(tmp_path, 0)
    compiled = found[(found["kind"] == RecordKind.PHASE) & (found["phase"] == Phase.COMPILE)]
    assert {1, 3} <= set(compiled["step"].tolist())
    assert not {2, 4} & set(compiled["step"].tolist())
    assert found[found["kind"] == RecordKind.STEP]["phase"].tolist() == [Phase.START, *[Phase.TRAIN] * 3]


@pytest.mark.usefixtures("native")
def test_a_script_may_train_one_model_after_the_other(tmp_path: Path) -> None:
    def rank_main(_: int) -> None:
        import pacekeeper.auto  # noqa: F401

        for _training in range(2):
            model, other = nn.Linear(4, 1), nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            second = torch.optim.SGD(other.parameters(), lr=0.1)  # steps, too: part of the first one's step
            for _step in range(3):
                (model(torch.ones(2, 4)) + other(torch.ones(2, 4))).sum().backward()
                optimizer.step()
                second.step()
            del optimizer, second

    run_ranks(rank_main, 1, runtime=tmp_path)
    found = read_records(tmp_path, 0)
    assert found[found["kind"] == RecordKind.STEP]["step"].tolist() == list(range(1, 7))


@pytest.mark.usefixtures("native")
def test_a_managed_script_may_import_auto(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        import pacekeeper.auto  # noqa: F401

        run_managed_script(sharded=False, folder=tmp_path)(rank)

    run_ranks(rank_main, RANKS, runtime=tmp_path)
    found = read_records(tmp_path, 0)
    assert found[found["kind"] == RecordKind.STEP]["step"].tolist() == list(range(1, STEPS + 1))


def test_without_a_launcher_nothing_is_recorded() -> None:
    def rank_main(_: int) -> bool:
        from torch._C._distributed_c10d import Work

        wait = Work.wait
        import pacekeeper.auto  # noqa: F401

        dist.init_process_group("gloo")
        dist.barrier()
        return Work.wait is wait

    assert run_ranks(rank_main, 2) == [True, True]

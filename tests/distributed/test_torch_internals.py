"""What each name of torch that is not public does for us, with the torch at hand.

Where a newer torch has changed one, a test here fails with its name; pyproject.toml allows that torch once they pass.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pacekeeper import torch_internals
from pacekeeper_rank import torch_internals as recorded
from pacekeeper_rank.collectives import dispatcher
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch


def test_every_function_has_its_test_here() -> None:
    functions = {
        name
        for module in (torch_internals, recorded)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    tests = {name.removeprefix("test_") for name in vars(sys.modules[__name__])}
    assert functions <= tests


# Process groups


def _init_single_rank() -> Any:
    """A process group of one rank."""
    dist.init_process_group("gloo")
    return dist.group.WORLD


def test_get_default_store() -> None:
    def rank_main(rank: int) -> bytes:
        _init_single_rank()
        store = torch_internals.get_default_store()
        if rank == 0:
            store.set("said", "by rank 0")
        answer: bytes = store.get("said")
        dist.barrier()
        return answer

    assert run_ranks(rank_main, 2) == [b"by rank 0"] * 2


def test_list_process_groups() -> None:
    def rank_main(_: int) -> bool:
        groups = [_init_single_rank(), dist.new_group([0])]
        return recorded.list_process_groups() == groups

    assert run_ranks(rank_main, 1) == [True]


def test_on_new_process_group() -> None:
    def rank_main(rank: int) -> bool:
        made: list[Any] = []
        recorded.on_new_process_group(made.append)
        groups = [_init_single_rank(), dist.new_group([rank], use_local_synchronization=True)]
        groups += init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")).get_all_groups()
        dist.barrier()
        return {id(group) for group in groups} <= {id(group) for group in made}

    assert run_ranks(rank_main, 2) == [True, True]


def test_get_group_ranks() -> None:
    def rank_main(rank: int) -> list[tuple[int, ...]]:
        group = _init_single_rank()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        single: Any = dist.new_group([rank], use_local_synchronization=True)
        groups = [group, mesh.get_group("b"), single, object()]
        dist.barrier()
        return [recorded.get_group_ranks(group) for group in groups]

    assert run_ranks(rank_main, 2) == [[(0, 1), (0, 1), (rank,), ()] for rank in range(2)]


def test_on_destroyed_process_group() -> None:
    def rank_main(_: int) -> list[str]:
        calls: list[str] = []

        def destroyed(*_: Any) -> None:
            calls.append("one" if dist.is_initialized() else "all")

        recorded.on_destroyed_process_group(destroyed)
        _init_single_rank()
        dist.destroy_process_group(dist.new_group([0]))
        dist.distributed_c10d.destroy_process_group()
        return calls

    assert run_ranks(rank_main, 1) == [["one", "all"]]


@pytest.mark.parametrize(
    ("version", "expected"), [("2.15.1+cpu", (2, 15)), ("2.9.0a0+gitabc", (2, 9)), ("nightly", (0, 0))]
)
def test_read_version(version: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert recorded.read_version() == expected


@pytest.mark.parametrize(
    ("owner", "missing"),
    [
        (torch._C, "_current_graph_task_id"),
        (dist.distributed_c10d, "_register_process_group"),
    ],
)
def test_can_report_collectives(owner: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of these names; and before torch 2.9, where only the dispatcher would report them, not at all."""
    assert recorded.can_report_collectives()
    monkeypatch.setattr(recorded, "HookOpName", None)
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert recorded.can_report_collectives()
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    assert not recorded.can_report_collectives()
    monkeypatch.undo()
    monkeypatch.delattr(owner, missing)
    assert not recorded.can_report_collectives()


def test_intercept_operator() -> None:
    """Of an operator, on all devices that there are here."""

    def rank_main(_: int) -> list[Any]:
        group = _init_single_rank()
        seen: list[Any] = []

        def kernel(arguments: Any, proceed: Any) -> Any:
            assert recorded.ProcessGroup.unbox(arguments["process_group"]) is group
            result = proceed()
            work = recorded.Work.unbox(result[1])
            seen.append((list(arguments), arguments["root_rank"], work.is_completed() in (True, False)))
            return result

        recorded.intercept_operator("broadcast_", kernel)
        dist.broadcast(torch.ones(2), 0)
        return seen

    ((arguments, root, has_work),) = run_ranks(rank_main, 1)[0]
    assert (arguments[:4], root) == (["tensors", "process_group", "root_rank", "root_tensor"], 0)
    assert has_work


def test_tracebacks_have_no_frame_of_a_kernel_before_torchs() -> None:
    def rank_main(_: int) -> tuple[type, set[str]]:
        _init_single_rank()
        dispatcher._intercept_operators()
        try:
            dist.broadcast(torch.ones(2).to_sparse(), 0)
        except Exception as error:
            return type(error), {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        raise AssertionError("gloo broadcasts no sparse tensors")

    kind, files = run_ranks(rank_main, 1)[0]
    assert issubclass(kind, (RuntimeError, ValueError))
    assert not [file for file in files if "pacekeeper_rank" in file]


# Backward passes


def test_list_backends() -> None:
    def rank_main(_: int) -> list[str]:
        dist.init_process_group("gloo")
        return recorded.list_backends()

    assert run_ranks(rank_main, 1) == [["cpu:gloo,cuda:gloo"]]


def test_dump_flight_record() -> None:
    """What stands in it is read in tests/unit/trainer/observe/collectives/test_flight_recorder.py."""
    record = recorded.dump_flight_record()
    assert record is not None
    assert json.loads(record)["version"].startswith("2.")


def test_list_used_gpus() -> None:
    """Of a GPU in use: see tests.gpu.test_faults."""
    assert callable(torch._C._cuda_hasPrimaryContext)
    assert recorded.list_used_gpus() == []


def test_graph_task() -> None:
    passes = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: passes.append(recorded.graph_task()))
    assert recorded.graph_task() == -1
    (x * x).sum().backward()
    (x * 2).sum().backward()
    assert len(set(passes)) == 2
    assert -1 not in passes


def test_callbacks_of_the_engine_run_at_the_end_of_the_backward_pass() -> None:
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * x
    y.register_hook(lambda _: recorded.engine.queue_callback(lambda: order.append("end")))
    x.register_hook(lambda _: order.append("gradient"))
    y.sum().backward()
    assert order == ["gradient", "end"]


# Compilation


def test_on_compilation() -> None:
    """Once around each compilation, however often it is registered."""

    def rank_main(_: int) -> list[str]:
        calls: list[str] = []

        def started(_: Any) -> None:
            calls.append("started")

        def ended(_: Any) -> None:
            calls.append("ended")

        recorded.on_compilation(started, ended)
        recorded.on_compilation(started, ended)
        doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
        for size in (2, 2, 3):
            doubled(torch.ones(size))
        return calls

    assert run_ranks(rank_main, 1) == [["started", "ended"] * 2]


def test_create_gloo_backend() -> None:
    def rank_main(rank: int) -> int:
        dist.init_process_group("gloo")
        store = PrefixStore("apart", torch_internals.get_default_store())
        backend = torch_internals.create_gloo_backend(store, rank, 2)
        dist.destroy_process_group()
        value = torch.tensor([rank + 1])
        options = BroadcastOptions()
        options.rootRank = 1
        rows = [[torch.zeros_like(value) for _ in range(2)]]
        backend.allgather(rows, [value]).wait()
        gathered = [[torch.zeros_like(value) for _ in range(2)]]
        backend.gather(gathered if rank == 0 else [], [value]).wait()
        assert [row.item() for row in [*rows[0], *gathered[0]]] == ([1, 2, 1, 2] if rank == 0 else [1, 2, 0, 0])
        if rank == 0:
            backend.send([value], 1, 7).wait()
        else:
            received = torch.zeros_like(value)
            backend.recv([received], 0, 7).wait()
            assert received.item() == 1
        backend.broadcast([value], options).wait()
        return int(value)

    assert run_ranks(rank_main, 2) == [2, 2]


def test_open_checkpoint_storage(tmp_path: Path) -> None:
    opened = [type(torch_internals.open_checkpoint_storage(tmp_path, is_reader)) for is_reader in (True, False)]
    assert opened == [FileSystemReader, FileSystemWriter]


@pytest.mark.parametrize(("left", "compiled"), [(False, 2), (True, 0)])
def test_leave_uncompiled(left: bool, compiled: int) -> None:
    """Of a function that compiled code, torn by a break of its graph in a loop, calls in between."""

    def rank_main(_: int) -> int:
        graphs = []

        def doubled(x: Tensor) -> Tensor:
            return x * 2

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        @torch.compile(backend=backend, dynamic=False)
        def all_doubled(all_x: list[Tensor]) -> list[Tensor]:
            found = []
            for x in all_x:
                torch._dynamo.graph_break()
                found.append(doubled(x))
            return found

        if left:
            torch_internals.leave_uncompiled(doubled)
        all_doubled([torch.ones(2), torch.ones(3)])
        return len(graphs)

    assert run_ranks(rank_main, 1) == [compiled]


# Waits that no `Work.wait` in Python shows

_LAYERS = 3


def test_bracket_fsdp_waits() -> None:
    """On a CPU, whose streams do nothing, but receive the calls to wait of a GPU's."""

    def rank_main(_: int) -> tuple[int, int, int, int]:
        brackets = 0

        @contextmanager
        def bracket(stream: Any) -> Iterator[None]:
            nonlocal brackets
            brackets += stream == torch.cpu.current_stream()
            yield

        def record_event(_: Any) -> torch.cpu.Event:
            return torch.cpu.Event()

        torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign,assignment]  # a GPU's gives one
        recorded.bracket_fsdp_waits(bracket, torch.cpu)
        dist.init_process_group("gloo")
        model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(_LAYERS)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        loss = model(torch.ones(2, 4)).sum()
        forward = brackets
        loss.backward()
        backward = brackets - forward
        torch.cpu.current_stream().wait_event(torch.cpu.Event())  # the script's own
        with torch.no_grad():
            model(torch.ones(2, 4))
        return forward, backward, brackets - forward - backward, len(list(model))

    for forward, backward, again, layers in run_ranks(rank_main, 2):
        assert forward == again == layers  # each layer's parameters are waited for once
        # The last layer is gathered still, or gathered again; its reductions are waited for, at the end all of them.
        assert layers <= backward <= 4 * layers


def test_bracket_coalesced_broadcasts() -> None:
    """Those of DDP's buffers."""

    def rank_main(_: int) -> list[int]:
        brackets = 0

        @contextmanager
        def bracket() -> Iterator[None]:
            nonlocal brackets
            brackets += 1
            yield

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        recorded.bracket_coalesced_broadcasts(bracket)
        counts = []
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            counts.append(brackets)
        torch_internals.broadcast_buffers(model, 1 << 20)
        return [*counts, brackets]

    for counts in run_ranks(rank_main, 2):
        assert counts == [1, 2, 3]


# Data


def test_replace_fetch() -> None:
    def rank_main(_: int) -> tuple[list[Any], list[Any]]:
        fetched: list[Any] = []

        def build(fetch: Any) -> Any:
            def timed(loader: Any) -> Any:
                fetched.append(fetch(loader))
                return fetched[-1]

            return timed

        recorded.replace_fetch(build)
        loader: Any = DataLoader(list(range(4)), batch_size=2)  # type: ignore[arg-type]
        return [batch.tolist() for batch in loader], [batch.tolist() for batch in fetched]

    assert run_ranks(rank_main, 1) == [([[0, 1], [2, 3]], [[0, 1], [2, 3]])]


class _Workers(IterableDataset[int]):
    """How many a worker believes there to be, outside and inside of the context."""

    def __iter__(self) -> Any:
        for hidden in (False, True, False):
            if hidden:
                with torch_internals.hide_worker_info():
                    info = get_worker_info()
            else:
                info = get_worker_info()
            yield 0 if info is None else info.num_workers


def test_hide_worker_info() -> None:
    assert [int(count) for count in DataLoader(_Workers(), batch_size=None, num_workers=1)] == [1, 0, 1]


# DDP and FSDP2


def test_broadcast_buffers() -> None:
    def rank_main(rank: int) -> tuple[list[float], int]:
        _init_single_rank()
        model = DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
        model.module.running_mean.fill_(rank + 1.0)
        model.module.num_batches_tracked.fill_(rank + 7)
        torch_internals.broadcast_buffers(model, 1 << 20)
        return model.module.running_mean.tolist(), int(model.module.num_batches_tracked)

    assert run_ranks(rank_main, 2) == [([1.0, 1.0], 7)] * 2


def test_rebuild_buckets() -> None:
    """Which DDP would do otherwise when the next forward pass begins."""

    def rank_main(_: int) -> list[bool]:
        _init_single_rank()
        to_do = []
        for settled in (False, True):
            model = DistributedDataParallel(nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
            if settled:
                torch_internals.rebuild_buckets(model)
            to_do.append(model.reducer._rebuild_buckets())
        return to_do

    assert run_ranks(rank_main, 1) == [[True, False]]


class _Sharded:
    """Two layers, sharded one by one over a single rank."""

    def __init__(self) -> None:
        _init_single_rank()
        mesh = init_device_mesh("cpu", (1,))
        self.model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.first: Any
        self.second: Any
        self.first, self.second = self.model

    def run(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()


def test_list_all_reduce_hooks() -> None:
    def rank_main(_: int) -> tuple[bool, list[Any]]:
        sharded = _Sharded()

        def hook(_: Tensor) -> None: ...

        sharded.first.set_all_reduce_hook(hook)
        given = list(torch_internals.list_all_reduce_hooks(sharded.first))
        without_parameters = torch_internals.list_all_reduce_hooks(sharded.model)
        return given == [hook], [*torch_internals.list_all_reduce_hooks(sharded.second), *without_parameters]

    assert run_ranks(rank_main, 1) == [(True, [None])]


def test_delay_gather() -> None:
    class Stream:
        """Of a device that is not here; it writes down what it is to wait for."""

        def __init__(self) -> None:
            self.waits: list[Any] = []

        def wait_event(self, event: Any) -> None:
            self.waits.append(event)

    def rank_main(_: int) -> list[list[str]]:
        sharded = _Sharded()
        torch_internals.delay_gather(sharded.first, "too early, and no error")
        sharded.run()
        context = sharded.first._get_fsdp_state()._comm_ctx
        streams = [name for name in vars(context) if name.startswith("all_gather") and name.endswith("stream")]
        for name in streams:
            setattr(context, name, Stream())
        torch_internals.delay_gather(sharded.first, "update")
        return [getattr(context, name).waits for name in streams]

    assert run_ranks(rank_main, 1) == [[["update"], ["update"]]]


def test_list_prefetched_modules() -> None:
    def rank_main(_: int) -> list[bool]:
        sharded = _Sharded()
        sharded.first.set_modules_to_forward_prefetch([sharded.second])
        first, second = map(torch_internals.list_prefetched_modules, (sharded.first, sharded.second))
        return [first == {sharded.second}, second == set()]

    assert run_ranks(rank_main, 1) == [[True, True]]


# Tensors and states


def test_copy_tensors() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch_internals.copy_tensors(targets, sources)
    assert [target.tolist() for target in targets] == [[1.0] * 2, [2.0] * 3]


def test_read_tensor_version() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    kept = parameter.detach()
    before = torch_internals.read_tensor_version(kept)
    assert torch_internals.read_tensor_version(kept) == before
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert torch_internals.read_tensor_version(kept) > before


def test_a_state_is_filled_in_by_its_paths() -> None:
    filled: Any = {}
    for path, value in itertools.zip_longest([("a", "b", 0), ("a", "b", 1)], [1, 2]):
        torch_internals.set_element(filled, path, value)
    assert filled == {"a": {"b": [1, 2]}}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoints_index_says_where_values_lie_by_these_types(tmp_path: Path) -> None:
    save({"weight": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert metadata.storage_data is not None
    (where,) = metadata.storage_data.values()
    assert isinstance(where, torch_internals.StorageInfo)
    assert (where.relative_path, where.offset) == ("__0_0.distcp", 0)


def test_list_device_activities() -> None:
    """Of the host's activities here, where there is no GPU: a device's are reported in the same format."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    began = time.time_ns()
    profile.start()
    torch.ones(64) + 1
    profile.stop()
    assert list(torch_internals.list_device_activities(profile)) == []
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]  # it has run
    assert all(began <= event.start_ns() <= time.time_ns() for event in events)
    assert "aten::ones" in {event.name() for event in events}
    assert all(event.duration_ns() >= 0 for event in events)


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_start_kernel_profile() -> None:
    """Here, where there is no GPU, it reports so."""
    with pytest.raises(RuntimeError, match="activities"):
        torch_internals.start_kernel_profile()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running,
        pytest.raises(RuntimeError, match="runs already"),
    ):
        torch_internals.start_kernel_profile()
    assert running.profiler is not None


@pytest.mark.parametrize("ended", [False, True])
def test_call_before_other_profile(ended: bool) -> None:
    """Another one's trace is complete, as ours has ended for it."""
    ours, its = (torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) for _ in range(2))
    ended_at: list[str] = []

    def make_room() -> None:
        ended_at.append("another one begins")
        ours.stop()

    ours.start()
    end = torch_internals.call_before_other_profile(ours, make_room)
    if ended:
        end()
        ours.stop()
    for another in (its, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])):
        another.start()
        torch.ones(64) + 1
        another.stop()
        events = another.profiler.kineto_results.events()  # type: ignore[union-attr]  # it has run
        assert "aten::ones" in {event.name() for event in events}
    assert ended_at == ([] if ended else ["another one begins"])
    assert torch.autograd.profiler.profile._prepare_trace.__module__ == "torch.autograd.profiler", "as it was"

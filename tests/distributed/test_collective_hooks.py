"""What hooks receive of collectives in torch's dispatcher, and that the collectives work as before.

`hooks` takes torch's own hooks where there are any; `dispatcher` works with any torch, and must report the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from pacekeeper.torch_internals import get_default_store
from pacekeeper_rank.collectives import collective_hooks, dispatcher
from pacekeeper_rank.torch_internals import Work
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch

HookCall = tuple[str, bool, list[int], list[int]]
"""Name, whether it is asynchronous, sizes of the tensors that go in, and of those that come out."""


class Listener:
    """Records the calls of one group."""

    def __init__(self, hooks: ModuleType, group: Any) -> None:
        self.calls: list[HookCall] = []
        self.works: list[Work | None] = []
        self.threads: set[int] = set()
        self.entered: list[int] = []
        """Numbers of calls without a work yet."""
        hooks.hook_group(group, self._enter, self._issued)

    def _enter(self, call: Any) -> None:
        self.entered.append(call.op_id)
        self.threads.add(threading.get_ident())
        name = call.name if isinstance(call.name, str) else call.name.name
        sizes = [tensor.numel() for tensor in call.input_tensors], [tensor.numel() for tensor in call.output_tensors]
        assert collective_hooks.identify_collective(call) == collective_hooks.identify_collective(
            SimpleNamespace(name=name)
        )
        self.calls.append((name, call.async_op, *sizes))

    def _issued(self, call: Any) -> None:
        self.entered.remove(call.op_id)
        self.works.append(call.work)


def call_all(rank: int, group: Any) -> None:
    """Every collective once, with results that are right."""
    ones, pairs, all_ = torch.ones(3), torch.ones(6), [torch.zeros(3), torch.zeros(3)]
    mine = torch.full((3,), float(rank))
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [2.0] * 3
    dist.broadcast(ones, 0, group)
    dist.reduce(torch.ones(3), 0, group=group)
    dist.barrier(group)
    dist.all_gather(all_, mine, group)
    assert [tensor.tolist() for tensor in all_] == [[0.0] * 3, [1.0] * 3]
    dist.all_gather_into_tensor(pairs, mine, group)
    assert pairs.tolist() == [0.0] * 3 + [1.0] * 3
    dist.reduce_scatter_tensor(ones, pairs, group=group)
    assert ones.tolist() == [2.0 * rank] * 3
    dist.reduce_scatter(ones, [torch.ones(3), torch.ones(3)], group=group)
    dist.all_to_all_single(pairs, torch.full((6,), float(rank)), group=group)
    assert pairs.tolist() == [0.0] * 3 + [1.0] * 3
    dist.gather(mine, all_ if rank == 0 else None, 0, group)
    dist.scatter(ones, all_ if rank == 0 else None, 0, group)
    assert ones.tolist() == [float(rank)] * 3
    if rank == 0:
        dist.send(mine, 1, group)
        dist.recv(ones, 1, group)
    else:
        dist.recv(ones, None, group)
        dist.send(mine, 0, group)
    assert ones.tolist() == [1.0 - rank] * 3
    group.allreduce_coalesced([torch.ones(3), pairs]).wait()
    group.allgather_coalesced([[mine.clone(), pairs.clone()] for _ in range(2)], [mine, pairs]).wait()
    group.allgather_into_tensor_coalesced([torch.zeros(6)], [mine]).wait()
    group.reduce_scatter_tensor_coalesced([torch.zeros(3)], [pairs]).wait()


def list_expected(rank: int) -> list[HookCall]:
    to_other: HookCall = ("SEND", True, [3], [])
    from_other: HookCall = ("RECV", True, [], [3])
    return [
        ("ALLREDUCE", False, [3], []),
        ("BROADCAST", False, [3], []),
        ("REDUCE", False, [3], []),
        ("BARRIER", False, [], []),
        ("ALLGATHER", False, [3], [3, 3]),
        ("ALLGATHER_BASE", False, [3], [6]),
        ("REDUCE_SCATTER_BASE", False, [6], [3]),
        ("REDUCE_SCATTER", False, [3, 3], [3]),
        ("ALLTOALL_BASE", False, [6], [6]),
        ("GATHER", False, [3], [3, 3] if rank == 0 else []),
        ("SCATTER", False, [3, 3] if rank == 0 else [], [3]),
        *([to_other, from_other] if rank == 0 else [from_other, to_other]),
        ("ALLREDUCE_COALESCED", True, [3, 6], []),
        ("ALLGATHER_COALESCED", True, [3, 6], [3, 6, 3, 6]),
        ("ALLGATHER_INTO_TENSOR_COALESCED", True, [3], [6]),
        ("REDUCE_SCATTER_TENSOR_COALESCED", True, [6], [3]),
    ]


@pytest.mark.parametrize("hooks", [collective_hooks, dispatcher])
def test_each_collective_is_reported_once_with_its_tensors(hooks: ModuleType) -> None:
    def rank_main(rank: int) -> list[HookCall]:
        dist.init_process_group("gloo")
        group: Any = dist.group.WORLD
        listener = Listener(hooks, group)
        call_all(rank, group)
        assert not listener.entered
        assert len(listener.works) == len(listener.calls)
        assert listener.threads == {threading.get_ident()}
        hooks.unhook_group(group)
        hooks.unhook_group(group)
        dist.barrier()
        assert len(listener.works) == len(listener.calls)
        return listener.calls

    calls = run_ranks(rank_main, 2)
    assert calls == [list_expected(0), list_expected(1)]


def test_hooks_receive_the_callers_work() -> None:
    def rank_main(_: int) -> bool:
        dist.init_process_group("gloo")
        listener = Listener(dispatcher, dist.group.WORLD)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        future = work.get_future()
        work.wait()
        return work is listener.works[0] and bool(future.value()[0].tolist() == [2.0] * 3)

    assert run_ranks(rank_main, 2) == [True, True]


def test_only_hooked_groups_are_reported() -> None:
    def rank_main(rank: int) -> tuple[int, ...]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        world, columns = Listener(dispatcher, dist.group.WORLD), Listener(dispatcher, mesh.get_group("columns"))
        single: Any = dist.new_group([rank], use_local_synchronization=True)
        total = torch.ones(1)
        for group in (mesh.get_group("rows"), mesh.get_group("columns"), single):
            dist.all_reduce(total, group=group)
        dist.all_reduce(total)
        return len(world.calls), len(columns.calls), int(total)

    assert run_ranks(rank_main, 4) == [(1, 1, 16)] * 4


def test_callers_in_c_and_compiled_callers_are_reported() -> None:
    def rank_main(_: int) -> list[str]:
        dist.init_process_group("gloo")
        group: Any = dist.group.WORLD
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        listener = Listener(dispatcher, group)
        model(torch.ones(2, 4)).sum().backward()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def summed(x: Tensor) -> Tensor:
            total: Tensor = functional.all_reduce(x * 2, "sum", group)
            return total

        assert summed(torch.ones(3)).tolist() == [4.0] * 3
        return [name for name, *_ in listener.calls]

    assert run_ranks(rank_main, 2) == [["ALLREDUCE", "ALLREDUCE"]] * 2


@pytest.mark.parametrize("hooks", [collective_hooks, dispatcher])
def test_calls_on_fake_tensors_are_not_reported(hooks: ModuleType) -> None:
    def rank_main(_: int) -> list[HookCall]:
        dist.init_process_group("gloo")
        listener = Listener(hooks, dist.group.WORLD)
        with suppress(RuntimeError), FakeTensorMode():  # not every torch has an answer
            dist.all_reduce(torch.ones(3))
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(3, device="meta"))
        return listener.calls

    assert run_ranks(rank_main, 1) == [[]]


def test_objects_coalesced_collectives_and_monitored_barriers_work() -> None:
    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        Listener(dispatcher, dist.group.WORLD)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": 0}, {"rank": 1}]
        result = ["word" if rank == 0 else None]
        dist.broadcast_object_list(result, 0)
        assert result == ["word"]
        dist.monitored_barrier()
        sent, received = torch.full((2,), float(rank)), torch.zeros(2)
        exchanges = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(exchanges):
            work.wait()
        return received.tolist() == [1.0 - rank] * 2

    assert run_ranks(rank_main, 2) == [True, True]


def _wrong_type() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.PRODUCT)


def _wrong_shape() -> None:
    dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))


@pytest.mark.parametrize("call", [_wrong_type, _wrong_shape])
def test_errors_of_the_backend_reach_the_caller(call: Callable[[], None]) -> None:
    def error() -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return "none"

    def rank_main(_: int) -> tuple[str, str]:
        dist.init_process_group("gloo")
        plain = error()
        Listener(dispatcher, dist.group.WORLD)
        return plain, error()

    for plain, listened in run_ranks(rank_main, 2):
        assert plain == listened != "none"


def test_a_timeout_of_the_caller_is_kept() -> None:
    def rank_main(rank: int) -> str:
        dist.init_process_group("gloo")
        Listener(dispatcher, dist.group.WORLD)
        store = get_default_store()
        if rank == 1:
            store.wait(["timed out"], timedelta(seconds=120))
            store.set("calls", "")
            return "never came"
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        try:
            work.wait(timedelta(seconds=0.1))
        except RuntimeError as error:
            return str(error)
        finally:
            store.set("timed out", "")
            store.wait(["calls"], timedelta(seconds=120))  # the store is in this process
        return "waited"

    result, _ = run_ranks(rank_main, 2)
    assert result == "Operation timed out!"

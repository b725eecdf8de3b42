"""Where torch waits for peers without a `Work.wait` that Python sees: contracts with its private parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pacekeeper import torch_internals
from tests.support.ranks import run_ranks

LAYERS = 3


def test_fsdp_s_waits_for_its_streams_are_bracketed() -> None:
    """On a CPU, whose streams do nothing, but are asked to wait as a GPU's are."""

    def rank_main(_: int) -> tuple[int, int, int, int]:
        brackets = 0

        @contextmanager
        def bracket() -> Iterator[None]:
            nonlocal brackets
            brackets += 1
            yield

        def record_event(_: Any) -> torch.cpu.Event:
            return torch.cpu.Event()

        torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign,assignment]  # a GPU's gives one
        torch_internals.bracket_fsdp_waits(bracket, torch.cpu)
        dist.init_process_group("gloo")
        model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
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


def test_a_broadcast_of_buffers_is_bracketed() -> None:
    def rank_main(_: int) -> list[int]:
        brackets = 0

        @contextmanager
        def bracket() -> Iterator[None]:
            nonlocal brackets
            brackets += 1
            yield

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        torch_internals.bracket_coalesced_broadcasts(bracket)
        counts = []
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            counts.append(brackets)
        torch_internals.broadcast_buffers(model, 1 << 20)
        return [*counts, brackets]

    for counts in run_ranks(rank_main, 2):
        assert counts == [1, 2, 3]

"""Gradients of replicas and shards: of the whole batch in Sync, of the replica's own samples in local modes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pacekeeper.replication import parallel
from testing.training.local_sgd import draw_samples, init_process_group, loss_sum, make_mesh, make_net
from testing.training.ranks import run_ranks

SHARES = [(6, 6, 6, 6), (9, 7, 5, 3), (2, 2, 14, 6)]
BATCH = 24


def compute_reference_gradient(indices: list[int], weight: float) -> list[Tensor]:
    net = make_net()
    x, y = draw_samples(1, 0, 0, BATCH)
    (loss_sum(net, x[indices], y[indices]) / weight).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def collect_gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    assert all(gradient is not None for gradient in found), "optimizers skip what has no gradient, silently"
    return [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in found if g is not None]


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_two_replicas_of_two_shards(shares: tuple[int, ...]) -> None:
    """In Sync, in local modes, in Sync again; each rank adds up two microbatches of uneven size."""

    def rank_main(rank: int) -> list[list[Tensor]]:
        init_process_group()
        net = make_net()
        parallel.shard_model(net, make_mesh(2, 2), net.blocks, {})
        x, y = draw_samples(1, 0, 0, BATCH)
        mine = range(sum(shares[:rank]), sum(shares[: rank + 1]))
        found = []
        for local in (False, True, False):
            weight = BATCH if not local else sum(shares[:2] if rank < 2 else shares[2:])
            parts = [list(mine)[part::2] for part in range(2)]
            for number, part in enumerate(parts):
                parallel.synchronize_gradients(net, number == 1, local)
                (loss_sum(net, x[part], y[part]) / weight).backward()
            found.append(collect_gradients(net))
            net.zero_grad()
        return found

    results = run_ranks(rank_main, 4)
    whole = compute_reference_gradient(list(range(BATCH)), BATCH)
    middle = sum(shares[:2])
    own = [
        compute_reference_gradient(list(range(middle)), middle),
        compute_reference_gradient(list(range(middle, BATCH)), BATCH - middle),
    ]
    for rank, found in enumerate(results):
        for its, expected in zip(found, (whole, own[rank // 2], whole), strict=True):
            for one, other in zip(its, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_small_buckets_sum_the_same_one_after_the_other() -> None:
    def rank_main(rank: int) -> list[tuple[int, list[Tensor]]]:
        init_process_group()
        found = []
        for bucket_cap_mb in (None, 1e-5):
            model = parallel.replicate_model(make_net(), {"bucket_cap_mb": bucket_cap_mb})
            x, y = draw_samples(1, rank, 0)
            with patch.object(parallel, "_sum_bucket", side_effect=parallel._sum_bucket) as summed:
                (loss_sum(model, x, y) / 16).backward()
            found.append((summed.call_count, collect_gradients(model)))
        return found

    for (in_one, whole), (one_by_one, parts) in run_ranks(rank_main, 2):
        assert (in_one, one_by_one) == (1, len(parts))
        torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.norm = nn.BatchNorm1d(2, affine=False).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.net(x))
        return out


def test_whole_replicas_neither_exchange_gradients_nor_buffers_in_local_modes() -> None:
    """One rank trains on while the other waits for it: nothing in its steps is collective."""

    def rank_main(rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        init_process_group()
        model = parallel.replicate_model(Normed(), {})
        x, y = draw_samples(1, rank, 0)

        def step(local: bool) -> list[Tensor]:
            model.zero_grad()
            parallel.synchronize_gradients(model, True, local)
            (loss_sum(model, x, y) / 16).backward()
            return collect_gradients(model)

        step(local=False)
        if rank == 1:
            dist.barrier()
        own = step(local=True)
        buffer = model.module.norm.running_mean.clone()
        if rank == 0:
            dist.barrier()
        return own, step(local=False), buffer

    results = run_ranks(rank_main, 2)
    assert not torch.equal(results[0][2], results[1][2])
    for one, other, summed in zip(results[0][0], results[1][0], results[0][1], strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one + other, summed, rtol=1e-10, atol=1e-12)

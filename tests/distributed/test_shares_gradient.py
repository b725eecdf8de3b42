"""The gradient of unequal shares is the whole batch's, as one process computes it, to 1e-10 in float64.

In mixed precision it is as near to it as bfloat16 allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pacekeeper as pk
from pacekeeper.runtime import Runtime, write_json
from pacekeeper_analysis.plan import Role, WorkerPlan
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch

RANKS = 4
BATCH = 24
IGNORED = -100

Sample = tuple[int, Tensor, Tensor]
SHARES = [None, (6, 6, 6, 6), (9, 7, 5, 3), (15, 3, 3, 3), (4, 8, 8, 4)]
Shares = tuple[int, ...] | None


class Tokens(torch.utils.data.Dataset[Sample]):
    """Sequences of 5 tokens with very different numbers of valid targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(100, 5, 8, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 6, (100, 5), generator=generator)
        self.y[torch.rand(100, 5, generator=generator) < torch.rand(100, 1, generator=generator)] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Sample:
        return index, self.x[index], self.y[index]


def valid_tokens(batch: Any) -> Tensor:
    valid: Tensor = (batch[2] != IGNORED).sum()
    return valid


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).double()


def loss_sum(model: nn.Module, x: Tensor, y: Tensor, by_tokens: bool) -> Tensor:
    """Over valid tokens; per sample, where samples count, the mean over the sequence."""
    losses = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses if by_tokens else losses / y.shape[1]


def reference(indices: list[int], by_tokens: bool) -> list[Tensor]:
    """The gradient of the same samples in one process, one batch."""
    data, model = Tokens(), make_model()
    x, y = data.x[indices], data.y[indices]
    weight = (y != IGNORED).sum() if by_tokens else len(indices)
    (loss_sum(model, x, y, by_tokens) / weight).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def one_step(
    shares: Shares,
    by_tokens: bool,
    sharded: bool,
    runtime: Path,
    max_microbatch: int = 5,
    bfloat16: bool = False,
    **options: Any,
) -> Callable[[int], Any]:
    def rank_main(rank: int) -> tuple[list[int], list[Tensor], float]:
        plan = WorkerPlan(version=1, role=Role.MEMBER, shares=shares)
        if rank == 0:
            write_json(Runtime(runtime).plan, plan.to_json())
        job = pk.init(mesh={"shard": -1} if sharded else None)
        model = make_model().float() if bfloat16 else make_model()
        model = job.fully_shard(model) if sharded else job.replicate(model)
        loader = job.dataloader(Tokens(), BATCH, max_microbatch, weight=valid_tokens if by_tokens else None, **options)
        for step in job.steps(loader, until=1):
            seen: list[int] = []
            for indices, x, y in step.microbatches():
                assert len(indices) <= max_microbatch
                x = x.float() if bfloat16 else x
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    loss = loss_sum(model, x, y, by_tokens)
                (loss / step.total_weight).backward()
                seen += indices.tolist()
            gradients = [whole(parameter.grad) for parameter in model.parameters()]
        return seen, gradients, step.total_weight

    return rank_main


def check_exact(results: list[Any], shares: Shares, by_tokens: bool) -> None:
    indices = [index for seen, _, _ in results for index in seen]
    assert [len(seen) for seen, _, _ in results] == list(shares or (6, 6, 6, 6))
    assert len(set(indices)) == BATCH
    expected = reference(indices, by_tokens)
    for _, gradients, _ in results:
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("by_tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("shares", SHARES, ids=json.dumps)
def test_gradient_equals_that_of_one_process(shares: Shares, by_tokens: bool, sharded: bool, tmp_path: Path) -> None:
    check_exact(run_ranks(one_step(shares, by_tokens, sharded, tmp_path), RANKS, runtime=tmp_path), shares, by_tokens)


@pytest.mark.parametrize(
    ("sharded", "shares", "max_microbatch"),
    [
        (False, (21, 1, 1, 1), 2),  # replicas: 11 microbatches against one
        (False, (1, 1, 1, 21), 24),
        (True, (21, 1, 1, 1), 24),  # shards: each microbatch on all ranks
        (True, (12, 4, 4, 4), 3),
    ],
    ids=str,
)
def test_extreme_shares(sharded: bool, shares: Shares, max_microbatch: int, tmp_path: Path) -> None:
    function = one_step(shares, by_tokens=True, sharded=sharded, runtime=tmp_path, max_microbatch=max_microbatch)
    check_exact(run_ranks(function, RANKS, runtime=tmp_path), shares, by_tokens=True)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_balancing_sequences_changes_who_takes_them_and_not_the_gradient(sharded: bool, tmp_path: Path) -> None:
    shares = (9, 7, 5, 3)
    plain = run_ranks(one_step(shares, True, sharded, tmp_path / "plain"), RANKS, runtime=tmp_path / "plain")
    lengths = (Tokens().y != IGNORED).sum(dim=1).numpy()
    function = one_step(shares, True, sharded, tmp_path / "balanced", lengths=lengths)
    balanced = run_ranks(function, RANKS, runtime=tmp_path / "balanced")
    check_exact(balanced, shares, by_tokens=True)
    plainly, evenly = ([set(seen) for seen, _, _ in results] for results in (plain, balanced))
    assert plainly != evenly
    assert set.union(*plainly) == set.union(*evenly)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("by_tokens", [False, True], ids=["samples", "tokens"])
def test_mixed_precision(by_tokens: bool, sharded: bool, tmp_path: Path) -> None:
    """Under autocast, gradients are off by its rounding: the average of unequal ranks is off by many times of that."""
    shares = (15, 3, 3, 3)
    function = one_step(shares, by_tokens, sharded, tmp_path, bfloat16=True)
    results = run_ranks(function, RANKS, runtime=tmp_path)
    everybody = [reference(seen, by_tokens) for seen, _, _ in results]
    expected = flat(reference([index for seen, _, _ in results for index in seen], by_tokens))
    average = torch.stack([flat(gradients) for gradients in everybody]).mean(dim=0)
    assert error(average, expected) > 0.1
    for _, gradients, _ in results:
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        assert error(flat(gradients), expected) < 0.01


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def error(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())

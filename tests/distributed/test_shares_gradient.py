"""The gradient of unequal shares is the whole batch's, as one process computes it, to 1e-10 in float64.

In mixed precision it is as near to it as bfloat16 allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pacekeeper as pk
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from testing.training.ranks import run_ranks

RANKS = 4
BATCH, SIZE = 24, 100
IGNORED = -100

Sample = tuple[int, Tensor, Tensor]
SHARES = [None, (6, 6, 6, 6), (9, 7, 5, 3), (15, 3, 3, 3), (4, 8, 8, 4)]
Shares = tuple[int, ...] | None


class Tokens(torch.utils.data.Dataset[Sample]):
    """Sequences of 5 tokens with very different numbers of valid targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SIZE, 5, 8, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 6, (SIZE, 5), generator=generator)
        self.y[torch.rand(SIZE, 5, generator=generator) < torch.rand(SIZE, 1, generator=generator)] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Sample:
        return index, self.x[index], self.y[index]


def count_valid_tokens(batch: Any) -> Tensor:
    valid: Tensor = (batch[2] != IGNORED).sum()
    return valid


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).double()


def compute_loss_sum(model: nn.Module, x: Tensor, y: Tensor, by_tokens: bool) -> Tensor:
    """Over valid tokens; per sample, where samples count, the mean over the sequence."""
    losses = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses if by_tokens else losses / y.shape[1]


def compute_reference(indices: list[int], by_tokens: bool, parameters: list[Tensor] | None = None) -> list[Tensor]:
    """The gradient of the same samples in one process, one batch. `parameters`: None: the model's first ones."""
    data, model = Tokens(), make_model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters or model.parameters(), strict=True):
            parameter.copy_(value)
    x, y = data.x[indices], data.y[indices]
    weight = (y != IGNORED).sum() if by_tokens else len(indices)
    (compute_loss_sum(model, x, y, by_tokens) / weight).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def get_full_tensor(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def train_one_step(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    shares: Shares,
    by_tokens: bool,
    sharded: bool,
    runtime: Path,
    max_microbatch: int = 5,
    bfloat16: bool = False,
    itself: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Callable[[int], Any]:
    """`itself`: the script divides the loss and goes backward itself. `scale`: of a GradScaler."""

    def rank_main(rank: int) -> tuple[list[int], list[Tensor], float]:
        plan = WorkerPlan(version=1, role=WorkerRole.MEMBER, shares=shares)
        if rank == 0:
            write_json(RuntimeFolder(runtime).plan, plan.to_json())
        job = pk.init(mesh={"shard": -1} if sharded else None)
        model = make_model().float() if bfloat16 else make_model()
        model = job.fully_shard(model) if sharded else job.replicate(model)
        loader = job.dataloader(
            Tokens(), BATCH, max_microbatch, weight=count_valid_tokens if by_tokens else None, **options
        )
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        for step in job.steps(loader, until=1):
            seen: list[int] = []
            for indices, x, y in step.microbatches():
                assert len(indices) <= max_microbatch
                x = x.float() if bfloat16 else x
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    loss = compute_loss_sum(model, x, y, by_tokens)
                if itself:
                    (loss / step.total_weight).backward()
                else:
                    step.backward(loss, scaler)
                seen += indices.tolist()
            if scaler is not None:
                scaler.unscale_(torch.optim.SGD(model.parameters()))
            gradients = [get_full_tensor(parameter.grad) for parameter in model.parameters()]
        return seen, gradients, step.total_weight

    return rank_main


def check_exact(results: list[Any], shares: Shares, by_tokens: bool, step: int = 1) -> None:
    indices = [index for seen, _, _ in results for index in seen]
    assert [len(seen) for seen, _, _ in results] == list(shares or (6, 6, 6, 6))
    an_epoch_ends = (step - 1) * BATCH // SIZE < step * BATCH // SIZE
    assert an_epoch_ends or len(set(indices)) == BATCH
    expected = compute_reference(indices, by_tokens)
    for _, gradients, _ in results:
        for gradient, expected_gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.oldest_torch
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("by_tokens", [False, True], ids=["samples", "tokens"])
def test_gradient_equals_that_of_one_process(by_tokens: bool, sharded: bool, tmp_path: Path) -> None:
    """In each step of a job whose shares change live, from one of `SHARES` to the next."""

    def rank_main(rank: int) -> list[tuple[list[int], list[Tensor], float]]:
        def publish(version: int) -> None:
            if rank == 0:
                plan = WorkerPlan(version=version, role=WorkerRole.MEMBER, shares=SHARES[version - 1])
                write_json(RuntimeFolder(tmp_path).plan, plan.to_json())

        publish(1)
        job = pk.init(mesh={"shard": -1} if sharded else None)
        model = job.fully_shard(make_model()) if sharded else job.replicate(make_model())
        loader = job.dataloader(Tokens(), BATCH, max_microbatch=5, weight=count_valid_tokens if by_tokens else None)
        found = []
        for step in job.steps(loader, until=2 * len(SHARES)):
            seen: list[int] = []
            for indices, x, y in step.microbatches():
                step.backward(compute_loss_sum(model, x, y, by_tokens))
                seen += indices.tolist()
            found.append(
                (seen, [get_full_tensor(parameter.grad).clone() for parameter in model.parameters()], step.total_weight)
            )
            model.zero_grad()
            if step.number % 2 and step.number < 2 * len(SHARES) - 1:
                publish(2 + step.number // 2)  # read when the next step begins, in force in the one after it
        return found

    results = run_ranks(rank_main, RANKS, runtime=tmp_path)
    for number, of_ranks in enumerate(zip(*results, strict=True)):
        check_exact(list(of_ranks), SHARES[number // 2], by_tokens, 1 + number)


@pytest.mark.oldest_torch
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
    function = train_one_step(shares, by_tokens=True, sharded=sharded, runtime=tmp_path, max_microbatch=max_microbatch)
    check_exact(run_ranks(function, RANKS, runtime=tmp_path), shares, by_tokens=True)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_a_script_may_divide_and_go_backward_itself(sharded: bool, tmp_path: Path) -> None:
    function = train_one_step(SHARES[2], True, sharded, tmp_path, itself=True)
    check_exact(run_ranks(function, RANKS, runtime=tmp_path), SHARES[2], by_tokens=True)


def test_a_gradient_that_is_scaled_is_the_same_unscaled(tmp_path: Path) -> None:
    function = train_one_step(SHARES[2], True, False, tmp_path, scale=1024.0)
    check_exact(run_ranks(function, RANKS, runtime=tmp_path), SHARES[2], by_tokens=True)


@pytest.mark.oldest_torch
def test_a_filler_microbatch_has_no_weight(tmp_path: Path) -> None:
    """Replica 0 leases 8 samples a step, replica 1 its 7 once: of the 120 leases, one is left for the last step of
    replica 0, and its rank 1 runs a sample that rank 0 trains on."""
    first_is_done, second_has_its_own = tmp_path / "first is done", tmp_path / "second has its own"

    def wait_for(path: Path) -> None:
        deadline = time.monotonic() + 120
        while not path.exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.01)

    def rank_main(rank: int) -> tuple[int, bool, float]:
        plan = WorkerPlan(version=1, role=WorkerRole.MEMBER, sync_mode=SyncMode.ASYNC_EDIT, sync_seconds=60.0)
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, plan.to_json())
        job = pk.init(mesh={"sync": 2, "shard": 2})
        model = job.fully_shard(make_model())
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), warmup_steps=0)
        loader = job.dataloader(Tokens(), 15, max_microbatch=5)
        found = -1, False, 0.0
        for step in job.steps(loader, until=9):
            before = [get_full_tensor(parameter.detach()).clone() for parameter in model.parameters()]
            indices = []
            for index, x, y in step.microbatches():
                step.backward(compute_loss_sum(model, x, y, by_tokens=False))
                indices += index.tolist()
            if step.samples < 3:
                (only,) = indices  # the same on both ranks
                expected = compute_reference([only], by_tokens=False, parameters=before)
                off = compute_error(
                    flatten_gradients([get_full_tensor(parameter.grad) for parameter in model.parameters()]),
                    flatten_gradients(expected),
                )
                found = step.samples, step.loss_sum is not None, off
                first_is_done.touch()
            optimizer.step()
            optimizer.zero_grad()
            if rank >= 2:
                second_has_its_own.touch()
            wait_for(second_has_its_own if rank < 2 else first_is_done)
        return found

    (samples, reported, off), (none, reported_by_other, off_on_other), *_ = run_ranks(rank_main, 4, runtime=tmp_path)
    assert (samples, none) == (1, 0)
    assert (reported, reported_by_other) == (True, False)
    assert max(off, off_on_other) < 1e-10


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> list[set[int]]:
    """Which samples each rank takes where sequences are not balanced; how the model is kept changes nothing of it."""
    folder = tmp_path_factory.mktemp("plain")
    results = run_ranks(train_one_step(SHARES[2], True, False, folder), RANKS, runtime=folder)
    return [set(seen) for seen, _, _ in results]


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_balancing_sequences_does_not_change_the_gradient(
    sharded: bool, plainly: list[set[int]], tmp_path: Path
) -> None:
    lengths = (Tokens().y != IGNORED).sum(dim=1).numpy()
    function = train_one_step(SHARES[2], True, sharded, tmp_path, lengths=lengths)
    balanced = run_ranks(function, RANKS, runtime=tmp_path)
    check_exact(balanced, SHARES[2], by_tokens=True)
    evenly = [set(seen) for seen, _, _ in balanced]
    assert plainly != evenly
    assert set.union(*plainly) == set.union(*evenly)


@pytest.mark.oldest_torch
@pytest.mark.parametrize(
    ("by_tokens", "sharded"), [(False, False), (True, True)], ids=["samples, DDP", "tokens, FSDP2"]
)
def test_mixed_precision(by_tokens: bool, sharded: bool, tmp_path: Path) -> None:
    """Under autocast, gradients are off by its rounding: the average of unequal ranks is off by many times of that."""
    shares = (15, 3, 3, 3)
    function = train_one_step(shares, by_tokens, sharded, tmp_path, bfloat16=True)
    results = run_ranks(function, RANKS, runtime=tmp_path)
    references = [compute_reference(seen, by_tokens) for seen, _, _ in results]
    expected = flatten_gradients(compute_reference([index for seen, _, _ in results for index in seen], by_tokens))
    average = torch.stack([flatten_gradients(gradients) for gradients in references]).mean(dim=0)
    assert compute_error(average, expected) > 0.1
    for _, gradients, _ in results:
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        assert compute_error(flatten_gradients(gradients), expected) < 0.01


def flatten_gradients(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def compute_error(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient - expected).norm() / expected.norm())

"""Local-SGD is exact to the last bit, or to 1e-10 in float64 where sums come in another order."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pacekeeper.replication.local_sgd import OuterSGD
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty
from testing.training.local_sgd import (
    ReplicaRun,
    ReplicaTraining,
    compute_digest,
    create_sgd,
    draw_samples,
    gather_parameters,
    init_process_group,
    loss_sum,
    make_mesh,
    make_net,
)
from testing.training.ranks import run_ranks

pytestmark = pytest.mark.oldest_torch

PLAIN = OuterSGD(lr=1.0, momentum=0.0, penalty=Penalty(enabled=False))
MESHES = [(4, 1), (2, 2)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("replicas", "shards"), MESHES, ids=str)
@pytest.mark.parametrize("batches", [(8,), (12, 4)], ids=["even", "uneven"])
def test_one_step_per_synchronization_is_synchronous_sgd(replicas: int, shards: int, batches: tuple[int, ...]) -> None:
    """Uneven: replicas are weighed by their samples."""
    count, run = 5, ReplicaRun(PLAIN, create_sgd, steps=(1,), batches=batches)

    def rank_main(_rank: int) -> tuple[list[Tensor], list[str], list[str]]:
        init_process_group()
        training = ReplicaTraining(make_mesh(replicas, shards), run)
        for _ in training.run_steps_and_syncs(count):
            pass
        return gather_parameters(training.net), training.own, training.common

    net = make_net()
    optimizer = create_sgd(net)
    for step in range(count):
        parts = [draw_samples(run.seed, replica, step, batches[replica % len(batches)]) for replica in range(replicas)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        (loss_sum(net, x, y) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters, own, common in run_ranks(rank_main, 4):
        assert_close(parameters, list(net.parameters()))
        assert own != common, "replicas trained by themselves in between"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replicas_are_bit_equal_after_each_synchronization(dtype: torch.dtype) -> None:
    """With unequal numbers of steps, momentum and penalty; and so are sums that the backend cuts into chunks."""
    run = ReplicaRun(dtype=dtype, steps=(4, 3, 1, 2))

    def rank_main(rank: int) -> tuple[list[str], list[str]]:
        init_process_group()
        training = ReplicaTraining(make_mesh(4, 1), run)
        for _ in training.run_steps_and_syncs(6):
            assert training.replicas.is_pending
        large = torch.randn(300_001, generator=torch.Generator().manual_seed(rank)).to(dtype)
        dist.all_reduce(large)
        training.common.append(compute_digest([large]))
        return training.own, training.common

    results = run_ranks(rank_main, 4)
    for number in range(6):
        assert len({own[number] for own, _ in results}) == 4
    assert len(set(results[0][1])) == 7
    assert all(common == results[0][1] for _, common in results)


def test_sharded_equals_unsharded() -> None:
    """With everything on, and φ so small that each mean is clipped."""
    run = ReplicaRun(OuterSGD(penalty=Penalty(warmup=2, clip=0.01)), steps=(2, 4))

    def rank_main(shards: int) -> Callable[[int], tuple[list[Tensor], Any]]:
        def main(_rank: int) -> tuple[list[Tensor], Any]:
            init_process_group()
            training = ReplicaTraining(make_mesh(2, shards), run)
            found = [synchronization.weights for synchronization in training.run_steps_and_syncs(5)]
            return gather_parameters(training.net), found

        return main

    sharded = run_ranks(rank_main(2), 4)
    parameters, weights = run_ranks(rank_main(1), 2)[0]
    for its_parameters, its_weights in sharded:
        assert_close(its_parameters, parameters)
        np.testing.assert_allclose(its_weights, weights, rtol=1e-10)

    unclipped = replace(run, settings=OuterSGD(penalty=Penalty(warmup=2)))

    def unclipped_main(_rank: int) -> list[Tensor]:
        init_process_group()
        training = ReplicaTraining(make_mesh(2, 1), unclipped)
        for _ in training.run_steps_and_syncs(5):
            pass
        return gather_parameters(training.net)

    moved = run_ranks(unclipped_main, 2)[0]
    assert max(float((one - other).abs().max()) for one, other in zip(moved, parameters, strict=True)) > 1e-3


@pytest.mark.parametrize(("replicas", "shards"), MESHES, ids=str)
def test_equivalent_settings_are_bit_equal(replicas: int, shards: int) -> None:
    """Overlap, activation checkpointing, torch.compile, CPU off-load, an evaluation that leaves parameters gathered."""
    plain = ReplicaRun(OuterSGD(prefetch=0), eager=True, steps=(2,))
    overlapped = replace(plain, settings=OuterSGD(), eager=False)
    runs = {
        "eager": plain,
        "eager, many at once": replace(plain, settings=OuterSGD(prefetch=9)),
        "no overlap": replace(plain, eager=False),
        "overlap of one": replace(overlapped, settings=OuterSGD(prefetch=1)),
        "overlap of all": replace(overlapped, settings=OuterSGD(prefetch=9)),
        "activation checkpointing": replace(overlapped, checkpointing=True),
        "compiled": replace(overlapped, compiled="whole"),
        "compiled, block by block": replace(overlapped, compiled="blocks"),
        "off-load": replace(overlapped, settings=OuterSGD(offload=True)),
        "evaluation": replace(overlapped, evaluate=True),
    }

    def rank_main(_rank: int) -> dict[str, list[str]]:
        init_process_group()
        mesh = make_mesh(replicas, shards)
        digests = {}
        for name, run in runs.items():
            training = ReplicaTraining(mesh, run)
            for synchronization in training.run_steps_and_syncs(3):
                overlaps = not (run.eager or (run.compiled == "whole" and shards == 1))  # FSDP2 breaks the graph
                assert training.replicas.is_pending is overlaps, name
                assert (synchronization.ended_ns is None) is overlaps, name
            digests[name] = training.common
        return digests

    for digests in run_ranks(rank_main, 4):
        assert len(set(digests["eager"])) == 3
        assert all(found == digests["eager"] for found in digests.values()), digests


@pytest.mark.parametrize(("replicas", "shards"), MESHES, ids=str)
def test_a_unit_whose_forward_pass_never_comes_is_complete_before_the_step(replicas: int, shards: int) -> None:
    def rank_main(_rank: int) -> tuple[list[str], list[str]]:
        init_process_group()
        mesh = make_mesh(replicas, shards)
        found = []
        for eager in (True, False):
            training = ReplicaTraining(mesh, ReplicaRun(eager=eager, skipped=2))
            for _ in training.run_steps_and_syncs(3):
                pass
            found.append(training.common)
        return found[0], found[1]

    for eager, pending in run_ranks(rank_main, 4):
        assert eager == pending


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    """Model, both optimizers and what the penalty has learnt are all that there is."""

    def rank_main(_rank: int) -> tuple[list[str], list[str]]:
        init_process_group()
        mesh = make_mesh(2, 1)
        through = ReplicaTraining(mesh, ReplicaRun())
        for _ in through.run_steps_and_syncs(3):
            pass
        resumed = ReplicaTraining(mesh, ReplicaRun())
        resumed.net.load_state_dict(through.net.state_dict())
        resumed.optimizer.load_state_dict(deepcopy(through.optimizer.state_dict()))
        resumed.replicas.outer.load_state_dict(through.replicas.outer.state_dict())
        resumed.replicas.load_state_dict(through.replicas.state_dict())
        resumed.replicas.start()
        resumed.done = through.done
        for training in (through, resumed):
            for _ in training.run_steps_and_syncs(3):
                pass
        assert compute_digest(through.net.parameters()) == compute_digest(resumed.net.parameters())
        assert resumed.replicas.last is not None
        assert resumed.replicas.last.number == 6
        return through.common[3:], resumed.common

    for through, resumed in run_ranks(rank_main, 2):
        assert through == resumed

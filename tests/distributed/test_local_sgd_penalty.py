"""A replica that sends garbage costs the others nothing with the penalty on, and ruins them with it off."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pacekeeper.replication.local_sgd import OuterSGD, Synchronization
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty
from testing.training.local_sgd import ReplicaRun, ReplicaTraining, compute_digest, init_process_group, make_mesh
from testing.training.ranks import run_ranks

REPLICAS = 4
BAD = 2
"""The replica that sends garbage, before these synchronizations."""
WHEN = (2, 9, 10, 16)
COUNT = 20
PENALTY = Penalty(warmup=5)
OFF = OuterSGD(penalty=replace(PENALTY, enabled=False))
GOOD = ReplicaRun(OuterSGD(penalty=PENALTY), steps=(4,))


def compute_garbage_factor(factor: float, replica: int, number: int) -> float:
    return factor if replica == BAD and number in WHEN else 1.0


NAN = replace(GOOD, poison=lambda *of: compute_garbage_factor(math.nan, *of))
HUGE = replace(GOOD, corrupt_input=lambda *of: compute_garbage_factor(1000.0, *of))


def train_replica(
    mesh: torch.distributed.device_mesh.DeviceMesh, run: ReplicaRun
) -> tuple[list[float], list[Synchronization]]:
    """Held-out loss of the common parameters after each synchronization, and what it was like."""
    training = ReplicaTraining(mesh, run)
    curve, seen = [], []
    for synchronization in training.run_steps_and_syncs(COUNT):
        training.replicas.finish()
        curve.append(training.compute_held_out_loss())
        seen.append(synchronization)
    return curve, seen


def test_the_penalty_keeps_garbage_within_noise() -> None:
    runs = {f"seed {seed}": replace(GOOD, seed=seed) for seed in range(1, 6)}
    runs |= {"NaN": NAN, "x1000": HUGE}
    runs |= {"NaN, off": replace(NAN, settings=OFF), "x1000, off": replace(HUGE, settings=OFF)}

    def rank_main(_rank: int) -> dict[str, tuple[list[float], list[Synchronization]]]:
        init_process_group()
        mesh = make_mesh(REPLICAS, 1)
        return {name: train_replica(mesh, run) for name, run in runs.items()}

    found = run_ranks(rank_main, REPLICAS)[0]
    clean = np.array([found[f"seed {seed}"][0] for seed in range(1, 6)])
    assert clean[0, -1] < 0.5 * clean[0, 0], "the clean run learns"
    spread = clean.max(axis=0) - clean.min(axis=0)
    for name in ("NaN", "x1000"):
        curve, seen = found[name]
        assert (np.abs(np.array(curve) - clean[0]) <= spread).all(), (name, curve, clean, spread)
        for synchronization in seen:
            bad = synchronization.number in WHEN
            assert bool(synchronization.replica_weights[BAD] < 1e-9) is bad, (name, synchronization)
            assert synchronization.not_finite == ((BAD,) if bad and name == "NaN" else ())
            assert not synchronization.rolled_back
    assert not math.isfinite(found["NaN, off"][0][-1])
    assert found["x1000, off"][0][-1] > 10 * clean[:, -1].max()


@pytest.mark.parametrize(("replicas", "shards"), [(4, 1), (2, 2)], ids=str)
def test_all_replicas_roll_back_if_none_is_good(replicas: int, shards: int) -> None:
    """To the last common parameters; the outer momentum stays, and the next synchronization is a good one."""
    run = replace(GOOD, poison=lambda _, number: math.nan if number == 3 else 1.0)

    def rank_main(_rank: int) -> None:
        init_process_group()
        training = ReplicaTraining(make_mesh(replicas, shards), run)
        momenta = []
        for synchronization in training.run_steps_and_syncs(5):
            training.replicas.finish()
            momenta.append(compute_digest(state["momentum_buffer"] for state in training.replicas.outer.state.values()))
            bad = synchronization.number == 3
            assert synchronization.rolled_back == (synchronization.units if bad else ())
            assert synchronization.not_finite == (tuple(range(replicas)) if bad else ())
            assert (synchronization.nbytes == 0) is bad
        assert training.common[2] == training.common[1]
        assert momenta[2] == momenta[1]
        assert len({*training.common}) == len({*momenta}) == 4
        assert math.isfinite(training.compute_held_out_loss())

    run_ranks(rank_main, 4)

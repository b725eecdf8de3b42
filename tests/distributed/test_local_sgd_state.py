"""The outer optimizer's state in checkpoints, and the return from replicas to one state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from pacekeeper.replication.local_sgd import ForwardPass, OuterSGD, Replicas, equalize_replicas, reset_moments
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty
from testing.training.local_sgd import (
    ReplicaRun,
    ReplicaTraining,
    draw_samples,
    gather_parameters,
    init_process_group,
    loss_sum,
    make_mesh,
    make_net,
)
from testing.training.ranks import run_ranks

LAYOUTS = {torch.float64: [(1, 4), (2, 1)], torch.bfloat16: [(2, 2)]}
"""(replicas, shards) that read what two replicas of two shards have written; the last one off-loads."""


def collect_outer_momentum(training: ReplicaTraining) -> list[Tensor]:
    """[parameters], gathered."""
    momenta = [training.replicas.outer.state[p]["momentum_buffer"] for p in training.net.parameters()]
    return [m.full_tensor() if isinstance(m, DTensor) else m.clone() for m in momenta]


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_the_outer_state_comes_back_for_any_number_of_replicas_and_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    run = ReplicaRun(dtype=dtype)

    def write(_rank: int) -> tuple[list[Tensor], list[Tensor]]:
        init_process_group()
        training = ReplicaTraining(make_mesh(2, 2), run)
        for _ in training.run_steps_and_syncs(3):
            pass
        net, outer = training.net, training.replicas.outer
        save({"net": get_model_state_dict(net), "outer": get_optimizer_state_dict(net, outer)}, checkpoint_id=tmp_path)
        return gather_parameters(net), collect_outer_momentum(training)

    def read(replicas: int, shards: int, settings: OuterSGD) -> Callable[[int], tuple[list[Tensor], list[Tensor]]]:
        def main(_rank: int) -> tuple[list[Tensor], list[Tensor]]:
            init_process_group()
            training = ReplicaTraining(make_mesh(replicas, shards), replace(run, settings=settings))
            net, outer = training.net, training.replicas.outer
            state: dict[str, Any] = {
                "net": get_model_state_dict(net),
                "outer": get_optimizer_state_dict(net, outer),
            }
            load(state, checkpoint_id=tmp_path)
            set_model_state_dict(net, state["net"])
            set_optimizer_state_dict(net, outer, state["outer"])
            for _ in training.run_steps_and_syncs(0):
                pass
            found = gather_parameters(net), collect_outer_momentum(training)
            training.replicas.start()
            for _ in training.run_steps_and_syncs(1):  # what was loaded is of the kind that it works with
                pass
            return found

        return main

    parameters, momenta = run_ranks(write, 4)[0]
    assert all(float(momentum.abs().max()) > 0 for momentum in momenta)
    assert all(momentum.dtype == torch.promote_types(dtype, torch.float32) for momentum in momenta)
    for replicas, shards in LAYOUTS[dtype]:
        for its_parameters, its_momenta in run_ranks(
            read(replicas, shards, OuterSGD(offload=shards == 2)), replicas * shards
        ):
            for found, expected in zip(its_parameters + its_momenta, parameters + momenta, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("replicas", "shards"), [(4, 1), (2, 2)], ids=str)
def test_equalize_makes_one_state_of_the_replicas(replicas: int, shards: int) -> None:
    """Means of the moments that are finite, the largest step, buffers too; a state that only some have is shared."""

    def rank_main(_rank: int) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
        init_process_group()
        mesh = make_mesh(replicas, shards)
        replica = mesh.get_local_rank("sync")
        training = ReplicaTraining(mesh, ReplicaRun(steps=tuple(range(2, 2 + replicas))))
        late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = training.optimizer
        optimizer.add_param_group({"params": [late]})
        if replica == 1:
            late.grad = torch.full((3,), 2.0, dtype=torch.float64)
        for _ in training.run_steps_and_syncs(1):
            pass
        late.grad = None
        norm = nn.BatchNorm1d(2).double()
        norm(draw_samples(1, replica, 0)[1])
        if replica == 0:
            first = optimizer.state[next(training.net.parameters())]["exp_avg"]
            part = first.to_local() if isinstance(first, DTensor) else first
            part[0] = torch.nan
        before = _copy_state(training, late, norm)
        equalize_replicas(optimizer, [training.net, norm], mesh.get_group("sync"))
        after = _copy_state(training, late, norm)
        return replica, mesh.get_local_rank("shard"), before, after

    results = run_ranks(rank_main, 4)
    for _, shard, _, after in results:
        peers = {replica: before for replica, its_shard, before, _ in results if its_shard == shard}
        for key, found in after.items():
            having = [replica for replica in sorted(peers) if key in peers[replica]]
            assert having == ([1] if key.startswith("late") else sorted(peers))
            values = [peers[replica][key].double() for replica in having]
            if key.endswith("step"):
                expected = torch.stack(values).max()
            elif key == "buffer 2":
                expected = values[0]
            else:
                expected = torch.stack([value for value in values if value.isfinite().all()]).mean(dim=0)
            torch.testing.assert_close(found.double(), expected, rtol=1e-12, atol=1e-15, msg=key)
    assert float(results[-1][3]["0 step"]) == 1 + replicas


def _copy_state(training: ReplicaTraining, late: nn.Parameter, norm: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each moment and buffer."""
    named = {str(index): parameter for index, parameter in enumerate(training.net.parameters())} | {"late": late}
    found = {f"{name} {key}": value for name, p in named.items() for key, value in training.optimizer.state[p].items()}
    found |= {f"buffer {index}": buffer for index, buffer in enumerate(norm.buffers())}
    return {
        key: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in found.items()
    }


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_reset_moments_restarts_the_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    nets = [make_net(), make_net()]
    fresh, reset = (kind(net.parameters(), lr=0.01) for net in nets)  # type: ignore[call-arg]
    before = [parameter.detach().clone() for parameter in nets[1].parameters()]
    (loss_sum(nets[1], *draw_samples(1, 0, 0)) * torch.nan).backward()
    reset.step()
    reset_moments(reset)
    with torch.no_grad():
        for parameter, expected in zip(nets[1].parameters(), before, strict=True):
            parameter.copy_(expected)
    for net, optimizer in zip(nets, (fresh, reset), strict=True):
        optimizer.zero_grad()
        loss_sum(net, *draw_samples(1, 0, 1)).backward()
        optimizer.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_outer_step_is_that_of_torch(nesterov: bool) -> None:
    def rank_main(_rank: int) -> None:
        init_process_group()
        net, reference = make_net(), make_net()
        settings = OuterSGD(lr=0.7, momentum=0.8, nesterov=nesterov, penalty=Penalty(enabled=False))
        replicas = Replicas(ForwardPass(net, net.blocks), make_mesh(1, 1).get_group("sync"), None, settings)
        outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.8, nesterov=nesterov)
        replicas.start()
        for number in range(4):
            with torch.no_grad():
                for parameter, its in zip(net.parameters(), reference.parameters(), strict=True):
                    its.grad = torch.full_like(its, 0.1 * number) + its
                    parameter.sub_(its.grad)
            outer.step()
            replicas.begin(1)
            replicas.finish()
            for parameter, its in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter, its, rtol=1e-12, atol=1e-12)

    run_ranks(rank_main, 1)


def test_wrong_use_is_reported() -> None:
    def rank_main(_rank: int) -> None:
        init_process_group()
        group = make_mesh(1, 1).get_group("sync")
        net = make_net()
        with pytest.raises(InputError, match="units: Linear is not a part"):
            ForwardPass(net, [nn.Linear(2, 2)])
        with pytest.raises(InputError, match="no parameter needs a gradient"):
            Replicas(ForwardPass(make_net().requires_grad_(False), []), group, None, OuterSGD())
        replicas = Replicas(ForwardPass(net, net.blocks), group, None, OuterSGD())
        with pytest.raises(RuntimeError, match="start"):
            replicas.begin(1)
        assert replicas.finish() is None
        replicas.start()
        net(torch.ones(1, 4).double())
        replicas.begin(1)
        for call in (replicas.start, replicas.stop):
            with pytest.raises(RuntimeError, match="finish"):
                call()
        first = replicas.last
        net(torch.ones(1, 4).double())
        second = replicas.begin(1)
        assert first is not None
        assert first.ended_ns is not None
        assert second.ended_ns is None
        last = replicas.finish()
        assert last is not None
        assert replicas.finish() is last
        assert last.ended_ns is not None
        assert last.ended_ns >= last.started_ns + last.waited_ns > last.started_ns
        replicas.stop()
        assert not replicas.is_running
        with pytest.raises(RuntimeError, match="start"):
            replicas.begin(1)
        with pytest.raises(RuntimeError, match="the outer optimizer steps"):
            replicas.outer.step()

    run_ranks(rank_main, 1)


def test_replicas_must_have_done_as_many_steps_unless_asynchronous() -> None:
    def rank_main(rank: int) -> None:
        init_process_group()
        net = make_net()
        replicas = Replicas(ForwardPass(net, net.blocks), make_mesh(2, 1).get_group("sync"), None, OuterSGD())
        replicas.start()
        with pytest.raises(RuntimeError, match=r"\[1.0, 2.0\] steps"):
            replicas.begin(1 + rank)

    run_ranks(rank_main, 2)


def test_settings_that_make_no_sense_are_named() -> None:
    for name, value in {"lr": 0.0, "momentum": 1.0, "prefetch": -1}.items():
        with pytest.raises(InputError, match=name):
            OuterSGD(**{name: value})  # type: ignore[arg-type]

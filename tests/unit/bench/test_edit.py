"""`bench edit`: the replicas' rules against those of torch, which data is garbled when, and its goals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import edit
from bench.scripts.edit import drawing, training
from bench.scripts.edit.training import SYNC_EVERY, ReplicaSet, Run
from bench.scripts.stragglers.workload import GPT, make_optimizer
from pacekeeper.replication.local_sgd import OuterSGD
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty

RUN = Run(replicas=4, steps=400, warmup=16, learning_rate=1e-3, seed=3, clean_periods=5, dirty=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as in the bench: more are slower with a model of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def move_replica(replica_set: ReplicaSet, scale: float, replica: int, seed: int) -> None:
    """Change the replica's parameters as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in replica_set._models[replica].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


def build_replicas(settings: OuterSGD, replicas: int = 3) -> tuple[GPT, ReplicaSet]:
    torch.manual_seed(1)
    model = GPT()
    return model, ReplicaSet(model, make_optimizer(model, 1e-3), settings, replicas)


def test_diloco_is_torchs_sgd_with_nesterov_momentum_on_the_plain_mean() -> None:
    """torchft's DiLoCo does the same with its outer optimizer."""
    settings = edit.SIDES["diloco"]
    assert settings is not None
    model, replica_set = build_replicas(settings)
    theirs = copy.deepcopy(model)
    outer = torch.optim.SGD(theirs.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        for replica in range(3):
            move_replica(replica_set, 0.01, replica, 10 * number + replica)
        replicas = [list(its.parameters()) for its in replica_set._models]
        for index, parameter in enumerate(theirs.parameters()):
            parameter.grad = torch.stack([parameter.detach() - its[index].detach() for its in replicas]).mean(dim=0)
        outer.step()
        replica_set.synchronize()
        for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for its in replica_set._models:
        for one, other in zip(its.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_replica_gone_bad_does_not_move_the_common_model() -> None:
    model, replica_set = build_replicas(OuterSGD(lr=1.0, momentum=0.0, penalty=Penalty()))
    with torch.no_grad():
        for replica in (1, 2):
            next(iter(replica_set._models[replica].parameters())).fill_(torch.nan)
    move_replica(replica_set, 0.001, 0, 1)
    expected = [its.detach().clone() for its in replica_set._models[0].parameters()]
    replica_set.synchronize()
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), other)


def test_a_mean_above_the_clip_is_scaled_down_to_it() -> None:
    mean = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(training.clip_mean(mean, Penalty(clip=1.0)), mean / 5)
    assert torch.equal(training.clip_mean(mean, Penalty(clip=6.0)), mean)
    assert torch.equal(training.clip_mean(mean, Penalty(clip=1.0, enabled=False)), mean)


def test_garbled_data_lasts_from_one_synchronization_to_the_next() -> None:
    first = RUN.warmup + RUN.clean_periods * SYNC_EVERY
    assert not any(RUN.draw_garbled_replicas(step) for step in range(first))
    periods = [
        {RUN.draw_garbled_replicas(step) for step in range(at, at + SYNC_EVERY)}
        for at in range(first, 20_000, SYNC_EVERY)
    ]
    assert all(len(its) == 1 for its in periods)
    counts = [len(next(iter(its))) for its in periods]
    assert counts.count(1) / len(counts) == pytest.approx(training.ONE_GARBLED, abs=0.02)
    assert counts.count(4) / len(counts) == pytest.approx(training.ALL_GARBLED, abs=0.015)
    assert not any(replace(RUN, dirty=False).draw_garbled_replicas(step) for step in range(5000))


def test_a_run_is_a_function_of_its_seed_and_learns() -> None:
    run = Run(replicas=2, steps=16, warmup=8, learning_rate=4e-3, seed=1, dirty=True)
    curve = training.train_side(run, edit.SIDES["penalty"], 2)
    assert [step for step, _ in curve] == [8, 16]
    assert curve[-1][1] < curve[0][1] < 5.6
    assert training.train_side(run, edit.SIDES["penalty"], 2) == curve


def build_losses(**last_losses: float) -> dict[str, list[float]]:
    usual = dict.fromkeys(edit.SIDES, 2.0)
    return {side: [its, 2 * its] for side, its in (usual | last_losses).items()}


def test_all_goals_are_reached_at_their_limits() -> None:
    assert all(edit.check_goals(build_losses(penalty=2.02), build_losses(penalty=1.99)).values())


@pytest.mark.parametrize(
    ("missed", "clean", "dirty"),
    [
        ("clean_1_percent", {"penalty": 2.03}, {}),
        ("dirty_below_plain_averaging", {}, {"without_all": 1.9}),
        ("dirty_below_diloco", {}, {"diloco": 1.9}),
        ("dirty_elimination_pays", {}, {"without_elimination": 1.9}),
        ("dirty_no_worse_than_published", {}, {"published": 1.8}),
    ],
)
def test_each_goal_can_be_missed_alone(missed: str, clean: dict[str, float], dirty: dict[str, float]) -> None:
    goals = edit.check_goals(build_losses(**clean), build_losses(**({"penalty": 1.9} | dirty)))
    assert [name for name, its in goals.items() if not its] == [missed]


def test_only_numbers_are_shortened() -> None:
    assert edit.round_numbers({"a": [1.23456, (2, True)], "b": "x"}) == {"a": [1.2346, [2, True]], "b": "x"}


def test_curves_are_drawn_within_their_panels() -> None:
    curves = {
        name: {side: [(0, 9.0), (320, 2.5), (640, end)] for side in edit.SIDES}
        for name, end in (("clean", 2.0), ("dirty", 2.2))
    }
    drawn = ElementTree.fromstring(drawing.draw_picture(curves))
    panels = drawn.findall("{*}g")
    assert len(panels) == 2
    for panel in panels:
        lines = panel.findall("{*}polyline")
        assert len(lines) == len(drawing.COLORS)
        for line in lines:
            points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
            assert len(points) == 2, "what is above the panel is left out"
            assert all(drawing.LEFT <= x <= drawing.WIDTH and drawing.TOP <= y <= drawing.HEIGHT for x, y in points)


@pytest.mark.parametrize("path", ["", "nowhere/curves.svg"])
def test_an_unwritable_picture_is_refused_before_the_training(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CURVES", str(tmp_path / path))
    monkeypatch.setattr(edit, "run_ablation", lambda _: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match="it is a folder, or lies in none"):
        edit.main()

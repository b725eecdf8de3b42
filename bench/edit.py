"""EDiT's own experiments (arXiv 2412.07210), in small: its penalty on pseudo-gradients; learning rate against workers.

What each part of the penalty is worth on clean and on dirty data: ours, as published, torchft's DiLoCo, and DDP.

All in one process, without a clock: replicas of a tiny GPT train one after the other, and only what they learn counts.
Dirty data has random bytes instead of one replica's samples, or of all replicas', for the time between two
synchronizations. A seed has the same samples, garbage and initial parameters for all sides. DiLoCo is its published
rule, which torchft's class applies (torch's SGD with Nesterov momentum on the plain mean), by our outer optimizer.
QUICK=1: one seed and few steps, a smoke test; there are no goals then. CURVES=picture.svg: draws the
first seed's curves there.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.scripts.edit.drawing import draw_picture
from bench.scripts.edit.training import ALL_GARBLED, LOCAL_BATCH, ONE_GARBLED, SYNC_EVERY, Curve, Run, train_side
from bench.scripts.stragglers.hosts import log_progress
from pacekeeper.replication.local_sgd import OuterSGD
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty

UNREACHABLE = 1e9
"""A threshold, temperature or norm that nothing reaches."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    replicas: int
    """Of the ablation."""
    steps: int
    """Of each replica."""
    warmup: int
    active_from: int
    """Synchronizations that the penalty learns from before it acts, and as many until data may be dirty."""
    seeds: int
    workers: tuple[int, ...]
    learning_rates: tuple[float, ...]


FULL = Sizes(4, 640, 96, 10, 5, (1, 2, 4, 8), (1e-3, 2e-3, 4e-3, 8e-3))
QUICK = Sizes(2, 48, 16, 2, 1, (1, 2), (2e-3, 4e-3))
SIZES = QUICK if os.environ.get("QUICK") else FULL
LEARNING_RATE = 4e-3
"""Of the ablation: what `bench stragglers` finds best for EDiT."""
CURVE_POINTS = 20

PENALTY = Penalty(warmup=SIZES.active_from)
SIDES: Mapping[str, OuterSGD | None] = {
    "ddp": None,
    "diloco": OuterSGD(lr=0.7, momentum=0.9, penalty=Penalty(enabled=False)),
    "penalty": OuterSGD(penalty=PENALTY),
    "without_elimination": OuterSGD(penalty=replace(PENALTY, threshold=UNREACHABLE)),
    "without_weights": OuterSGD(penalty=replace(PENALTY, temperature=UNREACHABLE)),
    "without_clipping": OuterSGD(penalty=replace(PENALTY, clip=UNREACHABLE)),
    "without_all": OuterSGD(penalty=Penalty(enabled=False)),
    "published": OuterSGD(penalty=Penalty.from_paper(warmup=SIZES.active_from)),
}
"""How replicas synchronize; None: they average gradients in every step."""
SIDES_BY_WORKERS = ("ddp", "diloco", "penalty")

Losses = Mapping[str, Sequence[float]]
"""At the end of the run, by side: one a seed, in the same order for all."""


def main() -> None:
    picture_path = Path(os.environ["CURVES"]) if os.environ.get("CURVES") else None
    if picture_path is not None and (picture_path.is_dir() or not picture_path.absolute().parent.is_dir()):
        sys.exit(f"CURVES={picture_path}: it is a folder, or lies in none")
    torch.set_num_threads(1)
    curves: dict[str, dict[str, Curve]] = {}
    losses: dict[str, Losses] = {}
    for name, dirty in (("clean", False), ("dirty", True)):
        curves_by_side = run_ablation(dirty)
        losses[name] = {side: [curve[-1][1] for curve in values] for side, values in curves_by_side.items()}
        curves[name] = {side: values[0] for side, values in curves_by_side.items()}
    result: dict[str, Any] = {
        "bench": "edit",
        "replicas": SIZES.replicas,
        "steps": SIZES.steps,
        "sync_every": SYNC_EVERY,
        "local_batch": LOCAL_BATCH,
        "garbled": {"one": ONE_GARBLED, "all": ALL_GARBLED},
        "learning_rate": LEARNING_RATE,
        "seeds": SIZES.seeds,
        **{name: compute_medians(values) for name, values in losses.items()},
        "against_without_all": {name: compute_ratios(values, "without_all") for name, values in losses.items()},
        "curves": curves,
        "by_workers": measure_losses_by_workers(),
    }
    if picture_path is not None:
        picture_path.write_text(draw_picture(curves))
    if SIZES is FULL:
        result["holds"] = check_goals(losses["clean"], losses["dirty"])
    print(json.dumps(round_numbers(result)))


def run_ablation(dirty: bool) -> dict[str, list[Curve]]:
    """Of each side, one curve a seed."""
    curves: dict[str, list[Curve]] = {side: [] for side in SIDES}
    for seed in range(1, SIZES.seeds + 1):
        run = Run(SIZES.replicas, SIZES.steps, SIZES.warmup, LEARNING_RATE, seed, SIZES.active_from, dirty)
        for side, outer in SIDES.items():
            curves[side].append(train_side(run, outer, CURVE_POINTS))
            log_progress(f"{'dirty' if dirty else 'clean'}, seed {seed}, {side}: {curves[side][-1][-1][1]:.4f}")
    return curves


def measure_losses_by_workers() -> dict[str, dict[str, dict[str, float]]]:
    """Side → workers → learning rate → median of the losses at the end, on clean data.

    A worker's batch and steps are the same however many there are.
    """
    table: dict[str, dict[str, dict[str, float]]] = {}
    for side in SIDES_BY_WORKERS:
        for workers in SIZES.workers:
            for rate in SIZES.learning_rates:
                runs = [
                    Run(workers, SIZES.steps // 2, SIZES.warmup, rate, seed)
                    for seed in range(1, min(SIZES.seeds, 3) + 1)
                ]
                loss = statistics.median(train_side(run, SIDES[side], 1)[-1][1] for run in runs)
                table.setdefault(side, {}).setdefault(str(workers), {})[str(rate)] = loss
                log_progress(f"{workers} workers, rate {rate}, {side}: {loss:.4f}")
    return table


def compute_medians(losses: Losses) -> dict[str, float]:
    return {side: statistics.median(values) for side, values in losses.items()}


def compute_ratios(losses: Losses, base: str) -> dict[str, float]:
    """Of each side, the median over seeds of its loss as a share of the base's with the same seed."""
    return {
        side: statistics.median(loss / base_loss for loss, base_loss in zip(values, losses[base], strict=True))
        for side, values in losses.items()
    }


MAX_CLEAN_RATIO = 1.01


def check_goals(clean: Losses, dirty: Losses) -> dict[str, bool]:
    """What the penalty is for: it wins on dirty data, and costs nothing where nothing is wrong. Paired by seed."""
    return {
        "clean_1_percent": compute_ratios(clean, "without_all")["penalty"] <= MAX_CLEAN_RATIO,
        "dirty_below_plain_averaging": compute_ratios(dirty, "without_all")["penalty"] < 1,
        "dirty_below_diloco": compute_ratios(dirty, "diloco")["penalty"] < 1,
        "dirty_elimination_pays": compute_ratios(dirty, "without_elimination")["penalty"] < 1,
        "dirty_no_worse_than_published": compute_ratios(dirty, "published")["penalty"] <= MAX_CLEAN_RATIO,
    }


def round_numbers(value: Any) -> Any:
    """Numbers to four decimals, in lists and dictionaries of any depth."""
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_numbers(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

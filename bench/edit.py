"""EDiT's own experiments (arXiv 2412.07210), in small: its penalty on pseudo-gradients; learning rate against workers.

What each part of the penalty is worth on clean and on dirty data: ours, as published, torchft's DiLoCo, and DDP.

All in one process, without a clock: replicas of a tiny GPT train one after the other, and only what they learn counts.
Dirty data has random bytes in place of a replica's samples, or of everybody's, for the time between two
synchronisations. A seed has the same samples, garbage and initial parameters for all sides. DiLoCo is its published
rule, which torchft's class applies (torch's SGD with Nesterov momentum on the plain mean), by our outer optimizer.
QUICK=1: one seed and few steps, which says whether it works; there are no goals then. CURVES=picture.svg: draws the
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

from bench.scripts.edit.drawing import picture
from bench.scripts.edit.training import ALL_GARBLED, LOCAL_BATCH, ONE_GARBLED, SYNC_EVERY, Curve, Run, train
from bench.scripts.stragglers.hosts import log_progress
from pacekeeper.replication.local_sgd import OuterSGD
from pacekeeper_analysis.pseudo_gradient import Penalty

OFF = 1e9
"""A threshold, temperature or norm that nothing reaches."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    replicas: int
    """Of the ablation."""
    steps: int
    """Of each replica."""
    warmup: int
    judged_from: int
    """Synchronisations that the penalty learns from before it judges, and as many until data may be dirty."""
    seeds: int
    workers: tuple[int, ...]
    learning_rates: tuple[float, ...]


FULL = Sizes(4, 640, 96, 10, 5, (1, 2, 4, 8), (1e-3, 2e-3, 4e-3, 8e-3))
QUICK = Sizes(2, 48, 16, 2, 1, (1, 2), (2e-3, 4e-3))
SIZES = QUICK if os.environ.get("QUICK") else FULL
LEARNING_RATE = 4e-3
"""Of the ablation: what `bench stragglers` finds best for EDiT."""
POINTS = 20

PENALTY = Penalty(warmup=SIZES.judged_from)
SIDES: Mapping[str, OuterSGD | None] = {
    "ddp": None,
    "diloco": OuterSGD(lr=0.7, momentum=0.9, penalty=Penalty(enabled=False)),
    "penalty": OuterSGD(penalty=PENALTY),
    "without_elimination": OuterSGD(penalty=replace(PENALTY, threshold=OFF)),
    "without_weights": OuterSGD(penalty=replace(PENALTY, temperature=OFF)),
    "without_clipping": OuterSGD(penalty=replace(PENALTY, clip=OFF)),
    "without_all": OuterSGD(penalty=Penalty(enabled=False)),
    "published": OuterSGD(penalty=Penalty.from_paper(warmup=SIZES.judged_from)),
}
"""How replicas synchronise; None: they average gradients in every step."""
BY_WORKERS = ("ddp", "diloco", "penalty")

Losses = Mapping[str, Sequence[float]]
"""At the end of the run, by side: one a seed, in the same order for all."""


def main() -> None:
    picture_at = Path(os.environ["CURVES"]) if os.environ.get("CURVES") else None
    if picture_at is not None and (picture_at.is_dir() or not picture_at.absolute().parent.is_dir()):
        sys.exit(f"CURVES={picture_at}: it is a folder, or lies in none")
    torch.set_num_threads(1)
    curves: dict[str, dict[str, Curve]] = {}
    losses: dict[str, Losses] = {}
    for name, dirty in (("clean", False), ("dirty", True)):
        of_seeds = ablation(dirty)
        losses[name] = {side: [curve[-1][1] for curve in its] for side, its in of_seeds.items()}
        curves[name] = {side: its[0] for side, its in of_seeds.items()}
    result: dict[str, Any] = {
        "bench": "edit",
        "replicas": SIZES.replicas,
        "steps": SIZES.steps,
        "sync_every": SYNC_EVERY,
        "local_batch": LOCAL_BATCH,
        "garbled": {"one": ONE_GARBLED, "all": ALL_GARBLED},
        "learning_rate": LEARNING_RATE,
        "seeds": SIZES.seeds,
        **{name: medians(its) for name, its in losses.items()},
        "against_without_all": {name: ratios(its, "without_all") for name, its in losses.items()},
        "curves": curves,
        "measure_losses_by_workers": measure_losses_by_workers(),
    }
    if picture_at is not None:
        picture_at.write_text(picture(curves))
    if SIZES is FULL:
        result["holds"] = goals(losses["clean"], losses["dirty"])
    print(json.dumps(rounded(result)))


def ablation(dirty: bool) -> dict[str, list[Curve]]:
    """Of each side, one curve a seed."""
    curves: dict[str, list[Curve]] = {side: [] for side in SIDES}
    for seed in range(1, SIZES.seeds + 1):
        run = Run(SIZES.replicas, SIZES.steps, SIZES.warmup, LEARNING_RATE, seed, SIZES.judged_from, dirty)
        for side, outer in SIDES.items():
            curves[side].append(train(run, outer, POINTS))
            log_progress(f"{'dirty' if dirty else 'clean'}, seed {seed}, {side}: {curves[side][-1][-1][1]:.4f}")
    return curves


def measure_losses_by_workers() -> dict[str, dict[str, dict[str, float]]]:
    """Side → workers → learning rate → median of the losses at the end, on clean data.

    A worker's batch and steps are the same however many there are.
    """
    table: dict[str, dict[str, dict[str, float]]] = {}
    for side in BY_WORKERS:
        for workers in SIZES.workers:
            for rate in SIZES.learning_rates:
                runs = [
                    Run(workers, SIZES.steps // 2, SIZES.warmup, rate, seed)
                    for seed in range(1, min(SIZES.seeds, 3) + 1)
                ]
                loss = statistics.median(train(run, SIDES[side], 1)[-1][1] for run in runs)
                table.setdefault(side, {}).setdefault(str(workers), {})[str(rate)] = loss
                log_progress(f"{workers} workers, rate {rate}, {side}: {loss:.4f}")
    return table


def medians(losses: Losses) -> dict[str, float]:
    return {side: statistics.median(its) for side, its in losses.items()}


def ratios(losses: Losses, base: str) -> dict[str, float]:
    """Of each side, the median over seeds of its loss as a share of the base's with the same seed."""
    return {
        side: statistics.median(one / other for one, other in zip(its, losses[base], strict=True))
        for side, its in losses.items()
    }


CLEAN_MARGIN = 1.01


def goals(clean: Losses, dirty: Losses) -> dict[str, bool]:
    """What the penalty is for: it wins on dirty data, and costs nothing where nothing is wrong. Paired by seed."""
    return {
        "clean_1_percent": ratios(clean, "without_all")["penalty"] <= CLEAN_MARGIN,
        "dirty_below_plain_averaging": ratios(dirty, "without_all")["penalty"] < 1,
        "dirty_below_diloco": ratios(dirty, "diloco")["penalty"] < 1,
        "dirty_elimination_pays": ratios(dirty, "without_elimination")["penalty"] < 1,
        "dirty_no_worse_than_published": ratios(dirty, "published")["penalty"] <= CLEAN_MARGIN,
    }


def rounded(value: Any) -> Any:
    """Numbers to four decimals, in lists and dictionaries of any depth."""
    if isinstance(value, dict):
        return {key: rounded(its) for key, its in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(its) for its in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

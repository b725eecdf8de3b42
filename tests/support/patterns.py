"""Patterns of ranks that were never there: what each spends in which function, a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pacekeeper_analysis.behaviour.pattern import UNKNOWN, Answer, Owner, RankPattern, Setup

FORWARD = ("torch/nn/modules/linear.py:Linear.forward", Owner.PYTHON)
BACKWARD = ("torch/autograd/graph.py:_engine_run_backward", Owner.PYTHON)
OPTIMIZER = ("torch/optim/adamw.py:_single_tensor_adamw", Owner.PYTHON)
LOAD = ("train.py:Samples.__getitem__", Owner.DATA)
GARBAGE = ("garbage collection", Owner.GARBAGE)
SLOW = ("train.py:augment", Owner.PYTHON)
WAIT = ("all_reduce", Owner.COLLECTIVE)
WORK = {FORWARD: 0.1, BACKWARD: 0.2, OPTIMIZER: 0.04, LOAD: 0.03, GARBAGE: 0.005}
"""Of a rank with nothing wrong, 0.375 s a step."""
Work = Mapping[tuple[str, Owner], float]


def pattern(
    rank: int,
    work: Work,
    step_seconds: float,
    *,
    use: float = 0.95,
    idle: frozenset[tuple[str, Owner]] = frozenset(),
    setup: Setup | None = None,
    length: float = 0.0,
    samples: int = 0,
    follows_lengths: float = 0.0,
) -> RankPattern:
    """`idle`: functions that leave the processor alone."""
    functions = [*work, *([WAIT] if WAIT not in work else [])]
    waits = step_seconds - sum(work.values()) if WAIT not in work else 0.0
    seconds = np.array([work.get(function, waits) for function in functions])
    order = np.argsort(-seconds, kind="stable")
    ordered = [functions[i] for i in order]
    shares = seconds[order] / step_seconds
    errors = np.sqrt(shares * (1 - np.minimum(shares, 1)) / 1000)
    names = tuple(dict.fromkeys(name for name, _ in ordered))
    uses = [UNKNOWN if owner < Owner.DATA else 0.02 if (name, owner) in idle else use for name, owner in ordered]
    return RankPattern(
        rank=rank,
        round=1,
        first_step=100,
        steps=32,
        seconds=32 * step_seconds,
        looks=1000,
        length=length,
        samples=samples,
        follows_lengths=follows_lengths,
        setup=setup or Setup(threads=2, processors=2.0, ranks=1, throttled=0.0, ran=0.9, delayed=0.01),
        names=names,
        functions=np.array([names.index(name) for name, _ in ordered], np.uint16),
        owners=np.array([owner for _, owner in ordered], np.uint8),
        figures=np.stack([shares, errors, uses, np.full(len(uses), 0.05)], axis=1).astype(np.float32),
        folded=((900, 0),),
    )


def answers(now: list[RankPattern], early: list[RankPattern] | None = None) -> list[tuple[int, bytes]]:
    """As they are sent."""
    baselines: list[RankPattern | None] = [*early] if early is not None else [None] * len(now)
    return [(mine.rank, Answer(mine, baseline).to_bytes()) for mine, baseline in zip(now, baselines, strict=True)]


def scaled(work: Work, factor: float) -> dict[tuple[str, Owner], float]:
    return {function: seconds * factor for function, seconds in work.items()}

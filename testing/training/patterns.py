"""Patterns of ranks that were never there: what each spends in which function, a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pacekeeper_analysis.profiling.pattern import NOT_MEASURED, ProcessSetup, ProfileAnswer, RankPattern, TimeOwner

FORWARD_FUNCTION = ("torch/nn/modules/linear.py:Linear.forward", TimeOwner.PYTHON)
BACKWARD_FUNCTION = ("torch/autograd/graph.py:_engine_run_backward", TimeOwner.PYTHON)
OPTIMIZER_FUNCTION = ("torch/optim/adamw.py:_single_tensor_adamw", TimeOwner.PYTHON)
LOAD_FUNCTION = ("train.py:Samples.__getitem__", TimeOwner.DATA)
GC_FUNCTION = ("garbage collection", TimeOwner.GC)
SLOW_FUNCTION = ("train.py:augment", TimeOwner.PYTHON)
WAIT_FUNCTION = ("all_reduce", TimeOwner.COLLECTIVE)
HEALTHY_WORK = {
    FORWARD_FUNCTION: 0.1,
    BACKWARD_FUNCTION: 0.2,
    OPTIMIZER_FUNCTION: 0.04,
    LOAD_FUNCTION: 0.03,
    GC_FUNCTION: 0.005,
}
"""Of a rank with nothing wrong, 0.375 s a step."""
FunctionSeconds = Mapping[tuple[str, TimeOwner], float]


def build_pattern(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    rank: int,
    work: FunctionSeconds,
    step_seconds: float,
    *,
    use: float = 0.95,
    idle: frozenset[tuple[str, TimeOwner]] = frozenset(),
    setup: ProcessSetup | None = None,
    length: float | None = None,
    samples: int | None = None,
    follows_lengths: float | None = None,
) -> RankPattern:
    """`idle`: functions that do not use the processor."""
    functions = [*work, *([WAIT_FUNCTION] if WAIT_FUNCTION not in work else [])]
    waits = step_seconds - sum(work.values()) if WAIT_FUNCTION not in work else 0.0
    seconds = np.array([work.get(function, waits) for function in functions])
    order = np.argsort(-seconds, kind="stable")
    ordered = [functions[i] for i in order]
    shares = seconds[order] / step_seconds
    errors = np.sqrt(shares * (1 - np.minimum(shares, 1)) / 1000)
    names = tuple(dict.fromkeys(name for name, _ in ordered))
    uses = [
        NOT_MEASURED if owner < TimeOwner.DATA else 0.02 if (name, owner) in idle else use for name, owner in ordered
    ]
    return RankPattern(
        rank=rank,
        round=1,
        first_step=100,
        steps=32,
        seconds=32 * step_seconds,
        stack_samples=1000,
        length=length,
        samples=samples,
        follows_lengths=follows_lengths,
        setup=setup or ProcessSetup(threads=2, processors=2.0, ranks=1, throttled=0.0, ran=0.9, delayed=0.01),
        names=names,
        functions=np.array([names.index(name) for name, _ in ordered], np.uint16),
        owners=np.array([owner for _, owner in ordered], np.uint8),
        statistics=np.stack([shares, errors, uses, np.full(len(uses), 0.05)], axis=1).astype(np.float32),
        folded=((900, 0),),
    )


def build_answers(
    patterns: list[RankPattern], early_patterns: list[RankPattern] | None = None
) -> list[tuple[int, bytes]]:
    """As they are sent."""
    baselines: list[RankPattern | None] = [*early_patterns] if early_patterns is not None else [None] * len(patterns)
    return [
        (pattern.rank, ProfileAnswer(pattern, baseline).to_bytes())
        for pattern, baseline in zip(patterns, baselines, strict=True)
    ]


def scale_work(work: FunctionSeconds, factor: float) -> dict[tuple[str, TimeOwner], float]:
    return {function: seconds * factor for function, seconds in work.items()}

"""Are the product's thresholds fitted to the faults that they are tried on? Each is fitted again without one fault.

What scores best on all other faults is applied to the one that was left out. A threshold is tried at half and at twice
its value (of a ratio, what is above 1), the others as they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product, repeat
from statistics import mean

from . import replay
from .replay import Beginnings, Case, Outcome

COPIES = 1
WRONG_SCORE = -1.0
"""Score of a last verdict that is wrong; one that is right has 1, silence 0."""


@dataclass(frozen=True)
class Threshold:
    module: str
    name: str
    factor: float = 1.0  # of what the product has

    def __str__(self) -> str:
        return f"{self.name} × {self.factor:g}"


UNCHANGED_THRESHOLD = Threshold("", "", 1.0)
PROFILING = "pacekeeper_analysis.profiling"
TRIED_THRESHOLDS = (
    UNCHANGED_THRESHOLD,
    *(
        Threshold(module, name, factor)
        for (module, name), factor in product(
            (
                ("pacekeeper_analysis.stragglers.wait_attribution", "MIN_BLAMED_STEP_SHARE"),
                ("pacekeeper_analysis.network.delay_matrix", "MIN_HOT_RATIO"),
                (f"{PROFILING}.localize", "MIN_SUSPECT_SPREADS"),
                (f"{PROFILING}.localize", "MIN_NAMED_EXCESS_SHARE"),
            ),
            (0.5, 2.0),
        )
    ),
)
RATIO_THRESHOLDS = frozenset({"MIN_HOT_RATIO"})


@dataclass(frozen=True)
class LeftOut:
    """Shares of copies whose last verdict is right, culprit and class."""

    as_it_is: float
    left_out: float
    chosen: Mapping[str, int]  # by how many of the choices


def evaluate_left_out(places: int) -> LeftOut:
    tries = list(product(TRIED_THRESHOLDS, replay.list_cases(places)))
    with ProcessPoolExecutor() as pool:
        results = list(
            pool.map(_replay_under_threshold, *zip(*tries, strict=True), repeat(replay.collect_beginnings(places)))
        )
    scores: dict[Threshold, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (threshold, (fault, _)), outcomes in zip(tries, results, strict=True):
        scores[threshold][fault] += [_score_outcome(outcome) for outcome in outcomes]
    return choose_thresholds(scores)


def choose_thresholds(scores: Mapping[Threshold, Mapping[str, Sequence[float]]]) -> LeftOut:
    """`scores`: threshold → fault → of its copies. Where others score no better, the product's own is chosen."""

    def best_without(fault: str) -> Threshold:
        def score(threshold: Threshold) -> tuple[float, bool]:
            means = (mean(fault_scores) for name, fault_scores in scores[threshold].items() if name != fault)
            return round(mean(means), 6), threshold == UNCHANGED_THRESHOLD

        return max(scores, key=score)

    best = {fault: best_without(fault) for fault in scores[UNCHANGED_THRESHOLD]}
    return LeftOut(
        as_it_is=_compute_right_share(
            score for fault_scores in scores[UNCHANGED_THRESHOLD].values() for score in fault_scores
        ),
        left_out=_compute_right_share(score for fault, threshold in best.items() for score in scores[threshold][fault]),
        chosen=Counter(
            str(threshold) if threshold != UNCHANGED_THRESHOLD else "as they are" for threshold in best.values()
        ),
    )


def _compute_right_share(scores: Iterable[float]) -> float:
    return mean(score == 1.0 for score in scores)


def _score_outcome(outcome: Outcome) -> float:
    return 0.0 if outcome.last is None else 1.0 if outcome.last.right else WRONG_SCORE


def _replay_under_threshold(threshold: Threshold, case: Case, beginnings: Beginnings) -> list[Outcome]:
    with _apply_threshold(threshold):
        return replay.replay_recording(case, beginnings, COPIES)


@contextmanager
def _apply_threshold(threshold: Threshold) -> Iterator[None]:
    if threshold == UNCHANGED_THRESHOLD:
        yield
        return
    module, base = import_module(threshold.module), 1.0 if threshold.name in RATIO_THRESHOLDS else 0.0
    original = getattr(module, threshold.name)
    setattr(module, threshold.name, base + threshold.factor * (original - base))
    try:
        yield
    finally:
        setattr(module, threshold.name, original)

"""Diagnoses and strategies, computed once for the same answers.

A pass weighs the same answers several times, and the next passes weigh them again until new ones arrive.
"""

from __future__ import annotations

from functools import lru_cache

from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis, Strategy

from .evidence_key import EvidenceKey

DIAGNOSES_PER_PASS, STRATEGIES_PER_PASS = 2, 4
"""Results that are cached: what one pass needs. Those of a large job take megabytes.

Answers are diagnosed once more without a bottleneck that is usual for the job. A pass may also take a small bottleneck
out of a diagnosis, or name it.
"""


def diagnose_answers(
    evidence: tuple[Evidence, ...],
    threshold: float,
    known_relative_times: KnownRelativeTimes | None,
    suppressed: tuple[Bottleneck, ...],
) -> Diagnosis | None:
    """Return `strategies.diagnose_bottleneck` of the answers' windows."""
    known = (
        None
        if known_relative_times is None
        else (tuple(known_relative_times.relative_times.items()), known_relative_times.error)
    )
    return _diagnose_cached_answers(EvidenceKey(evidence), threshold, known, suppressed)


@lru_cache(maxsize=STRATEGIES_PER_PASS)
def list_strategies(
    diagnosis_key: DiagnosisKey, threshold: float, sequence_cost: tuple[float, float, float] | None, gc_every: int
) -> tuple[Strategy, ...]:
    """Return `strategies.propose_strategies` of the diagnosis."""
    return strategies.propose_strategies(
        diagnosis_key.diagnosis, threshold=threshold, sequence_cost=sequence_cost, gc_every=gc_every
    )


class DiagnosisKey:
    """A key by the identity of the diagnosis' steps, which are large arrays, and by equality of all else."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def __hash__(self) -> int:
        return hash((id(self.diagnosis.window), self.diagnosis.bottleneck, self.diagnosis.slowdown))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DiagnosisKey):
            return False
        return self.diagnosis.window is other.diagnosis.window and self.diagnosis == other.diagnosis


@lru_cache(maxsize=DIAGNOSES_PER_PASS)
def _diagnose_cached_answers(
    evidence_key: EvidenceKey,
    threshold: float,
    known: tuple[tuple[tuple[int, float], ...], float] | None,
    suppressed: tuple[Bottleneck, ...],
) -> Diagnosis | None:
    windows = tuple(window for answer in evidence_key.evidence for window in answer.windows)
    known_relative_times = None if known is None else KnownRelativeTimes(dict(known[0]), known[1])
    return strategies.diagnose_bottleneck(windows, threshold, known_relative_times, suppressed=suppressed)

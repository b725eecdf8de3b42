"""The same answers are diagnosed once, however often they are weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.stragglers import diagnosis_cache
from pacekeeper_operator.decide.stragglers.diagnosis_cache import DiagnosisKey
from testing.operators.observations import build_evidence, build_policy, build_training

THRESHOLD = 1.1


def build_answers(request: str = "why", slow: float = 2.0) -> tuple[Evidence, ...]:
    """Build the answers of four ranks; rank 2 takes `slow` times as long."""
    seconds = [0.08 * (slow if rank == 2 else 1.0) for rank in range(4)]
    windows = (
        RankWindow(rank, tuple(range(468, 500)), (max(seconds),) * 32, (seconds[rank],) * 32, (8,) * 32)
        for rank in range(4)
    )
    return build_evidence(request, windows)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that have been computed instead of read from the cache."""
    names = list[str]()

    def count_call(name: str, function: Callable[..., object], *arguments: object, **named: object) -> object:
        names.append(name)
        return function(*arguments, **named)

    for name in ("diagnose_bottleneck", "propose_strategies"):
        monkeypatch.setattr(strategies, name, partial(count_call, name, getattr(strategies, name)))
    return names


def test_a_pass_diagnoses_its_answers_once(computed: list[str]) -> None:
    """The check of stragglers and the investigation both need the diagnosis."""
    observation = build_training()
    observation = replace(observation, metrics=replace(observation.metrics, slowdown=1.6, relative_time=2.0))
    requesting = evaluate_job(observation, build_policy())
    answers = build_answers(requesting.desired.requests.evidence_name, slow=1.05)
    answered = replace(observation.with_desired(requesting.desired), now=observation.now + 2.0, evidence=answers)
    result = evaluate_job(answered, build_policy())
    assert result.desired.requests.evidence_name != requesting.desired.requests.evidence_name, "both have weighed them"
    assert computed == ["diagnose_bottleneck", "propose_strategies"]


def test_other_answers_and_arguments_are_computed_separately(computed: list[str]) -> None:
    answers = build_answers()
    known = KnownRelativeTimes({2: 1.05}, 0.01)
    diagnoses = [
        diagnosis_cache.diagnose_answers(*arguments)
        for arguments in (
            (answers, THRESHOLD, None, ()),
            (build_answers(slow=1.5), THRESHOLD, None, ()),
            (answers, THRESHOLD, None, (Bottleneck.COMPUTE,)),
            (answers, THRESHOLD, known, ()),
            (answers, 1.5, None, ()),
        )
    ]
    assert computed == ["diagnose_bottleneck"] * len(diagnoses)


def test_a_diagnosis_with_other_steps_or_another_bottleneck_has_other_strategies(computed: list[str]) -> None:
    diagnosis = diagnosis_cache.diagnose_answers(build_answers(), THRESHOLD, None, ())
    again = diagnosis_cache.diagnose_answers(build_answers(), THRESHOLD, None, ())
    assert diagnosis is not None
    assert again is not None
    assert diagnosis == again, "all but their steps"
    computed.clear()
    for key in (diagnosis, again, replace(diagnosis, bottleneck=Bottleneck.NONE), replace(diagnosis)):
        diagnosis_cache.list_strategies(DiagnosisKey(key), THRESHOLD, None, 0)
    assert computed == ["propose_strategies"] * 3, "the last is the first"

"""Root causes of synthetic jobs whose fault is known; bench/causes.py does the same for more of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pacekeeper_analysis.whatif import WhatIf, analyse, window_from_trace
from pacekeeper_analysis.whatif import data_parallel as dp
from pacekeeper_analysis.whatif.causes import CHECKS, Cause, Finding, diagnose
from pacekeeper_analysis.whatif.faults import FAULTS, Case, cases
from pacekeeper_analysis.whatif.synthetic import Shape

SHAPE = Shape(dp=4, pp=4, microbatches=8, steps=12)


def test_causes_are_told_apart() -> None:
    tried: Counter[Cause] = Counter()
    right: Counter[Cause] = Counter()
    blamed_though_healthy = []
    for case in cases(60, seed=7):
        found = diagnosis(case).cause
        tried[case.cause] += 1
        right[case.cause] += found is case.cause
        if case.cause is Cause.NONE and found is not Cause.NONE:
            blamed_though_healthy.append(case)
    assert set(tried) == set(Cause)
    assert sum(right.values()) >= 0.97 * sum(tried.values())
    assert not blamed_though_healthy


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.NONE])
def test_evidence_of_a_strong_fault(cause: Cause) -> None:
    finding = diagnosis(Case(cause, SHAPE, strength=0.8, noise=0.01, seed=3))
    assert finding.cause is cause
    assert finding.confidence > 0.6
    assert finding.explains > 0.5
    assert any(character.isdigit() for character in finding.evidence)
    assert finding.remedy.endswith(".")


def test_every_cause_has_a_fault_and_a_check() -> None:
    assert set(FAULTS) == set(Cause)
    assert {check.__name__.replace("_", "-") for check in CHECKS} == {cause.value for cause in Cause} - {"none"}


def test_the_slow_worker_is_named() -> None:
    case = Case(Cause.SLOW_WORKER, SHAPE, strength=0.5, noise=0.01, seed=5)
    whatif = analysis(case)
    assert whatif.decomposition is not None
    worst = np.unravel_index(int(np.argmax(whatif.decomposition.by_worker)), whatif.decomposition.by_worker.shape)
    assert diagnose(whatif).workers == (tuple(int(index) for index in worst),)


def test_a_slow_rank_of_a_data_parallel_job_is_named() -> None:
    seconds = np.random.default_rng(0).normal(1.0, 0.02, (20, 4))
    seconds[:, 2] *= 1.5
    finding = diagnose(dp.analyse(seconds))
    assert finding.cause is Cause.SLOW_WORKER
    assert finding.workers == ((2, 0),)


def test_recorded_collections_count_as_garbage_collection() -> None:
    """A loader of garbage collections of its own: the records tell them apart from computing."""
    program: list[dp.Instruction] = [dp.Run(dp.COMPUTE), dp.Run("gc"), dp.Launch(dp.ALL_REDUCE, "all"), dp.Wait("all")]
    seconds = np.zeros((3, 4, 16))
    seconds[0], seconds[2] = 1.0, 0.01
    for step in range(16):
        seconds[1, step % 4, step] = 0.5
    assert diagnose(analyse(dp.window(program, seconds))).cause is Cause.GARBAGE_COLLECTION


def test_noise_alone_has_no_cause() -> None:
    finding = diagnosis(Case(Cause.NONE, Shape(dp=8, pp=1, microbatches=4, steps=24), 0.0, noise=0.12, seed=1))
    assert finding.cause is Cause.NONE
    assert finding.workers == ()


def analysis(case: Case) -> WhatIf:
    return analyse(window_from_trace(case.trace()))


def diagnosis(case: Case) -> Finding:
    return diagnose(analysis(case))

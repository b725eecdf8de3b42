"""Root causes of synthetic jobs whose fault is known; bench/causes.py does the same for more of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pacekeeper_analysis.whatif import WhatIf, analyze_window, build_window_from_trace
from pacekeeper_analysis.whatif import data_parallel as dp
from pacekeeper_analysis.whatif.causes import CAUSE_CHECKS, CauseFinding, SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import FAULT_MODELS, SyntheticJob, generate_jobs

SHAPE = JobShape(dp=4, pp=4, microbatches=8, steps=12)


def test_causes_are_distinguished() -> None:
    tried: Counter[SlowdownCause] = Counter()
    right: Counter[SlowdownCause] = Counter()
    blamed_though_healthy = []
    for case in generate_jobs(60, seed=7):
        found = diagnose_job(case).cause
        tried[case.cause] += 1
        right[case.cause] += found is case.cause
        if case.cause is SlowdownCause.NONE and found is not SlowdownCause.NONE:
            blamed_though_healthy.append(case)
    assert set(tried) == set(SlowdownCause)
    assert sum(right.values()) >= 0.97 * sum(tried.values())
    assert not blamed_though_healthy


@pytest.mark.parametrize("cause", [cause for cause in SlowdownCause if cause is not SlowdownCause.NONE])
def test_a_strong_fault_has_evidence(cause: SlowdownCause) -> None:
    finding = diagnose_job(SyntheticJob(cause, SHAPE, strength=0.8, noise=0.01, seed=3))
    assert finding.cause is cause
    assert finding.confidence > 0.6
    assert finding.explained_share > 0.5
    assert any(character.isdigit() for character in finding.evidence)
    assert finding.remedy.endswith(".")


def test_every_cause_has_a_fault_and_a_check() -> None:
    assert set(FAULT_MODELS) == set(SlowdownCause)
    assert {check.__name__.removeprefix("check_").replace("_", "-") for check in CAUSE_CHECKS} == {
        cause.value for cause in SlowdownCause
    } - {"none"}


def test_the_slow_worker_is_named() -> None:
    case = SyntheticJob(SlowdownCause.SLOW_WORKER, SHAPE, strength=0.5, noise=0.01, seed=5)
    whatif = analyze_job(case)
    assert whatif.decomposition is not None
    worst = np.unravel_index(
        int(np.argmax(whatif.decomposition.slowdown_by_worker)), whatif.decomposition.slowdown_by_worker.shape
    )
    assert diagnose_cause(whatif).workers == (tuple(int(index) for index in worst),)


def test_a_slow_rank_of_a_data_parallel_job_is_named() -> None:
    seconds = np.random.default_rng(0).normal(1.0, 0.02, (20, 4))
    seconds[:, 2] *= 1.5
    finding = diagnose_cause(dp.analyze_compute_seconds(seconds))
    assert finding.cause is SlowdownCause.SLOW_WORKER
    assert finding.workers == ((2, 0),)


def test_recorded_collections_count_as_garbage_collection() -> None:
    """A loader with garbage collections of its own: the records separate them from computation."""
    program: list[dp.Instruction] = [
        dp.RunWork(dp.COMPUTE),
        dp.RunWork("gc"),
        dp.LaunchCollective(dp.ALL_REDUCE, "all"),
        dp.WaitForCollective("all"),
    ]
    seconds = np.zeros((3, 4, 16))
    seconds[0], seconds[2] = 1.0, 0.01
    for step in range(16):
        seconds[1, step % 4, step] = 0.5
    assert diagnose_cause(analyze_window(dp.build_window(program, seconds))).cause is SlowdownCause.GARBAGE_COLLECTION


def test_noise_has_no_cause() -> None:
    finding = diagnose_job(
        SyntheticJob(SlowdownCause.NONE, JobShape(dp=8, pp=1, microbatches=4, steps=24), 0.0, noise=0.12, seed=1)
    )
    assert finding.cause is SlowdownCause.NONE
    assert finding.workers == ()


def analyze_job(case: SyntheticJob) -> WhatIf:
    return analyze_window(build_window_from_trace(case.build_trace()))


def diagnose_job(case: SyntheticJob) -> CauseFinding:
    return diagnose_cause(analyze_job(case))

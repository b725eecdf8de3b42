"""What the estimator finds in synthetic jobs, and that its probabilities are what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.estimator.chain import LEVEL_PRIOR, LEVELS
from pacekeeper_analysis.estimator.parameters import EstimatorParameters

from .synthetic_job import STEP_SECONDS, SyntheticJob, build_means


def train_healthy(job: SyntheticJob, windows: int = 6) -> SyntheticJob:
    for _ in range(windows):
        job.observe()
    return job


@pytest.mark.parametrize(
    "job",
    [
        SyntheticJob(ranks=2),
        SyntheticJob(ranks=4),
        SyntheticJob(ranks=8, ranks_per_worker=4),
        SyntheticJob(ranks=1024, ranks_per_worker=8),
        SyntheticJob(ranks=4, managed=False),
        SyntheticJob(ranks=8, roles=(0, 0, 0, 0, 1, 1, 1, 1)),
    ],
    ids=["two ranks", "four ranks", "workers of four", "1,024 ranks", "a monitored script", "pipeline stages"],
)
def test_a_slow_rank_is_found_with_level_and_onset(job: SyntheticJob) -> None:
    train_healthy(job)
    assert job.estimator.workers.slow.max() < 0.05
    onset, job.slowdowns = job.now, {1: 1.3}
    for _ in range(3):
        job.observe()
    worker = 1 // job.ranks_per_worker
    assert job.estimator.workers.slow[worker] > 0.95
    assert np.delete(job.estimator.workers.slow, worker).max(initial=0.0) < 0.05
    assert job.estimator.rank_levels[1] == pytest.approx(np.log(1.3), abs=0.04)
    assert job.estimator.workers.slow_onsets[worker] == pytest.approx(onset, abs=2 * STEP_SECONDS)
    job.slowdowns = {}
    for _ in range(2):
        job.observe()
    assert job.estimator.workers.slow.max() < 0.05, "it has recovered"


@pytest.mark.parametrize("ranks_per_worker", [1, 2])
@pytest.mark.parametrize("managed", [True, False])
def test_one_of_two_ranks_stays_slow_for_as_long_as_it_is(ranks_per_worker: int, managed: bool) -> None:
    """Its peer's level mirrors its own, which is no noise."""
    job = train_healthy(SyntheticJob(ranks=2, ranks_per_worker=ranks_per_worker, managed=managed))
    sigma, job.slowdowns = job.estimator.noise.sigma, {1: 4.6}
    for _ in range(60):
        assert job.observe().workers.slow.max() > 0.95
    assert job.estimator.noise.sigma == pytest.approx(sigma, rel=0.2)


def test_a_slow_node_is_found_as_one() -> None:
    job = train_healthy(SyntheticJob(ranks=16, ranks_per_worker=4))
    job.slowdowns = dict.fromkeys(range(4, 8), 1.1)
    for _ in range(4):
        job.observe()
    assert job.estimator.workers.slow[1] > 0.95
    assert np.allclose(job.estimator.rank_levels[4:8], np.log(1.1), atol=0.03)


def test_two_faults_at_once() -> None:
    job = train_healthy(SyntheticJob(ranks=8))
    job.slowdowns, job.transfer = {1: 1.5, 6: 1.2}, 0.2
    for _ in range(4):
        job.observe()
    assert (job.estimator.workers.slow[[1, 6]] > 0.95).all()
    assert job.estimator.transfer.slow[0] > 0.95
    assert np.delete(job.estimator.workers.slow, [1, 6]).max() < 0.05


def test_slow_ranks_that_rotate_are_no_slow_worker() -> None:
    job = train_healthy(SyntheticJob(ranks=4))
    job.rotating = 1.6
    for _ in range(3):
        job.observe()
    assert job.estimator.rotation.slow[0] > 0.95
    assert job.estimator.workers.slow.max() < 0.5
    job.rotating, job.slowdowns = 1.0, {2: 1.6}
    for _ in range(4):
        job.observe()
    assert job.estimator.rotation.slow[0] < 0.05
    assert job.estimator.workers.slow[2] > 0.95


@pytest.mark.parametrize("length", [1.5, 3.0, 15.0])
def test_one_outlier_convicts_no_rank(length: float) -> None:
    job = train_healthy(SyntheticJob())
    window = job.draw_steps(1)
    window.compute_seconds[0, 2] *= length
    estimator = job.estimator.observe_steps(window, job.now)
    assert estimator.workers.slow.max() < 0.5
    assert estimator.rotation.slow[0] < 0.95


def test_a_slow_link_is_told_from_slow_work() -> None:
    job = train_healthy(SyntheticJob())
    job.transfer = 0.1
    job.observe()
    assert job.estimator.transfer.slow[0] > 0.95
    assert job.estimator.workers.slow.max() < 0.05
    growth = np.expm1(job.estimator.transfer.slow_levels[0, 0]) * 0.55
    assert growth == pytest.approx(0.1, abs=0.02)


def test_a_single_rank_has_no_peers_and_is_never_slow() -> None:
    job = train_healthy(SyntheticJob(ranks=1))
    job.slowdowns, job.transfer = {0: 3.0}, 1.0
    for _ in range(4):
        job.observe()
    assert job.estimator.workers.slow.max() < 0.05
    assert job.estimator.transfer.slow[0] == 0.0


def test_a_stage_of_one_rank_is_judged_by_nothing() -> None:
    job = train_healthy(SyntheticJob(ranks=3, roles=(0, 1, 1)))
    job.slowdowns = {0: 2.0}
    for _ in range(4):
        job.observe()
    assert job.estimator.workers.slow.max() < 0.05


def test_means_make_a_request_and_steps_replace_them() -> None:
    job = train_healthy(SyntheticJob())
    assert not job.observe_means().wants_steps
    job.slowdowns = {3: 1.4}
    before, window = job.estimator, job.draw_steps(8)
    by_means = before.observe_metrics(build_means(window), job.step, job.now)
    assert by_means.wants_steps
    both, steps = by_means.observe_steps(window, job.now), before.observe_steps(window, job.now)
    assert np.allclose(both.workers.slow, steps.workers.slow, atol=0.02), "the same steps count once"
    requested = by_means.request_steps(job.step)
    assert not requested.observe_metrics(build_means(window), job.step, job.now).wants_steps, "nothing is new"


def test_a_first_request_comes_before_anything_is_known() -> None:
    job = SyntheticJob()
    assert job.observe_means().wants_steps
    assert not job.estimator.knows_noise
    assert job.observe().knows_noise


def test_shares_that_follow_a_fault_do_not_hide_it() -> None:
    job = train_healthy(SyntheticJob(samples=32))
    job.slowdowns = {0: 1.5}
    for _ in range(3):
        job.observe()
    job.shares = np.array([24.0, 35.0, 35.0, 34.0])
    for _ in range(3):
        job.observe()
    assert job.estimator.workers.slow[0] > 0.95
    assert job.estimator.rank_levels[0] == pytest.approx(np.log(1.5), abs=0.05)


def test_the_fixed_part_is_learned_from_a_change_of_shares() -> None:
    job = train_healthy(SyntheticJob(samples=32, noise=0.005))
    old, job.shares = job.draw_steps(8), np.array([16.0, 37.0, 37.0, 38.0])
    old.compute_seconds[:, 0] += 0.1
    new = job.draw_steps(8)
    new.compute_seconds[:, 0] += 0.1  # a fixed part of a sixth, of the first rank only
    before = job.estimator
    job.estimator = before.probe_fixed_share((32, 32, 32, 32), (16, 37, 37, 38))
    assert job.estimator.probe_step == before.position + 5
    state = job.estimator.observe_steps(new.with_older(old, 64), job.now)
    assert state.fixed_share > before.fixed_share + 0.02
    assert state.fixed_share_variance < before.fixed_share_variance
    assert state.probe_step is None


def test_a_new_worker_begins_as_healthy_and_the_others_stay_known() -> None:
    job = train_healthy(SyntheticJob())
    job.slowdowns = {0: 1.5, 2: 1.5}
    for _ in range(4):
        job.observe()
    job.estimator = job.estimator.begin_round((2,), job.now)
    assert job.estimator.workers.slow[2] == 0.0
    assert job.estimator.workers.slow[0] > 0.95
    job.slowdowns, job.step = {0: 1.5}, 0
    job.observe()
    assert job.estimator.workers.slow[0] > 0.95, "steps of the new round count, with their own numbers"


def test_ranks_that_differ_by_nature_are_not_slow() -> None:
    job = SyntheticJob(ranks=4, slowdowns={1: 1.02}, noise=0.01)
    train_healthy(job)
    for _ in range(60):
        job.observe_means()
    assert job.estimator.workers.slow.max() < 0.5
    assert job.estimator.noise.offsets[1] > 0.005


def test_ranks_of_a_monitored_script_may_differ_by_any_level() -> None:
    job = SyntheticJob(managed=False, slowdowns={0: 1.5})
    train_healthy(job)
    assert job.estimator.workers.slow.max() < 0.05
    job.slowdowns = {0: 1.5, 2: 1.3}
    for _ in range(3):
        job.observe()
    assert job.estimator.workers.slow[2] > 0.95
    assert job.estimator.workers.slow[0] < 0.05


def test_a_rank_of_a_monitored_script_that_is_slow_before_the_estimator_begins_is_found() -> None:
    """As after a change of the operator's leader. Its first steps show that it does not differ by nature."""
    job = SyntheticJob(managed=False, slowdowns={0: 1.5})
    job.train_unobserved()
    job.slowdowns = {0: 1.5, 2: 1.5}
    onset = job.now
    for _ in range(2):
        job.observe()
    assert job.estimator.workers.slow[2] > 0.95
    assert np.delete(job.estimator.workers.slow, 2).max() < 0.05
    assert job.estimator.rank_levels[2] == pytest.approx(np.log(1.5), abs=0.04)
    assert job.estimator.workers.slow_onsets[2] <= onset + STEP_SECONDS
    job.slowdowns = {0: 1.5}
    for _ in range(2):
        job.observe()
    assert job.estimator.workers.slow.max() < 0.05, "it has recovered"


@pytest.mark.parametrize("knows_first", [False, True])
def test_the_first_steps_of_a_monitored_script_do_not_tell_its_ranks_apart_exactly(*, knows_first: bool) -> None:
    """With correlated noise, their mean is far from that of all later steps. The difference is no fault."""
    certain = 0
    for seed in range(12):
        job = SyntheticJob(managed=False, noise=0.03, autocorrelation=0.9, seed=seed)
        if knows_first:
            job.train_unobserved()
        train_healthy(job)
        for _ in range(30):
            job.observe_means()
            if job.estimator.wants_steps:
                job.observe()
            certain += bool(job.estimator.workers.slow.max() > 0.95)
    assert certain == 0


def test_what_has_a_probability_of_95_percent_is_false_in_5_percent() -> None:
    """Jobs drawn from the prior, with faults so frequent that many are in doubt. All passes of all workers count."""
    parameters = EstimatorParameters(faults_per_day=86_400 / 20.0, correlation=1.0)
    probabilities, truth = [], []
    rng = np.random.default_rng(7)
    for seed in range(60):
        job = SyntheticJob(ranks=4, noise=0.05, parameters=parameters, seed=seed)
        train_healthy(job, 3)
        job.estimator = replace(job.estimator, workers=job.estimator.workers.reset())
        for _ in range(24):
            elapsed = 4 * STEP_SECONDS
            begins = rng.random(4) < -np.expm1(-elapsed / 20.0 / 4)
            levels = rng.choice(LEVELS, 4, p=LEVEL_PRIOR)
            ends = rng.random(4) < elapsed / (elapsed + parameters.fault_duration_scale_seconds)
            for rank in range(4):
                if rank in job.slowdowns and ends[rank]:
                    job.slowdowns = {r: s for r, s in job.slowdowns.items() if r != rank}
                elif rank not in job.slowdowns and begins[rank] and len(job.slowdowns) < 2:
                    job.slowdowns = {**job.slowdowns, rank: float(np.exp(levels[rank]))}
            job.observe(4)
            probabilities.append(job.estimator.workers.slow)
            truth.append([rank in job.slowdowns for rank in range(4)])
    found, is_slow = np.concatenate(probabilities), np.concatenate(truth)
    for low, high in ((0.0, 0.05), (0.05, 0.5), (0.5, 0.95), (0.95, 1.0)):
        of_these = (found >= low) & (found <= high)
        assert of_these.sum() > 100
        assert is_slow[of_these].mean() == pytest.approx(found[of_these].mean(), abs=0.12 if high - low > 0.1 else 0.05)

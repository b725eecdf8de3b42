"""Decisions about watched jobs: they are observed, and nothing is done."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.failures.gpu_health import GpuSign
from pacekeeper_analysis.profiling.localize import Localization
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_operator.api.training_job import JobKind
from pacekeeper_operator.decide import CHECKS, STEPS
from pacekeeper_operator.decide.effects import LocalizeProfile, SaveProfile, WriteIncident
from pacekeeper_operator.decide.watched import evaluate
from pacekeeper_operator.decide.watched.evaluate import (
    WATCHED_CHECKS,
    WATCHED_STEPS,
    evaluate_watched_job,
    list_watched_effects,
)
from pacekeeper_operator.runtime.watched_jobs import build_watch_policy
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.effect_results import LocalizedProfile
from pacekeeper_operator.state.job_metrics import GpuValue, JobMetrics
from pacekeeper_operator.state.job_requests import JobRequests
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.straggler_estimate import EstimatedFault, FaultEstimate, StragglerEstimate
from testing.network.link_evidence import build_mesh
from testing.operators.observations import (
    NOW,
    build_crash,
    build_job,
    build_stall,
    build_training,
    change_members,
    change_worker,
)

POLICY = build_watch_policy(Settings())
POLICIES = tuple(
    build_watch_policy(Settings(watch_links=links, watch_profiles=profiles))
    for links in (False, True)
    for profiles in (False, True)
)


def draw_faults(rng: random.Random) -> tuple[FaultReport, ...]:
    """Draw reports of any kind by any of the workers, or by one that the job does not have."""
    faults = []
    for number in range(rng.randrange(8)):
        worker, rank = rng.choice(["j-w0-0", "j-w1-0", "j-w2-0", "j-w3-0", "other"]), rng.randrange(4)
        noticed_at = NOW - rng.choice([0.1, 5.0, 100.0, -50.0])
        kind = rng.choice(list(FaultKind))
        if kind is FaultKind.RANK_FAILED:
            fault = build_crash(worker, rank, rng.randrange(1, 3), exit_code=rng.choice([1, -9, 137]))
        elif kind is FaultKind.STALLED:
            fault = build_stall(worker, rank, culprit=rng.random() < 0.5)
        else:
            fault = FaultReport("", kind, worker, 1, noticed_at, xid=rng.choice([0, 48, 79, 13]))
        faults.append(
            replace(fault, name=f"{worker}-{number}", noticed_at=noticed_at, out_of_memory=rng.random() < 0.2)
        )
    return tuple(faults)


def draw_observation(seed: int) -> Observation:
    """Draw what may be observed of a job of four ranks."""
    rng = random.Random(seed)
    job = replace(build_job(4, 0), kind=JobKind.WATCHED_JOB)
    observation = build_training(4, rng.randrange(2), job=job)
    faults = draw_faults(rng) if rng.random() < 0.6 else ()
    observation = replace(observation, faults=faults, clock_agrees=rng.random() < 0.9)
    if rng.random() < 0.3:
        observation = change_members(observation, state=rng.choice(list(LauncherState)))
    if rng.random() < 0.3:
        observation = change_worker(observation, "j-w1-0", gone=rng.random() < 0.5, pod={"phase": "Failed"})
    if rng.random() < 0.7:
        probability, slowdown = rng.choice([0.3, 0.7, 0.99]), 1 + rng.random() * 3
        estimates = [
            FaultEstimate(fault, probability, slowdown, NOW - 60, rng.randrange(4), rng.choice([None, slowdown]))
            for fault in EstimatedFault
        ]
        estimate = StragglerEstimate(tuple(estimates), wants_steps=rng.random() < 0.5)
        observation = replace(observation, estimate=estimate)
    if rng.random() < 0.3:
        values = tuple(
            GpuValue(f"node-{rng.randrange(4)}", "0", metric, 79.0, trusted=True)
            for metric in ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL")
        )
        signs = tuple(GpuValue(f"node-{rng.randrange(4)}", "0", sign, 3.0, trusted=True) for sign in GpuSign)
        metrics = JobMetrics(step_seconds=0.1, gpu_values=values, gpu_signs=signs, queried_at=NOW)
        observation = replace(observation, metrics=metrics)
    return observation


def build_localized_profile(requests: JobRequests) -> LocalizedProfile | None:
    """Return a result of the open profile window; None: there is none."""
    finding = Finding(FaultClass.CODE, "train.py:load", (Signal(SignalKind.PROFILE, "it takes the time"),))
    localization = Localization(finding, step_seconds=0.15, excess_seconds=0.05, reported=4, expected=4)
    return None if requests.profile is None else LocalizedProfile(requests.profile.name, localization, "page")


def test_whatever_is_observed_nothing_is_done_but_write_incidents() -> None:
    incidents = link_requests = profile_requests = 0
    for seed in range(100):
        observation = draw_observation(seed)
        for _ in range(3):
            policy = POLICIES[seed % len(POLICIES)]
            result = evaluate_watched_job(observation, policy)
            assert result.failed_steps == (), seed
            effects = list_watched_effects(result.observation, {})
            allowed = {WriteIncident, LocalizeProfile, SaveProfile} if policy.observes_profiles else {WriteIncident}
            assert {type(effect) for effect in effects} <= allowed, seed
            assert result.desired.plan == observation.plan, "it only describes"
            before, after = observation.state, result.desired.state
            assert (after.placement, after.budget, after.adaptation, after.preflight) == (
                before.placement,
                before.budget,
                before.adaptation,
                before.preflight,
            )
            assert policy.observes_profiles or after.profiling == before.profiling
            requests = result.desired.requests
            asks_links = EvidencePart.LINKS in requests.evidence_parts
            assert policy.observes_links or not asks_links
            link_requests += asks_links
            assert policy.observes_profiles or requests.profile is None
            profile_requests += requests.profile is not None
            assert (requests.probe, after.incidents.quarantine_requests) == (None, ())
            assert all(incident.applied is None for incident in after.incidents.current), seed
            incidents += len(effects)
            evidence = tuple(
                replace(answer, request=requests.evidence_name)
                for answer in (build_mesh(4, seed % 4) if asks_links else ())
            )
            observation = replace(
                result.observation,
                now=result.observation.now + 10,
                evidence=evidence,
                localized_profile=build_localized_profile(requests) if seed % 2 else None,
                profile_answers=4 if requests.profile is not None else 0,
            )
    assert incidents > 50, "otherwise the test shows nothing"
    assert min(link_requests, profile_requests) > 3, "otherwise it shows nothing of links and profiles"


@pytest.mark.parametrize("name", ["checks", "rounds", "verify"])
def test_a_step_that_fails_loses_only_its_own_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_observation: Observation, _policy: object) -> None:
        raise RuntimeError("broken")

    steps = tuple((step_name, fail if step_name == name else step) for step_name, step in WATCHED_STEPS)
    monkeypatch.setattr(evaluate, "WATCHED_STEPS", steps)
    result = evaluate_watched_job(draw_observation(1), POLICY)
    assert result.failed_steps == (f"{name}: RuntimeError('broken')",)


def test_no_check_of_watched_jobs_places_or_moves_anything() -> None:
    """A new check of TrainingJobs is no check of watched jobs, unless it is added there."""
    shared = {check.__name__ for check in CHECKS} & {check.__name__ for check in WATCHED_CHECKS}
    assert shared == {
        *("check_gpu_errors", "check_crashes", "check_hangs", "check_gpu_warnings"),
        "check_profile",  # it finds something only where the platform takes profiles
    }
    assert len(WATCHED_STEPS) < len(STEPS)

"""The remaining time in a status, compared with the end of the job; by the real operator."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.api.formats import parse_duration
from pacekeeper_operator.api.training_job import JobPhase, JobStatus
from pacekeeper_operator.decide.lifecycle import status as statuses
from pacekeeper_operator.decide.lifecycle.progress import ROUNDING_STEPS
from simulation.faults.people import JobFinishes
from simulation.faults.ranks import RankCrashes
from simulation.faults.triggers import AtTime
from simulation.generator import OPERATOR_SETTINGS
from simulation.run import run_schedule
from simulation.schedule import Aim, FaultInjection, Schedule
from simulation.simulated_job import SimulatedJob
from simulation.world import EPOCH, WorldSettings

STEPS = 200
CRASHES = (50.0, 75.0, 100.0, 125.0, 150.0)


@pytest.mark.parametrize("crashes", [(), CRASHES], ids=["steady", "interrupted"])
def test_the_estimate_at_half_time_is_right_within_a_fifth(
    crashes: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining: list[tuple[float, JobStatus]] = []
    real = statuses.build_job_status

    def report(observation: Any, *rest: Any) -> JobStatus:
        status = real(observation, *rest)
        remaining.append((observation.now - EPOCH, status))
        return status

    monkeypatch.setattr(statuses, "build_job_status", report)
    monkeypatch.setattr("simulation.run.MIN_RUN_SECONDS", 250.0)  # the job is complete by then
    monkeypatch.setattr("simulation.run.HEALED_BY_SECONDS", 200.0)
    strokes = (
        FaultInjection(AtTime(20.0), JobFinishes(steps=STEPS)),
        *(FaultInjection(AtTime(at), RankCrashes(index=1)) for at in crashes),
    )
    jobs = (SimulatedJob(replicas=3, spares=1, spec={"remediation": {"maxRestarts": 100}}),)
    outcome = run_schedule(Schedule(5, Aim.SAFETY, WorldSettings(nodes=8, operator=OPERATOR_SETTINGS), jobs, strokes))
    assert outcome.violations == ()
    assert outcome.restarts == len(crashes)
    completed_at = next(at for at, status in remaining if status.phase is JobPhase.COMPLETE)
    started_at = next(at for at, status in remaining if status.phase is JobPhase.RUNNING)
    at, half = next(
        (at, status) for at, status in remaining if at >= (started_at + completed_at) / 2 and status.remaining
    )
    left, rounding = completed_at - at, ROUNDING_STEPS[0][1] / 2
    assert abs(parse_duration(half.remaining or "") - left) <= 0.2 * left + rounding

"""Real ranks that become slow, under real sidecars and the operator's real decisions, without Prometheus.

What their samples take passes by a fake clock, so that a busy machine makes no rank slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.training_job import DetectionSpec, Remedy, TrainingJob
from testing.operators.observations import build_job
from testing.operators.operator_harness import run_operator_harness
from testing.training.launchers import LauncherTeam, create_team

SCRIPT = Path(__file__).parents[2] / "testing" / "scripts" / "slowed.py"
SECONDS_A_SAMPLE = 0.02
STEP_SECONDS = 0.05
"""That really pass."""
HEALTHY_STEPS = 100
SLOW_RANK = 2
PATIENCE = 300.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[LauncherTeam]:
    """Four, each with a rank that takes 16 samples a step."""
    with create_team(tmp_path, script=SCRIPT) as found:
        found.environment |= {"SECONDS_A_SAMPLE": str(SECONDS_A_SAMPLE), "FAKE_CLOCK": str(STEP_SECONDS)}
        for name in "abcd":
            found.start(name)
        yield found


def build_wanted_job() -> TrainingJob:
    return build_job(4, 0, detection=DetectionSpec(straggler_slowdown=1.25, window_steps=16))


async def test_a_slow_rank_is_found_and_remedied_in_seconds_and_a_healthy_job_is_not_touched(
    workers: LauncherTeam,
) -> None:
    async with run_operator_harness(workers, build_wanted_job()) as operator:
        await operator.wait_until(
            lambda: (operator.observation.progress.step or 0) >= HEALTHY_STEPS, "healthy steps", PATIENCE
        )
        assert not operator.incidents
        condition = next(c for c in operator.status.conditions if c.type == JobCondition.METRICS_AVAILABLE)
        assert "prometheus.url" in (condition.message or "")
        (workers.folder / f"seconds-{SLOW_RANK}").write_text(str(SECONDS_A_SAMPLE / 0.5))
        await operator.wait_until(lambda: operator.incidents, "an incident", PATIENCE)
        (incident,) = operator.incidents
        assert (incident.cause, incident.rank, incident.remedy) == (
            IncidentCause.STRAGGLER,
            SLOW_RANK,
            Remedy.REBALANCE,
        )
        await operator.wait_until(lambda: operator.incidents[0].outcome, "its outcome", PATIENCE)
        assert operator.incidents[0].outcome in (IncidentOutcome.RECOVERED, IncidentOutcome.MITIGATED)

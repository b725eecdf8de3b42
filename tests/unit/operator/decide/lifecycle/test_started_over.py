"""Training that started over: when it is an Incident, and which cause and remedy it names."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.training_job import CheckpointSpec, JobStatus, RemediationMode, ResumePoint
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle import started_over, status
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members, list_decisions


def begin_round(
    restored_step: int | None, checkpoint_step: int | None = None, error: str = "", **checkpoint: Any
) -> Observation:
    """The second round has completed a step; the first one had completed step 500."""
    job = build_job(checkpoint=CheckpointSpec(**checkpoint))
    observation = change_members(build_training(job=job), round=2, start={"first_step_at": None})
    observation = observation.with_desired(evaluate_job(observation, build_policy()).desired)
    return change_members(
        observation,
        start={"restored_step": restored_step, "first_step_at": NOW - 1, "origin": "NOTHING"},
        progress={"step": 1 + (restored_step or 0), "steps_in_round": 1},
        checkpoint={"step": checkpoint_step, "error": error},
    )


@pytest.mark.parametrize(
    ("observation", "cause"),
    [
        (begin_round(0), "/checkpoints.* is probably on no volume.*Set spec.checkpoint.uri"),
        (begin_round(0, uri="s3://bucket"), "found no checkpoint.*was not emptied or exchanged"),
        (begin_round(0, uri="s3://bucket", error="the bucket is full"), "could not be saved .the bucket is full"),
        (begin_round(0, checkpoint_step=400, uri="s3://bucket"), "step 400, and did not load it. Call job.restore"),
        (begin_round(0, uri="s3://bucket", read_only=True), "spec.checkpoint.readOnly is set"),
    ],
)
def test_training_that_started_over_is_an_incident_with_cause_and_remedy(observation: Observation, cause: str) -> None:
    decision = started_over.check_started_over(observation, build_policy())
    assert decision is not None
    assert decision.message.startswith("round 2 began from the start, although the job had completed step 500: ")
    with pytest.raises(AssertionError, match=cause):
        raise AssertionError(decision.message)


@pytest.mark.parametrize(
    "observation",
    [
        begin_round(490),
        begin_round(None),
        change_members(begin_round(0), start={"first_step_at": None}),
        begin_round(0, every_steps=501),
        build_training(),
    ],
    ids=["from a checkpoint", "unknown", "no step yet", "no checkpoint was due", "first round"],
)
def test_any_other_round_is_none(observation: Observation) -> None:
    assert started_over.check_started_over(observation, build_policy()) is None


@pytest.mark.parametrize("mode", [RemediationMode.ACT, RemediationMode.RECOMMEND])
def test_the_incident_is_recorded_once_and_closed(mode: RemediationMode) -> None:
    observation, policy = begin_round(0), build_policy(mode=mode)
    result = evaluate_job(observation, policy)
    (incident,) = [entry for entry in list_decisions(result) if entry.cause is IncidentCause.STARTED_OVER]
    assert (incident.outcome, incident.steps_lost, incident.remedy) == (IncidentOutcome.OBSERVED, 500, None)
    again = evaluate_job(result.observation, policy)
    assert len([i for i in again.desired.state.incidents.current if i.cause is IncidentCause.STARTED_OVER]) <= 1
    assert again.desired.state.incidents.open == ()


def test_the_status_shows_where_the_round_continued() -> None:
    before = JobStatus(resumed_from=ResumePoint(1, 0))
    found = status.build_job_status(begin_round(490), build_policy(), before)
    assert found.resumed_from == ResumePoint(2, 490, "Nothing")
    assert status.build_job_status(begin_round(None), build_policy(), before).resumed_from == before.resumed_from

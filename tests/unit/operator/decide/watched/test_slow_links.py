"""A slow link of a watched job: it is named where the connections show it, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pacekeeper_analysis.failures.finding import SignalKind
from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import JobKind
from pacekeeper_operator.decide.network.slow_communication import FRESH_LINK_EVIDENCE_SECONDS, THROUGHPUT_READY_SECONDS
from pacekeeper_operator.decide.watched.estimated_faults import describe_fault, identify_suspects
from pacekeeper_operator.decide.watched.evaluate import evaluate_watched_job
from pacekeeper_operator.runtime.watched_jobs import build_watch_policy
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.straggler_estimate import EstimatedFault, FaultEstimate, StragglerEstimate
from testing.network.link_evidence import build_mesh, build_ring
from testing.operators.observations import NOW, build_job, build_training, change_members

POLICY = build_watch_policy(Settings(watch_links=True))
SLOW_LINK = FaultEstimate(EstimatedFault.SLOW_LINK, 0.6, 1.8, NOW - 20, None, 1.8)


def build_slow(probability: float = 0.6) -> Observation:
    """Build a watched job of four pods with a slow link; from P = 0.95 on, it is worth an Incident."""
    observation = build_training(4, 0, job=replace(build_job(4, 0), kind=JobKind.WATCHED_JOB))
    return estimate(observation, probability)


def estimate(observation: Observation, probability: float) -> Observation:
    return replace(observation, estimate=StragglerEstimate((replace(SLOW_LINK, probability=probability),)))


def run_pass(observation: Observation, seconds: float = 1.0, answers: Sequence[Evidence] = ()) -> Observation:
    """Run one pass, `seconds` later, with these answers to the open request."""
    name = observation.requests.evidence_name
    evidence = tuple(replace(answer, request=name) for answer in answers)
    result = evaluate_watched_job(replace(observation, now=observation.now + seconds, evidence=evidence), POLICY)
    assert result.failed_steps == ()
    return result.observation


def find_incidents(observation: Observation) -> list[Incident]:
    return [i for i in observation.state.incidents.current if i.cause is IncidentCause.SLOW_COMMUNICATION]


@pytest.mark.parametrize(
    ("answers", "place", "worker", "culprit"),
    [
        (
            build_mesh(4, slow=2),
            "the slow sending side of rank 2 on j-w2-0 (node-2)",
            "j-w2-0",
            "the sender side of rank 2's worker",
        ),
        (
            build_ring(slow=2),
            "the slow path from rank 2 on j-w2-0 (node-2) to rank 3 on j-w3-0 (node-3)",
            None,
            "between rank 2 and rank 3",
        ),
    ],
    ids=["mesh", "ring"],
)
def test_the_incident_names_the_place_that_the_connections_show(
    answers: tuple[Evidence, ...], place: str, worker: str | None, culprit: str
) -> None:
    asked = run_pass(build_slow())
    assert asked.requests.evidence_parts == (EvidencePart.LINKS,)
    answered = run_pass(asked, answers=answers)
    assert describe_fault(answered, SLOW_LINK).startswith(f"{place} makes steps 1.80 × as long")
    assert answered.requests.evidence is None
    assert identify_suspects(answered) != identify_suspects(asked)
    assert identify_suspects(answered) == identify_suspects(estimate(answered, 0.97))
    (incident,) = find_incidents(run_pass(estimate(answered, 0.97)))
    assert incident.message == f"{place} makes steps 1.80 × as long"
    assert (incident.worker, incident.remedy) == (worker, None)
    assert incident.finding is not None
    assert incident.finding.culprit == culprit


def test_an_incident_that_is_open_gets_its_place_once() -> None:
    opened = run_pass(build_slow(0.97))
    (incident,) = find_incidents(opened)
    assert incident.message == "a slow link makes steps 1.80 × as long"
    named = run_pass(opened, answers=build_mesh(4, slow=2))
    for _ in range(3):
        (incident,) = find_incidents(named)
        assert incident.finding is not None
        assert incident.finding.culprit == "the sender side of rank 2's worker"
        assert SignalKind.TRANSPORT in incident.finding.signal_kinds
        assert "interface" in incident.finding.advice
        assert sum(text.startswith("all that rank 2 sends") for text in incident.evidence) == 1
        named = run_pass(named)


@pytest.mark.parametrize(
    "answers",
    [build_mesh(4, slow=2)[:3], build_ring(slow=2, quiet=True), build_ring()],
    ids=["a pod without an answer", "no traffic", "equal links"],
)
def test_without_evidence_no_place_is_named(answers: tuple[Evidence, ...]) -> None:
    answered = run_pass(run_pass(build_slow(0.97)), answers=answers)
    (incident,) = find_incidents(answered)
    assert incident.finding is not None
    assert (incident.finding.culprit, incident.finding.signal_kinds) == ("", frozenset({SignalKind.TIMES}))
    assert describe_fault(answered, SLOW_LINK) == "a slow link makes steps 1.80 × as long"


def test_it_asks_again_while_the_place_is_not_known_and_then_less_often() -> None:
    asked = run_pass(build_slow())
    first = asked.requests.evidence_name
    late = run_pass(asked, THROUGHPUT_READY_SECONDS + 1)
    assert late.requests.evidence is None, "a pod that does not answer blocks no other request"
    again = run_pass(late)
    assert again.requests.evidence_name not in ("", first)
    answered = run_pass(again, answers=build_mesh(4, slow=2))
    assert run_pass(answered, THROUGHPUT_READY_SECONDS + 1).requests.evidence is None
    fresh = run_pass(answered, FRESH_LINK_EVIDENCE_SECONDS)
    assert fresh.requests.evidence_parts == (EvidencePart.LINKS,)
    quiet = run_pass(fresh, answers=build_ring(slow=2, quiet=True))
    assert "rank 2" in describe_fault(quiet, SLOW_LINK), "too little traffic shows nothing"


def test_what_is_known_of_a_slow_link_ends_with_it_and_with_the_round() -> None:
    named = run_pass(run_pass(build_slow()), answers=build_mesh(4, slow=2))
    assert named.requests.link_check is not None
    assert run_pass(estimate(named, 0.1)).requests.link_check is None
    restarted = change_members(named, start=replace(named.progress.heartbeats[0].start, first_step_at=NOW + 5))
    assert run_pass(restarted, 10).requests.link_check is None


def test_nothing_is_asked_unless_links_are_enabled_and_one_is_probable() -> None:
    for policy, observation in (
        (build_watch_policy(Settings()), build_slow(0.97)),
        (POLICY, build_slow(0.3)),
        (POLICY, replace(build_slow(), estimate=None)),
    ):
        result = evaluate_watched_job(observation, policy)
        assert result.desired.requests.evidence is None

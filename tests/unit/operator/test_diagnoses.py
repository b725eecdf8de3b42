"""Each Incident about slowness or a hang names class, culprit, and evidence of at least two kinds, and the confidence
in that evidence, regardless of which decision opened it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.failures.confidence import MEASURED_CONFIDENCE, estimate_confidence
from pacekeeper_analysis.failures.finding import FaultClass
from pacekeeper_analysis.profiling.localize import localize_fault
from pacekeeper_analysis.protocol.requests import ProfileRequest
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.stragglers import profile
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.effect_results import LocalizedProfile
from pacekeeper_operator.state.job_requests import ProfileWindow
from testing.operators.observations import NOW, build_policy, build_stalls, build_training, list_decisions
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern
from tests.unit.operator.test_adapting import OWN, STEPS, WELL, evaluate_after_metrics, slow_ranks_in_turn

TURNS = slow_ranks_in_turn(1.0)
LENGTHS = np.rint(np.random.default_rng(1).lognormal(6.0, 0.8, (STEPS, 4, 8)))
SQUARES = np.square(LENGTHS).sum(axis=2)


def build_slow_incident(metrics: Any = None, **windows_options: Any) -> Callable[[], Incident]:
    """Build the incident of four ranks with such windows."""

    def incident() -> Incident:
        result, _ = (
            evaluate_after_metrics(metrics, **windows_options) if metrics else evaluate_after_metrics(**windows_options)
        )
        (found,) = list_decisions(result)
        return found

    return incident


def build_hang_incident(culprit: int) -> Callable[[], Incident]:
    """Build the incident of a hang where rank `culprit` is stopped; -1: all ranks wait for each other."""

    def incident() -> Incident:
        observation = build_training()
        faults = build_stalls(observation, culprit)
        if culprit < 0:
            faults = tuple(replace(f, ranks=tuple(replace(r, waiting_seconds=60.0) for r in f.ranks)) for f in faults)
        (found,) = list_decisions(evaluate_job(replace(observation, faults=faults), build_policy()))
        return found

    return incident


def build_profile_incident(*works: Mapping[Any, float]) -> Callable[[], Incident]:
    """Build the incident of a profile window whose ranks spend these seconds per step."""

    def incident() -> Incident:
        step = max(sum(seconds_by_activity.values()) for seconds_by_activity in works) + 0.02
        now = [build_pattern(rank, seconds_by_activity, step) for rank, seconds_by_activity in enumerate(works)]
        before = [build_pattern(rank, HEALTHY_WORK, sum(HEALTHY_WORK.values()) + 0.02) for rank in range(len(works))]
        found = localize_fault(build_answers(now, before), len(works))
        observation = build_training()
        request, window = ProfileRequest("profile-7", 600, 32, 20.0), ProfileWindow(NOW - 30, NOW + 30, round=1)
        desired = observation.desired.with_requests(profile=request, profile_window=window)
        observation = observation.with_desired(desired)
        (decision,) = list_decisions(
            evaluate_job(
                replace(observation, profile_answers=4, localized_profile=LocalizedProfile("profile-7", found, "{}")),
                build_policy(),
            )
        )
        return decision

    return incident


INCIDENTS: Mapping[IncidentCause, tuple[Callable[[], Incident], ...]] = {
    IncidentCause.HANG: (build_hang_incident(2), build_hang_incident(-1)),
    IncidentCause.STRAGGLER: (build_slow_incident(replace(WELL, relative_time=2.0), own=(OWN, OWN, 2 * OWN, OWN)),),
    IncidentCause.SLOW_COMMUNICATION: (build_slow_incident(exposed=0.25),),
    IncidentCause.VOLATILE: (build_slow_incident(drawn=TURNS),),
    IncidentCause.GARBAGE_COLLECTION: (
        build_slow_incident(exposed=0.02, garbage={rank: range(2 * rank, STEPS, 8) for rank in range(4)}),
    ),
    IncidentCause.UNEVEN_LENGTHS: (
        build_slow_incident(replace(WELL, wait_share=0.3), lengths=LENGTHS, drawn=SQUARES / SQUARES.mean()),
    ),
    IncidentCause.SLOW_STEPS: (
        build_profile_incident(HEALTHY_WORK, HEALTHY_WORK, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, HEALTHY_WORK),
        build_profile_incident(*[{**HEALTHY_WORK, SLOW_FUNCTION: 0.2}] * 4),
    ),
}
NAMES_NO_CULPRIT_YET = frozenset({IncidentCause.SLOW_COMMUNICATION, IncidentCause.VOLATILE})
"""Causes whose culprit is known only after link samples or a profile window."""


def test_no_cause_is_left_out() -> None:
    assert set(INCIDENTS) == profile.SLOWNESS_CAUSES | {IncidentCause.HANG, IncidentCause.SLOW_STEPS}


@pytest.mark.parametrize(
    ("cause", "produce"), [(cause, produce) for cause, each in INCIDENTS.items() for produce in each]
)
def test_an_incident_names_class_culprit_and_evidence(cause: IncidentCause, produce: Callable[[], Incident]) -> None:
    incident = produce()
    found = incident.finding
    assert incident.cause is cause
    assert found is not None
    assert len(found.signal_kinds) >= 2
    assert all(witness.message for witness in found.signals)
    assert found.culprit or cause in NAMES_NO_CULPRIT_YET
    assert found.confidence == estimate_confidence(found.fault, [kind.value for kind in found.signal_kinds])


def test_an_incident_without_a_class_has_no_confidence() -> None:
    assert FaultClass.UNKNOWN not in {fault_class for fault_class, _ in MEASURED_CONFIDENCE}
    found = build_hang_incident(2)().finding
    assert found is not None
    assert (found.fault, found.culprit, found.confidence) == (FaultClass.UNKNOWN, "rank 2", None)

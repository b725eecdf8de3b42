"""What every Incident about slowness or a hang says of its fault, whoever decided it: class, culprit, evidence of two
kinds at least, and how often such evidence was right where it was tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.behaviour.localise import localise
from pacekeeper_analysis.diagnose.confidence import MEASURED, confidence
from pacekeeper_analysis.diagnose.finding import FaultClass
from pacekeeper_analysis.plan import Profile
from pacekeeper_operator.api import Cause
from pacekeeper_operator.decide import profile
from pacekeeper_operator.decide.think import think
from pacekeeper_operator.observation import Localised
from pacekeeper_operator.state import Incident
from tests.support.patterns import SLOW, WORK, answers, pattern
from tests.support.worlds import NOW, decisions, policy, stalls, training
from tests.unit.operator.test_adapting import OWN, STEPS, WELL, decided, in_turns

TURNS = in_turns(1.0)
LENGTHS = np.rint(np.random.default_rng(1).lognormal(6.0, 0.8, (STEPS, 4, 8)))
SQUARES = np.square(LENGTHS).sum(axis=2)


def slow(metrics: Any = None, **of_windows: Any) -> Callable[[], Incident]:
    """The incident of four ranks with such windows."""

    def incident() -> Incident:
        thought, _ = decided(metrics, **of_windows) if metrics else decided(**of_windows)
        (found,) = decisions(thought)
        return found

    return incident


def hung(culprit: int) -> Callable[[], Incident]:
    """Rank `culprit` is stopped; -1: all wait for each other."""

    def incident() -> Incident:
        world = training()
        faults = stalls(world, culprit)
        if culprit < 0:
            faults = tuple(replace(f, ranks=tuple(replace(r, waiting_seconds=60.0) for r in f.ranks)) for f in faults)
        (found,) = decisions(think(replace(world, faults=faults), policy()))
        return found

    return incident


def looked_at(*works: Mapping[Any, float]) -> Callable[[], Incident]:
    """What a behaviour window of ranks with these works, a step, comes to."""

    def incident() -> Incident:
        step = max(sum(work.values()) for work in works) + 0.02
        now = [pattern(rank, work, step) for rank, work in enumerate(works)]
        before = [pattern(rank, WORK, sum(WORK.values()) + 0.02) for rank in range(len(works))]
        found = localise(answers(now, before), len(works))
        world = training()
        draft = world.draft.with_plan(profile=Profile("profile-7", 600, 32, 20.0))
        world = world.with_draft(draft.with_profiling(asked_at=NOW - 30, until=NOW + 30, round=1))
        (said,) = decisions(think(replace(world, patterns=4, localised=Localised("profile-7", found, "{}")), policy()))
        return said

    return incident


INCIDENTS: Mapping[Cause, tuple[Callable[[], Incident], ...]] = {
    Cause.HANG: (hung(2), hung(-1)),
    Cause.STRAGGLER: (slow(replace(WELL, pace=2.0), own=(OWN, OWN, 2 * OWN, OWN)),),
    Cause.SLOW_COMMUNICATION: (slow(exposed=0.25),),
    Cause.VOLATILE: (slow(drawn=TURNS),),
    Cause.GARBAGE: (slow(exposed=0.02, garbage={rank: range(2 * rank, STEPS, 8) for rank in range(4)}),),
    Cause.UNEVEN_LENGTHS: (slow(replace(WELL, waiting=0.3), lengths=LENGTHS, drawn=SQUARES / SQUARES.mean()),),
    Cause.SLOW_STEPS: (looked_at(WORK, WORK, {**WORK, SLOW: 0.2}, WORK), looked_at(*[{**WORK, SLOW: 0.2}] * 4)),
}
NAMES_NOBODY_YET = frozenset({Cause.SLOW_COMMUNICATION, Cause.VOLATILE})
"""Where connections, or a behaviour window, are still to tell."""


def test_no_cause_is_left_out() -> None:
    assert set(INCIDENTS) == profile.SLOWNESS | {Cause.HANG, Cause.SLOW_STEPS}


@pytest.mark.parametrize(
    ("cause", "produce"), [(cause, produce) for cause, each in INCIDENTS.items() for produce in each]
)
def test_it_says_class_culprit_and_by_what(cause: Cause, produce: Callable[[], Incident]) -> None:
    incident = produce()
    found = incident.finding
    assert incident.cause is cause
    assert found is not None
    assert len(found.kinds) >= 2
    assert all(witness.words for witness in found.witnesses)
    assert found.culprit or cause in NAMES_NOBODY_YET
    assert found.confidence == confidence(found.fault, [kind.value for kind in found.kinds])


def test_what_claims_no_class_claims_no_confidence() -> None:
    assert FaultClass.UNKNOWN not in {of for of, _ in MEASURED}
    found = hung(2)().finding
    assert found is not None
    assert (found.fault, found.culprit, found.confidence) == (FaultClass.UNKNOWN, "rank 2", None)

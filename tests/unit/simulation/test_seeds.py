"""Whole runs: the real operator under faults that a seed draws."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.services.probe_check import CIRCLE
from simulation import batch
from simulation.faults.fault import Which
from simulation.faults.machines import PowerFails
from simulation.faults.moments import AfterWrite, At
from simulation.faults.operators import OperatorFrozen, OperatorKilled
from simulation.generator import OPERATOR, generate
from simulation.run import run
from simulation.schedule import SECONDS, Aim, JobSettings, Schedule, Stroke
from simulation.world import WorldSettings

CALM = Schedule(5, world=WorldSettings(nodes=5, operator=OPERATOR), jobs=(JobSettings(replicas=2, spares=1),))


def test_a_run_is_a_function_of_its_seed_whatever_hashes_are() -> None:
    """A batch compares runs in two processes, whose hashes differ; this process is one of them."""
    with batch._hand(0) as other:
        there = other.submit(run, generate(3))
        outcome = run(generate(3))
        assert batch.compared(outcome, there.result()).violations == ()
    (violation,) = batch.compared(outcome, replace(outcome, digest="another")).violations
    assert violation.rule == "a run is a function of its seed"


def test_where_nothing_goes_wrong_nothing_is_done() -> None:
    outcome = run(CALM, story=True)
    assert outcome.violations == ()
    assert SECONDS <= outcome.virtual_seconds < SECONDS + 20
    assert "phase Running" in outcome.coverage
    assert not [what for what in outcome.coverage if what.startswith(("cause", "remedy", "quarantine"))]
    made = [line for line in outcome.story if "is made" in line and " pod " in line]
    known_good = [line for line in made if f" pod {CIRCLE}-" in line]
    assert (len(made) - len(known_good), len(known_good)) == (3, 1), "workers, and whether probe pods can pass"


def test_a_lost_node_is_made_good_and_the_story_tells_how() -> None:
    outcome = run(replace(CALM, strokes=(Stroke(At(40.0), PowerFails(), 90.0),)), story=True)
    assert outcome.violations == ()
    assert {"cause node-lost", "outcome Recovered", "check node_lost", "step membership"} <= outcome.coverage
    told = "\n".join(outcome.story)
    assert told.index("stroke 0: at seconds=40.0: power-fails for 90 s") < told.index("loses power")
    assert told.index("loses power") < told.index("outcome: Recovered")


def test_an_operator_that_stays_frozen_is_survived_by_another() -> None:
    """In a run for liveness what never heals is not healed at the end."""
    frozen = Stroke(At(40.0), OperatorFrozen(which=Which.LEADER), None)
    schedule = replace(CALM, aim=Aim.LIVENESS, world=replace(CALM.world, operators=2), strokes=(frozen,))
    outcome = run(schedule, story=True)
    assert outcome.violations == ()
    assert not [line for line in outcome.story if "runs on" in line]


def test_an_operator_killed_after_its_write_goes_on_from_it() -> None:
    outcome = run(replace(CALM, strokes=(Stroke(AfterWrite(4), OperatorKilled()),)), story=True)
    assert outcome.violations == ()
    assert sum("leads" in line for line in outcome.story) == 2

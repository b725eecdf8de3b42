"""Whole runs: the real operator under faults that a seed draws."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_operator.services.probe_check import CIRCLE
from simulation import batch
from simulation.faults.machines import PowerFails
from simulation.faults.operators import OperatorKilled, OperatorPaused
from simulation.faults.people import JobSuspended
from simulation.faults.targets import OperatorTarget
from simulation.faults.triggers import AfterWrite, AtTime
from simulation.generator import OPERATOR_SETTINGS, generate_schedule
from simulation.run import run_schedule
from simulation.schedule import MIN_RUN_SECONDS, Aim, FaultInjection, Schedule
from simulation.simulated_job import SimulatedJob
from simulation.world import WorldSettings

CALM = Schedule(5, world=WorldSettings(nodes=5, operator=OPERATOR_SETTINGS), jobs=(SimulatedJob(replicas=2, spares=1),))


def test_a_run_is_a_function_of_its_seed_for_any_hashes() -> None:
    """A batch compares runs in two processes, whose hashes differ; this process is one of them."""
    with batch._start_executor(0) as other:
        there = other.submit(run_schedule, generate_schedule(3))
        outcome = run_schedule(generate_schedule(3))
        assert batch.compare_outcomes(outcome, there.result()).violations == ()
    (violation,) = batch.compare_outcomes(outcome, replace(outcome, digest="another")).violations
    assert violation.rule == "a run is a function of its seed"


def test_without_faults_the_operator_takes_no_action() -> None:
    outcome = run_schedule(CALM, keep_log=True)
    assert outcome.violations == ()
    assert MIN_RUN_SECONDS <= outcome.virtual_seconds < MIN_RUN_SECONDS + 20
    assert "phase Running" in outcome.coverage
    assert not [what for what in outcome.coverage if what.startswith(("cause", "remedy", "quarantine"))]
    made = [line for line in outcome.log if "is made" in line and " pod " in line]
    known_good = [line for line in made if f" pod {CIRCLE}-" in line]
    assert (len(made) - len(known_good), len(known_good)) == (3, 1), "workers, and whether probe pods can pass"


def test_a_lost_node_is_replaced_and_the_log_shows_how() -> None:
    outcome = run_schedule(replace(CALM, injections=(FaultInjection(AtTime(40.0), PowerFails(), 90.0),)), keep_log=True)
    assert outcome.violations == ()
    assert {"cause node-lost", "outcome Recovered", "check node_lost", "step membership"} <= outcome.coverage
    message = "\n".join(outcome.log)
    assert message.index("stroke 0: at-time seconds=40.0: power-fails for 90 s") < message.index("loses power")
    assert message.index("loses power") < message.index("outcome: Recovered")


def test_a_checkpoint_server_is_replaced_and_ends_with_its_workers() -> None:
    """The worker's node loses power, then the one that it shares with the server. Then the job is suspended."""
    checkpoint = {"volumeClaimName": "claim", "accessMode": "ReadWriteOnce"}
    job = SimulatedJob(replicas=1, spares=0, spec={"checkpoint": checkpoint})
    injections = (
        FaultInjection(AtTime(40.0), PowerFails(), 60.0),
        FaultInjection(AtTime(130.0), PowerFails(), 90.0),
        FaultInjection(AtTime(260.0), JobSuspended(), 60.0),
    )
    world = replace(CALM.world, nodes=2)
    outcome = run_schedule(replace(CALM, world=world, jobs=(job,), injections=injections), keep_log=True)
    assert outcome.violations == ()
    (suspended,) = [i for i, line in enumerate(outcome.log) if "job a is suspended" in line]
    (resumed,) = [i for i, line in enumerate(outcome.log) if "job a is resumed" in line]
    made = [i for i, line in enumerate(outcome.log) if "is made" in line and " pod a-checkpoints-" in line]
    assert len([i for i in made if i < suspended]) == 2
    assert len([i for i in made if i > resumed]) == len([i for i in made if i > suspended]) == 1


def test_another_operator_takes_over_from_a_paused_one() -> None:
    """In a liveness run, permanent faults are not healed at the end."""
    paused = FaultInjection(AtTime(40.0), OperatorPaused(which=OperatorTarget.LEADER), None)
    schedule = replace(CALM, aim=Aim.LIVENESS, world=replace(CALM.world, operators=2), injections=(paused,))
    outcome = run_schedule(schedule, keep_log=True)
    assert outcome.violations == ()
    assert not [line for line in outcome.log if "runs on" in line]


def test_an_operator_killed_after_a_write_continues_from_it() -> None:
    outcome = run_schedule(replace(CALM, injections=(FaultInjection(AfterWrite(4), OperatorKilled()),)), keep_log=True)
    assert outcome.violations == ()
    assert sum("leads" in line for line in outcome.log) == 2

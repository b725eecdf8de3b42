"""A schedule is a function of a seed, and an outcome is a function of a schedule."""

from __future__ import annotations

import json
from dataclasses import replace

from simulation import batch
from simulation.crash_test import CRASH_TEST_SCENARIOS, build_crash_tests
from simulation.faults.operators import OperatorKilled
from simulation.generator import (
    FAULT_MENU,
    LAST_INJECTION_SECONDS,
    LIVENESS_SHARE,
    MAX_GENERATED_FAULTS,
    generate_schedule,
)
from simulation.run import RunOutcome
from simulation.schedule import Aim, Schedule

SEEDS = range(500)


def test_a_schedule_is_a_function_of_its_seed_and_can_be_serialized() -> None:
    for seed in SEEDS:
        schedule = generate_schedule(seed)
        assert schedule == generate_schedule(seed)
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_seeds_use_different_parts_of_the_vocabulary_and_together_all_of_it() -> None:
    kinds = [set(generate_schedule(seed).kinds) for seed in range(3000)]
    assert len(set.union(*kinds)) == len(FAULT_MENU)
    assert all(len(each) <= MAX_GENERATED_FAULTS for each in kinds)


def test_every_schedule_has_time_to_recover_and_room_for_its_workers() -> None:
    for seed in SEEDS:
        schedule = generate_schedule(seed)
        workers = sum(job.replicas + job.spares for job in schedule.jobs)
        assert schedule.world.nodes > workers - 1
        assert all(getattr(fault.trigger, "seconds", 0.0) <= LAST_INJECTION_SECONDS for fault in schedule.injections)


def test_some_seeds_have_one_permanent_fault() -> None:
    found = [generate_schedule(seed) for seed in SEEDS]
    liveness = [schedule for schedule in found if schedule.aim is Aim.LIVENESS]
    assert abs(len(liveness) / len(found) - LIVENESS_SHARE) < 0.06
    assert all([fault.seconds for fault in each.injections].count(None) == 1 for each in liveness)
    assert all(fault.seconds is not None for each in found if each not in liveness for fault in each.injections)


def test_the_operator_is_killed_before_and_after_each_write() -> None:
    base = CRASH_TEST_SCENARIOS["crash"]
    schedules = build_crash_tests(base, 3)
    assert len(schedules) == 6
    assert all(each.injections[:-1] == base.injections for each in schedules)
    assert all(isinstance(each.injections[-1].fault, OperatorKilled) for each in schedules)
    assert len({each.injections[-1].trigger for each in schedules}) == 6


def test_two_runs_of_one_schedule_that_differ_are_a_violation() -> None:
    outcome = RunOutcome(seed=1, digest="a", requests=3)
    assert batch.compare_outcomes(outcome, replace(outcome, real_seconds=9.0)) == outcome
    broken = batch.compare_outcomes(outcome, replace(outcome, digest="b"))
    assert broken.broken_rules == ("a run is a function of its seed",)

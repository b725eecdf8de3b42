"""Schedules are values that follow from a seed, and outcomes follow from schedules."""

from __future__ import annotations

import json
from dataclasses import replace

from simulation import batch
from simulation.faults.operators import OperatorKilled
from simulation.generator import LAST_BEGINS, LIVENESS_SHARE, MENU, MOST_FAULTS, generate
from simulation.mortal import SCENARIOS, killed_at_each_write
from simulation.run import Outcome
from simulation.schedule import Aim, Schedule

SEEDS = range(500)


def test_a_schedule_follows_from_its_seed_and_can_be_written_down() -> None:
    for seed in SEEDS:
        schedule = generate(seed)
        assert schedule == generate(seed)
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_seeds_use_different_parts_of_the_vocabulary_and_together_all_of_it() -> None:
    kinds = [set(generate(seed).kinds) for seed in range(3000)]
    assert len(set.union(*kinds)) == len(MENU)
    assert all(len(each) <= MOST_FAULTS for each in kinds)


def test_every_schedule_leaves_time_to_heal_and_room_for_its_workers() -> None:
    for seed in SEEDS:
        schedule = generate(seed)
        workers = sum(job.replicas + job.spares for job in schedule.jobs)
        assert schedule.world.nodes > workers - 1
        assert all(getattr(stroke.when, "seconds", 0.0) <= LAST_BEGINS for stroke in schedule.strokes)


def test_some_seeds_leave_one_thing_broken_for_ever() -> None:
    found = [generate(seed) for seed in SEEDS]
    liveness = [schedule for schedule in found if schedule.aim is Aim.LIVENESS]
    assert abs(len(liveness) / len(found) - LIVENESS_SHARE) < 0.06
    assert all([stroke.seconds for stroke in each.strokes].count(None) == 1 for each in liveness)
    assert all(stroke.seconds is not None for each in found if each not in liveness for stroke in each.strokes)


def test_the_operator_dies_before_and_after_each_write() -> None:
    base = SCENARIOS["crash"]
    schedules = killed_at_each_write(base, 3)
    assert len(schedules) == 6
    assert all(each.strokes[:-1] == base.strokes for each in schedules)
    assert all(isinstance(each.strokes[-1].what, OperatorKilled) for each in schedules)
    assert len({each.strokes[-1].when for each in schedules}) == 6


def test_two_runs_of_one_schedule_that_differ_are_a_violation() -> None:
    outcome = Outcome(seed=1, digest="a", requests=3)
    assert batch.compared(outcome, replace(outcome, real_seconds=9.0)) == outcome
    broken = batch.compared(outcome, replace(outcome, digest="b"))
    assert broken.rules == ("a run is a function of its seed",)

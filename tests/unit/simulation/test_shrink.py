"""Shrinking keeps only the faults that matter."""

from __future__ import annotations

from simulation.faults.machines import PodDeleted, PowerFails
from simulation.faults.operators import OperatorKilled
from simulation.faults.ranks import NodeIsSlow, RankCrashes
from simulation.faults.triggers import AfterFault, AtTime
from simulation.schedule import FaultInjection, Schedule
from simulation.shrink import iterate_simpler, shrink_schedule
from simulation.simulated_job import SimulatedJob
from simulation.world import WorldSettings

MANY = Schedule(
    7,
    world=WorldSettings(nodes=9, operators=2),
    jobs=(SimulatedJob("a", replicas=4, spares=2, ranks=2, spec={"schedulingTimeout": "30s"}), SimulatedJob("b")),
    injections=(
        FaultInjection(AtTime(20.3), RankCrashes(index=2, code=-9)),
        FaultInjection(AtTime(25.0), PowerFails(index=3), 80.0),
        FaultInjection(AfterFault(1, 2.0), NodeIsSlow(factor=4.0), 33.0),
        FaultInjection(AfterFault(2, 1.0), OperatorKilled()),
        FaultInjection(AtTime(90.0), PodDeleted(index=1, force=True)),
    ),
)


def test_only_the_faults_that_violate_the_rule_remain_in_their_simplest_form() -> None:
    small = shrink_schedule(MANY, lambda schedule: {"power-fails", "operator-killed"} <= set(schedule.kinds))
    assert small.kinds == ("power-fails", "node-is-slow", "operator-killed"), "the last fault follows the one before"
    assert small.injections[0] == FaultInjection(AtTime(25.0), PowerFails(), 1.0)
    assert small.injections[2].trigger == AfterFault(1, 1.0), "it still follows the same fault"
    assert small.jobs == (SimulatedJob("a", replicas=1, spares=0),)
    assert small.world == WorldSettings(nodes=2, operators=1)


def test_faults_that_the_rule_needs_remain() -> None:
    small = shrink_schedule(MANY, lambda schedule: schedule.jobs[0].replicas >= 3 and schedule.world.operators == 2)
    assert small.injections == ()
    assert small.jobs[0].replicas == 3
    assert small.world.operators == 2


def test_shrinking_ends_after_the_allowed_attempts() -> None:
    tried = []

    def violates_rule(schedule: Schedule) -> bool:
        tried.append(schedule)
        return True

    assert shrink_schedule(MANY, violates_rule, tries=3) == tried[-1]
    assert len(tried) == 3


def test_no_candidate_is_the_schedule_itself() -> None:
    assert MANY not in list(iterate_simpler(MANY))

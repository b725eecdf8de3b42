"""The plan and the reports survive the wire, and say what is wrong with what is not one."""

from __future__ import annotations

import json

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Member, Plan, Role, Stop, SyncMode, WorkerPlan

PLAN = Plan(
    version=7,
    membership=2,
    round=3,
    members=(Member("j-w0-0", "10.0.0.1", (0, 1)), Member("j-w4-0", "10.0.0.5", (2, 3))),
    restarts=5,
    sync_mode=SyncMode.SYNC,
    shares=(8, 8, 4, 4),
    sequence_cost=(1e-3, 0.0, 2.5e-9),
    step_seconds=0.25,
)


def test_plan_survives_json() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_a_worker_is_told_its_own_part() -> None:
    part = PLAN.part("j-w4-0")
    assert (part.role, part.ranks, part.world_size, part.store) == (Role.MEMBER, (2, 3), 4, "10.0.0.1:29400")
    assert not part.serves_store
    assert part.neighbours == ("10.0.0.1",)
    first = PLAN.part("j-w0-0")
    assert (part.shares, part.sequence_cost) == (None, None), "the worker of rank 0 hands them to the others"
    assert (first.shares, first.sequence_cost) == (PLAN.shares, PLAN.sequence_cost)
    for told in (part, first):
        assert WorkerPlan.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_who_is_not_a_member_is_a_spare_or_leaves() -> None:
    assert PLAN.part("j-w9-0").role is Role.SPARE
    assert Plan(stop=Stop.FINISH).part("j-w9-0").role is Role.LEAVE


def test_unknown_fields_of_a_newer_version_are_left_out() -> None:
    assert Plan.from_json({**PLAN.to_json(), "novelty": 1}) == PLAN


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shares": [8, 8]}, "2 shares for 4 ranks"),
        ({"shares": [24, 0, 0, 0]}, "at least 1"),
        ({"members": [{"worker": "w", "address": "a", "ranks": [0, 0]}]}, "exactly once"),
        ({"sync_mode": "Quantum"}, "Quantum"),
        ({"sequence_cost": [1.0, -1.0, 0.0]}, "plan.sequence_cost: .* none below 0"),
        ({"sequence_cost": [0.0, 0.0, 0.0]}, "plan.sequence_cost: .* one above"),
        ({"sequence_cost": [1.0]}, "plan.sequence_cost: .* must be three numbers"),
        ({"sequence_cost": "fast"}, "plan.sequence_cost: .* must be three numbers"),
    ],
)
def test_bad_plans_name_the_field(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Plan.from_json({**PLAN.to_json(), **change})


def test_a_workers_plan_names_a_bad_cost_too() -> None:
    with pytest.raises(InputError, match=r"plan\.sequence_cost: .* none below 0"):
        WorkerPlan.from_json({**PLAN.part("j-w0-0").to_json(), "sequence_cost": [-1.0, 1.0, 0.0]})

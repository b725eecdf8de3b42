"""Rank 0's view of the plan: what cannot be followed, or read, changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.modes.course import Course
from pacekeeper.modes.follower import PlanReader
from pacekeeper.runtime import Runtime, write_json, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Role, WorkerPlan

PLAN = WorkerPlan(version=1, membership=1, role=Role.MEMBER, shares=(3, 5))


def check(course: Course) -> None:
    if course.shares is not None and sum(course.shares) != 8:
        raise InputError(f"shares: {course.shares} must sum to 8")


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    runtime = Runtime(tmp_path).make()
    write_json(runtime.plan, PLAN.to_json())
    return runtime


def test_an_unreadable_plan_behind_a_refused_one_does_not_put_that_in_force(runtime: Runtime) -> None:
    plans = PlanReader(runtime, check)
    good = plans.orders(Course(), 0).course
    assert good.shares == (3, 5)
    write_json(runtime.plan, replace(PLAN, version=5, shares=(4, 5)).to_json())
    assert plans.orders(good, 0).course == good
    assert runtime.refused.read_text() == "plan 5: shares: (4, 5) must sum to 8"
    write_text(runtime.plan, "no plan")
    assert plans.orders(good, 0).course == good
    assert "not JSON" in runtime.refused.read_text()


def test_behind_an_unreadable_plan_the_last_readable_one_goes_on(runtime: Runtime) -> None:
    plans = PlanReader(runtime, check)
    good = plans.orders(Course(), 0).course
    write_text(runtime.plan, "no plan")
    orders = plans.orders(Course(), 0)
    assert (orders.course, orders.plan_version) == (good, 1)
    write_json(runtime.plan, replace(PLAN, version=6, shares=None).to_json())
    assert plans.orders(good, 0).course.shares is None
    assert runtime.refused.read_text() == ""

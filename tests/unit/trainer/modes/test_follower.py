"""Rank 0's view of the plan: what cannot be followed, or read, changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.modes.course import Course
from pacekeeper.modes.follower import PlanFollower, PlanReader
from pacekeeper.runtime import Runtime, write_json, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Role, WorkerPlan

PLAN = WorkerPlan(version=1, membership=1, role=Role.MEMBER, shares=(3, 5))


def check(course: Course) -> None:
    if course.shares is not None and sum(course.shares) != 8:
        raise InputError(f"shares: {course.shares} must sum to 8")


def content(plan: WorkerPlan) -> str:
    return json.dumps(plan.to_json())


@pytest.fixture
def plans() -> PlanFollower:
    follower = PlanFollower(check)
    follower.take(content(PLAN))
    return follower


def test_without_a_plan_the_course_in_force_goes_on() -> None:
    in_force = Course(shares=(4, 4))
    orders, refused = PlanFollower(check).orders(in_force, 7)
    assert (orders.course, orders.plan_version, orders.snapshot_every, refused) == (in_force, 0, 7, "")


def test_an_unreadable_plan_behind_a_refused_one_does_not_put_that_in_force(plans: PlanFollower) -> None:
    good = plans.orders(Course(), 0)[0].course
    assert good.shares == (3, 5)
    plans.take(content(replace(PLAN, version=5, shares=(4, 5))))
    orders, refused = plans.orders(good, 0)
    assert (orders.course, refused) == (good, "plan 5: shares: (4, 5) must sum to 8")
    plans.take("no plan")
    orders, refused = plans.orders(good, 0)
    assert orders.course == good
    assert "not JSON" in refused


def test_behind_an_unreadable_plan_the_last_readable_one_goes_on(plans: PlanFollower) -> None:
    good = plans.orders(Course(), 0)[0].course
    plans.take("no plan")
    orders, _ = plans.orders(Course(), 0)
    assert (orders.course, orders.plan_version) == (good, 1)
    plans.take(content(replace(PLAN, version=6, shares=None)))
    orders, refused = plans.orders(good, 0)
    assert (orders.course.shares, refused) == (None, "")


def test_a_plan_of_the_next_membership_leaves_the_course_and_asks_all_the_same(plans: PlanFollower) -> None:
    good = plans.orders(Course(), 0)[0].course
    plans.take(content(replace(PLAN, version=9, membership=2, shares=(1, 7), checkpoint_request=3)))
    orders, refused = plans.orders(good, 0)
    assert (orders.course, orders.checkpoint_request, refused) == (good, 3, "")


def test_the_file_is_read_when_it_is_replaced_and_what_is_wrong_with_it_lies_beside(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path).make()
    reader = PlanReader(runtime, check)
    assert reader.orders(Course(), 0).plan_version == 0
    write_json(runtime.plan, PLAN.to_json())
    assert reader.orders(Course(), 0).course.shares == (3, 5)
    write_text(runtime.plan, "no plan")
    assert reader.orders(Course(), 0).plan_version == 1
    assert "not JSON" in runtime.refused.read_text()
    write_json(runtime.plan, replace(PLAN, version=2).to_json())
    assert reader.orders(Course(), 0).plan_version == 2
    assert runtime.refused.read_text() == ""

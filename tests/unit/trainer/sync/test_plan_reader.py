"""Rank 0's view of the plan: a plan that cannot be followed or read changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.runtime_folder import RuntimeFolder, write_json, write_text
from pacekeeper.sync.plan_reader import PlanInterpreter, PlanReader
from pacekeeper.sync.training_config import TrainingConfig
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole

PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER, shares=(3, 5))


def check_shares(config: TrainingConfig) -> None:
    if config.shares is not None and sum(config.shares) != 8:
        raise InputError(f"shares: {config.shares} must sum to 8")


def encode_plan(plan: WorkerPlan) -> str:
    return json.dumps(plan.to_json())


@pytest.fixture
def interpreter() -> PlanInterpreter:
    follower = PlanInterpreter(check_shares)
    follower.accept_content(encode_plan(PLAN))
    return follower


def test_without_a_plan_the_config_in_force_continues() -> None:
    in_force = TrainingConfig(shares=(4, 4))
    orders, refused = PlanInterpreter(check_shares).build_directives(in_force, 7)
    assert (orders.training_config, orders.plan_version, orders.snapshot_every, refused) == (in_force, 0, 7, "")


def test_an_unreadable_plan_after_a_refused_one_does_not_put_that_in_force(interpreter: PlanInterpreter) -> None:
    good = interpreter.build_directives(TrainingConfig(), 0)[0].training_config
    assert good.shares == (3, 5)
    interpreter.accept_content(encode_plan(replace(PLAN, version=5, shares=(4, 5))))
    orders, refused = interpreter.build_directives(good, 0)
    assert (orders.training_config, refused) == (good, "plan 5: shares: (4, 5) must sum to 8")
    interpreter.accept_content("no plan")
    orders, refused = interpreter.build_directives(good, 0)
    assert orders.training_config == good
    assert "not JSON" in refused


def test_after_an_unreadable_plan_the_last_readable_one_continues(interpreter: PlanInterpreter) -> None:
    good = interpreter.build_directives(TrainingConfig(), 0)[0].training_config
    interpreter.accept_content("no plan")
    orders, _ = interpreter.build_directives(TrainingConfig(), 0)
    assert (orders.training_config, orders.plan_version) == (good, 1)
    interpreter.accept_content(encode_plan(replace(PLAN, version=6, shares=None)))
    orders, refused = interpreter.build_directives(good, 0)
    assert (orders.training_config.shares, refused) == (None, "")


def test_a_plan_of_the_next_membership_keeps_the_config_and_answers_requests(interpreter: PlanInterpreter) -> None:
    good = interpreter.build_directives(TrainingConfig(), 0)[0].training_config
    interpreter.accept_content(encode_plan(replace(PLAN, version=9, membership=2, shares=(1, 7), checkpoint_request=3)))
    orders, refused = interpreter.build_directives(good, 0)
    assert (orders.training_config, orders.checkpoint_request, refused) == (good, 3, "")


def test_the_file_is_read_when_it_is_replaced_and_its_error_is_written_next_to_it(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    reader = PlanReader(runtime, check_shares)
    assert reader.read_directives(TrainingConfig(), 0).plan_version == 0
    write_json(runtime.plan, PLAN.to_json())
    assert reader.read_directives(TrainingConfig(), 0).training_config.shares == (3, 5)
    write_text(runtime.plan, "no plan")
    assert reader.read_directives(TrainingConfig(), 0).plan_version == 1
    assert "not JSON" in runtime.refusal.read_text()
    write_json(runtime.plan, replace(PLAN, version=2).to_json())
    assert reader.read_directives(TrainingConfig(), 0).plan_version == 2
    assert runtime.refusal.read_text() == ""

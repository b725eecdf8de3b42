"""The plan's file, as the launcher follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacekeeper.launcher.rendezvous.plan_file import PlanFile
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole

PLAN = WorkerPlan(version=7, role=WorkerRole.MEMBER)


@pytest.mark.parametrize(
    "content", [b'{"role": "\xff"}', b'{"role": ' + b"[" * 100_000, b"[]", b"7", b'{"role": "Member", "version": "8"}']
)
def test_an_invalid_plan_leaves_the_one_before_in_force(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    plans = PlanFile(path)
    assert plans.read() == PLAN
    other = tmp_path / "other.json"
    other.write_bytes(content)
    other.replace(path)
    assert plans.read() == PLAN

"""The runtime folder's files are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

from pacekeeper.runtime import Runtime, read_json, write_json, write_plan
from pacekeeper_analysis.plan import Role, WorkerPlan


def test_the_environment_names_the_folder() -> None:
    assert Runtime.from_environment({"PACEKEEPER_RUNTIME": "/somewhere"}).root == Path("/somewhere")
    assert Runtime.from_environment({"PACEKEEPER_RUNTIME": ""}).root == Path("/run/pacekeeper")


def test_making_the_folder_twice_is_making_it_once(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "deep" / "folder").make().make()
    folders = ["communicators", "errors", "faults", "links", "paths", "patterns", "rings", "snapshots", "stacks"]
    assert sorted(path.name for path in runtime.root.iterdir()) == folders


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert read_json(path) is None
    write_json(path, {"version": 1})
    write_json(path, {"version": 2})
    assert read_json(path) == {"version": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_the_plan_with_its_secret_is_readable_by_this_user_alone(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", WorkerPlan(role=Role.MEMBER, secret="5ec2e7")
    left_over = path.with_name(f".{path.name}.{os.getpid()}")
    left_over.touch(mode=0o644)  # by a process of this number that was killed
    for _ in range(2):
        write_plan(path, plan)
        assert path.stat().st_mode & 0o777 == 0o600
    assert WorkerPlan.from_json(read_json(path) or {}) == plan
    assert list(tmp_path.iterdir()) == [path]

"""The runtime folder's files are replaced whole."""

from __future__ import annotations

import math
import os
from pathlib import Path

from pacekeeper.runtime_folder import (
    RequestsFile,
    RuntimeFolder,
    TouchedFile,
    read_json,
    write_json,
    write_text,
)
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.requests import EvidenceRequest, WorkerRequests


def test_the_environment_names_the_folder() -> None:
    assert RuntimeFolder.from_environment({"PACEKEEPER_RUNTIME": "/somewhere"}).root == Path("/somewhere")
    assert RuntimeFolder.from_environment({"PACEKEEPER_RUNTIME": ""}).root == Path("/run/pacekeeper")


def test_creating_the_folder_twice_is_creating_it_once(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path / "deep" / "folder").create().create()
    folders = ["communicators", "errors", "faults", "links", "paths", "patterns", "rings", "snapshots", "stacks"]
    assert sorted(path.name for path in runtime.root.iterdir()) == folders


def test_written_values_are_read_and_no_other_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert read_json(path) is None
    write_json(path, {"version": 1})
    write_json(path, {"version": 2})
    assert read_json(path) == {"version": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_another_user_of_a_pod_writes_into_the_folder(tmp_path: Path) -> None:
    """The image may set the launcher's user, which the sidecar of another image does not have."""
    runtime = RuntimeFolder(tmp_path / "runtime").create(shared=True)
    assert {path.stat().st_mode & 0o777 for path in (runtime.root, *runtime.root.iterdir())} == {0o777}
    write_json(runtime.plan, WorkerPlan(role=WorkerRole.MEMBER).to_json())
    assert runtime.plan.stat().st_mode & 0o444 == 0o444


def test_requests_are_read_again_when_they_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    file, requests = RequestsFile(path), WorkerRequests("why-1", EvidenceRequest("why-1"))
    assert file.read() == WorkerRequests()
    write_json(path, requests.to_json())
    assert file.read() == requests
    write_text(path, "{")
    assert file.read() == WorkerRequests(), "of another version, perhaps"
    write_json(path, WorkerRequests().to_json())
    assert file.read() == WorkerRequests()


def test_the_age_of_a_file_is_counted_by_a_clock_that_is_never_set(tmp_path: Path) -> None:
    path = tmp_path / "contact"
    touched = TouchedFile(path)

    def touch_at(wall: float) -> None:
        path.touch()
        os.utime(path, (wall, wall))

    assert touched.age(now=100.0, wall=5_000.0) == math.inf
    touch_at(4_998.0)
    assert touched.age(now=100.0, wall=5_000.0) == 2.0, "it lay there before the first check"
    assert touched.age(now=103.0, wall=1_403.0) == 5.0, "the clock was set back by an hour"
    touch_at(1_404.0)
    assert touched.age(now=104.0, wall=1_404.0) == 0.0
    assert touched.age(now=110.0, wall=9_999.0) == 6.0, "or forward"
    path.unlink()
    assert touched.age(now=111.0, wall=9_999.0) == math.inf
    touch_at(9_999.0)
    assert touched.age(now=112.0, wall=10_000.0) == 1.0


def test_a_file_from_the_clocks_future_is_infinitely_old_until_it_is_touched(tmp_path: Path) -> None:
    """The clock was set back, and then the launcher restarted: nothing shows when the operator was reached last."""
    path = tmp_path / "contact"
    path.touch()
    os.utime(path, (9_000.0, 9_000.0))
    touched = TouchedFile(path)
    assert touched.age(now=100.0, wall=5_000.0) == touched.age(now=101.0, wall=5_001.0) == math.inf
    os.utime(path, (5_002.0, 5_002.0))
    assert touched.age(now=102.0, wall=5_002.0) == 0.0

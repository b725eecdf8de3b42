"""Training that was interrupted equals, bit for bit, training that was not: the same samples, losses and parameters."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Plan, Stop, SyncMode
from pacekeeper_analysis.protocol.reports import LauncherState
from testing.storage.claim_server import serve_claim
from testing.storage.s3_stand_in import serve_s3
from testing.training.launchers import LauncherTeam, create_team

TRAIN_SCRIPT = Path(__file__).parents[2] / "testing/scripts/train.py"
UNTIL = 14
SHARES = (9, 6, 5, 4)


@contextmanager
def run_training(
    folder: Path,
    *,
    workers: str = "ab",
    shares: Sequence[int] | None = SHARES,
    mode: SyncMode = SyncMode.SYNC,
    separate_namespaces: bool = False,
    **variables: Any,
) -> Iterator[LauncherTeam]:
    """Four ranks on two workers that train. With `separate_namespaces`, each worker seems to be on its own node."""
    folder.mkdir()
    with create_team(folder, script=TRAIN_SCRIPT) as one:
        one.separate_namespaces = separate_namespaces
        one.environment.update(UNTIL=str(UNTIL), SNAPSHOT_EVERY="2", PACEKEEPER_CHECKPOINT_EVERY="5")
        one.environment.update(PACEKEEPER_CHECKPOINT_PATH=str(folder / "checkpoints"))
        one.environment.update({name: str(value) for name, value in variables.items()})
        for name in workers:
            one.start(name)
        members = one.build_members(a=[0, 1], b=[2, 3])
        shares = tuple(shares) if shares else None
        plan = Plan(version=1, membership=1, members=members, store_port=29431, restarts=5, shares=shares)
        one.give_plan(replace(plan, sync_mode=mode, sync_every=3, sync_seconds=0.1))
        yield one


def run_to_the_end(one: LauncherTeam) -> None:
    for name in ("a", "b"):
        assert one.workers[name].wait() == 0, one.read_logs()


def read_history(folder: Path) -> tuple[list[Any], list[str]]:
    """What each rank saw in the steps that count (the last time it made each), and what it learned."""
    seen = []
    for rank in range(4):
        entries = [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]
        seen.append({entry["step"]: (entry["seen"], entry["loss"]) for entry in entries if "step" in entry})
    return seen, [(folder / f"learned-{rank}").read_text() for rank in range(4)]


def list_restored_steps(folder: Path, rank: int = 0) -> list[int]:
    entries = [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]
    return [entry["restored"] for entry in entries if "restored" in entry]


def find_newest_step(folder: Path) -> int:
    path = folder / "seen-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


@pytest.fixture(scope="module", params=["", "1"], ids=["replicated", "sharded"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    with run_training(folder, SHARD=request.param) as one:
        run_to_the_end(one)
    return request.param, folder


@pytest.mark.oldest_torch
def test_a_killed_rank_costs_at_most_the_steps_since_the_snapshot(
    uninterrupted: tuple[str, Path], tmp_path: Path
) -> None:
    shard, reference = uninterrupted
    faults = [{"rank": 2, "round": 1, "step": 9, "kind": "sigkill"}]
    with run_training(tmp_path / "run", SHARD=shard, FAULTS=json.dumps(faults)) as one:
        run_to_the_end(one)
    first, second = list_restored_steps(tmp_path / "run")
    assert first == 0
    assert 6 <= second <= 8
    assert read_history(tmp_path / "run") == read_history(reference)


def list_kept_steps(folder: Path, rank: int) -> list[int]:
    """Of the copies of a rank's shard in a worker's memory, oldest first; -1 for one that is not whole."""
    headers = []
    for path in folder.glob(f"snapshots/shard-{rank}-of-4.*"):
        with path.open("rb") as file:
            headers.append(file.read(16).ljust(16, b"\0"))
    return sorted(step if magic else -1 for magic, step in map(struct.Struct("<Qq").unpack, headers))


def test_a_lost_worker_costs_a_sharded_job_the_steps_since_the_snapshot(
    uninterrupted: tuple[str, Path], tmp_path: Path
) -> None:
    """What the lost one had is with the other, on another node: there is no volume at all. Of replicas all have all."""
    shard, reference = uninterrupted
    folder = tmp_path / "run"
    with run_training(
        folder, workers="abc", separate_namespaces=True, SHARD=shard, SLEEP=0.05, PACEKEEPER_CHECKPOINT_PATH=""
    ) as one:
        if shard:
            one.wait_for(lambda: all(4 in list_kept_steps(folder / "a", rank) for rank in (2, 3)), "copies of step 4")
        else:
            one.wait_for(lambda: find_newest_step(folder) >= 6, "step 6")
        lost_at = lose_b(one)
    first, second = list_restored_steps(folder)
    assert first == 0
    assert max(4, lost_at - 4) <= second < UNTIL
    assert read_history(folder) == read_history(reference)


def lose_b(one: LauncherTeam) -> int:
    """A spare takes its ranks, and the job runs to its end. The step at which that happened."""
    lost = one.workers.pop("b")
    lost.kill()
    lost.wait()
    lost_at = find_newest_step(one.folder)
    members = one.build_members(a=[0, 1], c=[2, 3])
    one.give_plan(replace(one.plan, version=2, membership=2, round=2, store_port=29433, members=members))
    for name in ("a", "c"):
        assert one.workers[name].wait() == 0, one.read_logs()
    return lost_at


def test_a_worker_that_is_lost_during_replication_costs_the_steps_since_the_previous_replicas(tmp_path: Path) -> None:
    """Half of what it sends is there, and half of what it is sent has gone with it."""
    variables: dict[str, Any] = {
        "WIDTH": 256,
        "UNTIL": 30,
        "PACEKEEPER_PEER_REPLICA_MEGABYTES": 1,
        "PACEKEEPER_CHECKPOINT_PATH": "",
    }
    with run_training(tmp_path / "whole", SHARD=1, **variables) as one:
        run_to_the_end(one)
    folder = tmp_path / "run"

    def under_way() -> int:
        """The step of which all copies are whole while none of the next is; 0 at another moment."""
        copies = [(folder / "a", 2), (folder / "a", 3), (folder / "b", 0), (folder / "b", 1)]
        kept = {tuple(list_kept_steps(*copy)) for copy in copies}
        torn, whole = kept.pop() if len(kept) == 1 and len(next(iter(kept))) == 2 else (0, 0)
        return whole if torn == -1 else 0

    with run_training(folder, workers="abc", separate_namespaces=True, SHARD=1, SLEEP=0.1, **variables) as one:
        whole = one.wait_for(under_way, "all copies are in progress")
        lose_b(one)
    assert list_restored_steps(folder) == [0, whole]
    assert read_history(folder) == read_history(tmp_path / "whole")


@pytest.mark.oldest_torch
def test_a_suspended_job_resumes_from_the_volume(uninterrupted: tuple[str, Path], tmp_path: Path) -> None:
    shard, reference = uninterrupted
    folder = tmp_path / "run"
    with run_training(folder, SHARD=shard, SLEEP=0.05) as one:
        one.wait_for(lambda: find_newest_step(folder) >= 6, "step 6")
        one.give_plan(replace(one.plan, version=2, stop=Stop.SUSPEND))
        for name in "ab":
            one.wait_for_state(name, LauncherState.WARM)
            for path in (folder / name / "snapshots").iterdir():
                path.unlink()  # as if the nodes were gone, and their memory with them
        stopped_at = find_newest_step(folder)
        one.give_plan(replace(one.plan, version=3, membership=2, round=2, store_port=29432, stop=Stop.NO))
        run_to_the_end(one)
    assert list_restored_steps(folder) == [0, stopped_at]
    assert stopped_at < UNTIL
    assert read_history(folder) == read_history(reference)


@pytest.mark.parametrize("uninterrupted", ["1"], indirect=True, ids=["sharded"])
def test_a_job_that_is_killed_resumes_from_an_object_store(uninterrupted: tuple[str, Path], tmp_path: Path) -> None:
    """All workers are lost while they train on, and one of them while it stores its part of a checkpoint."""
    shard, reference = uninterrupted
    folder = tmp_path / "run"
    with serve_s3() as s3:
        variables: dict[str, Any] = {**s3.build_variables(), "PACEKEEPER_CHECKPOINT_URI": "s3://bucket/team/one"}
        with run_training(
            folder, SHARD=shard, SNAPSHOT_EVERY=0, SLEEP=0.05, PACEKEEPER_CHECKPOINT_PATH="", **variables
        ) as one:
            one.wait_for(lambda: find_stored_steps(s3.objects, "manifest.json") == {5}, "the checkpoint of step 5")
            s3.fail(lambda request: request.startswith("PUT") and "__3_0.distcp" in request, code="")
            one.wait_for(lambda: find_stored_steps(s3.objects, "__0_0.distcp") == {5, 10}, "a part of step 10")
            for name in "ab":
                lost = one.workers.pop(name)
                lost.kill()
                lost.wait()
            s3.clear_faults()
            for name in "ab":
                one.start(name)
            one.give_plan(replace(one.plan, version=2, membership=2, round=2, store_port=29432))
            run_to_the_end(one)
        assert find_stored_steps(s3.objects, "manifest.json") == {5, 10, UNTIL}
        assert find_stored_steps(s3.objects, "__0_0.distcp") == {5, 10, UNTIL}, "what was not published is gone"
    assert list_restored_steps(folder) == [0, 5]
    assert read_history(folder) == read_history(reference)


@pytest.mark.parametrize("uninterrupted", ["1"], indirect=True, ids=["sharded"])
def test_a_job_whose_workers_share_no_folder_resumes_through_the_checkpoint_server(
    uninterrupted: tuple[str, Path], tmp_path: Path
) -> None:
    """All workers are lost while the server is gone, and a part of a checkpoint is half stored."""
    shard, reference = uninterrupted
    folder, claim = tmp_path / "run", tmp_path / "claim"

    def list_steps(name: str) -> set[int]:
        return {int(path.parent.name[5:].partition(".")[0]) for path in claim.glob(f"step-*/{name}")}

    with serve_claim(claim) as server:
        variables: dict[str, Any] = {"PACEKEEPER_CHECKPOINT_URI": "claim://checkpoints/job", "SNAPSHOT_EVERY": 0}
        with run_training(folder, SHARD=shard, SLEEP=0.05, PACEKEEPER_CHECKPOINT_PATH="", **variables) as one:
            one.give_plan(replace(one.plan, version=2, checkpoint_server=server.address))
            one.wait_for(lambda: list_steps("manifest.json") == {5}, "the checkpoint of step 5")
            one.wait_for(lambda: list_steps("__*.distcp") == {5, 10}, "a part of step 10")
            server.kill()
            for name in "ab":
                lost = one.workers.pop(name)
                lost.kill()
                lost.wait()
            server.start()
            for name in "ab":
                one.start(name)
            one.give_plan(
                replace(one.plan, version=3, membership=2, round=2, store_port=29432, checkpoint_server=server.address)
            )
            run_to_the_end(one)
    resumed_at = list_restored_steps(folder)[1]
    assert resumed_at in (5, 10), "step 10 was published if the server was killed late"
    assert list_steps("manifest.json") == list_steps("__0_0.distcp") == {5, 10, UNTIL}
    assert read_history(folder) == read_history(reference)


def find_stored_steps(objects: dict[str, bytes], name: str) -> set[int]:
    """Return the steps of which an object of this name is stored."""
    folders = [path.split("/")[-2] for path in list(objects) if path.endswith(f"/{name}")]
    return {int(folder.removeprefix("step-").partition(".")[0]) for folder in folders}


@pytest.mark.parametrize("mode", [SyncMode.EDIT, SyncMode.ASYNC_EDIT])
def test_a_killed_rank_in_a_local_mode_goes_on_from_the_snapshot(mode: SyncMode, tmp_path: Path) -> None:
    """From a synchronization, with the common parameters; at the end all ranks are one again."""
    faults = [{"rank": 2, "round": 1, "step": 11, "kind": "sigkill"}]
    with run_training(tmp_path / "run", mode=mode, shares=None, SLEEP=0.02, FAULTS=json.dumps(faults)) as one:
        run_to_the_end(one)
        assert {one.workers[name].read_heartbeat().training.sync_mode for name in "ab"} == {mode}
    first, second = list_restored_steps(tmp_path / "run")
    assert first == 0
    assert 0 < second < UNTIL
    _, learned = read_history(tmp_path / "run")
    assert learned == [learned[0]] * 4

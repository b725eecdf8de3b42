"""A folder of checkpoints belongs to one job: others change nothing there, and its owner is decided in one step."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.checkpointing.storage import folder_ownership
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.manifests import FileChecksum, Manifest, compute_checksum
from pacekeeper.environment import Environment, JobIdentity
from pacekeeper_analysis.errors import InputError

ONE, AGAIN, OTHER = (
    JobIdentity("team/one", "uid-1"),
    JobIdentity("team/one", "uid-2"),
    JobIdentity("team/other", "uid-3"),
)


def claim_folder(path: Path, job: JobIdentity, round_: int = 1, **options: Any) -> CheckpointFolder:
    folder = CheckpointFolder(path, round_, job=job, **options)
    folder.claim()
    return folder


def publish_step(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> bool:
    partial = folder.get_partial_path(step)
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(content)
    files: dict[str, FileChecksum] = {path.name: compute_checksum(path) for path in partial.iterdir()}
    job = folder.job
    return folder.publish(Manifest(step, folder.round, 1, {}, ("model",), files, job.name, job.uid))


def list_steps(folder: CheckpointFolder) -> list[int]:
    return [manifest.step for manifest in folder.list_published()]


def read_contents(path: Path) -> dict[str, bytes | None]:
    """Return all that is below a folder."""
    return {str(its.relative_to(path)): its.read_bytes() if its.is_file() else None for its in path.rglob("*")}


def downgrade_folder(path: Path) -> None:
    """Leave the folder as a version without identities does."""
    for claim in path.glob(".owner-*"):
        shutil.rmtree(claim)
    (path / "owner.json").write_text(json.dumps({"owner": "r7-0011223344556677"}))
    for manifest in path.glob("step-*/manifest.json"):
        fields = json.loads(manifest.read_text())
        for name in ("job", "uid", "checksum"):
            del fields[name]
        manifest.write_text(json.dumps(fields))


# Ownership


def test_another_jobs_folder_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, ONE)
    publish_step(first, 300)
    first.get_partial_path(400).mkdir()
    before = read_contents(tmp_path)
    with pytest.raises(InputError) as refused:
        CheckpointFolder(tmp_path, 1, job=OTHER)
    for expected in ("team/one (UID uid-1)", "spec.checkpoint.subPath", "spec.checkpoint.adopt: team/one", "read_only"):
        assert expected in str(refused.value)
    assert read_contents(tmp_path) == before
    assert publish_step(first, 500)


def test_the_same_job_applied_again_continues_and_the_one_before_does_not_come_back(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, ONE)
    publish_step(first, 300)
    second = claim_folder(tmp_path, AGAIN)
    assert list_steps(second) == [300]
    assert not publish_step(first, 400)
    assert "team/one (UID uid-2)" in first.new_owner_message
    with pytest.raises(InputError, match="belongs to a later run of this job by now"):
        CheckpointFolder(tmp_path, 2, job=ONE)
    assert publish_step(claim_folder(tmp_path, AGAIN, round_=2), 500)


def test_a_later_round_of_the_same_run_reports_no_new_owner(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, ONE)
    claim_folder(tmp_path, ONE, round_=2)
    assert not publish_step(first, 300)
    assert first.new_owner_message == ""


def test_a_process_of_the_job_that_is_not_a_rank_does_not_take_the_folder(tmp_path: Path) -> None:
    """For example, an evaluation that the user starts in a worker's container."""
    folder = claim_folder(tmp_path, ONE)
    with pytest.raises(InputError, match=r"this process is none of them.*read_only=True"):
        CheckpointFolder(tmp_path, 0, job=ONE)
    assert publish_step(folder, 300)


def test_a_folder_of_an_older_version_is_adopted_by_the_first_job_and_by_no_second(tmp_path: Path) -> None:
    publish_step(claim_folder(tmp_path, ONE), 300)
    downgrade_folder(tmp_path)
    (tmp_path / "step-00000400.partial-r7").mkdir()
    folder = claim_folder(tmp_path, OTHER)
    assert list_steps(folder) == [300]
    assert not (tmp_path / "step-00000400.partial-r7").exists()
    with pytest.raises(InputError, match="team/other"):
        CheckpointFolder(tmp_path, 1, job=ONE)
    for step in (400, 500, 600):
        assert publish_step(folder, step)
    assert list_steps(folder) == [600, 500, 400], "it takes care of what it has adopted"


def test_an_older_version_that_runs_in_between_does_not_lose_the_owners_name(tmp_path: Path) -> None:
    claim_folder(tmp_path, ONE)
    (tmp_path / "owner.json").write_text(json.dumps({"owner": "r2-0011223344556677"}))
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path, 1, job=OTHER)
    assert publish_step(claim_folder(tmp_path, ONE, round_=3), 300)


def test_checkpoints_name_their_owner_where_the_folder_does_not(tmp_path: Path) -> None:
    """They were copied there."""
    publish_step(claim_folder(tmp_path / "one", ONE), 300)
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "one/step-00000300", tmp_path / "other/step-00000300")
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path / "other", 1, job=OTHER)
    assert list_steps(claim_folder(tmp_path / "other", OTHER, adopt="team/one")) == [300]


def test_adoption_is_requested_by_name_and_the_former_owner_is_named(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, ONE)
    publish_step(first, 300)
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path, 1, job=OTHER, adopt="team/third")
    second = claim_folder(tmp_path, OTHER, adopt="team/one")
    assert list_steps(second) == [300]
    assert not publish_step(first, 400)
    assert "team/other (UID uid-3)" in first.new_owner_message
    for step in (400, 500, 600, 700):
        assert publish_step(second, step)
    assert list_steps(second) == [700, 600, 500, 300], "what another job has written is not its to delete"
    later = claim_folder(tmp_path, OTHER, round_=2)
    assert list_steps(later) == [700, 600, 500, 300], "it need not adopt them again"
    with pytest.raises(InputError, match="team/other"):
        CheckpointFolder(tmp_path, 2, job=ONE)


def test_adopted_checkpoints_remain_adopted_after_a_restart(tmp_path: Path) -> None:
    publish_step(claim_folder(tmp_path, ONE), 300)
    claim_folder(tmp_path, OTHER, adopt="team/one")
    third = JobIdentity("team/third", "uid-9")
    assert list_steps(CheckpointFolder(tmp_path, 1, job=third, adopt="team/other")) == [300]
    assert list_steps(claim_folder(tmp_path, third, adopt="team/other")) == [300]


def test_adoption_needs_a_former_owner(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no checkpoints, but spec\.checkpoint\.adopt expects"):
        CheckpointFolder(tmp_path, 1, job=OTHER, adopt="team/one")
    assert read_contents(tmp_path) == {}
    publish_step(claim_folder(tmp_path, ONE), 1)
    assert claim_folder(tmp_path, ONE, adopt="team/one")


def test_checkpoints_of_a_late_job_are_not_loaded_and_not_deleted(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, ONE)
    publish_step(folder, 300)
    publish_step(claim_folder(tmp_path / "elsewhere", OTHER), 750)
    (tmp_path / "elsewhere/step-00000750").rename(tmp_path / "step-00000750")
    assert list_steps(claim_folder(tmp_path, ONE, round_=2)) == [300]
    for step in range(800, 900, 10):
        folder = claim_folder(tmp_path, ONE, round_=step)
        assert publish_step(folder, step)
    assert list_steps(folder) == [890, 880, 870]
    assert (tmp_path / "step-00000750/manifest.json").exists()


def test_a_folder_that_is_no_checkpoint_is_not_changed(tmp_path: Path) -> None:
    """For example, that of a job with a similar name, if the claim's root is another job's folder."""
    (tmp_path / "step-00000100").mkdir()
    (tmp_path / "step-00000100/its").write_text("")
    folder = claim_folder(tmp_path, ONE, keep=1)
    for step in (100, 200, 300):
        assert publish_step(folder, step)
    assert list_steps(folder) == [300]
    assert (tmp_path / "step-00000100/its").exists()


def test_half_written_checkpoints_of_other_jobs_stay_and_do_not_mix(tmp_path: Path) -> None:
    one, other = CheckpointFolder(tmp_path, 1, job=ONE), CheckpointFolder(tmp_path, 1, job=OTHER)
    assert (
        one.get_partial_path(5)
        != other.get_partial_path(5)
        != CheckpointFolder(tmp_path, 1, job=AGAIN).get_partial_path(5)
    )
    other.get_partial_path(5).mkdir()
    mark = other.create_visibility_mark()
    one.claim()
    assert other.get_partial_path(5).exists()
    assert other.has_visibility_mark(mark)
    claim_folder(tmp_path, AGAIN)
    one.get_partial_path(5).mkdir()
    claim_folder(tmp_path, AGAIN, round_=2)
    assert not one.get_partial_path(5).exists(), "an earlier run of the same job left it"


def test_an_evaluation_next_to_the_job_disturbs_no_run(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, ONE)
    publish_step(folder, 300)
    folder.get_partial_path(400).mkdir()
    before = read_contents(tmp_path)
    reader = CheckpointFolder(tmp_path, 1, job=OTHER, read_only=True)
    assert list_steps(reader) == [300]
    assert read_contents(tmp_path) == before
    shutil.rmtree(folder.get_partial_path(400))
    assert publish_step(folder, 400)
    assert list_steps(reader) == [400, 300]
    with pytest.raises(InputError, match="is not there"):
        CheckpointFolder(tmp_path / "absent", 1, read_only=True)


# Runs without an operator


def test_a_script_is_its_own_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom pacekeeper.environment import JobIdentity\nos.chdir('/')\n"
        "for variables in ({}, {'PACEKEEPER_RUNTIME': '/dev/shm/7'}, {'PACEKEEPER_JOB': 'sweep-3'}):\n"
        "    job = JobIdentity.from_variables(variables)\n"
        "    print(job.name, job.uid, sep='|')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [f"{script}|", f"{script}|/dev/shm/7", "sweep-3|"]


def test_a_job_of_the_operator_has_its_name_and_uid() -> None:
    variables = {"PACEKEEPER_JOB": "gpt", "PACEKEEPER_NAMESPACE": "team", "PACEKEEPER_RUNTIME": "/run/pacekeeper"}
    assert Environment.read(variables).job == JobIdentity("team/gpt"), "of an operator that does not send the UID"
    assert Environment.read({**variables, "PACEKEEPER_JOB_UID": "7"}).job == JobIdentity("team/gpt", "7")


def test_two_concurrent_runs_of_one_script_are_distinguished_and_successive_runs_continue(tmp_path: Path) -> None:
    first, second = JobIdentity("/home/train.py", "run-1"), JobIdentity("/home/train.py", "run-2")
    with run_in_process(lambda: claim_folder(tmp_path, first)) as pid:
        with pytest.raises(InputError, match=f"in use by another run of /home/train.py, process {pid} on this host"):
            CheckpointFolder(tmp_path, 1, job=second)
        assert CheckpointFolder(tmp_path, 2, job=first), "its next round"
    assert claim_folder(tmp_path, second)


@contextmanager
def run_in_process(begin: Callable[[], object]) -> Iterator[int]:
    """Run `begin` in a process that lives until the block ends."""
    done, hold = multiprocessing.Event(), multiprocessing.Event()

    def begin_and_wait() -> None:
        begin()
        done.set()
        hold.wait()

    process = multiprocessing.get_context("fork").Process(target=begin_and_wait, daemon=True)
    process.start()
    try:
        assert done.wait(60)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join(60)


# In one step


def test_one_of_many_concurrent_claims_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [JobIdentity(f"team/job-{number}", f"uid-{number}") for number in range(8)]
    ready = context.Barrier(len(jobs))
    results: Any = context.SimpleQueue()

    def claim_when_ready(job: JobIdentity) -> None:
        folder = CheckpointFolder(tmp_path, 1, job=job)
        ready.wait(60)
        try:
            folder.claim()
        except InputError:
            results.put("")
        else:
            results.put(job.name)

    processes = [context.Process(target=claim_when_ready, args=(job,), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    winners = {results.get() for _ in jobs} - {""}
    for process in processes:
        process.join(60)
    assert len(winners) == 1
    (winner,) = winners
    assert json.loads((tmp_path / "owner.json").read_text())["job"] == winner
    assert not list(tmp_path.glob(".taking-*"))


class SimulatedCrash(BaseException):
    """The machine goes down."""


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[Callable[[], int]]:
    """End the process before its call of this number that changes a file system, and change nothing from there on.

    Yields a function that returns the number of calls made.
    """
    made = 0

    def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_crash(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made >= call:
                raise SimulatedCrash
            return original(*arguments, **options)

        return call_or_crash

    with monkeypatch.context() as patched:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            patched.setattr(os, name, wrap_call(getattr(os, name)))
        yield lambda: made


def list_crashes(
    root: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object], prepare: Callable[[Path], object]
) -> Iterator[Path]:
    """Yield the folder after a crash at each of the calls of `act`, in turn."""
    for call in itertools.count(1):
        path = root / str(call)
        path.mkdir()
        prepare(path)
        with crash_at(monkeypatch, call) as made, suppress(SimulatedCrash):
            act(path)
        yield path
        if made() < call:
            assert call > 5, "it changes something"
            return


@pytest.mark.parametrize("job", [ONE, OTHER], ids=["its own", "adopted"])
def test_an_interrupted_claim_leaves_an_owner_and_all_checkpoints(
    job: JobIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt = "" if job is ONE else "team/one"

    def prepare_folder(path: Path) -> None:
        publish_step(claim_folder(path, ONE), 300)

    def claim_again(path: Path) -> None:
        claim_folder(path, job, round_=2, adopt=adopt)

    for path in list_crashes(tmp_path, monkeypatch, claim_again, prepare_folder):
        owner = folder_ownership.read_claims(path).owner
        assert owner is not None
        assert owner.job in ("team/one", job.name)
        with pytest.raises(InputError):
            CheckpointFolder(path, 1, job=JobIdentity("team/third", "uid-9"))
        later = claim_folder(path, job, round_=3, adopt=adopt)
        assert list_steps(later) == [300]
        assert publish_step(later, 400)
        assert not list(path.glob(".taking-*"))
        assert not list(path.glob("step-*.*"))


def test_an_interrupted_first_claim_blocks_no_later_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in list_crashes(tmp_path, monkeypatch, lambda path: claim_folder(path, ONE), lambda _: None):
        taken = folder_ownership.read_claims(path).owner is not None
        if taken:
            with pytest.raises(InputError, match="team/one"):
                CheckpointFolder(path, 1, job=OTHER)
        assert publish_step(claim_folder(path, ONE if taken else OTHER, round_=2), 300)


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_replacement_of_a_checkpoint_loses_nothing(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_folder(path: Path) -> None:
        publish_step(claim_folder(path, ONE), 300, b"before")
        if torn:
            os.truncate(path / "step-00000300/__0_0.distcp", 1)

    def replace_checkpoint(path: Path) -> None:
        publish_step(claim_folder(path, ONE, round_=2), 300, b"after")

    after = False
    for path in list_crashes(tmp_path, monkeypatch, replace_checkpoint, prepare_folder):
        found = CheckpointFolder(path, 3, job=ONE)
        before_claim = [
            (found.find_folder(manifest) / "__0_0.distcp").read_bytes() for manifest in found.list_published()
        ]
        found.claim()
        (now, *_) = [*found.list_published(), None]
        bytes_now = [] if now is None else [(path / "step-00000300/__0_0.distcp").read_bytes()]
        assert before_claim == bytes_now, "what is read before the claim is what is there afterwards"
        assert bytes_now in ([b"before"], [b"after"]) or (torn and not after), "one of them is there always"
        assert not after or bytes_now == [b"after"], "once it is published it stays"
        after = after or bytes_now == [b"after"]
        assert not list(path.glob("step-00000300.*"))
    assert after


def test_an_interrupted_replacement_of_an_older_version_is_completed(tmp_path: Path) -> None:
    publish_step(claim_folder(tmp_path, ONE), 300)
    (tmp_path / "step-00000300").rename(tmp_path / "step-00000300.replaced-r1")
    folder = CheckpointFolder(tmp_path, 2, job=ONE)
    (manifest,) = folder.list_published()
    assert folder.find_folder(manifest).name == "step-00000300.replaced-r1"
    folder.claim()
    assert folder.find_folder(manifest).name == "step-00000300"


def test_old_claims_are_deleted_and_a_very_late_job_does_not_become_the_owner(tmp_path: Path) -> None:
    for round_ in range(1, 20):
        claim_folder(tmp_path, ONE, round_)
    assert len(list(tmp_path.glob(".owner-*"))) == folder_ownership._RETAINED_CLAIMS
    late = folder_ownership.FolderClaimant(OTHER, 1).build_next_owner(None, None)
    assert not folder_ownership.take_folder(tmp_path, 2, late)
    assert folder_ownership.read_claims(tmp_path).owner is not None
    assert folder_ownership.read_claims(tmp_path).owner.job == "team/one"  # type: ignore[union-attr]

"""A folder of checkpoints belongs to one job: others change nothing there, and who owns it is decided in one step."""

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


def claimed(path: Path, job: JobIdentity, round_: int = 1, **options: Any) -> CheckpointFolder:
    folder = CheckpointFolder(path, round_, job=job, **options)
    folder.claim()
    return folder


def publish(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> bool:
    partial = folder.get_partial_path(step)
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(content)
    files: dict[str, FileChecksum] = {path.name: compute_checksum(path) for path in partial.iterdir()}
    job = folder.job
    return folder.publish(Manifest(step, folder.round, 1, {}, ("model",), files, job.name, job.uid))


def steps(folder: CheckpointFolder) -> list[int]:
    return [manifest.step for manifest in folder.list_published()]


def content(path: Path) -> dict[str, bytes | None]:
    """All that is below a folder."""
    return {str(its.relative_to(path)): its.read_bytes() if its.is_file() else None for its in path.rglob("*")}


def make_old(path: Path) -> None:
    """The folder as a version without identities has left it."""
    for claim in path.glob(".owner-*"):
        shutil.rmtree(claim)
    (path / "owner.json").write_text(json.dumps({"owner": "r7-0011223344556677"}))
    for manifest in path.glob("step-*/manifest.json"):
        said = json.loads(manifest.read_text())
        for name in ("job", "uid", "checksum"):
            del said[name]
        manifest.write_text(json.dumps(said))


# Whose it is


def test_another_jobs_folder_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    first = claimed(tmp_path, ONE)
    publish(first, 300)
    first.get_partial_path(400).mkdir()
    before = content(tmp_path)
    with pytest.raises(InputError) as refused:
        CheckpointFolder(tmp_path, 1, job=OTHER)
    for words in ("team/one (UID uid-1)", "spec.checkpoint.subPath", "spec.checkpoint.adopt: team/one", "read_only"):
        assert words in str(refused.value)
    assert content(tmp_path) == before
    assert publish(first, 500)


def test_the_same_job_applied_again_goes_on_and_the_one_before_does_not_come_back(tmp_path: Path) -> None:
    first = claimed(tmp_path, ONE)
    publish(first, 300)
    second = claimed(tmp_path, AGAIN)
    assert steps(second) == [300]
    assert not publish(first, 400)
    assert "team/one (UID uid-2)" in first.new_owner_message
    with pytest.raises(InputError, match="belongs to a later run of this job by now"):
        CheckpointFolder(tmp_path, 2, job=ONE)
    assert publish(claimed(tmp_path, AGAIN, round_=2), 500)


def test_a_later_round_of_the_same_run_is_no_news_of_an_owner(tmp_path: Path) -> None:
    first = claimed(tmp_path, ONE)
    claimed(tmp_path, ONE, round_=2)
    assert not publish(first, 300)
    assert first.new_owner_message == ""


def test_a_process_of_the_job_that_is_none_of_its_ranks_does_not_take_the_folder(tmp_path: Path) -> None:
    """Such as an evaluation that somebody starts in a worker's container."""
    folder = claimed(tmp_path, ONE)
    with pytest.raises(InputError, match=r"this process is none of them.*read_only=True"):
        CheckpointFolder(tmp_path, 0, job=ONE)
    assert publish(folder, 300)


def test_a_folder_of_an_older_version_is_adopted_by_the_first_and_by_no_second(tmp_path: Path) -> None:
    publish(claimed(tmp_path, ONE), 300)
    make_old(tmp_path)
    (tmp_path / "step-00000400.partial-r7").mkdir()
    folder = claimed(tmp_path, OTHER)
    assert steps(folder) == [300]
    assert not (tmp_path / "step-00000400.partial-r7").exists()
    with pytest.raises(InputError, match="team/other"):
        CheckpointFolder(tmp_path, 1, job=ONE)
    for step in (400, 500, 600):
        assert publish(folder, step)
    assert steps(folder) == [600, 500, 400], "it takes care of what it has adopted"


def test_an_older_version_that_goes_on_in_between_does_not_lose_the_owners_name(tmp_path: Path) -> None:
    claimed(tmp_path, ONE)
    (tmp_path / "owner.json").write_text(json.dumps({"owner": "r2-0011223344556677"}))
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path, 1, job=OTHER)
    assert publish(claimed(tmp_path, ONE, round_=3), 300)


def test_checkpoints_say_whose_they_are_where_the_folder_does_not(tmp_path: Path) -> None:
    """They were copied there."""
    publish(claimed(tmp_path / "one", ONE), 300)
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "one/step-00000300", tmp_path / "other/step-00000300")
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path / "other", 1, job=OTHER)
    assert steps(claimed(tmp_path / "other", OTHER, adopt="team/one")) == [300]


def test_adoption_is_asked_for_by_name_and_the_one_before_is_told(tmp_path: Path) -> None:
    first = claimed(tmp_path, ONE)
    publish(first, 300)
    with pytest.raises(InputError, match="team/one"):
        CheckpointFolder(tmp_path, 1, job=OTHER, adopt="team/third")
    second = claimed(tmp_path, OTHER, adopt="team/one")
    assert steps(second) == [300]
    assert not publish(first, 400)
    assert "team/other (UID uid-3)" in first.new_owner_message
    for step in (400, 500, 600, 700):
        assert publish(second, step)
    assert steps(second) == [700, 600, 500, 300], "what another job has written is not its to delete"
    later = claimed(tmp_path, OTHER, round_=2)
    assert steps(later) == [700, 600, 500, 300], "it need not ask again"
    with pytest.raises(InputError, match="team/other"):
        CheckpointFolder(tmp_path, 2, job=ONE)


def test_what_a_job_has_adopted_goes_with_it(tmp_path: Path) -> None:
    publish(claimed(tmp_path, ONE), 300)
    claimed(tmp_path, OTHER, adopt="team/one")
    third = JobIdentity("team/third", "uid-9")
    assert steps(CheckpointFolder(tmp_path, 1, job=third, adopt="team/other")) == [300]
    assert steps(claimed(tmp_path, third, adopt="team/other")) == [300]


def test_there_must_be_something_to_adopt(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no checkpoints, but spec\.checkpoint\.adopt expects"):
        CheckpointFolder(tmp_path, 1, job=OTHER, adopt="team/one")
    assert content(tmp_path) == {}
    publish(claimed(tmp_path, ONE), 1)
    assert claimed(tmp_path, ONE, adopt="team/one")


def test_what_a_job_that_was_late_has_written_is_not_gone_on_from_nor_deleted(tmp_path: Path) -> None:
    folder = claimed(tmp_path, ONE)
    publish(folder, 300)
    publish(claimed(tmp_path / "elsewhere", OTHER), 750)
    (tmp_path / "elsewhere/step-00000750").rename(tmp_path / "step-00000750")
    assert steps(claimed(tmp_path, ONE, round_=2)) == [300]
    for step in range(800, 900, 10):
        folder = claimed(tmp_path, ONE, round_=step)
        assert publish(folder, step)
    assert steps(folder) == [890, 880, 870]
    assert (tmp_path / "step-00000750/manifest.json").exists()


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Such as that of a job with a name like this, of which the claim's root is another job's folder."""
    (tmp_path / "step-00000100").mkdir()
    (tmp_path / "step-00000100/its").write_text("")
    folder = claimed(tmp_path, ONE, keep=1)
    for step in (100, 200, 300):
        assert publish(folder, step)
    assert steps(folder) == [300]
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
    claimed(tmp_path, AGAIN)
    one.get_partial_path(5).mkdir()
    claimed(tmp_path, AGAIN, round_=2)
    assert not one.get_partial_path(5).exists(), "an earlier run of the same job left it"


def test_an_evaluation_beside_the_job_disturbs_nobody(tmp_path: Path) -> None:
    folder = claimed(tmp_path, ONE)
    publish(folder, 300)
    folder.get_partial_path(400).mkdir()
    before = content(tmp_path)
    reader = CheckpointFolder(tmp_path, 1, job=OTHER, read_only=True)
    assert steps(reader) == [300]
    assert content(tmp_path) == before
    shutil.rmtree(folder.get_partial_path(400))
    assert publish(folder, 400)
    assert steps(reader) == [400, 300]
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
    assert Environment.read(variables).job == JobIdentity("team/gpt"), "of an operator that does not tell the UID"
    assert Environment.read({**variables, "PACEKEEPER_JOB_UID": "7"}).job == JobIdentity("team/gpt", "7")


def test_two_runs_of_one_script_at_once_are_told_apart_and_one_after_the_other_go_on(tmp_path: Path) -> None:
    first, second = JobIdentity("/home/train.py", "run-1"), JobIdentity("/home/train.py", "run-2")
    with another_process(lambda: claimed(tmp_path, first)) as pid:
        with pytest.raises(InputError, match=f"in use by another run of /home/train.py, process {pid} on this host"):
            CheckpointFolder(tmp_path, 1, job=second)
        assert CheckpointFolder(tmp_path, 2, job=first), "its next round"
    assert claimed(tmp_path, second)


@contextmanager
def another_process(begin: Callable[[], object]) -> Iterator[int]:
    """It has done this, and lives until the block ends."""
    done, hold = multiprocessing.Event(), multiprocessing.Event()

    def main() -> None:
        begin()
        done.set()
        hold.wait()

    process = multiprocessing.get_context("fork").Process(target=main, daemon=True)
    process.start()
    try:
        assert done.wait(60)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join(60)


# In one step


def test_of_many_that_want_a_folder_at_once_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [JobIdentity(f"team/job-{number}", f"uid-{number}") for number in range(8)]
    ready = context.Barrier(len(jobs))
    results: Any = context.SimpleQueue()

    def main(job: JobIdentity) -> None:
        folder = CheckpointFolder(tmp_path, 1, job=job)
        ready.wait(60)
        try:
            folder.claim()
        except InputError:
            results.put("")
        else:
            results.put(job.name)

    processes = [context.Process(target=main, args=(job,), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    winners = {results.get() for _ in jobs} - {""}
    for process in processes:
        process.join(60)
    assert len(winners) == 1
    (winner,) = winners
    assert json.loads((tmp_path / "owner.json").read_text())["job"] == winner
    assert not list(tmp_path.glob(".taking-*"))


class Crash(BaseException):
    """The host goes down."""


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[Callable[[], int]]:
    """The process ends before its call of this number that changes a file system, and changes nothing from there on.

    Yields what gives the calls that were made.
    """
    made = 0

    def mortal(original: Callable[..., Any]) -> Callable[..., Any]:
        def dies(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made >= call:
                raise Crash
            return original(*arguments, **options)

        return dies

    with monkeypatch.context() as patched:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            patched.setattr(os, name, mortal(getattr(os, name)))
        yield lambda: made


def crashes(
    root: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object], prepare: Callable[[Path], object]
) -> Iterator[Path]:
    """The folder after a crash at each of the calls of `act`, in turn."""
    for call in itertools.count(1):
        path = root / str(call)
        path.mkdir()
        prepare(path)
        with crash_at(monkeypatch, call) as made, suppress(Crash):
            act(path)
        yield path
        if made() < call:
            assert call > 5, "it changes something"
            return


@pytest.mark.parametrize("job", [ONE, OTHER], ids=["its own", "adopted"])
def test_a_claim_that_is_cut_off_leaves_an_owner_and_all_checkpoints(
    job: JobIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt = "" if job is ONE else "team/one"

    def prepare(path: Path) -> None:
        publish(claimed(path, ONE), 300)

    def claim(path: Path) -> None:
        claimed(path, job, round_=2, adopt=adopt)

    for path in crashes(tmp_path, monkeypatch, claim, prepare):
        owner = folder_ownership.read_claims(path).owner
        assert owner is not None
        assert owner.job in ("team/one", job.name)
        with pytest.raises(InputError):
            CheckpointFolder(path, 1, job=JobIdentity("team/third", "uid-9"))
        later = claimed(path, job, round_=3, adopt=adopt)
        assert steps(later) == [300]
        assert publish(later, 400)
        assert not list(path.glob(".taking-*"))
        assert not list(path.glob("step-*.*"))


def test_a_first_claim_that_is_cut_off_hinders_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in crashes(tmp_path, monkeypatch, lambda path: claimed(path, ONE), lambda _: None):
        taken = folder_ownership.read_claims(path).owner is not None
        if taken:
            with pytest.raises(InputError, match="team/one"):
                CheckpointFolder(path, 1, job=OTHER)
        assert publish(claimed(path, ONE if taken else OTHER, round_=2), 300)


@pytest.mark.parametrize("torn", [False, True])
def test_a_checkpoint_that_takes_anothers_place_loses_nothing_when_it_is_cut_off(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(path: Path) -> None:
        publish(claimed(path, ONE), 300, b"before")
        if torn:
            os.truncate(path / "step-00000300/__0_0.distcp", 1)

    def replace(path: Path) -> None:
        publish(claimed(path, ONE, round_=2), 300, b"after")

    after = False
    for path in crashes(tmp_path, monkeypatch, replace, prepare):
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


def test_what_an_older_version_was_cut_off_in_comes_back(tmp_path: Path) -> None:
    publish(claimed(tmp_path, ONE), 300)
    (tmp_path / "step-00000300").rename(tmp_path / "step-00000300.replaced-r1")
    folder = CheckpointFolder(tmp_path, 2, job=ONE)
    (manifest,) = folder.list_published()
    assert folder.find_folder(manifest).name == "step-00000300.replaced-r1"
    folder.claim()
    assert folder.find_folder(manifest).name == "step-00000300"


def test_old_claims_go_and_a_job_that_was_late_by_as_many_does_not_become_the_owner(tmp_path: Path) -> None:
    for round_ in range(1, 20):
        claimed(tmp_path, ONE, round_)
    assert len(list(tmp_path.glob(".owner-*"))) == folder_ownership._RETAINED_CLAIMS
    late = folder_ownership.FolderClaimant(OTHER, 1).build_next_owner(None, None)
    assert not folder_ownership.take_folder(tmp_path, 2, late)
    assert folder_ownership.read_claims(tmp_path).owner is not None
    assert folder_ownership.read_claims(tmp_path).owner.job == "team/one"  # type: ignore[union-attr]

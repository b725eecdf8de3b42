"""Checkpoints in an object store: publication, ownership, retention, and what a store does not answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from pacekeeper.checkpointing.storage.manifests import Manifest
from pacekeeper.checkpointing.storage.object_checkpoints import ObjectCheckpoints
from pacekeeper.checkpointing.storage.object_store import ObjectStore
from pacekeeper.environment import JobIdentity
from pacekeeper_analysis.errors import InputError
from testing.storage.faulty_store import FaultyFileSystem, create_store, read_objects

ONE, AGAIN, OTHER = (
    JobIdentity("team/one", "uid-1"),
    JobIdentity("team/one", "uid-2"),
    JobIdentity("team/other", "uid-3"),
)
DATA = "__0_0.distcp"


class Crash(BaseException):
    """The process ends here."""


def claim_store(store: ObjectStore, job: JobIdentity = ONE, round_: int = 1, **options: Any) -> ObjectCheckpoints:
    checkpoints = ObjectCheckpoints(store, round_, job=job, **options)
    checkpoints.claim()
    return checkpoints


def write_step(checkpoints: ObjectCheckpoints, step: int, content: bytes) -> Manifest:
    files = checkpoints.begin_attempt(step)
    files.write_file(DATA, len(content), lambda file: file.write(content))
    job = checkpoints._job
    return Manifest(step, checkpoints.round, 1, {}, (), {DATA: files.compute_checksum(DATA)}, job.name, job.uid)


def publish_step(checkpoints: ObjectCheckpoints, step: int, content: bytes = b"weights") -> bool:
    return checkpoints.publish(write_step(checkpoints, step, content))


def list_steps(checkpoints: ObjectCheckpoints) -> list[int]:
    return [manifest.step for manifest in checkpoints.list_published()]


def read_contents(checkpoints: ObjectCheckpoints) -> dict[int, bytes]:
    return {
        manifest.step: checkpoints.open_checkpoint(manifest).read_file(DATA)
        for manifest in checkpoints.list_published()
    }


def find_folders(filesystem: FaultyFileSystem) -> set[str]:
    return {path.split("/")[3] for path in filesystem.store if "/step-" in path}


def fail_requests(*kinds: str, ending: str = "") -> Callable[[str, str], None]:
    def fail(kind: str, path: str) -> None:
        if kind in kinds and path.endswith(ending):
            raise ConnectionError("reset")

    return fail


# Publication


def test_a_published_checkpoint_is_found_by_the_next_round() -> None:
    filesystem, store = create_store()
    first = claim_store(store)
    assert list_steps(first) == []
    assert publish_step(first, 100, b"early")
    write_step(first, 300, b"not published")
    assert publish_step(first, 200, b"late")
    second = ObjectCheckpoints(store, 2, job=ONE)
    assert read_contents(second) == {200: b"late", 100: b"early"}
    assert len(find_folders(filesystem)) == 3
    second.claim()
    assert len(find_folders(filesystem)) == 2, "what was not published is gone"


def test_a_crash_at_any_change_leaves_a_complete_checkpoint() -> None:
    """The previous one, or the new one; and the next round can publish."""
    for number in range(1000):
        filesystem, store = create_store()
        left = [number]

        def crash(kind: str, _: str, left: list[int] = left) -> None:
            left[0] -= kind in ("put", "delete", "open")
            if left[0] < 0:
                raise Crash

        assert publish_step(claim_store(store, keep=1), 100, b"early")
        crashed = False
        filesystem.before = crash
        try:
            publish_step(claim_store(store, round_=2, keep=1), 200, b"late")
        except Crash:
            crashed = True
        filesystem.before = lambda *_: None
        third = claim_store(store, round_=3, keep=1)
        newest = third.list_published()[0].step
        assert read_contents(third)[newest] == {100: b"early", 200: b"late"}[newest]
        assert publish_step(third, 300)
        assert find_folders(filesystem) == {third.list_published()[0].folder}
        if not crashed:
            return
    raise AssertionError("it always crashes")


def test_a_manifest_that_cannot_be_stored_leaves_the_previous_checkpoint() -> None:
    filesystem, store = create_store()
    checkpoints = claim_store(store)
    publish_step(checkpoints, 100)
    manifest = write_step(checkpoints, 200, b"late")
    filesystem.before = fail_requests("put", ending="manifest.json")
    with pytest.raises(OSError, match="reset"):
        checkpoints.publish(manifest)
    filesystem.before = lambda *_: None
    checkpoints.discard(200, lambda _: True)
    assert list_steps(checkpoints) == [100]
    assert len(find_folders(filesystem)) == 1
    assert publish_step(checkpoints, 200, b"again")
    assert read_contents(checkpoints)[200] == b"again"


def test_a_checkpoint_whose_answer_is_lost_is_published() -> None:
    filesystem, store = create_store()
    checkpoints = claim_store(store)
    filesystem.after = fail_requests("put", ending="manifest.json")
    assert publish_step(checkpoints, 100)
    assert list_steps(checkpoints) == [100]


def test_a_torn_checkpoint_is_not_used() -> None:
    _, store = create_store()
    checkpoints = claim_store(store)
    for step in (100, 200, 300):
        publish_step(checkpoints, step)
    newest, middle, _ = checkpoints.list_published()
    store.put(f"{newest.folder}/{DATA}", b"short")
    store.put(f"{middle.folder}/manifest.json", b"{")
    assert list_steps(checkpoints) == [100]
    store.delete(f"{newest.folder}/{DATA}")
    assert list_steps(checkpoints) == [100]
    with pytest.raises(InputError, match="lacks what the ranks have written"):
        checkpoints.publish(Manifest(400, 1, 1, {}, (), newest.files, "team/one", "uid-1"))


def test_what_a_listing_shows_late_is_found() -> None:
    """The newest checkpoint, and the claims."""
    filesystem, store = create_store()
    first = claim_store(store)
    publish_step(first, 100)
    publish_step(first, 200)
    hidden = {f"/{name}" for name in store.list_entries()} | {f"/{DATA}", "/manifest.json"}
    filesystem.hidden = hidden
    store.delete("owner.json")  # a crash of the claimant has left it out
    second = claim_store(store, AGAIN)
    assert list_steps(second) == [200, 100]
    assert not publish_step(first, 300)
    assert "team/one (UID uid-2)" in first.new_owner_message
    with pytest.raises(InputError, match=r"team/one \(UID uid-2\)"):
        ObjectCheckpoints(store, 1, job=OTHER)


# Ownership


def test_another_jobs_checkpoints_are_refused_before_anything_is_changed() -> None:
    filesystem, store = create_store()
    first = claim_store(store)
    publish_step(first, 300)
    write_step(first, 400, b"in progress")
    before = read_objects(filesystem)
    with pytest.raises(InputError) as refused:
        ObjectCheckpoints(store, 1, job=OTHER)
    for expected in (
        "spec.checkpoint.uri: s3://bucket/folder",
        "team/one (UID uid-1)",
        "spec.checkpoint.adopt: team/one",
    ):
        assert expected in str(refused.value)
    assert read_objects(filesystem) == before
    assert publish_step(first, 500)


def test_an_adopted_store_changes_its_owner_and_keeps_the_others_checkpoints() -> None:
    _, store = create_store()
    first = claim_store(store)
    publish_step(first, 100)
    write_step(first, 150, b"not published")
    other = claim_store(store, OTHER, adopt="team/one", keep=1)
    assert list_steps(other) == [100]
    assert not publish_step(first, 200)
    assert "team/other" in first.new_owner_message
    for step in (200, 300):
        assert publish_step(other, step)
    assert list_steps(other) == [300, 100]
    with pytest.raises(InputError, match="team/other"):
        ObjectCheckpoints(store, 2, job=ONE)


def test_of_two_jobs_that_claim_at_once_one_gets_the_store() -> None:
    _, store = create_store()
    one, other = ObjectCheckpoints(store, 1, job=ONE), ObjectCheckpoints(store, 1, job=OTHER)
    one.claim()
    with pytest.raises(InputError, match="team/one"):
        other.claim()
    assert publish_step(one, 100)


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_claims_with_one_number_the_last_one_counts_if_the_store_ignores_conditions(
    conditional: bool, caplog: pytest.LogCaptureFixture
) -> None:
    filesystem, store = create_store()
    if not conditional:
        put = filesystem.pipe_file
        filesystem.pipe_file = lambda path, value, **_: put(path, value)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        one = ObjectCheckpoints(store, 1, job=ONE)
    assert ("ignores conditional writes" in caplog.text) is not conditional
    other = ObjectCheckpoints(store, 1, job=OTHER)
    read_claims = other._read_claims
    stale = read_claims()
    one.claim()
    other._read_claims = lambda: stale if other._own_claim is None else read_claims()  # type: ignore[method-assign]
    if conditional:
        other.claim()
        assert publish_step(one, 100), "the other one could not claim it"
        assert not publish_step(other, 100)
    else:
        other.claim()
        assert not publish_step(one, 100)
        assert "team/other" in one.new_owner_message
        assert publish_step(other, 100)


def test_a_later_round_supersedes_an_earlier_one_however_many_there_were() -> None:
    filesystem, store = create_store()
    first = claim_store(store)
    for round_ in range(2, 22):
        last = claim_store(store, round_=round_)
    claims = [path for path in filesystem.store if ".owner-" in path]
    assert len(claims) == 8
    assert not publish_step(first, 100)
    assert first.new_owner_message == ""
    assert publish_step(last, 100)
    with pytest.raises(InputError, match="this process is none of them"):
        ObjectCheckpoints(store, 0, job=ONE)


def test_an_emptied_store_is_claimed_again() -> None:
    filesystem, store = create_store()
    checkpoints = claim_store(store)
    publish_step(checkpoints, 100)
    filesystem.store.clear()
    assert publish_step(checkpoints, 200)
    assert list_steps(ObjectCheckpoints(store, 2, job=ONE)) == [200]


def test_an_evaluation_reads_any_jobs_checkpoints_and_writes_nothing() -> None:
    filesystem, store = create_store()
    with pytest.raises(InputError, match="has no checkpoints"):
        ObjectCheckpoints(store, 1, read_only=True)
    publish_step(claim_store(store), 100)
    before = read_objects(filesystem)
    assert list_steps(ObjectCheckpoints(store, 1, job=OTHER, read_only=True)) == [100]
    assert read_objects(filesystem) == before


# Retention


def test_the_newest_checkpoints_remain() -> None:
    filesystem, store = create_store()
    checkpoints = claim_store(store, keep=2)
    for step in (100, 200, 300, 400):
        publish_step(checkpoints, step)
    assert list_steps(checkpoints) == [400, 300]
    assert len(find_folders(filesystem)) == 2
    again = claim_store(store, round_=2, keep=2)
    assert publish_step(again, 400, b"of another number of ranks")
    assert read_contents(again)[400] == b"of another number of ranks"
    assert len(find_folders(filesystem)) == 2
    assert len(json.loads(store.get(".published.json") or b"")["folders"]) == 2


# A store that does not answer


def test_an_outage_at_the_start_neither_ends_the_job_nor_lets_it_begin_from_scratch() -> None:
    filesystem, store = create_store()
    publish_step(claim_store(store), 100)
    filesystem.before = fail_requests("put", "get", "list", "size", "delete", "open")
    second = claim_store(store, round_=2)
    with pytest.raises(OSError, match="reset"):
        list_steps(second)
    filesystem.before = lambda *_: None
    assert publish_step(second, 200), "it claims the store late"
    assert list_steps(second) == [200, 100]


def test_an_outage_at_the_start_gives_no_access_to_another_jobs_checkpoints() -> None:
    filesystem, store = create_store()
    publish_step(claim_store(store), 100)
    filesystem.before = fail_requests("put", "get", "list")
    other = claim_store(store, OTHER)
    filesystem.before = lambda *_: None
    with pytest.raises(InputError, match="team/one"):
        list_steps(other)
    assert not publish_step(other, 200)
    assert "team/one" in other.new_owner_message


def test_a_superseded_round_does_not_claim_late() -> None:
    filesystem, store = create_store()
    filesystem.before = fail_requests("put", "get", "list")
    late = claim_store(store, round_=1)
    filesystem.before = lambda *_: None
    claim_store(store, round_=2)
    assert not publish_step(late, 100)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError("Access Denied"), r"allow the workers to .* by credentials in the template's environment"),
        (FileNotFoundError("The specified bucket does not exist"), "create the bucket"),
    ],
)
def test_a_refusal_at_the_start_names_field_and_remedy(error: OSError, remedy: str) -> None:
    filesystem, store = create_store()

    def refuse(kind: str, _: str) -> None:
        if kind == "put":
            raise error

    filesystem.before = refuse
    with pytest.raises(InputError, match=rf"spec\.checkpoint\.uri: s3://bucket/folder cannot be used: .*{remedy}"):
        ObjectCheckpoints(store, 1, job=ONE)

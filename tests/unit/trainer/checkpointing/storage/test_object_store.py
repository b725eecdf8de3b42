"""Requests to an object store: limits, retries, and what is refused."""

from __future__ import annotations

import threading

import pytest

from pacekeeper.checkpointing.storage import object_store
from pacekeeper.checkpointing.storage.checkpoint_storage import StorageUnavailableError
from pacekeeper.checkpointing.storage.object_store import (
    MAX_STORAGE_ATTEMPTS,
    ObjectStore,
    choose_part_bytes,
    explain_uri_refusal,
    open_object_store,
)
from pacekeeper_analysis.errors import InputError
from testing.storage.faulty_store import FaultyFileSystem, create_store


@pytest.mark.parametrize(
    ("uri", "refusal"),
    [
        ("s3://bucket/team/job", ""),
        ("gs://bucket", ""),
        ("file:///mnt/checkpoints", ""),
        ("abfs://container@account.dfs.core.windows.net/job", ""),
        ("hdfs://namenode:8020/checkpoints", ""),
        ("memory://job", "must outlive the workers"),
        ("https://host/job", "must outlive the workers"),
        ("bucket/job", "must be a URI"),
        ("s3://bucket/", "without a slash at its end"),
        ("s3://bucket/a b", "must be a URI"),
        ("simplecache::s3://bucket/job", "must be a URI"),
        ("s3://bucket/job?versionId=1", "without a query"),
        ("s3://key:secret@bucket/job", "must not contain credentials"),
        ("s3://bucket/a/../b", r"without \. and \.\."),
    ],
)
def test_a_uri_that_cannot_hold_checkpoints_is_refused(uri: str, refusal: str) -> None:
    if not refusal:
        assert explain_uri_refusal(uri) == ""
        return
    with pytest.raises(InputError, match=rf"spec\.checkpoint\.uri: '.*' .*{refusal}"):
        open_object_store(uri)


def test_only_the_operator_gives_the_uri_of_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACEKEEPER_RUNTIME", raising=False)
    with pytest.raises(InputError, match=r"spec\.checkpoint\.accessMode.*; take a folder or an object store"):
        open_object_store("claim://checkpoints/job")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(InputError, match=r"spec\.checkpoint\.uri: gs://bucket/job needs a package .*gcsfs.* for gs://"):
        open_object_store("gs://bucket/job")


@pytest.mark.parametrize(("nbytes", "part_bytes"), [(0, 16 << 20), (1 << 30, 16 << 20), (1 << 40, 132 << 20)])
def test_an_upload_has_few_enough_parts(nbytes: int, part_bytes: int) -> None:
    assert choose_part_bytes(nbytes) == part_bytes
    assert nbytes / choose_part_bytes(nbytes) < 10_000


def test_a_request_is_repeated_with_pauses_and_a_refusal_is_not() -> None:
    filesystem, pauses, errors = FaultyFileSystem(), list[float](), list[Exception]()
    store = ObjectStore(filesystem, "/bucket", "s3://bucket", sleep=pauses.append)

    def fail(kind: str, _: str) -> None:
        if kind == "put" and errors:
            raise errors.pop()

    filesystem.before = fail
    errors += [ConnectionError("reset")] * (MAX_STORAGE_ATTEMPTS - 1)
    store.put("a", b"content")
    assert (store.get("a"), pauses) == (b"content", [0.5, 1.0, 2.0])
    errors += [ConnectionError("reset")] * MAX_STORAGE_ATTEMPTS
    with pytest.raises(StorageUnavailableError, match="reset"):
        store.put("a", b"other")
    del pauses[:]
    errors += [ConnectionError("reset")]
    with pytest.raises(StorageUnavailableError, match="reset"):
        store.put("a", b"other")
    assert (pauses, errors) == ([], []), "one attempt, until the store answers"
    store.put("a", b"content")
    errors += [PermissionError("Access Denied")]
    with pytest.raises(PermissionError):
        store.put("a", b"other")
    assert (pauses, errors) == ([], [])


def test_a_request_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "STORAGE_REQUEST_TIMEOUT_SECONDS", 0.02)
    filesystem, store = create_store()
    answer = threading.Event()
    filesystem.before = lambda *_: bool(answer.wait(60))  # type: ignore[assignment]
    with pytest.raises(StorageUnavailableError, match="no answer within"):
        store.get("a")
    answer.set()


def test_a_writer_creates_an_object_once_although_an_answer_is_lost() -> None:
    filesystem, store = create_store()
    lost = [ConnectionError("reset")]

    def lose(kind: str, _: str) -> None:
        if kind == "put" and lost:
            raise lost.pop()

    filesystem.after = lose
    assert store.create("claim", b"one"), "the second attempt finds its own content"
    assert not store.create("claim", b"other")
    assert store.get("claim") == b"one"


def test_a_file_is_written_in_parts_and_not_at_all_if_its_writer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MIN_PART_BYTES", 1 << 20)
    _, store = create_store()
    content = bytes(range(256)) * (10 << 10)
    assert store.write_file("whole", len(content), lambda file: file.write(content)) == len(content)
    assert store.get("whole") == content
    assert store.get_range("whole", 1 << 20, 300) == content[1 << 20 :][:300]
    attempts = []

    def fail_once(file: object) -> str:
        attempts.append(file)
        if len(attempts) == 1:
            raise StorageUnavailableError("reset")
        return "written"

    assert store.write_file("again", 0, fail_once) == "written"

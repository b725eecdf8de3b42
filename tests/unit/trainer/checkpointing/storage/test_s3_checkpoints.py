"""Checkpoints by s3fs, over the S3 protocol of a stand-in on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pacekeeper.checkpointing.storage import object_store
from pacekeeper.checkpointing.storage.checkpoint_storage import StorageUnavailableError
from pacekeeper.checkpointing.storage.distributed_checkpoint import load_checkpoint
from pacekeeper.checkpointing.storage.manifests import Manifest
from pacekeeper.checkpointing.storage.object_checkpoints import ObjectCheckpoints
from pacekeeper.checkpointing.storage.object_store import open_object_store
from pacekeeper.environment import JobIdentity
from pacekeeper_analysis.errors import InputError
from testing.storage.s3_stand_in import S3StandIn, serve_s3

ONE = JobIdentity("team/one", "uid-1")
URI = "s3://bucket/team/one"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3StandIn]:
    monkeypatch.setattr(object_store, "FIRST_STORAGE_RETRY_SECONDS", 0.001)
    with serve_s3() as server:
        for name, value in server.build_variables().items():
            monkeypatch.setenv(name, value)
        yield server


def publish(checkpoints: ObjectCheckpoints, step: int, nbytes: int = 7) -> bool:
    files = checkpoints.begin_attempt(step)
    files.write_file("__0_0.distcp", nbytes, lambda file: file.write(bytes([step % 256]) * nbytes))
    entry = files.compute_checksum("__0_0.distcp")
    return checkpoints.publish(Manifest(step, 1, 1, {}, (), {"__0_0.distcp": entry}, ONE.name, ONE.uid))


def test_checkpoints_are_published_listed_in_pages_and_pruned(s3: S3StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MIN_PART_BYTES", 5 << 20)
    checkpoints = ObjectCheckpoints(open_object_store(URI), 1, 3, ONE)
    checkpoints.claim()
    s3.listings_lag = True
    assert publish(checkpoints, 1, nbytes=11 << 20), "in three parts"
    assert any("POST bucket/team/one/step-00000001" in request for request in s3.requests)
    for step in range(2, 6):
        assert publish(checkpoints, step)
    found = ObjectCheckpoints(open_object_store(URI), 2, 3, ONE)
    assert [manifest.step for manifest in found.list_published()] == [5, 4, 3], "by the index: listings lack them"
    s3.hidden.clear()
    s3.listings_lag = False
    found.claim()
    assert [manifest.step for manifest in found.list_published()] == [5, 4, 3]
    assert not publish(checkpoints, 6), "a later round has claimed the store by a conditional request"
    with pytest.raises(InputError, match=r"team/one \(UID uid-1\)"):
        ObjectCheckpoints(open_object_store(URI), 1, 3, JobIdentity("team/other", "uid-2"))


def test_an_upload_that_fails_half_way_stores_nothing_and_is_repeated(
    s3: S3StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_MIN_PART_BYTES", 5 << 20)
    store = open_object_store(URI)
    store._filesystem.retries = 1  # s3fs repeats requests, too
    content = bytes(range(256)) * (44 << 10)
    s3.fail(lambda request: "partNumber" in request, times=1)
    assert store.write_file("file", len(content), lambda file: file.write(content)) == len(content)
    assert store.get("file") == content
    s3.fail(lambda request: request.startswith("PUT"))
    with pytest.raises(StorageUnavailableError):
        store.write_file("other", len(content), lambda file: file.write(content))
    assert store.get("other") is None
    s3.clear_faults()
    s3.fail(lambda request: request.startswith("PUT"), code="", times=1)
    store.put("other", b"after a connection that was cut")
    assert store.get("other") == b"after a connection that was cut"
    assert (store.get_range("other", 6, 100), store.get_range("other", 100, 6)) == (b"a connection that was cut", b"")


@pytest.mark.parametrize(
    ("uri", "lost", "refusal"),
    [
        ("s3://missing/job", (), "NoSuchBucket.*: create the bucket, or correct spec.checkpoint.uri"),
        (URI, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "Credentials.*: allow the workers to list"),
    ],
    ids=["bucket", "credentials"],
)
def test_what_is_missing_is_named_at_the_start(
    s3: S3StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, lost: tuple[str, ...], refusal: str
) -> None:
    for name in lost:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match=rf"spec\.checkpoint\.uri: {uri} cannot be used: .*{refusal}"):
        ObjectCheckpoints(open_object_store(uri), 1, 3, ONE)
    assert s3.objects == {}


def test_an_outage_while_loading_is_no_damage(s3: S3StandIn) -> None:
    checkpoints = ObjectCheckpoints(open_object_store(URI), 1, 3, ONE)
    checkpoints.claim()
    assert publish(checkpoints, 1)
    checkpoints._store._filesystem.retries = 1
    (manifest,) = checkpoints.list_published()
    s3.fail(lambda request: not request.startswith("PUT"))
    with pytest.raises(StorageUnavailableError):
        load_checkpoint({"weight": torch.zeros(1)}, checkpoints.open_checkpoint(manifest), manifest.files)

"""A claim through its checkpoint server: the server and its client against each other, over loopback."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.checkpointing.server import claim_files
from pacekeeper.checkpointing.server import server as server_module
from pacekeeper.checkpointing.server.claim_files import ABANDONED_UPLOAD_SECONDS, UPLOADS_FOLDER
from pacekeeper.checkpointing.server.protocol import MAX_PART_BYTES, is_object_name
from pacekeeper.checkpointing.storage import claim_filesystem
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder, describe_error
from pacekeeper.checkpointing.storage.checkpoint_storage import CheckpointStorage, StorageUnavailableError
from pacekeeper.checkpointing.storage.claim_filesystem import (
    CheckpointServerUnavailableError,
    ClaimFilesystem,
    read_checkpoint_server,
)
from pacekeeper.checkpointing.storage.manifests import FileChecksum, Manifest
from pacekeeper.checkpointing.storage.object_checkpoints import ObjectCheckpoints
from pacekeeper.checkpointing.storage.object_store import ObjectStore, open_object_store
from pacekeeper.environment import JobIdentity
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, Plan
from testing.storage.claim_server import ClaimServer, serve_claim


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[ClaimServer]:
    with serve_claim(tmp_path / "claim") as server:
        yield server


def open_store(claim: ClaimServer) -> ObjectStore:
    """Open the claim as a worker does, without pauses."""
    filesystem = ClaimFilesystem(lambda: claim.address, sleep=lambda _: None)
    return ObjectStore(filesystem, "", "claim://checkpoints/job", sleep=lambda _: None)


def test_objects_are_stored_read_listed_and_deleted(claim: ClaimServer, tmp_path: Path) -> None:
    store = open_store(claim)
    content = os.urandom(MAX_PART_BYTES * 2 + 100)
    assert store.write_file("step-1/part", len(content), lambda file: file.write(content)) == len(content)
    store.put("manifest.json", b"{}")
    assert store.get("manifest.json") == b"{}"
    store.put("manifest.json", b"")
    assert store.get("manifest.json") == b"", "an object is replaced as a whole"
    assert store.get_range("step-1/part", MAX_PART_BYTES - 5, 10) == content[MAX_PART_BYTES - 5 :][:10]
    assert store.get_range("step-1/part", len(content) - 1, 10) == content[-1:]
    assert store.get_range("step-1/part", len(content) + 5, 10) == b""
    assert (tmp_path / "claim/step-1/part").read_bytes() == content
    assert store.list_entries() == {"manifest.json": 0, "step-1": None}
    assert store.list_entries("step-1") == {"part": len(content)}
    assert (store.get_size("step-1/part"), store.get_size("step-1"), store.get_size("none")) == (
        len(content),
        None,
        None,
    )
    assert (store.get("none"), store.list_entries("none")) == (None, {})
    store.delete("step-1/part")
    store.delete("step-1/part")
    assert store.list_entries() == {"manifest.json": 0}, "an empty folder is none"


def test_of_clients_that_create_one_object_at_a_time_one_succeeds(claim: ClaimServer) -> None:
    barrier = threading.Barrier(4)

    def create(number: int) -> bool:
        store = open_store(claim)
        barrier.wait(120)
        return store.create(".owner-1.json", b"client %d" % number)

    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(create, range(4)))
    assert sum(results) == 1
    assert open_store(claim).get(".owner-1.json") == b"client %d" % results.index(True)


def test_an_upload_continues_on_the_server_that_was_started_in_between(claim: ClaimServer) -> None:
    """The second server has another address, which the next attempt takes from the plan."""
    pauses = []

    def sleep(_: float) -> None:
        pauses.append(1)
        if len(pauses) == 3:
            claim.start()

    store = ObjectStore(ClaimFilesystem(lambda: claim.address, sleep), "", "claim://checkpoints/job")
    content = os.urandom(MAX_PART_BYTES + 100)

    def write(file: object) -> None:
        file.write(content[:MAX_PART_BYTES])  # type: ignore[attr-defined]
        claim.kill()
        file.write(content[MAX_PART_BYTES:])  # type: ignore[attr-defined]

    store.write_file("part", len(content), write)
    assert (store.get("part"), len(pauses)) == (content, 3)


def test_a_connection_that_is_cut_in_a_part_is_repeated(claim: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    write_part, cuts = claim_files.ClaimFiles.write_part, [1, 1]

    def cut_once(files: claim_files.ClaimFiles, upload: str, offset: int, content: bytes) -> None:
        write_part(files, upload, offset, content[: len(content) // 2] if cuts else content)
        if cuts and cuts.pop():
            raise ConnectionResetError

    monkeypatch.setattr(claim_files.ClaimFiles, "write_part", cut_once)
    content = os.urandom(3 << 20)
    store = open_store(claim)
    store.put("part", content)
    assert (store.get("part"), cuts) == (content, [])


def test_without_a_server_a_request_ends_with_the_remedy(claim: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_filesystem, "SERVER_RESTART_SECONDS", 0.0)
    store = open_store(claim)
    claim.kill()
    with pytest.raises(CheckpointServerUnavailableError, match="names no checkpoint server") as raised:
        store.get("a")
    assert "`kubectl describe pod` shows why" in describe_error(raised.value)


@pytest.mark.parametrize("known_by", ["server", "client"])
def test_who_does_not_hold_the_secret_reads_and_writes_nothing(
    claim: ClaimServer, known_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither does a client believe a server that does not."""
    monkeypatch.setattr(claim_filesystem, "SERVER_RESTART_SECONDS", 0.0)
    open_store(claim).put("a", b"content")
    assert claim.address is not None
    claim.address = replace(claim.address, secret="00" * 32)
    if known_by == "client":  # a server that accepts every proof
        monkeypatch.setattr(server_module, "_check_proof", lambda *_: None)
    with pytest.raises(CheckpointServerUnavailableError, match="AuthenticationError"):
        open_store(claim).get("a")
    with pytest.raises(CheckpointServerUnavailableError, match="AuthenticationError"):
        open_store(claim).put("a", b"other")
    if known_by == "server":
        assert (tmp_path / "claim/a").read_bytes() == b"content"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /objects/a HTTP/1.1\r\n\r\n",
        b"GET /nonce/" + b"0" * 32 + b" HTTP/1.1\r\n\r\nGET /objects/a HTTP/1.1\r\nX-Pacekeeper-Proof: 00\r\n\r\n",
        b"PUT /uploads/" + b"0" * 32 + b"?offset=0 HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde",
        b"GET /" + b"a" * (64 << 10),
        b"\xff\r\n\r\n",
        b"GET /nonce/" + b"0" * 32 + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_requests_without_a_proof_are_refused(claim: ClaimServer, request_bytes: bytes, tmp_path: Path) -> None:
    open_store(claim).put("a", b"content")
    assert claim.address is not None
    with socket.create_connection((claim.address.address, claim.address.port), timeout=30) as connection:
        connection.sendall(request_bytes)
        answer = b""
        try:
            while chunk := connection.recv(1 << 16):
                answer += chunk
        except ConnectionResetError:
            pass
    assert b"content" not in answer
    assert os.listdir(tmp_path / "claim" / UPLOADS_FOLDER) == []


def test_a_connection_without_a_proof_ends_in_time(claim: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROOF_TIMEOUT_SECONDS", 0.05)
    assert claim.address is not None
    with socket.create_connection((claim.address.address, claim.address.port), timeout=30) as connection:
        connection.sendall(b"GET /")
        assert connection.recv(1) == b""


def test_the_kubelet_needs_no_proof(claim: ClaimServer) -> None:
    assert claim.address is not None
    with socket.create_connection((claim.address.address, claim.address.port), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.makefile("rb").read() == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize("name", ["..", "a/../../b", "a//b", "", "/a", "a/b/c/d/e", "a\nb", "ä", "a" * 300])
def test_names_stay_below_the_claim(name: str) -> None:
    assert not is_object_name(name)


def test_links_are_not_followed(claim: ClaimServer, tmp_path: Path) -> None:
    store, outside = open_store(claim), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "claim/file").symlink_to(outside / "secret")
    (tmp_path / "claim/folder").symlink_to(outside)
    os.mkfifo(tmp_path / "claim/pipe")
    assert store.list_entries() == {}
    assert [store.get(name) for name in ("file", "folder/secret", "pipe")] == [None] * 3
    with pytest.raises(StorageUnavailableError, match="folder/new was not stored"):
        store.put("folder/new", b"content")
    store.put("file", b"content")
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_full_volume_is_named_with_its_remedy(claim: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(claim)
    store.put("a", b"content")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(claim_files.ClaimFiles, "write_part", refuse)
    with pytest.raises(OSError, match="No space left") as raised:
        store.put("a", bytes(MAX_PART_BYTES))
    assert "make room on the volume" in describe_error(raised.value)
    assert store.get("a") == b"content"


def test_an_upload_whose_writer_was_lost_is_deleted(claim: ClaimServer, tmp_path: Path) -> None:
    filesystem = ClaimFilesystem(lambda: claim.address)
    lost, present = filesystem.open("a", "wb", 1 << 10), filesystem.open("b", "wb", 1 << 10)
    lost.write(b"0" * (1 << 10))
    (path,) = (tmp_path / "claim" / UPLOADS_FOLDER).iterdir()
    old = time.time() - ABANDONED_UPLOAD_SECONDS - 60
    os.utime(path, (old, old))
    present.write(b"0" * (1 << 10))
    present.close()
    with pytest.raises(StorageUnavailableError, match="a was not stored"):
        lost.close()
    assert sorted(os.listdir(tmp_path / "claim")) == [UPLOADS_FOLDER, "b"]
    other = filesystem.open("a", "wb", 1 << 10)
    other.write(b"0" * (1 << 10))
    other.discard()
    assert os.listdir(tmp_path / "claim" / UPLOADS_FOLDER) == []


JOB = JobIdentity("team/job", "1")


def save_empty(storage: CheckpointStorage, step: int) -> None:
    files = storage.begin_attempt(step)
    files.write_file("__0_0.distcp", 4, lambda file: file.write(b"%4d" % step))
    checksum = FileChecksum(4, zlib.crc32(b"%4d" % step))
    assert storage.publish(Manifest(step, storage.round, 1, {}, (), {"__0_0.distcp": checksum}, JOB.name, JOB.uid))


@pytest.mark.parametrize("through_server", [(False, True), (True, False)])
def test_a_job_continues_from_its_checkpoints_after_a_change_of_the_access_mode(
    claim: ClaimServer, tmp_path: Path, through_server: tuple[bool, bool]
) -> None:
    """It also deletes what exceeds `keep`."""
    for round_, uses_server in enumerate(through_server, 1):
        storage: CheckpointStorage
        if uses_server:
            storage = ObjectCheckpoints(open_store(claim), round_, 2, JOB)
        else:
            storage = CheckpointFolder(tmp_path / "claim", round_, 2, JOB)
        published = storage.list_published()
        assert [manifest.step for manifest in published] == ([2, 1] if round_ == 2 else [])
        for manifest in published:
            content = storage.open_checkpoint(manifest).read_range("__0_0.distcp", 0, 9)
            assert content == b"%4d" % manifest.step
        storage.claim()
        for step in (2 * round_ - 1, 2 * round_):
            if isinstance(storage, CheckpointFolder):
                storage.get_partial_path(step).mkdir()
            save_empty(storage, step)
    assert [manifest.step for manifest in storage.list_published()] == [4, 3]
    assert {path.parent.name[:13] for path in tmp_path.glob("claim/step-*/manifest.json")} == {
        "step-00000003",
        "step-00000004",
    }
    other = JobIdentity("team/other", "2")
    with pytest.raises(InputError, match="holds checkpoints of another job"):
        ObjectCheckpoints(open_store(claim), 1, job=other)
    with pytest.raises(InputError, match="holds checkpoints of another job"):
        CheckpointFolder(tmp_path / "claim", 1, job=other)


def test_the_program_serves_until_it_is_terminated(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "checkpoint-secret").write_text("5a" * 32)
    variables = {
        "PACEKEEPER_CHECKPOINT_PATH": str(tmp_path),
        "PACEKEEPER_CHECKPOINT_PORT": str(port),
        "PACEKEEPER_WORKER": "job-checkpoints-00000000",
        "PACEKEEPER_OPERATOR": "https://operator",
        "PACEKEEPER_TOKEN_FILE": "/token",
        "PACEKEEPER_RUNTIME": str(tmp_path),
    }
    program = [sys.executable, "-m", "pacekeeper.checkpointing.server"]
    with subprocess.Popen(program, env={**os.environ, **variables}, stderr=subprocess.DEVNULL) as process:
        address = CheckpointEndpoint("5a" * 32, "127.0.0.1", port)
        store = ObjectStore(ClaimFilesystem(lambda: address), "", "claim://checkpoints")
        store.put("a", b"content")
        process.terminate()
        assert process.wait(120) == 0
    assert (tmp_path / "a").read_bytes() == b"content"


def test_workers_find_the_server_in_the_newest_plan(
    claim: ClaimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RuntimeFolder(tmp_path / "runtime").create()
    monkeypatch.setenv("PACEKEEPER_RUNTIME", str(runtime.root))
    assert read_checkpoint_server(runtime) is None
    write_json(runtime.plan, Plan(checkpoint_server=CheckpointEndpoint("00" * 32)).build_worker_plan("a").to_json())
    assert read_checkpoint_server(runtime) is None, "its pod has no address yet"
    write_json(runtime.plan, Plan(version=2, checkpoint_server=claim.address).build_worker_plan("a").to_json())
    store = open_object_store("claim://checkpoints/job")
    checkpoints = ObjectCheckpoints(store, 1, job=JOB)
    checkpoints.claim()
    assert checkpoints.list_published() == []
    assert checkpoints.field == "spec.checkpoint.volumeClaimName"
    assert not store.create(".owner-00000001.json", b"other")

"""The checkpoint folder: published whole or not at all, in the current round only. The last good one remains."""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.checkpointing.rank_state import describe_differences
from pacekeeper.checkpointing.storage import checkpoint_folder, folder_ownership
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder, describe_error, summarize_reasons
from pacekeeper.checkpointing.storage.manifests import FileChecksum, Manifest, compute_checksum
from pacekeeper_analysis.errors import InputError


def write_partial(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> Manifest:
    """Write what a round leaves in its partial folder, and return the manifest of it."""
    partial = folder.get_partial_path(step)
    partial.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (partial / name).write_bytes(content + name.encode())
    files = {path.name: compute_checksum(path) for path in partial.iterdir()}
    return Manifest(step, folder.round, world_size=2, model={}, objects=("model",), files=files)


def claim_folder(path: Path, round_: int = 1, keep: int = 3) -> CheckpointFolder:
    folder = CheckpointFolder(path, round_, keep)
    folder.claim()
    return folder


def list_names(path: Path) -> set[str]:
    """Return the entries of a folder of checkpoints, except for the claims of earlier owners."""
    return {its.name for its in path.iterdir() if not its.name.startswith(".owner-")}


def list_steps(folder: CheckpointFolder) -> list[int]:
    return [manifest.step for manifest in folder.list_published()]


def test_published_checkpoints_are_found_newest_first_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, keep=2)
    for step in (10, 20, 30):
        assert folder.publish(write_partial(folder, step))
    assert list_steps(folder) == [30, 20]
    assert list_names(tmp_path) == {"owner.json", "step-00000020", "step-00000030"}


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest"])
def test_a_torn_newest_checkpoint_is_replaced_by_the_last_good_one(tmp_path: Path, damage: str) -> None:
    folder = claim_folder(tmp_path)
    for step in (10, 20):
        folder.publish(write_partial(folder, step))
    victim = tmp_path / "step-00000020/__1_0.distcp"
    match damage:
        case "cut":
            os.truncate(victim, 3)
        case "missing":
            victim.unlink()
        case "manifest":
            (tmp_path / "step-00000020/manifest.json").write_text('{"step": 20')
    assert list_steps(folder) == [10]


def test_torn_checkpoints_do_not_displace_the_last_good_one(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, keep=2)
    for step in (10, 20):
        folder.publish(write_partial(folder, step))
    os.truncate(tmp_path / "step-00000020/.metadata", 0)
    folder.publish(write_partial(folder, 30))
    assert list_steps(folder) == [30, 10]


def test_a_published_checkpoint_stays_even_if_a_later_step_exists_that_was_not_loaded(
    tmp_path: Path,
) -> None:
    """Its bytes may be damaged, and its sizes right."""
    folder = claim_folder(tmp_path, keep=1)
    folder.publish(write_partial(folder, 30))
    later = claim_folder(tmp_path, round_=2, keep=1)
    for step in (10, 20):
        assert later.publish(write_partial(later, step))
        assert list_steps(later) == [30, step]
    later.publish(write_partial(later, 40))
    assert list_steps(later) == [40]


def test_a_rank_frees_the_space_of_its_own_files_and_the_last_one_removes_the_folder(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path)
    write_partial(folder, 10)
    folder.discard(10, lambda name: name.startswith("__1_"))
    assert {path.name for path in folder.get_partial_path(10).iterdir()} == {"__0_0.distcp", ".metadata"}
    folder.discard(10, lambda name: not name.startswith("__1_"))
    folder.discard(10, lambda _: True)
    assert not folder.get_partial_path(10).exists()


def test_a_manifest_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = claim_folder(tmp_path)
    manifest = write_partial(folder, 10)
    before = {path.name for path in tmp_path.rglob("*")}

    def raise_no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        folder.publish(manifest)
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_a_few_of_several_reasons_are_reported_once_each() -> None:
    assert summarize_reasons(["a", "b", "a"]) == "a; b"
    assert summarize_reasons(f"rank {number}: full" for number in range(9)) == (
        "rank 0: full; rank 1: full; rank 2: full; and 6 more"
    )
    assert len(describe_error(OSError(errno.ENOSPC, "x" * 10_000))) < 600


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_checkpoint_that_rank_0_does_not_see_whole_is_not_published(tmp_path: Path, damage: str) -> None:
    folder = claim_folder(tmp_path)
    manifest = write_partial(folder, 10)
    part = folder.get_partial_path(10) / "__1_0.distcp"
    if damage == "cut":
        os.truncate(part, 3)
    else:
        part.unlink()
    with pytest.raises(InputError, match=r"Mount one volume on all workers \(spec\.checkpoint\.volumeClaimName"):
        folder.publish(manifest)
    assert list_steps(folder) == []


def test_an_earlier_round_can_no_longer_publish(tmp_path: Path) -> None:
    lost = claim_folder(tmp_path, round_=1)
    lost.publish(write_partial(lost, 10))
    manifest = write_partial(lost, 20)  # its node is cut off, while the others begin again
    current = claim_folder(tmp_path, round_=2)
    current.publish(write_partial(current, 20, b"of round 2"))
    if not lost.get_partial_path(20).exists():  # cleared away when round 2 began
        manifest = write_partial(lost, 20)
    assert not lost.publish(manifest)
    assert (tmp_path / "step-00000020/__0_0.distcp").read_bytes().startswith(b"of round 2")
    assert [(found.step, found.round) for found in current.list_published()] == [(20, 2), (10, 1)]


def test_a_checkpoint_that_cannot_be_moved_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = claim_folder(tmp_path)
    folder.publish(write_partial(folder, 10))
    manifest = write_partial(folder, 10, b"again")
    rename = Path.rename

    def fail_to_rename(path: Path, target: Path) -> Path:
        if "partial" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_to_rename)
    with pytest.raises(OSError, match="Input/output error"):
        folder.publish(manifest)
    folder.discard(10, lambda _: True)
    assert list_names(tmp_path) == {"owner.json", "step-00000010"}
    assert list_steps(folder) == [10]
    assert (tmp_path / "step-00000010/__0_0.distcp").read_bytes().startswith(b"weights")
    monkeypatch.undo()
    assert folder.publish(write_partial(folder, 10, b"again"))
    assert (tmp_path / "step-00000010/__0_0.distcp").read_bytes().startswith(b"again")


def test_an_unreadable_volume_is_not_taken_for_a_later_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = claim_folder(tmp_path)
    manifest = write_partial(folder, 10)
    read_text = Path.read_text

    def fail_to_read(path: Path) -> str:
        if path.name == "owner.json":
            raise OSError(errno.EIO, "Input/output error")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", fail_to_read)
    with pytest.raises(OSError, match="Input/output error"):
        folder.publish(manifest)


def claim_on_failing_volume(
    monkeypatch: pytest.MonkeyPatch, path: Path, round_: int, function: str
) -> CheckpointFolder:
    """Begin a round while the volume is full (`write_durably`), or cannot be read (`read_text`)."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC if function == "write_durably" else errno.EIO, "the volume fails")

    folder = CheckpointFolder(path, round_)
    with monkeypatch.context() as patched:
        patched.setattr(folder_ownership if function == "write_durably" else Path, function, fail)
        folder.claim()
    return folder


FAILING_FUNCTIONS = pytest.mark.parametrize("function", ["write_durably", "read_text"])


@FAILING_FUNCTIONS
def test_a_round_that_began_on_a_failing_volume_publishes_once_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    before = claim_folder(tmp_path, round_=1)
    folder = claim_on_failing_volume(monkeypatch, tmp_path, 2, function)
    assert folder.publish(write_partial(folder, 10))
    assert not before.publish(write_partial(before, 20))
    assert folder.publish(write_partial(folder, 30))
    assert list_steps(folder) == [30, 10]


@FAILING_FUNCTIONS
def test_a_round_that_began_on_a_failing_volume_yields_to_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    claim_folder(tmp_path, round_=1)
    folder = claim_on_failing_volume(monkeypatch, tmp_path, 2, function)
    later = claim_folder(tmp_path, round_=3)
    assert not folder.publish(write_partial(folder, 10))
    assert later.publish(write_partial(later, 10))


def test_partial_checkpoints_of_earlier_rounds_are_deleted(tmp_path: Path) -> None:
    write_partial(claim_folder(tmp_path, round_=1), 10)
    folder = claim_folder(tmp_path, round_=2)
    assert list_names(tmp_path) == {"owner.json"}
    assert folder.list_published() == []


def test_a_checkpoint_is_chosen_by_manifests_without_reading_data(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path)
    for step in (10, 20, 30):
        folder.publish(write_partial(folder, step, bytes(1 << 20)))
    before = count_bytes_read()
    assert list_steps(folder) == [30, 20, 10]
    assert count_bytes_read() - before < 1 << 16


def count_bytes_read() -> int:
    """Return how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_rank_that_sees_the_mark_sees_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "_FILE_VISIBILITY_SECONDS", 0.0)
    here, same, other = (
        claim_folder(tmp_path / "here"),
        claim_folder(tmp_path / "here", 2),
        claim_folder(tmp_path / "other"),
    )
    mark = here.create_visibility_mark()
    assert same.has_visibility_mark(mark)
    assert not other.has_visibility_mark(mark)
    here.remove_visibility_mark(mark)
    assert list_names(tmp_path / "here") == {"owner.json"}


def test_a_mark_that_the_volume_shows_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = claim_folder(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "mark").touch())
    assert folder.has_visibility_mark("mark")


def test_a_mark_of_a_killed_rank_is_deleted_by_the_next_round(tmp_path: Path) -> None:
    claim_folder(tmp_path, round_=1).create_visibility_mark()
    claim_folder(tmp_path, round_=2)
    assert list_names(tmp_path) == {"owner.json"}


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.ENOSPC, "No space left on device: make room on the volume, or keep fewer (spec.checkpoint.keep)"),
        (errno.EROFS, "mount the volume of spec.checkpoint.path writable"),
        (errno.EACCES, "let this user write to spec.checkpoint.path"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_refusal_of_the_volume_is_reported_with_the_remedy(error: int, remedy: str) -> None:
    assert remedy in describe_error(OSError(error, os.strerror(error)))


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"spec\.checkpoint\.path: .*file/checkpoints is not writable .*mount a volume"
    ):
        CheckpointFolder(tmp_path / "file/checkpoints", 1)


def test_keep_below_one_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.keep=0"):
        CheckpointFolder(tmp_path, 1, keep=0)


def test_differences_between_models_are_named() -> None:
    ours = {"a": "(2,) float32", "b": "(2,) float32"}
    assert describe_differences(ours, ours) == ""
    assert describe_differences(ours, {"a": "(3,) float32", "c": "(1,) float32"}) == (
        "b is missing in the checkpoint; c is in the checkpoint only; a is (2,) float32, in the checkpoint (3,) float32"
    )
    many = {f"layer{i:02d}": "(1,) float32" for i in range(8)}
    assert describe_differences(many, {}).endswith("; and 3 more")


@pytest.mark.parametrize(
    ("key", "value"),
    [("files", 1), ("files", {"x": {"nbytes": "1", "crc32": 0}}), ("step", "100"), ("world_size", 0), ("model", None)],
)
def test_a_damaged_manifest_invalidates_its_checkpoint_and_no_other(tmp_path: Path, key: str, value: object) -> None:
    folder = CheckpointFolder(tmp_path, round_=1)
    folder.claim()
    for step in (100, 200):
        folder.get_partial_path(step).mkdir()
        assert folder.publish(Manifest(step, 1, 1, {}, ()))
    manifest = tmp_path / "step-00000200/manifest.json"
    written = json.loads(manifest.read_text()) | {key: value}
    del written["checksum"]  # as if it had been written like that
    manifest.write_text(json.dumps(written))
    assert [found.step for found in folder.list_published()] == [100]


@pytest.mark.parametrize(
    "change",
    [{"world_size": 3}, {"model": {"a": "(4,) float32"}}, {"files": {}}, {"checksum": 0}, {"checksum": None}],
    ids=["a number", "a shape", "files that are gone", "the sum", "no sum"],
)
def test_a_manifest_that_was_changed_is_invalid(change: dict[str, Any]) -> None:
    """Although each of its fields might be so."""
    manifest = Manifest(200, 1, 2, {"a": "(3,) float32"}, ("model",), {"x": FileChecksum(1, 2)})
    written = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(written) == manifest
    with pytest.raises(InputError, match=r"manifest\.checksum: the content has changed since it was written"):
        Manifest.from_json(written | change)


def test_a_manifest_of_an_older_version_has_no_checksum_and_one_of_a_newer_one_more_fields() -> None:
    manifest = Manifest(200, 1, 2, {}, ("model",))
    written = manifest.to_json()
    del written["checksum"]
    assert Manifest.from_json(written) == manifest
    written["later"] = "field"
    written["checksum"] = zlib.crc32(json.dumps(written, sort_keys=True).encode())
    assert Manifest.from_json(written) == manifest


def test_a_manifest_of_another_step_is_invalid(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, round_=1)
    folder.claim()
    folder.get_partial_path(100).mkdir()
    assert folder.publish(Manifest(100, 1, 1, {}, ()))
    (tmp_path / "step-00000100").rename(tmp_path / "step-00000300")
    assert folder.list_published() == []

"""The checkpoint folder: published whole or not at all, in the current round only; the last good one is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pacekeeper.keep import checkpoints
from pacekeeper.keep.checkpoints import CheckpointFolder
from pacekeeper.keep.manifests import Manifest, checksum
from pacekeeper.keep.rank_state import differences
from pacekeeper_analysis.errors import InputError


def write(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> Manifest:
    """What a round leaves in its partial folder, and the manifest of it."""
    partial = folder.partial(step)
    partial.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (partial / name).write_bytes(content + name.encode())
    files = {path.name: checksum(path) for path in partial.iterdir()}
    return Manifest(step, folder.round, world_size=2, model={}, objects=("model",), files=files)


def owned(path: Path, round_: int = 1, keep: int = 3) -> CheckpointFolder:
    folder = CheckpointFolder(path, round_, keep)
    folder.own()
    return folder


def steps(folder: CheckpointFolder) -> list[int]:
    return [manifest.step for manifest in folder.published()]


def test_what_is_published_is_found_newest_first_and_the_oldest_go(tmp_path: Path) -> None:
    folder = owned(tmp_path, keep=2)
    for step in (10, 20, 30):
        assert folder.publish(write(folder, step))
    assert steps(folder) == [30, 20]
    assert {path.name for path in tmp_path.iterdir()} == {"owner.json", "step-00000020", "step-00000030"}
    assert all(folder.intact(manifest) for manifest in folder.published())


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest"])
def test_a_torn_newest_checkpoint_gives_way_to_the_last_good_one(tmp_path: Path, damage: str) -> None:
    folder = owned(tmp_path)
    for step in (10, 20):
        folder.publish(write(folder, step))
    victim = tmp_path / "step-00000020/__1_0.distcp"
    match damage:
        case "cut":
            os.truncate(victim, 3)
        case "flip":
            victim.write_bytes(victim.read_bytes()[::-1])
        case "missing":
            victim.unlink()
        case "manifest":
            (tmp_path / "step-00000020/manifest.json").write_text('{"step": 20')
    good = [manifest.step for manifest in folder.published() if folder.intact(manifest)]
    assert good == [10]


def test_torn_checkpoints_do_not_push_out_the_last_good_one(tmp_path: Path) -> None:
    folder = owned(tmp_path, keep=1)
    folder.publish(write(folder, 10))
    manifest = write(folder, 20)
    os.truncate(folder.partial(20) / ".metadata", 0)
    folder.publish(manifest)
    assert steps(folder) == [10]


def test_an_earlier_round_cannot_publish_any_more(tmp_path: Path) -> None:
    lost = owned(tmp_path, round_=1)
    lost.publish(write(lost, 10))
    manifest = write(lost, 20)  # its node is cut off, while the others begin again
    current = owned(tmp_path, round_=2)
    current.publish(write(current, 20, b"of round 2"))
    if not lost.partial(20).exists():  # cleared away when round 2 began
        manifest = write(lost, 20)
    assert not lost.publish(manifest)
    assert (tmp_path / "step-00000020/__0_0.distcp").read_bytes().startswith(b"of round 2")
    assert [(found.step, found.round) for found in current.published()] == [(20, 2), (10, 1)]


def test_a_checkpoint_that_cannot_take_its_place_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = owned(tmp_path)
    folder.publish(write(folder, 10))
    manifest = write(folder, 10, b"again")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if "partial" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        folder.publish(manifest)
    folder.discard(10)
    assert {path.name for path in tmp_path.iterdir()} == {"owner.json", "step-00000010"}
    assert [folder.intact(found) for found in folder.published()] == [True]
    monkeypatch.undo()
    assert folder.publish(write(folder, 10, b"again"))
    assert (tmp_path / "step-00000010/__0_0.distcp").read_bytes().startswith(b"again")


def test_a_volume_that_cannot_be_read_is_no_later_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = owned(tmp_path)
    manifest = write(folder, 10)
    read_text = Path.read_text

    def fails(path: Path) -> str:
        if path.name == "owner.json":
            raise OSError(errno.EIO, "Input/output error")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", fails)
    with pytest.raises(OSError, match="Input/output error"):
        folder.publish(manifest)


def without_room(monkeypatch: pytest.MonkeyPatch, path: Path, round_: int) -> CheckpointFolder:
    """A round that begins while the volume is full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_write_durably", full)
        return owned(path, round_)


def test_a_round_that_began_without_room_publishes_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = owned(tmp_path, round_=1)
    folder = without_room(monkeypatch, tmp_path, round_=2)
    assert folder.publish(write(folder, 10))
    assert not before.publish(write(before, 20))
    assert folder.publish(write(folder, 30))
    assert steps(folder) == [30, 10]


def test_a_round_that_began_without_room_gives_way_to_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned(tmp_path, round_=1)
    folder = without_room(monkeypatch, tmp_path, round_=2)
    later = owned(tmp_path, round_=3)
    assert not folder.publish(write(folder, 10))
    assert later.publish(write(later, 10))


def test_what_earlier_rounds_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    write(owned(tmp_path, round_=1), 10)
    folder = owned(tmp_path, round_=2)
    assert {path.name for path in tmp_path.iterdir()} == {"owner.json"}
    assert folder.published() == []


def test_ranks_share_the_checking_and_any_of_them_finds_the_damage(tmp_path: Path) -> None:
    folder = owned(tmp_path)
    manifest = write(folder, 10)
    folder.publish(manifest)
    (tmp_path / "step-00000010/__0_0.distcp").write_bytes(b"weightz__0_0.distcp")
    assert [folder.intact(manifest, part, 3) for part in range(3)].count(False) == 1


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"spec\.checkpoint\.path: .*file/checkpoints is not writable .*mount a volume"
    ):
        CheckpointFolder(tmp_path / "file/checkpoints", 1)


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.keep=0"):
        CheckpointFolder(tmp_path, 1, keep=0)


def test_differences_between_models_are_named() -> None:
    ours = {"a": "(2,) float32", "b": "(2,) float32"}
    assert differences(ours, ours) == ""
    assert differences(ours, {"a": "(3,) float32", "c": "(1,) float32"}) == (
        "b is missing in the checkpoint; c is in the checkpoint only; a is (2,) float32, in the checkpoint (3,) float32"
    )
    many = {f"layer{i:02d}": "(1,) float32" for i in range(8)}
    assert differences(many, {}).endswith("; and 3 more")

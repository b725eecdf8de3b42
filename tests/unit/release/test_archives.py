"""Archives depend on their content, and on nothing else."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from release.archives import Entry, build_tar, compress_archive, create_folder, create_link, read_tree


def test_entries_are_sorted_owned_by_root_and_of_one_time() -> None:
    tar = build_tar({"b/c": Entry(b"text", 0o755), "a": create_link("b"), "b": create_folder(0o1777)}, 1000)
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        members = opened.getmembers()
        assert [(each.name, each.mode, each.mtime, each.uid, each.gid, each.uname) for each in members] == [
            ("a", 0o777, 1000, 0, 0, ""),
            ("b", 0o1777, 1000, 0, 0, ""),
            ("b/c", 0o755, 1000, 0, 0, ""),
        ]
        assert members[0].linkname == "b"
        file = opened.extractfile("b/c")
        assert file is not None
        assert file.read() == b"text"


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    """In another order, at another time, and by a user with another umask."""
    files = {"run": 0o755, "folder/text": 0o644}
    for root, names, umask in (("one", [*files], 0o022), ("two", [*reversed(files)], 0o077)):
        before = os.umask(umask)
        try:
            for name in names:
                path = tmp_path / root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)
                path.chmod(files[name] & ~umask)
                os.utime(path, (len(root) + umask, umask))
        finally:
            os.umask(before)
    first, second = (build_tar(read_tree(tmp_path / root), 0) for root in ("one", "two"))
    assert compress_archive(first) == compress_archive(second)
    assert read_tree(tmp_path / "two")["run"].mode == 0o755


def test_a_pipe_cannot_be_archived(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: neither file"):
        read_tree(tmp_path)

"""Debian's packages: the lock, and what is unpacked."""

from __future__ import annotations

from pathlib import Path

import pytest

from release import debian
from release.commands import ReleaseError
from testing.packages import build_package

ROOT = Path(__file__).resolve().parents[3]


def test_the_lock_has_the_same_packages_for_both_platforms() -> None:
    """And no address. A rebuild for one platform only (+b1) is another version."""
    locked = debian.read_lock(ROOT / "locks/debian.txt")
    assert {package.architecture for package in locked} == {"amd64", "arm64"}
    assert all(len(package.sha256) == 64 for package in locked)
    assert "://" not in (ROOT / "locks/debian.txt").read_text()


@pytest.mark.parametrize(("change", "message"), [(" extra", "no four words"), ("-other", "renew it by `make lock`")])
def test_a_lock_that_does_not_fit_names_the_remedy(tmp_path: Path, change: str, message: str) -> None:
    text = (ROOT / "locks/debian.txt").read_text()
    (tmp_path / "debian.txt").write_text(text.replace("amd64 zlib1g", f"amd64 zlib1g{change}"))
    with pytest.raises(ReleaseError, match=message):
        debian.read_lock(tmp_path / "debian.txt")


def test_files_are_unpacked_into_a_system_with_one_tree_of_programs(tmp_path: Path) -> None:
    package = build_package(
        {"./bin/tool": b"program", "./usr/share/text": b"text"}, {"./lib/link": "../usr/share/text"}
    )
    control = debian.unpack_package(package, tmp_path)
    assert control.startswith("Package: example\n")
    assert (tmp_path / "usr/bin/tool").read_bytes() == b"program"
    assert (tmp_path / "usr/bin/tool").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "usr/lib/link").is_symlink()
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK", "no package of Debian"),
        (build_package({"./../outside": b""}), "leaves the package"),
        (build_package({}, compression="zst"), r"without data\.tar\.xz"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        debian.unpack_package(content, tmp_path / "root")
    assert not (tmp_path / "outside").exists()


def test_a_file_that_is_not_the_locked_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from the cache, nor from a mirror."""
    package = debian.LockedPackage("amd64", "example", "1", "0" * 64)
    cache, work = tmp_path / "cache", tmp_path / "work"
    cache.mkdir()
    (cache / f"{package.sha256}.deb").write_bytes(b"truncated")

    def download(*command: object, **_: object) -> str:
        if "download" in command:
            (work / "amd64/example.deb").write_bytes(b"of a mirror")
        return ""

    monkeypatch.setattr(debian, "run_command", download)
    monkeypatch.setenv(debian.SOURCES_VARIABLE, "deb example suite main")
    with pytest.raises(ReleaseError, match=r"example 1 \(amd64\) is not the locked file"):
        debian.download_packages([package], cache, work)


def test_a_machine_without_the_suite_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(debian.SOURCES_VARIABLE, raising=False)
    monkeypatch.setattr(debian, "run_command", lambda *_, **__: " 500 mirror://example noble/main amd64 Packages\n")
    with pytest.raises(ReleaseError, match=f"{debian.SOURCES_VARIABLE}.*deb MIRROR {debian.SUITE} main"):
        debian.renew_lock(tmp_path / "debian.txt", tmp_path)

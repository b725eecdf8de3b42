"""A release is a commit whose files agree, with its changes and checksums."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release.build import CHECKSUMS, find_differences, format_checksums
from release.commands import ReleaseError, run_command
from release.source import export_source, read_notes, read_version

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "pyproject.toml": '[project]\nversion = "1.0"\n',
    "charts/pacekeeper/Chart.yaml": (
        "version: '1.0'\nappVersion: '1.0'\nannotations:\n  artifacthub.io/images: |\n    - image: operator:1.0\n"
    ),
    "CHANGELOG.md": "# Changelog\n\n## [1.0] - 2026-01-02\nNew.\n\n## [0.9] - 2025-01-02\nOld.\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_commit_is_exported_and_dates_the_release(checkout: Path, tmp_path: Path) -> None:
    environment = {"GIT_COMMITTER_DATE": "1000000000 +0000", "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin"}
    who = ("-c", "user.name=Name", "-c", "user.email=name@example.com")
    for command in (("init", "--quiet"), ("add", "--all"), (*who, "commit", "--quiet", "--message=All")):
        subprocess.run(["git", *command], cwd=checkout, env=environment, check=True, timeout=60)
    source = export_source(checkout, tmp_path / "exported")
    assert (source.version, source.seconds, len(source.commit)) == ("1.0", 10**9, 40)
    assert {name: (tmp_path / "exported" / name).read_text() for name in FILES} == FILES
    (checkout / "new").touch()
    with pytest.raises(ReleaseError, match=r"commit or stash\n\?\? new"):
        export_source(checkout, tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("pyproject.toml", "1.0", "1.1", r"Chart\.yaml: `version` is 1\.0, and pyproject\.toml's version is 1\.1"),
        ("charts/pacekeeper/Chart.yaml", "appVersion: '1.0'", "appVersion: '0.9'", "`appVersion` is 0.9"),
        ("charts/pacekeeper/Chart.yaml", "operator:1.0", "operator:0.9", "does not have the tag 1.0"),
        ("CHANGELOG.md", "2026-01-02", "Unreleased", r"## \[1\.0\] - YYYY-MM-DD"),
        ("CHANGELOG.md", "[1.0]", "[1.1]", r"## \[1\.0\] - YYYY-MM-DD"),
    ],
)
def test_files_that_differ_are_named(checkout: Path, name: str, old: str, new: str, message: str) -> None:
    (checkout / name).write_text(FILES[name].replace(old, new))
    with pytest.raises(ReleaseError, match=message):
        read_version(checkout)


def test_the_present_version_has_notes() -> None:
    assert read_notes(ROOT, read_version(ROOT)).startswith("## [")


def test_notes_end_at_the_previous_version(checkout: Path) -> None:
    assert read_notes(checkout, "1.0") == "## [1.0] - 2026-01-02\nNew.\n\n"


def test_checksums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("b")
    (tmp_path / "a").write_text("a")
    (tmp_path / CHECKSUMS).write_text(format_checksums(tmp_path))
    assert run_command("sha256sum", "--check", CHECKSUMS, folder=tmp_path, timeout_seconds=60) == "a: OK\nb: OK\n"
    assert format_checksums(tmp_path) == (tmp_path / CHECKSUMS).read_text(), "it does not list itself"


def test_a_second_build_is_compared_by_content(tmp_path: Path) -> None:
    for folder, files in (("one", {"a": "1", "b": "1", "c": "1"}), ("two", {"a": "1", "b": "2", "d": "1"})):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    assert find_differences(tmp_path / "one", tmp_path / "one") == []
    assert find_differences(tmp_path / "one", tmp_path / "two") == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("no-such-program",), "no-such-program is not installed"),
        (("sh", "-c", "echo reason >&2; exit 3"), r"failed \(3\):\nreason"),
        (("sleep", "60"), "did not end within 0 s"),
    ],
)
def test_a_command_that_fails_is_an_error_with_its_output(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        run_command(*command, timeout_seconds=0.1 if command[0] == "sleep" else 60)

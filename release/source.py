"""What is released: a commit without changes, whose files agree on one version."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from release.commands import ReleaseError, run_command

_GIT_SECONDS = 120
_CHART = Path("charts/pacekeeper/Chart.yaml")


@dataclass(frozen=True)
class Source:
    version: str
    commit: str
    seconds: int  # since the epoch: of the commit, and so of each file in the release


def export_source(root: Path, target: Path) -> Source:
    """Write the files of the checked-out commit into `target`. Raises ReleaseError if the checkout has changes."""
    if changes := run_command("git", "status", "--porcelain", folder=root, timeout_seconds=_GIT_SECONDS).splitlines():
        shown = "\n".join(changes[:10])
        raise ReleaseError(f"a release is built from a commit, and this checkout has changes: commit or stash\n{shown}")
    commit, seconds = run_command(
        "git", "log", "-1", "--format=%H %ct", folder=root, timeout_seconds=_GIT_SECONDS
    ).split()
    target.mkdir(parents=True)
    archive = target.with_suffix(".tar")
    run_command("git", "archive", "--output", archive.resolve(), "HEAD", folder=root, timeout_seconds=_GIT_SECONDS)
    run_command("tar", "-xf", archive.resolve(), folder=target, timeout_seconds=_GIT_SECONDS)
    archive.unlink()
    return Source(read_version(target), commit, int(seconds))


def read_version(root: Path) -> str:
    """Return the version. Raises ReleaseError if pyproject.toml, the chart, and the changelog differ."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((root / _CHART).read_text())
    for field in ("version", "appVersion"):
        if chart[field] != version:
            raise ReleaseError(f"{_CHART}: `{field}` is {chart[field]}, and pyproject.toml's version is {version}")
    if f":{version}\n" not in chart["annotations"]["artifacthub.io/images"]:
        raise ReleaseError(f"{_CHART}: the image in `artifacthub.io/images` does not have the tag {version}")
    read_notes(root, version)
    return version


def read_notes(root: Path, version: str) -> str:
    """Return the changelog's section of a version. Raises ReleaseError if it is missing or has no date."""
    text = (root / "CHANGELOG.md").read_text()
    match = re.search(rf"^## \[{re.escape(version)}\] - (\S+)\n.*?(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", match[1]):
        raise ReleaseError(f"CHANGELOG.md: write the day of the release: `## [{version}] - YYYY-MM-DD`")
    return match[0]

"""Images of operator and watch: locked versions that pyproject.toml allows, and a Dockerfile for any platform."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import cast

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WANTED = {
    "operator": [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["operator"]],
    "watch": [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["watch"]],
    "build": PROJECT["dependency-groups"]["build"],
    "sbom": PROJECT["dependency-groups"]["sbom"],
    "release": [entry for entry in PROJECT["dependency-groups"]["release"] if isinstance(entry, str)],
}
"""By the lock's name. `make lock` renews the locks."""
PLATFORMS = [(python, machine) for python in ("3.11", "3.12", "3.13", "3.14") for machine in ("x86_64", "aarch64")]


def read_locked_versions(name: str, python: str = "3.11", machine: str = "x86_64") -> dict[str, str]:
    """Return versions by canonical names, as pip selects them on that platform."""
    there = {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": machine}
    environment = {**cast("dict[str, str]", default_environment()), **there}
    entries = re.findall(r"^(\S+==.+?) \\$", (ROOT / f"locks/{name}.txt").read_text(), re.MULTILINE)
    found = [entry for entry in map(Requirement, entries) if entry.marker is None or entry.marker.evaluate(environment)]
    assert len({entry.name for entry in found}) == len(found), "one version of each"
    return {canonicalize_name(entry.name): str(entry.specifier).removeprefix("==") for entry in found}


@pytest.mark.parametrize(("python", "machine"), PLATFORMS)
@pytest.mark.parametrize("name", WANTED)
def test_a_lock_satisfies_the_project(name: str, python: str, machine: str) -> None:
    versions = read_locked_versions(name, python, machine)
    for requirement in map(Requirement, WANTED[name]):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("name", WANTED)
def test_a_lock_is_complete(name: str) -> None:
    """For each package that is installed here in the locked version, all its requirements are locked."""
    versions, checked = read_locked_versions(name), 0
    for package, version in versions.items():
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        if found.version != version:
            continue
        checked += 1
        for requirement in map(Requirement, found.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": "", "python_version": "3.11"}):
                assert versions[canonicalize_name(requirement.name)] in requirement.specifier, package
    assert checked or name == "sbom", "its tools are not installed here"


@pytest.mark.parametrize("name", WANTED)
def test_a_lock_has_hashes_and_no_addresses(name: str) -> None:
    text = (ROOT / f"locks/{name}.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert entries
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_image_of_the_watch_has_no_torch() -> None:
    """Each node pulls it, for pods that have a PyTorch of their own."""
    assert not [name for name in read_locked_versions("watch") if name.startswith(("torch", "nvidia", "triton"))]
    text = (ROOT / "Dockerfile").read_text()
    stage = text.partition("AS watch-environment\n")[2].partition("\nFROM ")[0]
    assert "locks/watch.txt" in stage
    assert "[trainer]" not in stage


def test_the_dockerfile_names_no_platform_and_takes_any_base() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"amd64|x86|arm64|aarch64|manylinux", text)
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE)
    names = [name for _, name in stages]
    assert {base for base, _ in stages} - set(names) == {"${BASE}", "scratch"}


def test_files_that_the_dockerfile_copies_exist_in_its_context() -> None:
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source
    assert allowed == {source.split("/")[0] for source in " ".join(sources).split()}

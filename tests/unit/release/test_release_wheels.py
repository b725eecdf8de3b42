"""Released wheels: tags, contents, and the same bytes from each copy of the sources."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

import hatch_build
from release import wheels
from release.commands import ReleaseError

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("analysis", "operator", "trainer", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")


def copy_sources(target: Path) -> Path:
    """Copy the sources, with the compiled parts that an editable installation has, all modified now."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, copy_function=shutil.copy, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, target / name)
    os.utime(target / "LICENSE", (0, 0))
    return target


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [copy_sources(tmp_path_factory.mktemp(name)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for name in hatch_build.PARTS:
        file = hatch_build.find_target(name, folder / f"{name}.c")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"built: {name}")
    return folder


def test_a_wheel_has_the_parts_of_its_platform(copies: list[Path], parts: Path, tmp_path: Path) -> None:
    first, second = (
        wheels.build_wheel(copy, tmp_path / copy.name, 10**9, native=parts, machine="aarch64") for copy in copies
    )
    assert first.name.endswith("-cp311-abi3-manylinux_2_17_aarch64.whl")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        for name in hatch_build.PARTS:
            built = hatch_build.find_target(name, Path(f"{name}.c")).as_posix()
            assert archive.read(built).decode() == f"built: {name}", "not what is next to the sources"
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(2001, 9, 9)}


def test_the_pure_wheel_has_none(copies: list[Path], tmp_path: Path) -> None:
    first, second = (wheels.build_wheel(copy, tmp_path / copy.name, 10**9, native=None) for copy in copies)
    assert first.name.endswith("-py3-none-any.whl")
    assert first.read_bytes() == second.read_bytes()


def test_a_part_that_was_not_built_is_an_error(copies: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="FileNotFoundError"):
        wheels.build_wheel(copies[0], tmp_path / "wheel", 0, native=tmp_path, machine="aarch64")


@pytest.mark.parametrize(
    ("names", "tag", "has_parts", "problem"),
    [
        ([], "py3-none-any", False, ""),
        ([], "py3-none-any", True, "its compiled parts are none"),
        (["pacekeeper/native/paths.so"], "py3-none-any", False, "its compiled parts are pacekeeper/native/paths.so"),
        ([], "cp311-abi3-any", False, "it names cp311-abi3-any inside"),
        (["tests/test_a.py"], "py3-none-any", False, "it has tests/test_a.py, which is no part of the product"),
    ],
)
def test_a_wheel_with_other_content_is_not_released(
    tmp_path: Path, names: list[str], tag: str, has_parts: bool, problem: str
) -> None:
    wheel = tmp_path / "pacekeeper-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pacekeeper-1.0.dist-info/WHEEL", f"Tag: {tag}\n")
        for name in names:
            archive.writestr(name, "")
    assert wheels.find_problem(wheel, has_parts=has_parts) == problem

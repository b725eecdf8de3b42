"""The wheels that hatchling builds: one with the native parts for this platform, and a pure one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("analysis", "operator", "trainer", "crds", "charts")
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")
LIBRARY = "pacekeeper/native/nccl_profiler.so"
RECORDING = "pacekeeper_rank/native/recording.so"
RECORDER = "pacekeeper/native/environment_recorder.bin"
LIBRARIES = {LIBRARY, RECORDER, "pacekeeper/native/paths.so", RECORDING}
REPORT_TRANSPORT = """
import logging, pathlib
logging.basicConfig(level=logging.INFO, format="%(message)s")
from pacekeeper.launcher.network.nccl_plugin import find_usable_plugin
from pacekeeper.launcher.network.path_shim import SHIM_PATH, explain_unusable_shim
from pacekeeper.observe.collectives.nccl_transport import open_transport
print(find_usable_plugin(), open_transport(pathlib.Path("0.transport")))
print("shim:", explain_unusable_shim(SHIM_PATH))
from pacekeeper_rank import recorder_factory as opening
print("recording:", opening.NATIVE_UNAVAILABLE_REASON or opening.native_recorder.recording.__file__)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources of the wheels: a build writes the library next to its source."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.bin"))
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    return copy


def build_wheel(sources: Path, target: str, folder: Path, **environment: str) -> tuple[Path, str]:
    """Build with hatchling; return the file and the output."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(
        command, cwd=sources, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built, done.stdout + done.stderr


def report_transport(wheel: Path, folder: Path) -> str:
    """Return what an installation of the wheel reports about the transport."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT_TRANSPORT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout + done.stderr


def list_contents(wheel: Path) -> tuple[set[str], str]:
    """Return the names of its files, and its WHEEL."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        return names, archive.read(about).decode()


def read_checksums(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def read_entry_points(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        return archive.read(file).decode().replace(" ", "")


def test_where_there_is_a_compiler_the_wheel_is_for_this_platform(sources: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(sources, "wheel", tmp_path / "wheel")
    names, about = list_contents(wheel)
    assert names >= LIBRARIES
    assert "kubectl-pacekeeper=pacekeeper_operator.cli.command:main" in read_entry_points(wheel)
    assert "Tag: cp311-abi3-linux_" in about
    assert "Root-Is-Purelib: false" in about
    assert "-cp311-abi3-linux_" in wheel.name
    output = report_transport(wheel, tmp_path / "here")
    assert f"{tmp_path / 'here' / LIBRARY} None" in output
    assert "shim: \n" in output
    assert f"recording: {tmp_path / 'here' / RECORDING}" in output


def test_without_python_headers_the_other_parts_are_built_and_the_wheel_fits_any_python(
    sources: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *recording*) echo no Python.h >&2; exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    wheel, output = build_wheel(sources, "wheel", tmp_path / "wheel", CC=str(compiler))
    names, about = list_contents(wheel)
    assert names & LIBRARIES == LIBRARIES - {RECORDING}
    assert "Tag: py3-none-linux_" in about
    assert "recording will cost a rank twice as much" in output
    assert "recording: cannot import name 'recording'" in report_transport(wheel, tmp_path / "here")


@pytest.fixture(scope="module")
def pure(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The pure wheel, requested on a machine with a compiler, and the output of the build."""
    for library in LIBRARIES:
        (sources / "trainer" / library).write_text("of an editable installation")
    return build_wheel(sources, "wheel", tmp_path_factory.mktemp("pure"), PACEKEEPER_PURE="1")


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "false"])
def test_without_a_compiler_the_wheel_is_pure(
    sources: Path, tmp_path: Path, pure: tuple[Path, str], compiler: str
) -> None:
    wheel, output = build_wheel(sources, "wheel", tmp_path / "wheel", CC=compiler) if compiler else pure
    names, about = list_contents(wheel)
    assert "pacekeeper/launcher/network/nccl_plugin.py" in names
    assert not [name for name in names if name.endswith((".so", ".bin"))]
    assert "Tag: py3-none-any" in about
    for warning in ("transport will be unknown", "the paths that it takes by itself", "cost a rank twice as much"):
        assert (warning in output) == bool(compiler), "an explicit request causes no warning"
    assert read_checksums(wheel) == read_checksums(pure[0])


def test_an_installation_of_the_pure_wheel_has_no_transport(pure: tuple[Path, str], tmp_path: Path) -> None:
    output = report_transport(pure[0], tmp_path / "here")
    assert "transport is unknown" in output
    assert "None None" in output
    assert "shim: this installation has no shim" in output
    assert "recording: cannot import name 'recording'" in output


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_an_editable_installation_has_the_libraries_next_to_their_source(
    sources: Path, tmp_path: Path, compiler: str
) -> None:
    for library in LIBRARIES:
        (sources / "trainer" / library).unlink(missing_ok=True)
    build_wheel(sources, "wheel:editable", tmp_path / "wheel", CC=compiler)
    for library in LIBRARIES:
        assert (sources / "trainer" / library).exists() == (compiler == "cc")
    assert not list((sources / "trainer" / LIBRARY).parent.glob(".*.so"))


def test_a_source_archive_has_the_sources_of_the_libraries_and_no_build(sources: Path, tmp_path: Path) -> None:
    (sources / "trainer" / LIBRARY).write_text("of an editable installation")
    archive, _ = build_wheel(sources, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"hatch_build.py", *(f"trainer/{Path(library).with_suffix('.c')}" for library in LIBRARIES)} <= names
    assert not [name for name in names if name.endswith((".so", ".bin"))]

"""Which Python `make` takes, of those that a machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).resolve().parents[2]


def chosen(folder: Path, *arguments: str, **versions: str) -> subprocess.CompletedProcess[str]:
    """`make python` where these programs are on the PATH and nothing else; "": one that cannot be run."""
    for name, version in versions.items():
        path = folder / name.replace("_", ".")
        parts = ", ".join(version.split(".")) or "0"
        answer = f"import sys; sys.version_info = ({parts}, 0); exec(sys.argv[1])"
        path.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -c "{answer}" "$2"\n' if version else "#!/bin/sh\nexit 127\n"
        )
        path.chmod(0o755)
    command = [shutil.which("make") or "make", "--silent", "python", *arguments]
    environment = {"PATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"python3_11": "3.11.2", "python3": "3.11.2"}, "python3.11"),  # Debian 12
        ({"python3_12": "3.12.3", "python3": "3.12.3"}, "python3.12"),  # Ubuntu 24.04
        ({"python3": "3.13.5"}, "python3"),
        ({"python3_13": "3.13.5", "python3": "3.14.0"}, "python3.13"),
        ({"python3_11": "", "python3_12": "3.12.3"}, "python3.12"),  # a shim of pyenv's without a Python behind it
    ],
)
def test_the_first_that_is_supported(tmp_path: Path, versions: dict[str, str], found: str) -> None:
    done = chosen(tmp_path, **versions)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, found, "")


@pytest.mark.parametrize("versions", [{}, {"python3": "3.10.12"}, {"python3": "3.14.0"}])
def test_where_there_is_none_it_says_what_to_do(tmp_path: Path, versions: dict[str, str]) -> None:
    done = chosen(tmp_path, **versions)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "apt install python3.11" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_one_that_is_named_is_taken_if_it_is_supported(tmp_path: Path) -> None:
    assert chosen(tmp_path, "PYTHON=mine", mine="3.12.1", python3_11="3.11.2").stdout.strip() == "mine"
    refused = chosen(tmp_path, "PYTHON=mine", mine="3.9.2", python3_11="3.11.2")
    assert refused.returncode != 0
    assert "none of mine is a Python 3.11 to 3.13" in refused.stderr


def test_supported_is_what_the_package_says(tmp_path: Path) -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert said == ">=3.11,<3.14"
    taken = [minor for minor in range(9, 17) if chosen(tmp_path, python3=f"3.{minor}.0").returncode == 0]
    assert taken == [11, 12, 13]


def test_a_machine_with_a_gpu_builds_nccls_plugin_by_the_packages_own_options() -> None:
    """There is no hatchling there, so that the Makefile repeats them."""
    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if " cc -std" in line)
    assert f"cc {' '.join(hatch_build.OPTIONS)} -o $(PLUGIN).so" in rule

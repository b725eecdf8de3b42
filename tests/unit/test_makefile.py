"""Which Python `make` chooses on a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).resolve().parents[2]


def choose_python(folder: Path, *arguments: str, **versions: str) -> subprocess.CompletedProcess[str]:
    """Run `make python` with only these programs on the PATH; "": a program that cannot be run."""
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
        ({"python3": "3.14.5"}, "python3"),
        ({"python3_14": "3.14.5", "python3": "3.15.0"}, "python3.14"),
        ({"python3_11": "", "python3_12": "3.12.3"}, "python3.12"),  # a shim of pyenv's without a Python behind it
    ],
)
def test_the_first_supported_python_is_chosen(tmp_path: Path, versions: dict[str, str], found: str) -> None:
    done = choose_python(tmp_path, **versions)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, found, "")


@pytest.mark.parametrize("versions", [{}, {"python3": "3.10.12"}, {"python3": "3.15.0"}])
def test_without_a_supported_python_the_error_names_the_remedy(tmp_path: Path, versions: dict[str, str]) -> None:
    done = choose_python(tmp_path, **versions)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "apt install python3.11" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_a_named_python_is_used_if_it_is_supported(tmp_path: Path) -> None:
    assert choose_python(tmp_path, "PYTHON=mine", mine="3.12.1", python3_11="3.11.2").stdout.strip() == "mine"
    refused = choose_python(tmp_path, "PYTHON=mine", mine="3.9.2", python3_11="3.11.2")
    assert refused.returncode != 0
    assert "none of mine is a Python 3.11 to 3.14" in refused.stderr


def test_supported_versions_are_those_of_the_package(tmp_path: Path) -> None:
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert supported == ">=3.11,<3.15"
    taken = [minor for minor in range(9, 17) if choose_python(tmp_path, python3=f"3.{minor}.0").returncode == 0]
    assert taken == [11, 12, 13, 14]


def test_the_makefile_builds_nccls_plugin_with_the_packages_options() -> None:
    """GPU machines have no hatchling, therefore the Makefile repeats the options."""
    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if " cc -std" in line)
    assert f"cc {' '.join(hatch_build.OPTIONS)} -o $(PLUGIN).so" in rule

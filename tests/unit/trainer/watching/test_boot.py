"""The first module that each Python process of a watched container runs, in the Pythons of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pacekeeper.watch.payload import PACKAGE_FOLDER, PAYLOAD_PACKAGE, build_payload

PYTHONS = sorted({sys.executable, *map(str, Path.home().glob(".pyenv/versions/*/bin/python"))})
"""With pyenv: from 2.7 to the newest."""
SHOW = """
import os, sys
module = sys.modules.get("sitecustomize")
print(os.environ.get("PYTHONPATH"))
print("%s %s" % (getattr(module, "MARK", None), getattr(module, "__file__", None)))
print([each for each in sys.path if "image" in each])
print(sys.modules.get("_pacekeeper_rank") is not None)
"""


@pytest.fixture(scope="module")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_payload(tmp_path_factory.mktemp("payload"))


def run_python(python: str, boot: Path, *arguments: str, **variables: str) -> list[str]:
    environment = {"PYTHONPATH": str(boot), "PYTHONDONTWRITEBYTECODE": "1", "HOME": os.environ["HOME"], **variables}
    result = subprocess.run(
        [python, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_images_own_path_and_sitecustomize_are_in_force(python: str, boot: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    (image / "sitecustomize.py").write_text("MARK = __name__\n")
    recorded = tmp_path / "PYTHONPATH"
    recorded.write_text(f"{image}\n")
    given = f"{boot}{os.pathsep}/owner"
    lines = run_python(python, boot, "-c", SHOW, PACEKEEPER_IMAGE_PYTHONPATH=str(recorded), PYTHONPATH=given)
    assert lines[0] == f"{boot}{os.pathsep}{image}{os.pathsep}/owner"
    assert lines[1] == f"sitecustomize {image / 'sitecustomize.py'}"
    assert lines[2] == f"['{image}']"


def test_an_error_of_the_images_sitecustomize_is_reported_as_without_us(boot: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('of the image')\n")
    results = [
        subprocess.run([sys.executable, "-c", "print(1)"], env={"PYTHONPATH": path}, capture_output=True, check=False)
        for path in (str(tmp_path), f"{boot}{os.pathsep}{tmp_path}")
    ]
    assert results[0].returncode == results[1].returncode
    assert results[0].stdout == results[1].stdout
    assert results[0].stderr == results[1].stderr != b""


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(("-I",), {}), (("-E",), {}), (("-S",), {}), ((), {"PACEKEEPER_WATCH": "0"})],
    ids=["-I", "-E", "-S", "switched off"],
)
def test_some_pythons_stay_unwatched(arguments: tuple[str, ...], variables: dict[str, str], boot: Path) -> None:
    assert run_python(sys.executable, boot, *arguments, "-c", SHOW, **variables)[3] == "False"
    assert run_python(sys.executable, boot, "-s", "-c", SHOW)[3] == "True", "the others are"


def test_a_process_without_torch_imports_nothing_more(boot: Path) -> None:
    modules = "import sys; print(*sorted(sys.modules), sep='\\n')"
    plain = {*run_python(sys.executable, boot, "-c", modules, PACEKEEPER_WATCH="0")}
    watched = {*run_python(sys.executable, boot, "-c", modules)}
    own = ("", ".tracebacks", ".watching", ".watching.bootstrap", ".watching.guard", ".watching.import_hook")
    assert watched - plain == {"__future__", *(f"_pacekeeper_rank{name}" for name in own)}


def test_a_broken_payload_leaves_the_process_as_it_is(boot: Path, tmp_path: Path) -> None:
    broken = tmp_path / "payload"
    shutil.copytree(boot.parent, broken)
    (broken / PACKAGE_FOLDER / PAYLOAD_PACKAGE / "watching/import_hook.py").write_text("this is no Python")
    assert run_python(sys.executable, broken / "boot", "-c", SHOW)[3] == "False"


def test_callbacks_run_once_after_their_module_which_keeps_its_loader(boot: Path, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("VALUE = 1\n")
    program = textwrap.dedent(
        f"""
        import importlib.util, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from _pacekeeper_rank.watching.import_hook import ImportHook
        seen = []
        sys.meta_path.insert(0, ImportHook({{"late": lambda name, module: seen.append(module.VALUE)}}))
        import late
        late = importlib.reload(late)
        print(seen, "exec_module" in vars(late.__loader__), type(late.__loader__).__name__)
        print(importlib.util.find_spec("missing"))
        """
    )
    assert run_python(sys.executable, boot, "-c", program) == ["[1] False SourceFileLoader", "None"]


SHOW_PROGRESS = """
import os
print(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"))
print(open(os.environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN", os.devnull)).read().strip())
"""
SIDECAR_URL = "http://127.0.0.1:9466"


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, ["None", ""]),
        ({"PACEKEEPER_KUBEFLOW_URL": SIDECAR_URL}, [SIDECAR_URL, "pacekeeper"]),
        (
            {"PACEKEEPER_KUBEFLOW_URL": SIDECAR_URL, "KUBEFLOW_TRAINER_SERVER_URL": "https://kubeflow"},
            ["https://kubeflow", ""],
        ),
        ({"PACEKEEPER_KUBEFLOW_URL": SIDECAR_URL, "HTTP_PROXY": "http://proxy:3128"}, ["None", ""]),
        ({"PACEKEEPER_KUBEFLOW_URL": SIDECAR_URL, "PACEKEEPER_WATCH": "0"}, ["None", ""]),
    ],
)
def test_progress_goes_to_the_sidecar_only_where_nothing_else_is_set(
    boot: Path, variables: dict[str, str], shown: list[str]
) -> None:
    assert run_python(sys.executable, boot, "-c", SHOW_PROGRESS, **variables) == shown

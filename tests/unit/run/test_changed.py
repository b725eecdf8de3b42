"""Which tests a change can affect, and in which order they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.changed import measure_distances, order_tests
from tests.run.parts import ROOT
from tests.run.references import read_references

FILES = {
    "operator/product/__init__.py": "",
    "operator/product/decide/__init__.py": "from . import crash, hang",
    "operator/product/decide/crash.py": "from ..words import say",
    "operator/product/decide/hang.py": "import product.words",
    "operator/product/words.py": "",
    "operator/product/__main__.py": "from .decide import crash",
    "operator/product/native/fast.c": "",
    "crds/jobs.yaml": "",
    "charts/product/templates/pod.yaml": "",
    "tests/support/job.py": "SCRIPT = ROOT / 'tests/support/scripts/train.py'",
    "tests/support/scripts/train.py": "",
    "tests/conftest.py": "",
    "tests/unit/operator/decide/test_crash.py": "from product.decide import crash",
    "tests/unit/operator/decide/test_hang.py": "from product.decide.hang import find",
    "tests/unit/operator/test_all.py": "'''Not of tests/support/job.py.'''\nfrom product.decide import CHECKS",
    "tests/unit/operator/test_words.py": "def test(): from product import words",
    "tests/unit/test_program.py": "run([sys.executable, '-m', 'product'])",
    "tests/unit/test_module.py": "run('python -m product.decide.crash')",
    "tests/unit/test_fast.py": "load(folder / 'fast.so')",
    "tests/unit/test_crds.py": "list(ROOT.glob('crds/*.yaml'))",
    "tests/unit/test_folder.py": "ROOT / 'crds'",
    "tests/unit/test_chart.py": "helm('charts/product')",
    "tests/unit/test_prose.py": "print('the crds of a product')",
    "tests/unit/simulation/test_defects.py": "from product.decide import hang",
    "tests/distributed/test_ranks.py": "from tests.support.job import SCRIPT",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "affected"),
    [
        (
            "operator/product/decide/crash.py",
            ["operator/decide/test_crash", "test_module", "operator/test_all", "test_program"],
        ),
        (
            "operator/product/decide/hang.py",
            ["operator/decide/test_hang", "operator/test_all", "simulation/test_defects"],
        ),
        ("operator/product/native/fast.c", ["test_fast"]),
        ("crds/jobs.yaml", ["test_crds", "test_folder"]),
        ("charts/product/templates/pod.yaml", ["test_chart"]),
        ("tests/unit/test_prose.py", ["test_prose"]),
        ("README.md", []),
    ],
)
def test_affected_tests_are_listed_nearest_first(repository: Path, changed: str, affected: list[str]) -> None:
    distances = measure_distances(read_references(repository, [*FILES, changed]), [changed])
    assert order_tests(distances, [changed]) == [f"tests/unit/{name}.py" for name in affected]


def test_tests_that_use_a_deleted_module_are_affected(repository: Path) -> None:
    changed = "operator/product/words.py"
    (repository / changed).unlink()
    distances = measure_distances(read_references(repository, FILES), [changed])
    assert order_tests(distances, [changed])[0] == "tests/unit/operator/test_words.py"


def test_a_script_affects_the_tests_that_name_it(repository: Path) -> None:
    changed = "tests/support/scripts/train.py"
    distances = measure_distances(read_references(repository, FILES), [changed])
    ranks = "tests/distributed/test_ranks.py"
    assert (order_tests(distances, [changed]), distances[ranks]) == ([ranks], 2)


def test_a_conftest_affects_all_below_it(repository: Path) -> None:
    distances = measure_distances(read_references(repository, FILES), ["tests/conftest.py"])
    assert set(order_tests(distances, ["tests/conftest.py"])) == {name for name in FILES if "/test_" in name}


def test_the_tests_of_a_decision_are_the_nearest_to_it() -> None:
    decide, tests = "operator/pacekeeper_operator/decide", "tests/unit/operator/decide"
    paths = [str(path.relative_to(ROOT)) for folder in (decide, tests) for path in (ROOT / folder).rglob("*.py")]
    references = read_references(ROOT, paths)
    for folder, name in (("failures", "crash"), ("failures", "hang"), ("stragglers", "straggler")):
        changed = f"{decide}/{folder}/{name}.py"
        nearest = order_tests(measure_distances(references, [changed]), [changed])[0]
        assert nearest == f"{tests}/{folder}/test_{name}.py"


def test_after_the_deadline_no_test_starts_and_the_rest_is_listed(tmp_path: Path) -> None:
    for name in ("test_one.py", "test_two.py", "test_three.py"):
        (tmp_path / name).write_text("def test_a(): pass\ndef test_b(): pass\n")
    program = (
        "import pytest, sys; from tests.run.changed import TimeLimit; times = iter([1, 1, 2, 2]);"
        "limit = TimeLimit(2, clock=lambda: next(times));"
        "pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir', *sys.argv[1:]], plugins=[limit]);"
        "print(limit.left_out, limit.session.testsfailed)"
    )
    files = [str(tmp_path / f"test_{name}.py") for name in ("one", "two", "three")]
    command = [sys.executable, "-c", program, str(tmp_path), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert "3 passed" in done.stdout
    assert done.stdout.splitlines()[-1] == "['test_two.py', 'test_three.py'] 0"

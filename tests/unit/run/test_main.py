"""A whole run: its exit status, and what it prints last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run.__main__ import main
from tests.run.parts import BUDGET_SECONDS, PARTS, ROOT, Part, select_parts


def write_pytest(folder: Path, name: str, suite: str, status: int = 0) -> str:
    """Return the command of a stand-in for pytest, which writes one junit file."""
    program = folder / name / "pytest"
    program.parent.mkdir()
    report = f"<testsuites><testsuite {suite}/></testsuites>"
    program.write_text(
        f"#!/bin/sh\necho '{report}' > \"${{1#--junit-xml=}}\"\necho '=== 9 passed ==='\nexit {status}\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_last_line_sums_up_the_tests_of_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_pytest(tmp_path, "first", 'tests="9" failures="0" errors="0" skipped="2"')
    second = write_pytest(tmp_path, "second", 'tests="5" failures="1" errors="1" skipped="0"', status=1)
    parts = [Part("a", "one", 60, first), Part("b", "two", 60, second), Part("c", "two", 60, "true")]
    assert main([], parts, tmp_path / "logs") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "10 passed, 2 failed, 2 skipped"
    assert not [line for line in lines if line.startswith("===")]  # CI would read it as a closing line


def test_a_run_without_a_failure_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write_pytest(tmp_path, "first", 'tests="9" failures="0" errors="0" skipped="0"')
    assert main([], [Part("a", "one", 60, command)], tmp_path / "logs") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "9 passed, 0 failed"


def test_a_run_far_over_its_budget_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [Part("a", "one", 0, "true")], tmp_path / "logs") == 1
    assert "FAILED: the run used more than 1.5 times its budget" in capsys.readouterr().out


def test_a_run_can_be_limited_to_some_parts(tmp_path: Path) -> None:
    parts = [Part("good", "one", 60, "true"), Part("bad", "one", 60, "false")]
    assert main(["good"], parts, tmp_path) == 0
    assert not (tmp_path / "bad.log").exists()


def test_a_direct_run_writes_no_logs(tmp_path: Path) -> None:
    parts = [Part("good", "one", 60, "true"), Part("bad", "one", 60, "false")]
    assert main(["--direct", "good"], parts, tmp_path) == 0
    assert main(["--direct"], parts, tmp_path) == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_is_an_error_that_lists_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["cluster", "clutter"])
    assert refused.value.code == 2
    assert "no part is named clutter; choose from cluster, oldest-torch," in capsys.readouterr().err


def test_the_table_of_parts_is_consistent() -> None:
    assert sum(part.budget_seconds for part in PARTS) <= BUDGET_SECONDS
    assert len(select_parts([])) == len({part.name for part in PARTS})
    for part in PARTS:
        for name in part.build_command():
            if name.startswith("tests/"):
                assert (ROOT / name).exists()


def test_contributing_lists_the_budget_of_each_target() -> None:
    rows = [line.split("|")[1:] for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if "| `make" in line]
    output = {row[0].strip(" `"): row[2].strip() for row in rows}
    targets = re.findall(r"^(test-[a-z]+):.*\n\t\$\(PARTS\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) == 4
    for target, names in targets:
        budget = sum(part.budget_seconds for part in select_parts(names.split()))
        assert output[f"make {target}"] == f"{budget:.0f} s"
    assert output["make test"].startswith(f"{BUDGET_SECONDS} s:")


def test_table_and_makefile_skip_the_same_tests_for_the_oldest_torch() -> None:
    (oldest,) = (part for part in PARTS if part.name == "oldest-torch")
    ignored = " ".join(name for name in oldest.build_command() if name.startswith("--ignore"))
    assert f"WITHOUT_OPERATOR := {ignored}\n" in (ROOT / "Makefile").read_text()

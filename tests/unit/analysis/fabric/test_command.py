"""`pacekeeper fabric show`. A script stands in for kubectl and the API server behind it, with kubectl's own output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pacekeeper import cli
from pacekeeper_analysis.fabric import command


def build_fabric(name: str = "pods", in_force: str = "True", load: int = 1) -> dict[str, Any]:
    links = [{"leaf": "l1", "spine": "s1", "up": load, "down": 0}]
    conditions = [{"type": "InForce", "status": in_force, "reason": "Oldest"}]
    status = {"leaves": 1, "flows": 1, "maxLoad": load, "lowerBound": load, "links": links, "conditions": conditions}
    return {"kind": "Fabric", "metadata": {"name": name}, "spec": {"spines": 1}, "status": status}


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes what `answer` and `error` hold, and records how it was called."""
    script = tmp_path / "bin" / "kubectl"
    script.parent.mkdir()
    for name in ("answer", "error"):
        (script.parent / name).write_text("")
    script.write_text(
        f"""#!{sys.executable}
import pathlib, sys
folder = pathlib.Path(__file__).parent
(folder / "called").write_text(" ".join(sys.argv[1:]))
error = (folder / "error").read_text()
print(error or (folder / "answer").read_text(), file=sys.stderr if error else sys.stdout)
sys.exit(bool(error))
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    return script.parent


def set_answer(kubectl: Path, *fabrics: dict[str, Any]) -> None:
    (kubectl / "answer").write_text(json.dumps({"kind": "List", "items": list(fabrics)}))


def read_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pacekeeper fabric: ")
    return captured.err


def test_the_fabric_of_the_cluster_is_shown(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_answer(kubectl, build_fabric())
    assert cli.main(["fabric", "show"]) == 0
    assert capsys.readouterr().out.startswith("pods: 1 leaves × 1 spines · 1 flow · fullest link 1")
    assert (kubectl / "called").read_text().startswith("get fabrics.pacekeeper.dev -o json")


def test_the_fabric_in_force_is_chosen_of_several(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_answer(kubectl, build_fabric("young", "False"), build_fabric("old"))
    assert command.main(["show"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("old: ")
    assert "Also there: young." in out
    assert command.main(["show", "young"]) == 0
    assert capsys.readouterr().out.startswith("young: ")


def test_an_ambiguous_choice_is_an_error(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_answer(kubectl, build_fabric("a", "False"), build_fabric("b", "False"))
    assert "several Fabrics, and none is in force yet: give one's name, of a, b" in read_refusal(capsys)
    assert "no Fabric 'c', only a, b" in read_refusal(capsys, "c")


def test_a_cluster_without_a_fabric_is_an_error(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_answer(kubectl)
    assert "there is no Fabric in this cluster" in read_refusal(capsys)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            'Error from server (Forbidden): fabrics.pacekeeper.dev is forbidden: User "ann" cannot list them',
            "ask for the chart's ClusterRole <release>-platform (Error from server (Forbidden): fabrics.pacekeeper.dev",
        ),
        ('error: the server doesn\'t have a resource type "fabrics"', "is Pacekeeper installed in it?"),
        (
            "E1123 memcache.go:381] err\nE1123 memcache.go:381] err\nThe connection was refused",
            "fabric: The connection was",
        ),
    ],
)
def test_the_reason_of_a_kubectl_failure_is_shown(
    kubectl: Path, error: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (kubectl / "error").write_text(error)
    assert message in read_refusal(capsys)


def test_a_kubectl_that_does_not_end_is_an_error(
    kubectl: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kubectl / "kubectl").write_text("#!/bin/sh\nwhile :; do :; done\n")
    monkeypatch.setattr(command, "FABRIC_READ_TIMEOUT_SECONDS", 0.1)
    assert "kubectl has not ended within" in read_refusal(capsys)


def test_a_missing_kubectl_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no kubectl on the PATH" in read_refusal(capsys)


class TestFiles:
    def test_files_are_shown_without_a_cluster(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", "")
        (tmp_path / "now.json").write_text(json.dumps(build_fabric()))
        assert command.main(["show", "--file", str(tmp_path / "now.json")]) == 0
        assert capsys.readouterr().out.startswith("pods: ")

    def test_the_picture_has_both_states(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "before.json").write_text(json.dumps({"items": [build_fabric("x"), build_fabric(load=7)]}))
        (tmp_path / "now.json").write_text(json.dumps(build_fabric()))
        files = ["--file", str(tmp_path / "now.json"), "--before", str(tmp_path / "before.json")]
        assert command.main(["show", *files, "--svg", str(tmp_path / "f.svg")]) == 0
        picture = (tmp_path / "f.svg").read_text()
        assert picture.index("7 up") < picture.index("1 up")
        with pytest.raises(SystemExit):
            command.main(["show", *files])
        assert "--before needs --svg" in capsys.readouterr().err

    @pytest.mark.parametrize("content", ["", "no", "[]", "7", '{"items": [7]}', '{"items": {}}', "[" * 100_000])
    def test_an_unreadable_file_is_rejected(
        self, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f.json").write_text(content)
        read_refusal(capsys, "--file", str(tmp_path / "f.json"))

    def test_a_file_larger_than_any_fabric_is_rejected(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "MAX_KUBECTL_OUTPUT_BYTES", 100)
        (tmp_path / "f.json").write_text(json.dumps(build_fabric()))
        assert "longer than 100 bytes" in read_refusal(capsys, "--file", str(tmp_path / "f.json"))

    def test_a_missing_file_and_one_that_cannot_be_written_are_errors(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "nothing.json" in read_refusal(capsys, "--file", str(tmp_path / "nothing.json"))
        (tmp_path / "f.json").write_text(json.dumps(build_fabric()))
        there = ["--file", str(tmp_path / "f.json"), "--svg", str(tmp_path / "nowhere" / "f.svg")]
        assert command.main(["show", *there]) == 2

"""The verbs, over a stand-in for kubectl: what they ask it, and what they say when it cannot."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pacekeeper_analysis.profiling.localize import localize_in_table
from pacekeeper_analysis.profiling.page import write_profile_page
from pacekeeper_analysis.profiling.table import read_table
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import API_VERSION, Object
from pacekeeper_operator.cli import command
from pacekeeper_operator.cli.command import main
from pacekeeper_operator.decide.evaluate import evaluate_job
from testing.kubernetes import kubectl_stand_in
from testing.kubernetes.cli_objects import build_incident_object, build_job_object, build_metadata
from testing.operators.observations import build_policy, build_stalls, build_training
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern
from testing.training.rings import write_ring
from tests.unit.operator.decide.network.test_slow_communication import build_mesh

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the stand-in, with a job, its incident and a quarantine."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {kubectl_stand_in.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    thought = evaluate_job(build_training(faults=build_stalls(build_training(), culprit=2)), build_policy())
    (incident,) = thought.desired.state.incidents.current
    quarantine = {
        "apiVersion": API_VERSION,
        "kind": "NodeQuarantine",
        "metadata": build_metadata("node-7", "u7"),
        "spec": {"reason": "XID 79"},
        "status": {"phase": "Pending"},
    }
    at = format_time(time.time() - 7200)
    entry = {"namespace": "ns", "name": "j-r1-hang", "kind": "Hung", "at": at, "resolvedByMove": True}
    histories = [
        {
            "apiVersion": API_VERSION,
            "kind": "NodeHistory",
            "metadata": build_metadata(name, "h"),
            "status": {"incidents": items},
        }
        for name, items in (("node-7", [entry]), ("node-8", [{**entry, "kind": "Possessed"}]))
    ]
    objects = [
        build_job_object(thought.observation),
        build_incident_object(build_training().job, incident),
        quarantine,
        *histories,
    ]
    (tmp_path / "objects.json").write_text(json.dumps(objects))
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command's exit code and what it says; kubectl is `folder`'s."""
    assert folder.exists()

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def changes(folder: Path) -> list[list[str]]:
    """What kubectl was asked to do, beside looking."""
    log = folder / "asked.json"
    asked = map(json.loads, log.read_text().splitlines() if log.exists() else ())
    return [arguments for arguments in asked if arguments[0] != "get"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status"], "Recovering"),
        (["status", "j"], "j in ns: Recovering"),
        (["status", "-A"], "NAMESPACE"),
        (["why", "j"], "RestartRanks"),
        (["incidents"], "j-r1-hang-u1d2c"),
        (["incidents", "j"], "open"),
        (["incidents", "j-r1-hang-u1d2c"], "hang of job j, round 1"),
        (["nodes"], "node-7  1     0     1     0     0    2.0 h ago"),
        (["nodes", "node-7"], "2.0 h ago  Hung  yes               ns/j-r1-hang"),
        (["nodes", "node-8"], "node node-8: 0 Incidents within 90 days"),
    ],
)
def test_looking_changes_nothing(run: Run, folder: Path, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert words in out
    assert not changes(folder)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["mode", "j", "Sync"], "patch trainingjobs.pacekeeper.dev j {'spec': {'syncMode': 'Sync'}}"),
        (["restarts", "j", "30"], "patch trainingjobs.pacekeeper.dev j {'spec': {'remediation': {'maxRestarts': 30}}}"),
        (["pause", "j"], "patch trainingjobs.pacekeeper.dev j {'spec': {'remediation': {'mode': 'Recommend'}}}"),
        (["resume", "j"], "patch trainingjobs.pacekeeper.dev j {'spec': {'remediation': {'mode': 'Act'}}}"),
        (
            ["pause", "--all", "--reason", "until 18:00"],
            "create configmap pacekeeper-pause --namespace=pacekeeper-system --from-literal=reason=until 18:00",
        ),
        (
            ["resume", "--all"],
            "delete configmap pacekeeper-pause --namespace=pacekeeper-system --ignore-not-found",
        ),
        (["approve", "node-7", "--yes"], "patch nodequarantines.pacekeeper.dev node-7 {'spec': {'approved': True}}"),
        (["release", "node-7", "--yes"], "delete nodequarantines.pacekeeper.dev node-7 --timeout=120s"),
    ],
)
def test_acting_is_one_call(run: Run, folder: Path, arguments: list[str], asked: str) -> None:
    code, _, err = run(*arguments)
    assert (code, err) == (0, "")
    (done,) = changes(folder)
    if done[0] == "patch":
        assert done[3:5] == ["--type=merge", "-p"]
        done = [*done[:3], str(json.loads(done[5]))]
    assert " ".join(done) == asked


def test_a_report_is_a_file_and_says_which(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert run("report", "j") == (0, "j.html\n", "")
    assert "j-r1-hang-u1d2c" in (folder / "j.html").read_text()
    assert run("report", "j", "-o", str(folder / "b.html"))[0] == 0
    assert (folder / "b.html").exists()
    code, _, err = run("report", "j", "-o", str(folder / "no" / "such"))
    assert (code, err) == (2, f"kubectl pacekeeper: --output {folder}/no/such: No such file or directory\n")
    assert not changes(folder)


def test_a_mode_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mode", "j", "Fast"])
    said = capsys.readouterr().err
    assert "invalid choice: 'Fast'" in said
    assert "AsyncEDiT" in said
    assert "RequestedSyncMode" not in said


def test_context_and_namespace_are_handed_on(run: Run, folder: Path) -> None:
    run("mode", "j", "Auto", "-n", "team-a", "--context", "prod")
    (asked,) = [json.loads(line) for line in (folder / "asked.json").read_text().splitlines() if "patch" in line]
    assert asked[0] == "--context=prod"
    assert "--namespace=team-a" in asked


@pytest.mark.parametrize("verb", ["approve", "release"])
@pytest.mark.parametrize(("answer", "done"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_nodes_are_touched_only_when_somebody_agrees(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, answer: str, done: bool
) -> None:
    typed = io.StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    code, out, _ = run(verb, "node-7")
    assert "XID 79" in out
    assert (code, bool(changes(folder))) == (0 if done else 1, done)


def test_where_nobody_can_be_asked_it_says_so(run: Run, folder: Path) -> None:
    code, _, err = run("approve", "node-7")
    assert (code, "--yes" in err) == (2, True)
    assert not changes(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "nobody"], "there are: j"),
        (["why", "nobody"], "there are: j"),
        (["incidents", "nobody"], "there are: j"),
        (["nodes", "nobody"], "there are: node-7, node-8"),
        (["mode", "nobody", "Sync"], "there are: j"),
        (["restarts", "nobody", "30"], "there are: j"),
        (["pause", "nobody"], "there are: j"),
        (["approve", "node-8"], "there are: node-7"),
        (["links", "nobody"], "there are: j"),
        (["whatif", "j"], "j has no ranks that train: kubectl pacekeeper why j"),
        (["pause"], "name a job, or --all"),
        (["profile", "j"], "j does not train now"),
    ],
)
def test_what_cannot_be_done(run: Run, folder: Path, arguments: list[str], words: str) -> None:
    code, _, err = run(*arguments)
    assert code != 0
    assert words in err
    assert [asked[0] for asked in changes(folder)] in ([], ["annotate"])


def test_what_if_is_computed_from_the_rings_of_the_newest_round(run: Run, folder: Path) -> None:
    """Rank 2 of 4 takes twice as long; its worker has left a ring of an earlier round behind."""
    add(folder, *({"kind": "Pod", "metadata": {"name": f"j-w{number}-0"}} for number in range(5)))
    for rank in range(4):
        place = folder / "pods" / f"j-w{rank}-0"
        place.mkdir(parents=True)
        write_ring(place / "0", rank, round_=2)
        (place / "0.transport").write_bytes(b"NCCL's")
    write_ring(folder / "pods" / "j-w2-0" / "1", rank=1, round_=1)
    code, out, err = run("whatif", "j")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "Slowdown 1.517" in out
    assert "dp_rank 2" in out
    body = build_job_object(build_training())
    add(folder, {**body, "status": {**body["status"], "syncMode": "AsyncEDiT"}})
    assert "j trains in AsyncEDiT, in which no rank waits" in run("whatif", "j")[2]


def test_links_are_told_by_all_workers_the_slowest_first(run: Run, folder: Path) -> None:
    """What rank 2 of 4 sends takes ten times as long; a fifth pod has just gone."""
    pods = [{"kind": "Pod", "metadata": {"name": f"j-w{n}-0"}, "spec": {"nodeName": f"node-{n}"}} for n in range(5)]
    add(folder, *pods)
    assert "no worker of j has answered" in run("links", "j")[2]
    for told in build_mesh(ranks=4, slow=2):
        place = folder / "pods" / told.worker
        place.mkdir(parents=True)
        (place / "answer").write_text(json.dumps(told.to_json()))
    code, out, err = run("links", "j")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["FROM", "TO", "×", "USUAL", "MB/S", "MB", "BUSY", "S", "RESENT", "MB", "BETWEEN"]
    assert [line.split()[1] for line in lines[1:4]] == ["2"] * 3
    assert lines[1].split()[4:6] == ["10.00", "12.5"]
    assert "4 of 5 workers answered" in out
    assert "slow: all that rank 2 sends" in out
    assert sorted(path.name for path in (folder / "pods" / "j-w0-0").iterdir()) == ["answer"], "it tidies up"


def test_of_many_links_all_are_shown_where_that_is_wanted(run: Run, folder: Path) -> None:
    add(folder, *({"kind": "Pod", "metadata": {"name": f"j-w{n}-0"}, "spec": {}} for n in range(6)))
    for told in build_mesh(ranks=6, slow=-1):
        place = folder / "pods" / told.worker
        place.mkdir(parents=True)
        (place / "answer").write_text(json.dumps(told.to_json()))
    out = run("links", "j")[1]
    assert "10 links more: --all" in out
    assert "no link is much slower than the others" in out
    assert run("links", "j", "--all")[1].count("rank ") == 2 * 30


def test_a_profile_waits_for_the_window_and_tells_it(run: Run, folder: Path) -> None:
    sent = build_answers(
        [
            build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == 1 else HEALTHY_WORK, 0.6)
            for rank in range(4)
        ],
        None,
    )
    table = read_table(sent)
    content = write_profile_page(localize_in_table(table, 4), table, dict(sent)).decode()
    window = {"kind": "ProfileWindow", "metadata": {"name": "w"}, "spec": {"window": "profile-1", "content": content}}
    event = {"kind": "Event", "metadata": {"uid": "e"}, "message": "rank 1 takes longer"}
    add(folder, build_job_object(build_training()))
    assert "no profile within 0 s" in run("profile", "j", "--timeout", "0")[2]
    (folder / "later.json").write_text(json.dumps([event, window]))
    code, out, _ = run("profile", "j", "-o", str(folder / "page.html"))
    assert code == 0
    assert "train.py:augment" in out
    assert "to do: " in out
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    *_, (verb, _, job, _, wanted) = changes(folder)
    assert (verb, job, wanted.partition("=")[0]) == ("annotate", "j", "pacekeeper.dev/profile")


def add(folder: Path, *objects: Object) -> None:
    """In front of what there is of the same name."""
    known = json.loads((folder / "objects.json").read_text())
    (folder / "objects.json").write_text(json.dumps([*objects, *known]))


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ('Error from server (Forbidden): trainingjobs is forbidden: User "eve" cannot list', 'User "eve" cannot list'),
        ('error: the server doesn\'t have a resource type "trainingjobs"', "install the chart"),
        ("E1123 11:52:24.366504 2300 memcache.go:381] noise\nThe connection was refused", "The connection was refused"),
    ],
)
def test_what_kubectl_refuses_is_told_in_its_own_words(run: Run, folder: Path, refusal: str, words: str) -> None:
    (folder / "refusal").write_text(refusal)
    code, out, err = run("status")
    assert (code, out) == (1, "")
    assert words in err
    assert "noise" not in err


def test_without_kubectl(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run("status")
    assert (code, "kubectl is not on the PATH" in err) == (1, True)


def test_it_needs_no_library_of_the_operators() -> None:
    program = (
        "import sys, pacekeeper_operator.cli.command; "
        "print({'kopf', 'kubernetes', 'aiohttp', 'torch', 'prometheus_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_why_has_the_events_of_pods_that_do_not_run(run: Run, folder: Path) -> None:
    pod = {"kind": "Pod", "metadata": build_metadata("j-w2-1", "u2"), "spec": {}, "status": {"phase": "Pending"}}
    event = {"kind": "Event", "metadata": build_metadata("e", "e1"), "type": "Warning", "reason": "FailedMount"}
    add(folder, pod, event | {"message": 'secret "token" not found'})
    _, words, _ = run("why", "j")
    assert "Pod j-w2-1 is Pending (kubectl describe pod j-w2-1):\n  FailedMount (" in words
    assert 'secret "token" not found' in words
    asked = [" ".join(map(str, json.loads(line))) for line in (folder / "asked.json").read_text().splitlines()]
    assert any("get pods" in line and "status.phase!=Running" in line for line in asked)
    assert any("get events" in line and "involvedObject.uid=u2" in line for line in asked)


@pytest.mark.parametrize("verb", [["restarts", "j", "30"], ["mode", "j", "Sync"], ["pause", "j"], ["resume", "j"]])
def test_what_has_ended_is_not_changed_any_more(run: Run, folder: Path, verb: list[str]) -> None:
    file = folder / "objects.json"
    objects = json.loads(file.read_text())
    objects[0]["status"]["phase"] = "Failed"
    file.write_text(json.dumps(objects))
    code, out, err = run(*verb)
    assert (code, out) == (1, "")
    assert "j is Failed; next: nothing: a job that has failed does not start again" in err
    assert not changes(folder)


class TestJson:
    """For programs: the words, and the objects that they are about."""

    @pytest.mark.parametrize(
        ("arguments", "kinds"),
        [
            (("status",), {"TrainingJob"}),
            (("status", "j"), {"TrainingJob", "Incident"}),
            (("why", "j"), {"TrainingJob", "Incident"}),
            (("incidents",), {"Incident"}),
            (("report", "j"), {"TrainingJob", "Incident"}),
            (("mode", "j", "Sync"), {"TrainingJob"}),
            (("restarts", "j", "20"), {"TrainingJob"}),
            (("pause", "j"), {"TrainingJob"}),
            (("resume", "j"), {"TrainingJob"}),
            (("approve", "node-7", "--yes"), {"NodeQuarantine"}),
            (("release", "node-7", "--yes"), {"NodeQuarantine"}),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_each_verb_says_one_object(self, run: Run, arguments: tuple[str, ...], kinds: set[str]) -> None:
        _, plain, _ = run(*arguments) if arguments[0] in ("status", "why", "incidents") else (0, "", "")
        code, words, _ = run(*arguments, "-o", "json")
        said = json.loads(words)
        assert code == 0
        assert {body["kind"] for body in said["objects"]} == kinds
        assert said["text"].split() == plain.split() or not plain

    def test_a_report_writes_no_page(self, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        before = {path.name for path in folder.iterdir()}
        run("report", "j", "-o", "json")
        assert {path.name for path in folder.iterdir()} - before == {"asked.json"}, "which is the stand-in's"

    def test_nobody_is_asked(self, run: Run) -> None:
        code, words, error = run("release", "node-7", "-o", "json")
        assert (code, words) == (2, "")
        assert "give --yes" in error

    def test_an_error_is_words_and_a_status(self, run: Run) -> None:
        code, words, error = run("why", "nobody", "-o", "json")
        assert (code, words) == (1, "")
        assert "there are: j" in error

    def test_every_verb_knows_it(self) -> None:
        verbs = next(
            action for action in command._build_parser()._actions if action.dest == "==SUPPRESS==" or action.choices
        )
        assert verbs.choices
        assert all("--output" in verb._option_string_actions for verb in dict(verbs.choices).values())

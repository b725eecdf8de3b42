"""The verbs, over a stand-in for kubectl: their calls, and what they print when a call fails."""

from __future__ import annotations

import io
import json
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
from testing.kubernetes.cli_objects import (
    build_incident_object,
    build_job_object,
    build_metadata,
    install_kubectl_stand_in,
)
from testing.network.link_evidence import build_mesh
from testing.operators.observations import build_policy, build_stalls, build_training
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern
from testing.training.rings import write_ring

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in, with a job, its incident, and a quarantine."""
    result = evaluate_job(build_training(faults=build_stalls(build_training(), culprit=2)), build_policy())
    (incident,) = result.desired.state.incidents.current
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
        build_job_object(result.observation),
        build_incident_object(build_training().job, incident),
        quarantine,
        *histories,
    ]
    install_kubectl_stand_in(tmp_path, monkeypatch, objects)
    return tmp_path


@pytest.fixture
def run_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return its exit code, stdout, and stderr; kubectl is the stand-in."""
    assert folder.exists()

    def call_command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call_command


def list_changes(folder: Path) -> list[list[str]]:
    """Return the calls of kubectl other than `get`."""
    log = folder / "asked.json"
    asked = map(json.loads, log.read_text().splitlines() if log.exists() else ())
    return [arguments for arguments in asked if arguments[0] != "get"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["status"], "Recovering"),
        (["status", "j"], "j in ns: Recovering"),
        (["status", "-A"], "NAMESPACE"),
        (["why", "j"], "RestartRanks"),
        (["incidents"], "j-r1-hang-u1d2c"),
        (["incidents", "j"], "open"),
        (["incidents", "j-r1-hang-u1d2c"], "hang of job j, round 1"),
        (["injection"], "pods are not watched: no operator has led"),
        (["nodes"], "node-7  1     0     1     0     0    2.0 h ago"),
        (["nodes", "node-7"], "2.0 h ago  Hung  yes               ns/j-r1-hang"),
        (["nodes", "node-8"], "node node-8: 0 Incidents within 90 days"),
    ],
)
def test_read_commands_change_nothing(run_command: Run, folder: Path, arguments: list[str], text: str) -> None:
    code, out, err = run_command(*arguments)
    assert (code, err) == (0, "")
    assert text in out
    assert not list_changes(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
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
        (
            ["injection", "on"],
            "patch configmap pacekeeper-watch {'data': {'enabled': 'true', 'reason': None}}",
        ),
        (
            ["injection", "off", "--operator-namespace", "ops"],
            "patch configmap pacekeeper-watch {'data': {'enabled': 'false', 'reason': None}}",
        ),
        (["approve", "node-7", "--yes"], "patch nodequarantines.pacekeeper.dev node-7 {'spec': {'approved': True}}"),
        (["release", "node-7", "--yes"], "delete nodequarantines.pacekeeper.dev node-7 --timeout=120s"),
    ],
)
def test_write_commands_make_one_call(run_command: Run, folder: Path, arguments: list[str], expected: str) -> None:
    code, _, err = run_command(*arguments)
    assert (code, err) == (0, "")
    (done,) = list_changes(folder)
    if done[0] == "patch":
        done = [part for part in done if not part.startswith("--namespace=")]
        assert done[3:5] == ["--type=merge", "-p"]
        done = [*done[:3], str(json.loads(done[5]))]
    assert " ".join(done) == expected


def test_report_writes_a_file_and_prints_its_name(
    run_command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run_command("report", "j") == (0, "j.html\n", "")
    assert "j-r1-hang-u1d2c" in (folder / "j.html").read_text()
    assert run_command("report", "j", "-o", str(folder / "b.html"))[0] == 0
    assert (folder / "b.html").exists()
    code, _, err = run_command("report", "j", "-o", str(folder / "no" / "such"))
    assert (code, err) == (2, f"kubectl pacekeeper: --output {folder}/no/such: No such file or directory\n")
    assert not list_changes(folder)


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mode", "j", "Fast"])
    printed = capsys.readouterr().err
    assert "invalid choice: 'Fast'" in printed
    assert "AsyncEDiT" in printed
    assert "RequestedSyncMode" not in printed


def test_context_and_namespace_are_passed_to_kubectl(run_command: Run, folder: Path) -> None:
    run_command("mode", "j", "Auto", "-n", "team-a", "--context", "prod")
    (asked,) = [json.loads(line) for line in (folder / "asked.json").read_text().splitlines() if "patch" in line]
    assert asked[0] == "--context=prod"
    assert "--namespace=team-a" in asked


@pytest.mark.parametrize("verb", ["approve", "release"])
@pytest.mark.parametrize(("answer", "done"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_quarantines_change_only_after_confirmation(
    run_command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, answer: str, done: bool
) -> None:
    typed = io.StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    code, out, _ = run_command(verb, "node-7")
    assert "XID 79" in out
    assert (code, bool(list_changes(folder))) == (0 if done else 1, done)


def test_without_a_terminal_the_error_names_the_yes_option(run_command: Run, folder: Path) -> None:
    code, _, err = run_command("approve", "node-7")
    assert (code, "--yes" in err) == (2, True)
    assert not list_changes(folder)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["status", "absent"], "there are: j"),
        (["why", "absent"], "there are: j"),
        (["incidents", "absent"], "there are: j"),
        (["nodes", "absent"], "there are: node-7, node-8"),
        (["mode", "absent", "Sync"], "there are: j"),
        (["restarts", "absent", "30"], "there are: j"),
        (["pause", "absent"], "there are: j"),
        (["approve", "node-8"], "there are: node-7"),
        (["links", "absent"], "there are: j"),
        (["whatif", "j"], "j has no ranks that train: kubectl pacekeeper why j"),
        (["pause"], "name a job, or --all"),
        (["profile", "j"], "j does not train now"),
    ],
)
def test_an_impossible_command_fails_with_an_explanation(
    run_command: Run, folder: Path, arguments: list[str], text: str
) -> None:
    code, _, err = run_command(*arguments)
    assert code != 0
    assert text in err
    assert [asked[0] for asked in list_changes(folder)] in ([], ["annotate"])


def test_whatif_uses_the_rings_of_the_newest_round(run_command: Run, folder: Path) -> None:
    """Rank 2 of 4 takes twice as long. Its worker left a ring of an earlier round behind."""
    add_objects(folder, *({"kind": "Pod", "metadata": {"name": f"j-w{number}-0"}} for number in range(5)))
    for rank in range(4):
        place = folder / "pods" / f"j-w{rank}-0"
        place.mkdir(parents=True)
        write_ring(place / "0", rank, round_=2)
        (place / "0.transport").write_bytes(b"NCCL's")
    write_ring(folder / "pods" / "j-w2-0" / "1", rank=1, round_=1)
    code, out, err = run_command("whatif", "j")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "Slowdown 1.517" in out
    assert "dp_rank 2" in out
    body = build_job_object(build_training())
    add_objects(folder, {**body, "status": {**body["status"], "syncMode": "AsyncEDiT"}})
    assert "j trains in AsyncEDiT, in which no rank waits" in run_command("whatif", "j")[2]


def test_links_lists_the_links_of_all_workers_slowest_first(run_command: Run, folder: Path) -> None:
    """What rank 2 of 4 sends takes ten times as long. A fifth pod has just been deleted."""
    pods = [{"kind": "Pod", "metadata": {"name": f"j-w{n}-0"}, "spec": {"nodeName": f"node-{n}"}} for n in range(5)]
    add_objects(folder, *pods)
    assert "no worker of j has answered" in run_command("links", "j")[2]
    for answer in build_mesh(ranks=4, slow=2):
        place = folder / "pods" / answer.worker
        place.mkdir(parents=True)
        (place / "answer").write_text(json.dumps(answer.to_json()))
    code, out, err = run_command("links", "j")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["FROM", "TO", "×", "USUAL", "MB/S", "MB", "BUSY", "S", "RESENT", "MB", "BETWEEN"]
    assert [line.split()[1] for line in lines[1:4]] == ["2"] * 3
    assert lines[1].split()[4:6] == ["10.00", "12.5"]
    assert "4 of 5 workers answered" in out
    assert "slow: all that rank 2 sends" in out
    assert sorted(path.name for path in (folder / "pods" / "j-w0-0").iterdir()) == ["answer"], "it tidies up"


def test_links_shows_all_links_with_the_all_option(
    run_command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacekeeper_operator.cli.links.LINK_ANSWER_TIMEOUT_SECONDS", 120.0)  # on a busy machine, too
    add_objects(folder, *({"kind": "Pod", "metadata": {"name": f"j-w{n}-0"}, "spec": {}} for n in range(6)))
    for answer in build_mesh(ranks=6, slow=-1):
        place = folder / "pods" / answer.worker
        place.mkdir(parents=True)
        (place / "answer").write_text(json.dumps(answer.to_json()))
    out = run_command("links", "j")[1]
    assert "10 links more: --all" in out
    assert "no link is much slower than the others" in out
    assert run_command("links", "j", "--all")[1].count("rank ") == 2 * 30


def test_profile_waits_for_the_window_and_prints_it(run_command: Run, folder: Path) -> None:
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
    add_objects(folder, build_job_object(build_training()))
    assert "no profile within 0 s" in run_command("profile", "j", "--timeout", "0")[2]
    (folder / "later.json").write_text(json.dumps([event, window]))
    code, out, _ = run_command("profile", "j", "-o", str(folder / "page.html"))
    assert code == 0
    assert "train.py:augment" in out
    assert "to do: " in out
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    *_, (verb, _, job, _, wanted) = list_changes(folder)
    assert (verb, job, wanted.partition("=")[0]) == ("annotate", "j", "pacekeeper.dev/profile")


def add_objects(folder: Path, *objects: Object) -> None:
    """Add objects in front of those that exist with the same name."""
    known = json.loads((folder / "objects.json").read_text())
    (folder / "objects.json").write_text(json.dumps([*objects, *known]))


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ('Error from server (Forbidden): trainingjobs is forbidden: User "eve" cannot list', 'User "eve" cannot list'),
        ('error: the server doesn\'t have a resource type "trainingjobs"', "install the chart"),
        ("E1123 11:52:24.366504 2300 memcache.go:381] noise\nThe connection was refused", "The connection was refused"),
    ],
)
def test_a_refusal_by_kubectl_is_printed_verbatim(run_command: Run, folder: Path, refusal: str, text: str) -> None:
    (folder / "refusal").write_text(refusal)
    code, out, err = run_command("status")
    assert (code, out) == (1, "")
    assert text in err
    assert "noise" not in err


def test_a_missing_kubectl_is_reported(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run_command("status")
    assert (code, "kubectl is not on the PATH" in err) == (1, True)


def test_the_command_imports_no_library_of_the_operator() -> None:
    program = (
        "import sys, pacekeeper_operator.cli.command; "
        "print({'kopf', 'kubernetes', 'aiohttp', 'torch', 'prometheus_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_why_shows_events_of_pods_that_do_not_run(run_command: Run, folder: Path) -> None:
    pod = {"kind": "Pod", "metadata": build_metadata("j-w2-1", "u2"), "spec": {}, "status": {"phase": "Pending"}}
    event = {"kind": "Event", "metadata": build_metadata("e", "e1"), "type": "Warning", "reason": "FailedMount"}
    add_objects(folder, pod, event | {"message": 'secret "token" not found'})
    _, text, _ = run_command("why", "j")
    assert "Pod j-w2-1 is Pending (kubectl describe pod j-w2-1):\n  FailedMount (" in text
    assert 'secret "token" not found' in text
    asked = [" ".join(map(str, json.loads(line))) for line in (folder / "asked.json").read_text().splitlines()]
    assert any("get pods" in line and "status.phase!=Running" in line for line in asked)
    assert any("get events" in line and "involvedObject.uid=u2" in line for line in asked)


@pytest.mark.parametrize("verb", [["restarts", "j", "30"], ["mode", "j", "Sync"], ["pause", "j"], ["resume", "j"]])
def test_an_ended_job_is_not_changed(run_command: Run, folder: Path, verb: list[str]) -> None:
    file = folder / "objects.json"
    objects = json.loads(file.read_text())
    objects[0]["status"]["phase"] = "Failed"
    file.write_text(json.dumps(objects))
    code, out, err = run_command(*verb)
    assert (code, out) == (1, "")
    assert "j is Failed; next: nothing: a job that has failed does not start again" in err
    assert not list_changes(folder)


class TestJson:
    """Output for programs: the text, and the objects that it is about."""

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
    def test_each_verb_prints_one_json_object(
        self, run_command: Run, arguments: tuple[str, ...], kinds: set[str]
    ) -> None:
        _, plain, _ = run_command(*arguments) if arguments[0] in ("status", "why", "incidents") else (0, "", "")
        code, text, _ = run_command(*arguments, "-o", "json")
        printed = json.loads(text)
        assert code == 0
        assert {body["kind"] for body in printed["objects"]} == kinds
        assert printed["text"].split() == plain.split() or not plain

    def test_report_as_json_writes_no_page(
        self, run_command: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        before = {path.name for path in folder.iterdir()}
        run_command("report", "j", "-o", "json")
        assert {path.name for path in folder.iterdir()} - before == {"asked.json"}, "which is the stand-in's"

    def test_json_output_requires_the_yes_option(self, run_command: Run) -> None:
        code, text, error = run_command("release", "node-7", "-o", "json")
        assert (code, text) == (2, "")
        assert "give --yes" in error

    def test_an_error_is_a_message_and_an_exit_code(self, run_command: Run) -> None:
        code, text, error = run_command("why", "absent", "-o", "json")
        assert (code, text) == (1, "")
        assert "there are: j" in error

    def test_every_verb_has_the_output_option(self) -> None:
        verbs = next(
            action for action in command._build_parser()._actions if action.dest == "==SUPPRESS==" or action.choices
        )
        assert verbs.choices
        assert all("--output" in verb._option_string_actions for verb in dict(verbs.choices).values())

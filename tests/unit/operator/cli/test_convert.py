"""`kubectl pacekeeper convert`: from a file or the cluster, to standard output. Notes go to standard error."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pacekeeper_operator.cli.command import main
from pacekeeper_operator.cli.kubectl import Kubectl
from testing.kubernetes.cli_objects import install_kubectl_stand_in

MANIFESTS = Path(__file__).parents[1] / "convert/manifests"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command and return its exit code, stdout, and stderr. Each runtime of the manifests is in the cluster."""
    documents = [body for path in MANIFESTS.iterdir() for body in yaml.safe_load_all(path.read_text())]
    install_kubectl_stand_in(tmp_path, monkeypatch, documents)

    def call_command(*arguments: str) -> tuple[int, str, str]:
        code = main(["convert", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call_command


def write_manifest(folder: Path, text: str) -> str:
    path = folder / "manifest.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_becomes_training_jobs(run_convert: Run) -> None:
    code, out, err = run_convert(
        "-f", str(MANIFESTS / "job-headless-service.yaml"), "-f", str(MANIFESTS / "job-one-pod.yaml")
    )
    assert code == 0
    jobs = list(yaml.safe_load_all(out))
    assert [(job["kind"], job["metadata"]["name"]) for job in jobs] == [("TrainingJob", "ocr"), ("TrainingJob", "tune")]
    assert "Service ocr: not needed" in err
    assert "ConfigMap ocr: is not converted; apply it as before" in err
    assert "Job tune- is now TrainingJob tune" in err
    for kind in ("taken over: ", "changed: ", "no counterpart: "):
        assert f"\n  {kind}" in err


def test_standard_input_and_json(run_convert: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (MANIFESTS / "job-one-pod.yaml").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, out, _ = run_convert("-f", "-", "-o", "json")
    assert code == 0
    assert json.loads(out)["spec"]["nprocPerNode"] == 4


@pytest.mark.parametrize(
    ("target", "name", "workers"),
    [
        ("pytorchjob/digits", "digits", 4),
        ("trainjobs.trainer.kubeflow.org/llama", "llama", 4),
        ("JobSet/gpt", "gpt", 4),
    ],
)
def test_a_job_of_the_cluster_becomes_a_training_job(run_convert: Run, target: str, name: str, workers: int) -> None:
    code, out, _ = run_convert(target)
    job = yaml.safe_load(out)
    assert (code, job["metadata"]["name"], job["spec"]["replicas"]) == (0, name, workers)


def test_a_runtime_that_no_file_has_comes_from_the_cluster(run_convert: Run, tmp_path: Path) -> None:
    _, trainjob = yaml.safe_load_all((MANIFESTS / "trainjob-overrides.yaml").read_text())
    code, out, _ = run_convert("-f", write_manifest(tmp_path, yaml.safe_dump(trainjob)))
    assert (code, yaml.safe_load(out)["spec"]["replicas"]) == (0, 2)
    log = [json.loads(line) for line in (tmp_path / "asked.json").read_text().splitlines()]
    assert [call for call in log if call[0] == "get"] == [
        ["get", "trainingruntimes.v1alpha1.trainer.kubeflow.org", "finetuning", "--namespace=nlp", "-o", "json"]
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [", "manifest.yaml: "),
        ("", "has no objects; give a manifest"),
        ("{apiVersion: v1, kind: Service, metadata: {name: s}}", "there is no job to convert, but Service s"),
        (
            "{apiVersion: kubeflow.org/v1, kind: TFJob, metadata: {name: t}}",
            "TFJob t: kind TFJob: Pacekeeper runs PyTorch",
        ),
        (
            "{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob, metadata: {name: t}, "
            "spec: {runtimeRef: {name: x}}}",
            "the ClusterTrainingRuntime x is in none of the files",
        ),
    ],
)
def test_what_cannot_be_converted_prints_no_job(run_convert: Run, tmp_path: Path, text: str, message: str) -> None:
    code, out, err = run_convert("-f", write_manifest(tmp_path, text))
    assert (code, out) == (2, "")
    assert message in err


def test_one_refusal_keeps_the_other_jobs_from_being_printed(run_convert: Run, tmp_path: Path) -> None:
    """Else a pipe to kubectl would apply half of the file."""
    text = "{apiVersion: kubeflow.org/v1, kind: TFJob, metadata: {name: t}}"
    code, out, err = run_convert("-f", str(MANIFESTS / "job-one-pod.yaml"), "-f", write_manifest(tmp_path, text))
    assert (code, out) == (2, "")
    assert err.startswith("kubectl pacekeeper: TFJob t: ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a file by -f, or KIND/NAME"),
        (["deployment/x"], 2, "KIND is one of pytorchjob, trainjob, jobset, job"),
        (["pytorchjob"], 2, "must be KIND/NAME"),
        (["pytorchjob/none"], 1, "not found"),
        (["-f", "/no/such/file.yaml"], 2, "/no/such/file.yaml"),
    ],
)
def test_wrong_arguments(run_convert: Run, arguments: list[str], code: int, message: str) -> None:
    found, out, err = run_convert(*arguments)
    assert (found, out) == (code, "")
    assert message in err


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_parses_manifests_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of the other tests does what the real one does."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    kubectl = Kubectl()
    path = MANIFESTS / "pytorchjob-host-network.yaml"
    bodies = kubectl.read_manifests(str(path))
    assert bodies == list(yaml.safe_load_all(path.read_text()))
    assert yaml.safe_load(kubectl.format_yaml(bodies[0])) == bodies[0]

"""Which container has the ranks, and which commands are taken over, translated, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods.manifests import find_template_refusal
from pacekeeper_operator.pods.trainer_container import (
    find_command_refusal,
    find_trainer_container,
    has_own_launcher,
    translate_python_command,
)
from testing.kubernetes.jobs import build_job_manifest

GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


def build_job(*containers: dict[str, Any], **spec: Any) -> TrainingJob:
    body = build_job_manifest("j", [], **spec)
    body["metadata"] |= {"namespace": "n", "uid": "u"}
    body["spec"]["template"]["spec"]["containers"] = list(containers)
    return TrainingJob.parse(body)


@pytest.mark.parametrize(
    ("containers", "spec", "found"),
    [
        ([{"name": "pytorch"}], {}, "pytorch"),
        ([{"name": "logger"}, {"name": "trainer"}], {}, "trainer"),
        ([{"name": "logger"}, {"name": "node", **GPUS}], {}, "node"),
        ([{"name": "trainer"}, {"name": "node", **GPUS}], {}, "trainer"),
        ([{"name": "trainer"}, {"name": "node"}], {"trainerContainer": "node"}, "node"),
        ([{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "0"}}}, {"name": "b", **GPUS}], {}, "b"),
        ([{"name": "a", "resources": {"limits": {"amd.com/gpu": 1}}}, {"name": "b"}], {}, "a"),
    ],
)
def test_the_container_with_the_ranks(containers: list[dict[str, Any]], spec: dict[str, Any], found: str) -> None:
    assert find_trainer_container(build_job(*containers, **spec))["name"] == found


@pytest.mark.parametrize(
    ("containers", "spec", "message"),
    [
        ([{"name": "a"}, {"name": "b"}], {}, r"spec.trainerContainer: is missing; name .* one of a, b"),
        ([{"name": "a", **GPUS}, {"name": "b", **GPUS}], {}, "spec.trainerContainer: is missing"),
        ([{"name": "a"}], {"trainerContainer": "b"}, "spec.trainerContainer: there is no container b; name one of a"),
        ([], {}, "spec.trainerContainer: is missing"),
    ],
)
def test_an_ambiguous_template_is_refused(containers: list[dict[str, Any]], spec: dict[str, Any], message: str) -> None:
    job = build_job(*containers, **spec)
    with pytest.raises(InputError, match=message):
        find_trainer_container(job)
    assert "spec.trainerContainer" in find_template_refusal(job)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["deepspeed", "train.py"], "deepspeed"),
        (["/usr/bin/mpirun", "-np", "4", "python", "train.py"], "mpirun"),
        (["bash", "-c", "set -e\ncd /work && FOO=1 exec srun python train.py"], "srun"),
        (["sh", "-c", "python prepare.py; horovodrun -np 2 python train.py"], "horovodrun"),
        (["torchrun", "train.py", "--launcher", "srun"], ""),
        (["python", "train.py", "mpirun"], ""),
        (["bash", "-c", "torchrun train.py --deepspeed config.json"], ""),
        (["bash", "-c", "echo 'it is not closed"], ""),
        (["bash", "train.sh"], ""),
        ([], ""),
    ],
)
def test_launchers_that_cannot_be_replaced_are_refused_with_a_remedy(command: list[str], program: str) -> None:
    refusal = find_command_refusal({"name": "trainer", "command": command})
    assert bool(refusal) == bool(program)
    if program:
        assert refusal.startswith(f"command: {program} cannot be replaced")
        job = build_job({"name": "trainer", "command": command})
        assert find_template_refusal(job) == f"spec.template.spec.containers: {refusal}"


@pytest.mark.parametrize(("command", "refused"), [("torchrun", True), ("pacekeeper", False)])
def test_a_python_path_that_cannot_be_extended_is_refused_where_it_has_to_be(command: str, refused: bool) -> None:
    source = {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "path"}}}
    refusal = find_template_refusal(build_job({"name": "trainer", "command": [command], "env": [source]}))
    assert ("env: PYTHONPATH is set by valueFrom" in refusal) == refused


@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ({"value": "python train.py"}, True),
        ({"value": ""}, True),
        ({}, True),
        ({"value": "src/train.py"}, False),
        ({"valueFrom": {"configMapKeyRef": {"name": "m", "key": "script"}}}, False),
    ],
)
def test_the_name_of_a_script_is_one_word(entry: dict[str, Any], refused: bool) -> None:
    env = [{"name": "PACEKEEPER_LAUNCH_SCRIPT", **entry}]
    refusal = find_template_refusal(build_job({"name": "trainer", "command": ["sh", "run.sh"], "env": env}))
    assert ("without arguments, like train.py" in refusal) == refused


@pytest.mark.parametrize(
    ("container", "arguments"),
    [
        ({"command": ["python", "train.py", "--lr", "1"]}, ["--python", "python", "train.py", "--lr", "1"]),
        ({"command": ["python3.10", "-u", "train.py"]}, ["--python", "python3.10", "train.py"]),
        ({"command": ["/opt/venv/bin/python"], "args": ["-m", "pkg.train", "-x"]},
         ["--python", "/opt/venv/bin/python", "-m", "pkg.train", "-x"]),
        ({"command": ["python", "-m", "torch.distributed.run", "t.py"]}, None),
        ({"command": ["python", "-m", "accelerate.commands.launch", "t.py"]}, None),
        ({"command": ["python", "/usr/bin/torchrun", "t.py"]}, None),
        ({"command": ["python", "-c", "train()"]}, None),
        ({"command": ["python", "-O", "-W", "ignore", "-um", "train"]},
         ["--python", "python", "--python-option=-O", "--python-option=-W", "--python-option=ignore", "-m", "train"]),
        ({"command": ["python", "-E", "train.py"]}, None),
        ({"command": ["python", "main.py"], "env": [{"name": "PACEKEEPER_LAUNCH_SCRIPT", "value": "t.py"}]}, None),
        ({"command": ["python"]}, None),
        ({"command": ["torchrun", "t.py"]}, None),
        ({"args": ["python", "train.py"]}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_script_that_python_runs_gets_the_launcher(container: dict[str, Any], arguments: list[str] | None) -> None:
    assert translate_python_command(container) == arguments


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (["pacekeeper", "run", "train.py"], True),
        (["python", "-m", "pacekeeper.cli", "run", "train.py"], True),
        (["sh", "-c", "sleep 1; exec /opt/venv/bin/pacekeeper run train.py"], True),
        (["python", "/home/pacekeeper/train.py"], False),
        (["torchrun", "train.py", "pacekeeper"], False),
    ],
)
def test_an_image_with_pacekeeper_is_recognized_by_its_command(command: list[str], own: bool) -> None:
    assert has_own_launcher({"command": command}) == own

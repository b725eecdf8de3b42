"""Which container of a worker's template has the ranks, and what runs in it. Pure."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pacekeeper_analysis.errors import InputError

from ..api.names import TRAINER_CONTAINER, Object
from ..api.training_job import TrainingJob
from .injection import find_python_path, is_gpu_resource

UNSUPPORTED_LAUNCHERS: Mapping[str, str] = {
    "deepspeed": "start the script with torchrun, which DeepSpeed supports, too",
    "mpirun": "start the script with torchrun: Pacekeeper starts one rank after the other itself",
    "mpiexec": "start the script with torchrun: Pacekeeper starts one rank after the other itself",
    "horovodrun": "Horovod has no process groups of PyTorch; use DistributedDataParallel and torchrun",
    "srun": "there is no Slurm in a pod; start the script with torchrun",
}
"""Programs that start ranks themselves and cannot be replaced, with the remedy."""
PYTHON_PROGRAM = re.compile(r"python[\d.]*")
_PYTHON_FLAGS = "-[bBdOPqRsuv]+"
_PYTHON_OPTION = re.compile(rf"{_PYTHON_FLAGS}|-[bBdOPqRsuv]*[WX](?P<value>.*)", re.DOTALL)
"""Options that can reach the ranks. With -E, -I, and -S, Python would not load the library for the ranks."""
_FLAGS_AND_MODULE_OPTION = re.compile(rf"({_PYTHON_FLAGS})m")
SCRIPT_VARIABLE = "PACEKEEPER_LAUNCH_SCRIPT"
"""The user sets it: which script the launcher starts instead of Python, in a shell that calls no torchrun.

Python's boot code in the container reads it (`pacekeeper_rank.watching.takeover`).
"""
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_OWN_LAUNCHER = "pacekeeper"
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
    }
)
"""Modules that start ranks. In an image without Pacekeeper, the payload replaces them."""


def find_trainer_container(job: TrainingJob) -> Object:
    """Return the container of the job's template that has the ranks. Raises InputError if the template is ambiguous.

    It is `spec.trainerContainer`; else the container `trainer`; else the only one with GPUs; else the only one.
    """
    try:
        containers: Sequence[Object] = job.spec.template["spec"]["containers"]
        name = job.spec.trainer_container or TRAINER_CONTAINER
        named = [container for container in containers if container["name"] == name]
        if named:
            return named[0]
        if not job.spec.trainer_container:
            with_gpus = [container for container in containers if has_gpus(container)]
            for candidates in (with_gpus, containers):
                if len(candidates) == 1:
                    return candidates[0]
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"spec.template: is not a pod template ({error!r})") from error
    names = ", ".join(str(container.get("name")) for container in containers)
    if job.spec.trainer_container:
        raise InputError(f"spec.trainerContainer: there is no container {name}; name one of {names}")
    raise InputError(f"spec.trainerContainer: is missing; name the container with the ranks, one of {names}")


def has_gpus(container: Object) -> bool:
    """Return whether the container asks for accelerators of any kind."""
    limits: Mapping[str, Any] = (container.get("resources") or {}).get("limits") or {}
    return any(is_gpu_resource(name) and str(quantity) != "0" for name, quantity in limits.items())


def has_own_launcher(container: Object) -> bool:
    """Return whether the container's command is `pacekeeper run`, so that its image has Pacekeeper."""
    words = _list_words(container)
    return any(os.path.basename(word) == _OWN_LAUNCHER or word.startswith("pacekeeper.") for word in words)


def find_command_refusal(container: Object) -> str:
    """Return why Pacekeeper cannot start the ranks of the container's command, with the remedy; "": it can."""
    for word in _list_words(container):
        program = os.path.basename(word)
        if program in UNSUPPORTED_LAUNCHERS:
            return f"command: {program} cannot be replaced by Pacekeeper's launcher: {UNSUPPORTED_LAUNCHERS[program]}"
    path = find_python_path(container)
    if path is not None and "valueFrom" in path[1] and not has_own_launcher(container):
        return "env: PYTHONPATH is set by valueFrom, so that nothing can be put in front of it; write its value"
    variable = find_variable(container, SCRIPT_VARIABLE)
    if variable is not None and "valueFrom" not in variable and len(str(variable.get("value") or "").split()) != 1:
        return (
            f"env: {SCRIPT_VARIABLE} must be the path or name of the script that trains, or the name of its module, "
            "without arguments, like train.py"
        )
    return ""


def translate_python_command(container: Object) -> list[str] | None:
    """Return the arguments of `pacekeeper run` for a command that runs a script by Python; None: it is another command.

    `python train.py` has no launcher that could be replaced. If the user has named a script, the process of that script
    is replaced, which this one may start.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not container.get("command") or not PYTHON_PROGRAM.fullmatch(os.path.basename(words[0])):
        return None
    if find_variable(container, SCRIPT_VARIABLE) is not None:
        return None
    interpreter = words[0]
    options, rest = split_python_options(words[1:])
    is_module = rest[:1] == ["-m"]
    target = rest[1 if is_module else 0 :][:1]
    if not target or target[0].startswith("-") or target[0] in _LAUNCHER_MODULES:
        return None
    if not is_module and os.path.basename(target[0]) in {"torchrun", "accelerate"}:
        return None
    # The output of ranks is unbuffered in any case.
    return ["--python", interpreter, *(f"--python-option={option}" for option in options if option != "-u"), *rest]


def split_python_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Python's options that can reach the ranks, and the words after them.

    These are a script or `-m` and a module, with the arguments, or else begin with another option.
    """
    options, rest = list[str](), list(words)
    while rest and (match := _PYTHON_OPTION.fullmatch(rest[0])):
        count = 2 if match["value"] == "" else 1
        options += rest[:count]
        del rest[:count]
    if rest and (match := _FLAGS_AND_MODULE_OPTION.fullmatch(rest[0])):  # as -um
        options.append(match[1])
        rest[0] = "-m"
    return options, rest


def find_variable(container: Object, name: str) -> Object | None:
    """Return the container's variable of this name; None: it sets none."""
    return next((variable for variable in container.get("env") or () if variable.get("name") == name), None)


def _list_words(container: Object) -> Iterator[str]:
    """Yield the words of the command, and those of a shell's script in it, without the arguments of the user's script.

    Only the first words of each command count: a script may have an option `--launcher srun`.
    """
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    if not words:
        return
    yield words[0]
    if PYTHON_PROGRAM.fullmatch(os.path.basename(words[0])) and words[1:2] == ["-m"]:
        yield from words[2:3]
    if os.path.basename(words[0]) not in SHELLS:
        return
    for script in (word for word in words[1:] if not word.startswith("-")):
        for command in re.split(r"&&|\|\||[;\n|]", script):
            yield from _list_first_words(command)


def _list_first_words(command: str) -> Iterator[str]:
    """Yield a command's program, after assignments of variables and `exec`, and the module that Python runs."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a quotation that goes on in the next line
        words = command.split()
    while words and (words[0] in {"exec", "env", "time", "nohup"} or re.match(r"\w+=", words[0])):
        del words[0]
    yield from words[:1]
    if words and PYTHON_PROGRAM.fullmatch(os.path.basename(words[0])) and "-m" in words[1:]:
        yield from words[words.index("-m") + 1 :][:1]

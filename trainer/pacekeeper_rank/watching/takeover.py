"""Pacekeeper's launcher in torchrun's place, in a worker's pod whose image has no Pacekeeper.

torchrun, `python -m torch.distributed.run`, and `python -m torch.distributed.launch` are recognized by the command
line, before they import torch. Programs such as accelerate call torchrun's `run` function, and are replaced there.
PACEKEEPER_LAUNCH_SCRIPT names a script that a shell starts without torchrun, as `python train.py`.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Callable, Sequence  # loaded already, unlike collections.abc
from types import ModuleType
from typing import Any, NoReturn

from .import_hook import ImportHook

PAYLOAD_VARIABLE = "PACEKEEPER_PAYLOAD"
"""The operator sets it in a worker's pod: the folder of the payload."""
RANK_VARIABLE = "PACEKEEPER_ROUND"
"""Each rank has it. What a rank starts is not taken over."""
LAUNCH_SCRIPT_VARIABLE = "PACEKEEPER_LAUNCH_SCRIPT"
"""The user sets it: path or file name of a script, or a module, of which Python is replaced as torchrun is."""
RUNTIME_VARIABLE = "PACEKEEPER_RUNTIME"
TAKEN_OVER_FILE = "script_taken_over"
"""In the runtime folder, once a process of the script has been replaced. The folder is new in each pod."""
LAUNCHER = os.path.join("runtime", "bin", "pacekeeper")
RUN_MODULE, LAUNCH_MODULE = "torch.distributed.run", "torch.distributed.launch"
TORCHRUN_PROGRAM = "torchrun"
LOCAL_RANK_OPTION = "--pass-local-rank"
"""Option of the launcher: scripts get `--local-rank`, as from torch.distributed.launch."""
_ENVIRONMENT_OPTIONS = ("--use-env", "--use_env")
"""With this option, torch.distributed.launch passes no `--local-rank`."""
_VALUE_LETTERS = ("c", "m", "W", "X")
"""Options of Python with a value: the rest of the word, or the next argument."""
_LONG_OPTION_WITH_VALUE = "--check-hash-based-pycs"


def prepare_takeover() -> None:
    """Become the launcher if this process is torchrun, or the script that the user has named.

    Otherwise, do so if it calls torchrun's `run` function.
    """
    payload = os.environ.get(PAYLOAD_VARIABLE)
    if not payload or RANK_VARIABLE in os.environ:
        return
    command = read_command_line()
    arguments = find_torchrun_arguments(command)
    if arguments is not None:
        become_launcher(payload, arguments)
    script = os.environ.get(LAUNCH_SCRIPT_VARIABLE)
    found = find_script_arguments(command, script) if script else None
    if found is not None and _claim_takeover(os.environ.get(RUNTIME_VARIABLE, "")):
        become_launcher(payload, *found)

    def replace_run(_: str, module: object) -> None:
        module.run = build_replacement(module, payload)  # type: ignore[attr-defined]  # torchrun has this function

    sys.meta_path.insert(0, ImportHook({RUN_MODULE: replace_run}))  # type: ignore[arg-type]  # no base class


def read_command_line() -> list[str]:
    """Return the arguments of this process, the interpreter first. `sys.orig_argv` needs Python 3.10."""
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(argument) for argument in file.read().split(b"\0")[:-1]]


def find_torchrun_arguments(command: Sequence[str]) -> list[str] | None:
    """Return what to pass to `pacekeeper run` instead of this command of Python; None: it is not torchrun."""
    _, rest = split_python_arguments(command[1:])
    if rest[:1] == ["-m"]:
        return _find_module_arguments(rest[1:])
    is_torchrun = bool(rest) and os.path.basename(rest[0]) == TORCHRUN_PROGRAM
    return rest[1:] if is_torchrun else None


def find_script_arguments(command: Sequence[str], name: str) -> tuple[list[str], list[str]] | None:
    """Return the script with its arguments, and Python's options, if this command of Python runs the script `name`.

    `name`: the script's path as written, its file name, or a module's name. None: the command runs something else.
    """
    options, rest = split_python_arguments(command[1:])
    is_module = rest[:1] == ["-m"]
    target = rest[1:2] if is_module else rest[:1]
    names = target if is_module else [*target, *map(os.path.basename, target)]
    return (rest, options) if name in names else None


def split_python_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Python's own options, and the words after them: a script or `-m` and a module, with the arguments.

    The second list is empty for code of `-c` or from standard input.
    """
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-":
            return options, []
        if option.startswith("--"):
            options.append(option)
            count = 1 if option == _LONG_OPTION_WITH_VALUE else 0
        else:
            flags, letter, value = _split_at_value(option)
            if letter in ("c", "m"):
                options += [flags] if flags != "-" else []
                return options, ["-m", *([value] if value else []), *rest] if letter == "m" else []
            options.append(option)
            count = 1 if letter and not value else 0
        options += rest[:count]
        del rest[:count]
    return options, rest


def _split_at_value(option: str) -> tuple[str, str, str]:
    """Split an option such as `-uWignore` into `-u`, `W`, and `ignore`. Without a value, the latter are empty."""
    for i, letter in enumerate(option):
        if letter in _VALUE_LETTERS:
            return option[:i], letter, option[i + 1 :]
    return option, "", ""


def _find_module_arguments(rest: Sequence[str]) -> list[str] | None:
    """`rest`: the module's name and its arguments."""
    module, arguments = (rest[0], list(rest[1:])) if rest else ("", [])
    if module == LAUNCH_MODULE:
        return _translate_launch(arguments)
    return arguments if module == RUN_MODULE else None


def _translate_launch(arguments: Sequence[str]) -> list[str]:
    """Translate the options of torch.distributed.launch, which come before the script."""
    if any(argument in _ENVIRONMENT_OPTIONS for argument in arguments):
        return [argument for argument in arguments if argument not in _ENVIRONMENT_OPTIONS]
    return [LOCAL_RANK_OPTION, *arguments]


def _claim_takeover(runtime: str) -> bool:
    """Return whether this is the first process of the script in this container. `runtime`: the runtime folder.

    The shell may run the script again, whose process then runs as it is: a second launcher would disturb the first.
    """
    if not runtime:
        return False
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        os.close(os.open(os.path.join(runtime, TAKEN_OVER_FILE), flags, 0o644))
    except OSError as error:
        reason = "the launcher has replaced an earlier one" if isinstance(error, FileExistsError) else str(error)
        sys.stderr.write(f"pacekeeper: this process of {LAUNCH_SCRIPT_VARIABLE} runs as it is: {reason}\n")
        return False
    return True


def become_launcher(payload: str, arguments: Sequence[str], options: Sequence[str] = ()) -> NoReturn:
    """Replace this process by Pacekeeper's launcher: that of the image if it has the same version, else the payload's.

    `options`: Python's, for the ranks. Their output is unbuffered in any case.

    Raises OSError.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    has_own = _has_own_launcher(payload)
    python_options = [f"--python-option={option}" for option in options if option != "-u"]
    interpreter = ["--python", sys.executable, *python_options] if python_options or not has_own else []
    program = [sys.executable, "-m", "pacekeeper.cli"] if has_own else [os.path.join(payload, LAUNCHER)]
    command = [*program, "run", *interpreter, *arguments]
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(
            f"pacekeeper: the launcher cannot be executed, so that the command runs as it is: {command[0]}: {error}\n"
        )
        raise


def _has_own_launcher(payload: str) -> bool:
    """Return whether the image has a Pacekeeper that works with this operator: one of the same minor version."""
    from importlib import metadata, util

    if util.find_spec("pacekeeper") is None:
        return False
    try:
        installed = metadata.version("pacekeeper")
        with open(os.path.join(payload, "version"), encoding="utf-8") as file:
            expected = file.read().strip()
    except (OSError, metadata.PackageNotFoundError):
        return False
    return installed.split(".")[:2] == expected.split(".")[:2]


def build_replacement(module: Any, payload: str) -> Callable[[Any], object]:
    """Return the function that replaces `torch.distributed.run.run`. `module`: torch.distributed.run."""
    original = module.run

    def run(args: Any) -> object:
        if RANK_VARIABLE in os.environ:
            return original(args)
        become_launcher(payload, format_arguments(module, args))

    return run


def format_arguments(module: ModuleType | Any, args: Any) -> list[str]:
    """Return the command line of torchrun that its parser would parse to `args`.

    An option whose value is its default is left out. A value may come from a variable of torchrun: it is one, too.
    """
    options: list[str] = []
    positional = ("training_script", "training_script_args")
    for action in module.get_args_parser()._actions:
        value = getattr(args, action.dest, None)
        if action.dest in (*positional, "help") or not action.option_strings or value in (None, action.default):
            continue
        name = action.option_strings[-1]
        if action.nargs == 0:
            options += [name] if value else []
        else:
            options += [f"{name}={value}"]
    return [*options, args.training_script, *args.training_script_args]

"""What a container's command starts: torchrun, accelerate, Python, or a launcher that cannot be converted."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..api.names import Object
from ..pods.trainer_container import (
    PYTHON_PROGRAM,
    SCRIPT_VARIABLE,
    SHELLS,
    UNSUPPORTED_LAUNCHERS,
    find_variable,
    split_python_options,
    translate_python_command,
)
from .python_commands import HELPER_MODULES, PATH_REFUSAL, PythonCommand, choose_script

_SHELL_SCRIPT_OPTION = re.compile(r"-[a-z]*c")
_SCRIPT_SEPARATORS = frozenset({";", "&&", "||", "|", "&", "(", ")"})
_BRANCH_WORDS = frozenset({"||", "then", "else", "do", "case"})
"""Words of a script by which one of two commands may be the only one that runs."""
_SECOND_LAUNCH = (
    "it starts training twice, and the ranks of a TrainingJob start once: make a TrainingJob of each, or call both "
    "from one script"
)
_COMMAND_PREFIXES = frozenset({"{", "then", "do", "else", "!", "exec", "time", "nohup", "env", "sudo", "command"})
"""Words that may come before a program."""
_NO_WRAPPERS = frozenset(
    {"pip", "pip3", "apt", "apt-get", "apk", "yum", "dnf", "echo", "printf", "which", "cp", "ln", "mkdir", "test", "["}
)
"""Programs whose arguments are not started, but may have the names of programs."""
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|\((\w+)\)|(\w+))")
_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE_MODULE, _ACCELERATE_CLI = "accelerate.commands.launch", "accelerate.commands.accelerate_cli"
_REFUSED_PROGRAMS: Mapping[str, str] = {
    **UNSUPPORTED_LAUNCHERS,
    "tune": "start the recipe with torchrun: torchrun --nproc-per-node N recipe.py --config …",
    "colossalai": "start the script with torchrun",
}
_REFUSED_MODULES: Mapping[str, str] = {
    "deepspeed.launcher.launch": UNSUPPORTED_LAUNCHERS["deepspeed"],
    "deepspeed.launcher.runner": UNSUPPORTED_LAUNCHERS["deepspeed"],
    "horovod.runner": UNSUPPORTED_LAUNCHERS["horovodrun"],
}
_TOPOLOGY_OPTION = re.compile(
    r"--(?:nnodes|node[-_]rank|master[-_](?:addr|port)|rdzv[-_]\w+|machine[-_]rank|main[-_]process[-_]\w+)"
)


class LaunchKind(StrEnum):
    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate launch"
    PYTHON = "python"  # a script; Pacekeeper's launcher starts it, also behind a shell
    UNKNOWN = "unknown"  # the image's own command, or a file in the image


@dataclass(frozen=True)
class Command:
    """What a command starts. `refusal`: why it cannot be converted, with the remedy; "": it can be."""

    launcher: LaunchKind
    options: Mapping[str, str] = field(default_factory=dict)  # of the launcher, like nproc_per_node; values as written
    variables: Mapping[str, str] = field(default_factory=dict)  # literal ones: the container's, and those of the script
    refusal: str = ""
    script: str = ""  # what the variable PACEKEEPER_LAUNCH_SCRIPT has to name; "": it is not needed, or set already

    def resolve(self, text: str) -> str | None:
        """Return a text with the values of its variables; None: one has no literal value."""
        missing = False

        def replace(match: re.Match[str]) -> str:
            nonlocal missing
            value = self.variables.get(match[1] or match[3] or match[4], match[2])
            missing = missing or value is None
            return value or ""

        resolved = _VARIABLE.sub(replace, text)
        return None if missing or "$" in resolved else resolved


def read_command(container: Object) -> Command:
    """Return what the container's command starts."""
    words = list(_split_command([*(container.get("command") or ()), *(container.get("args") or ())]))
    variables = {
        str(variable["name"]): str(variable["value"])
        for variable in (container.get("env") or ())
        if isinstance(variable.get("value"), str)
    }
    variables |= {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}
    python_commands: list[PythonCommand] = []
    hides_launcher = False
    launch: Command | None = None
    for words_of_command, repeats in _split_commands(words):
        kind, rest, refusal = _read_program(words_of_command)
        if launch is not None:
            is_second = kind in (LaunchKind.TORCHRUN, LaunchKind.ACCELERATE) and not _BRANCH_WORDS & set(words)
            launch = replace(launch, refusal=launch.refusal or _SECOND_LAUNCH) if is_second else launch
            continue
        hides = hides_launcher or _replaces_python_path(words_of_command)
        hides_launcher = hides_launcher or (hides and _changes_environment(words_of_command))
        if refusal:
            return Command(kind, refusal=refusal)
        if kind in (LaunchKind.TORCHRUN, LaunchKind.ACCELERATE):
            launch = Command(kind, _read_options(rest), variables, PATH_REFUSAL if hides else "")
        elif kind is LaunchKind.PYTHON:
            python_commands.append(PythonCommand(rest, repeats, hides))
    if launch is not None:
        return launch
    is_named = find_variable(container, SCRIPT_VARIABLE) is not None
    if not python_commands and not is_named:
        return Command(LaunchKind.UNKNOWN, {}, variables)
    found = Command(LaunchKind.PYTHON, {}, variables)
    if is_named:
        return replace(found, refusal=PATH_REFUSAL if hides_launcher else "")
    if translate_python_command(container) is not None:
        return found
    script, refusal = choose_script(python_commands, variables, found.resolve)
    return replace(found, script=script, refusal=refusal)


def _split_commands(words: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield the commands of a script: the words up to each `;`, `&&`, or the like.

    The second value is whether the command may run more than once, or at the same time as what follows.
    """
    command: list[str] = []
    loops = 0
    for word in (*words, ";"):
        if word not in _SCRIPT_SEPARATORS:
            command.append(word)
            continue
        keyword = command[0] if command else ""
        loops += (keyword == "do") - (keyword == "done")
        yield command, loops > 0 or keyword in ("while", "until") or word == "&"
        command = []


def _replaces_python_path(command: Sequence[str]) -> bool:
    """Return whether a command sets PYTHONPATH, for itself or for all that follow, and drops the old value."""
    for word in command:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None and word not in _COMMAND_PREFIXES | {"export"}:
            return False
        if match is not None and match[1] == "PYTHONPATH":
            return "PYTHONPATH" not in match[2]
    return False


def _changes_environment(command: Sequence[str]) -> bool:
    """Return whether a command of a shell sets variables, and starts no program."""
    return all(word == "export" or word in _COMMAND_PREFIXES or _ASSIGNMENT.fullmatch(word) for word in command)


def _read_program(command: Sequence[str]) -> tuple[LaunchKind, Sequence[str], str]:
    """Return what one command starts, the words after it, and why it cannot be converted ("": it can be)."""
    words = list(command)
    while words and (words[0] in _COMMAND_PREFIXES or _ASSIGNMENT.fullmatch(words[0])):
        del words[0]
    if not words or posixpath.basename(words[0]) in _NO_WRAPPERS:
        return LaunchKind.UNKNOWN, (), ""
    program = posixpath.basename(words[0])
    if program in _REFUSED_PROGRAMS:
        return LaunchKind.UNKNOWN, (), f"{program} cannot be converted: {_REFUSED_PROGRAMS[program]}"
    for i, word in enumerate(words):  # a program like numactl may come first
        program, rest = posixpath.basename(word), words[i + 1 :]
        if PYTHON_PROGRAM.fullmatch(program):
            return _read_python(rest)
        if program == "torchrun":
            return LaunchKind.TORCHRUN, rest, ""
        if program == "accelerate" and rest[:1] == ["launch"]:
            return LaunchKind.ACCELERATE, rest[1:], ""
    return LaunchKind.UNKNOWN, (), ""


def _read_python(words: Sequence[str]) -> tuple[LaunchKind, Sequence[str], str]:
    """Return what Python starts with these arguments, as `_read_program` does.

    The words of a script, or of `-m` and a module, begin with that. Code that is in no file has none.
    """
    _, rest = split_python_options(words)
    is_module = rest[:1] == ["-m"]
    target, arguments = (rest[1:2], rest[2:]) if is_module else (rest[:1], rest[1:])
    name = target[0] if target else ""
    if is_module and name in HELPER_MODULES:
        return LaunchKind.UNKNOWN, (), ""
    if is_module and name in _REFUSED_MODULES:
        return LaunchKind.UNKNOWN, (), f"{name} cannot be converted: {_REFUSED_MODULES[name]}"
    if name in _TORCHRUN_MODULES if is_module else posixpath.basename(name) == "torchrun":
        return LaunchKind.TORCHRUN, arguments, ""
    if is_module and name == _ACCELERATE_MODULE:
        return LaunchKind.ACCELERATE, arguments, ""
    if arguments[:1] == ["launch"] and (name == _ACCELERATE_CLI if is_module else name.endswith("/accelerate")):
        return LaunchKind.ACCELERATE, arguments[1:], ""
    return LaunchKind.PYTHON, rest if name and not name.startswith("-") else (), ""


def find_variables(container: Object) -> frozenset[str]:
    """Return the names of the variables that command, arguments, and environment refer to, like $RANK or $(RANK)."""
    texts = [*(container.get("command") or ()), *(container.get("args") or ())]
    texts += [variable["value"] for variable in (container.get("env") or ()) if isinstance(variable.get("value"), str)]
    return frozenset(name for text in texts for match in re.finditer(r"\$[{(]?(\w+)", str(text)) if (name := match[1]))


def drop_topology_options(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the options that say where a pod is in the job.

    Two pods of one job have the same command but for these. Quotes and blank space are not kept.
    """
    kept: list[str] = []
    skip_value = False
    for word in _split_command(words):
        if skip_value and not word.startswith("-"):
            skip_value = False
            continue
        skip_value = False
        if match := _TOPOLOGY_OPTION.match(word):
            skip_value = match.end() == len(word)
            continue
        kept.append(word)
    return kept


def _split_command(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command. The script of `bash -c` is split as well."""
    words = list(map(str, words))
    shell = next((i for i, word in enumerate(words) if posixpath.basename(word) in SHELLS), None)
    option = None if shell is None else _find_script_option(words, shell + 1)
    if shell is None or option is None:
        yield from words
        return
    yield from words[:shell]
    yield ";"  # what stands before the shell, like `tini --`, is no part of its script
    yield from _split_script(words[option + 1])


def _find_script_option(words: Sequence[str], start: int) -> int | None:
    """Return where the option -c of a shell is, before its script; None: the shell reads a file."""
    i = start
    while i + 1 < len(words) and words[i].startswith(("-", "+")):
        if _SHELL_SCRIPT_OPTION.fullmatch(words[i]):
            return i
        i += 2 if words[i].endswith("o") else 1  # -o pipefail
    return None


def _split_script(script: str) -> list[str]:
    text = _COMMENT.sub("", script.replace("\\\n", " ")).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # a quote that does not end; the shell reports it
        return text.split()


def _read_options(words: Sequence[str]) -> Mapping[str, str]:
    """Return the launcher's options up to the end of its command, by name with underscores. A flag has the value ""."""
    options: dict[str, str] = {}
    for i, word in enumerate(words):
        if word in _SCRIPT_SEPARATORS:
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else ""
            if not equals and not following.startswith("-") and following not in _SCRIPT_SEPARATORS:
                value = following
            options.setdefault(name.replace("-", "_"), value)
    return options

"""Which script of a shell the launcher starts: PACEKEEPER_LAUNCH_SCRIPT names it, if the command shows it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..pods.trainer_container import SCRIPT_VARIABLE

HELPER_MODULES = frozenset({"pip", "venv", "ensurepip", "compileall", "torch.utils.collect_env"})
"""Modules that never train."""
_LITERAL_NAME = re.compile(r"[\w.+@%=,/-]*[\w+@%=,-]")
"""What a shell passes on as it is written."""
_RANK_VARIABLES = frozenset(
    {
        *("RANK", "NODE_RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "MASTER_ADDR", "MASTER_PORT"),
        *("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"),
    }
)
"""Variables whose values differ between shell and ranks. The number of workers is the same in both."""
_REFERENCE = re.compile(r"\$[{(]?(\w+)")
_REMEDY = (
    f"set the variable {SCRIPT_VARIABLE} of the container to the name of the script that trains, like train.py, or "
    "write torchrun --nproc-per-node=1 instead of python there"
)
PATH_REFUSAL = (
    "the shell drops the old value of PYTHONPATH, by which Pacekeeper's launcher comes into the container: keep it, as "
    "in PYTHONPATH=/app:$PYTHONPATH"
)


@dataclass(frozen=True)
class PythonCommand:
    """A command of a shell, or of a container, that starts Python."""

    words: Sequence[str]
    """The script, or -m and the module, with the arguments. Empty for code in no file, and for options such as -I."""
    repeats: bool = False
    """Whether it is in a loop or in the background."""
    hides_launcher: bool = False
    """Whether the shell has dropped the old value of PYTHONPATH."""


def choose_script(
    commands: Sequence[PythonCommand], variables: dict[str, str], resolve: Callable[[str], str | None]
) -> tuple[str, str]:
    """Return the value of PACEKEEPER_LAUNCH_SCRIPT, and why there is none, with the remedy ("": there is one).

    `variables`: the literal ones of the container and its shell. `resolve`: returns a text with their values; None: one
    has no literal value.
    """
    named = [command for command in commands if command.words]
    names = [command.words[1] if command.words[0] == "-m" else command.words[0] for command in named]
    if not named:
        reason = "Python runs code that is in no file, or has options like -E, -I, or -S, which hide variables from it"
    elif len(named) > 1:
        reason = f"Python runs more than once ({', '.join(names)}), and the launcher replaces one process"
    elif named[0].hides_launcher:
        return "", PATH_REFUSAL
    elif named[0].repeats:
        reason = f"{names[0]} runs in a loop or in the background, and the launcher replaces one process"
    elif used := sorted(_find_references(named[0].words, variables) & _RANK_VARIABLES):
        reason = (
            f"the arguments of {names[0]} have ${used[0]}, whose value in the shell is not that of a rank; let the "
            "script read its environment"
        )
    else:
        candidates = [names[0]]
        if named[0].words[0] != "-m":
            candidates += [posixpath.basename(names[0]), posixpath.basename(resolve(names[0]) or "")]
        literal = [name for name in candidates if _LITERAL_NAME.fullmatch(name)]
        if literal:
            return literal[0], ""
        reason = f"the script's name is not written in {names[0]}"
    return "", f"{reason}: {_REMEDY}"


def _find_references(words: Sequence[str], variables: dict[str, str]) -> set[str]:
    """Return the variables that words refer to, and those that these refer to."""
    names = set(_REFERENCE.findall(" ".join(words)))
    return names | {other for name in names for other in _REFERENCE.findall(variables.get(name, ""))}

"""The command `pacekeeper`: each subcommand is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from pacekeeper.launcher.processes import open_standard_files
from pacekeeper.launcher.shim import preload_shim
from pacekeeper_analysis.errors import InputError

COMMANDS = {
    "run": ("pacekeeper.launcher.command", "run a training script's ranks, in a worker's pod or on this machine"),
    "fabric": ("pacekeeper_analysis.fabric.command", "show what the network's links carry by plan, and which are dead"),
    "behaviour": ("pacekeeper_analysis.behaviour.command", "show which function makes a job slow, from a kept window"),
    "whatif": ("pacekeeper_analysis.whatif.command", "compute from a trace what each straggler costs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_format_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"pacekeeper: no command {name!r}\n{_format_usage()}", file=sys.stderr)
        return 2
    if name == "run" and argv is None:
        open_standard_files()
        preload_shim()  # starts this process again, before it has imported what takes long
    command: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[name][0]).main
    try:
        return command(rest)
    except InputError as error:
        print(f"pacekeeper {name}: {error}", file=sys.stderr)
        return 2


def _format_usage() -> str:
    lines = [f"  {name:9} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: pacekeeper COMMAND …; pacekeeper COMMAND --help tells more", *lines])


if __name__ == "__main__":
    sys.exit(main())

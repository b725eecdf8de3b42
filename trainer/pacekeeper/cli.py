"""The `pacekeeper` command. A subcommand is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from pacekeeper.launcher.network.path_shim import preload_shim
from pacekeeper.launcher.ranks.processes import open_standard_files
from pacekeeper_analysis.errors import InputError

COMMANDS = {
    "run": ("pacekeeper.launcher.command", "run a training script's ranks, in a worker's pod or on this machine"),
    "watch": ("pacekeeper.watch.command", "run a command, and show which of its PyTorch ranks are slow, hang, or fail"),
    "fabric": ("pacekeeper_analysis.fabric.command", "show the planned load of the network's links, and dead links"),
    "profile": (
        "pacekeeper_analysis.profiling.command",
        "show which function slows a job down, from a saved profile",
    ),
    "whatif": ("pacekeeper_analysis.whatif.command", "compute from a trace what each straggler costs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
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
        preload_shim()  # restarts this process, before slow imports
    command: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[name][0]).main
    try:
        return command(rest)
    except InputError as error:
        print(f"pacekeeper {name}: {error}", file=sys.stderr)
        return 2


def _format_usage() -> str:
    lines = [f"  {name:9} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: pacekeeper COMMAND …; see pacekeeper COMMAND --help", *lines])


if __name__ == "__main__":
    sys.exit(main())

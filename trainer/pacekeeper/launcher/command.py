"""`pacekeeper run`: its arguments, and what happens before the launcher's loop begins."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from pacekeeper.runtime import Runtime
from pacekeeper_analysis.errors import InputError

from .heartbeat import HeartbeatFile
from .launcher import Launcher, Script
from .processes import adopt_orphans
from .settings import Settings
from .warm import preimport, start_warm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", help="the training script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Runs the launcher; its exit code is the worker's."""
    script = Script(arguments.script, arguments.module, tuple(arguments.arguments))
    if not script.is_module and not os.path.isfile(script.name):
        raise InputError(f"{script.name}: no such file; give the training script's path, or -m and a module's name")
    settings = Settings.from_environment(os.environ)
    runtime = Runtime.from_environment().make()
    return launch(script, settings, runtime)


def launch(script: Script, settings: Settings, runtime: Runtime) -> int:
    """Imports torch, forks the warm process, and follows the plan until the end; the exit code."""
    logging.basicConfig(level=logging.INFO, format="pacekeeper %(asctime)s %(levelname)s %(message)s")
    heartbeat = HeartbeatFile(runtime.heartbeat, settings.worker)  # says that the launcher is starting
    adopt_orphans()
    preimport()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is still in there would come out of every rank again
    warm = start_warm()
    return asyncio.run(Launcher(script, settings, runtime, warm, heartbeat).run())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pacekeeper run", description="Runs a training script's ranks.")
    add_arguments(parser)
    return run(parser.parse_args(argv))

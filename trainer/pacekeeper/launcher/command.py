"""`pacekeeper run`: its arguments, and what happens before the launcher's loop begins."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from pacekeeper.runtime import Runtime
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import MODES, SyncMode

from . import processes, torchrun
from .heartbeat import HeartbeatFile, SignOfLife
from .imports import ALWAYS, needs_of
from .launcher import Launcher, Script
from .local import LocalController, local_runtime, local_settings
from .rounds import exit_code_of
from .settings import LauncherSettings
from .warm import Warm, log_as_launcher, preimport, start_warm

log = logging.getLogger(__name__)

AUTO = "Auto"
DESCRIPTION = """Runs a training script's ranks and starts them again in place when one fails. In a worker's pod it
follows the operator's plan; with --local it needs no cluster and decides by itself. Takes torchrun's arguments, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = parse(argv)
    script = Script(arguments.script, arguments.module, tuple(arguments.arguments))
    if not script.is_module and not os.path.isfile(script.name):
        raise InputError(f"{script.name}: no such file; give the training script's path, or -m and a module's name")
    ranks = torchrun.local_ranks(arguments, os.environ)
    if words := torchrun.passed_over(arguments, local=ranks is not None):
        print(f"pacekeeper run: {words}", file=sys.stderr)
    if ranks is None:
        settings = LauncherSettings.from_environment(os.environ)
        return launch(script, settings, Runtime.from_environment().make())
    mode = None if arguments.sync_mode == AUTO else SyncMode(arguments.sync_mode)
    return launch_locally(script, ranks, arguments.max_restarts, mode)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pacekeeper run", description=DESCRIPTION)
    parser.add_argument(
        "--local", type=_at_least_one, metavar="N", help="run N ranks on this machine, without a cluster"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=_not_negative,
        default=10,
        metavar="K",
        help="with --local: rounds after the first (default 10); the plan has its own (spec.remediation.maxRestarts)",
    )
    parser.add_argument(
        "--sync-mode",
        choices=[AUTO, *MODES],
        default=AUTO,
        help="with --local: how to train, as spec.syncMode of a TrainingJob (default Auto: Sync, until another wins)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    torchrun.add_options(parser)
    parser.add_argument("script", help="the training script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser.parse_args(argv)


def launch(script: Script, settings: LauncherSettings, runtime: Runtime) -> int:
    """Imports torch, forks the warm process, and follows the plan until the end; the exit code."""
    sign = SignOfLife(runtime.alive)
    heartbeat, warm = _prepare(settings, runtime, script)
    return asyncio.run(Launcher(script, settings, runtime, warm, heartbeat, sign).run())


def launch_locally(script: Script, ranks: int, restarts: int, mode: SyncMode | None = None) -> int:
    """The same on this machine, with a controller in place of operator and sidecar; the exit code.

    mode: to train in; None: the controller decides.
    """
    with local_runtime() as runtime:
        settings = local_settings(dict(os.environ))
        sign = SignOfLife(runtime.alive)
        heartbeat, warm = _prepare(settings, runtime, script)

        async def run() -> int:
            launcher = Launcher(script, settings, runtime, warm, heartbeat, sign)
            controller = LocalController(runtime, ranks, restarts, launcher.give_up, mode)
            controlling = asyncio.create_task(controller.run())
            code = await launcher.run()
            controlling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controlling
            return code

        return asyncio.run(run())


def _prepare(settings: LauncherSettings, runtime: Runtime, script: Script) -> tuple[HeartbeatFile, Warm]:
    log_as_launcher()
    heartbeat = HeartbeatFile(runtime.heartbeat, settings.worker)  # says that the launcher is starting
    for signum in processes.TERMINATING - processes.ignored_at_start():
        # Process 1 would ignore it, another leave its folder behind; the launcher's loop has its own handler.
        signal.signal(signum, _leave_early)
    processes.adopt_orphans()
    needs = needs_of(script.name, script.is_module, [os.getcwd(), *sys.path])
    if needs.sets:
        log.warning(
            "the script sets %s, which torch reads when it is imported: each rank imports torch itself, and starts "
            "some seconds later for it. Set such variables in the environment of `pacekeeper run` instead",
            ", ".join(needs.sets),
        )
    preimport(needs.first)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is still in there would come out of every rank again
    warm = start_warm(needs)
    if needs.sets:
        preimport(ALWAYS)  # for the store where ranks meet
    return heartbeat, warm


def _leave_early(signum: int, _: object) -> None:
    raise SystemExit(exit_code_of(signum))


def _at_least_one(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give the number of ranks, at least 1")
    return number


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of rounds, 0 or more")
    return int(text)

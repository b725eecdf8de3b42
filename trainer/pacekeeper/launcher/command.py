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
from dataclasses import replace

from pacekeeper.runtime import Runtime
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import MODES, SyncMode

from . import processes, torchrun
from .end_signals import default_signals, handled_signals, parse_signals, publish_signals
from .heartbeat import HeartbeatFile, SignOfLife
from .imports import ALWAYS, Needs, needs_of
from .launcher import Launcher, Script
from .local import LocalController, local_runtime, local_settings
from .log_files import make_run_folder
from .program import check_program
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
    variables = torchrun.take_variables(arguments, os.environ)
    ranks = torchrun.local_ranks(arguments, os.environ)
    restarts = torchrun.restarts(arguments)
    signals = _signals(arguments.signals_to_handle)
    options = torchrun.rank_options(arguments, os.environ, ranks)
    script = Script(
        arguments.script, arguments.module, tuple(arguments.arguments), is_program=arguments.no_python, options=options
    )
    if script.is_program:
        check_program(script.name)
    elif not script.is_module and not os.path.isfile(script.name):
        raise InputError(f"{script.name}: no such file; give the training script's path, or -m and a module's name")
    for words in (variables, torchrun.passed_over(arguments, ranks is not None, os.environ)):
        if words:
            print(f"pacekeeper run: {words}", file=sys.stderr)
    if torchrun.wants_log_files(arguments, options):
        script = _with_log_files(script, arguments.log_dir or "")
    publish_signals(signals)
    if ranks is None:
        settings = LauncherSettings.from_environment(os.environ)
        return launch(script, settings, Runtime.from_environment().make())
    mode = None if arguments.sync_mode == AUTO else SyncMode(arguments.sync_mode)
    return launch_locally(script, ranks, restarts, mode, arguments.max_rounds_without_progress)


def _signals(text: str | None) -> tuple[signal.Signals, ...]:
    return default_signals() if text is None else parse_signals(text)


def _with_log_files(script: Script, log_dir: str) -> Script:
    """Make the folder of this run's log files, and name it where the user has not. Raises InputError."""
    run_id = script.options.run_id or os.environ.get("PACEKEEPER_JOB", "local")
    folder = make_run_folder(log_dir, run_id)
    print(f"pacekeeper run: log files are in {folder}", file=sys.stderr)
    output = replace(script.options.output, folder=folder)
    return replace(script, options=replace(script.options, output=output))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pacekeeper run", description=DESCRIPTION)
    parser.add_argument(
        "--local", type=_at_least_one, metavar="N", help="run N ranks on this machine, without a cluster"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=_not_negative,
        metavar="K",
        help="with --local: rounds after the first (default 10); the plan has its own (spec.remediation.maxRestarts)",
    )
    parser.add_argument(
        "--sync-mode",
        choices=[AUTO, *MODES],
        default=AUTO,
        help="with --local: how to train, as spec.syncMode of a TrainingJob (default Auto: Sync, until another wins)",
    )
    parser.add_argument(
        "--max-rounds-without-progress",
        type=_not_negative,
        default=3,
        metavar="K",
        help="with --local: rounds that may end at the same step before the run fails (default 3; 0: without limit)",
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


def launch_locally(
    script: Script, ranks: int, restarts: int, mode: SyncMode | None = None, without_progress: int = 3
) -> int:
    """The same on this machine, with a controller in place of operator and sidecar; the exit code.

    mode: to train in; None: the controller decides. without_progress: so many rounds may end at the same step; 0:
    without limit.
    """
    with local_runtime() as runtime:
        settings = _local_settings(script)
        sign = SignOfLife(runtime.alive)
        heartbeat, warm = _prepare(settings, runtime, script)

        async def run() -> int:
            launcher = Launcher(script, settings, runtime, warm, heartbeat, sign)
            controller = LocalController(runtime, ranks, restarts, launcher.give_up, mode, without_progress)
            controlling = asyncio.create_task(controller.run())
            code = await launcher.run()
            controlling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controlling
            return code

        return asyncio.run(run())


def _local_settings(script: Script) -> LauncherSettings:
    settings = local_settings(dict(os.environ))
    grace = script.options.grace_seconds
    return settings if grace is None else replace(settings, grace=grace)


def _prepare(settings: LauncherSettings, runtime: Runtime, script: Script) -> tuple[HeartbeatFile, Warm]:
    log_as_launcher()
    heartbeat = HeartbeatFile(runtime.heartbeat, settings.worker)  # says that the launcher is starting
    for signum in handled_signals():
        # Process 1 would ignore it, another leave its folder behind; the launcher's loop has its own handler.
        signal.signal(signum, _leave_early)
    processes.adopt_orphans()
    path = [os.getcwd(), *sys.path]
    needs = Needs() if script.is_program else needs_of(script.name, script.is_module, path)
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
    warm = start_warm(None if script.is_program else needs)  # a program imports for itself
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

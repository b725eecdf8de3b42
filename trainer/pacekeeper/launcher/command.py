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

from pacekeeper.runtime import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SYNC_MODES, SyncMode

from . import processes, torchrun
from .end_signals import choose_default_signals, read_handled_signals, parse_signals, publish_signals
from .heartbeat import HeartbeatFile, LivenessFile
from .imports import ALWAYS_IMPORTED_MODULES, ImportNeeds, find_import_needs
from .launcher import Launcher, Script
from .local import LocalController, open_local_runtime, build_local_settings
from .log_files import make_run_folder
from .program import check_program
from .rounds import choose_exit_code
from .settings import LauncherSettings
from .warm import WarmProcess, configure_launcher_log, import_modules, fork_warm_process

log = logging.getLogger(__name__)

AUTO_SYNC_MODE = "Auto"
RUN_DESCRIPTION = """Runs a training script's ranks and starts them again in place when one fails. In a worker's pod it
follows the operator's plan; with --local it needs no cluster and decides by itself. Takes torchrun's arguments, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = parse_arguments(argv)
    variables = torchrun.apply_variables(arguments, os.environ)
    ranks = torchrun.choose_local_ranks(arguments, os.environ)
    restarts = torchrun.parse_max_restarts(arguments)
    signals = _parse_end_signals(arguments.signals_to_handle)
    options = torchrun.build_rank_options(arguments, os.environ, ranks)
    script = Script(
        arguments.script, arguments.module, tuple(arguments.arguments), is_program=arguments.no_python, options=options
    )
    if script.is_program:
        check_program(script.name)
    elif not script.is_module and not os.path.isfile(script.name):
        raise InputError(f"{script.name}: no such file; give the training script's path, or -m and a module's name")
    for words in (variables, torchrun.describe_ignored_options(arguments, ranks is not None, os.environ)):
        if words:
            print(f"pacekeeper run: {words}", file=sys.stderr)
    if torchrun.needs_log_files(arguments, options):
        script = _add_log_folder(script, arguments.log_dir or "")
    publish_signals(signals)
    if ranks is None:
        settings = LauncherSettings.from_environment(os.environ)
        return launch_from_plan(script, settings, RuntimeFolder.from_environment().create())
    mode = None if arguments.sync_mode == AUTO_SYNC_MODE else SyncMode(arguments.sync_mode)
    return launch_locally(script, ranks, restarts, mode, arguments.max_rounds_without_progress)


def _parse_end_signals(text: str | None) -> tuple[signal.Signals, ...]:
    return choose_default_signals() if text is None else parse_signals(text)


def _add_log_folder(script: Script, log_dir: str) -> Script:
    """Make the folder of this run's log files, and name it where the user has not. Raises InputError."""
    run_id = script.options.run_id or os.environ.get("PACEKEEPER_JOB", "local")
    folder = make_run_folder(log_dir, run_id)
    print(f"pacekeeper run: log files are in {folder}", file=sys.stderr)
    output = replace(script.options.output, folder=folder)
    return replace(script, options=replace(script.options, output=output))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pacekeeper run", description=RUN_DESCRIPTION)
    parser.add_argument(
        "--local", type=_parse_rank_count, metavar="N", help="run N ranks on this machine, without a cluster"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=_parse_round_count,
        metavar="K",
        help="with --local: rounds after the first (default 10); the plan has its own (spec.remediation.maxRestarts)",
    )
    parser.add_argument(
        "--sync-mode",
        choices=[AUTO_SYNC_MODE, *SYNC_MODES],
        default=AUTO_SYNC_MODE,
        help="with --local: how to train, as spec.syncMode of a TrainingJob (default Auto: Sync, until another wins)",
    )
    parser.add_argument(
        "--max-rounds-without-progress",
        type=_parse_round_count,
        default=3,
        metavar="K",
        help="with --local: rounds that may end at the same step before the run fails (default 3; 0: without limit)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    torchrun.add_options(parser)
    parser.add_argument("script", help="the training script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser.parse_args(argv)


def launch_from_plan(script: Script, settings: LauncherSettings, runtime: RuntimeFolder) -> int:
    """Imports torch, forks the warm process, and follows the plan until the end; the exit code."""
    sign = LivenessFile(runtime.liveness)
    heartbeat, warm = _prepare_launch(settings, runtime, script)
    return asyncio.run(Launcher(script, settings, runtime, warm, heartbeat, sign).run())


def launch_locally(
    script: Script, ranks: int, restarts: int, mode: SyncMode | None = None, without_progress: int = 3
) -> int:
    """The same on this machine, with a controller in place of operator and sidecar; the exit code.

    mode: to train in; None: the controller decides. without_progress: so many rounds may end at the same step; 0:
    without limit.
    """
    with open_local_runtime() as runtime:
        settings = _build_local_settings(script)
        sign = LivenessFile(runtime.liveness)
        heartbeat, warm = _prepare_launch(settings, runtime, script)

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


def _build_local_settings(script: Script) -> LauncherSettings:
    settings = build_local_settings(dict(os.environ))
    grace = script.options.grace_seconds
    return settings if grace is None else replace(settings, grace=grace)


def _prepare_launch(settings: LauncherSettings, runtime: RuntimeFolder, script: Script) -> tuple[HeartbeatFile, WarmProcess]:
    configure_launcher_log()
    heartbeat = HeartbeatFile(runtime.heartbeat, settings.worker)  # says that the launcher is starting
    for signum in read_handled_signals():
        # Process 1 would ignore it, another leave its folder behind; the launcher's loop has its own handler.
        signal.signal(signum, _exit_early)
    processes.adopt_orphans()
    path = [os.getcwd(), *sys.path]
    needs = ImportNeeds() if script.is_program else find_import_needs(script.name, script.is_module, path)
    if needs.early_variables:
        log.warning(
            "the script sets %s, which torch reads when it is imported: each rank imports torch itself, and starts "
            "some seconds later for it. Set such variables in the environment of `pacekeeper run` instead",
            ", ".join(needs.early_variables),
        )
    import_modules(needs.initial_modules)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is still in there would come out of every rank again
    warm = fork_warm_process(None if script.is_program else needs)  # a program imports for itself
    if needs.early_variables:
        import_modules(ALWAYS_IMPORTED_MODULES)  # for the store where ranks meet
    return heartbeat, warm


def _exit_early(signum: int, _: object) -> None:
    raise SystemExit(choose_exit_code(signum))


def _parse_rank_count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give the number of ranks, at least 1")
    return number


def _parse_round_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of rounds, 0 or more")
    return int(text)

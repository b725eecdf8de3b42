"""`pacekeeper run`: its arguments, and what happens before the launcher's loop starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pacekeeper.runtime_folder import RuntimeFolder, read_json
from pacekeeper.watch.payload import open_local_payload
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode
from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_rank.forking.handled_signals import choose_default_signals, publish_signals, read_handled_signals
from pacekeeper_rank.forking.warm_server import import_modules
from pacekeeper_rank.watching.takeover import PAYLOAD_VARIABLE

from . import torchrun
from .health.heartbeat import HeartbeatFile, LivenessFile
from .launcher import Launcher, Script
from .local_controller import LocalController, build_local_settings, open_local_runtime
from .ranks import processes
from .ranks.end_signals import parse_signals
from .ranks.log_files import make_run_folder
from .ranks.script_imports import ImportNeeds, find_import_needs
from .ranks.warm_process import (
    RankInterpreter,
    WarmProcess,
    configure_launcher_log,
    fork_warm_process,
    spawn_warm_process,
)
from .rendezvous.rounds import choose_exit_code
from .settings import LauncherSettings

log = logging.getLogger(__name__)

AUTO_SYNC_MODE = "Auto"
RUN_DESCRIPTION = """Runs the ranks of a training script and restarts them in place when one fails. In a worker's pod it
follows the operator's plan; with --local it needs no cluster and decides by itself. Takes torchrun's options, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Raises InputError that names the option and the remedy."""
    arguments = parse_arguments(argv)
    variables = torchrun.apply_variables(arguments, os.environ)
    ranks = torchrun.choose_local_ranks(arguments, os.environ)
    restarts = torchrun.parse_max_restarts(arguments)
    signals = _parse_end_signals(arguments.signals_to_handle)
    options = torchrun.build_rank_options(arguments, os.environ, ranks)
    script = Script(
        arguments.script,
        arguments.module,
        (*(["--local-rank=${local_rank}"] if arguments.pass_local_rank else ()), *arguments.arguments),
        is_program=arguments.no_python,
        options=options,
    )
    if script.is_program:
        _check_program(script.name)
    elif not script.is_module and not os.path.isfile(script.name):
        raise InputError(f"{script.name}: no such file; give the training script's path, or -m and a module's name")
    for message in (variables, torchrun.describe_ignored_options(arguments, ranks is not None, os.environ)):
        if message:
            print(f"pacekeeper run: {message}", file=sys.stderr)
    if torchrun.needs_log_files(arguments, options):
        script = _add_log_folder(script, arguments.log_dir or "")
    publish_signals(signals)
    with _open_interpreter(arguments.python, arguments.python_option) as interpreter:
        if ranks is None:
            settings = LauncherSettings.from_environment(os.environ)
            return launch_from_plan(script, settings, RuntimeFolder.from_environment().create(), interpreter)
        mode = None if arguments.sync_mode == AUTO_SYNC_MODE else SyncMode(arguments.sync_mode)
        return launch_locally(script, ranks, restarts, mode, arguments.max_rounds_without_progress, interpreter)


@contextlib.contextmanager
def _open_interpreter(path: str | None, options: Sequence[str]) -> Iterator[RankInterpreter | None]:
    """Yield the interpreter of `--python` with the library for it. Raises InputError if it cannot run ranks."""
    if path is None and options:
        raise InputError("--python-option: needs --python; name the ranks' interpreter")
    if path is None:
        yield None
        return
    payload = os.environ.get(PAYLOAD_VARIABLE)
    with open_local_payload() if payload is None else contextlib.nullcontext(Path(payload)) as folder:
        yield RankInterpreter(path, folder, tuple(options))


def _parse_end_signals(text: str | None) -> tuple[signal.Signals, ...]:
    return choose_default_signals() if text is None else parse_signals(text)


def _add_log_folder(script: Script, log_dir: str) -> Script:
    """Make the folder of this run's log files, and log its path. Raises InputError."""
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
        help="with --local: how to train, as spec.syncMode of a TrainingJob (default Auto: Sync until another wins)",
    )
    parser.add_argument(
        "--max-rounds-without-progress",
        type=_parse_round_count,
        default=3,
        metavar="K",
        help="with --local: rounds that may end at the same step before the run fails (default 3; 0: no limit)",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the ranks' interpreter (3.9 or later, PyTorch 2.4 or later), which needs no package of Pacekeeper; "
        "by default the one of this command",
    )
    parser.add_argument(
        "--python-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of that interpreter, such as --python-option=-O; may be repeated",
    )
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="give the script --local-rank=N as its first argument, as torch.distributed.launch does",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    torchrun.add_options(parser)
    parser.add_argument("script", help="the training script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser.parse_args(argv)


def launch_from_plan(
    script: Script, settings: LauncherSettings, runtime: RuntimeFolder, interpreter: RankInterpreter | None = None
) -> int:
    """Start the warm process, and follow the plan until the end. Return the exit code.

    `interpreter`: of the ranks; None: this process's own. Raises InputError if another launcher has finished here.
    """
    _check_first_launcher(runtime)
    liveness = LivenessFile(runtime.liveness)
    heartbeat, warm = _prepare_launch(settings, runtime, script, interpreter)
    return asyncio.run(Launcher(script, settings, runtime, warm, heartbeat, liveness).run())


def _check_first_launcher(runtime: RuntimeFolder) -> None:
    """Raise InputError in a container whose ranks have finished: the job ends with them, and would skip these."""
    if (read_json(runtime.heartbeat) or {}).get("state") == LauncherState.FINISHED:
        raise InputError(
            "a torchrun before this one has finished in this container, and a TrainingJob has one: give this one a "
            "TrainingJob of its own, or call both from one script"
        )


def launch_locally(
    script: Script,
    ranks: int,
    restarts: int,
    mode: SyncMode | None = None,
    no_progress_limit: int = 3,
    interpreter: RankInterpreter | None = None,
) -> int:
    """Run the ranks on this machine, with a controller instead of the operator and the sidecar. Return the exit code.

    `mode`: the sync mode to train in; None: the controller decides. `no_progress_limit`: the number of rounds that may
    end at the same step; 0: no limit. `interpreter`: of the ranks; None: this process's own.
    """
    with open_local_runtime() as runtime:
        settings = _build_local_settings(script)
        liveness = LivenessFile(runtime.liveness)
        heartbeat, warm = _prepare_launch(settings, runtime, script, interpreter)

        async def run() -> int:
            launcher = Launcher(script, settings, runtime, warm, heartbeat, liveness)
            controller = LocalController(runtime, ranks, restarts, launcher.give_up, mode, no_progress_limit)
            controller_task = asyncio.create_task(controller.run())
            code = await launcher.run()
            controller_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controller_task
            return code

        return asyncio.run(run())


def _build_local_settings(script: Script) -> LauncherSettings:
    settings = build_local_settings(dict(os.environ))
    grace = script.options.grace_seconds
    return settings if grace is None else replace(settings, grace=grace)


def _prepare_launch(
    settings: LauncherSettings, runtime: RuntimeFolder, script: Script, interpreter: RankInterpreter | None
) -> tuple[HeartbeatFile, WarmProcess]:
    configure_launcher_log()
    heartbeat = HeartbeatFile(runtime.heartbeat, settings.worker)  # reports that the launcher is starting
    for signum in read_handled_signals():
        # Process 1 would ignore the signal; any other would leave its folder behind. The launcher's loop has its own
        # handler.
        signal.signal(signum, _exit_early)
    processes.adopt_orphans()
    path = [os.getcwd(), *sys.path]
    needs = ImportNeeds() if script.is_program else find_import_needs(script.name, script.is_module, path)
    if needs.early_variables:
        log.warning(
            "the script sets %s, which torch reads when it is imported: each rank therefore imports torch itself, and "
            "starts some seconds later. Set such variables in the environment of `pacekeeper run` instead",
            ", ".join(needs.early_variables),
        )
    if interpreter is not None:
        return heartbeat, _spawn_in(interpreter, needs)
    import_modules(needs.initial_modules)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # each forked rank would write what is still buffered again
    return heartbeat, fork_warm_process(None if script.is_program else needs)  # a program does its own imports


def _spawn_in(interpreter: RankInterpreter, needs: ImportNeeds) -> WarmProcess:
    try:
        return spawn_warm_process(needs, interpreter)
    except OSError as error:
        raise InputError(f"--python {interpreter.path}: {error.strerror}; name a Python with PyTorch") from error


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


def _check_program(name: str) -> None:
    """Raise InputError if the program does not exist, before any rank starts."""
    if shutil.which(name) is None:
        raise InputError(
            f"--no-python: {name} is no executable file here and not in PATH; give the program's path, or chmod +x"
        )

"""The command `pacekeeper watch`: runs a command, and prints what slows down, blocks, or ends its PyTorch ranks.

The command runs as without Pacekeeper: its output, its signals, and its exit code are its own. Lines of Pacekeeper go
to standard error, each with a prefix. No error of Pacekeeper ends the command.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.local_folder import open_local_folder
from pacekeeper_analysis.errors import InputError

from .payload import build_watched_environment, open_local_payload

CONTAINER_POLL_INTERVAL_SECONDS = 0.1
"""Seconds between two reads of the folder: the order of deaths is known as well as that."""
MISSING_COMMAND_EXIT_CODE, UNUSABLE_COMMAND_EXIT_CODE = 127, 126
"""Exit codes of shells for a command that does not exist, and one that cannot be run."""
FORWARDED_SIGNALS = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that are for the command."""
PREFIX = "pacekeeper: "
_SENT_BY_KERNEL = 0x80
"""si_code of a signal of the terminal, which the command has received, too."""
_FOLDER_PREFIX = "pacekeeper-watch-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code. If a signal ends the command, the same one ends this process."""
    options = _parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format=f"{PREFIX}%(message)s", level=logging.CRITICAL if options.quiet else logging.WARNING)
    if options.output is not None:
        _create_output(options.output)
    awaited: set[int] = {*FORWARDED_SIGNALS, signal.SIGCHLD}
    # Blocked before anything starts a thread, which could receive a signal instead. The command gets the old mask.
    previous: set[int] = {*signal.pthread_sigmask(signal.SIG_BLOCK, awaited)}
    try:
        with ExitStack() as stack:
            watch = _Watch(options, stack)
            pid = _start_command(options.command, watch.environment, previous)
            status = _wait_for_command(pid, awaited, watch.poll)
            watch.finish(_describe_status(status))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return _end_alike(status)


@dataclass(frozen=True)
class _Options:
    command: Sequence[str]
    output: Path | None
    quiet: bool
    takes_profiles: bool


class _Watch:
    """What watches the command. An error ends the watching, and not the command."""

    def __init__(self, options: _Options, stack: ExitStack) -> None:
        self.environment: Mapping[str, str] = os.environ
        self._options = options
        self._stack = stack
        self._is_broken = False
        self._attempt(self._start)

    def _start(self) -> None:
        # It imports numpy, whose threads inherit the mask.
        from .session import WatchSession

        runtime = self._stack.enter_context(open_local_folder(_FOLDER_PREFIX))
        payload = self._stack.enter_context(open_local_payload())
        self._session = self._stack.enter_context(WatchSession(runtime, takes_profiles=self._options.takes_profiles))
        self.environment = {
            **build_watched_environment(os.environ, payload),
            "PACEKEEPER_WATCH_RUNTIME": str(runtime),
        }

    def poll(self) -> None:
        """Read what the ranks do, and print what is new."""
        self._attempt(lambda: self._print(self._session.poll()))

    def finish(self, end: str) -> None:
        """Print the summary, and save the records. `end`: how the command ended."""
        self._attempt(lambda: self._print([*self._session.summarize(), end]))
        output = self._options.output
        if output is not None:
            self._attempt(lambda: self._print(self._session.save_records(output, self._options.command)))

    def _attempt(self, act: Callable[[], None]) -> None:
        if not self._is_broken:
            try:
                act()
            except Exception as error:
                self._is_broken = True
                self._print([f"the command is not watched any more, and runs on: {error!r}"])

    def _print(self, lines: Sequence[str]) -> None:
        if self._options.quiet or not lines:
            return
        text = "".join(f"{PREFIX}{line}\n" for line in lines)
        with suppress(OSError, ValueError):  # the reader of standard error is gone, which is no reason to end
            os.write(2, text.encode(errors="replace"))


def _wait_for_command(pid: int, awaited: set[int], poll: Callable[[], None]) -> int:
    """Return the command's wait status. Until then, forward signals to it, and call `poll` several times a second."""
    while True:
        received = signal.sigtimedwait(awaited, CONTAINER_POLL_INTERVAL_SECONDS)
        if received is not None and received.si_signo in FORWARDED_SIGNALS:
            _forward_signal(received, pid)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        poll()


def _parse_arguments(argv: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(
        prog="pacekeeper watch",
        usage="pacekeeper watch [--output DIR] [--profile] [--quiet] [--] COMMAND …",
        description="Run a command and show which of its PyTorch ranks are slow, hang, or fail. Nothing has to be "
        "changed or installed for the script.",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="save the ranks' records for `pacekeeper whatif`")
    parser.add_argument(
        "--profile", action="store_true", help="once a rank is slow, show which Python function takes its time"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing; useful with --output")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="for example: torchrun train.py")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise InputError("no command is given; example: pacekeeper watch -- torchrun train.py")
    return _Options(command, arguments.output, arguments.quiet, arguments.profile)


def _create_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; give a folder that can be written") from error


def _start_command(command: Sequence[str], environment: Mapping[str, str], mask: set[int]) -> int:
    """Start the command with this process's files, group, and terminal. Return its process ID."""
    # Python ignores these; a command expects their default.
    restored = [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        return os.posix_spawnp(command[0], list(command), environment, setsigmask=mask, setsigdef=restored)
    except FileNotFoundError as error:
        raise _fail_to_start(command, error, MISSING_COMMAND_EXIT_CODE) from error
    except OSError as error:
        raise _fail_to_start(command, error, UNUSABLE_COMMAND_EXIT_CODE) from error


def _fail_to_start(command: Sequence[str], error: OSError, exit_code: int) -> SystemExit:
    print(f"{PREFIX}{command[0]}: {error.strerror}", file=sys.stderr)
    return SystemExit(exit_code)


def _forward_signal(received: signal.struct_siginfo, pid: int) -> None:
    """Send a signal on to the command, unless the terminal has sent it to both."""
    if received.si_code != _SENT_BY_KERNEL:
        with suppress(ProcessLookupError):
            os.kill(pid, received.si_signo)


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"the command ended with exit code {code}" if code >= 0 else f"the command was ended by signal {-code}"


def _end_alike(status: int) -> int:
    """Return the command's exit code, or end this process by the command's signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own core, if any
    with suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code

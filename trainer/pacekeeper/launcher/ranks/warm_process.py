"""The warm process: it has imported torch and forks ranks on command, so that a round costs a fork, not an import.

It stays single-threaded and never uses CUDA or multi-threaded operations, because a fork keeps only the calling thread.
The launcher forks it before it starts anything else, and communicates over a socket pair. If it exits, so do its ranks.
By then the launcher has threads, so it spawns a new interpreter as a replacement.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from . import end_signals, processes
from .output_writer import LogStream
from .rank import RankStart, run_rank
from .script_imports import ImportNeeds

_WARM_MESSAGE_BYTES = 1 << 20
_WARM_IDLE_SECONDS = 0.2
"""After this time without a command, the warm process imports what the next ranks will need."""


class CurrentStderr:
    """The standard error of the calling process: a rank's differs from its launcher's."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_launcher_log() -> None:
    """Configure our log in this process and its forks. The root logger is left to the script."""
    handler = logging.StreamHandler(CurrentStderr())
    handler.setFormatter(logging.Formatter("pacekeeper %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name in ("pacekeeper", "pacekeeper_analysis"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def redirect_log(stream: CurrentStderr | LogStream) -> None:
    """Write this process's log to the stream. `configure_launcher_log` must have been called."""
    for handler in logging.getLogger("pacekeeper").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def import_modules(names: Sequence[str]) -> None:
    """Import what the ranks will need. Failures are ignored: the rank's own import raises them again."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


@dataclass(frozen=True)
class RankForked:
    """Event: the rank with this key runs as process `pid`, which leads its process group."""

    key: str
    pid: int


@dataclass(frozen=True)
class RankExited:
    """Event: the rank with this key has exited. A negative code is the signal."""

    key: str
    code: int


class WarmProcess:
    """The launcher's handle on its warm process."""

    def __init__(
        self, pid: int, connection: socket.socket, ready: bool = True, import_needs: ImportNeeds | None = None
    ) -> None:
        self.pid = pid
        self.import_needs = import_needs or ImportNeeds()
        self.connection = connection  # non-blocking; readable when there are events
        self.ready = ready
        """Whether it has imported all modules. It accepts commands before."""
        self.started = time.monotonic()

    def fork(self, start: RankStart, stdout: int, stderr: int, stdin: int | None = None) -> None:
        """Request a rank with these files as its output and input (`stdin` None: it has none).

        `read_events` returns its process ID, or that it has exited if it could not be forked.
        """
        message = json.dumps({"rank": asdict(start)}).encode()
        files = [stdout, stderr] if stdin is None else [stdout, stderr, stdin]
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.connection, [message], files)

    def read_events(self) -> Iterator[RankForked | RankExited]:
        """Yield the events since the last call. Raises EOFError if the warm process has exited."""
        while True:
            try:
                message = self.connection.recv(_WARM_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EOFError("the warm process has ended") from error
            if not message:
                raise EOFError("the warm process has ended")
            content = json.loads(message)
            if "ready" in content:
                self.ready = True
            else:
                yield RankForked(**content["forked"]) if "forked" in content else RankExited(**content["exited"])

    def reap(self) -> str:
        """Reap the process after `read_events` raised EOFError, and return how it exited."""
        os.kill(self.pid, signal.SIGKILL)  # no effect if it has exited; ends it if it has only closed the connection
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def fork_warm_process(import_needs: ImportNeeds | None = None) -> WarmProcess:
    """Fork the warm process. The caller must be single-threaded, and have imported what the first ranks need.

    `import_needs`: its deferred modules are imported while the first ranks run.
    """
    launcher_end, warm_end = _open_socket_pair()
    gc.collect()
    launcher_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _exit_on_return():
            launcher_end.close()
            processes.die_with_parent(launcher_pid)
            _serve_launcher(warm_end, import_needs.deferred_modules if import_needs else ())
    warm_end.close()
    return WarmProcess(pid, launcher_end, import_needs=import_needs)


def spawn_warm_process(import_needs: ImportNeeds | None = None) -> WarmProcess:
    """Spawn a warm process from a caller that has threads: a new interpreter, which imports everything again."""
    launcher_end, warm_end = _open_socket_pair()
    warm_end.set_inheritable(True)
    import_needs = import_needs or ImportNeeds()
    arguments = json.dumps(
        {
            "parent": os.getpid(),
            "connection": warm_end.fileno(),
            "names": [*import_needs.initial_modules, *import_needs.deferred_modules],
        }
    )
    command = [sys.executable, "-c", _SPAWN_CODE, json.dumps(sys.path), __name__, arguments]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    warm_end.close()
    return WarmProcess(pid, launcher_end, ready=False, import_needs=import_needs)


_SPAWN_CODE = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve_spawned_process(**json.loads(sys.argv[3]))
"""
"""Code of the new interpreter. It uses the launcher's sys.path, so that ranks find the same modules as before."""


def serve_spawned_process(parent: int, connection: int, names: Sequence[str]) -> NoReturn:
    """Run a spawned warm process. `connection`: its end of the socket pair; `names`: the modules to import."""
    processes.die_with_parent(parent)
    processes.read_initially_ignored_signals()
    ignore_signals()
    configure_launcher_log()
    import_modules(names)
    gc.collect()
    warm_end = socket.socket(fileno=connection)
    warm_end.set_inheritable(False)
    warm_end.send(json.dumps({"ready": True}).encode())
    _serve_launcher(warm_end)


def _open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the launcher's end and the warm process's end."""
    launcher_end, warm_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (launcher_end, warm_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WARM_MESSAGE_BYTES)
    launcher_end.setblocking(False)
    return launcher_end, warm_end


def _serve_launcher(connection: socket.socket, deferred_modules: Sequence[str] = ()) -> NoReturn:
    """Run the warm process. It exits without a message: the launcher logs why the run ends."""
    code = 1
    try:
        _fork_and_report(connection, [*deferred_modules])
        code = 0  # the launcher has exited; the kernel kills the ranks when this process exits
    except ConnectionError:
        code = 0  # the same
    except BaseException:
        logging.getLogger(__name__).exception("the process that forks the ranks failed")
    finally:
        os._exit(code)


def ignore_signals() -> None:
    """Ignore end signals. A terminal or a batch system may send them to all processes; the launcher handles them."""
    for signum in end_signals.read_handled_signals():
        signal.signal(signum, signal.SIG_IGN)


def _fork_and_report(connection: socket.socket, deferred_modules: list[str]) -> None:
    """Fork ranks, and report their exits, until the launcher closes the connection. Raises ConnectionError if it exits.

    `deferred_modules`: modules to import while there is nothing else to do.
    """
    gc.freeze()  # the collector then does not write to pages that the forks share
    processes.read_initially_ignored_signals()
    ignore_signals()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _do_nothing)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    keys: dict[int, str] = {}  # of the running ranks, by process ID
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(read_end, selectors.EVENT_READ)

    def forget_parents_things() -> None:
        signal.set_wakeup_fd(-1)
        selector.close()
        for descriptor in (connection.fileno(), read_end, write_end):
            os.close(descriptor)

    while True:
        ready = [key.fileobj for key, _ in selector.select(_WARM_IDLE_SECONDS if deferred_modules else None)]
        if not ready and deferred_modules:
            import_modules([deferred_modules.pop(0)])
            gc.freeze()
        if read_end in ready:
            os.read(read_end, 4096)
            for pid, code in _reap_ended_ranks(keys):
                connection.send(json.dumps({"exited": {"key": keys.pop(pid), "code": code}}).encode())
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, _WARM_MESSAGE_BYTES, 3)
            if not message:
                return
            start = RankStart(**json.loads(message)["rank"])
            try:
                pid = _fork_rank(start, descriptors, forget_parents_things)
            except OSError as error:  # no process slots or memory are left: the round fails, this process continues
                text = f"pacekeeper: the process of rank {start.rank} cannot be forked: {error}\n"
                os.write(descriptors[1], text.encode())
                event: dict[str, object] = {"exited": {"key": start.key, "code": 1}}
            else:
                keys[pid] = start.key
                event = {"forked": {"key": start.key, "pid": pid}}
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(json.dumps(event).encode())


def _fork_rank(start: RankStart, files: Sequence[int], forget_parents_things: Callable[[], None]) -> int:
    warm_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _exit_on_return(files[1]):
            forget_parents_things()
            run_rank(start, warm_pid, *files)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it, too: the group exists from the first of both calls on
    return pid


@contextlib.contextmanager
def _exit_on_return(stderr: int = 2) -> Iterator[None]:
    """End a forked process at the end of the block, also after an exception.

    The frames above on the stack belong to the parent: their cleanup would remove what the parent uses. `stderr`: where
    to write a traceback; it may have become descriptor 2 by then.
    """
    try:
        target = os.fstat(stderr)
        try:
            yield
        except Exception:
            text = traceback.format_exc().encode()
            descriptor = 2 if os.path.samestat(os.fstat(2), target) else stderr
            os.write(descriptor, text)
    finally:
        os._exit(1)


def _reap_ended_ranks(keys: dict[int, str]) -> Iterator[tuple[int, int]]:
    """Yield (process ID, exit code) of ranks that have exited. Other adopted children are reaped, too."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in keys:
            yield pid, os.waitstatus_to_exitcode(status)


def _do_nothing(*_: object) -> None:
    """Do nothing. A handler must exist for the signal to reach the wake-up file."""

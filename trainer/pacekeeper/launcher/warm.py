"""The warm process: it has imported torch and forks ranks on command, so that a round costs a fork, not an import.

It stays single-threaded for ever and never touches CUDA or a multi-threaded operation, because a fork takes over only
the thread that forks. The launcher forks it before it starts anything else itself, and speaks with it over a socket
pair. By the time that it dies, and its ranks with it, the launcher has threads: a fresh interpreter takes its place.
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
from .imports import ImportNeeds
from .outlet import LogStream
from .rank import RankStart, run_rank

_WARM_MESSAGE_BYTES = 1 << 20
_WARM_IDLE_SECONDS = 0.2
"""Without an order for this duration, the warm process imports what the next ranks will need."""


class CurrentStderr:
    """The standard error of the process that writes: a rank's is another one than its launcher's."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_launcher_log() -> None:
    """Has this process, and all that it forks, write our log. The root logger is the script's to configure."""
    handler = logging.StreamHandler(CurrentStderr())
    handler.setFormatter(logging.Formatter("pacekeeper %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name in ("pacekeeper", "pacekeeper_analysis"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def redirect_log(stream: CurrentStderr | LogStream) -> None:
    """Have this process write our log to this stream, where `configure_launcher_log` was called."""
    for handler in logging.getLogger("pacekeeper").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def import_modules(names: Sequence[str]) -> None:
    """Imports what the ranks will need. What is not installed, no rank can need; what fails, fails in the rank."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


@dataclass(frozen=True)
class RankForked:
    """The rank with this key runs as process `pid`, which leads its process group."""

    key: str
    pid: int


@dataclass(frozen=True)
class RankExited:
    """The rank with this key has ended; a negative code is the signal."""

    key: str
    code: int


class WarmProcess:
    """The launcher's handle on its warm process."""

    def __init__(self, pid: int, connection: socket.socket, ready: bool = True, import_needs: ImportNeeds | None = None) -> None:
        self.pid = pid
        self.import_needs = import_needs or ImportNeeds()
        self.connection = connection  # non-blocking: readable when there is news
        self.ready = ready
        """Whether it has imported all; it takes orders before."""
        self.started = time.monotonic()

    def fork(self, start: RankStart, stdout: int, stderr: int, stdin: int | None = None) -> None:
        """Orders a rank with these files as its output, and as its input (None: it has none); `news` tells its process
        id, or that there is no process to fork it."""
        message = json.dumps({"rank": asdict(start)}).encode()
        files = [stdout, stderr] if stdin is None else [stdout, stderr, stdin]
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.connection, [message], files)

    def read_events(self) -> Iterator[RankForked | RankExited]:
        """What has happened since the last call. Raises EOFError when the warm process is gone."""
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
        """How it has ended, once `news` says so; it is nobody's child any more."""
        os.kill(self.pid, signal.SIGKILL)  # of no effect on who has ended, and an end of who has only hung up
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def fork_warm_process(import_needs: ImportNeeds | None = None) -> WarmProcess:
    """Forks the warm process. The caller must still be single-threaded, and has imported what the ranks need first.

    needs: what it imports while the first ranks run.
    """
    ours, theirs = _open_socket_pair()
    gc.collect()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _exit_on_return():
            ours.close()
            processes.die_with_parent(launcher)
            _serve_launcher(theirs, import_needs.deferred_modules if import_needs else ())
    theirs.close()
    return WarmProcess(pid, ours, import_needs=import_needs)


def spawn_warm_process(import_needs: ImportNeeds | None = None) -> WarmProcess:
    """The same by a caller that has threads: another interpreter, which takes some seconds to import all again."""
    ours, theirs = _open_socket_pair()
    theirs.set_inheritable(True)
    import_needs = import_needs or ImportNeeds()
    given = json.dumps({"parent": os.getpid(), "connection": theirs.fileno(), "names": [*import_needs.initial_modules, *import_needs.deferred_modules]})
    command = [sys.executable, "-c", _SPAWN_CODE, json.dumps(sys.path), __name__, given]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    theirs.close()
    return WarmProcess(pid, ours, ready=False, import_needs=import_needs)


_SPAWN_CODE = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve_spawned_process(**json.loads(sys.argv[3]))
"""
"""With the launcher's own path: ranks are to find what they have found before."""


def serve_spawned_process(parent: int, connection: int, names: Sequence[str]) -> NoReturn:
    """The life of a warm process that was not forked. connection: its end of the socket pair; names: its imports."""
    processes.die_with_parent(parent)
    processes.read_initially_ignored_signals()
    ignore_signals()
    configure_launcher_log()
    import_modules(names)
    gc.collect()
    theirs = socket.socket(fileno=connection)
    theirs.set_inheritable(False)
    theirs.send(json.dumps({"ready": True}).encode())
    _serve_launcher(theirs)


def _open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the warm process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WARM_MESSAGE_BYTES)
    ours.setblocking(False)
    return ours, theirs


def _serve_launcher(connection: socket.socket, later: Sequence[str] = ()) -> NoReturn:
    """The warm process's life. It ends without a word: the launcher says why the run ends."""
    code = 1
    try:
        _fork_and_report(connection, [*later])
        code = 0  # the launcher is gone; the ranks go with this process
    except ConnectionError:
        code = 0  # the same
    except BaseException:
        logging.getLogger(__name__).exception("the process that ranks are forked from fails")
    finally:
        os._exit(code)


def ignore_signals() -> None:
    """A terminal's Ctrl-C reaches the whole group, a batch system's signal all of a job: the launcher decides what it
    means."""
    for signum in end_signals.read_handled_signals():
        signal.signal(signum, signal.SIG_IGN)


def _fork_and_report(connection: socket.socket, later: list[str]) -> None:
    """Fork ranks, and say when they end, until the launcher hangs up. Raises ConnectionError where it is gone.

    later: modules to import while there is nothing else to do.
    """
    gc.freeze()  # the collector then writes to no page that the forks share
    processes.read_initially_ignored_signals()
    ignore_signals()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _do_nothing)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    keys: dict[int, str] = {}  # of the ranks that run, by process id
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(read_end, selectors.EVENT_READ)

    def forget_parents_things() -> None:
        signal.set_wakeup_fd(-1)
        selector.close()
        for descriptor in (connection.fileno(), read_end, write_end):
            os.close(descriptor)

    while True:
        ready = [key.fileobj for key, _ in selector.select(_WARM_IDLE_SECONDS if later else None)]
        if not ready and later:
            import_modules([later.pop(0)])
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
            except OSError as error:  # no processes, or no memory, are left: the round fails, this process goes on
                words = f"pacekeeper: the process of rank {start.rank} cannot be forked: {error}\n"
                os.write(descriptors[1], words.encode())
                news: dict[str, object] = {"exited": {"key": start.key, "code": 1}}
            else:
                keys[pid] = start.key
                news = {"forked": {"key": start.key, "pid": pid}}
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(json.dumps(news).encode())


def _fork_rank(start: RankStart, files: Sequence[int], forget_parents_things: Callable[[], None]) -> int:
    warm = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _exit_on_return(files[1]):
            forget_parents_things()
            run_rank(start, warm, *files)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it too: whoever comes first, the group is there from now on
    return pid


@contextlib.contextmanager
def _exit_on_return(stderr: int = 2) -> Iterator[None]:
    """Inside a forked process: it ends here, whatever happens. What lies above on the stack is its parent's: cleaning
    up there would remove what the parent works with.

    stderr: where to say why; it may have become descriptor 2 by then.
    """
    try:
        target = os.fstat(stderr)
        try:
            yield
        except Exception:
            words = traceback.format_exc().encode()
            descriptor = 2 if os.path.samestat(os.fstat(2), target) else stderr
            os.write(descriptor, words)
    finally:
        os._exit(1)


def _reap_ended_ranks(keys: dict[int, str]) -> Iterator[tuple[int, int]]:
    """(process id, exit code) of ranks that have ended; other adopted children are reaped on the way."""
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
    """A handler, so that the signal arrives at the wake-up file."""

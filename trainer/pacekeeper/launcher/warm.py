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

from . import processes
from .rank import RankStart, run_rank

PREIMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torch._dynamo",  # an optimizer's first zero_grad() imports it
    "pacekeeper.job",
)
"""What training scripts import, and what torch itself imports at first use."""

_MESSAGE_BYTES = 1 << 20


def log_as_launcher() -> None:
    """Has this process, and all that it forks, write the launcher's log."""
    logging.basicConfig(level=logging.INFO, format="pacekeeper %(asctime)s %(message)s", datefmt="%H:%M:%S")


def preimport(names: Sequence[str] = PREIMPORTS) -> None:
    """Imports what the ranks will need. What is not installed, no rank can need."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@dataclass(frozen=True)
class Forked:
    """The rank with this key runs as process `pid`, which leads its process group."""

    key: str
    pid: int


@dataclass(frozen=True)
class Exited:
    """The rank with this key has ended; a negative code is the signal."""

    key: str
    code: int


class Warm:
    """The launcher's handle on its warm process."""

    def __init__(self, pid: int, connection: socket.socket, ready: bool = True) -> None:
        self.pid = pid
        self.connection = connection  # non-blocking: readable when there is news
        self.ready = ready
        """Whether it has imported all; it takes orders before."""
        self.started = time.monotonic()

    def fork(self, start: RankStart, stdout: int, stderr: int) -> None:
        """Orders a rank with these two files as its output; `news` tells its process id, or that there is nobody to
        fork it."""
        message = json.dumps({"rank": asdict(start)}).encode()
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.connection, [message], [stdout, stderr])

    def news(self) -> Iterator[Forked | Exited]:
        """What has happened since the last call. Raises EOFError when the warm process is gone."""
        while True:
            try:
                message = self.connection.recv(_MESSAGE_BYTES)
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
                yield Forked(**content["forked"]) if "forked" in content else Exited(**content["exited"])

    def bury(self) -> str:
        """How it has ended, once `news` says so; it is nobody's child any more."""
        os.kill(self.pid, signal.SIGKILL)  # of no effect on who has ended, and an end of who has only hung up
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def start_warm() -> Warm:
    """Forks the warm process. The caller must still be single-threaded, and has imported what the ranks need."""
    ours, theirs = _connection()
    gc.collect()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        with _never_returning():
            ours.close()
            processes.die_with_parent(launcher)
            _serve(theirs)
    theirs.close()
    return Warm(pid, ours)


def start_warm_anew() -> Warm:
    """The same by a caller that has threads: another interpreter, which takes some seconds to import all again."""
    ours, theirs = _connection()
    theirs.set_inheritable(True)
    given = json.dumps({"parent": os.getpid(), "connection": theirs.fileno()})
    command = [sys.executable, "-c", _ANEW, json.dumps(sys.path), __name__, given]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    theirs.close()
    return Warm(pid, ours, ready=False)


_ANEW = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve_anew(**json.loads(sys.argv[3]))
"""
"""With the launcher's own path: ranks are to find what they have found before."""


def serve_anew(parent: int, connection: int) -> NoReturn:
    """The life of a warm process that was not forked. connection: its end of the socket pair."""
    processes.die_with_parent(parent)
    log_as_launcher()
    preimport()
    gc.collect()
    theirs = socket.socket(fileno=connection)
    theirs.set_inheritable(False)
    theirs.send(json.dumps({"ready": True}).encode())
    _serve(theirs)


def _connection() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the warm process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    ours.setblocking(False)
    return ours, theirs


def _serve(connection: socket.socket) -> NoReturn:
    """The warm process's life: fork ranks, and say when they end."""
    gc.freeze()  # the collector then writes to no page that the forks share
    # A terminal's Ctrl-C reaches the whole group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        ready = [key.fileobj for key, _ in selector.select()]
        if read_end in ready:
            os.read(read_end, 4096)
            for pid, code in _ended(keys):
                connection.send(json.dumps({"exited": {"key": keys.pop(pid), "code": code}}).encode())
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
            if not message:
                os._exit(0)  # the launcher is gone; the ranks go with this process
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


def _fork_rank(start: RankStart, output: Sequence[int], forget_parents_things: Callable[[], None]) -> int:
    warm = os.getpid()
    pid = os.fork()
    if pid == 0:
        stdout, stderr = output
        with _never_returning(stderr):
            forget_parents_things()
            run_rank(start, warm, stdout, stderr)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it too: whoever comes first, the group is there from now on
    return pid


@contextlib.contextmanager
def _never_returning(stderr: int = 2) -> Iterator[None]:
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


def _ended(keys: dict[int, str]) -> Iterator[tuple[int, int]]:
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

"""The warm process: it has imported torch and forks ranks on command, so that a round costs a fork, not an import.

It stays single-threaded for ever and never touches CUDA or a multi-threaded operation, because a fork takes over only
the thread that forks. The launcher forks it before it starts anything else itself, and speaks with it over a socket
pair.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
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

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection  # non-blocking: readable when there is news

    def fork(self, start: RankStart, stdout: int, stderr: int) -> None:
        """Orders a rank with these two files as its output; `news` tells its process id."""
        message = json.dumps({"rank": asdict(start)}).encode()
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
            yield Forked(**content["forked"]) if "forked" in content else Exited(**content["exited"])


def start_warm() -> Warm:
    """Forks the warm process. The caller must still be single-threaded, and has imported what the ranks need."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    gc.collect()
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # the collector then writes to no page that the forks share
        ours.close()
        _serve(theirs)
    theirs.close()
    ours.setblocking(False)
    return Warm(pid, ours)


def _serve(connection: socket.socket) -> NoReturn:
    """The warm process's life: fork ranks, and say when they end."""
    processes.die_with_parent()
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
            pid = _fork_rank(start, descriptors, forget_parents_things)
            keys[pid] = start.key
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(json.dumps({"forked": {"key": start.key, "pid": pid}}).encode())


def _fork_rank(start: RankStart, output: Sequence[int], forget_parents_things: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        stdout, stderr = output
        forget_parents_things()
        run_rank(start, stdout, stderr)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it too: whoever comes first, the group is there from now on
    return pid


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

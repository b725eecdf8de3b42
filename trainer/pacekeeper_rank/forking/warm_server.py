"""The warm process: it has imported torch and forks ranks on command, so that a round costs a fork, not an import.

It stays single-threaded and never uses CUDA or multi-threaded operations, because a fork keeps only the calling thread.
It is a fork of the launcher, or a process of its own, whose interpreter may be another one. It communicates with the
launcher over a socket pair. If it exits, so do its ranks.
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
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from .handled_signals import read_handled_signals
from .process_setup import die_with_parent, read_initially_ignored_signals
from .rank import run_rank
from .rank_start import RankStart

WARM_MESSAGE_BYTES = 1 << 20
STORE_TIMEOUT_SECONDS = 300.0
_WARM_IDLE_SECONDS = 0.2
"""After this time without a command, the warm process imports what the next ranks will need."""
_MAX_FILES = 3
"""Files that come with a command."""


def serve_spawned_process(parent: int, connection: int, names: Sequence[str]) -> NoReturn:
    """Run a warm process that was spawned. `connection`: its end of the socket pair; `names`: the modules to import."""
    die_with_parent(parent)
    read_initially_ignored_signals()
    ignore_signals()
    import_modules(names)
    gc.collect()
    warm_end = socket.socket(fileno=connection)
    warm_end.set_inheritable(False)
    warm_end.send(json.dumps({"ready": True}).encode())
    serve_launcher(warm_end)


def import_modules(names: Sequence[str]) -> None:
    """Import what the ranks will need. Failures are ignored: the rank's own import raises them again."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def serve_launcher(connection: socket.socket, deferred_modules: Sequence[str] = ()) -> NoReturn:
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
    for signum in read_handled_signals():
        signal.signal(signum, signal.SIG_IGN)


def _fork_and_report(connection: socket.socket, deferred_modules: list[str]) -> None:
    """Fork ranks, and report their exits, until the launcher closes the connection. Raises ConnectionError if it exits.

    `deferred_modules`: modules to import while there is nothing else to do.
    """
    gc.freeze()  # the collector then does not write to pages that the forks share
    read_initially_ignored_signals()
    ignore_signals()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _do_nothing)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    keys: dict[int, str] = {}  # of the running ranks, by process ID
    stores: socket.socket | None = None  # connection to the process with the stores
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(read_end, selectors.EVENT_READ)

    def forget_parents_things() -> None:
        signal.set_wakeup_fd(-1)
        selector.close()
        for descriptor in (connection.fileno(), read_end, write_end):
            os.close(descriptor)
        if stores is not None:
            stores.close()

    while True:
        ready = [key.fileobj for key, _ in selector.select(_WARM_IDLE_SECONDS if deferred_modules else None)]
        if not ready and deferred_modules:
            import_modules([deferred_modules.pop(0)])
            gc.freeze()
        if read_end in ready:
            os.read(read_end, 4096)
            for pid, code in _reap_children():
                if pid in keys:
                    connection.send(json.dumps({"exited": {"key": keys.pop(pid), "code": code}}).encode())
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, WARM_MESSAGE_BYTES, _MAX_FILES)
            if not message:
                return
            command = json.loads(message)
            if "store" in command:
                stores = stores or _fork_store_process(forget_parents_things)
                socket.send_fds(stores, [message], descriptors)
            else:
                start = RankStart(**command["rank"])
                event = _start_rank(start, descriptors, keys, forget_parents_things)
                connection.send(json.dumps(event).encode())
            for descriptor in descriptors:
                os.close(descriptor)


def _start_rank(
    start: RankStart, files: Sequence[int], keys: dict[int, str], forget_parents_things: Callable[[], None]
) -> dict[str, object]:
    """Fork a rank, and return the event. `keys`: of the running ranks, by process ID; the new one is added."""
    try:
        pid = _fork_rank(start, files, forget_parents_things)
    except OSError as error:  # no process slots or memory are left: the round fails, this process continues
        text = f"pacekeeper: the process of rank {start.rank} cannot be forked: {error}\n"
        os.write(files[1], text.encode())
        return {"exited": {"key": start.key, "code": 1}}
    keys[pid] = start.key
    return {"forked": {"key": start.key, "pid": pid}}


def _fork_rank(start: RankStart, files: Sequence[int], forget_parents_things: Callable[[], None]) -> int:
    warm_pid = os.getpid()
    pid = fork_without_warning()
    if pid == 0:
        with exit_on_return(files[1]):
            forget_parents_things()
            run_rank(start, warm_pid, *files)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # the child does it, too: the group exists from the first of both calls on
    return pid


def _fork_store_process(forget_parents_things: Callable[[], None]) -> socket.socket:
    """Fork the process that serves the ranks' store of each round. Return the connection for the requests."""
    warm_end, store_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warm_pid = os.getpid()
    if fork_without_warning() == 0:
        with exit_on_return():
            die_with_parent(warm_pid)
            forget_parents_things()
            warm_end.close()
            _serve_stores(store_end)
    store_end.close()
    return warm_end


def _serve_stores(connection: socket.socket) -> None:
    """Replace the store at each request. One process has all of them: its first one looks up the host's name.

    A request has two files: the listener, and a pipe that receives a byte once the previous store is closed.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

    options: dict[str, Any] = {"timeout": timedelta(seconds=STORE_TIMEOUT_SECONDS), "wait_for_workers": False}
    if torch.__version__ < "2.5":  # its newer server takes no listener; the version compares as such
        options["use_libuv"] = False
    store = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, WARM_MESSAGE_BYTES, _MAX_FILES)
        if not message:
            return
        store = None  # it accepts no more at a port that the next one may get
        with contextlib.suppress(BrokenPipeError):  # the launcher no longer waits
            os.write(descriptors[1], b".")
        os.close(descriptors[1])
        with socket.socket(fileno=os.dup(descriptors[0])) as listener:
            port = listener.getsockname()[1]
        address = json.loads(message)["store"]["address"]
        store = TCPStore(address, port, is_master=True, master_listen_fd=descriptors[0], **options)  # noqa: F841  # its thread serves


def fork_without_warning() -> int:
    """Fork this process, as `os.fork`. Raises OSError.

    From Python 3.12 on, it warns of threads, such as those of OpenBLAS. With the user's `-W error`, that would raise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


@contextlib.contextmanager
def exit_on_return(stderr: int = 2) -> Iterator[None]:
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


def _reap_children() -> Iterator[tuple[int, int]]:
    """Yield (process ID, exit code) of children that have exited, adopted ones included."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _do_nothing(*_: object) -> None:
    """Do nothing. A handler must exist for the signal to reach the wake-up file."""

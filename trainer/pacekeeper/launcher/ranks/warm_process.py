"""The launcher's side of the warm process (`pacekeeper_rank.forking.warm_server`).

The launcher forks it before it starts anything else. Once the launcher has threads, or if the ranks have another
interpreter, it spawns it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pacekeeper.watch.payload import PACKAGE_FOLDER, PAYLOAD_PACKAGE, build_watched_environment
from pacekeeper_rank.forking.process_setup import die_with_parent
from pacekeeper_rank.forking.rank_start import RankStart
from pacekeeper_rank.forking.warm_server import WARM_MESSAGE_BYTES, exit_on_return, serve_launcher

from .output_writer import LogStream
from .script_imports import ImportNeeds


@dataclass(frozen=True)
class RankInterpreter:
    """The interpreter of the ranks, if it is not the launcher's. It needs torch, and no package of Pacekeeper."""

    path: str
    payload: Path
    """The folder with the library that the ranks load (`pacekeeper.watch.payload`)."""
    options: tuple[str, ...] = ()
    """The interpreter's own, such as `-O`."""


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
    for name in ("pacekeeper", "pacekeeper_analysis", "pacekeeper_rank"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def redirect_log(stream: CurrentStderr | LogStream) -> None:
    """Write this process's log to the stream. `configure_launcher_log` must have been called."""
    for handler in logging.getLogger("pacekeeper").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


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
        self,
        pid: int,
        connection: socket.socket,
        ready: bool = True,
        import_needs: ImportNeeds | None = None,
        interpreter: RankInterpreter | None = None,
        replaces_another: bool = False,
    ) -> None:
        self.pid = pid
        self.replaces_another = replaces_another
        self.interpreter = interpreter
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

    def open_store(self, address: str, listener: socket.socket, patience_seconds: float = 0.0) -> None:
        """Request a new store for the ranks of the next round, in a process of its own. It replaces the previous one.

        Ranks can connect to `listener` at once: their connections wait until the store accepts them. If the previous
        store has the same listener, it would accept them until it is closed: `patience_seconds` waits for that.
        """
        message = json.dumps({"store": {"address": address}}).encode()
        closed, closing = os.pipe()
        poll = select.poll()
        poll.register(closed, select.POLLIN)
        try:
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self.connection, [message], [listener.fileno(), closing])
                poll.poll(1000 * patience_seconds)
        finally:
            os.close(closed)
            os.close(closing)

    def read_events(self) -> Iterator[RankForked | RankExited]:
        """Yield the events since the last call. Raises EOFError if the warm process has exited."""
        while True:
            try:
                message = self.connection.recv(WARM_MESSAGE_BYTES)
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
        with exit_on_return():
            launcher_end.close()
            die_with_parent(launcher_pid)
            serve_launcher(warm_end, import_needs.deferred_modules if import_needs else ())
    warm_end.close()
    return WarmProcess(pid, launcher_end, import_needs=import_needs)


def spawn_warm_process(
    import_needs: ImportNeeds | None = None,
    interpreter: RankInterpreter | None = None,
    *,
    replaces_another: bool = False,
) -> WarmProcess:
    """Spawn a warm process: a new interpreter, which imports everything itself.

    `interpreter` None: the launcher's. `replaces_another`: the previous one has exited.

    Raises OSError if the interpreter cannot be executed.
    """
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
    environment: Mapping[str, str] = os.environ
    if interpreter is None:
        command = [sys.executable, "-c", _SPAWN_CODE, json.dumps(sys.path), arguments]
    else:
        package = interpreter.payload / PACKAGE_FOLDER / PAYLOAD_PACKAGE
        command = [interpreter.path, *interpreter.options, "-c", _SPAWN_FROM_PAYLOAD_CODE, str(package), arguments]
        environment = build_watched_environment(os.environ, interpreter.payload)
    try:
        pid = os.posix_spawnp(command[0], command, environment)
    finally:
        warm_end.close()
    return WarmProcess(pid, launcher_end, False, import_needs, interpreter, replaces_another)


_SPAWN_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pacekeeper.launcher.ranks.warm_process import configure_launcher_log
from pacekeeper_rank.forking.warm_server import serve_spawned_process
configure_launcher_log()
serve_spawned_process(**json.loads(sys.argv[2]))
"""
"""Code of the new interpreter. It uses the launcher's sys.path, so that ranks find the same modules as before."""
_SPAWN_FROM_PAYLOAD_CODE = f"""
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
if sys.path[:1] == [""]:
    del sys.path[0]
if "{PAYLOAD_PACKAGE}" not in sys.modules:
    spec = spec_from_file_location(
        "{PAYLOAD_PACKAGE}", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
    )
    sys.modules["{PAYLOAD_PACKAGE}"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["{PAYLOAD_PACKAGE}"])
from {PAYLOAD_PACKAGE}.forking.warm_server import serve_spawned_process
serve_spawned_process(**json.loads(sys.argv[2]))
"""
"""The same for another interpreter, which has its own sys.path. A script finds no folder on it for being `-c`."""


def _open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the launcher's end and the warm process's end."""
    launcher_end, warm_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (launcher_end, warm_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WARM_MESSAGE_BYTES)
    launcher_end.setblocking(False)
    return launcher_end, warm_end

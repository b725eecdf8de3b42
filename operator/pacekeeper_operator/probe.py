"""What a probe pod runs on a node: it ends well if the node can be used, and says how fast the node is.

That it runs at all shows that kubelet, container runtime and image are well. Its figures are one line of JSON in the
pod's termination message; whether they are slow is not said here, since only other nodes can tell: those whose probe
pods this one measures the way to (`--peer`), and those that measure the way to this one (`--guests`).
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NODE_PROBE_TIMEOUT_SECONDS = 20
NODE_PROBE_PORT = 9465
"""Where a probe pod lets its guests measure the way to it."""
PROBE_SECRET_VARIABLE = "PACEKEEPER_PROBE_SECRET"
"""Environment variable: what the probe pods of one circle show each other."""
TERMINATION_LOG = Path("/dev/termination-log")

MAX_TIMED_CORES = 8
"""So many cores are timed: a node of two hundred would take a minute. They are drawn, or somebody could keep just their
hardware siblings busy."""
WORK_PIECE_ROUNDS = 60_000
"""Rounds of a loop, about 3 ms."""
WORK_TIMING_TRIES = 5
CONTINUOUS_WORK_PIECES = 300
"""Of work in a row: many periods (100 ms, mostly) of a quota that somebody has set."""
MEMORY_BUFFER_BYTES = 64 << 20
MEMORY_CHUNK_BYTES = 1 << 20
MEMORY_PATTERNS = (b"\x00", b"\xff", b"\x55", b"\xaa")
LINK_BLOCK_BYTES, LINK_BLOCK_SECONDS = 8 << 20, 0.5
"""Of a slow way as much of a block is measured as comes through in time."""
LINK_BLOCKS, MIN_LINK_MEASURE_SECONDS, MAX_LINK_MEASURE_SECONDS = 3, 0.3, 2.0
"""A throughput is the best of so many blocks: of more on a fast way, where each is over in a moment and another process
may have had the core just then; of fewer on a slow one, which nobody's moment explains."""
PINGS_PER_LINK = 50
HELLO_TIMEOUT_SECONDS = 2.0
INBOUND_PEER_WAIT_SECONDS = 40.0
"""A guest on a slow node takes its time: without its host nobody would see how slow."""
MAX_INBOUND_PEERS = 64
_FRAME = struct.Struct("!I")
_FRAME_BYTES = 64 << 10
_SOCKET_BYTES = 1 << 20
"""Of a socket's buffers: what they hold of a slow way must be through soon, too."""


NETWORK, DRIVER, GPUS, MEMORY = "network", "driver", "gpus", "memory"
"""Names of the checks, in the order in which they are made. `driver`: nvidia-smi works in the pod."""


class NodeUnfit(Exception):
    """The node cannot be used yet; the message says why."""

    def __init__(self, message: str, check: str) -> None:
        super().__init__(message)
        self.check = check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pacekeeper_operator.probe", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs of the node the pod was given")
    parser.add_argument("--peer", action="append", default=[], metavar="NODE=ADDRESS", help="measure the way there")
    parser.add_argument("--guests", type=int, default=0, help="so many probe pods measure the way here")
    parser.add_argument("--wait", type=float, default=INBOUND_PEER_WAIT_SECONDS, help="so long guests are waited for")
    arguments = parser.parse_args()
    peers = [peer.partition("=")[::2] for peer in arguments.peer]
    secret = os.environ.get(PROBE_SECRET_VARIABLE, "")
    try:
        with NodeProbeServer(secret, arguments.guests) if arguments.guests else contextlib.nullcontext() as host:
            check_network(os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"]))
            if arguments.gpus:
                check_gpus(count_physical_gpus(arguments.gpus, os.environ), _run_nvidia_smi())
            figures = {**measure_node_speed(), "links": list(_measure_links(peers, secret)), "gpus": arguments.gpus}
            if host is not None:
                host.serve(arguments.wait)
    except NodeUnfit as error:
        print(error, file=sys.stderr)
        _write_result({"unfit": str(error)[:1000], "check": error.check, "gpus": arguments.gpus})
        return 1
    _write_result(figures)
    return 0


def check_network(host: str, port: int) -> None:
    """The API server's service answers: the pod has a network, and the node routes services."""
    try:
        socket.create_connection((host, port), timeout=NODE_PROBE_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise NodeUnfit(f"the API server's service {host}:{port} cannot be reached: {error}", NETWORK) from error


def count_physical_gpus(given: int, environment: Mapping[str, str]) -> int:
    """How many GPUs nvidia-smi is to list. Of a GPU that pods share, or that is cut into MIG instances, several of the
    `given` may be the same one: the device plugin says which (unless it hands them over in another way)."""
    named = {name.strip() for name in environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")}
    if any(name.startswith("MIG-") for name in named):
        return 1
    uuids = {name for name in named if name.startswith("GPU-")}
    return len(uuids) if uuids == named else given


def check_gpus(expected: int, listed: str) -> None:
    """All GPUs answer and none has memory errors that could not be corrected. `listed`: lines of `uuid, errors`."""
    gpus = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    if len(gpus) < expected:
        raise NodeUnfit(f"{len(gpus)} of {expected} GPUs answer", GPUS if gpus else DRIVER)
    for uuid, errors in gpus:
        if errors.isdecimal() and int(errors) > 0:
            raise NodeUnfit(f"{uuid} has {errors} uncorrected memory errors since its last reset", GPUS)


def measure_node_speed() -> dict[str, float]:
    """Of cores and memory. Idle cores count as they were while others left fewest of them idle: nobody is busy for the
    one figure only, unseen."""
    found, watch = measure_compute(), CpuTimer()
    memory = check_memory()
    idle = min(found["idle_cores"], found["cores"] * watch.compute_spare_share())
    return {**found, "memory_bytes_per_second": memory, "idle_cores": idle}


def measure_compute() -> dict[str, float]:
    """How fast a fixed piece of work is done on the node's cores, in seconds; and for which share of the time it was
    kept from running by nobody's work, as a quota, a cap of the cloud's or a throttled machine does.

    What neighbours take of the cores counts for nothing: on a core by the thread's own processor time, best of several;
    beyond that only time counts in which the node had cores to spare, or a quota stood against the pod.
    """
    watch = CpuTimer()
    cores = _time_cores()
    spared = watch.compute_spare_share()
    watch, throttled = CpuTimer(), _read_throttled_seconds()
    for _ in range(CONTINUOUS_WORK_PIECES):
        _run_work_piece()
    wall, ran, idle = watch.wall_seconds(), watch.thread_seconds(), watch.usable_idle_seconds()
    throttled = _read_throttled_seconds() - throttled
    held_back = max(0.0, min(wall - ran, max(idle, throttled))) / wall
    return {
        "core_seconds": statistics.median(cores),
        "slowest_core_seconds": max(cores),
        "cores": len(cores),
        "held_back": held_back,
        "idle_cores": len(cores) * min(spared, watch.compute_spare_share()),
        "throttled": min(1.0, throttled / wall),
        "pressure": _read_cpu_pressure(),
        "frequency": _read_frequency_share(),
    }


class CpuTimer:
    """What the node has left to the calling thread since this was made."""

    def __init__(self) -> None:
        self._began, self._ran, self._idle = time.perf_counter(), time.thread_time(), _read_idle_seconds()

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began

    def thread_seconds(self) -> float:
        return time.thread_time() - self._ran

    def usable_idle_seconds(self) -> float:
        """Seconds of the cores that the pod may use: what is idle of others is nothing to it."""
        idle, usable = self._measure_idle_seconds(), os.sched_getaffinity(0)
        return sum(seconds for core, seconds in idle.items() if core in usable)

    def compute_spare_share(self) -> float:
        """Share of the node's cores that nobody else has used, or of those that the pod may use, where that is less;
        1, where nobody tells."""
        idle, usable, wall, ran = self._measure_idle_seconds(), os.sched_getaffinity(0), self.wall_seconds(), self.thread_seconds()
        groups = [list(idle.values()), [seconds for core, seconds in idle.items() if core in usable]]
        return min([1.0, *((sum(group) + ran) / (len(group) * wall) for group in groups if group)])

    def _measure_idle_seconds(self) -> dict[int, float]:
        return {core: seconds - self._idle.get(core, seconds) for core, seconds in _read_idle_seconds().items()}


def check_memory() -> float:
    """Patterns are written into a buffer and read back. Bytes a second of the best pass over it."""
    buffer = bytearray(MEMORY_BUFFER_BYTES)
    view = memoryview(buffer)
    best = 0.0
    for pattern in MEMORY_PATTERNS:
        chunk = pattern * MEMORY_CHUNK_BYTES
        began = time.thread_time()
        for start in range(0, MEMORY_BUFFER_BYTES, MEMORY_CHUNK_BYTES):
            view[start : start + MEMORY_CHUNK_BYTES] = chunk
        best = max(best, MEMORY_BUFFER_BYTES / max(time.thread_time() - began, 1e-6))
        for start in range(0, MEMORY_BUFFER_BYTES, MEMORY_CHUNK_BYTES):
            if bytes(view[start : start + MEMORY_CHUNK_BYTES]) != chunk:
                raise NodeUnfit(
                    f"memory does not keep what is written: pattern {pattern.hex()} at {start} of a buffer", MEMORY
                )
    return best


@dataclass(frozen=True)
class LinkSpeed:
    """The way to a peer. Bytes a second, best of several; seconds there and back, the median."""

    up: float
    down: float
    ping: float


def measure_link(address: str, port: int, secret: str) -> LinkSpeed:
    """The way to the probe pod that hosts there. Raises OSError where it cannot be measured."""
    with socket.create_connection((address, port), timeout=NODE_PROBE_TIMEOUT_SECONDS) as connection:
        _configure_socket(connection)
        connection.sendall(_build_hello(secret))
        if _receive_exactly(connection, 1) != b"+":
            raise OSError("the peer does not know the secret")
        pings = []
        for _ in range(PINGS_PER_LINK):
            sent = time.perf_counter()
            connection.sendall(b"p")
            _receive_exactly(connection, 1)
            pings.append(time.perf_counter() - sent)
        up: list[float] = []
        down: list[float] = []
        began = time.perf_counter()
        while not up or time.perf_counter() - began < (MAX_LINK_MEASURE_SECONDS if len(up) < LINK_BLOCKS else MIN_LINK_MEASURE_SECONDS):
            up.append(_measure_rate(partial(_upload_block, connection)))
            down.append(_measure_rate(partial(_download_block, connection)))
        connection.sendall(b".")
    return LinkSpeed(max(up), max(down), statistics.median(pings))


class NodeProbeServer:
    """Lets guests measure the way here, one at a time: two would share it.

    Whoever calls before `serve` waits: what a guest takes of the processor would be held against the node.
    """

    def __init__(self, secret: str, guests: int, port: int = NODE_PROBE_PORT) -> None:
        self._hello = _build_hello(secret)
        self._remaining_peers = guests
        self._served = threading.Condition()
        self._turn = threading.Lock()
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", port), family=family, backlog=MAX_INBOUND_PEERS, dualstack_ipv6=family == socket.AF_INET6
        )
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> NodeProbeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def serve(self, seconds: float) -> None:
        """Until all guests have been served, and for no longer than so many seconds."""
        threading.Thread(target=self._listen, daemon=True).start()
        with self._served:
            self._served.wait_for(lambda: self._remaining_peers <= 0, timeout=seconds)

    def _listen(self) -> None:
        strangers = threading.Semaphore(MAX_INBOUND_PEERS)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if strangers.acquire(blocking=False):
                threading.Thread(target=self._serve_connection, args=(connection, strangers), daemon=True).start()
            else:
                connection.close()

    def _serve_connection(self, connection: socket.socket, strangers: threading.Semaphore) -> None:
        with strangers, connection, contextlib.suppress(OSError):
            _configure_socket(connection)
            connection.settimeout(HELLO_TIMEOUT_SECONDS)
            if not hmac.compare_digest(_receive_exactly(connection, len(self._hello)), self._hello):
                return
            connection.settimeout(NODE_PROBE_TIMEOUT_SECONDS)
            try:
                with self._turn:
                    connection.sendall(b"+")
                    _answer_requests(connection)
            finally:
                with self._served:
                    self._remaining_peers -= 1
                    self._served.notify_all()


def _answer_requests(connection: socket.socket) -> None:
    while True:
        match _receive_exactly(connection, 1):
            case b"p":
                connection.sendall(b"p")
            case b"u":
                _receive_block(connection)
                connection.sendall(b"+")
            case b"d":
                _send_block(connection)
            case _:
                return


def _measure_links(peers: Sequence[Sequence[str]], secret: str) -> Iterator[dict[str, Any]]:
    """A way that cannot be measured is left out: a policy may forbid it, and whether the network works at all is
    checked elsewhere."""
    for node, address in peers:
        try:
            link = measure_link(address, NODE_PROBE_PORT, secret)
        except OSError as error:
            print(f"the way to {node} at {address} cannot be measured: {error}", file=sys.stderr)
        else:
            yield {"peer": node, "up": link.up, "down": link.down, "ping": link.ping}


def _measure_rate(move: Callable[[], int]) -> float:
    """Bytes a second, there and confirmed: what still lies in a buffer has not come through."""
    began = time.perf_counter()
    count = move()
    return count / max(time.perf_counter() - began, 1e-6)


def _upload_block(connection: socket.socket) -> int:
    connection.sendall(b"u")
    count = _send_block(connection)
    _receive_exactly(connection, 1)
    return count


def _download_block(connection: socket.socket) -> int:
    connection.sendall(b"d")
    return _receive_block(connection)


def _send_block(connection: socket.socket) -> int:
    """In frames that begin with their length; an empty one ends it. Bytes."""
    frame = _FRAME.pack(_FRAME_BYTES) + bytes(_FRAME_BYTES)
    began, count = time.perf_counter(), 0
    while count < LINK_BLOCK_BYTES and time.perf_counter() - began < LINK_BLOCK_SECONDS:
        connection.sendall(frame)
        count += _FRAME_BYTES
    connection.sendall(_FRAME.pack(0))
    return count


def _receive_block(connection: socket.socket) -> int:
    count = 0
    while length := _FRAME.unpack(_receive_exactly(connection, _FRAME.size))[0]:
        if length > _FRAME_BYTES or count > LINK_BLOCK_BYTES:
            raise OSError("no frame of a block")
        count += len(_receive_exactly(connection, length))
    return count


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the peer has hung up")
        data += part
    return bytes(data)


def _configure_socket(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    connection.settimeout(NODE_PROBE_TIMEOUT_SECONDS)


def _build_hello(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"probe", "sha256")


def _time_cores() -> list[float]:
    """Processor time of a piece of work on each core (or some of them), best of several."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen = random.sample(allowed, min(MAX_TIMED_CORES, len(allowed)))
    times = []
    try:
        for core in chosen:
            os.sched_setaffinity(0, {core})
            times.append(min(_time_work(_run_work_piece) for _ in range(WORK_TIMING_TRIES)))
    finally:
        os.sched_setaffinity(0, allowed)
    return times


def _time_work(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _run_work_piece() -> int:
    value = 1
    for _ in range(WORK_PIECE_ROUNDS):
        value = value * 5 & 0xFFFFFFF
    return value


def _read_idle_seconds() -> dict[int, float]:
    """Of each core of the node, since it was started; what a hypervisor takes of them is none of its neighbours'."""
    found = {}
    for line in _read_file("/proc/stat").splitlines():
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal():
            ticks = [int(fields[i]) for i in (3, 4, 7) if i < len(fields)]  # idle, iowait, steal
            found[int(name[3:])] = sum(ticks) / os.sysconf("SC_CLK_TCK")
    return found


def _read_throttled_seconds() -> float:
    """For which a quota has stood against the pod, its own or one of a group that it is in (Linux 6.6 and later)."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu"):
        found = dict(line.split() for line in _read_file(f"{folder}/cpu.stat.local").splitlines())
        if "throttled_usec" in found:
            return int(found["throttled_usec"]) / 1e6
        if "throttled_time" in found:
            return int(found["throttled_time"]) / 1e9
    return 0.0


def _read_cpu_pressure() -> float:
    """Share of the last ten seconds in which something on the node waited for a core; 0 also where nobody tells."""
    words = _read_file("/proc/pressure/cpu").split()
    found = next((word for word in words if word.startswith("avg10=")), "avg10=0")
    return float(found.removeprefix("avg10=")) / 100


def _read_frequency_share() -> float:
    """Of the first core, over its highest; 0: nobody tells, as in most VMs."""
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    now, highest = _read_file(f"{folder}/scaling_cur_freq").strip(), _read_file(f"{folder}/cpuinfo_max_freq").strip()
    return int(now) / int(highest) if now.isdecimal() and highest.isdecimal() and int(highest) else 0.0


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _write_result(words: dict[str, Any]) -> None:
    line = json.dumps(words, separators=(",", ":"))
    print(line)
    with contextlib.suppress(OSError):
        TERMINATION_LOG.write_text(line)


def _run_nvidia_smi() -> str:
    """Which comes into the container with the GPUs."""
    query = "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NODE_PROBE_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeUnfit(f"nvidia-smi does not work: {error}", DRIVER) from error
    if done.returncode != 0:
        raise NodeUnfit(f"nvidia-smi: {(done.stdout + done.stderr).strip()}", DRIVER)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

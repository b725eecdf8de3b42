"""What a probe pod runs on a node: it exits with status 0 if the node can be used, and reports how fast the node is.

That it runs at all proves that kubelet, container runtime, and image work. Its measurements are one line of JSON in the
pod's termination message. Whether they are slow is decided elsewhere, by comparison with other nodes. This probe pod
measures the links to some of them (`--peer`), and others measure the link to this one
(`--inbound-peers`). Standard library only.
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
"""Port at which a probe pod lets inbound peers measure the link to it."""
PROBE_SECRET_VARIABLE = "PACEKEEPER_PROBE_SECRET"
"""Environment variable with the secret by which the probe pods of one group authenticate."""
TERMINATION_LOG = Path("/dev/termination-log")

MAX_TIMED_CORES = 8
"""Maximum number of cores that are timed; 200 cores would take a minute.

They are drawn at random. Otherwise a tenant could keep just their hardware siblings busy.
"""
WORK_PIECE_ROUNDS = 60_000
"""Iterations of a loop, about 3 ms."""
WORK_TIMING_TRIES = 5
CONTINUOUS_WORK_PIECES = 300
"""Pieces of consecutive work: they span many periods (mostly 100 ms) of a CPU quota."""
MEMORY_BUFFER_BYTES = 64 << 20
MEMORY_CHUNK_BYTES = 1 << 20
MEMORY_PATTERNS = (b"\x00", b"\xff", b"\x55", b"\xaa")
LINK_BLOCK_BYTES, LINK_BLOCK_SECONDS = 8 << 20, 0.5
"""Bytes and seconds that limit one block; on a slow link, as much is measured as arrives in that time."""
LINK_BLOCKS, MIN_LINK_MEASURE_SECONDS, MAX_LINK_MEASURE_SECONDS = 3, 0.3, 2.0
"""Number of blocks, and minimum and maximum seconds of a throughput measurement, which takes the best block.

A fast link needs more blocks: each is short, and another process may have used the core at that moment. A slow link
needs fewer, since a busy moment does not explain its blocks.
"""
PINGS_PER_LINK = 50
HELLO_TIMEOUT_SECONDS = 2.0
INBOUND_PEER_WAIT_SECONDS = 40.0
"""Seconds that inbound peers are waited for.

A peer on a slow node takes long, and without its server its slowness would go unnoticed.
"""
MAX_INBOUND_PEERS = 64
_FRAME = struct.Struct("!I")
_FRAME_BYTES = 64 << 10
_SOCKET_BYTES = 1 << 20
"""Size of a socket's send buffer: what it holds must drain soon on a slow link, too."""


NETWORK, DRIVER, GPUS, MEMORY = "network", "driver", "gpus", "memory"
"""Names of the checks, in the order in which they run. `driver`: nvidia-smi works in the pod."""


class NodeUnfit(Exception):
    """The node cannot be used; the message says why."""

    def __init__(self, message: str, check: str) -> None:
        super().__init__(message)
        self.check = check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pacekeeper_operator.node_probe", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs of the node the pod was given")
    parser.add_argument("--peer", action="append", default=[], metavar="NODE=ADDRESS", help="measure the link to it")
    parser.add_argument(
        "--inbound-peers", type=int, default=0, help="number of probe pods that measure the link to this one"
    )
    parser.add_argument("--wait", type=float, default=INBOUND_PEER_WAIT_SECONDS, help="maximum seconds to wait")
    arguments = parser.parse_args()
    peers = [peer.partition("=")[::2] for peer in arguments.peer]
    secret = os.environ.get(PROBE_SECRET_VARIABLE, "")
    try:
        inbound = arguments.inbound_peers
        with NodeProbeServer(secret, inbound) if inbound else contextlib.nullcontext() as server:
            check_network(os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"]))
            if arguments.gpus:
                check_gpus(count_physical_gpus(arguments.gpus, os.environ), _run_nvidia_smi())
            measurements = {
                **measure_node_speed(),
                "links": list(_measure_links(peers, secret)),
                "gpus": arguments.gpus,
            }
            if server is not None:
                server.serve(arguments.wait)
    except NodeUnfit as error:
        print(error, file=sys.stderr)
        _write_result({"unfit": str(error)[:1000], "check": error.check, "gpus": arguments.gpus})
        return 1
    _write_result(measurements)
    return 0


def check_network(host: str, port: int) -> None:
    """Raise NodeUnfit if the API server's service is unreachable.

    Then the pod has no network, or the node does not route services.
    """
    try:
        socket.create_connection((host, port), timeout=NODE_PROBE_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise NodeUnfit(f"the API server's service {host}:{port} cannot be reached: {error}", NETWORK) from error


def count_physical_gpus(given: int, environment: Mapping[str, str]) -> int:
    """Return how many GPUs nvidia-smi must list.

    If pods share a GPU, or it is split into MIG instances, several of the `given` ones may be the same. The device
    plugin reports which in the environment, unless it passes them in another way.
    """
    visible = {name.strip() for name in environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")}
    if any(name.startswith("MIG-") for name in visible):
        return 1
    uuids = {name for name in visible if name.startswith("GPU-")}
    return len(uuids) if uuids == visible else given


def check_gpus(expected: int, listed: str) -> None:
    """Raise NodeUnfit unless all GPUs respond without uncorrected memory errors. `listed`: lines of `uuid, errors`."""
    gpus = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    if len(gpus) < expected:
        raise NodeUnfit(f"{len(gpus)} of {expected} GPUs answer", GPUS if gpus else DRIVER)
    for uuid, errors in gpus:
        if errors.isdecimal() and int(errors) > 0:
            raise NodeUnfit(f"{uuid} has {errors} uncorrected memory errors since its last reset", GPUS)


def measure_node_speed() -> dict[str, float]:
    """Measure cores and memory.

    The number of idle cores is the lower one of the two measurements, so that load during only one of them is not
    missed.
    """
    speed, timer = measure_compute(), CpuTimer()
    memory = check_memory()
    idle = min(speed["idle_cores"], speed["cores"] * timer.compute_spare_share())
    return {**speed, "memory_bytes_per_second": memory, "idle_cores": idle}


def measure_compute() -> dict[str, float]:
    """Measure seconds per piece of work on the node's cores, and the share of time in which it was held back.

    The work is held back if it does not run although no other work uses the cores. Causes are a quota, a cap of the
    cloud, or a throttled machine. Load by neighbors does not count. A core's time is the thread's CPU time, the best of
    several tries. Beyond that, only time counts in which the node had idle cores, or a quota throttled the pod.
    """
    timer = CpuTimer()
    cores = _time_cores()
    spare_share = timer.compute_spare_share()
    timer, throttled = CpuTimer(), _read_throttled_seconds()
    for _ in range(CONTINUOUS_WORK_PIECES):
        _run_work_piece()
    wall, cpu_seconds, idle = timer.wall_seconds(), timer.thread_seconds(), timer.usable_idle_seconds()
    throttled = _read_throttled_seconds() - throttled
    held_back = max(0.0, min(wall - cpu_seconds, max(idle, throttled))) / wall
    results = {
        "core_seconds": statistics.median(cores),
        "slowest_core_seconds": max(cores),
        "cores": len(cores),
        "held_back": held_back,
        "idle_cores": len(cores) * min(spare_share, timer.compute_spare_share()),
        "throttled": min(1.0, throttled / wall),
        "pressure": _read_cpu_pressure(),
        "frequency": _read_frequency_share(),
    }
    return {name: value for name, value in results.items() if value is not None}


class CpuTimer:
    """The CPU time that the node left to the calling thread since this timer was created."""

    def __init__(self) -> None:
        self._began, self._ran, self._idle = time.perf_counter(), time.thread_time(), _read_idle_seconds()

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began

    def thread_seconds(self) -> float:
        return time.thread_time() - self._ran

    def usable_idle_seconds(self) -> float:
        """Return the idle seconds of the cores that the pod may use; it cannot use other idle cores."""
        idle, usable = self._measure_idle_seconds(), os.sched_getaffinity(0)
        return sum(seconds for core, seconds in idle.items() if core in usable)

    def compute_spare_share(self) -> float:
        """Return the share of the cores that no other process used; 1: unknown.

        It is the minimum over the node's cores and over the cores that the pod may use.
        """
        idle, usable, wall, cpu_seconds = (
            self._measure_idle_seconds(),
            os.sched_getaffinity(0),
            self.wall_seconds(),
            self.thread_seconds(),
        )
        groups = [list(idle.values()), [seconds for core, seconds in idle.items() if core in usable]]
        return min([1.0, *((sum(group) + cpu_seconds) / (len(group) * wall) for group in groups if group)])

    def _measure_idle_seconds(self) -> dict[int, float]:
        return {core: seconds - self._idle.get(core, seconds) for core, seconds in _read_idle_seconds().items()}


def check_memory() -> float:
    """Write patterns into a buffer, read them back, and return the bytes per second of the best pass.

    Raises NodeUnfit if a pattern changed.
    """
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
    """The link to a peer: bytes per second in both directions (best of several), and the median round-trip seconds."""

    up: float
    down: float
    ping: float


def measure_link(address: str, port: int, secret: str) -> LinkSpeed:
    """Measure the link to the probe pod that listens there. Raises OSError if it cannot be measured."""
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
        while not up or time.perf_counter() - began < (
            MAX_LINK_MEASURE_SECONDS if len(up) < LINK_BLOCKS else MIN_LINK_MEASURE_SECONDS
        ):
            up.append(_measure_rate(partial(_upload_block, connection)))
            down.append(_measure_rate(partial(_download_block, connection)))
        connection.sendall(b".")
    return LinkSpeed(max(up), max(down), statistics.median(pings))


class NodeProbeServer:
    """Lets inbound peers measure the link to this pod, one at a time, since two would share it.

    Peers that connect before `serve` wait. Otherwise the CPU time that they take would count against the node.
    """

    def __init__(self, secret: str, inbound_peers: int, port: int = NODE_PROBE_PORT) -> None:
        self._hello = _build_hello(secret)
        self._remaining_peers = inbound_peers
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
        """Serve until all inbound peers are done, for at most `seconds`."""
        threading.Thread(target=self._listen, daemon=True).start()
        with self._served:
            self._served.wait_for(lambda: self._remaining_peers <= 0, timeout=seconds)

    def _listen(self) -> None:
        slots = threading.Semaphore(MAX_INBOUND_PEERS)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if slots.acquire(blocking=False):
                threading.Thread(target=self._serve_connection, args=(connection, slots), daemon=True).start()
            else:
                connection.close()

    def _serve_connection(self, connection: socket.socket, slots: threading.Semaphore) -> None:
        with slots, connection, contextlib.suppress(OSError):
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
    """Yield the measured links. A link that cannot be measured is left out: a policy may forbid it.

    Whether the network works at all is checked elsewhere.
    """
    for node, address in peers:
        try:
            link = measure_link(address, NODE_PROBE_PORT, secret)
        except OSError as error:
            print(f"the link to {node} at {address} cannot be measured: {error}", file=sys.stderr)
        else:
            yield {"peer": node, "up": link.up, "down": link.down, "ping": link.ping}


def _measure_rate(move: Callable[[], int]) -> float:
    """Return the bytes per second until the receipt is confirmed: buffered data has not arrived yet."""
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
    """Send a block in frames with a length prefix; an empty frame ends it. Returns its bytes."""
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
            raise OSError("the peer closed the connection")
        data += part
    return bytes(data)


def _configure_socket(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    connection.settimeout(NODE_PROBE_TIMEOUT_SECONDS)


def _build_hello(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"probe", "sha256")


def _time_cores() -> list[float]:
    """Return the CPU seconds of a piece of work on each core (or some of them), best of several tries."""
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
    """Return each core's idle seconds since boot, steal included: neighbors do not cause what a hypervisor takes."""
    idle_seconds = {}
    for line in _read_file("/proc/stat").splitlines():
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal():
            ticks = [int(fields[i]) for i in (3, 4, 7) if i < len(fields)]  # idle, iowait, steal
            idle_seconds[int(name[3:])] = sum(ticks) / os.sysconf("SC_CLK_TCK")
    return idle_seconds


def _read_throttled_seconds() -> float:
    """Return the seconds for which a quota throttled the pod or one of its parent cgroups (Linux 6.6 and later)."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu"):
        counters = dict(line.split() for line in _read_file(f"{folder}/cpu.stat.local").splitlines())
        if "throttled_usec" in counters:
            return int(counters["throttled_usec"]) / 1e6
        if "throttled_time" in counters:
            return int(counters["throttled_time"]) / 1e9
    return 0.0


def _read_cpu_pressure() -> float | None:
    """Return the share of the last 10 s in which some task on the node waited for a core; None: unknown."""
    fields = _read_file("/proc/pressure/cpu").split()
    average = next((item for item in fields if item.startswith("avg10=")), None)
    return None if average is None else float(average.removeprefix("avg10=")) / 100


def _read_frequency_share() -> float | None:
    """Return the first core's frequency over its maximum; None: unknown, as in most VMs."""
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    now, highest = _read_file(f"{folder}/scaling_cur_freq").strip(), _read_file(f"{folder}/cpuinfo_max_freq").strip()
    return int(now) / int(highest) if now.isdecimal() and highest.isdecimal() and int(highest) else None


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _write_result(result: dict[str, Any]) -> None:
    line = json.dumps(result, separators=(",", ":"))
    print(line)
    with contextlib.suppress(OSError):
        TERMINATION_LOG.write_text(line)


def _run_nvidia_smi() -> str:
    """Run nvidia-smi, which the container gets together with the GPUs."""
    query = "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=NODE_PROBE_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeUnfit(f"nvidia-smi does not work: {error}", DRIVER) from error
    if completed.returncode != 0:
        raise NodeUnfit(f"nvidia-smi: {(completed.stdout + completed.stderr).strip()}", DRIVER)
    return completed.stdout


if __name__ == "__main__":
    sys.exit(main())

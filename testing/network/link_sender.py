"""One rank's traffic, the list of its sockets and its sidecar's samples, on a host of `namespaces.network`.

    python -m testing.network.link_sender FOLDER RANK all|next launched|watched ADDRESS…

The list is a launcher's, or the process monitor's of a watched container.

Sends 2 MB to each of its peers (the next one: a ring) ten times a second, samples the connections four times a second,
and prints the evidence once there are three windows; then, for each line that it reads, what is blocked two seconds
later.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pacekeeper.launcher.network.sockets import SocketFile
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.connection_sampler import LINK_WINDOW_COUNT, SAMPLES_PER_LINK_WINDOW, ConnectionSampler
from pacekeeper.watch.container import WatchedContainer
from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_rank.watching.process_monitor import ProcessMonitor
from pacekeeper_rank.watching.slot_lock import take_lock
from pacekeeper_rank.watching.watch_folder import WatchFolder, write_json

PORT = 5000
BYTES = 2_000_000
PERIOD, SAMPLE_SECONDS = 0.1, 0.25
BLOCKED_SAMPLES = 10


def main(folder: str, rank: int, shape: str, kind: str, addresses: Sequence[str]) -> None:
    listener = socket.create_server((addresses[rank], PORT), backlog=64)
    threading.Thread(target=_accept_connections, args=(listener,), daemon=True).start()
    peers = range(rank + 1, rank + (len(addresses) if shape == "all" else 2))
    for peer in peers:
        address = addresses[peer % len(addresses)]
        threading.Thread(target=_send_forever, args=(_connect_with_retries(address),), daemon=True).start()
    time.sleep(1.0)  # all are connected, and past their slow start
    build = build_watched_sampler if kind == "watched" else build_launched_sampler
    connections = build(Path(folder), rank, len(addresses))
    for _ in range(LINK_WINDOW_COUNT * SAMPLES_PER_LINK_WINDOW + 1):
        connections.sample(time.monotonic())
        time.sleep(SAMPLE_SECONDS)
    windows = [replace(window, early_bytes=None, early_busy_seconds=None) for window in connections.windows()]
    print(json.dumps(Evidence("why", f"w{rank}", 1, links=tuple(windows)).to_json()), flush=True)
    while sys.stdin.readline().strip():  # the others may not be done yet
        for _ in range(BLOCKED_SAMPLES):
            connections.sample(time.monotonic())
            time.sleep(SAMPLE_SECONDS)
        print(json.dumps([asdict(end) for end in connections.find_blocked(time.monotonic())]), flush=True)


def build_launched_sampler(folder: Path, rank: int, _world_size: int) -> ConnectionSampler:
    runtime = RuntimeFolder(folder).create()
    SocketFile(runtime.sockets).refresh({rank: os.getpid()}, now=0.0)
    return ConnectionSampler(runtime)


def build_watched_sampler(folder: Path, rank: int, world_size: int) -> ConnectionSampler:
    """Describe this process as a watched rank. The process monitor lists its sockets."""
    files = WatchFolder(folder).create()
    description = {"rank": rank, "world_size": world_size, "slot": 0, "pid": os.getpid(), "restart": 0}
    take_lock(files.lock(0))
    write_json(files.get_file("ranks", 0), {**description, "started_at": time.time(), "recording": "Pure"})
    ProcessMonitor(files).tick(0.0)
    container = WatchedContainer(folder, f"w{rank}")
    container.read(time.monotonic(), time.time())
    return ConnectionSampler(RuntimeFolder(folder), container.read_socket_ranks)


def _connect_with_retries(address: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, PORT))
        except OSError:
            time.sleep(0.02)


def _send_forever(connection: socket.socket) -> None:
    content = bytes(BYTES)
    while True:
        connection.sendall(content)
        time.sleep(PERIOD)


def _accept_connections(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_drain_connection, args=(connection,), daemon=True).start()


def _drain_connection(connection: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    while connection.recv_into(buffer):
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])

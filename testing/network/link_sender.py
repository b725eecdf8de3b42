"""One rank's traffic, its launcher's list of sockets and its sidecar's samples, on a host of `namespaces.network`.

    python -m testing.network.link_sender FOLDER RANK all|next ADDRESS…

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
from pacekeeper_analysis.protocol.reports import Evidence

PORT = 5000
BYTES = 2_000_000
PERIOD, SAMPLE_SECONDS = 0.1, 0.25
BLOCKED_SAMPLES = 10


def main(folder: str, rank: int, shape: str, addresses: Sequence[str]) -> None:
    runtime = RuntimeFolder(Path(folder)).create()
    listener = socket.create_server((addresses[rank], PORT), backlog=64)
    threading.Thread(target=_accept_connections, args=(listener,), daemon=True).start()
    peers = range(rank + 1, rank + (len(addresses) if shape == "all" else 2))
    for peer in peers:
        address = addresses[peer % len(addresses)]
        threading.Thread(target=_send_forever, args=(_connect_with_retries(address),), daemon=True).start()
    time.sleep(1.0)  # all are connected, and past their slow start
    SocketFile(runtime.sockets).refresh({rank: os.getpid()}, now=0.0)
    connections = ConnectionSampler(runtime)
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
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])

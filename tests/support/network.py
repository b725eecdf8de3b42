"""Ports for tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

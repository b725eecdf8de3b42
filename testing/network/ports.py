"""Ports for tests."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """A TCP port that nobody has, on any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

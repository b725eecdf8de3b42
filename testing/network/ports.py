"""Ports for tests."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """A TCP port that is unused on all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

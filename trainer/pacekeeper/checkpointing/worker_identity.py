"""Identity of the worker that a rank is on: its ranks share mounts and memory."""

from __future__ import annotations

import os
import socket


def identify_worker() -> str:
    """Return an identity that ranks of the same worker share: a container has its own mount namespace.

    Some sandboxes hide the namespace. The device of the root folder replaces it there; a container has its own, too.
    """
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = f"device:[{os.stat('/').st_dev}]"
    return f"{socket.gethostname()} {mounts}"

"""Which worker a rank is on: its ranks share mounts and memory."""

from __future__ import annotations

import os
import socket


def identify_worker() -> str:
    """Who has the same mounts is on the same worker: a container has its own.

    Some sandboxes do not say which mounts these are; there it is the device of the root folder, a container's own, too.
    """
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = f"device:[{os.stat('/').st_dev}]"
    return f"{socket.gethostname()} {mounts}"

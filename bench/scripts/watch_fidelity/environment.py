"""Environments of scripts, watched by injection or not."""

from __future__ import annotations

import os
from pathlib import Path


def build_environment(boot: Path | None, runtime: Path | None = None) -> dict[str, str]:
    """Return the environment of a script. `boot`, `runtime`: the folders of the watch; None: it is not watched."""
    own = {name for name in os.environ if name.startswith("PACEKEEPER_")} | {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    if boot is not None:
        environment["PYTHONPATH"] = str(boot)
        if runtime is not None:
            environment["PACEKEEPER_WATCH_RUNTIME"] = str(runtime)
    return environment

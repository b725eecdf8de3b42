"""Launchers on hosts of `fabric.leaf_spine`, without privileges, forked from one process that has imported torch.

    python -m testing.network.namespaced_launchers SCRIPT LAUNCHERS

LAUNCHERS: a JSON list of {"namespace", "log", "environment"}. They end with this process. Start it with the shim in
LD_PRELOAD, as a launcher that has started itself again.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from typing import Any, NoReturn

from pacekeeper import cli
from pacekeeper.launcher.network.path_shim import preload_shim
from pacekeeper_rank.forking.process_setup import die_with_parent
from testing.training.ranks import PREIMPORTS, import_before_forks

UNPRIVILEGED_USER_ID = 65534
_CLONE_NEWNET = 0x40000000
_PR_SET_DUMPABLE = 4


def main(script: str, launchers: list[dict[str, Any]]) -> None:
    preload_shim()  # what is started from here on comes up without the shim
    import_before_forks(PREIMPORTS)
    parent = os.getpid()
    pids = []
    for launcher in launchers:
        pid = os.fork()
        if pid == 0:
            _run_launcher(script, parent, **launcher)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _run_launcher(script: str, parent: int, namespace: str, log: str, environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _enter_namespace(namespace)
        _drop_privileges()
        die_with_parent(parent)
        os.environ.update(environment)
        code = cli.main(["run", script])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter_namespace(namespace: str) -> None:
    """Use this network from now on."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    if _LIBC.setns(file, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(file)


def _drop_privileges() -> None:
    os.setgroups([])
    os.setgid(UNPRIVILEGED_USER_ID)
    os.setuid(UNPRIVILEGED_USER_ID)
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec: its own /proc is readable to it


_LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

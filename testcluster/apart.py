"""Namespaces of this process's own, so that a cluster with a name lives next to others on one machine.

The machine's own cluster lives in the machine's network. A named one (PACEKEEPER_CLUSTER) has its own folders and
cgroups; in its own network and mount namespace it has the same addresses and link names as every other cluster.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from testcluster import cluster
from testcluster.programs import Programs
from testcluster.settings import NAME
from testcluster.shell import run_command

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


@cache  # once is for good: a thread does not leave its namespaces
def enter_own_namespaces() -> None:
    """Move the calling thread, and what it starts from now on, into new namespaces. OSError where that is forbidden.

    They do not reach the machine's network, so all programs are built and installed before. Their processes are all
    that keeps them: a cluster of this name that an earlier process has left is taken down.
    """
    assert NAME, "the machine's own cluster lives in the machine's namespaces"
    Programs()
    cluster.tear_down()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")
    run_command("mount", "--make-rprivate", "/")
    names = Path("/run/netns")  # where `ip netns` keeps them
    names.mkdir(exist_ok=True)
    run_command("mount", "-t", "tmpfs", "tmpfs", names)
    run_command("ip", "link", "set", "lo", "up")

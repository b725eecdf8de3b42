"""Namespaces of this process, so that a named cluster can run next to others on one machine.

The unnamed cluster uses the machine's network. A named one (PACEKEEPER_CLUSTER) has its own folders and cgroups. It
runs in its own network and mount namespaces, with the same addresses and link names as every other cluster.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from testcluster import cluster
from testcluster.programs import Programs
from testcluster.settings import CLUSTER_NAME
from testcluster.shell import run_command

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


@cache  # once is enough: a thread does not leave its namespaces
def enter_own_namespaces() -> None:
    """Move the calling thread, and what it starts later, into new namespaces. Raises OSError if that is forbidden.

    The namespaces do not reach the machine's network, so all programs are built and installed first. They exist only as
    long as their processes. So a cluster of this name that an earlier process has left is taken down.
    """
    assert CLUSTER_NAME, "the unnamed cluster uses the machine's namespaces"
    Programs()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")
    run_command("mount", "--make-rprivate", "/")
    namespaces_folder = Path("/run/netns")  # the folder of `ip netns`
    namespaces_folder.mkdir(exist_ok=True)
    run_command("mount", "-t", "tmpfs", "tmpfs", namespaces_folder)
    cluster.tear_down()  # from here on, the links and namespaces of other clusters are out of its reach
    run_command("ip", "link", "set", "lo", "up")

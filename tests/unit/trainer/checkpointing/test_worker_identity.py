"""Which worker a rank is on."""

from __future__ import annotations

import os
import socket

import pytest

from pacekeeper.checkpointing.worker_identity import identify_worker


def test_a_sandbox_that_hides_its_mounts_is_identified_by_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identify_worker() == f"{socket.gethostname()} {os.readlink('/proc/self/ns/mnt')}"

    def refuse_to_read(_: str) -> str:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "readlink", refuse_to_read)
    assert identify_worker() == f"{socket.gethostname()} device:[{os.stat('/').st_dev}]"

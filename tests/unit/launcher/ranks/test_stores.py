"""The ranks' stores of successive rounds at one port."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from pacekeeper.launcher.ranks.warm_process import WarmProcess
from pacekeeper_rank.forking import warm_server


def test_ranks_of_a_round_cannot_reach_the_store_of_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine, the process with the stores receives a request after the ranks have begun."""
    received: list[str] = []
    receive = socket.recv_fds

    def receive_late(*arguments: Any) -> tuple[bytes, list[int], int, Any]:
        message = receive(*arguments)
        time.sleep(0.3)
        received.append("request")
        return message

    monkeypatch.setattr(socket, "recv_fds", receive_late)
    launcher_end, store_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=warm_server._serve_stores, args=(store_end,))
    thread.start()
    warm = WarmProcess(os.getpid(), launcher_end)
    with store_end, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for round_ in (1, 2):
            warm.open_store("127.0.0.1", listener, patience_seconds=60)
            assert len(received) == round_
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
            assert not store.check(["round"])
            store.set("round", str(round_))
        launcher_end.close()
        thread.join()

"""Which failures of ranks are consequences of a peer's."""

from __future__ import annotations

import signal
import time

import pytest

from pacekeeper_analysis.failures.crash import is_peer_loss

ABORTED = -signal.SIGABRT
# Written by hand, in the wording of torch's ProcessGroupNCCL.cpp.
TERMINATED = "[rank1]:[E1122 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog "
TERMINATED += "thread terminated with exception: "
LOADER = "RuntimeError: DataLoader worker (pid 812)"
TRACE = "\nException raised from checkTimeout\nframe #0: c10::Error::Error()\n"


@pytest.mark.parametrize(
    ("exit_code", "error", "consequence"),
    [
        (1, "RuntimeError: [10.0.0.7]:4711: Connection reset by peer", True),
        (1, "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited", True),
        (1, "ValueError: no such column", False),
        (-signal.SIGKILL, "RuntimeError: Connection reset by peer", False),
        (-signal.SIGSEGV, "", False),
        (ABORTED, TERMINATED + "NCCL error: remote process exited or there was a network error" + TRACE, True),
        (ABORTED, TERMINATED + "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)" + TRACE, True),
        (ABORTED, "[F1122] Terminating the process, due to ProcessGroupNCCL watchdog hang.", True),
        (ABORTED, TERMINATED + "CUDA error: an illegal memory access was encountered" + TRACE, False),
        (ABORTED, "free(): invalid pointer", False),
        (1, f"{LOADER} is killed by signal: Killed.\nConnectionResetError: Connection reset by peer", False),
        (
            1,
            f"{LOADER.replace('pid', 'pid(s)')} exited unexpectedly\nConnectionResetError: Connection reset by peer",
            False,
        ),
        (1, TERMINATED + "CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_lost_peer_is_recognized_by_the_message_and_the_exit_code(
    exit_code: int, error: str, consequence: bool
) -> None:
    assert is_peer_loss(exit_code, error) is consequence


def test_a_line_without_an_end_is_searched_in_a_moment() -> None:
    began = time.process_time()
    assert not is_peer_loss(1, "connection" * 20_000)
    assert time.process_time() - began < 3.0, "it takes 0.05 s; by the square of the length, 15 s"

"""A machine that is gone without notice, behind an idle connection: by real kernels."""

from __future__ import annotations

import time

from testing.network.namespaces import create_network
from testing.network.open_connection import SILENCE_TIMEOUT_SECONDS


def test_the_connection_of_a_lost_machine_ends_with_the_time_of_its_last_answer() -> None:
    with create_network(2) as between:
        operator, worker = between.hosts
        with operator.python("testing.network.open_connection") as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "listens\n"
            with worker.python("testing.network.open_connection", operator.address) as other:
                try:
                    assert holder.stdout.readline() == "holds\n"
                    time.sleep(SILENCE_TIMEOUT_SECONDS + 2)  # an idle connection stays open
                    between.drop_packets(operator, worker)
                    unheard = float(holder.stdout.readline())  # only the kernel ends the connection
                    assert unheard > SILENCE_TIMEOUT_SECONDS - 1
                finally:
                    other.kill()
                    holder.kill()

"""Evidence of connections between four workers, as their sidecars send it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow

MB = 1_000_000


def build_ring(slow: int = -1, quiet: bool = False) -> tuple[Evidence, ...]:
    """Build evidence of a ring: rank i sends to i + 1; sends of rank `slow` take ten times as long."""

    def list_ends(rank: int) -> tuple[LinkWindow, ...]:
        address, next_address, previous_address = (f"10.0.0.{(rank + step) % 4}" for step in (0, 1, -1))
        busy = 4.0 if rank == slow else 0.4
        sent_bytes = 0 if quiet else 50 * MB
        sending = LinkWindow(f"{address}:40", f"{next_address}:50", rank, 0, 5.0, sent_bytes, busy)
        receiving = LinkWindow(f"{address}:50", f"{previous_address}:40", rank, 0, 5.0)
        return tuple(replace(end, age=age) for end in (sending, receiving) for age in range(3))

    return tuple(Evidence("ask", f"j-w{rank}-0", 1, links=list_ends(rank)) for rank in range(4))


def build_mesh(ranks: int, slow: int) -> tuple[Evidence, ...]:
    """Build evidence of a mesh: each rank sends to each; sends of rank `slow` take ten times as long."""

    def list_ends(rank: int) -> Iterator[LinkWindow]:
        address, busy = f"10.0.0.{rank}", 4.0 if rank == slow else 0.4
        for peer in (peer for peer in range(ranks) if peer != rank):
            yield LinkWindow(f"{address}:{100 + peer}", f"10.0.0.{peer}:{200 + rank}", rank, 0, 5.0, 50 * MB, busy)
            yield LinkWindow(f"{address}:{200 + peer}", f"10.0.0.{peer}:{100 + rank}", rank, 0, 5.0)

    def list_windows(rank: int) -> tuple[LinkWindow, ...]:
        return tuple(replace(end, age=age) for end in list_ends(rank) for age in range(3))

    return tuple(Evidence("ask", f"j-w{rank}-0", 1, links=list_windows(rank)) for rank in range(ranks))

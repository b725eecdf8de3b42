"""Collectives over connections of their own, next to the script's process groups.

They may run in a background thread while the script's collectives run. They also work after the script has destroyed
its process groups: the last upload often ends after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore

from pacekeeper.safe_serialization import pack_value, unpack_value
from pacekeeper.torch_internals import create_gloo_backend, get_default_store


class RankChannel:
    """A channel between some ranks. Its methods are collective, except `send` and `receive`.

    They raise RuntimeError if a rank is gone or does not take part in time.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        """Connect the ranks. Collective.

        `name`: the same on all ranks, and used once. `ranks`: global ranks, of which this process is one.
        """
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank()) if self.size > 1 else 0
        """This rank's position in `ranks`."""
        self._backend: Any = None
        if self.size > 1:
            store = PrefixStore(f"pacekeeper/{name}", get_default_store())
            self._backend = create_gloo_backend(store, self.rank, self.size)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        rows, sizes = self._all_gather_padded(pack_value(value))
        return [unpack_value(row[:size].numpy().data) for row, size in zip(rows, sizes, strict=True)]

    def all_agree(self, agrees: bool) -> bool:
        """Return whether `agrees` is True on all ranks."""
        return all(bool(row) for row in self._all_gather(torch.tensor([agrees])))

    def gather(self, content: bytes) -> list[bytes] | None:
        """Return the contents of all ranks on rank 0; None on the others."""
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(content)]))]
        own_row = _pad_bytes(content, max(sizes))
        if self._backend is None:
            return [content]
        rows = [[torch.empty_like(own_row) for _ in sizes]] if self.rank == 0 else []
        self._backend.gather(rows, [own_row]).wait()
        return [row[:size].numpy().tobytes() for row, size in zip(rows[0], sizes, strict=True)] if rows else None

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the `value` of the rank `root`; the other ranks' argument is ignored."""
        if self._backend is None:
            return value
        options = BroadcastOptions()
        options.rootRank = root
        content = pack_value(value) if self.rank == root else b""
        size = torch.tensor([len(content)])
        self._backend.broadcast([size], options).wait()
        row = _pad_bytes(content, int(size))
        self._backend.broadcast([row], options).wait()
        return unpack_value(row.numpy().data)

    def send(self, content: torch.Tensor, receiver: int, tag: int) -> Any:
        """Begin to send `content` (contiguous, on the host), and return the work to wait for."""
        return self._backend.send([content], receiver, tag)

    def receive(self, content: torch.Tensor, sender: int, tag: int) -> None:
        """Receive into `content` (contiguous, on the host)."""
        self._backend.recv([content], sender, tag).wait()

    def _all_gather_padded(self, content: bytes) -> tuple[list[torch.Tensor], list[int]]:
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(content)]))]
        return self._all_gather(_pad_bytes(content, max(sizes))), sizes

    def _all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        if self._backend is None:
            return [row]
        rows = [[torch.empty_like(row) for _ in range(self.size)]]
        self._backend.allgather(rows, [row]).wait()
        return rows[0]


def _pad_bytes(content: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)

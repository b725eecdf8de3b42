"""Which samples a step takes: one endless stream of samples that all ranks know, and a cursor in it.

The stream is a fresh permutation of the data set for each epoch, one behind the other. A step takes the next
`global_batch` samples and the shares deal them out in rank order. So each sample is used exactly once an epoch whatever
the shares and the number of ranks are, and the cursor alone is the position to resume from, also in mid-epoch.
"""

from __future__ import annotations

import torch


class SampleStream:
    """The order of a job's samples: position in the stream → index in the data set."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        """`size`: samples in the data set; `seed` must be the same on all ranks."""
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, torch.Tensor] = {}

    def indices(self, first: int, end: int) -> list[int]:
        """Data set indices at the stream's positions [first, end), across epochs where need be."""
        found: list[int] = []
        while first < end:
            epoch, offset = divmod(first, self.size)
            taken = min(end - first, self.size - offset)
            found += self._order(epoch)[offset : offset + taken].tolist()
            first += taken
        return found

    def _order(self, epoch: int) -> torch.Tensor:
        """The permutation of `epoch`; the two newest are kept, since a batch may reach from one into the next."""
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            self._orders[epoch] = self._make_order(epoch)
        return self._orders[epoch]

    def _make_order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.size)
        # A generator's seed of few bits begins badly mixed (torch.Generator.manual_seed): spread seed and epoch widely.
        mixed = (self._seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(mixed))

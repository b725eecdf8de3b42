"""Order of a job's samples: position in the endless stream → index in the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .leases import Interval
from .permutation import SHUFFLED_ORDER_NAME, create_permutation

DATASET_ORDER_NAME = "as the data set has them"
"""Name of the order of samples that are not shuffled."""

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class SampleStream(Protocol):
    """The order of a job's samples."""

    @property
    def order_name(self) -> str:
        """Name of the order: saved positions refer to the same samples only in the same order."""

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        """Return the indices of the samples at these positions, across epochs if necessary."""


class IndexedStream:
    """Stream of a data set with a length: each epoch in another order. Memory depends only on the batch size."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        """Create the stream. `size`: samples in the data set; `seed` must be the same on all ranks."""
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.order_name = f"{SHUFFLED_ORDER_NAME}, seed {seed}" if shuffle else DATASET_ORDER_NAME

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        ranges = [np.arange(first, end, dtype=np.int64) for first, end in positions]
        epochs, offsets = np.divmod(np.concatenate([*ranges, _NO_POSITIONS]), self._size)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                offsets[in_epoch] = create_permutation(self._size, self._seed, epoch).permute(offsets[in_epoch])
        indices: list[int] = offsets.tolist()
        return indices


class IterableStream:
    """Stream of an iterable data set, in which a sample's index is its position."""

    order_name = DATASET_ORDER_NAME

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        return [position for first, end in positions for position in range(first, end)]

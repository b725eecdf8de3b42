"""In which order the samples of a job come: position in the endless stream → index in the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .leases import Interval
from .permutation import SHUFFLED_ORDER_NAME, create_permutation

DATASET_ORDER_NAME = "as the data set has them"
"""Names the order of samples that are not shuffled."""

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class SampleStream(Protocol):
    """The order of a job's samples."""

    @property
    def order_name(self) -> str:
        """Names it: positions that are kept mean the same samples in the same order only."""

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        """Of the samples at these positions, across epochs where need be."""


class IndexedStream:
    """The stream of a data set with a length: each epoch in another order. Memory goes by the batch alone."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        """`size`: samples in the data set; `seed` must be the same on all ranks."""
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.order_name = f"{SHUFFLED_ORDER_NAME}, seed {seed}" if shuffle else DATASET_ORDER_NAME

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        places = [np.arange(first, end, dtype=np.int64) for first, end in positions]
        epochs, offsets = np.divmod(np.concatenate([*places, _NO_POSITIONS]), self._size)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                offsets[here] = create_permutation(self._size, self._seed, epoch).permute(offsets[here])
        found: list[int] = offsets.tolist()
        return found


class IterableStream:
    """The stream of an iterable data set, in which a sample's index is its position."""

    order_name = DATASET_ORDER_NAME

    def get_indices(self, positions: Sequence[Interval]) -> list[int]:
        return [position for first, end in positions for position in range(first, end)]

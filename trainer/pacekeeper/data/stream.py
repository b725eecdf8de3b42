"""In which order the samples of a job come: position in the endless stream → index in the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .leases import Interval
from .permutation import SHUFFLED, permutation

AS_GIVEN = "as the data set has them"
"""Names the order of samples that are not shuffled."""

_NONE = np.empty(0, dtype=np.int64)


class Stream(Protocol):
    """The order of a job's samples."""

    @property
    def order(self) -> str:
        """Names it: positions that are kept mean the same samples in the same order only."""

    def indices(self, positions: Sequence[Interval]) -> list[int]:
        """Of the samples at these positions, across epochs where need be."""


class Permutations:
    """The stream of a data set with a length: each epoch in another order. Memory goes by the batch alone."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        """`size`: samples in the data set; `seed` must be the same on all ranks."""
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.order = f"{SHUFFLED}, seed {seed}" if shuffle else AS_GIVEN

    def indices(self, positions: Sequence[Interval]) -> list[int]:
        places = [np.arange(first, end, dtype=np.int64) for first, end in positions]
        epochs, offsets = np.divmod(np.concatenate([*places, _NONE]), self._size)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                offsets[here] = permutation(self._size, self._seed, epoch).at(offsets[here])
        found: list[int] = offsets.tolist()
        return found


class Positions:
    """The stream of an iterable data set, in which a sample's index is its position."""

    order = AS_GIVEN

    def indices(self, positions: Sequence[Interval]) -> list[int]:
        return [position for first, end in positions for position in range(first, end)]

"""A permutation that is computed position by position, not stored: a data set of 10⁹ samples would need 8 GB.

It uses integers only, so that all ranks compute the same, on any machine and with any version of a library.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SHUFFLED_ORDER_NAME = "shuffled by Feistel network, version 1"
"""Name of the orders that `create_permutation` makes, each by its seed.

Saved positions belong to one order. A different algorithm needs a different name.
"""

_MIN_ROUNDS = 8
_WORD_MASK = 2**64 - 1
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
_FIRST_HASH_MULTIPLIER, _SECOND_HASH_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF_WORD_BITS = np.uint64(32)


@lru_cache(maxsize=8)
def create_permutation(size: int, seed: int, number: int) -> Permutation:
    """Return permutation `number` of [0, `size`) in the endless sequence that begins with `seed`."""
    state = _mix_bits(_mix_bits(seed) + number * _SPLITMIX_GAMMA)
    rows, columns = _choose_grid(size)
    keys = (_mix_bits(state + (round_number + 1) * _SPLITMIX_GAMMA) for round_number in range(_count_rounds(columns)))
    return Permutation(size, rows, columns, tuple(map(np.uint64, keys)))


class Permutation:
    """Permutation of [0, size): a Feistel network over a grid of rows × columns, at least as large, with cycle walking.

    Each round rotates the cells of every column, or alternately of every row, by a hash of its number. A number that
    the network maps beyond `size` is mapped again until it is below, so that [0, size) is permuted, too (J. Black, P.
    Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002, methods 2 and 3). The hash is SplitMix64's finalizer,
    shortened (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
    """

    def __init__(self, size: int, rows: int, columns: int, keys: tuple[np.uint64, ...]) -> None:
        """Create it. `keys`: keys of the rounds, an even number of them."""
        self._size = np.uint64(size)
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._keys = keys

    def permute(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values at these positions, each in [0, size); shape (n,), in their order."""
        values = self._permute_once(positions.astype(np.uint64))
        while len(beyond := np.flatnonzero(values >= self._size)):
            values[beyond] = self._permute_once(values[beyond])
        return values.astype(np.int64)

    def _permute_once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row, column = np.divmod(numbers, self._columns)
        for column_key, row_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            _add_hashed(row, self._rows, column + column_key)
            _add_hashed(column, self._columns, row + row_key)
        return row * self._columns + column


def _add_hashed(half: NDArray[np.uint64], size: np.uint64, hashed: NDArray[np.uint64]) -> None:
    """Add to each number of `half` a pseudo-random one below `size`, modulo `size`; changes both arrays."""
    hashed *= _FIRST_HASH_MULTIPLIER
    hashed ^= hashed >> _HALF_WORD_BITS
    hashed *= _SECOND_HASH_MULTIPLIER
    hashed >>= _HALF_WORD_BITS
    hashed *= size
    hashed >>= _HALF_WORD_BITS  # 32 bits, as a share of `size`
    half += hashed
    np.minimum(half, half - size, out=half)  # a difference below 0 wraps around, and is the larger one


def _choose_grid(size: int) -> tuple[int, int]:
    """Return rows and columns, both near √size. If both were odd, no round would be an odd permutation."""
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2
    return rows, -(-size // rows)


def _count_rounds(columns: int) -> int:
    """Return the number of rounds at which the advantage of a distinguisher from a random permutation is below 2⁻²⁴.

    Two more rounds divide it by the number of columns (J. Patarin: Generic Attacks on Feistel Schemes, ASIACRYPT 2001).
    """
    bits = max(columns.bit_length() - 1, 1)
    return max(_MIN_ROUNDS, 2 + 2 * -(-24 // bits))


def _mix_bits(number: int) -> int:
    """Return SplitMix64's finalizer of the lowest 64 bits of an integer."""
    word = number & _WORD_MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD_MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD_MASK
    return word ^ word >> 31

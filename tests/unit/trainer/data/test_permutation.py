"""The computed permutation is one, looks like any other, and never changes."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper.data.permutation import create_permutation
from pacekeeper.data.sample_stream import IndexedStream

EPOCHS = 400
LARGE = 10**9 + 7


def list_permutation(size: int, seed: int, number: int) -> NDArray[np.int64]:
    return create_permutation(size, seed, number).permute(np.arange(size))


def compute_chi_square(counts: Iterable[int], cells: int) -> float:
    """Return how many standard deviations the counts are from equal ones. `cells`: including those with 0."""
    found = list(counts)
    expected = sum(found) / cells
    chi = sum((count - expected) ** 2 / expected for count in found) + (cells - len(found)) * expected
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("size", [*range(1, 40), 64, 81, 255, 256, 257, 1000, 65_536, 65_537])
def test_each_index_occurs_once(size: int) -> None:
    for seed, number in ((0, 0), (-3, 1), (2**70, 12)):
        assert sorted(list_permutation(size, seed, number).tolist()) == list(range(size))


def test_a_position_has_the_same_value_in_every_request() -> None:
    order = list_permutation(1000, 5, 3)
    requests = np.array([999, 0, 500, 501, 0])
    assert create_permutation(1000, 5, 3).permute(requests).tolist() == order[requests].tolist()
    assert create_permutation(1000, 5, 3).permute(requests[:0]).tolist() == []


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_sets_come_in_every_order_equally_often(size: int) -> None:
    """Over epochs, and over seeds."""
    trials = range(100 * math.factorial(size))
    for found in (
        Counter(tuple(list_permutation(size, 11, number).tolist()) for number in trials),
        Counter(tuple(list_permutation(size, seed, 0).tolist()) for seed in trials),
    ):
        assert set(found) <= set(itertools.permutations(range(size)))
        assert abs(compute_chi_square(found.values(), math.factorial(size))) < 3.5


@pytest.mark.parametrize("size", [9, 16, 25, 36])
def test_odd_permutations_come_as_often_as_even_ones(size: int) -> None:
    """A Feistel network over two halves of bits has even ones only."""
    odd = sum(is_odd(list_permutation(size, 2, epoch)) for epoch in range(EPOCHS))
    assert abs(odd - EPOCHS / 2) < 3.5 * math.sqrt(EPOCHS) / 2


@pytest.mark.parametrize("size", [48, 97, 1000])
def test_epochs_look_like_random_permutations(size: int) -> None:
    orders = np.array([list_permutation(size, 7, epoch) for epoch in range(EPOCHS)])
    places = np.broadcast_to(np.arange(size), orders.shape)
    # Any part of the data set stands in any part of the epoch.
    parts = 8
    at = np.bincount((places * parts // size * parts + orders * parts // size).ravel(), minlength=parts**2)
    of_parts = np.bincount(np.arange(size) * parts // size)
    expected = np.outer(of_parts, of_parts).ravel() * EPOCHS / size
    chi, freedom = ((at - expected) ** 2 / expected).sum() * (size - 1) / size, (parts - 1) ** 2
    assert abs(chi - freedom) < 3.5 * math.sqrt(2 * freedom)
    # The difference of neighbors, modulo the size, is any but 0 equally often.
    for distance in (1, 2, size // 2):
        differences = (orders[:, distance:] - orders[:, :-distance]) % size
        counts = np.bincount(differences.ravel(), minlength=size)
        assert counts[0] == 0
        assert abs(compute_chi_square(counts[1:].tolist(), size - 1)) < 4
    # A sample stays in its place once an epoch, and is in the place that it had in the last epoch as rarely: Poisson.
    for still in ((orders == places).sum(1), (orders[1:] == orders[:-1]).sum(1)):
        assert abs(still.mean() - 1) < 3.5 / math.sqrt(EPOCHS)
        assert abs(still.var() - 1) < 0.3
    # Half of all neighbors descend: (size − 1)/2 of them, with variance (size + 1)/12.
    descents = (np.diff(orders) < 0).sum(1)
    assert abs(descents.mean() - (size - 1) / 2) < 3.5 * math.sqrt((size + 1) / 12 / EPOCHS)
    assert 0.75 < descents.var() / ((size + 1) / 12) < 1.3
    # The number of cycles: as if each sample in turn closed one with probability 1/1, 1/2, 1/3, …
    mean = sum(1 / k for k in range(1, size + 1))
    variance = sum((1 - 1 / k) / k for k in range(1, size + 1))
    assert abs(np.mean([count_cycles(order) for order in orders]) - mean) < 3.5 * math.sqrt(variance / EPOCHS)


def test_large_sets_take_no_memory_and_are_spread_evenly() -> None:
    positions = np.arange(10**6, 10**6 + 20_000)
    found = create_permutation(LARGE, 1, 0).permute(positions)
    assert len(set(found.tolist())) == len(found)
    assert 0 <= found.min() <= found.max() < LARGE
    for part in (found * 100 // LARGE, np.diff(found) % LARGE * 100 // LARGE, found % 100):
        assert abs(compute_chi_square(np.bincount(part, minlength=100).tolist(), 100)) < 3.5
    assert create_permutation(2**62, 1, 0).permute(np.array([0, 2**62 - 1])).min() >= 0

    def measure_peak(size: int) -> int:
        batch = [(0, 256), (700, 956)]
        IndexedStream(size, seed=3).get_indices(batch)  # what Python and numpy store after the first call
        tracemalloc.start()
        IndexedStream(size, seed=3).get_indices(batch)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert measure_peak(10**12) < 2 * measure_peak(10**4) < 200_000


def test_the_order_is_the_same_in_every_version() -> None:
    """Saved states name it `SHUFFLED_ORDER_NAME`. Another order needs another name."""
    assert list_permutation(10, 0, 0).tolist() == [1, 2, 9, 5, 3, 7, 0, 4, 8, 6]
    assert create_permutation(LARGE, 42, 3).permute(np.array([0, 1, LARGE - 1])).tolist() == [
        910750013,
        727252257,
        141124708,
    ]


def is_odd(order: NDArray[np.int64]) -> bool:
    return (len(order) - count_cycles(order)) % 2 == 1


def count_cycles(order: NDArray[np.int64]) -> int:
    following, seen, found = order.tolist(), [False] * len(order), 0
    for first in range(len(following)):
        found += not seen[first]
        while not seen[first]:
            seen[first], first = True, following[first]
    return found

"""Sequences are balanced by their cost. The global batch stays the same, and only its distribution changes."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pacekeeper.data.lengths import SequenceBalancer, split_balanced
from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder
from pacekeeper.data.shares import split_equally
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.length_cost import SequenceCost

NUMBERS: Any = torch.arange(4000)
COST = SequenceCost(0.05, 1e-3, 1e-7)  # attention costs as much as the rest at 10,000 tokens
Array = npt.NDArray[Any]


def draw_lognormal_lengths(seed: int) -> Array:
    """Of documents in a pre-training set: most are short, few very long; cut at the context of 8,192 tokens."""
    return np.minimum(np.rint(np.random.default_rng(seed).lognormal(6.5, 1.0, size=len(NUMBERS))), 8192)


def build_loaders(
    shares: tuple[int, ...] | None, ranks: int, batch: int, replica_size: int = 1, workers: int = 0, **options: Any
) -> list[Loader]:
    order = SampleOrder(seed=2, **options)
    loaders = [
        Loader(NUMBERS, BatchSizes(batch, 4), RankTopology(rank, ranks, replica_size), order, num_workers=workers)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.set_shares(shares)
    return loaders


def draw_microbatches(loader: Loader) -> list[list[int]]:
    drawn = loader.next_step()
    assert drawn is not None
    found: list[list[int]] = [batch.tolist() for batch in drawn[1]]
    loader.complete_step()
    return found


def flatten_lists(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def compute_imbalance(loads: Array, targets: Array | None = None) -> float:
    """Return by how much the last rank is later than if all ended together."""
    heights = loads if targets is None else loads / targets
    return float(heights.max() / (loads.sum() / (len(loads) if targets is None else targets.sum())) - 1)


def compute_rank_costs(loaders: list[Loader], lengths: Array) -> Array:
    """Return the cost of the next step for each rank."""
    return np.array(
        [COST.compute_seconds(lengths[flatten_lists(draw_microbatches(loader))]).sum() for loader in loaders]
    )


@pytest.mark.parametrize("shares", [None, (24, 24, 16, 16, 16, 16, 8, 8)])
def test_the_predicted_imbalance_nearly_vanishes(shares: tuple[int, ...] | None) -> None:
    """8 ranks, 128 sequences a step, 20 steps. -rP shows the figures: 56 and 67 % become 0.07 %."""
    lengths = draw_lognormal_lengths(1)
    targets = np.array(shares or split_equally(128, 8), dtype=float)
    plain = build_loaders(shares, ranks=8, batch=128)
    balanced = build_loaders(shares, ranks=8, batch=128, lengths=lengths, cost=COST)
    before, after = (
        np.array([compute_imbalance(compute_rank_costs(loaders, lengths), targets) for _ in range(20)])
        for loaders in (plain, balanced)
    )
    print(f"predicted imbalance, mean of the steps: {before.mean():.2%} → {after.mean():.2%}; worst: {after.max():.2%}")
    assert before.mean() > 0.2
    assert after.mean() < 0.01


def test_matching_microbatches_of_ranks_cost_the_same() -> None:
    """Sharded ranks meet in each microbatch: a step costs the sum over microbatches of the slowest rank."""
    lengths = draw_lognormal_lengths(3)
    late = []
    balanced: dict[str, Any] = {"lengths": lengths, "cost": COST}
    for options in ({}, balanced):
        loaders = build_loaders(None, ranks=4, batch=64, replica_size=4, **options)
        costs = np.array(
            [[COST.compute_seconds(lengths[batch]).sum() for batch in draw_microbatches(loader)] for loader in loaders]
        )
        late.append(costs.max(axis=0).sum() / costs.sum() * 4 - 1)
    print(f"predicted imbalance of a sharded step: {late[0]:.1%} → {late[1]:.1%}")
    assert late[1] < 0.3 * late[0]


@pytest.mark.parametrize("seed", range(10))
def test_each_global_batch_holds_the_same_samples(seed: int) -> None:
    """With any shares. Each rank has as many as its share, in microbatches no larger than they may be."""
    rng = np.random.default_rng(seed)
    ranks, batch = int(rng.integers(1, 6)), int(rng.integers(8, 40))
    cuts = sorted(rng.choice(np.arange(1, batch), size=ranks - 1, replace=False).tolist())
    shares = tuple(end - first for first, end in itertools.pairwise([0, *cuts, batch]))
    lengths = draw_lognormal_lengths(seed)
    plain = build_loaders(shares, ranks, batch)
    balanced = build_loaders(shares, ranks, batch, lengths=lambda index: lengths[index])
    for _ in range(5):
        dealt = [draw_microbatches(loader) for loader in plain]
        chosen = [draw_microbatches(loader) for loader in balanced]
        assert sorted(flatten_lists(map(flatten_lists, dealt))) == sorted(flatten_lists(map(flatten_lists, chosen)))
        assert [len(flatten_lists(its)) for its in chosen] == list(shares)
        assert [[len(one) for one in its] for its in chosen] == [[len(one) for one in its] for its in dealt]


def test_a_sequence_that_outweighs_all_others_is_not_always_the_same_ranks() -> None:
    """That rank would look like a straggler."""
    lengths = np.where(np.arange(len(NUMBERS)) % 8 == 0, 8192.0, 10.0)
    loaders = [
        Loader(
            NUMBERS,
            BatchSizes(8, 4),
            RankTopology(rank, 4),
            SampleOrder(shuffle=False, lengths=lengths, cost=COST),
        )
        for rank in range(4)
    ]
    heaviest = [int(np.argmax(compute_rank_costs(loaders, lengths))) for _ in range(16)]
    assert set(heaviest) == {0, 1, 2, 3}


def test_leases_balance_their_microbatches() -> None:
    lengths = draw_lognormal_lengths(5) ** 0.5
    (loader,) = build_loaders(None, ranks=1, batch=32, lengths=lengths, cost=COST)
    tickets = itertools.count(0, 32)
    loader.start_leases(lambda _: next(tickets), None)
    drawn = loader.next_step()
    assert drawn is not None
    costs = np.array([COST.compute_seconds(lengths[batch.tolist()]).sum() for batch in drawn[1]])
    assert loader.list_unused() == [(0, 32)]
    plain = (
        COST.compute_seconds(lengths[build_loaders(None, 1, 32)[0]._sampler._stream.get_indices([(0, 32)])])
        .reshape(8, 4)
        .sum(axis=1)
    )
    assert compute_imbalance(costs) < 0.1 * compute_imbalance(plain)


def test_a_rank_knows_the_lengths_of_its_samples() -> None:
    lengths = draw_lognormal_lengths(6)
    (loader,) = build_loaders((6,), ranks=1, batch=6, lengths=lambda index: lengths[index])
    drawn = loader.next_step()
    assert drawn is not None
    mine = lengths[flatten_lists(batch.tolist() for batch in drawn[1])]
    assert drawn[0].lengths == pytest.approx((mine.sum(), (mine * mine).sum()))
    plain = build_loaders((6,), ranks=1, batch=6)[0].next_step()
    assert plain is not None
    assert plain[0].lengths is None


def test_lengths_take_no_memory_of_their_own() -> None:
    """A file that numpy maps is not read into memory, and a function's answers are not all stored."""
    samples = 2_000_000
    given = np.arange(samples, dtype=np.int32)
    requests: list[int] = []

    def count_and_return(index: int) -> float:
        requests.append(index)
        return float(index)

    for lengths in (given, count_and_return):
        tracemalloc.start()
        sequences = SequenceBalancer(lengths, samples)
        assert sequences.sum_lengths([samples - 1, 2]) == (samples + 1, (samples - 1) ** 2 + 4)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
        tracemalloc.stop()
        assert sorted(flatten_lists(sequences.split_by_shares([5, 3, samples - 1, 7], (3, 1), COST))) == [0, 1, 2, 3]
    assert sorted(requests) == [2, 3, 5, 7, samples - 1], "each once"


QUADRATIC = SequenceCost(0.0, 0.0, 1.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_another_cost_takes_effect_on_the_same_step_of_all_ranks(workers: int) -> None:
    """Each global batch stays what it is; it is dealt by length first, then by the square, then by length again."""
    lengths = draw_lognormal_lengths(7) ** 0.5
    plain, linear, quadratic, changed = (
        build_loaders((16, 16), 2, 32, **options)
        for options in (
            {},
            {"lengths": lengths},
            {"lengths": lengths, "cost": QUADRATIC},
            {"lengths": lengths, "workers": workers},
        )
    )
    late = changed[0].lookahead
    assert late == 2 * workers
    for step in range(12 + late):
        if step in (3, 8):
            for loader in changed:
                loader.set_cost(QUADRATIC if step == 3 else None)
        dealt = [[draw_microbatches(loader) for loader in loaders] for loaders in (plain, linear, quadratic, changed)]
        assert len({tuple(sorted(flatten_lists(map(flatten_lists, ranks)))) for ranks in dealt}) == 1
        assert dealt[3] == (dealt[2] if 3 + late <= step < 8 + late else dealt[1])
        assert dealt[1] != dealt[2], "this batch shows nothing"


@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_is_used_once_an_epoch_across_changes_of_cost_and_shares(workers: int) -> None:
    size, batch = 40, 8
    loaders = [
        Loader(
            torch.utils.data.Subset(NUMBERS, range(size)),
            BatchSizes(batch, 3),
            RankTopology(rank, 2),
            SampleOrder(lengths=draw_lognormal_lengths(8)[:size]),
            num_workers=workers,
        )
        for rank in range(2)
    ]
    seen: list[int] = []
    for step in range(3 * size // batch):
        for loader in loaders:
            if step % 4 == 1:
                loader.set_cost(SequenceCost(0.0, float(step % 8 == 1), 1.0))
            if step % 4 == 3:
                loader.set_cost(None)
                loader.set_shares((3, 5) if step % 8 == 3 else (6, 2))
            seen += flatten_lists(draw_microbatches(loader))
    assert [sorted(seen[first : first + size]) for first in (0, size, 2 * size)] == [list(range(size))] * 3


def test_the_ranks_of_a_replica_lease_by_the_same_cost() -> None:
    """Two replicas of two ranks, at paces of their own; each sends its ranks another cost at a sync point."""
    tickets: list[int] = []
    loaders = build_loaders((4, 4, 4, 4), 4, 16, replica_size=2, lengths=draw_lognormal_lengths(9))
    taken = {rank: itertools.count() for rank in range(4)}

    def build_tickets(rank: int) -> Any:
        answers: list[int] = leases[rank // 2]

        def take_ticket(count: int) -> int:
            number = next(taken[rank])
            if number == len(answers):
                answers.append(len(tickets))
                tickets.extend(range(count))
            return answers[number]

        return take_ticket

    leases: list[list[int]] = [[], []]
    for rank, loader in enumerate(loaders):
        loader.start_leases(build_tickets(rank), None)
    seen: list[int] = []
    for interval in range(6):
        for rank, loader in enumerate(loaders):
            for _ in range(1 + interval % 3 if rank < 2 else 2):
                seen += flatten_lists(draw_microbatches(loader))
        for loader in loaders:
            loader.set_cost(QUADRATIC if interval % 2 else None)
    stream = loaders[0]._sampler._stream.get_indices([(0, len(tickets))])
    assert sorted(seen) == sorted(stream)


def test_a_cost_needs_lengths() -> None:
    (loader,) = build_loaders(None, ranks=1, batch=8)
    loader.set_cost(None)
    with pytest.raises(
        InputError, match=r"sequence_cost: the lengths of samples are unknown; pass lengths to dataloader\(\)"
    ):
        loader.set_cost(QUADRATIC)


def test_parts_are_exact_and_near_the_optimum() -> None:
    costs = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], dtype=np.int64)
    parts = split_balanced(costs, (4, 4, 4))
    assert sorted(flatten_lists(parts)) == list(range(12))
    assert max(int(costs[part].sum()) for part in parts) <= 17  # of 48
    assert [sorted(part) for part in split_balanced(costs[:3], (3, 0))] == [[0, 1, 2], []]
    assert sum(len(part) for part in split_balanced(np.zeros(5, dtype=np.int64), (3, 2))) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1.0, 2.0]}, r"lengths: its shape is \(2,\) for 4000 samples"),
        ({"lengths": np.where(np.arange(4000) == 7, np.nan, 1.0)}, "lengths: of sample 7 it is nan"),
        ({"cost": COST}, "cost: it is of sequences by their length; give lengths too"),
    ],
)
def test_bad_lengths_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_loaders(None, ranks=1, batch=8, **options)


def test_a_bad_length_is_named_when_it_is_requested() -> None:
    (loader,) = build_loaders(None, ranks=1, batch=8, lengths=lambda _: -1.0)
    with pytest.raises(InputError, match=r"lengths: of sample \d+ it is -1.0; it must be finite"):
        loader.next_step()

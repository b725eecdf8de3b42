"""Each epoch is an exact partition of the data set with all changes of shares, and with restarts in mid-epoch."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder, StepBatch
from pacekeeper.data.sample_stream import IndexedStream
from pacekeeper.data.shares import get_rank_interval, split_equally
from pacekeeper_analysis.errors import InputError

NUMBERS: Any = torch.arange(100)
"""A tensor indexes like a data set."""


def draw_shares(rng: random.Random, total: int, ranks: int) -> tuple[int, ...]:
    cuts = sorted(rng.sample(range(1, total), ranks - 1))
    return tuple(end - first for first, end in zip([0, *cuts], [*cuts, total], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_used_once_an_epoch_across_share_changes_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    size, ranks = rng.randint(20, 60), rng.randint(1, 5)
    batch = rng.randint(ranks + 1, 19)
    loaders = build_loaders(size, batch, ranks, max_microbatch=rng.randint(1, 6))
    seen: list[int] = []
    for _ in range(3 * size // batch + 1):
        if rng.random() < 0.3:
            shares = draw_shares(rng, batch, ranks)
            for loader in loaders:
                loader.set_shares(shares)
        if rng.random() < 0.3:  # a restart, perhaps with another number of ranks
            state = loaders[0].state_dict()
            ranks = rng.randint(1, min(5, batch - 1))
            loaders = build_loaders(size, batch, ranks, max_microbatch=rng.randint(1, 6))
            for loader in loaders:
                loader.load_state_dict(state)
        for loader in loaders:
            draw, batches = draw_step(loader)
            mine = [index for microbatch in batches for index in microbatch.tolist()]
            assert len(mine) == draw.samples
            seen += mine
            loader.complete_step()
    for epoch in range(len(seen) // size):
        counts = Counter(seen[epoch * size : (epoch + 1) * size])
        assert counts == Counter(range(size)), f"epoch {epoch}"


def test_a_step_that_was_not_completed_is_repeated_after_the_restart() -> None:
    (loader,) = build_loaders(30, 8, 1, max_microbatch=8)
    loader.next_step()
    loader.complete_step()
    _, unfinished = draw_step(loader)
    (again,) = build_loaders(30, 8, 1, max_microbatch=8)
    again.load_state_dict(loader.state_dict())
    _, made_again = draw_step(again)
    assert torch.equal(next(unfinished), next(made_again))


def test_epochs_differ_and_the_order_depends_only_on_the_seed() -> None:
    one, other = IndexedStream(50, seed=1), IndexedStream(50, seed=1)
    assert one.get_indices([(0, 50)]) != one.get_indices([(50, 100)])
    assert other.get_indices([(45, 100)]) == one.get_indices([(45, 100)])  # independent of earlier requests
    assert IndexedStream(50, seed=2).get_indices([(0, 50)]) != one.get_indices([(0, 50)])
    assert IndexedStream(5, seed=1, shuffle=False).get_indices([(3, 12)]) == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_loader_of_very_many_samples_takes_no_more_memory() -> None:
    def measure_step(size: int) -> int:
        """Return the peak of its memory in bytes."""
        tracemalloc.start()
        loader = Loader(range(size), BatchSizes(64, 16), RankTopology(1, 2), SampleOrder(seed=3))
        loader.load_state_dict({**loader.state_dict(), "cursor": size - 32})  # the batch reaches into the next epoch
        draw, batches = draw_step(loader)
        samples = [index for batch in batches for index in batch.tolist()]
        assert len(set(samples)) == len(samples) == draw.samples == 32
        assert max(samples) < size
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    measure_step(10**3)  # what Python and torch store after the first call
    assert measure_step(10**12) < 2 * measure_step(10**3) < 2_000_000


def test_restoring_on_other_data_is_rejected() -> None:
    (loader,) = build_loaders(30, 8, 1, max_microbatch=8)
    (other,) = build_loaders(31, 8, 1, max_microbatch=8)
    with pytest.raises(InputError, match=r"31 samples, the checkpoint's had 30"):
        other.load_state_dict(loader.state_dict())


def test_restoring_in_another_order_is_rejected() -> None:
    """A sample would be used twice in an epoch, and another one never."""
    (loader,) = build_loaders(30, 8, 1, max_microbatch=8)
    (as_given,) = build_loaders(30, 8, 1, max_microbatch=8, shuffle=False)
    state = loader.state_dict()
    with pytest.raises(InputError, match=r"another order \(as the data set has them\) .* \(shuffled by"):
        as_given.load_state_dict(state)
    earlier_version = {name: value for name, value in state.items() if name != "order"}
    with pytest.raises(InputError, match=r"\(not named\).* the version of Pacekeeper that wrote it, or start with"):
        loader.load_state_dict(earlier_version)


def test_restoring_with_another_seed_is_rejected_where_samples_are_shuffled() -> None:
    def build_loader(seed: int, shuffle: bool = True) -> Loader:
        return Loader(range(30), BatchSizes(8, 8), RankTopology(0, 1), SampleOrder(seed, shuffle))

    with pytest.raises(InputError, match=r"order \(.*seed 6\) .* \(.*seed 5\).* pass the same `seed` to pk.init\(\)"):
        build_loader(6).load_state_dict(build_loader(5).state_dict())
    build_loader(6, shuffle=False).load_state_dict(build_loader(5, shuffle=False).state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_shares_take_effect_on_the_same_step_of_all_ranks(workers: int) -> None:
    loaders = build_loaders(64, 8, 2, max_microbatch=1, num_workers=workers)
    history: list[list[int]] = [[], []]
    for step in range(8):
        for rank, loader in enumerate(loaders):
            if step == 2:
                loader.set_shares((7, 1))
            draw, batches = draw_step(loader)
            list(batches)
            history[rank].append(draw.samples)
    changed = 2 + loaders[0].lookahead
    assert loaders[0].lookahead == 2 * workers
    assert history[0] == [4] * changed + [7] * (8 - changed)
    assert history[1] == [4] * changed + [1] * (8 - changed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 2}, "global_batch_size=2 is less than the 3 ranks; raise it"),
        ({"max_microbatch": 0}, "max_microbatch=0 must be at least 1"),
        (
            {"static_shapes": True, "max_microbatch": 3},
            "=8 is no multiple of max_microbatch=3, which static_shapes needs",
        ),
        ({"static_shapes": True, "max_microbatch": 4}, "=8 is less than the 3 ranks, each with a microbatch of 4"),
        ({"batch_size": 4}, r"batch_size.*the loader sets this according to the shares; omit it"),
        ({"in_order": False}, r"in_order.*the loader sets this"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    names = {"global_batch", "max_microbatch", "static_shapes"}
    sizes = {"global_batch": 8, "max_microbatch": 2, **{name: arguments[name] for name in names & arguments.keys()}}
    options = {name: arguments[name] for name in arguments.keys() - names}
    with pytest.raises(InputError, match=message):
        Loader(NUMBERS, BatchSizes(**sizes), RankTopology(0, 3), **options)


def test_an_iterator_is_rejected() -> None:
    with pytest.raises(InputError, match="dataset: it is an iterator, which cannot restart; pass an iterable"):
        Loader(iter(range(3)), BatchSizes(8, 2), RankTopology())


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_job_silently() -> None:
    class BrokenDataset(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, _: int) -> int:
            raise StopIteration

    with pytest.raises(RuntimeError, match="the data set raised StopIteration"):
        Loader(BrokenDataset(), BatchSizes(8, 2), RankTopology()).next_step()


@pytest.mark.parametrize(
    ("shares", "message"),
    [((4, 4), "2 shares for 3 ranks"), ((4, 4, 1), "sum to 9"), ((8, 0, 0), "at least 1: a rank without samples")],
)
def test_bad_shares_are_named(shares: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchSizes(8, 2).check_shares(shares, 3, 1)


def test_ranks_of_one_replica_have_a_sample_for_each_microbatch() -> None:
    BatchSizes(12, 4).check_shares((9, 1, 1, 1), 4, replica_size=1)
    BatchSizes(14, 4).check_shares((9, 3, 1, 1), 4, replica_size=2)
    with pytest.raises(InputError, match=r"\[9, 1\] must all be at least 3: .* ranks 2 to 3; raise the smallest"):
        BatchSizes(12, 4).check_shares((1, 1, 9, 1), 4, replica_size=2)


def test_static_shapes_need_shares_of_whole_microbatches_and_equal_ones_in_a_replica() -> None:
    sizes = BatchSizes(24, 4, static_shapes=True)
    sizes.check_shares((12, 4, 4, 4), 4, replica_size=1)
    sizes.check_shares((8, 8, 4, 4), 4, replica_size=2)
    with pytest.raises(
        InputError,
        match=r"\[10, 6, 4, 4\] must all be multiples of max_microbatch=4, because the loader has static_shapes",
    ):
        sizes.check_shares((10, 6, 4, 4), 4, replica_size=1)
    with pytest.raises(InputError, match=r"\[12, 4\] must all be at least 12: .* ranks 0 to 1; raise the smallest"):
        sizes.check_shares((12, 4, 4, 4), 4, replica_size=2)
    assert sizes.split_equally(4) == (8, 8, 4, 4)
    assert sizes.split_microbatches(8, 3) == (4, 4, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_microbatch_has_one_size_with_any_shares(workers: int) -> None:
    loaders = build_loaders(50, 20, 3, max_microbatch=4, static_shapes=True, num_workers=workers)
    assert loaders[0].share_granularity == 4
    assert loaders[0].shares == (8, 8, 4)
    for shares in ((4, 4, 12), (12, 4, 4), None):
        for loader in loaders:
            loader.set_shares(shares)
        for _ in range(1 + loaders[0].lookahead):
            for loader in loaders:
                draw, batches = draw_step(loader)
                assert {len(batch) for batch in batches} == {4} == set(draw.sizes)
                loader.complete_step()
    with pytest.raises(InputError, match="multiples of max_microbatch=4"):
        loaders[0].set_shares((10, 6, 4))


def test_shares_cover_the_batch_in_rank_order() -> None:
    assert split_equally(10, 4) == (3, 3, 2, 2)
    assert [get_rank_interval((3, 1, 4), rank) for rank in range(3)] == [(0, 3), (3, 4), (4, 8)]
    sizes = BatchSizes(13, 4)
    assert sizes.split_microbatches(7, 3) == (3, 2, 2)
    assert [sizes.count_microbatches([share]) for share in (9, 3, 1)] == [3, 1, 1]
    assert sizes.count_microbatches((9, 3, 1)) == 3


def draw_step(loader: Loader) -> tuple[StepBatch, Iterator[Any]]:
    drawn = loader.next_step()
    assert drawn is not None
    return drawn


def build_loaders(
    size: int,
    batch: int,
    ranks: int,
    max_microbatch: int,
    static_shapes: bool = False,
    shuffle: bool = True,
    **options: Any,
) -> list[Loader]:
    return [
        Loader(
            torch.utils.data.Subset(NUMBERS, range(size)),
            BatchSizes(batch, max_microbatch, static_shapes),
            RankTopology(rank, ranks),
            SampleOrder(5, shuffle),
            **options,
        )
        for rank in range(ranks)
    ]

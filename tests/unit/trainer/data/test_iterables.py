"""Iterable data sets by position: the rules they must follow, and what saves work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pacekeeper.data.iterables import IterableAdapter, is_iterable
from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder
from pacekeeper_analysis.errors import InputError


class Letters:
    """No torch class, no length."""

    def __init__(self, *epochs: str) -> None:
        self.epochs = epochs
        self.begun = 0
        self.made = 0

    def __iter__(self) -> Iterator[str]:
        letters = self.epochs[min(self.begun, len(self.epochs) - 1)]
        self.begun += 1
        for letter in letters:
            self.made += 1
            yield letter


def test_epochs_follow_each_other() -> None:
    stream = IterableAdapter(Letters("abc"))
    assert "".join(stream[position] for position in (0, 2, 3, 4, 5, 8, 9)) == "acabcca"
    assert stream.size == 3


def test_an_earlier_position_begins_the_epoch_again() -> None:
    letters = Letters("abcdef")
    stream = IterableAdapter(letters)
    assert stream.__getitems__([4, 5, 1]) == ["e", "f", "b"]
    assert letters.begun == 2


def test_an_endless_stream_is_read_no_further_than_requested() -> None:
    class EndlessLetters:
        made = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.made += 1
                yield self.made - 1

    endless = EndlessLetters()
    assert IterableAdapter(endless).__getitems__([5, 999]) == [5, 999]
    assert endless.made == 1000


def test_earlier_epochs_are_not_read_if_the_checkpoint_has_their_size() -> None:
    letters = Letters("abcdef")
    assert IterableAdapter(letters, size=6)[600_002] == "c"
    assert letters.made == 3


@pytest.mark.parametrize(("position", "counted"), [(3, 0), (8, 6), (14, 6)])
def test_an_iterable_that_can_skip_is_skipped_to_the_position(position: int, counted: int) -> None:
    class SkippingLetters(Letters):
        def skip(self, count: int) -> Letters:
            return Letters(self.epochs[0][count:])

    letters = SkippingLetters("abcdef")
    assert IterableAdapter(letters)[position] == "abcdef"[position % 6]
    assert letters.made == counted  # once, to find out how many an epoch has


@pytest.mark.parametrize(
    ("letters", "size", "message"),
    [
        (Letters(""), None, "epoch 0 has no samples"),
        (Letters("abcd", ""), None, "epoch 1 has no samples; pass an iterable that restarts"),
        (Letters("abcd", "abc"), None, "epoch 1 ended after 3 samples instead of 4"),
        (Letters("abcd"), 6, "epoch 0 ended after 4 samples instead of 6"),
        (Letters("abcd"), 3, "epoch 0 has more samples than the 3 of an epoch"),
    ],
)
def test_epochs_of_unequal_size_are_rejected(letters: Letters, size: int | None, message: str) -> None:
    stream = IterableAdapter(letters, size)
    with pytest.raises(InputError, match=message):
        stream.__getitems__(list(range(10)))


def test_iterables_are_recognized() -> None:
    assert is_iterable(Letters("a"))
    assert not is_iterable([1, 2])
    assert not is_iterable(torch.arange(3))
    with pytest.raises(InputError, match="it is an iterator, which cannot restart"):
        is_iterable(iter("abc"))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_size_that_workers_find_out_is_saved_and_restored(workers: int) -> None:
    def build_loader() -> Loader:
        return Loader(
            Letters("abcdefg"),
            BatchSizes(5, 5),
            RankTopology(),
            num_workers=workers,
            collate_fn="".join,
        )

    def run_steps(loader: Loader, count: int) -> str:
        letters = ""
        for _ in range(count):
            drawn = loader.next_step()
            assert drawn is not None
            letters += "".join(drawn[1])
            loader.complete_step()
        return letters

    loader = build_loader()
    assert run_steps(loader, 3) == "abcdefgabcdefga"
    state = loader.state_dict()
    assert state["size"] == 7
    restored = build_loader()
    restored.load_state_dict(state)
    assert run_steps(restored, 2) == "bcdefgabcd"
    sized: Any = {**state, "size": 8}
    with pytest.raises(InputError, match="it has 7 samples, the checkpoint's had 8"):
        restored.load_state_dict(sized)


def test_lengths_need_an_index() -> None:
    with pytest.raises(InputError, match="lengths: an iterable data set is read in its order"):
        Loader(Letters("ab"), BatchSizes(1, 1), RankTopology(), SampleOrder(lengths=[1.0, 2.0]))

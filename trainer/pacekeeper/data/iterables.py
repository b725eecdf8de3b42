"""Iterable data sets: each rank iterates over the whole stream and skips the samples of other ranks.

The k-th sample that the iterable yields, over all epochs, is position k of the stream. Shares, leases, restarts and
workers therefore work as for data sets with an index. The cost is that each worker of each rank iterates over
everything. The iterable should yield what is cheap (a file's name, undecoded bytes), and `collate_fn` do the rest,
which runs for this rank's samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from pacekeeper.torch_internals import hide_worker_info
from pacekeeper_analysis.errors import InputError

_END_OF_EPOCH = object()


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set can only be iterated. Raises InputError for an iterator, which lasts for one epoch."""
    if isinstance(dataset, Iterator):
        raise InputError(
            "dataset: it is an iterator, which cannot restart; pass an iterable that restarts each epoch, such as a "
            "torch.utils.data.IterableDataset"
        )
    if isinstance(dataset, IterableDataset):
        return True
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


class IterableAdapter(Dataset[Any]):
    """Returns an iterable's samples by position. Positions should ascend: for an earlier one the epoch restarts.

    The iterable must yield the same samples in the same order on all ranks and in all workers, and equally many in each
    epoch. Two optional methods of the iterable are used. `set_epoch(epoch)` is called before an epoch, for example to
    shuffle. `skip(count)` returns an iterable without the first `count` samples, to return quickly into the middle of
    an epoch.
    """

    def __init__(self, iterable: Iterable[Any], size: int | None = None) -> None:
        """Create the adapter. `size`: samples in an epoch; None: unknown until the first one ends."""
        self.size = size
        self._iterable = iterable
        self._samples: Iterator[Any] = iter(())
        self._epoch: int | None = None
        """None: none has begun."""
        self._offset = 0
        self._skipped_samples = 0

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Return the samples at these positions. Raises InputError if the iterable breaks the rules."""
        # Many iterables skip what other workers take, which this adapter already does.
        with hide_worker_info():
            return [self._read_sample(position) for position in positions]

    def _read_sample(self, position: int) -> Any:
        epoch, offset = divmod(position, self.size) if self.size else (0, position)
        if epoch != self._epoch or offset < self._offset:
            self._begin_epoch(epoch, offset)
        while self._offset <= offset:
            sample = next(self._samples, _END_OF_EPOCH)
            if (
                sample is _END_OF_EPOCH and 0 < self._skipped_samples == self._offset
            ):  # the position may be beyond the end: count from the beginning
                self._begin_epoch(epoch, 0)
                continue
            if sample is _END_OF_EPOCH:
                self._end_epoch()
                return self._read_sample(position)
            self._offset += 1
        return sample

    def _begin_epoch(self, epoch: int, offset: int) -> None:
        if self._offset == self.size and next(self._samples, _END_OF_EPOCH) is not _END_OF_EPOCH:
            raise InputError(
                f"dataset: epoch {self._epoch} has more samples than the {self.size} of an epoch; "
                "each epoch must yield equally many, and __len__, if there is one, say how many"
            )
        _set_epoch(self._iterable, epoch)
        iterable: Any = self._iterable
        self._skipped_samples = offset if hasattr(iterable, "skip") else 0
        if self._skipped_samples:
            iterable = iterable.skip(offset)
            _set_epoch(iterable, epoch)
        self._samples, self._epoch, self._offset = iter(iterable), epoch, self._skipped_samples

    def _end_epoch(self) -> None:
        """Record the size of an epoch, now that the iterable has ended."""
        if self._offset == 0:
            raise InputError(f"dataset: epoch {self._epoch} has no samples; pass an iterable that restarts each epoch")
        if self.size is not None:
            raise InputError(
                f"dataset: epoch {self._epoch} ended after {self._offset} samples instead of {self.size}; "
                "each epoch must yield equally many, and __len__, if there is one, say how many"
            )
        self.size = self._offset


class SizedCollate:
    """A collate function that also returns the size of an epoch, if the collating process has it."""

    def __init__(self, dataset: IterableAdapter, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate

    def __call__(self, samples: list[Any]) -> tuple[int | None, Any]:
        return self._dataset.size, self._collate(samples)


def _set_epoch(iterable: Any, epoch: int) -> None:
    if hasattr(iterable, "set_epoch"):
        iterable.set_epoch(epoch)

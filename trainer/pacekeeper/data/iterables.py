"""Iterable data sets: each rank runs through the whole stream and leaves out what others take.

The k-th sample that the iterable yields, epochs one behind the other, is position k of the stream. So shares, leases,
restarts and workers are the same as for data sets with an index. What it costs: each worker of each rank iterates over
everything. So the iterable should yield what is cheap to make (a file's name, undecoded bytes), and `collate_fn` do the
rest, which runs for this rank's samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from pacekeeper.torch_internals import hide_worker_info
from pacekeeper_analysis.errors import InputError

_END_OF_EPOCH = object()


def is_iterable(dataset: Any) -> bool:
    """Whether it can only be iterated over. Raises InputError for an iterator, which would last for one epoch."""
    if isinstance(dataset, Iterator):
        raise InputError(
            "dataset: it is an iterator, which ends for good; give an iterable that begins anew each time, such as a "
            "torch.utils.data.IterableDataset"
        )
    if isinstance(dataset, IterableDataset):
        return True
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


class IterableAdapter(Dataset[Any]):
    """Gives an iterable's samples by position. Ascending ones: for an earlier one it has to begin the epoch again.

    The iterable must yield the same samples in the same order on all ranks and in all workers, and equally many in
    each epoch. Used where the iterable has them: `set_epoch(epoch)`, before an epoch (to shuffle by it, say), and
    `skip(count)`, an iterable without the first `count` samples, to come back into the middle of an epoch quickly.
    """

    def __init__(self, iterable: Iterable[Any], size: int | None = None) -> None:
        """`size`: samples in an epoch; None: it is known when the first one ends."""
        self.size = size
        self._iterable = iterable
        self._samples: Iterator[Any] = iter(())
        self._epoch = -1
        self._offset = 0
        self._skipped_samples = 0

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Raises InputError where the iterable does not keep to the rules."""
        # Many leave out what other workers take, which we do already.
        with hide_worker_info():
            return [self._read_sample(position) for position in positions]

    def _read_sample(self, position: int) -> Any:
        epoch, offset = divmod(position, self.size) if self.size else (0, position)
        if epoch != self._epoch or offset < self._offset:
            self._begin_epoch(epoch, offset)
        while self._offset <= offset:
            sample = next(self._samples, _END_OF_EPOCH)
            if sample is _END_OF_EPOCH and 0 < self._skipped_samples == self._offset:  # perhaps beyond the end: count from the beginning
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
        rest: Any = self._iterable
        self._skipped_samples = offset if hasattr(rest, "skip") else 0
        if self._skipped_samples:
            rest = rest.skip(offset)
            _set_epoch(rest, epoch)
        self._samples, self._epoch, self._offset = iter(rest), epoch, self._skipped_samples

    def _end_epoch(self) -> None:
        """The iterable has ended: now the size of an epoch is known."""
        if self._offset == 0:
            raise InputError(
                f"dataset: epoch {self._epoch} has no samples; give an iterable that begins anew each time"
            )
        if self.size is not None:
            raise InputError(
                f"dataset: epoch {self._epoch} ended after {self._offset} samples instead of {self.size}; "
                "each epoch must yield equally many, and __len__, if there is one, say how many"
            )
        self.size = self._offset


class SizedCollate:
    """A collate function that also tells how large an epoch is, as far as the process that collates knows."""

    def __init__(self, dataset: IterableAdapter, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate

    def __call__(self, samples: list[Any]) -> tuple[int | None, Any]:
        return self._dataset.size, self._collate(samples)


def _set_epoch(iterable: Any, epoch: int) -> None:
    if hasattr(iterable, "set_epoch"):
        iterable.set_epoch(epoch)

"""Batches arrive on the device whole, on request, and while it computes. The device is a double, or "meta"."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pacekeeper.data.device_transfer import OrderedBatchCopies, create_batch_mover, move_to_device
from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder

META = torch.device("meta")
NUMBERS: Any = torch.arange(40)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    parts: list[torch.Tensor]
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.x)


class TokenizerEncoding(UserDict[str, torch.Tensor]):
    """A dictionary of its own kind, as tokenizers return it."""

    encoded_by = "it"


class MovableSamples:
    """An object of which the loader knows only that it can be moved. Made of a batch's samples."""

    moved: ClassVar[list[tuple[int, Any, bool]]] = []

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.first = int(samples[0])

    def to(self, device: torch.device, non_blocking: bool) -> int:
        self.moved.append((self.first, device, non_blocking))
        return self.first


@pytest.fixture(autouse=True)
def no_moves() -> None:
    MovableSamples.moved.clear()


def move_to_meta(batch: Any) -> Any:
    return move_to_device(batch, META, OrderedBatchCopies(META))


def test_tensors_are_moved_wherever_they_stand_in_a_batch() -> None:
    x = torch.ones(1)
    batch = {
        "pair": Pair(x, "a"),
        "list": [x, (x, 3)],
        "record": Record(x, [x]),
        "own": MovableSamples([x]),
        "none": None,
    }
    found = move_to_meta(batch)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["list"][1], tuple)
    record = found["record"]
    on_device = [found["pair"].x, found["list"][0], found["list"][1][0], record.x, record.parts[0], record.doubled]
    assert {tensor.device for tensor in on_device} == {META}
    assert (found["pair"].name, found["list"][1][1], found["none"]) == ("a", 3, None)
    assert MovableSamples.moved == [(1, META, True)]
    assert batch["pair"].x.device.type == batch["record"].x.device.type == "cpu"  # type: ignore[attr-defined]


def test_a_mapping_keeps_its_type_and_the_batch_on_the_host_is_unchanged() -> None:
    encoding = TokenizerEncoding(ids=torch.ones(2))
    encoding.encoded_by = "another"
    found = move_to_meta(encoding)
    assert isinstance(found, TokenizerEncoding)
    assert found.encoded_by == "another"
    assert found["ids"].device == META
    assert encoding["ids"].device.type == "cpu"


def test_a_packed_sequence_moves_itself_since_a_part_of_it_stays_on_the_host() -> None:
    found = move_to_meta([pack_sequence([torch.ones(3), torch.ones(1)])])[0]
    assert isinstance(found, PackedSequence)
    assert found.data.device == META
    assert found.batch_sizes.device.type == "cpu"


def test_nothing_is_moved_without_a_device() -> None:
    batch = Record(torch.ones(2), [])
    assert create_batch_mover(None)(batch) is create_batch_mover(torch.device("cpu"))(batch) is batch


def test_batches_are_weighed_on_the_host() -> None:
    weighed_on = set()

    def compute_weight(batch: torch.Tensor) -> torch.Tensor:
        weighed_on.add(batch.device.type)
        return batch.sum()

    loader = Loader(
        NUMBERS, BatchSizes(4, 2), RankTopology(), SampleOrder(shuffle=False), weight=compute_weight, device=META
    )
    drawn = loader.next_step()
    assert drawn is not None
    assert drawn[0].weight == 0 + 1 + 2 + 3
    assert [batch.device for batch in drawn[1]] == [META, META]
    assert weighed_on == {"cpu"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_moved_on_request_and_an_outdated_one_never(workers: int) -> None:
    loader = Loader(
        NUMBERS,
        BatchSizes(4, 2),
        RankTopology(),
        SampleOrder(shuffle=False),
        collate_fn=MovableSamples,
        num_workers=workers,
        device=META,
    )
    drawn = loader.next_step()
    assert drawn is not None
    assert MovableSamples.moved == []
    assert next(drawn[1]) == 0
    assert [first for first, *_ in MovableSamples.moved] == [0]
    assert next(drawn[1]) == 2
    loader.complete_step()
    loader.start_leases(lambda _: 8, None)  # others take the next ones: prefetched batches of workers are of no use
    drawn = loader.next_step()
    assert drawn is not None
    assert list(drawn[1]) == [12, 14]
    assert [first for first, *_ in MovableSamples.moved] == [0, 2, 12, 14]


class VirtualCopies:
    """Double of a device that computes and copies at once, each in its order, in virtual seconds."""

    def __init__(self, copy_seconds: float) -> None:
        self.copy_seconds = copy_seconds
        self.now = 0.0
        """Of the host."""
        self.copied = self.computed = 0.0
        """When what each of the streams has been given so far is done."""

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copied = max(self.now, self.copied) + self.copy_seconds
        return tensor

    def join(self) -> None:
        self.computed = max(self.computed, self.copied)

    def compute(self, seconds: float) -> None:
        self.computed = max(self.now, self.computed) + seconds


@pytest.mark.parametrize(("copy_seconds", "lasts"), [(3.0, 2 * 3.0 + 5 * 10.0), (12.0, 5 * 2 * 12.0 + 10.0)])
def test_copies_overlap_the_computation_and_arrive_before_their_use(copy_seconds: float, lasts: float) -> None:
    """Five batches of two tensors, launched without a wait. The slower of the two streams is never idle."""
    device = VirtualCopies(copy_seconds)
    for _ in range(5):
        move_to_device({"x": torch.ones(1), "y": torch.ones(1)}, META, device)
        device.compute(10.0)
    assert device.computed == lasts

"""A snapshot is copied while the device works, and is whole before an optimizer changes what it copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pacekeeper.checkpointing.snapshots.snapshot_copies import (
    CopyTime,
    DeviceCopies,
    HostCopies,
    TornCopyError,
    create_slot_copies,
)

PINNED_FROM = 64
"""Bytes of memory that the device of this test can pin."""


class Event:
    def __init__(self, device: Device, name: str, number: float) -> None:
        """`number`: this number of quarters of a second after the device's first event."""
        self._device, self.name, self.number = device, name, number

    def record(self, stream: Any) -> None:
        raise AssertionError(f"it was when it was made, and not on {stream}")

    def query(self) -> bool:
        return self._device.reached

    def synchronize(self) -> None:
        self._device.log.append(f"host waits for {self.name}")

    def elapsed_time(self, end_event: Any) -> float:
        return 250.0 * float(end_event.number - self.number)


class Device:
    """Records in which order, and on which stream, it receives work."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_capturing = False
        self.reached = True
        self.number: float | None = None
        """Of the next event; None: they are numbered."""
        self._stream = "own"
        self._events = 0

    @contextmanager
    def use_copy_stream(self) -> Iterator[None]:
        self.log.append("side waits for own")
        self._stream = "side"
        yield
        self._stream = "own"

    def record_event(self) -> Event:
        self._events += 1
        self.log.append(f"{self._stream}: event {self._events}")
        number, self.number = self.number, None
        return Event(self, str(self._events), self._events if number is None else number)

    def wait(self, event: Any) -> None:
        self.log.append(f"{self._stream} waits for {event.name}")

    def pin(self, memory: torch.Tensor) -> bool:
        self.log.append(f"pin {memory.numel()}")
        return memory.numel() >= PINNED_FROM

    def unpin(self, memory: torch.Tensor) -> None:
        self.log.append(f"unpin {memory.numel()}")

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        self.log.append(f"{self._stream}: copy {[int(source.flatten()[0]) for source in sources]}")


class Model(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("mean", torch.tensor([3.0]))


def build_training() -> tuple[Model, torch.optim.Optimizer]:
    """Return a model with weight 1, bias 2 that belongs to no optimizer, buffer 3, and the weight's momentum 4."""
    model = Model()
    model.weight.grad = torch.tensor([1.0])
    optimizer = torch.optim.SGD([model.weight], lr=1.0, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.tensor([4.0])
    return model, optimizer


def step_without_effect(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Run the optimizer's hooks, and change nothing."""
    gradient, model.weight.grad = model.weight.grad, None
    optimizer.step()
    model.weight.grad = gradient


def list_state(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    return [tensor.detach() for tensor in (*model.state_dict().values(), momentum)]


def allocate_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def test_optimizer_state_is_copied_concurrently_and_the_next_step_waits_for_it() -> None:
    device = Device()
    model, optimizer = build_training()
    copies = DeviceCopies(device, [optimizer])
    step_without_effect(model, optimizer)
    targets = allocate_copies(list_state(model, optimizer))
    copies.begin(targets, list_state(model, optimizer))
    device.log.append("forward and backward pass")
    optimizer.step()
    optimizer.step()
    assert device.log == [
        "own: event 1",
        "own: copy [2, 3]",  # the next forward pass may change a buffer, and it is unknown what changes the bias
        "own: event 2",
        "side waits for own",
        "side: copy [1, 4]",
        "side: event 3",
        "forward and backward pass",
        "own: event 4",
        "own waits for 3",
        "own waits for 3",
    ]
    assert [float(target) for target in targets] == [1, 2, 3, 4]
    device.log.clear()
    assert copies.finish() == CopyTime(blocked_seconds=0.25, concurrent_seconds=0.25), (
        "not what the device had to do before"
    )
    optimizer.step()
    assert device.log == ["host waits for 3"]


def test_an_optimizer_that_steps_during_the_copy_waits_for_it() -> None:
    device = Device()
    model, optimizer = build_training()
    copies = DeviceCopies(device, [optimizer])
    copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
    device.number = 2.5  # 1: begun; 2: what could not be copied concurrently was; 3: over
    optimizer.step()
    assert copies.finish() == CopyTime(blocked_seconds=0.25 + 0.125, concurrent_seconds=0.25)
    copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
    optimizer.step()
    device.reached = False  # the device has not reached the place where it would wait
    assert copies.finish() == CopyTime(blocked_seconds=0.25, concurrent_seconds=0.25)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_change_that_does_not_wait_for_the_copy_leaves_it_torn(steps: int) -> None:
    """A script does this that moves its parameters, and moves them back before the optimizer steps."""
    model, optimizer = build_training()
    copies = DeviceCopies(Device(), [optimizer])
    for changed in (model.weight, model.mean, model.bias):
        step_without_effect(model, optimizer)
        copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
        with torch.no_grad():
            changed.add_(1)
        for _ in range(steps):
            optimizer.step()
        if changed is model.weight:
            with pytest.raises(TornCopyError, match=r"after optimizer\.step"):
                copies.finish()
        else:  # it was copied at once
            assert copies.finish() is not None
    assert copies.finish() is None


def test_all_is_copied_first_because_an_optimizer_in_a_graph_waits_for_nothing() -> None:
    device = Device()
    model, optimizer = build_training()
    copies = DeviceCopies(device, [optimizer])
    step_without_effect(model, optimizer)  # the warm-up of the graph
    device.is_capturing = True
    optimizer.zero_grad()
    optimizer.step()
    device.is_capturing = False
    copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
    assert device.log == [
        "own: event 1",
        "own: copy [1, 2, 3, 4]",
        "own: event 2",
        "side waits for own",
        "side: event 3",
    ]


def test_all_is_copied_first_for_an_optimizer_whose_graph_was_captured_before() -> None:
    """No hook and no version of a tensor reports a graph that runs: it would change what is being copied."""
    device = Device()
    model, optimizer = build_training()
    copies = DeviceCopies(device, [optimizer])
    copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
    assert device.log == [
        "own: event 1",
        "own: copy [1, 2, 3, 4]",
        "own: event 2",
        "side waits for own",
        "side: event 3",
    ]
    copies.finish()
    step_without_effect(model, optimizer)
    for copied in ("own: copy [2, 3]", "own: copy [1, 2, 3, 4]"):
        device.log.clear()
        copies.begin(allocate_copies(list_state(model, optimizer)), list_state(model, optimizer))
        assert device.log[1] == copied, "concurrently, only where it has stepped since the copy before"
        copies.finish()


def test_memory_is_pinned_where_the_device_supports_it() -> None:
    device = Device()
    copies = DeviceCopies(device, [])
    copies.pin(torch.zeros(PINNED_FROM, dtype=torch.uint8))()
    copies.pin(torch.zeros(PINNED_FROM - 1, dtype=torch.uint8))()
    assert device.log == ["pin 64", "unpin 64", "pin 63"]


def test_on_the_host_a_copy_is_complete_at_once() -> None:
    model, optimizer = build_training()
    copies = create_slot_copies([optimizer])
    assert isinstance(copies, HostCopies)
    targets = allocate_copies(list_state(model, optimizer))
    copies.begin(targets, list_state(model, optimizer))
    assert [float(target) for target in targets] == [1, 2, 3, 4]
    assert copies.finish() is None

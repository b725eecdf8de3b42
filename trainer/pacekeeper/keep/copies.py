"""Copies of the state into a slot of a snapshot, made beside the device's work where there is a device.

On a GPU the slot is pinned, and what only the optimizers' steps change is copied on a stream of its own, behind all
that was launched before; the next optimizer's step waits for it, on the device. Everything else, such as buffers that
the next forward pass changes, is copied in the order of the device's other work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from pacekeeper.observe.clock import DeviceEvent
from pacekeeper.torch_internals import copy_tensors, read_tensor_version

_log = logging.getLogger(__name__)


class TornCopyError(RuntimeError):
    """What was copied has changed meanwhile."""


@dataclass(frozen=True)
class CopyTime:
    """What a device took for a copy, in seconds."""

    blocked_seconds: float
    """For which its other work waited for the copy."""
    concurrent_seconds: float
    """For which it copied beside that work."""


class SlotCopies(Protocol):
    """One copy at a time."""

    asynchronous: bool
    """Whether the training goes on while the host does something else, since a device does the work of the steps."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Has copies into `memory` (uint8, on the host; see `touch`) begin without waiting; returns what ends that. In
        the thread that trains."""

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Begins to copy the present content of each of `sources` into its target, on the host."""

    def finish(self) -> CopyTime | None:
        """Until the copy is complete. None: the host made it, in `begin`.

        Raises TornCopyError; the copy is over then, too.
        """


class HostCopies:
    """Of a state on the host: complete at once."""

    asynchronous: bool = False

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:  # noqa: ARG002  # there is no device
        return lambda: None

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets:
            copy_tensors(targets, sources)

    def finish(self) -> CopyTime | None:
        return None


class CopyStreams(Protocol):
    """Those of one device."""

    def use_copy_stream(self) -> AbstractContextManager[object]:
        """What is launched inside runs on a stream of its own, behind all that was launched on the current one."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Launches it on the current stream; copies between tensors on the host are made at once."""

    def record_event(self) -> DeviceEvent:
        """Here, on the current stream."""

    def wait(self, event: DeviceEvent) -> None:
        """What is launched on the current stream from now on comes after `event`."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched goes into a graph, to run some other time."""

    def pin(self, memory: torch.Tensor) -> bool: ...

    def unpin(self, memory: torch.Tensor) -> None: ...


class DeviceCopies:
    """Of a state on a device, which goes on with its work meanwhile."""

    asynchronous: bool = True

    def __init__(self, streams: CopyStreams, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """`optimizers`: that change parameters; each of their steps waits for the copy that is under way."""
        self._streams = streams
        self._pending_copy: _PendingCopy | None = None
        self._unchanged: list[tuple[torch.Tensor, int]] = []
        """What is copied beside the work, and its version: to be the same until an optimizer steps."""
        self._torn = False
        self._stepped_optimizers: set[torch.optim.Optimizer] = set()
        """Which have stepped since the last copy began, and asked us before: those in a graph that was captured before
        this was made do not, whatever Python knows of it."""
        self._captured_optimizers: set[torch.optim.Optimizer] = set()
        """Which step in a graph by now."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda its, *_: self._handle_optimizer_step(its))

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        if not self._streams.pin(memory):
            _log.warning(
                "%d MiB for a copy of the state cannot be pinned: copying it takes longer", memory.numel() >> 20
            )
            return lambda: None
        return lambda: self._streams.unpin(memory)

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert self._pending_copy is None, "finish() comes first"
        stepped = self._find_stepped_storages(self._stepped_optimizers - self._captured_optimizers)
        self._stepped_optimizers.clear()
        pairs = list(zip(targets, sources, strict=True))
        at_once = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() not in stepped]
        later = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() in stepped]
        start = self._streams.record_event()
        self._launch_copy(at_once)
        apart = self._streams.record_event()
        with self._streams.use_copy_stream():
            self._launch_copy(later)
            end = self._streams.record_event()
        self._pending_copy = _PendingCopy(start, apart, end, sources)
        self._unchanged = [(source, read_tensor_version(source)) for _, source in later]
        self._torn = False

    def finish(self) -> CopyTime | None:
        if self._pending_copy is None:
            return None
        copy = self._pending_copy
        copy.end.synchronize()
        self._check_for_changes()
        self._pending_copy = None
        if self._torn:
            raise TornCopyError(
                "parameters or moments were changed outside of an optimizer's step while they were copied; change them "
                "behind optimizer.step(), in the same step"
            )
        return copy.copy_time

    def _launch_copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if pairs:
            self._streams.copy([target for target, _ in pairs], [source for _, source in pairs])

    def _handle_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._streams.is_capturing:
            self._captured_optimizers.add(optimizer)
            return
        self._stepped_optimizers.add(optimizer)
        if self._pending_copy is not None:
            self._check_for_changes()
            if self._pending_copy.awaited is None:
                self._pending_copy.awaited = self._streams.record_event()
            self._streams.wait(self._pending_copy.end)

    def _check_for_changes(self) -> None:
        """Whoever changes what is copied, without waiting for it, has done so before the first step."""
        self._torn |= any(read_tensor_version(tensor) != version for tensor, version in self._unchanged)
        self._unchanged = []

    def _find_stepped_storages(self, optimizers: Collection[torch.optim.Optimizer]) -> set[int]:
        """Where in the device's memory lies what these optimizers' steps alone change."""
        found = [
            tensor
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
            if isinstance(tensor, torch.Tensor)
        ]
        return {_get_local_tensor(tensor).untyped_storage().data_ptr() for tensor in found}


@dataclass
class _PendingCopy:
    """A copy."""

    start: DeviceEvent
    concurrent_start: DeviceEvent
    """From here on the other work goes on beside it."""
    end: DeviceEvent
    sources: list[torch.Tensor]
    """Memory that must not be used for anything else before the end."""
    awaited: DeviceEvent | None = None
    """Where the other work comes to wait for it."""

    @property
    def copy_time(self) -> CopyTime:
        """When it is over."""
        held = self.start.elapsed_time(self.concurrent_start)
        if self.awaited is not None and self.awaited.query():  # else there is nothing to be waited for any more
            held += max(0.0, self.awaited.elapsed_time(self.end))
        return CopyTime(held * 1e-3, self.concurrent_start.elapsed_time(self.end) * 1e-3)


class CudaCopyStreams:
    """Of the GPU that is current when this is made."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def use_copy_stream(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy_tensors(targets, sources, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it leaves the core to others
        event.record()
        return event

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event), "event() makes them"
        torch.cuda.current_stream().wait_event(event)

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pin(self, memory: torch.Tensor) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA keeps the error for whoever launches something next
            torch.ones(1, device="cuda")
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def map_pages(memory: torch.Tensor) -> None:
    """Has all pages of `memory` (uint8, on the host) mapped, before it is pinned: nobody can launch anything while CUDA
    does it, 0.3 s for 8 GB, but eight times as long for pages that this process has never touched."""
    memory[::PAGESIZE].add_(0)


def create_slot_copies(optimizers: Collection[torch.optim.Optimizer]) -> SlotCopies:
    """What suits a state that these change."""
    parameters = (its for optimizer in optimizers for group in optimizer.param_groups for its in group["params"])
    return DeviceCopies(CudaCopyStreams(), optimizers) if any(its.is_cuda for its in parameters) else HostCopies()


def _get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

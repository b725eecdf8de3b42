"""Copies of the state into a slot of a snapshot, concurrent with the device's work if there is a device.

On a GPU the slot is pinned. What only the optimizers' steps change is copied on a separate stream, after all work that
was launched before. The next optimizer step waits for it, on the device. Everything else, such as buffers that the next
forward pass changes, is copied in the order of the device's other work.
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

from pacekeeper.torch_internals import copy_tensors, read_tensor_version
from pacekeeper_rank.work_clock import DeviceEvent

_log = logging.getLogger(__name__)


class TornCopyError(RuntimeError):
    """The copied content has changed during the copy."""


@dataclass(frozen=True)
class CopyTime:
    """Time that a device took for a copy, in seconds."""

    blocked_seconds: float
    """Time for which its other work waited for the copy."""
    concurrent_seconds: float
    """Time for which it copied concurrently with that work."""


class SlotCopies(Protocol):
    """Makes one copy at a time."""

    asynchronous: bool
    """Whether training continues while the host works, because a device does the work of the steps."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Make copies into `memory` (uint8, on the host; see `map_pages`) begin without waiting; return what ends that.

        Call it in the training thread.
        """

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Begin to copy the present content of each of `sources` into its target, on the host."""

    def finish(self) -> CopyTime | None:
        """Wait until the copy is complete. Returns None if the host made it in `begin`.

        Raises TornCopyError; the copy has ended then, too.
        """


class HostCopies:
    """Copies of a state on the host: complete at once."""

    asynchronous: bool = False

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:  # noqa: ARG002  # there is no device
        return lambda: None

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets:
            copy_tensors(targets, sources)

    def finish(self) -> CopyTime | None:
        return None


class CopyStreams(Protocol):
    """The streams of one device."""

    def use_copy_stream(self) -> AbstractContextManager[object]:
        """Return a context whose work runs on a separate stream, after all that was launched on the current one."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Launch a copy on the current stream; copies between tensors on the host are made at once."""

    def record_event(self) -> DeviceEvent:
        """Record an event on the current stream."""

    def wait(self, event: DeviceEvent) -> None:
        """Make work that is launched on the current stream from now on wait for `event`."""

    @property
    def is_capturing(self) -> bool:
        """Whether launched work is captured in a graph, to run later."""

    def pin(self, memory: torch.Tensor) -> bool: ...

    def unpin(self, memory: torch.Tensor) -> None: ...


class DeviceCopies:
    """Copies of a state on a device, which continues its work during the copy."""

    asynchronous: bool = True

    def __init__(self, streams: CopyStreams, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Create the copies. `optimizers` change parameters; each of their steps waits for the copy in progress."""
        self._streams = streams
        self._pending_copy: _PendingCopy | None = None
        self._unchanged: list[tuple[torch.Tensor, int]] = []
        """Tensors that are copied concurrently, and their versions, which must not change until an optimizer steps."""
        self._torn = False
        self._stepped_optimizers: set[torch.optim.Optimizer] = set()
        """Optimizers that have stepped since the last copy began, and called the hook.

        Those in a graph that was captured before this object existed do not call it.
        """
        self._captured_optimizers: set[torch.optim.Optimizer] = set()
        """Optimizers whose steps are now part of a graph."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda stepped, *_: self._handle_optimizer_step(stepped))

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        if not self._streams.pin(memory):
            _log.warning("cannot pin %d MiB for a copy of the state: copying takes longer", memory.numel() >> 20)
            return lambda: None
        return lambda: self._streams.unpin(memory)

    def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert self._pending_copy is None, "finish() comes first"
        stepped_storages = self._find_stepped_storages(self._stepped_optimizers - self._captured_optimizers)
        self._stepped_optimizers.clear()
        pairs = list(zip(targets, sources, strict=True))
        blocking_pairs = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() not in stepped_storages]
        concurrent_pairs = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() in stepped_storages]
        start = self._streams.record_event()
        self._launch_copy(blocking_pairs)
        concurrent_start = self._streams.record_event()
        with self._streams.use_copy_stream():
            self._launch_copy(concurrent_pairs)
            end = self._streams.record_event()
        self._pending_copy = _PendingCopy(start, concurrent_start, end, sources)
        self._unchanged = [(source, read_tensor_version(source)) for _, source in concurrent_pairs]
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
                "after optimizer.step(), in the same step"
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
        """Detect a change of copied tensors that did not wait for the copy; it happens before the first step."""
        self._torn |= any(read_tensor_version(tensor) != version for tensor, version in self._unchanged)
        self._unchanged = []

    def _find_stepped_storages(self, optimizers: Collection[torch.optim.Optimizer]) -> set[int]:
        """Return the storages in the device's memory that only these optimizers' steps change."""
        tensors = [
            tensor
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
            if isinstance(tensor, torch.Tensor)
        ]
        return {_get_local_tensor(tensor).untyped_storage().data_ptr() for tensor in tensors}


@dataclass
class _PendingCopy:
    """A copy in progress."""

    start: DeviceEvent
    concurrent_start: DeviceEvent
    """From here on the other work runs concurrently."""
    end: DeviceEvent
    sources: list[torch.Tensor]
    """Tensors whose memory must not be reused before the end."""
    awaited: DeviceEvent | None = None
    """Where the other work waits for it."""

    @property
    def copy_time(self) -> CopyTime:
        """Time of the complete copy."""
        blocked_ms = self.start.elapsed_time(self.concurrent_start)
        if self.awaited is not None and self.awaited.query():  # otherwise no work waits for it
            blocked_ms += max(0.0, self.awaited.elapsed_time(self.end))
        return CopyTime(blocked_ms * 1e-3, self.concurrent_start.elapsed_time(self.end) * 1e-3)


class CudaCopyStreams:
    """Streams of the GPU that is current when this is created."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def use_copy_stream(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy_tensors(targets, sources, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # a waiting thread leaves the core to others
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
        with suppress(RuntimeError):  # CUDA reports the error at the next launch: clear it here
            torch.ones(1, device="cuda")
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def map_pages(memory: torch.Tensor) -> None:
    """Map all pages of `memory` (uint8, on the host) before it is pinned.

    No thread can launch work while CUDA pins: 0.3 s for 8 GB, but eight times as long for untouched pages.
    """
    memory[::PAGESIZE].add_(0)


def create_slot_copies(optimizers: Collection[torch.optim.Optimizer]) -> SlotCopies:
    """Return the copies for a state that these optimizers change."""
    parameters = (tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"])
    return DeviceCopies(CudaCopyStreams(), optimizers) if any(tensor.is_cuda for tensor in parameters) else HostCopies()


def _get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""A double of an asynchronous device, in virtual time: for what has to be right on GPUs and is tested without one.

A `World` has one simulated rank for each script that it is given. A rank's host goes on at once where it launches work;
the work runs later, in the order of its stream, for as long as the script sets. Collectives begin when the streams of
all ranks have come to them. Time passes on the host by `busy`, and where the host waits for the device. A world that is
not asynchronous is a CPU with gloo: the host waits for all that it launches but collectives, and for these in
`Work.wait`.

The ranks are threads that pass a baton: it goes to the one whose host is earliest, so that what a rank sees of the
device at some time is all there is to see, and every run is the same. Times are integers, nanoseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pacekeeper_rank.work_clock import Clock, DeviceClock, HostClock

BATON_TIMEOUT_SECONDS = 120.0
"""Seconds of real time after which a rank that waits for the baton gives up."""


class DeviceTask:
    """Work on a stream, which begins when that is launched and the tasks before it are done."""

    def __init__(
        self, launched: int, before: Sequence[DeviceTask], ns: int, arrivals: list[DeviceTask] | None, ranks: int
    ) -> None:
        """arrivals: with the same work of the others, that begins when all are there; None: no others are needed."""
        self._launched = launched
        self._before = tuple(before)
        self._ns = ns
        self._ranks = ranks
        self._ready: int | None = None
        self._done: int | None = None
        self._arrivals = [] if arrivals is None else arrivals
        self._arrivals.append(self)

    @property
    def ready(self) -> int | None:
        """When it might begin; None: not known yet."""
        if self._ready is None:
            ends = [task.done for task in self._before]
            if None not in ends:
                self._ready = max([self._launched, *(end for end in ends if end is not None)])
                self._before = ()
        return self._ready

    @property
    def done(self) -> int | None:
        """When it was or will be; None: not known before others have come to where it begins."""
        if self._done is None and len(self._arrivals) == self._ranks:
            all_ready = [task.ready for task in self._arrivals]
            if None not in all_ready:
                self._done = max(time for time in all_ready if time is not None) + self._ns
        return self._done


class Stream:
    def __init__(self) -> None:
        self.tail: list[DeviceTask] = []
        """What the next task of it waits for."""

    def wait_for(self, tasks: Sequence[DeviceTask]) -> None:
        self.tail = [*self.tail, *tasks]


class DeviceWorld:
    """Ranks, each with a host and a device, and what they meet in."""

    def __init__(self, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous
        self.ranks: list[DeviceRank] = []
        self._baton = threading.Condition()
        self._turn = 0
        self._failures: list[BaseException] = []

    def run(self, *scripts: Callable[[DeviceRank], None]) -> None:
        """Each in a rank of its own. Raises what the first of them to fail has raised."""
        self.ranks = [DeviceRank(self, number, len(scripts)) for number in range(len(scripts))]
        threads = [
            threading.Thread(target=self._run, args=(rank, script))
            for rank, script in zip(self.ranks, scripts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    @property
    def now(self) -> int:
        """On the host of the rank whose turn it is."""
        return self.ranks[self._turn].now

    def pass_baton(self, rank: DeviceRank) -> None:
        """Returns when it is this rank's turn."""
        with self._baton:
            self._choose_next_turn()
            if self._turn != rank.number:
                self._baton.notify_all()
                if not self._baton.wait_for(lambda: self._turn == rank.number or self._failures, BATON_TIMEOUT_SECONDS):
                    raise TimeoutError(f"rank {rank.number} has waited {BATON_TIMEOUT_SECONDS} s for its turn")
            if self._failures:
                raise RuntimeError("another rank has failed")

    def _choose_next_turn(self) -> None:
        """The next turn: of the earliest rank that can go on."""
        candidates = [(time, rank.number) for rank in self.ranks if (time := rank.next_time) is not None]
        if candidates:
            self._turn = min(candidates)[1]
        elif not all(rank.finished for rank in self.ranks):
            raise RuntimeError("all ranks wait for each other")

    def _run(self, rank: DeviceRank, script: Callable[[DeviceRank], None]) -> None:
        try:
            with self._baton:
                self._baton.wait_for(lambda: self._turn == rank.number or self._failures, BATON_TIMEOUT_SECONDS)
            script(rank)
            rank.finished = True
        except BaseException as error:
            with self._baton:
                self._failures.append(error)
                self._baton.notify_all()
            return
        with self._baton:
            self._choose_next_turn()
            self._baton.notify_all()


class DeviceRank:
    """One simulated rank: its host, whose time is `now`, and its device, which implements `clock.Device`."""

    def __init__(self, world: DeviceWorld, number: int, ranks: int) -> None:
        self.world = world
        self.number = number
        self.ranks = ranks
        self.now = 10**9
        """Of its host."""
        self.drift = 0.0
        """By which the device's own clock is faster."""
        self.finished = False
        self.computing = self.current = Stream()
        self._awaited: DeviceTask | None = None

    # The host

    def clock(self) -> Clock:
        """That fits the world."""
        return DeviceClock(self, self.nanoseconds) if self.world.asynchronous else HostClock(self.nanoseconds)

    def nanoseconds(self) -> int:
        return self.now

    def busy(self, ns: int) -> None:
        """The host does work of its own for `ns`."""
        self.now += ns
        self.world.pass_baton(self)

    def wait_for(self, task: DeviceTask) -> None:
        """The host waits for the device."""
        self._awaited = task
        self.world.pass_baton(self)
        assert task.done is not None
        self.now = max(self.now, task.done)
        self._awaited = None

    @property
    def next_time(self) -> int | None:
        """When the host does; None: not known yet, or no more."""
        if self.finished:
            return None
        if self._awaited is None:
            return self.now
        done = self._awaited.done
        return None if done is None else max(self.now, done)

    # The device

    def launch(self, ns: int) -> None:
        """Work for `ns`, on the current stream."""
        task = self.submit(ns)
        if not self.world.asynchronous:
            self.wait_for(task)

    def submit(self, ns: int, arrivals: list[DeviceTask] | None = None, ranks: int = 1) -> DeviceTask:
        stream = self.current
        task = DeviceTask(self.now, stream.tail, ns, arrivals, ranks)
        stream.tail = [task]
        return task

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def event(self) -> Event:
        return Event(self)

    def stream(self) -> Stream:
        return self.current

    @property
    def captures(self) -> bool:
        return False

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()


class Event:
    """As torch.cuda.Event, whose milliseconds have 32 bits."""

    def __init__(self, rank: DeviceRank) -> None:
        self._rank = rank
        self._task: DeviceTask | None = None

    def record(self, stream: Stream) -> None:
        with self._rank.on(stream):
            self._task = self._rank.submit(0)

    def query(self) -> bool:
        done = self.task.done
        return done is not None and done <= self._rank.now

    def synchronize(self) -> None:
        self._rank.wait_for(self.task)

    def elapsed_time(self, end_event: Event) -> float:
        start, end = self.task.done, end_event.task.done
        assert start is not None
        assert end is not None
        assert max(start, end) <= self._rank.now, "torch raises where an event is not complete"
        return float(np.float32((end - start) * 1e-6 * (1 + self._rank.drift)))

    @property
    def task(self) -> DeviceTask:
        assert self._task is not None, "torch raises where an event is not recorded"
        return self._task


class GroupLinks:
    """What the ranks of a group meet in; one for all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._arrivals: list[list[DeviceTask]] = []

    def get_arrivals(self, number: int) -> list[DeviceTask]:
        while len(self._arrivals) <= number:
            self._arrivals.append([])
        return self._arrivals[number]


class FakeGroup:
    """One rank's view of a process group: fires hooks as torch's does. Its collectives run on a stream of their own."""

    group_name, group_desc = "0", "double"

    def __init__(self, rank: DeviceRank, links: GroupLinks) -> None:
        self._rank = rank
        self._links = links
        self._stream = Stream()
        self._entered = 0
        self._before: Callable[[Any], None] = lambda _: None
        self._after: Callable[[Any], None] = lambda _: None

    def size(self) -> int:
        return self._links.ranks

    def register_pre_hook(self, _: int, hook: Callable[[Any], None]) -> None:
        self._before = hook

    def register_post_hook(self, _: int, hook: Callable[[Any], None]) -> None:
        self._after = hook

    def all_reduce(self, ns: int, async_op: bool = True) -> FakeWork | None:
        """Takes `ns` when all ranks have come to it. None: the current stream waits for it at once, as NCCL has it
        where `async_op` is false."""
        rank, on_device = self._rank, self._rank.world.asynchronous
        tensor = SimpleNamespace(nbytes=1 << 20, is_cpu=not on_device)
        call = SimpleNamespace(
            name="ALLREDUCE", async_op=async_op, input_tensors=[tensor], output_tensors=[], work=None
        )
        self._before(call)
        if async_op or not on_device:
            self._stream.wait_for(rank.current.tail)
            with rank.on(self._stream):
                call.work = FakeWork(rank, self._enter_collective(ns))
        else:
            self._enter_collective(ns)
        self._after(call)
        work: FakeWork | None = call.work
        return work

    def barrier(self) -> None:
        """As NCCL's: the current stream waits for it, and then the host."""
        call = SimpleNamespace(name="BARRIER", async_op=False, input_tensors=[], output_tensors=[], work=None)
        self._before(call)
        self._rank.wait_for(self._enter_collective(0))
        self._after(call)

    def _enter_collective(self, ns: int) -> DeviceTask:
        arrivals = self._links.get_arrivals(self._entered)
        self._entered += 1
        return self._rank.submit(ns, arrivals, self._links.ranks)


class FakeWork:
    """As torch's: on a CPU the host waits for it, on a device the current stream does."""

    def __init__(self, rank: DeviceRank, task: DeviceTask) -> None:
        self._rank = rank
        self._task = task

    def wait(self) -> None:
        if self._rank.world.asynchronous:
            self._rank.current.wait_for([self._task])
        else:
            self._rank.wait_for(self._task)

    def get_future(self) -> Any:
        raise RuntimeError("it has none")

    def is_completed(self) -> bool:
        done = self._task.done
        return done is not None and done <= self._rank.now

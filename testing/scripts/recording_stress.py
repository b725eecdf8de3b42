"""Stresses the part of recording in C: random calls, answers that raise, threads, garbage in between.

usage: recording_stress.py LIBRARY ROUNDS SEED. Prints how many objects and bytes are left of the second half of the
rounds. Nothing of torch or numpy is loaded, so that it runs under a sanitizer.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import random
import sys
import threading
import time
import tracemalloc
import weakref
from collections import deque
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

HEADER, CAPACITY = 4096, 64
MAX_PENDING = 300


def load_module(path: str) -> Any:
    spec = spec_from_file_location("recording", path, loader=ExtensionFileLoader("recording", path))
    assert spec is not None
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


class Mark:
    __slots__ = ("ns",)

    def __init__(self, ns: int) -> None:
        self.ns = ns


class Odd(Exception):
    pass


class RandomAttributes:
    """An object whose attributes are what is wanted, mostly."""

    def __init__(self, rng: random.Random, **answers: Any) -> None:
        self._chance, self._answers = rng, answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        drawn = self._chance.random()
        if drawn < 0.01:
            raise Odd(name)
        if drawn < 0.02:
            return self._chance.choice([None, "word", -1, 2**70, 1.5, [], object()])
        return self._answers[name]


class Clock:
    captures = False

    def __init__(self, rng: random.Random) -> None:
        self._chance = rng

    def mark(self) -> Any:
        return self._chance.choice([Mark(time.monotonic_ns()), object()])


def skip_wait(*_: Any) -> None: ...


def create_recording(module: Any, rng: random.Random) -> tuple[Any, Any, Any]:
    """Ring, recorder and watcher, with as little Python as they can have."""
    queued: deque[Any] = deque(maxlen=4)

    class Ring(module.Ring):  # type: ignore[misc]
        pass

    class Reference:
        """What C calls for what it does not do."""

        def entered(self, _: Any) -> None: ...
        def reduced(self) -> None: ...
        def waited(self, *_: Any) -> None: ...
        def backward_computed(self) -> None: ...
        def end_step(self, *_: Any) -> None:
            if rng.random() < 0.1:
                raise Odd("end_step")
            self.phase = 1
            self.go_on(time.monotonic_ns(), None)  # type: ignore[attr-defined]

    class Recorder(module.Recorder, Reference):  # type: ignore[misc]
        pass

    class Watcher(module.Watcher):  # type: ignore[misc]
        def _notice_timed(self) -> None:
            timed.clear()

        def _issued_at_once(self, entry: Any, start: Any) -> None:
            timed.append((entry, start))

    def queue(callback: Any) -> None:
        queued.append(callback)
        if rng.random() < 0.3:
            queued.popleft()()

    def graph_task() -> int:
        return rng.choice([-1, -1, 1, 2, 3])

    ring, recorder, watcher = Ring(), Recorder(), Watcher()
    timed: deque[Any] = deque()
    buffer = mmap.mmap(-1, HEADER + 64 * CAPACITY)
    offsets = tuple(8 * (3 + number) for number in range(len(module.STATE)))
    for unconnected_call in (
        lambda: ring.write(1, 2, 3),
        lambda: recorder.end_step(),
        lambda: recorder.load(skip_wait),
        lambda: watcher.notice_ends(),
        lambda: module.Hooks().enter(None),
        lambda: ring.connect(buffer, HEADER, CAPACITY + 1, 0, offsets),
        lambda: ring.connect(buffer, HEADER, CAPACITY, 0, (HEADER, *offsets[1:])),
        lambda: ring.connect(buffer, HEADER, CAPACITY, 0, offsets[1:]),
    ):
        expect_refusal(unconnected_call)
    ring.connect(buffer, HEADER, CAPACITY, 0, offsets)
    recorder.connect(ring, Reference, Mark, lambda *arguments: arguments, skip_wait, graph_task, 8, None)
    recorder.phase, recorder.clock, recorder.notice_wait = 1, Clock(rng), skip_wait
    recorder.training_thread = threading.get_ident()
    recorder.go_on(time.monotonic_ns(), None)
    watcher.connect(recorder, timed, queue, {"ALLREDUCE": 1, 0: 10, 1: 11, 2: 2, 3: 1, 2**70: 3, 200: 4})
    recorder.notice_ends = watcher.notice_ends
    return ring, recorder, watcher


def expect_refusal(call: Any) -> None:
    try:
        call()
    except (RuntimeError, ValueError):
        return
    raise AssertionError("that should not have been taken")


class Optimizer:
    pass


MAY_BE_RAISED = (Odd, TypeError, ValueError, OverflowError, RuntimeError, AttributeError, StopIteration)


def run_calls(module: Any, rng: random.Random, calls: int) -> None:  # noqa: C901  # one case per call
    """A rank's life. All of it is garbage in the end."""
    ring, recorder, watcher = create_recording(module, rng)
    sequence = itertools.count(1)

    def channel(*_: Any) -> Any:
        return rng.choice([*[(7, 60, sequence, 2)] * 20, (7, 600, sequence, 2), (7, 60, iter(()), 2), 5])

    hooks = [module.Hooks() for _ in range(2)]
    for group_hooks in hooks:
        group_hooks.connect(watcher, lambda: (3, 61, None, -1), channel)
    works: deque[Any] = deque(maxlen=MAX_PENDING)
    optimizer = Optimizer()
    phases = rng.choice([(1,), (0, 1, 5, 8)])

    def call() -> Any:
        future = RandomAttributes(rng, done=lambda: rng.random() < 0.5)
        busy = rng.random() < 0.5
        work = RandomAttributes(rng, is_completed=lambda: not busy or rng.random() < 0.2, get_future=lambda: future)
        if rng.random() < 0.1:
            work._answers["get_future"] = forbid_future
        if works and rng.random() < 0.05:
            work = rng.choice(works)
        works.append(work)
        tensors = [RandomAttributes(rng, nbytes=4, is_cpu=rng.random() < 0.9) for _ in range(rng.choice([0, 1, 1, 3]))]
        return RandomAttributes(
            rng,
            name=rng.choice(["ALLREDUCE", "other", 0, 1, 2, 3, 63, 64, 200, 2**70, -5, 1.5]),
            async_op=rng.random() < 0.7,
            input_tensors=tensors,
            output_tensors=tensors,
            root=rng.choice([-1, 0, 1]),
            work=rng.choice([None, work, work, work]),
        )

    def act() -> None:
        nonlocal optimizer
        choice = rng.randrange(14)
        if choice < 5:
            collective, hook = call(), rng.choice(hooks)
            hook.enter(collective)
            if rng.random() < 0.9:
                hook.issued(collective)
        elif choice == 5:
            recorder.begin_optimizer_step(optimizer, (), {})
            recorder.end_optimizer_step(optimizer, (), {})
            if rng.random() < 0.1:
                optimizer = Optimizer()
        elif choice == 6:
            watcher.backward_computed()
            watcher.backward_ended()
        elif choice == 7:
            recorder.load(rng.choice([forbid_future, next, list]), iter("ab"))
        elif choice == 8:
            recorder.end_step(rng.choice([3, 2**2000, "3"]), lengths=rng.choice([None, (1.0, 2.0)]))
        elif choice == 9:
            recorder.waited(rng.choice([Mark(5), Mark("5"), object()]), Mark(9))  # type: ignore[arg-type]
        elif choice == 10:
            recorder._entry = rng.choice([None, Mark(3), Mark("3"), object()])  # type: ignore[arg-type]
            recorder._step = recorder._step
            assert recorder._entry is not recorder
        elif choice == 11:
            if works:
                watcher._take(rng.choice(works))
            assert watcher._has_pending in (True, False)
        elif choice == 12:
            options = rng.choice([{}, {"flags": 1}, {"flags": 256}, {"x": 1}])
            ring.write(3, 1, 2, *[1] * rng.randrange(12), **options)
        else:
            recorder.phase = rng.choice(phases)
            recorder.on_host = rng.random() < 0.8
            recorder.entered(rng.random() < 0.5)
            recorder.go_on(time.monotonic_ns(), rng.choice([None, time.monotonic_ns, forbid_future]))
            recorder.notice_wait = rng.choice([skip_wait, forbid_future])

    for _ in range(calls):
        with contextlib.suppress(*MAY_BE_RAISED):
            act()


def forbid_future(*_: Any) -> Any:
    raise RuntimeError("no future")


def collect_garbage(stop: threading.Event) -> None:
    """Another thread, which collects garbage while the first is inside of C."""
    while not stop.is_set():
        gc.collect(0)
        time.sleep(0.001)


def main() -> None:
    path, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.setswitchinterval(1e-5)
    module, rng = load_module(path), random.Random(seed)
    stop = threading.Event()
    thread = threading.Thread(target=collect_garbage, args=(stop,), daemon=True)
    thread.start()
    remaining: list[tuple[int, int]] = []
    tracemalloc.start()
    for half in range(2):
        for _ in range(rounds // 2):
            run_calls(module, rng, 300)
        if half == 1:
            stop.set()
            thread.join()
        gc.collect()
        remaining.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
    print(remaining[1][0] - remaining[0][0], remaining[1][1] - remaining[0][1])
    reference = weakref.ref(create_recording(module, rng)[1])
    gc.collect()
    assert reference() is None, "a recorder in a circle with its watcher is collected"


if __name__ == "__main__":
    main()

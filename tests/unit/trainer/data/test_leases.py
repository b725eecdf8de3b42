"""Each sample is used exactly once an epoch by any rank: by shares, by leases, across switches and restarts."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from pacekeeper.data.leases import ENDLESS_TICKETS, Interval, Remainder, merge_intervals, slice_intervals
from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder
from pacekeeper.data.sample_stream import IndexedStream

NUMBERS: Any = torch.arange(200)


class Job:
    """The ranks' loaders, and a script's part: steps, sync points, switches and restarts."""

    def __init__(  # noqa: PLR0913  # options of a harness: each caller names what it varies
        self,
        rng: random.Random,
        size: int,
        batch: int,
        replica_size: int = 1,
        workers: int = 0,
        kind: Callable[[int], Any] = lambda size: torch.utils.data.Subset(NUMBERS, range(size)),
        lengths: Callable[[int], float] | None = None,
        static: int = 0,
        by_microbatch: bool = False,
    ) -> None:
        """static: samples of each microbatch, in shares of whole ones; 0: with each start another number at most.
        by_microbatch: what a step leases, instead of all its samples at once.
        """
        self.by_microbatch = by_microbatch
        self.static = static
        self.rng, self.kind, self.lengths = rng, kind, lengths
        self.size, self.batch, self.replica_size, self.workers = size, batch, replica_size, workers
        self.seen: list[int] = []
        self.used = 0
        self.since_meeting = 0
        self.leasing = False
        self.of_steps: list[int] = []
        """The counter that leased steps are dealt from."""
        self.order = IndexedStream(size, seed=5)
        self.loaders: list[Loader] = []
        self.start_ranks()

    def start_ranks(self) -> None:
        """Start another number of ranks each time."""
        most = self.batch // (self.static or 2) // self.replica_size
        ranks = self.replica_size * self.rng.randint(1, min(3, most))
        max_microbatch = self.static or self.rng.randint(2, 6)
        self.loaders = [
            Loader(
                self.kind(self.size),
                BatchSizes(self.batch, max_microbatch, static_shapes=self.static > 0),
                RankTopology(rank, ranks, self.replica_size),
                SampleOrder(seed=5, lengths=self.lengths),
                num_workers=self.workers,
            )
            for rank in range(ranks)
        ]

    @property
    def replicas(self) -> list[list[Loader]]:
        return [
            self.loaders[first : first + self.replica_size] for first in range(0, len(self.loaders), self.replica_size)
        ]

    def run_step(self, loaders: Sequence[Loader]) -> bool:
        """One step of all these ranks; those of a replica run equally many microbatches. False: nothing is left."""
        drawn = [loader.next_step() for loader in loaders]
        for first in range(0, len(drawn), self.replica_size):
            replica = drawn[first : first + self.replica_size]
            assert len({step and step[0].microbatches for step in replica}) == 1
        for step in drawn:
            if step is None:
                return False
            draw, batches = step
            for size, batch in zip(draw.sizes, batches, strict=True):
                assert not self.static or size in {0, self.static}
                assert len(batch) == (self.static or max(size, 1))  # of an empty one, samples that count nothing
                self.seen += batch.tolist()[:size]
                self.since_meeting += size
        for loader in loaders:
            loader.complete_step()
        return True

    def pass_sync_point(self, exact: bool = True) -> None:
        unused = [interval for loader in self.loaders for interval in loader.list_unused()] if exact else None
        for loader in self.loaders:
            loader.settle_leases(self.since_meeting, unused)
        self.used += self.since_meeting
        self.since_meeting = 0
        if exact:
            assert {loader.used_samples for loader in self.loaders} == {self.used}

    def start_leases(self, limit: int | None = None) -> None:
        counter, promises = [0], [0]
        for replica in self.replicas:
            answers: dict[int, int] = {}
            promised: dict[int, int] = {}
            for loader in replica:
                promise = ReplicaTickets(promises, promised) if self.by_microbatch else None
                loader.start_leases(ReplicaTickets(counter, answers), limit, promise)
        self.leasing = True
        self.of_steps = promises if self.by_microbatch and self.lengths is None else counter

    def finish_leases(self) -> None:
        """Each rank completes the step that it has begun or prefetched. Then no rank has one left, and all meet."""
        self.of_steps[0] += ENDLESS_TICKETS
        for replica in self.replicas:
            while self.run_step(replica):
                pass
        self.pass_sync_point()

    def stop_leases(self) -> None:
        for loader in self.loaders:
            loader.stop_leases()
        self.leasing = False

    def restart(self) -> None:
        state = self.rng.choice(self.loaders).state_dict()
        self.start_ranks()
        for loader in self.loaders:
            loader.load_state_dict(state)
        self.leasing = False

    def set_shares(self) -> None:
        """Any that a replica's ranks can follow in equally many microbatches."""
        while True:
            shares = self.split(self.batch, len(self.loaders))
            if self.static:
                units = self.split(self.batch // self.static // self.replica_size, len(self.replicas))
                shares = tuple(self.static * count for count in units for _ in range(self.replica_size))
            try:
                for loader in self.loaders:
                    loader.set_shares(shares)
                return
            except ValueError:
                continue

    def split(self, total: int, count: int) -> tuple[int, ...]:
        cuts = sorted(self.rng.sample(range(1, total), count - 1))
        return tuple(end - first for first, end in itertools.pairwise([0, *cuts, total]))

    def run_some_steps(self) -> None:
        """In lockstep where all meet in each step, else each replica at a pace of its own."""
        if not self.leasing:
            for _ in range(self.rng.randint(0, 4)):
                self.run_step(self.loaders)
                self.pass_sync_point()
            return
        paces = [self.rng.choice([1, 2, 10]) for _ in self.replicas]
        for replica in self.rng.choices(self.replicas, paces, k=self.rng.randint(0, 12)):
            self.run_step(replica)
        self.pass_sync_point(exact=False)

    def check(self) -> None:
        """All samples seen are the beginning of the stream: epochs one by one, but for what is still pending."""
        assert self.used == len(self.seen)
        counts = Counter(self.seen)
        pending = Counter(self.order.get_indices([(0, self.loaders[0].cursor)]))
        for first, end in self.loaders[0].state_dict()["pending"]:
            pending -= Counter(self.order.get_indices([(first, end)]))
        assert counts == pending


class ReplicaTickets:
    """A rank's view of the counter: the first rank of a replica takes a ticket for its peers too."""

    def __init__(self, counter: list[int], answers: dict[int, int]) -> None:
        self.counter, self.answers = counter, answers
        self.requests = 0

    def __call__(self, count: int) -> int:
        self.requests += 1
        if self.requests not in self.answers:
            self.answers[self.requests] = self.counter[0]
            self.counter[0] += count
        return self.answers[self.requests]


class ShuffledNumbers(torch.utils.data.IterableDataset[int]):
    """As many numbers an epoch, each time in the order that the loader would put them into, without a length."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1
        self.order = IndexedStream(size, seed=5)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert torch.utils.data.get_worker_info() is None  # or it might expect that others take a part
        return iter(self.order.get_indices([(self.epoch * self.size, (self.epoch + 1) * self.size)]))


class ShuffledNumbersWithSkip(ShuffledNumbers):
    """A stream that can begin in the middle."""

    first = 0

    def skip(self, count: int) -> ShuffledNumbersWithSkip:
        rest = ShuffledNumbersWithSkip(self.size)
        rest.first = count
        return rest

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.first, None)


@pytest.mark.parametrize("replica_size", [1, 2])
@pytest.mark.parametrize("seed", range(16))
def test_each_sample_is_used_once_an_epoch_in_random_runs(seed: int, replica_size: int) -> None:
    run_at_random(seed, replica_size, workers=0, events=60)


@pytest.mark.parametrize("replica_size", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_each_sample_is_used_once_an_epoch_in_microbatches_of_one_size(seed: int, replica_size: int) -> None:
    run_at_random(seed, replica_size, workers=2 * (seed == 0), events=12 if seed == 0 else 50, static=1 + seed % 4)


@pytest.mark.parametrize("seed", range(3))
def test_each_sample_is_used_once_an_epoch_with_samples_prefetched_by_workers(seed: int) -> None:
    run_at_random(seed, replica_size=1, workers=2, events=12)


@pytest.mark.parametrize("kind", [ShuffledNumbers, ShuffledNumbersWithSkip])
@pytest.mark.parametrize("seed", range(8))
def test_each_sample_of_an_iterable_is_used_once_an_epoch(seed: int, kind: type[ShuffledNumbers]) -> None:
    run_at_random(seed, replica_size=1, workers=0, events=40, kind=kind)


def test_each_sample_of_an_iterable_is_used_once_an_epoch_with_workers() -> None:
    run_at_random(4, replica_size=1, workers=2, events=12, kind=ShuffledNumbers)


def run_at_random(seed: int, replica_size: int, workers: int, events: int, **options: Any) -> None:
    rng = random.Random(seed)
    size, batch = rng.randint(15, 60), rng.randint(8, 20)
    if static := options.get("static"):
        batch -= batch % (static * replica_size)
    options = {"by_microbatch": seed % 2 == 1} | options
    job = Job(rng, size, batch, replica_size=replica_size, workers=workers, **options)
    for _ in range(events):
        job.run_some_steps()
        happening = rng.random()
        if happening < 0.3:
            job.set_shares()
        elif happening < 0.5 and not job.leasing:
            job.start_leases()
        elif happening < 0.5:
            job.pass_sync_point() if rng.random() < 0.5 else job.finish_leases()
            job.stop_leases() if rng.random() < 0.7 else job.start_leases()
        elif happening < 0.6:
            job.pass_sync_point()
            job.restart()
        elif happening < 0.7:
            job.pass_sync_point()
            job.check()
    job.pass_sync_point()
    job.check()
    assert job.used > 3 * job.batch


@pytest.mark.parametrize(("workers", "by_microbatch"), [(0, False), (0, True), (2, True)])
def test_the_last_lease_takes_what_is_left_below_the_limit(workers: int, by_microbatch: bool) -> None:
    job = Job(random.Random(1), size=50, batch=8, workers=workers, by_microbatch=by_microbatch)
    job.run_step(job.loaders)
    job.pass_sync_point()
    job.start_leases(limit=101)
    for _ in range(30):  # more than enough for 101 samples
        for replica in job.replicas:
            job.run_step(replica)
    job.pass_sync_point()
    assert job.used == 101
    job.check()
    job.stop_leases()
    assert job.run_step(job.loaders)  # the iterator had ended
    job.pass_sync_point()
    job.check()
    assert job.used == 109


@pytest.mark.parametrize("lengths", [None, lambda index: 1.0 + index % 7], ids=["as they come", "balanced"])
@pytest.mark.parametrize("left", range(1, 9))
def test_the_last_lease_of_a_sharded_replica_may_leave_ranks_without_samples(
    left: int, lengths: Callable[[int], float] | None
) -> None:
    job = Job(random.Random(3), size=50, batch=16, replica_size=4, lengths=lengths, by_microbatch=left % 2 == 1)
    job.start_leases(limit=16 + left)
    for _ in range(5):
        for replica in job.replicas:
            job.run_step(replica)
    job.pass_sync_point()
    assert job.used == 16 + left
    job.check()


@pytest.mark.parametrize("left", range(2, 17, 2))
def test_the_last_lease_keeps_the_shape_of_microbatches(left: int) -> None:
    """Of 8 ranks in replicas of 4, in leases of whole microbatches: a rank without samples uses a whole substitute."""
    job = Job(random.Random(3), size=50, batch=32, replica_size=4, static=2, by_microbatch=left % 4 == 0)
    job.start_leases(limit=32 + left)
    for _ in range(5):
        for replica in job.replicas:
            job.run_step(replica)
    job.pass_sync_point()
    assert job.used == 32 + left
    job.check()


def test_the_rest_of_a_microbatch_after_a_checkpoint_is_one_smaller_microbatch() -> None:
    """The job continued in microbatches of one size in the middle of a global batch."""
    sizes = BatchSizes(16, 4, static_shapes=True)
    loader = Loader(NUMBERS, sizes, RankTopology(), SampleOrder(shuffle=False))
    loader.load_state_dict({**loader.state_dict(), "cursor": 5})
    loader.start_leases(ReplicaTickets([0], {}), 16)
    drawn = loader.next_step()
    assert drawn is not None
    assert drawn[0].sizes == (4, 4, 3)
    assert [batch.tolist() for batch in drawn[1]] == [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15]]


def test_a_fast_rank_takes_more() -> None:
    job = Job(random.Random(2), size=50, batch=8)
    assert len(job.loaders) == 1
    counter = [0]
    fast, slow = (
        Loader(NUMBERS, BatchSizes(8, 4), RankTopology(rank, 2), SampleOrder(shuffle=False)) for rank in range(2)
    )
    for loader in (fast, slow):
        loader.start_leases(ReplicaTickets(counter, {}), None)
    positions = []
    for loader in (fast, fast, slow, fast):
        drawn = loader.next_step()
        assert drawn is not None
        positions.append(list(next(drawn[1]).tolist()))
        loader.complete_step()
    assert positions == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_rank_that_turns_slow_leaves_its_remaining_microbatches_to_the_others() -> None:
    """By microbatches. A step gets what it was promised, although the others have reached the limit by then."""
    counter, promises = [0], [0]
    fast, slow = (
        Loader(NUMBERS, BatchSizes(12, 2), RankTopology(rank, 2), SampleOrder(shuffle=False)) for rank in range(2)
    )
    for loader in (fast, slow):
        loader.start_leases(ReplicaTickets(counter, {}), 17, ReplicaTickets(promises, {}))
    its, begun = slow.next_step() or (None, None)
    assert its is not None
    assert begun is not None
    assert (its.sizes, next(begun).tolist()) == ((2, 2, 2), [0, 1])
    taken = []
    while (drawn := fast.next_step()) is not None:
        taken.append([position for batch in drawn[1] for position in batch.tolist()])
        fast.complete_step()
    assert taken == [[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert [batch.tolist() for batch in begun] == [[13, 14], [15, 16]]
    slow.complete_step()
    assert slow.next_step() is None
    for loader in (fast, slow):
        loader.settle_leases(17, [*fast.list_unused(), *slow.list_unused()])
        assert loader.used_samples == 17


def test_prefetched_samples_come_first_when_shares_apply_again() -> None:
    job = Job(random.Random(8), size=60, batch=8, workers=2)
    while len(job.loaders) < 2:
        job.start_ranks()
    job.start_leases()
    for _ in range(3):
        job.run_step(job.loaders[:1])
    job.run_step(job.loaders[1:])
    unused = merge_intervals(interval for loader in job.loaders for interval in loader.list_unused())
    assert unused
    job.pass_sync_point()
    state = job.loaders[0].state_dict()
    left = Remainder(state["cursor"], tuple((first, end) for first, end in state["pending"]))
    job.stop_leases()
    seen = len(job.seen)
    job.run_step(job.loaders)
    assert job.seen[seen:] == job.order.get_indices(left.locate_tickets(0, 8))
    assert left.locate_tickets(0, 8)[0][0] == unused[0][0]


def test_a_step_that_was_begun_and_not_completed_is_repeated() -> None:
    loader = Loader(NUMBERS, BatchSizes(4, 2), RankTopology(), SampleOrder(shuffle=False))
    loader.start_leases(ReplicaTickets([0], {}), None)
    assert run_single_step(loader) == {0, 1, 2, 3}
    assert loader.next_step() is not None
    assert loader.list_unused() == [(4, 8)]
    loader.settle_leases(4, loader.list_unused())
    assert loader.used_samples == 4
    loader.stop_leases()
    assert run_single_step(loader) == {4, 5, 6, 7}


class WorkerIds(torch.utils.data.Dataset[int]):
    """Each sample is the process that loads it."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, _: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
def test_workers_outlive_switches(options: dict[str, Any]) -> None:
    loader = Loader(WorkerIds(), BatchSizes(4, 2), RankTopology(), num_workers=2, **options)
    pids: set[int] = set()
    for _ in range(3):
        loader.start_leases(ReplicaTickets([0], {}), None)
        pids |= run_single_step(loader)
        loader.settle_leases(4, loader.list_unused())
        loader.stop_leases()
        pids |= run_single_step(loader)
    assert loader.used_samples == 24
    assert len(pids) == 2


def test_a_loader_that_is_dropped_ends_its_workers_at_once() -> None:
    """Not when Python collects garbage, in the middle of a step, and then not in order: it takes seconds."""
    loader = Loader(WorkerIds(), BatchSizes(4, 2), RankTopology(), num_workers=2)
    pids = run_single_step(loader)
    gc.disable()
    try:
        del loader
        assert not pids & {child.pid for child in multiprocessing.active_children()}
    finally:
        gc.enable()


def run_single_step(loader: Loader) -> set[int]:
    drawn = loader.next_step()
    assert drawn is not None
    values = {value for batch in drawn[1] for value in batch.tolist()}
    loader.complete_step()
    return values


def test_a_state_is_saved_only_at_a_sync_point() -> None:
    job = Job(random.Random(1), size=50, batch=8)
    job.start_leases()
    job.loaders[0].state_dict()  # nothing is used yet
    job.run_step(job.replicas[0])
    for refused in (job.loaders[0].state_dict, job.loaders[0].stop_leases):
        with pytest.raises(RuntimeError, match="leases are open: call settle_leases"):
            refused()
    job.pass_sync_point(exact=False)
    with pytest.raises(RuntimeError, match="leases are open"):
        job.loaders[0].state_dict()


@pytest.mark.parametrize(
    ("left", "tickets", "unused", "after"),
    [
        (Remainder(), 10, (), Remainder(10)),
        (Remainder(), 10, ((8, 10),), Remainder(8)),
        (Remainder(), 10, ((2, 4), (6, 8), (8, 10)), Remainder(6, ((2, 4),))),
        (Remainder(20, ((2, 5), (9, 12))), 4, (), Remainder(20, ((10, 12),))),
        (Remainder(20, ((2, 5), (9, 12))), 8, ((9, 10), (20, 22)), Remainder(20, ((9, 10),))),
        (Remainder(20, ((2, 5),)), 0, (), Remainder(20, ((2, 5),))),
    ],
)
def test_the_remainder_is_computed(
    left: Remainder, tickets: int, unused: tuple[Interval, ...], after: Remainder
) -> None:
    assert left.with_tickets_used(tickets, unused) == after
    assert after.used_positions == left.used_positions + tickets - sum(end - first for first, end in unused)


@pytest.mark.parametrize("seed", range(50))
def test_positions_count_through_all_that_is_left(seed: int) -> None:
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(40), 2 * rng.randrange(6)))
    left = Remainder(rng.randrange(41, 50), merge_intervals(zip(ends[::2], ends[1::2], strict=True)))
    positions = [position for first, end in (*left.pending, (left.cursor, 100)) for position in range(first, end)]
    for first, end in itertools.combinations_with_replacement(range(50), 2):
        found = left.locate_tickets(first, end)
        assert [place for low, high in found for place in range(low, high)] == positions[first:end]
        assert all(low < high for low, high in found)


@pytest.mark.parametrize("leases", [False, True], ids=["shares", "leases"])
def test_the_work_grows_in_proportion_to_the_pending_intervals(leases: bool) -> None:
    """And not as its square: twice as many pending positions, in steps of one size, are twice the work."""

    def count_work(pending: int) -> int:
        """Count the lines of the package `data` that use up this number of intervals, and as many samples behind."""
        loader = Loader(range(10**6), BatchSizes(32, 32), RankTopology())
        intervals = [(16 * number, 16 * number + 8) for number in range(pending)]
        loader.load_state_dict({**loader.state_dict(), "cursor": 16 * pending, "pending": intervals})

        def use_up() -> None:
            if leases:
                loader.start_leases(ReplicaTickets([0], {}), None)
            for _ in range(pending // 2):
                run_single_step(loader)
            loader.settle_leases(16 * pending, loader.list_unused())
            assert loader.state_dict()["pending"] == []

        return count_lines(use_up, "pacekeeper/data/")

    assert count_work(800) < 2.1 * count_work(400)


def test_the_work_of_a_sync_point_grows_in_proportion_to_the_returned_intervals() -> None:
    def count_work(unused: int) -> int:
        back = [(16 * number, 16 * number + 8) for number in range(unused)]

        def return_intervals() -> None:
            Remainder().with_tickets_used(16 * unused, back).with_tickets_used(4 * unused, back[: unused // 2])

        return count_lines(return_intervals, "pacekeeper/data/")

    assert count_work(800) < 2.2 * count_work(400)


def count_lines(run: Callable[[], object], where: str) -> int:
    """Count how many lines of files whose path contains `where` are run."""
    count = 0

    def trace_lines(frame: Any, *_: Any) -> Any:
        nonlocal count
        if where not in frame.f_code.co_filename:
            return None
        count += 1
        return trace_lines

    before = sys.gettrace()
    sys.settrace(trace_lines)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def test_positions_that_were_not_taken_cannot_be_returned() -> None:
    with pytest.raises(ValueError, match=r"not all were among the first 4 tickets"):
        Remainder().with_tickets_used(4, [(3, 6)])
    with pytest.raises(ValueError, match=r"not all were among"):
        Remainder(20, ((2, 5),)).with_tickets_used(4, [(7, 8)])
    with pytest.raises(ValueError, match=r"come twice"):
        Remainder().with_tickets_used(10, [(3, 6), (5, 7)])


def test_intervals_are_combined() -> None:
    assert merge_intervals([(4, 6), (0, 2), (7, 7), (2, 3)]) == ((0, 3), (4, 6))
    assert slice_intervals([(2, 5), (9, 12)], 1, 5) == ((3, 5), (9, 11))
    assert slice_intervals([(2, 5)], 5, 9) == ()

"""Each rank's newest shard is also kept by a rank on another node, so that a lost node costs few steps.

A `Courier` sends it there, in a thread, within a bandwidth budget; a `Shelf` of the neighbour's takes it, into the
snapshots' memory of its worker, under the name and in the two slots that it has at home. There a later round finds it.
No snapshot is taken before all couriers have delivered the one before: of the two that each rank has then, one is with
all neighbours, whoever is lost.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pacekeeper.environment import Environment
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.runtime import read_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import WorkerPlan

from .delivery_cost import DeliveryCost
from .neighbour_link import LONGEST, PATIENCE_SECONDS, Link, hang_up
from .neighbour_ring import Whereabouts, keepers
from .refusals import Refusals
from .shard_names import shards_in
from .snapshots import HEADER_BYTES, WORD_BYTES, Snapshots
from .versions import NOTHING, Version

SHORTEST = 64 << 10
"""Bytes of a message where the budget is small."""
WORK_BYTES_A_SECOND = 250e6
"""That a neighbour at the least takes memory for."""
REST_SECONDS = 1.0
"""Until somebody is let in again, after that could not be done."""
MANY_LEFT_OUT = 8
"""Snapshots in a row, for one copy: they are taken much more seldom than they could be."""
PROOF_SECONDS = 2.0
"""Within which whoever connects must have proved that it belongs here."""
GUESTS = 16
"""At a time. Two neighbours are many; of strangers, no more come in."""
_BACKGROUND = 10
"""Niceness of a thread that nobody waits for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Circle:
    """The membership, and what its members prove themselves by."""

    membership: int
    secret: str
    """Hexadecimal; "": there is none, and nothing crosses."""


@dataclass(frozen=True)
class Keeper:
    """Who keeps a rank's copies."""

    rank: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class Neighbours:
    """One rank's part in it."""

    def __init__(
        self,
        environment: Environment,
        peers: CpuGroup,
        shard_of: Callable[[int], Snapshots],
        sharded: bool,
        slots_to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        """Collective, where `sharded`: what all ranks have alike needs no copy elsewhere.

        shard_of: the snapshots of the shard of any rank in the runtime folder; made anew at each call.
        slots_to_come: for how many copies of its own shard this rank is yet to take memory.
        """
        self.kept = KeptShards([], shard_of)
        self._peers = peers
        self._slots_to_come = slots_to_come
        self._cost = DeliveryCost()
        self._speaks = environment.rank == 0
        self._megabytes = environment.neighbour_megabytes
        self._left_out = 0
        """Snapshots in a row, for the copies that are under way."""
        self._courier: Courier | None = None
        self._snapshots = 0
        """That this round has begun."""
        self._forget: Callable[[], bool] = lambda: False
        self._give_way: Callable[[], bool] = lambda: False
        if sharded and environment.runtime is not None:
            self._meet(environment, environment.runtime.snapshots, shard_of)

    def _meet(self, environment: Environment, folder: Path, shard_of: Callable[[int], Snapshots]) -> None:
        rank, circle = environment.rank, _circle(environment)
        listener = _listen(environment, circle)
        port = 0 if listener is None else listener.getsockname()[1]
        said = self._peers.gather([environment.worker, environment.node, environment.address, port])
        places = [Whereabouts(*each) for each in said]
        here = [its for its, place in enumerate(places) if place.worker == places[rank].worker]
        if places[rank].worker:  # its ranks share what the worker has to send
            there = {its for its, _ in shards_in(folder, len(places))} - {*here}
            self.kept = KeptShards((its for its in there if here[its % len(here)] == rank), shard_of)
        kept_by = keepers(places)
        guests = {its for its, keeper in kept_by.items() if keeper in here}
        if places[rank].worker:
            self._forget = lambda: _forget(folder, {*here, *guests}, len(places))
            self._give_way = lambda: _forget(folder, here, len(places)) or bool(guests)
        if not kept_by or listener is None:
            if listener is not None:
                listener.close()
            return
        shelves = {_key(its): shard_of(its) for its in guests if kept_by[its] == rank}

        def spared(nbytes: int) -> int:
            return len(here) * nbytes * self._slots_to_come()

        Shelf(shelves, circle, spared, self._cost.counting).serve(listener)
        place = places[kept_by[rank]]
        keeper = Keeper(kept_by[rank], place.address, place.port)
        budget = environment.neighbour_megabytes * 1e6 / len(here)
        self._courier = Courier(_key(rank), shard_of(rank), keeper, circle, budget, self._cost.counting)

    def begin_snapshot(self) -> None:
        """Before a round's second one, shards go that are no rank's here, and that nobody has this worker keep: until
        then they may be needed, with what this round began from, which the second one is written over."""
        self._snapshots += 1
        if self._snapshots == 2:
            self._forget()
        if self._snapshots >= 2 and self._courier is not None:
            self._cost.next_copy()

    @property
    def seconds(self) -> float:
        """What the copies of a snapshot take from this rank's training; 0: nothing, or not known yet."""
        return self._cost.seconds

    def give_way(self) -> bool:
        """What this worker keeps for others gives its memory back, which its own ranks need. When their state has been
        brought back. Whether there was any, or another of them may have had it do so just now."""
        return self._give_way()

    def have_last(self, patience: float = 0.0) -> bool:
        """Whether the neighbours of all ranks have what was sent last, or will never have it. Collective.

        patience: seconds to wait for it.
        """
        if self._courier is None:
            return True
        have = self._peers.all_agree(self._courier.wait(patience))
        self._left_out = 0 if have else self._left_out + 1
        if self._left_out == MANY_LEFT_OUT and self._speaks:
            self._speaks = False
            _log.warning(
                "snapshots are taken much more seldom than they could be: %d were left out until the one before is on "
                "other nodes; where the network has more to give than %d MB a second for each worker, raise "
                "PACEKEEPER_NEIGHBOUR_MEGABYTES in the container trainer",
                self._left_out,
                self._megabytes,
            )
        return have

    def send(self, version: Version) -> None:
        """The snapshot of this rank that has become valid, in the background."""
        if self._courier is not None:
            self._courier.send(version)


class KeptShards:
    """What lies in this worker's memory of shards that are other workers' ranks'."""

    def __init__(self, ranks: Iterable[int], shard_of: Callable[[int], Snapshots]) -> None:
        """`ranks`: whose shards count."""
        self._shards = {rank: shard_of(rank) for rank in ranks}

    def held(self) -> list[tuple[int, Version, int]]:
        """Rank, version and bytes of each."""
        return [
            (rank, version, nbytes)
            for rank, shard in self._shards.items()
            for version, nbytes in shard.held()
            if version != NOTHING
        ]

    def read(self, rank: int, version: Version) -> torch.Tensor | None:
        """As `Snapshots.read`."""
        return self._shards[rank].read(version)

    def unchecked(self, rank: int, version: Version) -> torch.Tensor | None:
        """As `Snapshots.unchecked`."""
        return self._shards[rank].unchecked(version)

    def doubt(self, version: Version) -> None:
        """It is not `held` any longer."""
        for shard in self._shards.values():
            shard.doubt(version)


class Courier:
    """Brings one rank's snapshots to its neighbour, one at a time."""

    def __init__(
        self,
        key: str,
        shard: Snapshots,
        keeper: Keeper,
        circle: Circle,
        budget: float,
        counting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        key: of the rank. shard: its snapshots; for this alone. budget: bytes a second.
        counting: counts what a thread does inside as the copies'.
        """
        self.delivered = NOTHING
        """What the neighbour got last."""
        self._key = key
        self._shard = shard
        self._keeper = keeper
        self._circle = circle
        self._budget = budget
        self._part_bytes = min(LONGEST, max(SHORTEST, int(budget) // WORD_BYTES * WORD_BYTES))
        """About a second's, so that the neighbour does not wait longer for one."""
        self._failed = False
        self._refusals = Refusals()
        self._counting = counting
        self._orders: queue.SimpleQueue[Version] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._work, name="pacekeeper-courier", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._idle.is_set()

    def send(self, version: Version) -> None:
        """Unless one is on its way, or it is left out after others that came to nothing."""
        if self.idle and not self._refusals.leaves_out():
            self._idle.clear()
            self._orders.put(version)

    def wait(self, seconds: float) -> bool:
        """Whether nothing is on its way any more, within so long."""
        return self._idle.wait(seconds)

    def _work(self) -> None:
        _step_back()
        while True:
            version = self._orders.get()
            try:
                with self._counting():
                    self._deliver(version)
            except Exception as error:  # whatever it is, the job's snapshots do not wait for it
                self._failed = True
                _log.warning(
                    "the snapshot of step %d is not with its neighbour, %s: %s; tried again after %d more",
                    version.step,
                    self._keeper,
                    error,
                    self._refusals.refused(),
                )
            else:
                self._refusals.end()
                if self._failed or self.delivered == NOTHING:
                    again = " again" if self._failed else ""
                    _log.info(
                        "snapshots are with a neighbour%s, %s, from step %d on", again, self._keeper, version.step
                    )
                self._failed = False
                self.delivered = version
            finally:
                self._idle.set()

    def _deliver(self, version: Version) -> None:
        slot = self._shard.unchecked(version)
        if slot is None:
            raise ValueError(self._shard.why_missing(version))
        work_seconds = slot.numel() / WORK_BYTES_A_SECOND
        address = (self._keeper.address, self._keeper.port)
        connection = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        try:
            link = Link.to_host(connection, self._circle.membership, self._circle.secret)
            link.say({"key": self._key, "bytes": slot.numel(), "part": self._part_bytes})
            _heed(link, work_seconds)
            content = memoryview(slot.numpy().data)
            self._send(link, content[HEADER_BYTES:])
            link.send(content[:HEADER_BYTES])
            _heed(link, work_seconds)
        finally:
            hang_up(connection)

    def _send(self, link: Link, content: memoryview) -> None:
        """As fast as the budget allows. A network that gives less than half of it holds the job's snapshots up."""
        start = time.monotonic()
        for sent in range(0, len(content), self._part_bytes):
            if (late := time.monotonic() - start - 2 * sent / self._budget) > PATIENCE_SECONDS:
                raise TimeoutError(
                    f"{sent >> 20} of {len(content) >> 20} MiB came through, {late:.0f} s later than at half of the "
                    "budget; give PACEKEEPER_NEIGHBOUR_MEGABYTES what the network has left"
                )
            part = content[sent : sent + self._part_bytes]
            link.send(part)
            time.sleep(max(0.0, start + (sent + len(part)) / self._budget - time.monotonic()))


class Shelf:
    """Takes what the couriers of other workers bring to this rank."""

    def __init__(
        self,
        shards: dict[str, Snapshots],
        circle: Circle,
        spared: Callable[[int], int] = lambda _: 0,
        counting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        shards: where it goes, by the key of the rank that it is of.
        spared: bytes that this worker is yet to take for itself, where one of its shards has so many.
        counting: counts what a thread does inside as the copies'.
        """
        self._counting = counting
        self._shards = shards
        self._spared = spared
        self._turns = {key: threading.Lock() for key in shards}
        self._circle = circle
        self._guests = threading.BoundedSemaphore(GUESTS)

    def serve(self, listener: socket.socket) -> None:
        """In a thread, from now on. `listener`: listens."""
        threading.Thread(target=self._accept, args=(listener,), name="pacekeeper-shelf", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        rests = False
        while True:
            try:
                guest, _ = listener.accept()
            except ConnectionAbortedError:
                continue  # by the guest, before its turn
            except OSError as error:
                if error.errno in {errno.EBADF, errno.EINVAL}:
                    _log.warning("no more copies of neighbours' snapshots are taken: %s", error)
                    return
                if not rests:
                    _log.warning("no copy of a neighbour's snapshot can be taken right now: %s", error)
                rests = True
                time.sleep(REST_SECONDS)
                continue
            rests = False
            if self._guests.acquire(blocking=False):
                self._let_in(guest)
            else:
                hang_up(guest)

    def _let_in(self, guest: socket.socket) -> None:
        try:
            threading.Thread(target=self._attend, args=(guest,), name="pacekeeper-shelf", daemon=True).start()
        except RuntimeError as error:
            _log.warning("no copy of a neighbour's snapshot can be taken right now: %s", error)
            hang_up(guest)
            self._guests.release()

    def _attend(self, guest: socket.socket) -> None:
        door = threading.Timer(PROOF_SECONDS, hang_up, [guest])
        door.daemon = True
        try:
            door.start()
            _step_back()
            link = Link.to_guest(guest, self._circle.membership, self._circle.secret)
            offer = link.hear()
            door.cancel()
            key, nbytes, part_bytes = offer["key"], offer["bytes"], offer["part"]
            shard = self._shards[key]
            if not isinstance(nbytes, int) or nbytes < HEADER_BYTES or nbytes % WORD_BYTES:
                raise ValueError(f"a snapshot of {nbytes!r} bytes")
            if not isinstance(part_bytes, int) or not SHORTEST <= part_bytes <= LONGEST or part_bytes % WORD_BYTES:
                raise ValueError(f"in parts of {part_bytes!r} bytes")
            with self._turns[key], self._counting():
                self._take(link, shard, nbytes, part_bytes)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # the last: no thread for the door
            _log.debug("a neighbour's connection ended: %r", error)
        finally:
            door.cancel()
            hang_up(guest)
            self._guests.release()

    def _take(self, link: Link, shard: Snapshots, nbytes: int, part_bytes: int) -> None:
        """Into the older slot, which is none until its last message, the header, has come and fits the bytes."""
        try:
            slot = shard.guest_room(nbytes, self._spared(nbytes))
        except OSError as error:
            link.say({"refused": f"{error}; give the containers and their runtime volumes more memory"})
            return
        link.say({"refused": ""})
        buffer = memoryview(bytearray(part_bytes))
        for start in range(HEADER_BYTES, nbytes, part_bytes):
            part = buffer[: min(part_bytes, nbytes - start)]
            link.receive_into(part)
            slot.add(part)
        header = bytearray(HEADER_BYTES)
        link.receive_into(memoryview(header))
        try:
            slot.finish(header)
        except InputError as error:
            link.say({"refused": f"what came is {error}"})
            return
        link.say({"refused": ""})


def _heed(link: Link, work_seconds: float) -> None:
    """Raises ValueError where the neighbour does not take it. `work_seconds`: as for `Link.hear`."""
    if reason := link.hear(work_seconds)["refused"]:
        raise ValueError(f"the neighbour does not take it: {reason}")


def _key(rank: int) -> str:
    return str(rank)


def _circle(environment: Environment) -> Circle:
    """By the plan that lies there now. Where it is the next membership's already, this round is about to end."""
    nobody = Circle(0, "")
    if environment.runtime is None:
        return nobody
    try:
        found = read_json(environment.runtime.plan)
        plan = WorkerPlan() if found is None else WorkerPlan.from_json(found)
    except (OSError, ValueError) as error:
        _log.warning("no copies of snapshots on other nodes: %s", error)
        return nobody
    return Circle(plan.membership, plan.secret)


def _listen(environment: Environment, circle: Circle) -> socket.socket | None:
    """None: this rank takes no copies, and so nobody sends any."""
    if not (environment.neighbour_megabytes and environment.node and environment.address and circle.secret):
        return None
    family = socket.AF_INET6 if ":" in environment.address else socket.AF_INET
    try:
        return socket.create_server((environment.address, 0), family=family)
    except OSError as error:
        _log.warning("no copies of snapshots on other nodes: no port at %s: %s", environment.address, error)
        return None


def _forget(folder: Path, ranks: Collection[int], world_size: int) -> bool:
    """Removes the shards of all other ranks; whether there were any."""
    others = [path for rank, path in shards_in(folder, world_size) if rank not in ranks]
    for path in others:
        path.unlink(missing_ok=True)
    return bool(others)


def _step_back() -> None:
    """This thread lets all others go first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND)

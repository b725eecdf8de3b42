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
from .neighbour_link import MAX_PEER_MESSAGE_BYTES, PEER_MESSAGE_TIMEOUT_SECONDS, PeerLink, close_connection
from .neighbour_ring import RankLocation, assign_peer_ranks
from .refusals import SnapshotBackoff
from .shard_names import list_shard_files
from .snapshots import SLOT_HEADER_BYTES, CHECKSUM_WORD_BYTES, Snapshots
from .versions import NO_STATE_VERSION, StateVersion

MIN_SNAPSHOT_PART_BYTES = 64 << 10
"""Bytes of a message where the budget is small."""
MIN_PEER_BYTES_PER_SECOND = 250e6
"""That a neighbour at the least takes memory for."""
PEER_ACCEPT_RETRY_SECONDS = 1.0
"""Until somebody is let in again, after that could not be done."""
SKIPPED_SNAPSHOTS_WARNING = 8
"""Snapshots in a row, for one copy: they are taken much more seldom than they could be."""
PEER_AUTHENTICATION_SECONDS = 2.0
"""Within which whoever connects must have proved that it belongs here."""
MAX_PEER_CONNECTIONS = 16
"""At a time. Two neighbours are many; of strangers, no more come in."""
_BACKGROUND_NICENESS = 10
"""Niceness of a thread that nobody waits for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MembershipSecret:
    """The membership, and what its members prove themselves by."""

    membership: int
    secret: str
    """Hexadecimal; "": there is none, and nothing crosses."""


@dataclass(frozen=True)
class ReplicaTarget:
    """Who keeps a rank's copies."""

    rank: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class PeerReplication:
    """One rank's part in it."""

    def __init__(
        self,
        environment: Environment,
        peers: CpuGroup,
        open_shard: Callable[[int], Snapshots],
        sharded: bool,
        count_unallocated_slots: Callable[[], int] = lambda: 0,
    ) -> None:
        """Collective, where `sharded`: what all ranks have alike needs no copy elsewhere.

        shard_of: the snapshots of the shard of any rank in the runtime folder; made anew at each call.
        slots_to_come: for how many copies of its own shard this rank is yet to take memory.
        """
        self.peer_shards = PeerShards([], open_shard)
        self._peers = peers
        self._count_unallocated_slots = count_unallocated_slots
        self._cost = DeliveryCost()
        self._should_warn = environment.rank == 0
        self._megabytes = environment.peer_replica_megabytes
        self._skipped_snapshots = 0
        """Snapshots in a row, for the copies that are under way."""
        self._sender: ReplicaSender | None = None
        self._begun_snapshots = 0
        """That this round has begun."""
        self._remove_unneeded_shards: Callable[[], bool] = lambda: False
        self._release_memory: Callable[[], bool] = lambda: False
        if sharded and environment.runtime is not None:
            self._set_up_peers(environment, environment.runtime.snapshots, open_shard)

    def _set_up_peers(self, environment: Environment, folder: Path, open_shard: Callable[[int], Snapshots]) -> None:
        rank, circle = environment.rank, _read_membership_secret(environment)
        listener = _open_listener(environment, circle)
        port = 0 if listener is None else listener.getsockname()[1]
        said = self._peers.all_gather([environment.worker, environment.node, environment.address, port])
        places = [RankLocation(*each) for each in said]
        here = [its for its, place in enumerate(places) if place.worker == places[rank].worker]
        if places[rank].worker:  # its ranks share what the worker has to send
            there = {its for its, _ in list_shard_files(folder, len(places))} - {*here}
            self.peer_shards = PeerShards((its for its in there if here[its % len(here)] == rank), open_shard)
        kept_by = assign_peer_ranks(places)
        guests = {its for its, keeper in kept_by.items() if keeper in here}
        if places[rank].worker:
            self._remove_unneeded_shards = lambda: _remove_other_shards(folder, {*here, *guests}, len(places))
            self._release_memory = lambda: _remove_other_shards(folder, here, len(places)) or bool(guests)
        if not kept_by or listener is None:
            if listener is not None:
                listener.close()
            return
        shelves = {_format_rank_key(its): open_shard(its) for its in guests if kept_by[its] == rank}

        def spared(nbytes: int) -> int:
            return len(here) * nbytes * self._count_unallocated_slots()

        ReplicaReceiver(shelves, circle, spared, self._cost.count_work).serve(listener)
        place = places[kept_by[rank]]
        keeper = ReplicaTarget(kept_by[rank], place.address, place.port)
        budget = environment.peer_replica_megabytes * 1e6 / len(here)
        self._sender = ReplicaSender(_format_rank_key(rank), open_shard(rank), keeper, circle, budget, self._cost.count_work)

    def begin_snapshot(self) -> None:
        """Before a round's second one, shards go that are no rank's here, and that nobody has this worker keep: until
        then they may be needed, with what this round began from, which the second one is written over."""
        self._begun_snapshots += 1
        if self._begun_snapshots == 2:
            self._remove_unneeded_shards()
        if self._begun_snapshots >= 2 and self._sender is not None:
            self._cost.finish_copy()

    @property
    def seconds(self) -> float:
        """What the copies of a snapshot take from this rank's training; 0: nothing, or not known yet."""
        return self._cost.seconds

    def release_memory(self) -> bool:
        """What this worker keeps for others gives its memory back, which its own ranks need. When their state has been
        brought back. Whether there was any, or another of them may have had it do so just now."""
        return self._release_memory()

    def wait_for_delivery(self, timeout: float = 0.0) -> bool:
        """Whether the neighbours of all ranks have what was sent last, or will never have it. Collective.

        patience: seconds to wait for it.
        """
        if self._sender is None:
            return True
        have = self._peers.all_agree(self._sender.wait(timeout))
        self._skipped_snapshots = 0 if have else self._skipped_snapshots + 1
        if self._skipped_snapshots == SKIPPED_SNAPSHOTS_WARNING and self._should_warn:
            self._should_warn = False
            _log.warning(
                "snapshots are taken much more seldom than they could be: %d were left out until the one before is on "
                "other nodes; where the network has more to give than %d MB a second for each worker, raise "
                "PACEKEEPER_NEIGHBOUR_MEGABYTES in the container trainer",
                self._skipped_snapshots,
                self._megabytes,
            )
        return have

    def send(self, version: StateVersion) -> None:
        """The snapshot of this rank that has become valid, in the background."""
        if self._sender is not None:
            self._sender.send(version)


class PeerShards:
    """What lies in this worker's memory of shards that are other workers' ranks'."""

    def __init__(self, ranks: Iterable[int], open_shard: Callable[[int], Snapshots]) -> None:
        """`ranks`: whose shards count."""
        self._shards = {rank: open_shard(rank) for rank in ranks}

    def list_versions(self) -> list[tuple[int, StateVersion, int]]:
        """Rank, version and bytes of each."""
        return [
            (rank, version, nbytes)
            for rank, shard in self._shards.items()
            for version, nbytes in shard.list_versions()
            if version != NO_STATE_VERSION
        ]

    def read(self, rank: int, version: StateVersion) -> torch.Tensor | None:
        """As `Snapshots.read`."""
        return self._shards[rank].read(version)

    def read_unchecked(self, rank: int, version: StateVersion) -> torch.Tensor | None:
        """As `Snapshots.unchecked`."""
        return self._shards[rank].read_unchecked(version)

    def exclude_version(self, version: StateVersion) -> None:
        """It is not `held` any longer."""
        for shard in self._shards.values():
            shard.exclude_version(version)


class ReplicaSender:
    """Brings one rank's snapshots to its neighbour, one at a time."""

    def __init__(
        self,
        key: str,
        shard: Snapshots,
        target: ReplicaTarget,
        membership_secret: MembershipSecret,
        budget: float,
        count_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        key: of the rank. shard: its snapshots; for this alone. budget: bytes a second.
        counting: counts what a thread does inside as the copies'.
        """
        self.delivered = NO_STATE_VERSION
        """What the neighbour got last."""
        self._key = key
        self._shard = shard
        self._target = target
        self._membership_secret = membership_secret
        self._budget = budget
        self._part_bytes = min(MAX_PEER_MESSAGE_BYTES, max(MIN_SNAPSHOT_PART_BYTES, int(budget) // CHECKSUM_WORD_BYTES * CHECKSUM_WORD_BYTES))
        """About a second's, so that the neighbour does not wait longer for one."""
        self._failed = False
        self._backoff = SnapshotBackoff()
        self._count_work = count_work
        self._queue: queue.SimpleQueue[StateVersion] = queue.SimpleQueue()
        self._idle_event = threading.Event()
        self._idle_event.set()
        threading.Thread(target=self._send_in_background, name="pacekeeper-courier", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._idle_event.is_set()

    def send(self, version: StateVersion) -> None:
        """Unless one is on its way, or it is left out after others that came to nothing."""
        if self.is_idle and not self._backoff.should_skip():
            self._idle_event.clear()
            self._queue.put(version)

    def wait(self, seconds: float) -> bool:
        """Whether nothing is on its way any more, within so long."""
        return self._idle_event.wait(seconds)

    def _send_in_background(self) -> None:
        _lower_thread_priority()
        while True:
            version = self._queue.get()
            try:
                with self._count_work():
                    self._send_snapshot(version)
            except Exception as error:  # whatever it is, the job's snapshots do not wait for it
                self._failed = True
                _log.warning(
                    "the snapshot of step %d is not with its neighbour, %s: %s; tried again after %d more",
                    version.step,
                    self._target,
                    error,
                    self._backoff.record_failure(),
                )
            else:
                self._backoff.reset()
                if self._failed or self.delivered == NO_STATE_VERSION:
                    again = " again" if self._failed else ""
                    _log.info(
                        "snapshots are with a neighbour%s, %s, from step %d on", again, self._target, version.step
                    )
                self._failed = False
                self.delivered = version
            finally:
                self._idle_event.set()

    def _send_snapshot(self, version: StateVersion) -> None:
        slot = self._shard.read_unchecked(version)
        if slot is None:
            raise ValueError(self._shard.explain_missing(version))
        work_seconds = slot.numel() / MIN_PEER_BYTES_PER_SECOND
        address = (self._target.address, self._target.port)
        connection = socket.create_connection(address, timeout=PEER_MESSAGE_TIMEOUT_SECONDS)
        try:
            link = PeerLink.authenticate_to_server(connection, self._membership_secret.membership, self._membership_secret.secret)
            link.send_json({"key": self._key, "bytes": slot.numel(), "part": self._part_bytes})
            _require_acceptance(link, work_seconds)
            content = memoryview(slot.numpy().data)
            self._send_content(link, content[SLOT_HEADER_BYTES:])
            link.send(content[:SLOT_HEADER_BYTES])
            _require_acceptance(link, work_seconds)
        finally:
            close_connection(connection)

    def _send_content(self, link: PeerLink, content: memoryview) -> None:
        """As fast as the budget allows. A network that gives less than half of it holds the job's snapshots up."""
        start = time.monotonic()
        for sent in range(0, len(content), self._part_bytes):
            if (late := time.monotonic() - start - 2 * sent / self._budget) > PEER_MESSAGE_TIMEOUT_SECONDS:
                raise TimeoutError(
                    f"{sent >> 20} of {len(content) >> 20} MiB came through, {late:.0f} s later than at half of the "
                    "budget; give PACEKEEPER_NEIGHBOUR_MEGABYTES what the network has left"
                )
            part = content[sent : sent + self._part_bytes]
            link.send(part)
            time.sleep(max(0.0, start + (sent + len(part)) / self._budget - time.monotonic()))


class ReplicaReceiver:
    """Takes what the couriers of other workers bring to this rank."""

    def __init__(
        self,
        shards: dict[str, Snapshots],
        membership_secret: MembershipSecret,
        get_reserved_bytes: Callable[[int], int] = lambda _: 0,
        count_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        shards: where it goes, by the key of the rank that it is of.
        spared: bytes that this worker is yet to take for itself, where one of its shards has so many.
        counting: counts what a thread does inside as the copies'.
        """
        self._count_work = count_work
        self._shards = shards
        self._get_reserved_bytes = get_reserved_bytes
        self._shard_locks = {key: threading.Lock() for key in shards}
        self._membership_secret = membership_secret
        self._connection_slots = threading.BoundedSemaphore(MAX_PEER_CONNECTIONS)

    def serve(self, listener: socket.socket) -> None:
        """In a thread, from now on. `listener`: listens."""
        threading.Thread(target=self._accept_connections, args=(listener,), name="pacekeeper-shelf", daemon=True).start()

    def _accept_connections(self, listener: socket.socket) -> None:
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
                time.sleep(PEER_ACCEPT_RETRY_SECONDS)
                continue
            rests = False
            if self._connection_slots.acquire(blocking=False):
                self._start_handler(guest)
            else:
                close_connection(guest)

    def _start_handler(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._handle_connection, args=(connection,), name="pacekeeper-shelf", daemon=True).start()
        except RuntimeError as error:
            _log.warning("no copy of a neighbour's snapshot can be taken right now: %s", error)
            close_connection(connection)
            self._connection_slots.release()

    def _handle_connection(self, connection: socket.socket) -> None:
        door = threading.Timer(PEER_AUTHENTICATION_SECONDS, close_connection, [connection])
        door.daemon = True
        try:
            door.start()
            _lower_thread_priority()
            link = PeerLink.authenticate_client(connection, self._membership_secret.membership, self._membership_secret.secret)
            offer = link.receive_json()
            door.cancel()
            key, nbytes, part_bytes = offer["key"], offer["bytes"], offer["part"]
            shard = self._shards[key]
            if not isinstance(nbytes, int) or nbytes < SLOT_HEADER_BYTES or nbytes % CHECKSUM_WORD_BYTES:
                raise ValueError(f"a snapshot of {nbytes!r} bytes")
            if not isinstance(part_bytes, int) or not MIN_SNAPSHOT_PART_BYTES <= part_bytes <= MAX_PEER_MESSAGE_BYTES or part_bytes % CHECKSUM_WORD_BYTES:
                raise ValueError(f"in parts of {part_bytes!r} bytes")
            with self._shard_locks[key], self._count_work():
                self._receive_snapshot(link, shard, nbytes, part_bytes)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # the last: no thread for the door
            _log.debug("a neighbour's connection ended: %r", error)
        finally:
            door.cancel()
            close_connection(connection)
            self._connection_slots.release()

    def _receive_snapshot(self, link: PeerLink, shard: Snapshots, nbytes: int, part_bytes: int) -> None:
        """Into the older slot, which is none until its last message, the header, has come and fits the bytes."""
        try:
            slot = shard.allocate_peer_slot(nbytes, self._get_reserved_bytes(nbytes))
        except OSError as error:
            link.send_json({"refused": f"{error}; give the containers and their runtime volumes more memory"})
            return
        link.send_json({"refused": ""})
        buffer = memoryview(bytearray(part_bytes))
        for start in range(SLOT_HEADER_BYTES, nbytes, part_bytes):
            part = buffer[: min(part_bytes, nbytes - start)]
            link.receive_into(part)
            slot.add(part)
        header = bytearray(SLOT_HEADER_BYTES)
        link.receive_into(memoryview(header))
        try:
            slot.finish(header)
        except InputError as error:
            link.send_json({"refused": f"what came is {error}"})
            return
        link.send_json({"refused": ""})


def _require_acceptance(link: PeerLink, work_seconds: float) -> None:
    """Raises ValueError where the neighbour does not take it. `work_seconds`: as for `Link.hear`."""
    if reason := link.receive_json(work_seconds)["refused"]:
        raise ValueError(f"the neighbour does not take it: {reason}")


def _format_rank_key(rank: int) -> str:
    return str(rank)


def _read_membership_secret(environment: Environment) -> MembershipSecret:
    """By the plan that lies there now. Where it is the next membership's already, this round is about to end."""
    nobody = MembershipSecret(0, "")
    if environment.runtime is None:
        return nobody
    try:
        found = read_json(environment.runtime.plan)
        plan = WorkerPlan() if found is None else WorkerPlan.from_json(found)
    except (OSError, ValueError) as error:
        _log.warning("no copies of snapshots on other nodes: %s", error)
        return nobody
    return MembershipSecret(plan.membership, plan.secret)


def _open_listener(environment: Environment, membership_secret: MembershipSecret) -> socket.socket | None:
    """None: this rank takes no copies, and so nobody sends any."""
    if not (environment.peer_replica_megabytes and environment.node and environment.address and membership_secret.secret):
        return None
    family = socket.AF_INET6 if ":" in environment.address else socket.AF_INET
    try:
        return socket.create_server((environment.address, 0), family=family)
    except OSError as error:
        _log.warning("no copies of snapshots on other nodes: no port at %s: %s", environment.address, error)
        return None


def _remove_other_shards(folder: Path, ranks: Collection[int], world_size: int) -> bool:
    """Removes the shards of all other ranks; whether there were any."""
    others = [path for rank, path in list_shard_files(folder, world_size) if rank not in ranks]
    for path in others:
        path.unlink(missing_ok=True)
    return bool(others)


def _lower_thread_priority() -> None:
    """This thread lets all others go first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)

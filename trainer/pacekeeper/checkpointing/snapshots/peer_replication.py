"""A copy of each rank's newest shard in the memory of another node, so that a lost node costs few steps.

A `ReplicaSender` sends it in a thread, within a bandwidth budget. A `ReplicaReceiver` of the peer writes it into the
snapshot memory of its worker, under the same name and in the same two slots. A later round finds it there. No snapshot
is taken before all senders have delivered the previous one. Of the two snapshots that each rank then has, one is
therefore with all peers, regardless of which node is lost.
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
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.runtime_folder import read_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import WorkerPlan

from ..versions import NO_STATE_VERSION, StateVersion
from .delivery_cost import DeliveryCost
from .peer_link import MAX_PEER_MESSAGE_BYTES, PEER_MESSAGE_TIMEOUT_SECONDS, PeerLink, close_connection
from .peer_ring import RankLocation, assign_peer_ranks
from .shard_names import list_shard_files
from .snapshot_backoff import SnapshotBackoff
from .snapshot_slots import CHECKSUM_WORD_BYTES, SLOT_HEADER_BYTES, Snapshots

MIN_SNAPSHOT_PART_BYTES = 64 << 10
"""Bytes of a message if the budget is small."""
MIN_PEER_BYTES_PER_SECOND = 250e6
"""Lowest rate at which a peer is expected to allocate memory."""
PEER_ACCEPT_RETRY_SECONDS = 1.0
"""Seconds before connections are accepted again after a failure."""
SKIPPED_SNAPSHOTS_WARNING = 8
"""Number of consecutive snapshots skipped for one copy at which a warning is logged."""
PEER_AUTHENTICATION_SECONDS = 2.0
"""Seconds within which a client must authenticate."""
MAX_PEER_CONNECTIONS = 16
"""Number of simultaneous connections. More than two peers are rare; strangers cannot open more."""
_BACKGROUND_NICENESS = 10
"""Niceness of a thread that no other thread waits for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MembershipSecret:
    """A membership, and the secret that authenticates its members."""

    membership: int
    secret: str
    """Hexadecimal; "": there is none, and nothing is sent."""


@dataclass(frozen=True)
class ReplicaTarget:
    """The rank that keeps a rank's copies."""

    rank: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class PeerReplication:
    """One rank's part in peer replication."""

    def __init__(
        self,
        environment: Environment,
        peers: CpuGroup,
        open_shard: Callable[[int], Snapshots],
        sharded: bool,
        count_unallocated_slots: Callable[[], int] = lambda: 0,
    ) -> None:
        """Set up the replication. Collective if `sharded`: what all ranks have alike needs no copy elsewhere.

        `open_shard`: returns the snapshots of any rank's shard in the runtime folder, a new object at each call.
        `count_unallocated_slots`: returns for how many copies of its own shard this rank has not yet allocated memory.
        """
        self.peer_shards = PeerShards([], open_shard)
        self._peers = peers
        self._count_unallocated_slots = count_unallocated_slots
        self._cost = DeliveryCost()
        self._should_warn = environment.rank == 0
        self._megabytes = environment.peer_replica_megabytes
        self._skipped_snapshots = 0
        """Consecutive snapshots that were skipped because copies were in progress."""
        self._sender: ReplicaSender | None = None
        self._begun_snapshots = 0
        """Number of snapshots that this round has begun."""
        self._remove_unneeded_shards: Callable[[], bool] = lambda: False
        self._release_memory: Callable[[], bool] = lambda: False
        if sharded and environment.runtime is not None:
            self._set_up_peers(environment, environment.runtime.snapshots, open_shard)

    def _set_up_peers(self, environment: Environment, folder: Path, open_shard: Callable[[int], Snapshots]) -> None:
        own_rank, membership_secret = environment.rank, read_membership_secret(environment)
        listener = open_replica_listener(environment, membership_secret)
        port = None if listener is None else listener.getsockname()[1]
        gathered = self._peers.all_gather([environment.worker, environment.node, environment.address, port])
        locations = [RankLocation(*fields) for fields in gathered]
        worker_ranks = [
            rank for rank, location in enumerate(locations) if location.worker == locations[own_rank].worker
        ]
        if locations[own_rank].worker:  # ranks of a worker share its stored shards among them
            stored_ranks = {rank for rank, _ in list_shard_files(folder, len(locations))} - {*worker_ranks}
            self.peer_shards = PeerShards(
                (rank for rank in stored_ranks if worker_ranks[rank % len(worker_ranks)] == own_rank), open_shard
            )
        keeper_by_rank = assign_peer_ranks(locations)
        peer_ranks = {rank for rank, keeper in keeper_by_rank.items() if keeper in worker_ranks}
        if locations[own_rank].worker:
            self._remove_unneeded_shards = lambda: _remove_other_shards(
                folder, {*worker_ranks, *peer_ranks}, len(locations)
            )
            self._release_memory = lambda: (
                _remove_other_shards(folder, worker_ranks, len(locations)) or bool(peer_ranks)
            )
        if not keeper_by_rank or listener is None:
            if listener is not None:
                listener.close()
            return
        shards = {_format_rank_key(rank): open_shard(rank) for rank in peer_ranks if keeper_by_rank[rank] == own_rank}

        def spared(nbytes: int) -> int:
            return len(worker_ranks) * nbytes * self._count_unallocated_slots()

        ReplicaReceiver(shards, membership_secret, spared, self._cost.count_work).serve(listener)
        location = locations[keeper_by_rank[own_rank]]
        assert location.port is not None, "all ranks accept copies"
        keeper = ReplicaTarget(keeper_by_rank[own_rank], location.address, location.port)
        budget = environment.peer_replica_megabytes * 1e6 / len(worker_ranks)
        self._sender = ReplicaSender(
            _format_rank_key(own_rank), open_shard(own_rank), keeper, membership_secret, budget, self._cost.count_work
        )

    def begin_snapshot(self) -> None:
        """Prepare for a snapshot. Before the round's second one, shards that this worker need not keep are removed.

        Until then they may be needed together with the state that this round began from, which the second one
        overwrites.
        """
        self._begun_snapshots += 1
        if self._begun_snapshots == 2:
            self._remove_unneeded_shards()
        if self._begun_snapshots >= 2 and self._sender is not None:
            self._cost.finish_copy()

    @property
    def seconds(self) -> float:
        """Seconds that the copies of a snapshot cost this rank's training; 0: nothing, or unknown."""
        return self._cost.seconds

    @property
    def delivered_step(self) -> int:
        """The step of this rank's newest snapshot that its peer has; -1: none."""
        return NO_STATE_VERSION.step if self._sender is None else self._sender.delivered.step

    def release_memory(self) -> bool:
        """Release the memory of copies of other workers, which this worker's own ranks need. Call it after the restore.

        Returns whether there were copies, or another rank of the worker may have released them just now.
        """
        return self._release_memory()

    def wait_for_delivery(self, timeout: float = 0.0) -> bool:
        """Return whether all peers have the last snapshot, or will never get it. Collective.

        `timeout`: seconds to wait for it.
        """
        if self._sender is None:
            return True
        is_delivered = self._peers.all_agree(self._sender.wait(timeout))
        self._skipped_snapshots = 0 if is_delivered else self._skipped_snapshots + 1
        if self._skipped_snapshots == SKIPPED_SNAPSHOTS_WARNING and self._should_warn:
            self._should_warn = False
            _log.warning(
                "snapshots are taken much less often than possible: %d were skipped until the previous one is on "
                "other nodes; if the network has more to give than %d MB per second for each worker, raise "
                "PACEKEEPER_PEER_REPLICA_MEGABYTES in the container trainer",
                self._skipped_snapshots,
                self._megabytes,
            )
        return is_delivered

    def send(self, version: StateVersion) -> None:
        """Send this rank's snapshot, which has become valid, in the background."""
        if self._sender is not None:
            self._sender.send(version)


class PeerShards:
    """Shards of other workers' ranks in this worker's memory."""

    def __init__(self, ranks: Iterable[int], open_shard: Callable[[int], Snapshots]) -> None:
        """Open the shards of `ranks`."""
        self._shards = {rank: open_shard(rank) for rank in ranks}

    def list_versions(self) -> list[tuple[int, StateVersion, int]]:
        """Return rank, version and bytes of each."""
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
        """As `Snapshots.read_unchecked`."""
        return self._shards[rank].read_unchecked(version)

    def exclude_version(self, version: StateVersion) -> None:
        """Exclude a version from `list_versions` from now on."""
        for shard in self._shards.values():
            shard.exclude_version(version)


class ReplicaSender:
    """Sends one rank's snapshots to its peer, one at a time."""

    def __init__(
        self,
        key: str,
        shard: Snapshots,
        target: ReplicaTarget,
        membership_secret: MembershipSecret,
        budget: float,
        count_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Start the sender's thread.

        `key`: key of the rank. `shard`: its snapshots, an object for the sender alone. `budget`: bytes per second.
        `count_work`: context that counts a thread's work as copying.
        """
        self.delivered = NO_STATE_VERSION
        """The last version that the peer has received."""
        self._key = key
        self._shard = shard
        self._target = target
        self._membership_secret = membership_secret
        self._budget = budget
        self._part_bytes = min(
            MAX_PEER_MESSAGE_BYTES,
            max(MIN_SNAPSHOT_PART_BYTES, int(budget) // CHECKSUM_WORD_BYTES * CHECKSUM_WORD_BYTES),
        )
        """Bytes of about one second, so that the peer does not wait longer for a message."""
        self._failed = False
        self._backoff = SnapshotBackoff()
        self._count_work = count_work
        self._queue: queue.SimpleQueue[StateVersion] = queue.SimpleQueue()
        self._idle_event = threading.Event()
        self._idle_event.set()
        threading.Thread(target=self._send_in_background, name="pacekeeper-replica-sender", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is on its way."""
        return self._idle_event.is_set()

    def send(self, version: StateVersion) -> None:
        """Send a snapshot unless one is on its way, or this one is skipped after failures."""
        if self.is_idle and not self._backoff.should_skip():
            self._idle_event.clear()
            self._queue.put(version)

    def wait(self, seconds: float) -> bool:
        """Return whether the sender is idle, or becomes idle within `seconds`."""
        return self._idle_event.wait(seconds)

    def _send_in_background(self) -> None:
        _lower_thread_priority()
        while True:
            version = self._queue.get()
            try:
                with self._count_work():
                    self._send_snapshot(version)
            except Exception as error:  # the job's snapshots do not wait, regardless of the error
                self._failed = True
                _log.warning(
                    "cannot send the snapshot of step %d to its peer, %s: %s; the next attempt follows after %d more",
                    version.step,
                    self._target,
                    error,
                    self._backoff.record_failure(),
                )
            else:
                self._backoff.reset()
                if self._failed or self.delivered == NO_STATE_VERSION:
                    again = " again" if self._failed else ""
                    _log.info("snapshots are on a peer%s, %s, from step %d on", again, self._target, version.step)
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
            link = PeerLink.authenticate_to_server(
                connection, self._membership_secret.membership, self._membership_secret.secret
            )
            link.send_json({"key": self._key, "bytes": slot.numel(), "part": self._part_bytes})
            _require_acceptance(link, work_seconds)
            content = memoryview(slot.numpy().data)
            self._send_content(link, content[SLOT_HEADER_BYTES:])
            link.send(content[:SLOT_HEADER_BYTES])
            _require_acceptance(link, work_seconds)
        finally:
            close_connection(connection)

    def _send_content(self, link: PeerLink, content: memoryview) -> None:
        """Send at the rate of the budget.

        A network with less than half of it would delay the job's snapshots: give up then.
        """
        start = time.monotonic()
        for sent in range(0, len(content), self._part_bytes):
            if (late := time.monotonic() - start - 2 * sent / self._budget) > PEER_MESSAGE_TIMEOUT_SECONDS:
                raise TimeoutError(
                    f"{sent >> 20} of {len(content) >> 20} MiB were sent, {late:.0f} s later than at half of the "
                    "budget; set PACEKEEPER_PEER_REPLICA_MEGABYTES to what the network can spare"
                )
            part = content[sent : sent + self._part_bytes]
            link.send(part)
            time.sleep(max(0.0, start + (sent + len(part)) / self._budget - time.monotonic()))


class ReplicaReceiver:
    """Receives the snapshots that other workers' senders send to this rank."""

    def __init__(
        self,
        shards: dict[str, Snapshots],
        membership_secret: MembershipSecret,
        get_reserved_bytes: Callable[[int], int] = lambda _: 0,
        count_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the receiver.

        `shards`: destinations by the key of the rank whose shard it is.
        `get_reserved_bytes`: returns the bytes that this worker will still allocate for itself, for a shard of a given
        size.
        `count_work`: context that counts a thread's work as copying.
        """
        self._count_work = count_work
        self._shards = shards
        self._get_reserved_bytes = get_reserved_bytes
        self._shard_locks = {key: threading.Lock() for key in shards}
        self._membership_secret = membership_secret
        self._connection_slots = threading.BoundedSemaphore(MAX_PEER_CONNECTIONS)

    def serve(self, listener: socket.socket) -> None:
        """Accept connections in a thread from now on. `listener`: a listening socket."""
        threading.Thread(
            target=self._accept_connections, args=(listener,), name="pacekeeper-replica-receiver", daemon=True
        ).start()

    def _accept_connections(self, listener: socket.socket) -> None:
        is_retrying = False
        while True:
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:
                continue  # the client closed it before it was accepted
            except OSError as error:
                if error.errno in {errno.EBADF, errno.EINVAL}:
                    _log.warning("copies of peers' snapshots are no longer accepted: %s", error)
                    return
                if not is_retrying:
                    _log.warning("cannot accept copies of peers' snapshots at present; retrying: %s", error)
                is_retrying = True
                time.sleep(PEER_ACCEPT_RETRY_SECONDS)
                continue
            is_retrying = False
            if self._connection_slots.acquire(blocking=False):
                self._start_handler(connection)
            else:
                close_connection(connection)

    def _start_handler(self, connection: socket.socket) -> None:
        try:
            threading.Thread(
                target=self._handle_connection, args=(connection,), name="pacekeeper-replica-receiver", daemon=True
            ).start()
        except RuntimeError as error:
            _log.warning("cannot accept a copy of a peer's snapshot at present: %s", error)
            close_connection(connection)
            self._connection_slots.release()

    def _handle_connection(self, connection: socket.socket) -> None:
        authentication_timer = threading.Timer(PEER_AUTHENTICATION_SECONDS, close_connection, [connection])
        authentication_timer.daemon = True
        try:
            authentication_timer.start()
            _lower_thread_priority()
            link = PeerLink.authenticate_client(
                connection, self._membership_secret.membership, self._membership_secret.secret
            )
            request = link.receive_json()
            authentication_timer.cancel()
            key, nbytes, part_bytes = request["key"], request["bytes"], request["part"]
            shard = self._shards[key]
            if not isinstance(nbytes, int) or nbytes < SLOT_HEADER_BYTES or nbytes % CHECKSUM_WORD_BYTES:
                raise ValueError(f"a snapshot of {nbytes!r} bytes")
            if (
                not isinstance(part_bytes, int)
                or not MIN_SNAPSHOT_PART_BYTES <= part_bytes <= MAX_PEER_MESSAGE_BYTES
                or part_bytes % CHECKSUM_WORD_BYTES
            ):
                raise ValueError(f"in parts of {part_bytes!r} bytes")
            with self._shard_locks[key], self._count_work():
                self._receive_snapshot(link, shard, nbytes, part_bytes)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # the last: no thread for the timer
            _log.debug("a peer's connection ended: %r", error)
        finally:
            authentication_timer.cancel()
            close_connection(connection)
            self._connection_slots.release()

    def _receive_snapshot(self, link: PeerLink, shard: Snapshots, nbytes: int, part_bytes: int) -> None:
        """Receive into the older slot, which is void until its header, the last message, has arrived and matches."""
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
            link.send_json({"refused": f"the received data is invalid: {error}"})
            return
        link.send_json({"refused": ""})


def _require_acceptance(link: PeerLink, work_seconds: float) -> None:
    """Raise ValueError if the peer refuses the snapshot. `work_seconds`: as for `PeerLink.receive_json`."""
    if reason := link.receive_json(work_seconds)["refused"]:
        raise ValueError(f"the peer refuses it: {reason}")


def _format_rank_key(rank: int) -> str:
    return str(rank)


def read_membership_secret(environment: Environment) -> MembershipSecret:
    """Read the secret from the present plan. If it is the next membership's already, this round is about to end."""
    no_secret = MembershipSecret(0, "")
    if environment.runtime is None:
        return no_secret
    try:
        content = read_json(environment.runtime.plan)
        plan = WorkerPlan() if content is None else WorkerPlan.from_json(content)
    except (OSError, ValueError) as error:
        _log.warning("no copies of snapshots on other nodes: %s", error)
        return no_secret
    return MembershipSecret(plan.membership, plan.secret)


def open_replica_listener(environment: Environment, membership_secret: MembershipSecret) -> socket.socket | None:
    """Return a listening socket; None: this rank accepts no copies, and so no rank sends any."""
    if not (
        environment.peer_replica_megabytes and environment.node and environment.address and membership_secret.secret
    ):
        return None
    family = socket.AF_INET6 if ":" in environment.address else socket.AF_INET
    try:
        return socket.create_server((environment.address, 0), family=family)
    except OSError as error:
        _log.warning("no copies of snapshots on other nodes: no port at %s: %s", environment.address, error)
        return None


def _remove_other_shards(folder: Path, ranks: Collection[int], world_size: int) -> bool:
    """Remove the shards of all ranks but `ranks`, and return whether there were any."""
    paths = [path for rank, path in list_shard_files(folder, world_size) if rank not in ranks]
    for path in paths:
        path.unlink(missing_ok=True)
    return bool(paths)


def _lower_thread_priority() -> None:
    """Lower the priority of this thread below that of all others."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)

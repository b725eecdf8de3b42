"""The ranks that save together: how they reach each other, their memory, and their copies on other nodes."""

from __future__ import annotations

import logging
import re
import zlib
from functools import cache

import torch.distributed as dist

from pacekeeper.environment import Environment
from pacekeeper_analysis.errors import InputError

from ..snapshots.peer_replication import (
    ReplicaReceiver,
    ReplicaSender,
    ReplicaTarget,
    open_replica_listener,
    read_membership_secret,
)
from ..snapshots.peer_ring import RankLocation, assign_peer_ranks
from ..versions import StateVersion
from ..worker_identity import identify_worker
from .rank_channel import RankChannel
from .save_memory import SaveMemory

DEFAULT_SAVE_NAME = "save"
_log = logging.getLogger(__name__)


class SaveGroup:
    """One rank's part in the saves of one name by one group of ranks."""

    def __init__(self, name: str, ranks: tuple[int, ...], environment: Environment) -> None:
        """Connect the ranks. Collective. `ranks`: global ranks, in the order of the process group."""
        assert environment.runtime is not None, "a launcher has created the memory"
        prefix = f"{name}/{zlib.crc32(repr(ranks).encode())}"  # of all ranks: thousands of numbers
        self.channel = RankChannel(f"{prefix}/save", ranks)
        self.copy_channel = RankChannel(f"{prefix}/copy", ranks)
        """For the thread that copies saves to other workers."""
        self.upload_channel = RankChannel(f"{prefix}/upload", ranks)
        """For the thread that writes saves to the script's storage."""
        self.load_channel = RankChannel(f"{prefix}/load", ranks)
        self.rank, self.size = self.channel.rank, self.channel.size
        self.worker = environment.worker or identify_worker()
        self.round = environment.round
        folder = environment.runtime.saves / name
        folder.mkdir(parents=True, exist_ok=True)
        self.memory = SaveMemory(folder, name, self.round)
        self.sender: ReplicaSender | None = None
        self._connect_peers(environment)

    def is_first_of_worker(self) -> bool:
        """Return whether this rank is the first of its worker."""
        return self.rank == min(self.worker_ranks)

    def remove_moved_shards(self) -> None:
        """Remove the shards of ranks that this worker need not keep any longer."""
        self.memory.remove_shards({*self.worker_ranks, *self._peer_ranks}, self.size)

    def _connect_peers(self, environment: Environment) -> None:
        membership_secret = read_membership_secret(environment)
        listener = open_replica_listener(environment, membership_secret)
        port = None if listener is None else listener.getsockname()[1]
        gathered = self.channel.all_gather([self.worker, environment.node, environment.address, port])
        locations = [RankLocation(*fields) for fields in gathered]
        self.worker_ranks = [rank for rank, its in enumerate(locations) if its.worker == self.worker]
        keeper_by_rank = assign_peer_ranks(locations)
        self._peer_ranks = {rank for rank, keeper in keeper_by_rank.items() if keeper in self.worker_ranks}
        if listener is None:
            return
        if not keeper_by_rank:
            listener.close()
            return
        kept_ranks = [rank for rank in self._peer_ranks if keeper_by_rank[rank] == self.rank]
        shards = {str(rank): self.memory.create_shard(rank, self.size) for rank in kept_ranks}
        own_shard = self.memory.create_shard(self.rank, self.size)
        worker_size = len(self.worker_ranks)

        def get_reserved_bytes(nbytes: int) -> int:
            return worker_size * nbytes * own_shard.unallocated_slots

        ReplicaReceiver(shards, membership_secret, get_reserved_bytes).serve(listener)
        keeper = locations[keeper_by_rank[self.rank]]
        assert keeper.port is not None, "all ranks accept copies"
        self.sender = ReplicaSender(
            str(self.rank),
            self.memory.create_shard(self.rank, self.size),
            ReplicaTarget(keeper_by_rank[self.rank], keeper.address, keeper.port),
            membership_secret,
            environment.peer_replica_megabytes * 1e6 / worker_size,
        )

    def get_version(self, sequence: int) -> StateVersion:
        """Return the version of a save of this round."""
        return StateVersion(sequence, self.round)


def open_save_group(name: str, process_group: dist.ProcessGroup | None) -> SaveGroup | None:
    """Return the group of saves of this name; None: this rank has no memory that outlives it, or no peers are reached.

    Collective over `process_group` (None: all ranks) at the first call. Raises InputError if the name is invalid.
    """
    if not re.fullmatch("[a-z0-9_]+", name):
        raise InputError(f"name={name!r}: use lower-case letters, digits, and underscores")
    is_distributed = dist.is_available() and dist.is_initialized()
    ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD)) if is_distributed else (0,)
    return _open_group(name, ranks)


@cache
def _open_group(name: str, ranks: tuple[int, ...]) -> SaveGroup | None:
    environment = Environment.read()
    if environment.runtime is None:
        _log.info("saves go to the storage only: this process is no rank of `pacekeeper run`")
        return None
    try:
        return SaveGroup(name, ranks, environment)
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("saves go to the storage only: the ranks could not be connected: %s", error)
        return None

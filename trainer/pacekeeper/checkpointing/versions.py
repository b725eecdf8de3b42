"""Versions of the job's state: which a rank holds, which all ranks can get, and which rank sends one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class StateVersion:
    """Identity of a saved state. The same step of two rounds may be different states."""

    step: int
    round: int


NO_STATE_VERSION = StateVersion(-1, -1)


def choose_version(versions_by_rank: Sequence[Sequence[StateVersion]], sharded: bool) -> StateVersion:
    """Return the newest version that all ranks can get, from the versions of each rank; NO_STATE_VERSION: none.

    A sharded state needs the parts of all ranks; a replica can come from any rank.
    """
    versions = [set(rank) - {NO_STATE_VERSION} for rank in versions_by_rank]
    common = set.intersection(*versions) if sharded else set.union(*versions)
    return max(common, default=NO_STATE_VERSION)


def plan_transfers(holds: Sequence[bool], stores_copy: Sequence[bool]) -> list[tuple[int, int]]:
    """Return sender and receiver of each transfer, in order, so that every worker gets a replica.

    A rank that has received it sends it on: from one to a thousand ranks takes ten times as long as one transfer.

    `holds`: ranks that have it. `stores_copy`: ranks that keep it for their worker. These receive for all its ranks,
    and send.
    """
    senders = [rank for rank, has_replica in enumerate(holds) if has_replica and stores_copy[rank]]
    senders = senders or [rank for rank, has_replica in enumerate(holds) if has_replica]
    missing = [rank for rank, has_replica in enumerate(holds) if stores_copy[rank] and not has_replica]
    transfers: list[tuple[int, int]] = []
    while missing:
        receivers, missing = missing[: len(senders)], missing[len(senders) :]
        transfers += zip(senders, receivers, strict=False)
        senders += receivers
    return transfers

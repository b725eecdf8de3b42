"""Versions of the job's state: what a rank holds, what all ranks can have, and who gives it to those that lack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class StateVersion:
    """Which state is kept. The same step of two rounds need not be the same state."""

    step: int
    round: int


NO_STATE_VERSION = StateVersion(-1, -1)


def choose_version(versions_by_rank: Sequence[Sequence[StateVersion]], sharded: bool) -> StateVersion:
    """The newest version that all ranks can have, from what each rank holds; NOTHING: there is none.

    A sharded state needs the parts of all ranks; a replica can be had from any.
    """
    versions = [set(rank) - {NO_STATE_VERSION} for rank in versions_by_rank]
    common = set.intersection(*versions) if sharded else set.union(*versions)
    return max(common, default=NO_STATE_VERSION)


def plan_transfers(holds: Sequence[bool], stores_copy: Sequence[bool]) -> list[tuple[int, int]]:
    """Which rank sends its replica to which, in this order, so that every worker has one.

    Who has received sends on: from one to a thousand, it takes as long as ten of them one after another.

    holds: which ranks have it. keeps: which ranks keep it for their worker: these receive for all its ranks, and send.
    """
    senders = [rank for rank, has in enumerate(holds) if has and stores_copy[rank]]
    senders = senders or [rank for rank, has in enumerate(holds) if has]
    lacking = [rank for rank, has in enumerate(holds) if stores_copy[rank] and not has]
    pairs: list[tuple[int, int]] = []
    while lacking:
        wave, lacking = lacking[: len(senders)], lacking[len(senders) :]
        pairs += zip(senders, wave, strict=False)
        senders += wave
    return pairs

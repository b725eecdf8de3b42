"""Versions of the job's state: what a rank holds, what all ranks can have, and who gives it to those that lack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """Which state is kept. The same step of two rounds need not be the same state."""

    step: int
    round: int


NOTHING = Version(-1, -1)


def choose(held: Sequence[Sequence[Version]], sharded: bool) -> Version:
    """The newest version that all ranks can have, from what each rank holds; NOTHING: there is none.

    A sharded state needs the parts of all ranks; a replica can be had from any.
    """
    versions = [set(rank) - {NOTHING} for rank in held]
    common = set.intersection(*versions) if sharded else set.union(*versions)
    return max(common, default=NOTHING)


def transfers(holds: Sequence[bool], keeps: Sequence[bool]) -> list[tuple[int, int]]:
    """Which rank sends its replica to which, so that every worker has one.

    holds: which ranks have it. keeps: which ranks keep it for their worker: these receive for all its ranks, and send,
    each to as many as the others.
    """
    senders = [rank for rank, has in enumerate(holds) if has and keeps[rank]]
    senders = senders or [rank for rank, has in enumerate(holds) if has]
    receivers = [rank for rank, has in enumerate(holds) if keeps[rank] and not has]
    return [(senders[number % len(senders)], receiver) for number, receiver in enumerate(receivers)]

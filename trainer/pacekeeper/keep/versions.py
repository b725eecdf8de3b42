"""Versions of the job's state: what a rank holds, and what all ranks can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """Which state is kept. The same step of two rounds need not be the same state."""

    step: int
    round: int


NOTHING = Version(-1, -1)


def choose(held: Sequence[Sequence[Version]], sharded: bool) -> tuple[Version, int]:
    """The newest version that all ranks can have, and a rank that has it, from what each rank holds.

    A sharded state needs the parts of all ranks; a replica can be had from any. (NOTHING, -1): there is none.
    """
    versions = [set(rank) - {NOTHING} for rank in held]
    common = set.intersection(*versions) if sharded else set.union(*versions)
    newest = max(common, default=NOTHING)
    return newest, next((rank for rank, found in enumerate(versions) if newest in found), -1)

"""Salts: each draws other scenarios from the same seeds. Batches of them are locked.

A locked batch is judged as a whole and not looked at one by one, so that no rule is made for one of its scenarios.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

LOCKED_FILE = Path(__file__).with_name("locked.json")
SALT_PATTERN = re.compile(r"[a-z0-9-]{12,}")
"""Of a locked batch: what nothing else contains by chance."""
JUDGEMENTS_PER_BATCH = 1
"""A batch that is judged more often, or looked at, is spent: what follows may have been fitted to it."""
SCENARIOS_PER_SIZE = 1000


def create_rng(*seed: int, salt: str = "") -> np.random.Generator:
    """Return the generator of a seed. Without a salt it is numpy's of the same numbers."""
    return np.random.default_rng((*seed, *_hash_salt(salt)))


@lru_cache
def _hash_salt(salt: str) -> tuple[int, ...]:
    if not salt:
        return ()
    digest = hashlib.sha256(salt.encode()).digest()
    return tuple(int.from_bytes(digest[start : start + 4], "big") for start in (0, 4, 8, 12))


@dataclass(frozen=True)
class Batch:
    """A locked batch. counts: scenarios by ranks. date: when it was drawn. judged: the commits that it has judged."""

    salt: str
    counts: Mapping[int, int]
    date: str
    judged: tuple[str, ...] = ()
    looked: bool = False

    @property
    def is_spent(self) -> bool:
        return self.looked or len(self.judged) > JUDGEMENTS_PER_BATCH

    @property
    def seeds(self) -> Sequence[int]:
        """A thousand times the ranks, and a number."""
        return [1000 * ranks + number for ranks, count in self.counts.items() for number in range(count)]


def find_batch(salt: str, path: Path = LOCKED_FILE) -> Batch | None:
    """Return the locked batch of this salt. Raise ValueError if the file is not as it should be."""
    return next((batch for batch in read_batches(path) if batch.salt == salt), None)


def read_batches(path: Path = LOCKED_FILE) -> tuple[Batch, ...]:
    """Return all locked batches. Raise ValueError, which names the batch, if one is not as it should be."""
    batches = tuple(_read_batch(item) for item in json.loads(path.read_text())["batches"])
    if len({batch.salt for batch in batches}) < len(batches):
        raise ValueError(f"{path}: two batches have the same salt")
    return batches


def record_judgement(salt: str, commit: str, path: Path = LOCKED_FILE) -> Batch:
    """Write into the file that this commit was judged by the batch, and return the batch."""
    batches = [
        replace(batch, judged=(*batch.judged, commit)) if batch.salt == salt else batch for batch in read_batches(path)
    ]
    path.write_text(_format_batches(batches))
    return next(batch for batch in batches if batch.salt == salt)


def _read_batch(item: Mapping[str, Any]) -> Batch:
    counts = {int(ranks): count for ranks, count in item["counts"].items()}
    batch = Batch(item["salt"], counts, item["date"], tuple(item["judged"]), item["looked"])
    if not SALT_PATTERN.fullmatch(batch.salt):
        raise ValueError(f"salt {batch.salt!r}: give 12 or more lower-case letters, digits, and hyphens")
    if not all(0 < count <= SCENARIOS_PER_SIZE for count in counts.values()):
        raise ValueError(f"salt {batch.salt!r}: give 1 to {SCENARIOS_PER_SIZE} scenarios of a size")
    return batch


def _format_batches(batches: Iterable[Batch]) -> str:
    items = [
        {
            "salt": batch.salt,
            "counts": {str(ranks): count for ranks, count in batch.counts.items()},
            "date": batch.date,
            "judged": list(batch.judged),
            "looked": batch.looked,
        }
        for batch in batches
    ]
    return json.dumps({"batches": items}, indent=2) + "\n"

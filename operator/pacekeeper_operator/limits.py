"""Bounds on what somebody may ask of the operator: how often, how much at once, and how long an answer is remembered.

What is kept for each asker forgets what was used longest ago, so that nobody makes it grow by ever new names.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Who = TypeVar("Who", bound=Hashable)
Value = TypeVar("Value")


@dataclass
class _Bucket:
    left: float
    at: float


class Rate(Generic[Who]):
    """So many at once and so many a second, for each key (a token bucket). Times are of a clock that never jumps."""

    def __init__(self, per_second: float, at_once: int, keys: int = 20_000) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._keys = keys
        self._buckets: OrderedDict[Who, _Bucket] = OrderedDict()

    def take(self, key: Who, now: float) -> bool:
        """Whether one more is allowed, which then counts."""
        bucket = self._buckets.pop(key, None) or _Bucket(self._at_once, now)
        bucket.left = min(self._at_once, bucket.left + (now - bucket.at) * self._per_second)
        bucket.at = now
        allowed = bucket.left >= 1
        bucket.left -= allowed
        self._buckets[key] = bucket
        if len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return allowed

    def give_back(self, key: Who) -> None:
        """The last one does not count after all."""
        self.charge(key, -1)

    def charge(self, key: Who, more: float) -> None:
        """The last one turns out to count as so many more: what is owed comes in before the next is allowed."""
        if key in self._buckets:
            self._buckets[key].left -= more


class Remembered(Generic[Who, Value]):
    """Answers that hold for `seconds`, the newest `most` of them."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._answers: OrderedDict[Who, tuple[float, Value]] = OrderedDict()

    def get(self, key: Who, now: float) -> Value | None:
        at, value = self._answers.get(key, (0.0, None))
        return value if value is not None and now - at < self._seconds else None

    def put(self, key: Who, value: Value, now: float) -> None:
        self._answers.pop(key, None)
        self._answers[key] = (now, value)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)


class Backoff:
    """Pauses after failures in a row: each twice as long as the one before, up to the longest."""

    def __init__(self, first: float, longest: float) -> None:
        self.failing = False
        self._first = self._next = first
        self._longest = longest

    def failed(self) -> float:
        """Seconds until the next try."""
        pause, self.failing = self._next, True
        self._next = min(self._longest, 2 * pause)
        return pause

    def succeeded(self) -> None:
        self._next, self.failing = self._first, False


class Turns(Generic[Who]):
    """One at a time for each key; the others of the key wait, in order."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Who, asyncio.Lock] = WeakValueDictionary()  # gone with the last who waits

    @asynccontextmanager
    async def turn(self, key: Who) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield


class Spent(Exception):
    """What all share is lent out for now."""


class Budget:
    """So much in all, whoever asks."""

    def __init__(self, most: int) -> None:
        self.left = most

    @contextmanager
    def lent(self, amount: int) -> Iterator[None]:
        """Raises Spent."""
        if amount > self.left:
            raise Spent
        self.left -= amount
        try:
            yield
        finally:
            self.left += amount

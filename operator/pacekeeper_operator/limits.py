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

LimitKey = TypeVar("LimitKey", bound=Hashable)
Value = TypeVar("Value")


@dataclass
class _Bucket:
    left: float
    at: float


class RateLimiter(Generic[LimitKey]):
    """So many at once and so many a second, for each key (a token bucket). Times are of a clock that never jumps."""

    def __init__(self, per_second: float, at_once: int, keys: int = 20_000) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._keys = keys
        self._buckets: OrderedDict[LimitKey, _Bucket] = OrderedDict()

    def take(self, key: LimitKey, now: float) -> bool:
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

    def refund(self, key: LimitKey) -> None:
        """The last one does not count after all."""
        self.charge(key, -1)

    def charge(self, key: LimitKey, more: float) -> None:
        """The last one turns out to count as so many more: what is owed comes in before the next is allowed."""
        if key in self._buckets:
            self._buckets[key].left -= more


class ExpiringCache(Generic[LimitKey, Value]):
    """Answers that hold for `seconds`, the newest `most` of them."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._entries: OrderedDict[LimitKey, tuple[float, Value]] = OrderedDict()

    def get(self, key: LimitKey, now: float) -> Value | None:
        at, value = self._entries.get(key, (0.0, None))
        return value if value is not None and now - at < self._seconds else None

    def put(self, key: LimitKey, value: Value, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (now, value)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class Backoff:
    """Pauses after failures in a row: each twice as long as the one before, up to the longest."""

    def __init__(self, first: float, longest: float) -> None:
        self.is_failing = False
        self._first = self._next = first
        self._longest = longest

    def record_failure(self) -> float:
        """Seconds until the next try."""
        pause, self.is_failing = self._next, True
        self._next = min(self._longest, 2 * pause)
        return pause

    def record_success(self) -> None:
        self._next, self.is_failing = self._first, False


class KeyedLocks(Generic[LimitKey]):
    """One at a time for each key; the others of the key wait, in order."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[LimitKey, asyncio.Lock] = WeakValueDictionary()  # gone with the last who waits

    @asynccontextmanager
    async def hold(self, key: LimitKey) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield


class BudgetExhausted(Exception):
    """What all share is lent out for now."""


class ByteBudget:
    """So much in all, whoever asks."""

    def __init__(self, most: int) -> None:
        self.remaining = most

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Raises Spent."""
        if amount > self.remaining:
            raise BudgetExhausted
        self.remaining -= amount
        try:
            yield
        finally:
            self.remaining += amount

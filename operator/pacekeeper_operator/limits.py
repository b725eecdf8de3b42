"""Bounds on requests to the operator: rate, concurrency, and how long an answer is cached.

State per key is dropped by least recent use, so that a caller cannot make it grow with new names.
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
    """A token bucket for each key: a burst, and a rate per second. Times are of a monotonic clock."""

    def __init__(self, per_second: float, at_once: int, keys: int = 20_000) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._keys = keys
        self._buckets: OrderedDict[LimitKey, _Bucket] = OrderedDict()

    def take(self, key: LimitKey, now: float) -> bool:
        """Return whether one more request is allowed, and count it if so."""
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
        """Do not count the last request of `key`."""
        self.charge(key, -1)

    def charge(self, key: LimitKey, more: float) -> None:
        """Count the last request as `more` additional ones. The debt is repaid before the next request is allowed."""
        if key in self._buckets:
            self._buckets[key].left -= more


class ExpiringCache(Generic[LimitKey, Value]):
    """Values that are valid for `seconds`; the newest `capacity` of them."""

    def __init__(self, seconds: float, capacity: int) -> None:
        self._seconds = seconds
        self._most = capacity
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
    """Pauses after consecutive failures: each is twice as long as the one before, up to the longest."""

    def __init__(self, first: float, longest: float) -> None:
        self.is_failing = False
        self._first = self._next = first
        self._longest = longest

    def record_failure(self) -> float:
        """Record a failure and return the seconds until the next attempt."""
        pause, self.is_failing = self._next, True
        self._next = min(self._longest, 2 * pause)
        return pause

    def record_success(self) -> None:
        self._next, self.is_failing = self._first, False


class KeyedLocks(Generic[LimitKey]):
    """A lock for each key; waiters of a key are served in order."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[LimitKey, asyncio.Lock] = WeakValueDictionary()  # dropped with its last waiter

    @asynccontextmanager
    async def hold(self, key: LimitKey) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield


class BudgetExhausted(Exception):
    """The shared budget is used up at the moment."""


class ByteBudget:
    """A budget of bytes that all callers share."""

    def __init__(self, capacity: int) -> None:
        self.remaining = capacity

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Reserve `amount` bytes within the context. Raises BudgetExhausted if fewer remain."""
        if amount > self.remaining:
            raise BudgetExhausted
        self.remaining -= amount
        try:
            yield
        finally:
            self.remaining += amount

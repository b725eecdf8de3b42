"""Invariants of how operators behave: one of them acts, nothing of theirs fails unexpectedly, nothing runs hot."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import kopf

from pacekeeper_operator.api import Condition
from pacekeeper_operator.services.leadership import LEASE

from ..kubernetes.connection import Request, Stage, parsed
from .record import OPERATOR, Record
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..world import World

MOST_REQUESTS = 900
"""Of one operator, in a minute."""
MOST_WRITES = 200
EXPECTED = (kopf.TemporaryError, kopf.PermanentError)
"""Errors that are a way of saying something."""


class OneActs(Rule):
    words = "whoever writes holds the Lease"
    kinds = ("leases",)
    _FREE = frozenset({"leases", "tokenreviews"})

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._holder = ""
        """Who took or renewed it last: one that is deleted or edited by others does not stop him at once."""
        self._until = -1.0
        self._found: list[str] = []
        world.api.observe(self._sent)

    def heard(self, change: Change) -> Iterator[str]:
        if change.object["metadata"]["name"] == LEASE and change.type != "DELETED":
            spec = change.object.get("spec") or {}
            named = spec.get("holderIdentity") or ""
            if named == change.who:
                self._holder, self._until = named, change.at + (spec.get("leaseDurationSeconds") or 0)
            elif not named and change.who == self._holder:
                self._until = change.at
        return iter(())

    def looked(self) -> Iterator[str]:
        found, self._found = self._found, []
        return iter(found)

    def _sent(self, request: Request) -> None:
        """At that moment, by the clock that all share."""
        if request.stage is not Stage.SENT or not request.writes or not request.place.startswith(OPERATOR):
            return
        if request.query.get("fieldManager") == "kopf" or _plural(request) in self._FREE:
            return
        if request.place != self._holder or self.record.now() > self._until:
            names = f"{request.method} {request.path}"
            self._found.append(f"{request.place}: {names}, while the Lease is {self._holder or 'nobody'}'s")


class NothingFails(Rule):
    words = "nothing of the operator's own fails unexpectedly"
    kinds = ("trainingjobs",)

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        _EARS.heard.clear()

    def heard(self, change: Change) -> Iterator[str]:
        for condition in change.object.get("status", {}).get("conditions", ()):
            if condition["type"] == Condition.HINDERED and "a step of the operator's own" in condition.get(
                "message", ""
            ):
                yield f"{change.object['metadata']['name']}: {condition['message']}"

    def looked(self) -> Iterator[str]:
        heard, _EARS.heard = _EARS.heard, []
        yield from heard
        for context in self.world.loop.errors:
            yield _in_words(context.get("exception")) or str(context.get("message"))


class _Ears(logging.Handler):
    """Hears of errors that the operator has caught, but did not expect. All worlds of a process share it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        ends = record.levelno >= logging.CRITICAL
        if ends or not isinstance(error, EXPECTED):
            self.heard.append(_in_words(error) or record.getMessage())


def _in_words(error: BaseException | None) -> str:
    """Of what kind it is, and where it came from; "": there is none. No addresses: runs must be alike."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


_EARS = _Ears()
for _name in ("pacekeeper_operator", "simulation.operators"):
    logging.getLogger(_name).addHandler(_EARS)


class NothingRunsHot(Rule):
    words = "operators ask and write no more than there is reason for"

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._minute = 0
        self._asked: Counter[str] = Counter()
        self._written: Counter[tuple[str, str]] = Counter()
        world.api.observe(self._sent)

    def looked(self) -> Iterator[str]:
        if self.record.now() // 60 == self._minute:
            return
        for place, number in self._asked.items():
            if number > MOST_REQUESTS:
                yield f"{place} sends more than {MOST_REQUESTS} requests in a minute"
        for (place, what), number in self._written.items():
            if number > MOST_WRITES:
                yield f"{place} sends more than {MOST_WRITES} {what} in a minute"
        self._minute = int(self.record.now() // 60)
        self._asked.clear()
        self._written.clear()

    def _sent(self, request: Request) -> None:
        if request.stage is Stage.SENT and request.place.startswith(OPERATOR):
            self._asked[request.place] += 1
            if request.writes:
                self._written[request.place, f"{request.method} {_plural(request)}"] += 1


def _plural(request: Request) -> str:
    target = parsed(request.path)
    return "" if target is None else target.kind.plural


RULES: tuple[type[Rule], ...] = (OneActs, NothingFails, NothingRunsHot)

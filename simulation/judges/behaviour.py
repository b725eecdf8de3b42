"""Invariants of how operators behave: one of them acts, nothing of theirs fails unexpectedly, nothing runs hot."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import kopf

from pacekeeper_operator.api import JobCondition
from pacekeeper_operator.services.leadership import LEASE_NAME

from ..kubernetes.connection import Request, RequestStage, parse_path
from .record import OPERATOR_PLACE_PREFIX, ClusterHistory
from .rules import Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..world import World

MAX_REQUESTS_PER_MINUTE = 900
"""Of one operator, in a minute."""
MAX_WRITES_PER_MINUTE = 200
EXPECTED_ERRORS = (kopf.TemporaryError, kopf.PermanentError)
"""Errors that are a way of saying something."""


class OnlyLeaderWrites(Rule):
    description = "whoever writes holds the Lease"
    kinds = ("leases",)
    _UNRESTRICTED_KINDS = frozenset({"leases", "tokenreviews"})

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._holder = ""
        """Who took or renewed it last: one that is deleted or edited by others does not stop him at once."""
        self._until = -1.0
        self._found: list[str] = []
        world.api.add_observer(self._check_request)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.object["metadata"]["name"] == LEASE_NAME and change.type != "DELETED":
            spec = change.object.get("spec") or {}
            named = spec.get("holderIdentity") or ""
            if named == change.actor:
                self._holder, self._until = named, change.time + (spec.get("leaseDurationSeconds") or 0)
            elif not named and change.actor == self._holder:
                self._until = change.time
        return iter(())

    def check_world(self) -> Iterator[str]:
        found, self._found = self._found, []
        return iter(found)

    def _check_request(self, request: Request) -> None:
        """At that moment, by the clock that all share."""
        if request.stage is not RequestStage.SENT or not request.is_write or not request.place.startswith(OPERATOR_PLACE_PREFIX):
            return
        if request.query.get("fieldManager") == "kopf" or _get_plural(request) in self._UNRESTRICTED_KINDS:
            return
        if request.place != self._holder or self.history.now() > self._until:
            names = f"{request.method} {request.path}"
            self._found.append(f"{request.place}: {names}, while the Lease is {self._holder or 'nobody'}'s")


class NoUnexpectedErrors(Rule):
    description = "nothing of the operator's own fails unexpectedly"
    kinds = ("trainingjobs",)

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        _ERROR_HANDLER.errors.clear()

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        for condition in change.object.get("status", {}).get("conditions", ()):
            if condition["type"] == JobCondition.HINDERED and "a step of the operator's own" in condition.get(
                "message", ""
            ):
                yield f"{change.object['metadata']['name']}: {condition['message']}"

    def check_world(self) -> Iterator[str]:
        heard, _ERROR_HANDLER.errors = _ERROR_HANDLER.errors, []
        yield from heard
        for context in self.world.loop.errors:
            yield _format_error(context.get("exception")) or str(context.get("message"))


class _ErrorHandler(logging.Handler):
    """Hears of errors that the operator has caught, but did not expect. All worlds of a process share it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        ends = record.levelno >= logging.CRITICAL
        if ends or not isinstance(error, EXPECTED_ERRORS):
            self.errors.append(_format_error(error) or record.getMessage())


def _format_error(error: BaseException | None) -> str:
    """Of what kind it is, and where it came from; "": there is none. No addresses: runs must be alike."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


_ERROR_HANDLER = _ErrorHandler()
for _name in ("pacekeeper_operator", "simulation.operators"):
    logging.getLogger(_name).addHandler(_ERROR_HANDLER)


class RequestRateIsBounded(Rule):
    description = "operators ask and write no more than there is reason for"

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._minute = 0
        self._requests: Counter[str] = Counter()
        self._writes: Counter[tuple[str, str]] = Counter()
        world.api.add_observer(self._count_request)

    def check_world(self) -> Iterator[str]:
        if self.history.now() // 60 == self._minute:
            return
        for place, number in self._requests.items():
            if number > MAX_REQUESTS_PER_MINUTE:
                yield f"{place} sends more than {MAX_REQUESTS_PER_MINUTE} requests in a minute"
        for (place, what), number in self._writes.items():
            if number > MAX_WRITES_PER_MINUTE:
                yield f"{place} sends more than {MAX_WRITES_PER_MINUTE} {what} in a minute"
        self._minute = int(self.history.now() // 60)
        self._requests.clear()
        self._writes.clear()

    def _count_request(self, request: Request) -> None:
        if request.stage is RequestStage.SENT and request.place.startswith(OPERATOR_PLACE_PREFIX):
            self._requests[request.place] += 1
            if request.is_write:
                self._writes[request.place, f"{request.method} {_get_plural(request)}"] += 1


def _get_plural(request: Request) -> str:
    target = parse_path(request.path)
    return "" if target is None else target.kind.plural


BEHAVIOR_RULES: tuple[type[Rule], ...] = (OnlyLeaderWrites, NoUnexpectedErrors, RequestRateIsBounded)

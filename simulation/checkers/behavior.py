"""Invariants of operators: only the leader acts, no error is unexpected, and request rates are bounded."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import kopf

from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.kube.leader_election import LEASE_NAME

from ..kubernetes.api.changes import ObjectChange
from ..kubernetes.api.requests import Request, RequestStage, parse_path
from ..world import World
from .cluster_history import OPERATOR_PLACE_PREFIX, ClusterHistory
from .rule import Rule

MAX_REQUESTS_PER_MINUTE = 900
"""Maximum of one operator."""
MAX_WRITES_PER_MINUTE = 200
EXPECTED_ERRORS = (kopf.TemporaryError, kopf.PermanentError)
"""Errors that are part of a handler's normal control flow."""


class OnlyLeaderWrites(Rule):
    description = "only the holder of the Lease writes"
    kinds = ("leases",)
    _UNRESTRICTED_KINDS = frozenset({"leases", "tokenreviews"})

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._holder = ""
        """Who last acquired or renewed it. If others delete or edit the Lease, the holder does not stop at once."""
        self._until = -1.0
        self._found: list[str] = []
        world.api.add_observer(self._check_request)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.object["metadata"]["name"] == LEASE_NAME and change.type != "DELETED":
            spec = change.object.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            if holder == change.actor:
                self._holder, self._until = holder, change.time + (spec.get("leaseDurationSeconds") or 0)
            elif not holder and change.actor == self._holder:
                self._until = change.time
        return iter(())

    def check_world(self) -> Iterator[str]:
        violations, self._found = self._found, []
        return iter(violations)

    def _check_request(self, request: Request) -> None:
        """Check a write when it is sent, by the common clock."""
        if (
            request.stage is not RequestStage.SENT
            or not request.is_write
            or not request.place.startswith(OPERATOR_PLACE_PREFIX)
        ):
            return
        if request.query.get("fieldManager") == "kopf" or _get_plural(request) in self._UNRESTRICTED_KINDS:
            return
        if request.place != self._holder or self.history.now() > self._until:
            operation = f"{request.method} {request.path}"
            self._found.append(f"{request.place}: {operation}, while the Lease's holder is {self._holder or 'nobody'}")


class NoUnexpectedErrors(Rule):
    description = "no step of the operator fails unexpectedly"
    kinds = ("trainingjobs",)

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        _ERROR_HANDLER.errors.clear()

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        for condition in change.object.get("status", {}).get("conditions", ()):
            if condition["type"] == JobCondition.ACTION_BLOCKED and "reconcile step" in condition.get("message", ""):
                yield f"{change.object['metadata']['name']}: {condition['message']}"

    def check_world(self) -> Iterator[str]:
        errors, _ERROR_HANDLER.errors = _ERROR_HANDLER.errors, []
        yield from errors
        for context in self.world.loop.errors:
            yield _format_error(context.get("exception")) or str(context.get("message"))


class _ErrorHandler(logging.Handler):
    """Collects errors that the operator has caught, but did not expect. All worlds of a process share it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        is_critical = record.levelno >= logging.CRITICAL
        if is_critical or not isinstance(error, EXPECTED_ERRORS):
            self.errors.append(_format_error(error) or record.getMessage())


def _format_error(error: BaseException | None) -> str:
    """Format an error's type and origin; "": there is none. It omits memory addresses: runs must be equal."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{location}"


_ERROR_HANDLER = _ErrorHandler()
for _name in ("pacekeeper_operator", "simulation.operators"):
    logging.getLogger(_name).addHandler(_ERROR_HANDLER)


class RequestRateIsBounded(Rule):
    description = "operators send no unnecessary requests"

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._minute = 0
        self._requests: Counter[str] = Counter()
        self._writes: Counter[tuple[str, str]] = Counter()
        world.api.add_observer(self._count_request)

    def check_world(self) -> Iterator[str]:
        if self.history.now() // 60 == self._minute:
            return
        for place, count in self._requests.items():
            if count > MAX_REQUESTS_PER_MINUTE:
                yield f"{place} sends more than {MAX_REQUESTS_PER_MINUTE} requests in a minute"
        for (place, operation), count in self._writes.items():
            if count > MAX_WRITES_PER_MINUTE:
                yield f"{place} sends more than {MAX_WRITES_PER_MINUTE} {operation} in a minute"
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

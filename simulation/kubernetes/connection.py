"""A client's way to the API server: requests as of HTTP, over the network, with what may become of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pacekeeper_operator.cluster import REQUEST_SECONDS, SILENT_SECONDS, Answer

from ..loop import Process
from ..network import API
from .admission import MAX_REQUEST_BYTES, Actor
from .errors import PATCH_OPTIONS, ApiError, Cause, bad_request, invalid, not_found
from .faults import Fate
from .objects import KINDS, Kind, Object, as_sent, bytes_of, copied, field_selector, label_selector

if TYPE_CHECKING:
    from .api_server import ApiServer

LATEST_SECONDS = 25.0
"""After its sender has given up, a late request takes effect within so long."""


class Stage(Enum):
    """How far a request has come."""

    SENT = "it is about to leave: whose process dies now has not sent it"
    DONE = "it has taken effect, and nobody has been told"
    ANSWERED = "its sender has the answer"


@dataclass(frozen=True, slots=True)
class Request:
    """Over the network. `operator`: by its service account. `status`: of the answer; 0: there is none yet."""

    place: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    style: str
    stage: Stage = Stage.SENT
    status: int = 0
    operator: bool = True

    @property
    def writes(self) -> bool:
        return self.method != "GET"


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    kind: Kind
    namespace: str
    name: str
    subresource: str


class Connection:
    """Of one process of the operator, from its place."""

    def __init__(self, api: ApiServer, place: str, process: Process) -> None:
        self._api = api
        self._place = place
        self._process = process

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, style: str) -> Answer:
        """Raises TimeoutError or OSError where there is no answer within REQUEST_SECONDS."""
        request = Request(self._place, method, path, dict(query), as_sent(body), style)
        self._api.seen(request)
        if self._process.dead:
            raise asyncio.CancelledError
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        _Exchange(self._api, request, answer).send()
        async with asyncio.timeout(REQUEST_SECONDS):
            return await answer

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Raises TimeoutError or OSError where nothing comes for SILENT_SECONDS."""
        target = parsed(path)
        if target is None:
            raise ConnectionResetError(f"nothing is served at {path}")
        stream = self._api.watch(
            self._place,
            self._process,
            target.kind.plural,
            query["resourceVersion"],
            labels=query.get("labelSelector", ""),
            namespace=target.namespace,
            seconds=float(query["timeoutSeconds"]),
        )
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    type_, found = await anext(stream)
                yield {"type": type_, "object": found}
        except ApiError as error:
            yield {"type": "ERROR", "object": error.body()}
        except StopAsyncIteration:
            return
        finally:
            stream.close()


class _Exchange:
    """One request, on its way there and back. Nothing of it belongs to the process that has sent it."""

    def __init__(self, api: ApiServer, request: Request, answer: asyncio.Future[Answer]) -> None:
        self._api = api
        self._request = request
        self._answer = answer

    def send(self) -> None:
        api, request = self._api, self._request
        delay = api.world.network.delay(request.place, API)
        if api.faults.down and self._passes():
            api.world.after(delay, self._fail, ConnectionRefusedError("the API server is down"))
            return
        low, high = api.faults.slow
        if high:
            delay += api.random.uniform(low, high)
        api.world.after(delay, self._arrive)

    def _arrive(self) -> None:
        if not self._passes() or self._broken():
            return
        fate, status = self._fate()
        match fate:
            case Fate.DROPPED:
                self._tell("never arrives")
            case Fate.REFUSED:
                self._tell(f"is answered with {status}")
                self._reply(Answer(status, ApiError(status, _REASONS[status], f"made up: {_REASONS[status]}").body()))
            case Fate.LATE:
                late = REQUEST_SECONDS + self._api.random.uniform(0.1, LATEST_SECONDS)
                self._tell(f"takes effect {late:.1f} s late")
                self._api.world.after(late, self._serve_late)
            case Fate.LOST:
                self._tell("takes effect, its answer is lost")
                self._serve()
            case Fate.BROKEN:
                self._tell("takes effect, and the connection breaks")
                self._serve()
                self._fail(ConnectionResetError("the connection broke"))
            case None:
                held = self._held()
                if held:
                    self._tell(f"is held up by a webhook for {held:.1f} s")
                    self._api.world.after(held, self._serve_late)
                else:
                    self._serve_and_reply()

    def _fate(self) -> tuple[Fate | None, int]:
        faults, request, random = self._api.faults, self._request, self._api.random
        for i, shot in enumerate(faults.one_shots):
            if shot.method in ("", request.method) and shot.part in request.path:
                del faults.one_shots[i]
                return shot.fate, shot.status
        if faults.error_rate and random.random() < faults.error_rate:
            return Fate.REFUSED, random.choice((500, 503, 429))
        if request.writes and faults.lost_rate and random.random() < faults.lost_rate:
            return (Fate.LOST if random.random() < 0.5 else Fate.BROKEN), 0
        if request.writes and faults.late_rate and random.random() < faults.late_rate:
            return Fate.LATE, 0
        return None, 0

    def _held(self) -> float:
        """Seconds for which webhooks hold up a creation."""
        request = self._request
        if request.method != "POST" or not self._api.faults.slow_webhooks:
            return 0.0
        target = parsed(request.path)
        name = (request.body.get("metadata") or {}).get("name", "")
        return max(
            (
                webhook.seconds
                for webhook in self._api.faults.slow_webhooks
                if target is not None and webhook.plural == target.kind.plural and name.startswith(webhook.prefix)
            ),
            default=0.0,
        )

    def _serve_and_reply(self) -> None:
        self._reply(self._serve())

    def _serve_late(self) -> None:
        """Unless the server has ended meanwhile, and the request with it."""
        if not self._broken():
            self._serve_and_reply()

    def _serve(self) -> Answer:
        answer = replace(serve(self._api, self._request), date=self._api.world.wall())
        self._api.seen(replace(self._request, stage=Stage.DONE, status=answer.status))
        return answer

    def _reply(self, answer: Answer) -> None:
        world = self._api.world
        world.after(world.network.delay(API, self._request.place), self._hand_over, answer)

    def _hand_over(self, answer: Answer) -> None:
        if self._passes() and not self._broken() and not self._answer.done():
            self._answer.set_result(answer)
            self._api.seen(replace(self._request, stage=Stage.ANSWERED, status=answer.status))

    def _fail(self, error: OSError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def _passes(self) -> bool:
        """Whether messages pass between the two at this moment; one that does not pass is never heard of again."""
        return not self._api.faults.silent and self._api.world.network.reaches(self._request.place, API)

    def _broken(self) -> bool:
        """Whether the server's process is gone, which its clients see at once where the network lets them."""
        if self._api.faults.down:
            self._fail(ConnectionResetError("the API server went down"))
        return self._api.faults.down

    def _tell(self, words: str) -> None:
        self._api.world.story.tell(API, self._request.method, self._request.path, words)


_REASONS = {400: "BadRequest", 403: "Forbidden", 409: "Conflict", 422: "Invalid", 429: "TooManyRequests"}
_REASONS |= {401: "Unauthorized", 404: "NotFound", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}


def serve(api: ApiServer, request: Request) -> Answer:
    """The answer, at this moment and without the network."""
    target = parsed(request.path)
    try:
        if target is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource", {})
        if request.body is not None and bytes_of(request.body) > MAX_REQUEST_BYTES:
            why = f"Request entity too large: limit is {MAX_REQUEST_BYTES}"
            raise ApiError(413, "RequestEntityTooLarge", why)
        found = _SERVED[request.method](api, target, request)
    except ApiError as error:
        return Answer(error.status, error.body())
    return Answer(201 if found[1] else 200, copied(found[0]))


def _get(api: ApiServer, target: Target, request: Request) -> tuple[Object, bool]:
    kind = target.kind
    if target.name:
        found = api.get(kind.plural, target.name, target.namespace)
        if found is None:
            raise not_found(kind, target.name)
        return found, False
    items = api.all(kind.plural, target.namespace)
    labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
    try:
        matches = [label_selector(labels)] if labels else []
        matches += [field_selector(fields, kind.plural)] if fields else []
    except ValueError as error:
        raise bad_request(str(error)) from None
    found_items = [body for body in items if all(match(body) for match in matches)]
    found_items.sort(key=lambda body: (body["metadata"].get("namespace", ""), body["metadata"]["name"]))
    return {
        "kind": f"{kind.name}List",
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": str(api.version)},
        "items": found_items,
    }, False


def _post(api: ApiServer, target: Target, request: Request) -> tuple[Object, bool]:
    body = request.body
    metadata = body.get("metadata") or {}
    if target.namespace:
        if metadata.get("namespace", target.namespace) != target.namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        body = {**body, "metadata": {**metadata, "namespace": target.namespace}}
    dry, strict = "dryRun" in request.query, request.query.get("fieldValidation") == "Strict"
    return api.do_create(target.kind, body, _actor(request), dry_run=dry, strict=strict), True


def _put(api: ApiServer, target: Target, request: Request) -> tuple[Object, bool]:
    place = (target.namespace, target.name)
    new = api.get(target.kind.plural, target.name, target.namespace) is None
    dry = "dryRun" in request.query
    body = api.do_update(target.kind, place, request.body, _actor(request), target.subresource, dry_run=dry)
    return body, new


def _patch(api: ApiServer, target: Target, request: Request) -> tuple[Object, bool]:
    place = (target.namespace, target.name)
    new = api.get(target.kind.plural, target.name, target.namespace) is None
    force = request.query.get("force") == "true"
    if force and "apply" not in request.style:
        words = "Forbidden: may not be specified for non-apply patch"
        raise invalid(PATCH_OPTIONS, "", [Cause("force", words, "FieldValueForbidden")])
    body = api.do_patch(
        target.kind,
        place,
        request.body,
        _actor(request),
        target.subresource,
        request.style,
        force=force,
        dry_run="dryRun" in request.query,
    )
    return body, new


def _delete(api: ApiServer, target: Target, request: Request) -> tuple[Object, bool]:
    options = request.body or {}
    wanted = options.get("preconditions") or {}
    body = api.do_delete(
        target.kind,
        (target.namespace, target.name),
        _actor(request),
        uid=wanted.get("uid", ""),
        version=wanted.get("resourceVersion", ""),
        grace=options.get("gracePeriodSeconds"),
        propagation=options.get("propagationPolicy", "Background"),
    )
    return body, False


_SERVED: Mapping[str, Callable[[ApiServer, Target, Request], tuple[Object, bool]]] = {
    "GET": _get,
    "POST": _post,
    "PUT": _put,
    "PATCH": _patch,
    "DELETE": _delete,
}


def _actor(request: Request) -> Actor:
    return Actor(request.place, request.query.get("fieldManager", ""), operator=request.operator)


@lru_cache(maxsize=4096)
def parsed(path: str) -> Target | None:
    """None: no such kind is served there."""
    parts = path.strip("/").split("/")
    count = 2 if parts[0] == "api" else 3
    prefix, rest = "/" + "/".join(parts[:count]), parts[count:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] in KINDS:
        namespace, rest = rest[1], rest[2:]
    kind = KINDS.get(rest[0]) if rest else None
    if kind is None or kind.path != prefix:
        return None
    return Target(kind, namespace, *[*rest[1:], "", ""][:2])

"""A client's connection to the API server: HTTP requests over the network, and their faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from pacekeeper_operator.kube.client import REQUEST_SECONDS, WATCH_IDLE_TIMEOUT_SECONDS, ApiResponse

from ...loop import Process
from ...network import API_PLACE
from .admission import MAX_REQUEST_BYTES, Actor
from .api_faults import RequestOutcome
from .api_server import ApiServer
from .errors import PATCH_OPTIONS_KIND, ApiError, FieldError, build_bad_request, build_invalid, build_not_found
from .objects import (
    Object,
    as_sent,
    copy_value,
    estimate_json_bytes,
    parse_field_selector,
    parse_label_selector,
)
from .requests import Request, RequestStage, ResourceTarget, parse_path
from .watch import WatchOptions, WatchStream

MAX_LATE_SECONDS = 25.0
"""A late request takes effect within this time after its client has timed out."""


class SimulatedApiConnection:
    """The connection of one operator process at its place."""

    def __init__(self, api: ApiServer, place: str, process: Process) -> None:
        self._api = api
        self._place = place
        self._process = process

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, style: str) -> ApiResponse:
        """Send a request. Raises TimeoutError or OSError if there is no answer within REQUEST_SECONDS."""
        request = Request(self._place, method, path, dict(query), as_sent(body), style)
        self._api.notify_observers(request)
        if self._process.dead:
            raise asyncio.CancelledError
        answer: asyncio.Future[ApiResponse] = asyncio.get_running_loop().create_future()
        _Exchange(self._api, request, answer).send()
        async with asyncio.timeout(REQUEST_SECONDS):
            return await answer

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Watch a path. Raises TimeoutError or OSError if nothing arrives for WATCH_IDLE_TIMEOUT_SECONDS."""
        target = parse_path(path)
        if target is None:
            raise ConnectionResetError(f"nothing is served at {path}")
        labels, seconds = query.get("labelSelector", ""), float(query["timeoutSeconds"])
        options = WatchOptions(query["resourceVersion"], labels, target.namespace, seconds)
        stream = WatchStream(self._api, self._place, self._process, target.kind, options)
        try:
            while True:
                async with asyncio.timeout(WATCH_IDLE_TIMEOUT_SECONDS):
                    type_, body = await anext(stream)
                yield {"type": type_, "object": body}
        except ApiError as error:
            yield {"type": "ERROR", "object": error.body()}
        except StopAsyncIteration:
            return
        finally:
            stream.close()


class _Exchange:
    """One request and its answer on their way. It does not belong to the process that has sent it."""

    def __init__(self, api: ApiServer, request: Request, answer: asyncio.Future[ApiResponse]) -> None:
        self._api = api
        self._request = request
        self._answer = answer

    def send(self) -> None:
        api, request = self._api, self._request
        delay = api.world.network.draw_delay(request.place, API_PLACE)
        if api.faults.down and self._can_reach():
            api.world.call_after(delay, self._fail, ConnectionRefusedError("the API server is down"))
            return
        low, high = api.faults.slow
        if high:
            delay += api.random.uniform(low, high)
        api.world.call_after(delay, self._receive)

    def _receive(self) -> None:
        if not self._can_reach() or self._is_server_gone():
            return
        outcome, status = self._draw_outcome()
        match outcome:
            case RequestOutcome.DROPPED:
                self._log("never arrives")
            case RequestOutcome.REFUSED:
                self._log(f"is answered with {status}")
                self._reply(
                    ApiResponse(
                        status, ApiError(status, _STATUS_REASONS[status], f"made up: {_STATUS_REASONS[status]}").body()
                    )
                )
            case RequestOutcome.LATE:
                lateness = REQUEST_SECONDS + self._api.random.uniform(0.1, MAX_LATE_SECONDS)
                self._log(f"takes effect {lateness:.1f} s late")
                self._api.world.call_after(lateness, self._serve_late)
            case RequestOutcome.LOST:
                self._log("takes effect, its answer is lost")
                self._serve()
            case RequestOutcome.BROKEN:
                self._log("takes effect, and the connection breaks")
                self._serve()
                self._fail(ConnectionResetError("the connection broke"))
            case None:
                webhook_delay = self._compute_webhook_delay()
                if webhook_delay:
                    self._log(f"is held up by a webhook for {webhook_delay:.1f} s")
                    self._api.world.call_after(webhook_delay, self._serve_late)
                else:
                    self._serve_and_reply()

    def _draw_outcome(self) -> tuple[RequestOutcome | None, int]:
        faults, request, random = self._api.faults, self._request, self._api.random
        for i, one_shot in enumerate(faults.one_shots):
            if one_shot.method in ("", request.method) and one_shot.part in request.path:
                del faults.one_shots[i]
                return one_shot.outcome, one_shot.status
        if faults.error_rate and random.random() < faults.error_rate:
            return RequestOutcome.REFUSED, random.choice((500, 503, 429))
        if request.is_write and faults.lost_rate and random.random() < faults.lost_rate:
            return (RequestOutcome.LOST if random.random() < 0.5 else RequestOutcome.BROKEN), 0
        if request.is_write and faults.late_rate and random.random() < faults.late_rate:
            return RequestOutcome.LATE, 0
        return None, 0

    def _compute_webhook_delay(self) -> float:
        """Return the seconds for which webhooks delay a creation."""
        request = self._request
        if request.method != "POST" or not self._api.faults.slow_webhooks:
            return 0.0
        target = parse_path(request.path)
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
        """Serve the request, unless the server has gone down in the meantime."""
        if not self._is_server_gone():
            self._serve_and_reply()

    def _serve(self) -> ApiResponse:
        answer = replace(serve_request(self._api, self._request), date=self._api.world.wall_time())
        self._api.notify_observers(replace(self._request, stage=RequestStage.APPLIED, status=answer.status))
        return answer

    def _reply(self, answer: ApiResponse) -> None:
        world = self._api.world
        world.call_after(world.network.draw_delay(API_PLACE, self._request.place), self._deliver_answer, answer)

    def _deliver_answer(self, answer: ApiResponse) -> None:
        if self._can_reach() and not self._is_server_gone() and not self._answer.done():
            self._answer.set_result(answer)
            self._api.notify_observers(replace(self._request, stage=RequestStage.ANSWERED, status=answer.status))

    def _fail(self, error: OSError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def _can_reach(self) -> bool:
        """Return whether messages pass at present. One that does not pass is lost."""
        return not self._api.faults.silent and self._api.world.network.can_reach(self._request.place, API_PLACE)

    def _is_server_gone(self) -> bool:
        """Return whether the server's process is down. Its clients see that at once if the network is up."""
        if self._api.faults.down:
            self._fail(ConnectionResetError("the API server went down"))
        return self._api.faults.down

    def _log(self, message: str) -> None:
        self._api.world.log.record(API_PLACE, self._request.method, self._request.path, message)


_STATUS_REASONS = {400: "BadRequest", 403: "Forbidden", 409: "Conflict", 422: "Invalid", 429: "TooManyRequests"}
_STATUS_REASONS |= {
    401: "Unauthorized",
    404: "NotFound",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def serve_request(api: ApiServer, request: Request) -> ApiResponse:
    """Serve a request immediately, without the network."""
    target = parse_path(request.path)
    try:
        if target is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource", {})
        if request.body is not None and estimate_json_bytes(request.body) > MAX_REQUEST_BYTES:
            message = f"Request entity too large: limit is {MAX_REQUEST_BYTES}"
            raise ApiError(413, "RequestEntityTooLarge", message)
        result = _METHOD_HANDLERS[request.method](api, target, request)
    except ApiError as error:
        return ApiResponse(error.status, error.body())
    return ApiResponse(201 if result[1] else 200, copy_value(result[0]))


def _serve_get(api: ApiServer, target: ResourceTarget, request: Request) -> tuple[Object, bool]:
    kind = target.kind
    if target.name:
        existing = api.get(kind.plural, target.name, target.namespace)
        if existing is None:
            raise build_not_found(kind, target.name)
        return existing, False
    items = api.list_all(kind.plural, target.namespace)
    labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
    try:
        matches = [parse_label_selector(labels)] if labels else []
        matches += [parse_field_selector(fields, kind.plural)] if fields else []
    except ValueError as error:
        raise build_bad_request(str(error)) from None
    matching = [body for body in items if all(match(body) for match in matches)]
    matching.sort(key=lambda body: (body["metadata"].get("namespace", ""), body["metadata"]["name"]))
    return {
        "kind": f"{kind.name}List",
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": str(api.version)},
        "items": matching,
    }, False


def _serve_post(api: ApiServer, target: ResourceTarget, request: Request) -> tuple[Object, bool]:
    body = request.body
    metadata = body.get("metadata") or {}
    if target.namespace:
        if metadata.get("namespace", target.namespace) != target.namespace:
            raise build_bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        body = {**body, "metadata": {**metadata, "namespace": target.namespace}}
    dry, strict = "dryRun" in request.query, request.query.get("fieldValidation") == "Strict"
    return api.do_create(target.kind, body, _build_actor(request), dry_run=dry, strict=strict), True


def _serve_put(api: ApiServer, target: ResourceTarget, request: Request) -> tuple[Object, bool]:
    key = (target.namespace, target.name)
    new = api.get(target.kind.plural, target.name, target.namespace) is None
    dry = "dryRun" in request.query
    body = api.do_update(target.kind, key, request.body, _build_actor(request), target.subresource, dry_run=dry)
    return body, new


def _serve_patch(api: ApiServer, target: ResourceTarget, request: Request) -> tuple[Object, bool]:
    key = (target.namespace, target.name)
    new = api.get(target.kind.plural, target.name, target.namespace) is None
    force = request.query.get("force") == "true"
    if force and "apply" not in request.style:
        message = "Forbidden: may not be specified for non-apply patch"
        raise build_invalid(PATCH_OPTIONS_KIND, "", [FieldError("force", message, "FieldValueForbidden")])
    body = api.do_patch(
        target.kind,
        key,
        request.body,
        _build_actor(request),
        target.subresource,
        request.style,
        force=force,
        dry_run="dryRun" in request.query,
    )
    return body, new


def _serve_delete(api: ApiServer, target: ResourceTarget, request: Request) -> tuple[Object, bool]:
    options = request.body or {}
    preconditions = options.get("preconditions") or {}
    body = api.do_delete(
        target.kind,
        (target.namespace, target.name),
        _build_actor(request),
        uid=preconditions.get("uid", ""),
        version=preconditions.get("resourceVersion", ""),
        grace=options.get("gracePeriodSeconds"),
        propagation=options.get("propagationPolicy", "Background"),
    )
    return body, False


_METHOD_HANDLERS: Mapping[str, Callable[[ApiServer, ResourceTarget, Request], tuple[Object, bool]]] = {
    "GET": _serve_get,
    "POST": _serve_post,
    "PUT": _serve_put,
    "PATCH": _serve_patch,
    "DELETE": _serve_delete,
}


def _build_actor(request: Request) -> Actor:
    return Actor(request.place, request.query.get("fieldManager", ""), operator=request.operator)

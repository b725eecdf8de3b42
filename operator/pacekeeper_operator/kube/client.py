"""The client of the API server. Objects are plain dicts, as on the wire.

Errors are kopf's: TemporaryError can be retried, PermanentError cannot. The errors that callers decide upon have
classes of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode
from urllib.request import getproxies

import aiohttp
import kopf
import orjson
from kubernetes.aio import client, config

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json

from ..api import names
from ..api.jobset import JOBSET_API_VERSION
from . import response_limits

Object = names.Object
Objects = list[Object]
Collected = TypeVar("Collected")

REQUEST_SECONDS = 15
WATCH_SECONDS = 300
"""The API server ends a watch after this duration."""
WATCH_IDLE_TIMEOUT_SECONDS = 75.0
"""A watch without an event for this duration has ended. A live one sends a bookmark about once a minute."""
LIST_PAGE_OBJECTS = 500
"""Objects of a page of a list, at most.

`response_limits.PageLimiter` bounds the bytes of a page. Thousands of objects would block the event loop while they are
parsed, and delay the renewal of the Lease.
"""
MAX_CONCURRENT_API_CALLS = 32
"""Concurrent calls of one connection. Other calls wait: more at once would delay each answer, and speed up none."""
API_BUSY_RETRY_SECONDS, MAX_API_BUSY_RETRY_SECONDS = 2.0, 60.0
"""Delay before the next call to an overloaded API server that sends no Retry-After; and the maximum of the delay."""
FIELD_MANAGER = "pacekeeper"


class NotFound(kopf.PermanentError):
    """The object does not exist."""


class Conflict(kopf.TemporaryError):
    """The object has changed since it was read, or it exists already."""


class ObjectRejected(kopf.PermanentError):
    """The API server rejects the object. The message is the server's."""


class Denied(kopf.TemporaryError):
    """The API server denies the call for now (quota, a policy, a missing right). The message is the server's."""


class ApiServerBusy(kopf.TemporaryError):
    """The API server is overloaded. `delay` is what it asks for."""


class ResourceVersionExpired(kopf.TemporaryError):
    """The API server cannot watch from this resourceVersion: it is too old, or newer than a restored etcd.

    List again.
    """


@dataclass(frozen=True)
class ResourceKind:
    """A kind of objects, and its path in the API server."""

    path: str  # /api/v1 or /apis/<group>/<version>
    plural: str
    namespaced: bool = True

    def list_scopes(self, namespaces: Sequence[str]) -> Sequence[str]:
        """Return the namespaces to list and watch to cover `namespaces` (empty: all). "" stands for all at once."""
        return namespaces if self.namespaced and namespaces else ("",)


@dataclass(frozen=True)
class Listing:
    """Objects, and the resourceVersion at which they were listed."""

    items: Objects
    version: int


@dataclass(frozen=True)
class WatchEvent:
    """An event of a watch."""

    body: Object | None  # the object, or its last state if deleted; None: a bookmark
    version: int
    deleted: bool = False


PODS = ResourceKind("/api/v1", "pods")
NAMESPACES = ResourceKind("/api/v1", "namespaces", namespaced=False)
JOBS = ResourceKind("/apis/batch/v1", "jobs")
JOBSETS = ResourceKind(f"/apis/{JOBSET_API_VERSION}", "jobsets")
MUTATING_WEBHOOKS = ResourceKind(
    "/apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False
)
MUTATING_POLICY_BINDINGS = ResourceKind(
    "/apis/admissionregistration.k8s.io/v1", "mutatingadmissionpolicybindings", namespaced=False
)
NODE_OBJECTS = ResourceKind("/api/v1", "nodes", namespaced=False)
DAEMON_SETS = ResourceKind("/apis/apps/v1", "daemonsets")
CONFIG_MAPS = ResourceKind("/api/v1", "configmaps")
SECRETS = ResourceKind("/api/v1", "secrets")
EVENTS = ResourceKind("/apis/events.k8s.io/v1", "events")
LEASES = ResourceKind("/apis/coordination.k8s.io/v1", "leases")
TOKEN_REVIEWS = ResourceKind("/apis/authentication.k8s.io/v1", "tokenreviews", namespaced=False)
NETWORK_POLICIES = ResourceKind("/apis/networking.k8s.io/v1", "networkpolicies")
TRAINING_JOBS = ResourceKind(f"/apis/{names.API_VERSION}", "trainingjobs")
TRAINING_JOB_STATES = ResourceKind(f"/apis/{names.API_VERSION}", "trainingjobstates")
WATCHED_JOBS = ResourceKind(f"/apis/{names.API_VERSION}", "watchedjobs")
PROFILE_WINDOWS = ResourceKind(f"/apis/{names.API_VERSION}", "profilewindows")
INCIDENT_OBJECTS = ResourceKind(f"/apis/{names.API_VERSION}", "incidents")
FABRICS = ResourceKind(f"/apis/{names.API_VERSION}", "fabrics", namespaced=False)
NODE_PROBES = ResourceKind(f"/apis/{names.API_VERSION}", "nodeprobes", namespaced=False)
NODE_HISTORIES = ResourceKind(f"/apis/{names.API_VERSION}", "nodehistories", namespaced=False)
NODE_QUARANTINES = ResourceKind(f"/apis/{names.API_VERSION}", "nodequarantines", namespaced=False)

_PATHS_WITHOUT_LEADERSHIP = (LEASES.path, TOKEN_REVIEWS.path)
"""Paths that an operator may write to without leadership. No other operator decides upon these objects."""

JSON_CONTENT_TYPE = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
METADATA_CONTENT_TYPE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Media type of an answer with an object's metadata only."""


@dataclass(frozen=True)
class ApiResponse:
    """An answer of the API server. If it is not a JSON object, `body` has it as `message`."""

    status: int
    body: Object
    retry_after: float | None = None  # seconds, as the server asks; None: it does not
    date: float | None = None  # seconds since the epoch, by the server's clock; None: unknown


class ApiConnection(Protocol):
    """The connection to the API server. A simulation replaces only this."""

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, style: str
    ) -> ApiResponse:
        """Send a request. `style` is the body's media type, or for a GET that of the answer.

        Raises aiohttp.ClientError, TimeoutError, or OSError if there is no answer within REQUEST_SECONDS.
        """

    def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Yield events as on the wire, until the API server ends the stream. A refusal is an event of type ERROR.

        Raises aiohttp.ClientError, TimeoutError, or OSError if nothing arrives for WATCH_IDLE_TIMEOUT_SECONDS.
        """


class Cluster:
    """The API server. Use `connect_to_cluster()`."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_API_CALLS)
        self.before_write: Callable[[], None] = _allow_write
        """Called before each write to the cluster. It raises if this operator may not act."""
        self.on_server_date: Callable[[float], None] = _ignore_date
        """Called with the date of each answer that has one, in seconds since the epoch by the API server's clock."""

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        return await self._call("GET", _build_path(kind, namespace, name))

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self.get(kind, name, namespace)
        except NotFound:
            return None

    async def find_metadata(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        """Return the metadata of an object, or None if it does not exist. Nothing else of it is read."""
        try:
            answer = await self._call("GET", _build_path(kind, namespace, name), style=METADATA_CONTENT_TYPE)
        except NotFound:
            return None
        metadata: Object = answer["metadata"]
        return metadata

    async def find_served_version(self, group: str, versions: Sequence[str]) -> str:
        """Return the first of `versions` in which the API group is served; "" if it is served in none of them."""
        api_group = await self.find(ResourceKind("/apis", group, namespaced=False), "")
        served = set() if api_group is None else {entry["version"] for entry in api_group["versions"]}
        return next((version for version in versions if version in served), "")

    async def list(self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = "") -> Objects:
        """List all objects, of all namespaces by default. No object is staler than the call."""
        return (await self.list_with_version(kind, namespace, labels=labels, fields=fields)).items

    async def list_with_version(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> Listing:
        """List all objects, with the resourceVersion of the list."""
        items: Objects = []
        version = 0
        async for page in self.list_pages(kind, namespace, labels=labels, fields=fields):
            items += page.items
            version = page.version
        return Listing(items, version)

    async def collect(
        self,
        kind: ResourceKind,
        convert: Callable[[Object], Collected],
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
    ) -> Sequence[Collected]:
        """Return the result of `convert` for each object.

        It holds only one page of objects at once, as tenants decide how large objects are.
        """
        results: list[Collected] = []
        async with aclosing(self.list_pages(kind, namespace, labels=labels, fields=fields)) as pages:
            async for page in pages:
                results += map(convert, page.items)
        return results

    async def list_pages(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[Listing]:
        """Yield a list page by page, for callers that keep little of each object.

        Thousands of pods take hundreds of megabytes, so a page is emptied before the next one is requested.
        """
        query = {"limit": str(LIST_PAGE_OBJECTS)} | ({"labelSelector": labels} if labels else {})
        query |= {"fieldSelector": fields} if fields else {}
        while True:
            answer = await self._call("GET", _build_path(kind, namespace), query)
            if "items" not in answer:
                message = f"the API server has answered a list of {kind.plural} without a list"
                raise kopf.TemporaryError(message, delay=2)
            query["continue"] = answer["metadata"].get("continue") or ""
            items: Objects = answer["items"] or []
            yield Listing(items, int(answer["metadata"]["resourceVersion"]))
            items.clear()
            if not query["continue"]:
                return

    async def watch(
        self, kind: ResourceKind, version: int, namespace: str = "", *, labels: str = ""
    ) -> AsyncGenerator[WatchEvent]:
        """Yield the changes since `version`, until the API server ends the watch.

        Raises ResourceVersionExpired.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": str(version)}
        query |= {"timeoutSeconds": str(WATCH_SECONDS)} | ({"labelSelector": labels} if labels else {})
        path = _build_path(kind, namespace)
        try:
            async with aclosing(self._connection.watch(path, query)) as events:
                async for event in events:
                    yield _parse_watch_event(event, path)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise kopf.TemporaryError(
                f"the API server does not answer a watch of {path}: {error!r}", delay=2
            ) from error

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object. A dry run is strict: the API server rejects unknown fields instead of dropping them.

        Raises Conflict if the object exists, ObjectRejected if the server rejects it, and Denied if it is denied for
        now.
        """
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All", "fieldValidation": "Strict"} if dry_run else {})
        return await self._call("POST", _build_path(kind, body["metadata"].get("namespace", "")), query, body)

    async def replace(self, kind: ResourceKind, body: Object) -> Object:
        """Replace an object, by compare-and-swap on metadata.resourceVersion.

        Raises Conflict if it has changed since it was read.
        """
        metadata = body["metadata"]
        path = _build_path(kind, metadata.get("namespace", ""), metadata["name"])
        return await self._call("PUT", path, {"fieldManager": FIELD_MANAGER}, body)

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        body: Object | Objects,
        namespace: str = "",
        *,
        subresource: str = "",
        style: str = MERGE_PATCH,
    ) -> Object:
        path = _build_path(kind, namespace, name, subresource)
        return await self._call("PATCH", path, {"fieldManager": FIELD_MANAGER}, body, style)

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        """Apply `body` server-side: `manager` owns exactly its fields, and gives up those it no longer names."""
        metadata = body["metadata"]
        path = _build_path(kind, metadata.get("namespace", ""), metadata["name"], subresource)
        return await self._call("PATCH", path, {"fieldManager": manager, "force": "true"}, body, APPLY_PATCH)

    async def delete(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> None:
        """Delete an object. It is no error if it does not exist.

        `uid` protects a successor of the same name, and `version` an object that has changed since it was read. With
        `grace` 0 the API server does not wait for the kubelet.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        preconditions = {"uid": uid, "resourceVersion": version}
        if uid or version:
            body["preconditions"] = {name: value for name, value in preconditions.items() if value}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._call("DELETE", _build_path(kind, namespace, name), body=body)
        except (NotFound, Conflict):
            return

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | Objects | None = None,
        style: str = JSON_CONTENT_TYPE,
    ) -> Object:
        async with self._slots:
            if method != "GET" and not path.startswith(_PATHS_WITHOUT_LEADERSHIP):
                self.before_write()  # checked now, not before the wait for a slot
            try:
                answer = await self._connection.request(method, path, query or {}, body, style)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                message = f"the API server does not answer {method} {path}: {error!r}"
                raise kopf.TemporaryError(message, delay=2) from error
        if answer.date is not None:
            self.on_server_date(answer.date)
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return answer.body
        raise _build_error(answer, method, path)


class HttpConnection:
    """The connection to a real API server."""

    def __init__(self, connection: client.ApiClient) -> None:
        self._connection = connection

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, style: str
    ) -> ApiResponse:
        answer = await self._send_request(method, path, query, body, style, REQUEST_SECONDS)
        retry_after = answer.headers.get("Retry-After", "")
        date = _parse_http_date(answer.headers.get("Date", ""))
        return ApiResponse(
            answer.status,
            parse_response(await answer.read()),
            float(retry_after) if retry_after.isdecimal() else None,
            date,
        )

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Object]:
        timeout = aiohttp.ClientTimeout(total=None, connect=REQUEST_SECONDS, sock_read=WATCH_IDLE_TIMEOUT_SECONDS)
        answer = await self._send_request("GET", path, query, None, JSON_CONTENT_TYPE, timeout)
        try:
            if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                yield {"type": "ERROR", "object": parse_response(await answer.read()) | {"code": answer.status}}
                return
            async with aclosing(response_limits.read_lines(answer.response.content)) as lines:
                async for line in lines:
                    yield parse_response(line)
        finally:
            answer.response.close()

    async def _send_request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | Objects | None,
        style: str,
        request_timeout: float | aiohttp.ClientTimeout,
    ) -> Any:
        accept = style if method == "GET" else JSON_CONTENT_TYPE
        headers = {"Accept": accept, "Content-Type": style, "User-Agent": "pacekeeper-operator"}
        await self._connection.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._connection.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        return await self._connection.rest_client.request(  # type: ignore[no-untyped-call]
            method, url, headers=headers, body=body, _request_timeout=request_timeout
        )


@asynccontextmanager
async def connect_to_cluster() -> AsyncIterator[Cluster]:
    """Connect with the pod's service account, or outside of a cluster with the kubeconfig ($KUBECONFIG)."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    # Trust the environment only if it has a proxy: aiohttp would read .netrc and the proxies at every call.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies()), **response_limits.build_session_options()}
    configuration.connection_pool_maxsize = 0  # Cluster bounds calls; watches need a connection per namespace
    async with client.ApiClient(configuration) as connection:
        yield Cluster(HttpConnection(connection))


def _allow_write() -> None:
    return None


def _ignore_date(_date: float) -> None:
    return None


def _parse_http_date(text: str) -> float | None:
    """Return the seconds since the epoch of a date in HTTP's form; None: it cannot be parsed."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _build_path(kind: ResourceKind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    scope = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    return "/".join(part for part in (f"{kind.path}{scope}", kind.plural, name, subresource) if part)


def parse_response(data: bytes) -> Object:
    """Parse an answer, or a line of a watch. What is not a JSON object becomes the object's `message`."""
    try:
        parsed = orjson.loads(data)
    except ValueError:
        try:
            parsed = parse_json(data)  # orjson parses 1,024 levels; a tenant's object may have more
        except InputError:
            parsed = data.decode(errors="replace")[:500]
    return parsed if isinstance(parsed, dict) else {"message": str(parsed)}


def _parse_watch_event(event: Object, path: str) -> WatchEvent:
    """Parse an event of a watch.

    Raises ResourceVersionExpired or the error of the status if the event has type ERROR.
    """
    if event.keys() != {"type", "object"}:
        raise kopf.TemporaryError(f"the API server has answered a watch of {path} without an event", delay=2)
    kind, body = event["type"], event["object"]
    if kind == "ERROR":
        status = int(body.get("code") or 500)
        raise (
            ResourceVersionExpired(body.get("message", ""))
            if status == HTTPStatus.GONE
            else _build_error(ApiResponse(status, body), "WATCH", path)
        )
    return WatchEvent(None if kind == "BOOKMARK" else body, int(body["metadata"]["resourceVersion"]), kind == "DELETED")


def _build_error(answer: ApiResponse, method: str, path: str) -> Exception:
    status = answer.status
    text = answer.body.get("message", "") or f"{method} {path}: status {status}"
    match status:
        case 404:
            return NotFound(text)
        case 409:
            return Conflict(text, delay=1)
        case 400 | 422:
            return ObjectRejected(text)
        case 403 if "violates PodSecurity" in text or "denied the request" in text:
            return ObjectRejected(text)
        case 403:
            return Denied(text, delay=5)
        case 429:
            retry_after = answer.retry_after or API_BUSY_RETRY_SECONDS
            return ApiServerBusy(
                f"{method} {path}: status {status}: {text}", delay=min(retry_after, MAX_API_BUSY_RETRY_SECONDS)
            )
        case 401:
            return kopf.TemporaryError(
                f"the API server does not accept the operator's token: {method} {path}: {text}", delay=15
            )
        case 504 if "Too large resource version" in text:
            return ResourceVersionExpired(text)
        case _:
            return kopf.TemporaryError(f"{method} {path}: status {status}: {text}", delay=2)

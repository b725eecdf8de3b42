"""kopf's contract with handlers, as far as the operator's handlers rely on it. A stand-in for kopf.

It follows kopf 1.45 (reactor/queueing.py, reactor/processing.py, engines/daemons.py, clients/watching.py):
- A kind's objects are listed (events of type None), then watched. A watch that ends resumes from where it was. One
whose history is lost (410) starts with a new list, which does not report objects that were deleted in the meantime. -
Events of one object are processed one after the other, those of different objects concurrently. Errors of event
handlers are logged and otherwise ignored. - An object with daemons gets a finalizer. Its daemon sees a body that is
always the newest. When the object is being deleted, the daemon is requested to stop, and the deletion handlers run, in
whichever process sees it. When all have ended and a second has passed, the finalizer is removed. - kopf writes with its
own client, and does not check whether the operator leads. - A daemon or a deletion handler that raises runs again a
minute later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from pacekeeper_operator.handlers import fabrics, quarantines, startup, trainingjobs  # noqa: F401  # registers them
from pacekeeper_operator.kube.client import JSON_CONTENT_TYPE, MERGE_PATCH, ApiConnection, ApiResponse, Object
from pacekeeper_operator.services.operator import Operator

from ..kubernetes.api.errors import ApiError
from ..kubernetes.api.watch import WatchStream

RECONNECT_SECONDS = 0.1
INACTIVITY_SECONDS = 70.0
"""A watch without an event for this duration is restarted. Bookmarks count as events."""
HANDLER_RETRY_SECONDS = 60.0
log = logging.getLogger(__name__)
_CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


class Body(dict[str, Any]):
    """An object, updated to the newest version that was seen."""


class DaemonStopped:
    """Stand-in for kopf's DaemonStopped."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass
class _Daemon:
    body: Body
    stopped: DaemonStopped
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Resource:
    """A kind, as handlers name it."""

    group: str
    version: str
    plural: str

    @property
    def path(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


@dataclass
class Kopf:
    """kopf of one operator process. `watch`: opens a watch of (plural, start version, labels)."""

    operator: Operator
    connection: ApiConnection
    watch: Callable[[str, str, str], WatchStream]
    memo: kopf.Memo = field(init=False)
    settings: kopf.OperatorSettings = field(default_factory=kopf.OperatorSettings)
    _queues: dict[str, asyncio.Queue[tuple[str | None, Object]]] = field(default_factory=dict)  # by uid
    _workers: set[asyncio.Task[None]] = field(default_factory=set)  # of the queues
    _daemons: dict[str, _Daemon] = field(default_factory=dict)  # by uid

    def __post_init__(self) -> None:
        self.memo = kopf.Memo(operator=self.operator)
        self._registry = kopf.get_default_registry()

    async def run(self, stopped: asyncio.Event) -> None:
        """Run until `stopped` is set. Then end the watches, then the daemons, then run the cleanup handlers."""
        await self._run_activities("startup")
        tasks = [
            asyncio.create_task(self._follow_resource(resource), name=f"watch {resource.plural}")
            for resource in self._list_resources()
        ]
        try:
            await stopped.wait()
        finally:
            ending = [*tasks, *self._workers]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for daemon in list(self._daemons.values()):
                daemon.stopped.set()
            running = [daemon.task for daemon in self._daemons.values() if daemon.task is not None]
            if running:
                await asyncio.wait(running, timeout=self.settings.background.instant_exit_timeout)
            for task in running:
                task.cancel()
            await self._run_activities("cleanup")

    async def _run_activities(self, name: str) -> None:
        for handler in self._registry._activities._handlers:
            if handler.activity is not None and handler.activity.value == name:
                call: Callable[..., Any] = handler.fn
                await call(memo=self.memo, settings=self.settings)

    def _list_resources(self) -> list[Resource]:
        handlers = [*self._registry._watching._handlers, *self._registry._spawning._handlers]
        resources = [_build_resource(handler.selector) for handler in handlers]
        return list(dict.fromkeys(resources))

    async def _follow_resource(self, resource: Resource) -> None:
        labels = ",".join(
            labels
            for selector, labels in self.settings.watching.label_selectors.items()
            if _build_resource(selector) == resource
        )
        while True:
            try:
                version = await self._list_objects(resource, labels)
                while True:
                    version = await self._watch_objects(resource, version, labels)
            except (*_CONNECTION_ERRORS, ApiError) as error:
                log.debug("watching %s restarts: %r", resource.plural, error)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _list_objects(self, resource: Resource, labels: str) -> str:
        """List with kopf's retries. Raises what _CONNECTION_ERRORS lists."""
        query = {"labelSelector": labels} if labels else {}
        answer = await self._send_with_retries(
            "GET", f"{resource.path}/{resource.plural}", query, None, JSON_CONTENT_TYPE
        )
        if answer.status >= 300:
            raise aiohttp.ClientConnectionError(f"status {answer.status}")
        for item in answer.body["items"]:
            self._queue_event(resource, None, item)
        version: str = answer.body["metadata"]["resourceVersion"]
        return version

    async def _watch_objects(self, resource: Resource, version: str, labels: str) -> str:
        """Watch until the stream ends. Raises ApiError, for example Gone."""
        stream = self.watch(resource.plural, version, labels)
        try:
            async with asyncio.timeout(self.settings.watching.connect_timeout):
                await stream.open()
            while True:
                async with asyncio.timeout(INACTIVITY_SECONDS):
                    type_, body = await anext(stream)
                version = body["metadata"]["resourceVersion"]
                if type_ != "BOOKMARK":
                    self._queue_event(resource, type_, body)
        except (StopAsyncIteration, *_CONNECTION_ERRORS):
            await asyncio.sleep(0)  # avoids an endless loop if each answer ends at once
        finally:
            stream.close()
        return version

    def _queue_event(self, resource: Resource, type_: str | None, body: Object) -> None:
        uid = body["metadata"]["uid"]
        queue = self._queues.get(uid)
        if queue is None:
            queue = self._queues[uid] = asyncio.Queue()
            worker = asyncio.create_task(
                self._process_queue(resource, uid, queue), name=f"worker for {resource.plural}"
            )
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        queue.put_nowait((type_, body))

    async def _process_queue(
        self, resource: Resource, uid: str, queue: asyncio.Queue[tuple[str | None, Object]]
    ) -> None:
        while not queue.empty():
            type_, body = queue.get_nowait()
            await self._process_event(resource, type_, body)
        del self._queues[uid]

    async def _process_event(self, resource: Resource, type_: str | None, body: Object) -> None:
        metadata = body["metadata"]
        daemon = self._daemons.get(metadata["uid"])
        if daemon is not None:
            daemon.body.clear()
            daemon.body.update(body)
        for handler in self._select_handlers(self._registry._watching._handlers, resource, body):
            try:
                await handler.fn(
                    memo=self.memo, body=body, type=type_, namespace=metadata.get("namespace"), name=metadata["name"]
                )
            except Exception as error:
                log.exception("a handler of %s failed: %r", resource.plural, error)
        for handler in self._select_handlers(self._registry._spawning._handlers, resource, body):
            await self._supervise_daemon(handler, resource, type_, body, daemon)

    async def _supervise_daemon(
        self, handler: Any, resource: Resource, type_: str | None, body: Object, daemon: _Daemon | None
    ) -> None:
        metadata, finalizer = body["metadata"], self.settings.persistence.finalizer
        if type_ == "DELETED":
            return
        if "deletionTimestamp" not in metadata:
            if daemon is None:
                self._spawn_daemon(handler, resource, body)
            if finalizer not in metadata.get("finalizers", ()):
                await self._patch_finalizers(resource, body, [*metadata.get("finalizers", ()), finalizer])
            return
        if daemon is not None:
            daemon.stopped.set()
        if finalizer in metadata.get("finalizers", ()):
            await self._run_deletion_handlers(resource, body, daemon)

    async def _run_deletion_handlers(self, resource: Resource, body: Object, daemon: _Daemon | None) -> None:
        for handler in self._select_handlers(self._registry._changing._handlers, resource, body):
            while True:
                try:
                    await handler.fn(memo=self.memo, body=body)
                    break
                except Exception as error:
                    log.exception("a deletion of %s failed: %r", resource.plural, error)
                    await asyncio.sleep(HANDLER_RETRY_SECONDS)
        if daemon is not None and daemon.task is not None:
            await asyncio.wait([daemon.task])
        while True:
            await asyncio.sleep(self.settings.background.cancellation_polling)
            queue = self._queues[body["metadata"]["uid"]]
            while not queue.empty():  # events that have arrived in the meantime
                type_, body = queue.get_nowait()
                if type_ == "DELETED":
                    return
            finalizer = self.settings.persistence.finalizer
            remaining = [name for name in body["metadata"].get("finalizers", ()) if name != finalizer]
            if await self._patch_finalizers(resource, body, remaining):
                return

    def _spawn_daemon(self, handler: Any, resource: Resource, body: Object) -> None:
        daemon = self._daemons[body["metadata"]["uid"]] = _Daemon(Body(body), DaemonStopped())
        daemon.task = asyncio.create_task(
            self._run_daemon(handler, resource, daemon), name=f"daemon {body['metadata']['name']}"
        )

    async def _run_daemon(self, handler: Any, resource: Resource, daemon: _Daemon) -> None:
        while True:
            try:
                await handler.fn(memo=self.memo, body=daemon.body, stopped=daemon.stopped)
            except Exception as error:
                log.exception("a daemon of %s failed: %r", resource.plural, error)
                if not daemon.stopped:
                    await asyncio.sleep(HANDLER_RETRY_SECONDS)
                    continue
            break

    async def _patch_finalizers(self, resource: Resource, body: Object, finalizers: list[str]) -> bool:
        """Patch the finalizers. Return whether nothing is left to do."""
        metadata = body["metadata"]
        namespace = f"/namespaces/{metadata['namespace']}" if metadata.get("namespace") else ""
        path = f"{resource.path}{namespace}/{resource.plural}/{metadata['name']}"
        identity = {name: metadata[name] for name in ("uid", "resourceVersion")}
        patch = {"metadata": {**identity, "finalizers": finalizers}}
        try:
            answer = await self._send_with_retries("PATCH", path, {"fieldManager": "kopf"}, patch, MERGE_PATCH)
        except _CONNECTION_ERRORS:
            return False
        return answer.status < 300 or answer.status == 404

    async def _send_with_retries(
        self, method: str, path: str, query: dict[str, str], body: Object | None, style: str
    ) -> ApiResponse:
        """Send a request with kopf's retries. Raises what _CONNECTION_ERRORS lists."""
        backoffs = self.settings.networking.error_backoffs
        for pause in [*(backoffs if isinstance(backoffs, Iterable) else ()), None]:
            try:
                answer = await self.connection.request(method, path, query, body, style)
                if pause is None or (answer.status < 500 and answer.status != 429):
                    return answer
            except _CONNECTION_ERRORS:
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _select_handlers(self, handlers: Any, resource: Resource, body: Object) -> Iterator[Any]:
        for handler in handlers:
            if _build_resource(handler.selector) != resource or not _has_labels(handler.labels, body):
                continue
            if handler.when is None or handler.when(spec=body.get("spec", {}), status=body.get("status", {})):
                yield handler


def _build_resource(selector: Any) -> Resource:
    return Resource(selector.group, selector.version, selector.any_name)


def _has_labels(labels: Mapping[str, object] | None, body: Object) -> bool:
    """Return whether an object has the labels. The operator only requires that they exist."""
    return all(name in body["metadata"].get("labels", {}) for name in labels or ())

"""A stand-in for the API server: objects in memory, lists in pages, watches, writes. Nothing is checked.

`python -m bench.scripts.large_objects.api_server FILE` prints its port; FILE has what there is at the beginning: one
JSON array a line, [path of the list, body].
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
from aiohttp import web

Body = dict[str, Any]
_PATH = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(/(?P<name>[^/]+)(/(?P<sub>[^/]+))?)?"
)
_KINDS = {"trainingjobs": "TrainingJob", "pods": "Pod", "nodes": "Node", "leases": "Lease", "secrets": "Secret"}


class Server:
    def __init__(self) -> None:
        self.version = itertools.count(1000)
        self.now = 1000
        self.objects: dict[str, dict[tuple[str, str], Body]] = {}  # by group and plural
        self.watches: dict[str, set[asyncio.Queue[bytes]]] = {}

    def put(self, kind: str, body: Body, event_type: str = "") -> Body:
        """`event_type`: the type of event that watches receive."""
        self.now = next(self.version)
        metadata = body.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{self.now}")
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["resourceVersion"] = str(self.now)
        key = metadata.get("namespace") or "", metadata["name"]
        self.objects.setdefault(kind, {})[key] = body
        if event_type:
            self.publish_event(kind, event_type, body)
        return body

    def publish_event(self, kind: str, event_type: str, body: Body) -> None:
        for queue in self.watches.get(kind, ()):
            queue.put_nowait(json.dumps({"type": event_type, "object": body}).encode() + b"\n")

    async def count(self, request: web.Request) -> web.Response:
        """Objects of the list at `?of=` that have a phase: for the bench."""
        objects = self.objects.get(request.query["of"], {}).values()
        return web.json_response(sum("phase" in body.get("status", {}) for body in objects))

    async def handle_request(self, request: web.Request) -> web.StreamResponse:
        if (discovery := self.discover(request.path)) is not None:
            return web.json_response(discovery)
        match = _PATH.fullmatch(request.path)
        if match is None:
            return self.refuse(404, "NotFound")
        kind = f"{match['group']}/{match['plural']}"
        namespace, name = match["namespace"] or "", match["name"]
        if name is None and request.method == "GET":
            return await (
                self.watch(request, kind) if "watch" in request.query else self.list(request, kind, namespace)
            )
        body = json.loads(await request.text() or "{}")
        if name is None:
            return self.create(request, kind, namespace, body)
        return self.handle_object(request, kind, (namespace, name), body)

    def create(self, request: web.Request, kind: str, namespace: str, body: Body) -> web.Response:
        if namespace:
            body["metadata"]["namespace"] = namespace
        if (namespace, body["metadata"].get("name", "")) in self.objects.get(kind, {}):
            return self.refuse(409, "AlreadyExists")
        body["metadata"].setdefault("name", f"made-{self.now}")
        return web.json_response(body if "dryRun" in request.query else self.put(kind, body, "ADDED"), status=201)

    def handle_object(self, request: web.Request, kind: str, key: tuple[str, str], body: Any) -> web.Response:
        stored = self.objects.get(kind, {}).get(key)
        if stored is None:
            return self.refuse(404, "NotFound")
        match request.method:
            case "PUT":
                stored = self.put(kind, body, "MODIFIED")
            case "PATCH":
                stored = self.put(kind, apply_patch(stored, body), "MODIFIED")
            case "DELETE":
                del self.objects[kind][key]
                self.publish_event(kind, "DELETED", stored)
        return web.json_response(stored)

    async def list(self, request: web.Request, kind: str, namespace: str) -> web.Response:
        label = request.query.get("labelSelector", "").split("=")[0]
        items = [
            body
            for (object_namespace, _), body in sorted(self.objects.get(kind, {}).items())
            if namespace in ("", object_namespace) and (not label or label in body["metadata"].get("labels", {}))
        ]
        first, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 10**9)
        continuation = {"continue": str(first + limit)} if first + limit < len(items) else {}
        plural = kind.rsplit("/", 1)[1]
        body = {
            "kind": f"{_KINDS.get(plural, plural)}List",
            "metadata": {"resourceVersion": str(self.now), **continuation},
            "items": items[first : first + limit],
        }
        return web.json_response(body)

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        """From now on, and what is newer than requested."""
        response, queue = web.StreamResponse(), asyncio.Queue[bytes]()
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        self.watches.setdefault(kind, set()).add(queue)
        for body in self.objects.get(kind, {}).values():
            if int(body["metadata"]["resourceVersion"]) > since:
                queue.put_nowait(json.dumps({"type": "MODIFIED", "object": body}).encode() + b"\n")
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.now)}}}
        try:
            with contextlib.suppress(ConnectionError):
                while True:
                    try:
                        line = await asyncio.wait_for(queue.get(), 20)
                    except TimeoutError:
                        line = json.dumps(bookmark).encode() + b"\n"
                    await response.write(line)
        finally:
            self.watches[kind].discard(queue)
        return response

    def discover(self, path: str) -> Body | None:
        """The lists that kopf requests: jobs, and new kinds and namespaces."""
        groups = {"pacekeeper.dev": "v1alpha1", "apiextensions.k8s.io": "v1"}
        kinds = {
            "/api/v1": ("namespaces", "Namespace", False),
            "/apis/apiextensions.k8s.io/v1": ("customresourcedefinitions", "CustomResourceDefinition", False),
            "/apis/pacekeeper.dev/v1alpha1": ("trainingjobs", "TrainingJob", True),
        }
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            versions = {
                name: {"groupVersion": f"{name}/{version}", "version": version} for name, version in groups.items()
            }
            return {"groups": [{"name": n, "versions": [v], "preferredVersion": v} for n, v in versions.items()]}
        if path not in kinds:
            return None
        plural, kind, namespaced = kinds[path]
        verbs = ["get", "list", "watch", "patch", "delete", "create", "update"]
        resource = {
            "name": plural,
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": namespaced,
            "verbs": verbs,
        }
        return {"resources": [resource, {**resource, "name": f"{plural}/status"}]}

    def refuse(self, status: int, reason: str) -> web.Response:
        body = {"kind": "Status", "status": "Failure", "reason": reason, "code": status, "message": reason}
        return web.json_response(body, status=status)


def apply_patch(before: Body, patch: Any) -> Body:
    patched: Body = merge_patch(before, patch) if isinstance(patch, dict) else jsonpatch.apply_patch(before, patch)
    return patched


def merge_patch(before: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def read_objects(path: Path) -> Iterator[tuple[str, Body]]:
    with path.open() as lines:
        for line in lines:
            kind, body = json.loads(line)
            yield kind, body


async def main(path: Path) -> None:
    server = Server()
    for kind, body in read_objects(path):
        server.put(kind, body)
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/count", server.count)
    app.router.add_route("*", "/{path:.*}", server.handle_request)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

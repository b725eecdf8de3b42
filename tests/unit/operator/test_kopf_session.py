"""kopf's own client over the operator's session: it receives trimmed jobs, by list, watch, and response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kopf._cogs.clients import auth, fetching, watching
from kopf._cogs.structs.credentials import Vault
from kopf._cogs.structs.references import Resource

from pacekeeper_operator.api.names import DROPPED_TEMPLATE_KEY, GROUP, VERSION
from pacekeeper_operator.handlers import startup
from pacekeeper_operator.kube import response_limits
from pacekeeper_operator.pods.trimming import MAX_SPEC_BYTES

RESOURCE = Resource(GROUP, VERSION, "trainingjobs", namespaced=True)


def build_body(number: int, size: int) -> dict[str, Any]:
    metadata = {"name": f"j{number}", "namespace": "ns", "uid": f"u{number}", "managedFields": ["x" * 1000]}
    spec = {"template": {"spec": {"containers": [{"name": "trainer", "args": ["x" * size]}]}}}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


class Server:
    def __init__(self) -> None:
        self.jobs = [build_body(number, 1_000_000 if number % 2 else 100) for number in range(20)]
        self.pages: list[int] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            for body in self.jobs:
                event = {"type": "MODIFIED", "object": body}
                await response.write(json.dumps(event).encode() + b"\n")
            await response.write(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n')
            return response
        first, limit = int(request.query.get("continue") or 0), int(request.query["limit"])
        rest = {"continue": str(first + limit)} if first + limit < len(self.jobs) else {}
        items = self.jobs[first : first + limit]
        self.pages.append(limit)
        body = {"kind": "TrainingJobList", "metadata": {"resourceVersion": "7", **rest}, "items": items}
        return web.json_response(body)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A server that kopf is logged in to."""
    found = Server()
    app = web.Application()
    app.router.add_get(f"/apis/{GROUP}/{VERSION}/trainingjobs", found.answer)
    async with TestServer(app) as running:
        address = str(running.make_url("")).rstrip("/")
        info = kopf.ConnectionInfo(server=address, token="secret")
        monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: None)
        monkeypatch.setattr(kopf, "login_with_kubeconfig", lambda **_: info)
        log_in: Any = startup.log_in  # kopf types handlers by all that it may give them
        session, again = [await log_in(settings=kopf.OperatorSettings()) for _ in range(2)]
        assert session == again, "kopf takes refused credentials for new ones otherwise, and tries without end"
        await again.aiohttp_session.close()
        vault = Vault({"ours": session})
        token = auth.vault_var.set(vault)
        yield found
        auth.vault_var.reset(token)
        await session.aiohttp_session.close()


async def settings() -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    configure: Any = startup.configure_kopf
    await configure(settings=found)
    return found


def list_padding_sizes(found: list[Any]) -> list[int]:
    return [len(json.dumps(body)) for body in found]


async def test_lists_come_in_pages_of_bounded_bytes_and_are_trimmed(server: Server) -> None:
    logger: Any = startup  # nothing is logged
    pages = fetching.fetch_objs(settings=await settings(), resource=RESOURCE, namespace=None, logger=logger)
    found = [body async for page, _ in pages for body in page]
    assert [body["metadata"]["name"] for body in found] == [body["metadata"]["name"] for body in server.jobs]
    assert max(list_padding_sizes(found)) < 1_000 < MAX_SPEC_BYTES
    assert [DROPPED_TEMPLATE_KEY in body["spec"]["template"] for body in found] == [False, True] * 10
    assert all("managedFields" not in body["metadata"] for body in found)
    assert server.pages[-1] * 500_000 <= response_limits.PAGE_BYTES


async def test_watches_are_trimmed_and_their_errors_are_reported(server: Server) -> None:
    events = watching.watch_objs(
        settings=await settings(),
        resource=RESOURCE,
        namespace=None,
        since="7",
        operator_pause_waiter=asyncio.get_running_loop().create_future(),
    )
    found: list[Any] = [event async for event in events]
    assert found[-1]["object"]["code"] == 410
    bodies = [event["object"] for event in found[:-1]]
    assert len(bodies) == len(server.jobs)
    assert max(list_padding_sizes(bodies)) < 1_000

"""How a sidecar finds the operator that leads: over real TLS, on addresses of the loopback."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar import leader_address as leading
from pacekeeper.sidecar.leader_address import LEADER_AVOID_SECONDS, LeaderAddress, parse_named_leader
from pacekeeper.sidecar.operator_client import OperatorClient, OperatorUnavailable, connect_operator
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper_analysis.protocol.reports import Heartbeat
from testing.network.ports import find_free_port
from testing.operators.tls import Authority

SERVICE, FIRST, SECOND = "127.0.0.1", "127.0.0.2", "127.0.0.3"
"""The endpoints' certificate is for `localhost`, which is the first of them."""
Serve = Callable[..., Any]
NO_ADDRESSES: list[Any] = [
    *("10.0.0.1", "evil.example:8443", "10.0.0.1:8443/x", "u@10.0.0.1:8443", ":8443", "1" * 100, "10.0.0.1\r\n:80"),
    *("10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:+1", "10.0.0.1: 1", "10.0.0.1:٣"),
    *("fd00::1:8443", "[10.0.0.1]:1", "[fd00::1%eth0]:1", "[fd00::1%@x]:1"),
    *(None, 7, ["10.0.0.1:8443"], {}),
]


@dataclass
class OperatorPod:
    """One operator: it leads, or names the leader."""

    leader: str | None = None
    calls: int = 0
    tokens: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        self.tokens.append(request.headers["Authorization"])
        if self.leader is None:
            return web.Response(status=204)
        named = {"error": "this operator does not lead", "leader": self.leader}
        return web.json_response(named, status=503, headers={"Connection": "close"})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def port() -> int:
    return find_free_port()


@pytest.fixture
async def serve(authority: Authority, port: int) -> AsyncIterator[Serve]:
    """Serves a pod at an address."""
    async with AsyncExitStack() as stack:

        async def serve_pod(address: str, pod: OperatorPod, context: ssl.SSLContext | None = None) -> Callable[[], Any]:
            app = web.Application()
            app.add_routes([web.post("/v1/plan", pod.answer)])
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, address, port, ssl_context=context or authority.server_context()).start()
            return runner.cleanup

        yield serve_pod


@pytest.fixture
async def client(authority: Authority, port: int, tmp_path: Path) -> AsyncIterator[OperatorClient]:
    (tmp_path / "token").write_text("a-token")
    settings = SidecarSettings(
        RuntimeFolder(tmp_path / "run"), "j", "j-w0-0", f"https://localhost:{port}", authority.pem, tmp_path / "token"
    )
    async with connect_operator(settings) as client:
        yield client


async def fetch_plan(client: OperatorClient) -> None:
    await client.poll(Heartbeat(worker="j-w0-0"), None, "", 0)


async def test_the_client_calls_the_leader_that_a_follower_names_and_stays_with_it(
    serve: Serve, client: OperatorClient, port: int
) -> None:
    standby, leader = OperatorPod(f"{FIRST}:{port}"), OperatorPod()
    await serve(SERVICE, standby)
    await serve(FIRST, leader)
    for _ in range(3):
        await fetch_plan(client)
    assert (standby.calls, leader.calls) == (1, 3)


async def test_the_client_returns_to_the_service_when_the_leader_is_gone(
    serve: Serve, client: OperatorClient, port: int
) -> None:
    standby, leader = OperatorPod(f"{FIRST}:{port}"), OperatorPod()
    await serve(SERVICE, standby)
    end = await serve(FIRST, leader)
    await fetch_plan(client)
    await end()
    with pytest.raises(OperatorUnavailable):
        await fetch_plan(client)
    standby.leader = None  # it leads now
    await fetch_plan(client)
    assert standby.calls == 2


async def test_a_former_leader_redirects_the_client(serve: Serve, client: OperatorClient, port: int) -> None:
    first, second = OperatorPod(), OperatorPod()
    await serve(SERVICE, OperatorPod(f"{FIRST}:{port}"))
    await serve(FIRST, first)
    await serve(SECOND, second)
    await fetch_plan(client)
    first.leader = f"{SECOND}:{port}"
    await fetch_plan(client)
    assert second.calls == 1


async def test_the_client_returns_to_the_service_if_a_former_leader_names_no_other(
    serve: Serve, client: OperatorClient, port: int
) -> None:
    service, first = OperatorPod(f"{FIRST}:{port}"), OperatorPod()
    await serve(SERVICE, service)
    await serve(FIRST, first)
    await fetch_plan(client)
    first.leader = ""
    with pytest.raises(OperatorUnavailable):
        await fetch_plan(client)
    service.leader = None
    await fetch_plan(client)
    assert service.calls == 2


async def test_the_token_is_sent_only_to_an_authenticated_operator(
    serve: Serve, client: OperatorClient, port: int, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = OperatorPod()
    await serve(SERVICE, OperatorPod(f"{FIRST}:{port}"))
    await serve(FIRST, stranger, Authority(other).server_context())
    with pytest.raises(OperatorUnavailable, match=r"[Cc]ertificate"):
        await fetch_plan(client)
    assert stranger.tokens == []


async def test_an_unreachable_address_is_not_tried_again_soon(serve: Serve, client: OperatorClient, port: int) -> None:
    """The path to pods may be closed where that to the Service is not; the Service leads to the right one, too."""
    service = OperatorPod(f"{FIRST}:{port}")  # where no process listens
    await serve(SERVICE, service)
    for _ in range(3):
        with pytest.raises(OperatorUnavailable):
            await fetch_plan(client)
    assert service.calls == 3
    service.leader = None
    await fetch_plan(client)


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_other_refusals_do_not_change_the_leader(
    serve: Serve, client: OperatorClient, port: int, status: int
) -> None:
    class RefusingPod(OperatorPod):
        async def answer(self, request: web.Request) -> web.Response:
            await super().answer(request)
            return web.json_response({"error": "not now"}, status=status)

    service, leader = OperatorPod(f"{FIRST}:{port}"), RefusingPod()
    await serve(SERVICE, service)
    await serve(FIRST, leader)
    for _ in range(3):
        with pytest.raises(OperatorUnavailable, match=str(status)):
            await fetch_plan(client)
    assert (service.calls, leader.calls) == (1, 3)


async def test_an_invalid_plan_is_rejected(serve: Serve, client: OperatorClient) -> None:
    class InvalidPod(OperatorPod):
        async def answer(self, _request: web.Request) -> web.Response:
            return web.Response(text="[1]")

    await serve(SERVICE, InvalidPod())
    with pytest.raises(OperatorUnavailable):
        await asyncio.wait_for(fetch_plan(client), 60)


class TestNamed:
    @pytest.mark.parametrize(
        ("named", "found"),
        [
            ("10.0.0.1:8443", "10.0.0.1:8443"),
            ("[fd00::1]:8443", "[fd00::1]:8443"),
            ("", ""),
            *((named, "") for named in NO_ADDRESSES),
        ],
    )
    def test_only_the_address_of_a_machine_is_accepted(self, named: Any, found: str) -> None:
        assert parse_named_leader({"error": "", "leader": named}) == found

    @pytest.mark.parametrize("answer", [{"error": "not yet"}, [], "leader", None, 1])
    def test_other_answers_name_no_leader(self, answer: Any) -> None:
        assert parse_named_leader(answer) is None


def test_an_address_without_an_answer_is_avoided_for_a_while_and_others_are_not() -> None:
    leader = LeaderAddress()
    leader.update("a:1", 0.0)
    leader.mark_unreachable("a:1", 0.0)
    assert leader.address == ""
    leader.update("a:1", LEADER_AVOID_SECONDS - 1)
    assert leader.address == ""
    leader.update("b:1", 1.0)
    assert leader.address == "b:1"
    leader.mark_unreachable("a:1", 2.0)
    assert leader.address == "b:1", "the end of an older call does not change it"
    leader.update("a:1", 2.0 + leading.LEADER_AVOID_SECONDS)
    assert leader.address == "a:1"

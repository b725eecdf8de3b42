"""The simulated API server alone, with just enough of a world around it, and as probes reach it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from simulation.kubernetes.api_server import ApiServer
from simulation.kubernetes.connection import Request, parsed, serve
from simulation.kubernetes.errors import Gone
from simulation.loop import Process, VirtualLoop, nobodys
from simulation.network import Network
from simulation.story import Story

Object = dict[str, Any]
NAMESPACE = "team"
PLACE = "administrator"
EPOCH = 1_800_000_000.0


class Nowhere:
    """A world with nothing in it but an API server."""

    def __init__(self, seed: int = 1) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop
        self.story = Story(self.loop.time)
        self.network = Network(self.loop, random.Random(seed))
        self.late = 0.0
        """Seconds by which its clock is off."""
        self._seed = seed
        self.api = ApiServer(self)
        self.api.create("namespaces", {"metadata": {"name": NAMESPACE}})

    def random(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")

    def wall(self, place: str = "") -> float:  # noqa: ARG002  # one clock for all places
        return EPOCH + self.loop.time() + self.late

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> object:
        return self.loop.call_later(seconds, call, *arguments, context=nobodys())

    def pass_(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))


class SimulatedServer:
    """See tests.support.api_probes.Server."""

    def __init__(self, seed: int = 1) -> None:
        self.namespace = NAMESPACE
        self.world = Nowhere(seed)
        self.api = self.world.api

    def request(self, method: str, path: str, query: Mapping[str, str], body: Any, style: str) -> tuple[int, Object]:
        answer = serve(self.api, Request(PLACE, method, path, query, body, style, operator=False))
        return answer.status, answer.body

    def pause(self, seconds: float) -> None:
        self.world.pass_(seconds)

    def token(self, pod: Object, audience: str) -> str:
        return self.api.mint_token(pod, audience)

    def changes(self, path: str, query: Mapping[str, str]) -> list[tuple[str, Object]]:
        target = parsed(path)
        assert target is not None
        process = Process(self.world.loop, "watcher")
        watch = self.api.watch(
            PLACE,
            process,
            target.kind.plural,
            query["resourceVersion"],
            labels=query.get("labelSelector", ""),
            namespace=target.namespace,
        )
        told: list[tuple[str, Object]] = []

        async def read() -> None:
            try:
                async for type, body in watch:
                    told.append((type, body))
            except Gone as error:
                told.append(("ERROR", {"metadata": {}, "code": error.status}))

        process.spawn(read(), "read")
        self.world.pass_(1.0)
        process.kill()
        return told

"""The simulated API server alone, with just enough of a world around it, and as probes reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from simulation.kubernetes.api_server import ApiServer
from simulation.kubernetes.connection import Request, parsed, serve
from simulation.kubernetes.errors import Gone
from simulation.loop import Process
from simulation.world import World

Object = dict[str, Any]
PLACE = "administrator"


class SimulatedServer:
    """See tests.support.api_probes.Server."""

    def __init__(self, seed: int = 1) -> None:
        self.namespace = "probes"
        self.world = World(seed)
        self.api = ApiServer(self.world)
        self.api.create("namespaces", {"metadata": {"name": self.namespace}})

    def request(self, method: str, path: str, query: Mapping[str, str], body: Any, style: str) -> tuple[int, Object]:
        answer = serve(self.api, Request(PLACE, method, path, query, body, style, operator=False))
        return answer.status, answer.body

    def pause(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

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
        self.world.run(asyncio.sleep(1))
        process.kill()
        return told

"""The simulated API server by itself, with just enough of a world around it, and as probes reach it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from simulation.kubernetes.api.api_server import ApiServer
from simulation.kubernetes.api.connection import serve_request
from simulation.kubernetes.api.errors import WatchExpired
from simulation.kubernetes.api.requests import Request, parse_path
from simulation.kubernetes.api.watch import WatchOptions, WatchStream
from simulation.loop import Process, VirtualLoop, create_unowned_context
from simulation.network import SimulatedNetwork
from simulation.run_log import RunLog

Object = dict[str, Any]
NAMESPACE = "team"
PLACE = "administrator"
EPOCH = 1_800_000_000.0


class ApiServerOnlyWorld:
    """A world with nothing in it but an API server."""

    def __init__(self, seed: int = 1) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop
        self.log = RunLog(self.loop.time)
        self.network = SimulatedNetwork(self.loop, random.Random(seed))
        self.clock_offset = 0.0
        """Seconds by which its clock is off."""
        self._seed = seed
        self.api = ApiServer(self)
        self.api.create("namespaces", {"metadata": {"name": NAMESPACE}})

    def now(self) -> float:
        return self.loop.time()

    def create_random(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")

    def wall_time(self, place: str = "") -> float:  # noqa: ARG002  # one clock for all places
        return EPOCH + self.loop.time() + self.clock_offset

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, call, *arguments, context=create_unowned_context())

    def pass_time(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))


class SimulatedServer:
    """See testing.kubernetes.api_probes.Server."""

    def __init__(self, seed: int = 1) -> None:
        self.namespace = NAMESPACE
        self.world = ApiServerOnlyWorld(seed)
        self.api = self.world.api

    def request(self, method: str, path: str, query: Mapping[str, str], body: Any, style: str) -> tuple[int, Object]:
        response = serve_request(self.api, Request(PLACE, method, path, query, body, style, operator=False))
        return response.status, response.body

    def pause(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def create_token(self, pod: Object, audience: str) -> str:
        return self.api.mint_token(pod, audience)

    def list_changes(self, path: str, query: Mapping[str, str]) -> list[tuple[str, Object]]:
        target = parse_path(path)
        assert target is not None
        process = Process(self.world.loop, "watcher")
        options = WatchOptions(query["resourceVersion"], query.get("labelSelector", ""), target.namespace)
        watch = WatchStream(self.api, PLACE, process, target.kind, options)
        changes: list[tuple[str, Object]] = []

        async def read() -> None:
            try:
                async for type, body in watch:
                    changes.append((type, body))
            except WatchExpired as error:
                changes.append(("ERROR", {"metadata": {}, "code": error.status}))

        process.spawn(read(), "read")
        self.world.pass_time(1.0)
        process.kill()
        return changes

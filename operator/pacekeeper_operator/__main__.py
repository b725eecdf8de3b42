"""`python -m pacekeeper_operator` runs the operator; `… release-all` releases all quarantined nodes and ends."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import kopf
from prometheus_client import start_http_server

from pacekeeper_analysis.errors import InputError

from . import certificates, cluster, server
from .handlers import quarantines, startup, trainingjobs, watches  # noqa: F401  # importing registers them with kopf
from .manifests import Installation
from .observe.memory import Memory
from .observe.prometheus import Prometheus
from .runtime import Runtime
from .services import leadership
from .services.operator import Operator
from .services.quarantine import release_all
from .services.sidecars import Sidecars
from .settings import Settings

RELEASE_SECONDS = 120.0
LEAVING_SECONDS = 8.0
"""So long the operator may take to leave in order once one of its tasks has died."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pacekeeper_operator", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["run", "release-all"], default="run")
    arguments = parser.parse_args()
    try:
        settings = Settings.from_environment(os.environ)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("kopf", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return asyncio.run(run(settings, Runtime()) if arguments.command == "run" else _release_all())


async def run(settings: Settings, runtime: Runtime) -> int:
    """Until a signal ends it, or one of its tasks dies: of a lost Lease, say. The process's exit status."""
    serving = runtime.start(_serve(settings, runtime), "the operator")
    failed = asyncio.ensure_future(runtime.failed.wait())
    await asyncio.wait([serving, failed], return_when=asyncio.FIRST_COMPLETED)
    failed.cancel()
    if not serving.done():
        await asyncio.wait([serving], timeout=LEAVING_SECONDS)
        serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    if isinstance(runtime.failure, InputError):
        print(f"error: {runtime.failure}", file=sys.stderr)
        return 2
    return 1 if runtime.failed.is_set() else 0


async def _serve(settings: Settings, runtime: Runtime) -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(cluster.connect())
        lease = await stack.enter_async_context(leadership.hold(api, settings, runtime))
        api.before_write = lease.require
        shown = certificates.Certificates(api, settings, runtime)
        await shown.begin()
        operator = Operator(
            settings=settings,
            cluster=api,
            memory=Memory(runtime.now()),
            installation=Installation(
                operator_url=settings.endpoint,
                authority=shown.trusted,
                sidecar_image=settings.sidecar_image,
                sidecar_pull_policy=settings.sidecar_pull_policy,
            ),
            prometheus=Prometheus(settings.prometheus_url, settings.dcgm_namespace, settings.dcgm_node_label),
            runtime=runtime,
        )
        shown.told = partial(_tell, operator)
        sidecars = Sidecars(api, operator.memory, runtime)
        await stack.enter_async_context(server.serve(sidecars, runtime, settings.port, shown.context))
        start_http_server(settings.metrics_port)
        logging.info("serving sidecars at %s, Lease held by %s", settings.endpoint, settings.identity)
        operator.memory.started_at = runtime.now()
        beside = (
            runtime.start(operator.watch_over(), "watch over"),
            runtime.start(operator.resync(), "resync"),
            runtime.start(shown.keep(), "the certificates' keeper"),
        )
        stack.push_async_callback(_end, beside)
        await kopf.operator(
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
            standalone=True,
            memo=kopf.Memo(operator=operator),
            liveness_endpoint=f"http://0.0.0.0:{settings.liveness_port}/healthz",
            stop_flag=runtime.failed,
        )


def _tell(operator: Operator, trusted: str) -> None:
    """Workers that are made from now on trust these authorities."""
    operator.installation = replace(operator.installation, authority=trusted)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _release_all() -> int:
    async with cluster.connect() as api:
        await release_all(api, Runtime(), RELEASE_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m pacekeeper_operator` runs the operator; `… release-all` releases all quarantined nodes and ends."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import kopf
from prometheus_client import start_http_server

from pacekeeper_analysis.errors import InputError

from . import certificates, cluster, server
from .handlers import pods, quarantines, startup, trainingjobs  # noqa: F401  # importing registers them with kopf
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
    asyncio.run(run(settings) if arguments.command == "run" else _release_all())
    return 0


async def run(settings: Settings) -> None:
    """Until a signal ends it, or the Lease is lost."""
    lost = asyncio.Event()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(cluster.connect())
        await stack.enter_async_context(leadership.hold(api, settings, lost))
        authority = await certificates.ensure(api, settings.namespace)
        operator = Operator(
            settings=settings,
            cluster=api,
            memory=Memory(time.time()),
            installation=Installation(
                operator_url=settings.endpoint,
                authority=authority.certificate,
                sidecar_image=settings.sidecar_image,
                sidecar_pull_policy=settings.sidecar_pull_policy,
            ),
            prometheus=Prometheus(settings.prometheus_url, settings.dcgm_namespace, settings.dcgm_node_label),
        )
        context = authority.serving_context(settings.hosts, datetime.now(UTC))
        sidecars = Sidecars(api, operator.memory)
        await stack.enter_async_context(server.serve(sidecars, settings.port, context))
        start_http_server(settings.metrics_port)
        logging.info("serving sidecars at %s, Lease held by %s", settings.endpoint, settings.identity)
        operator.memory.started_at = time.time()
        tasks = [operator.runtime.start(operator.watch_over(), "watch over")]
        tasks.append(operator.runtime.start(operator.resync(), "resync"))
        try:
            await kopf.operator(
                clusterwide=True,
                standalone=True,
                memo=kopf.Memo(operator=operator),
                liveness_endpoint=f"http://0.0.0.0:{settings.liveness_port}/healthz",
                stop_flag=lost,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _release_all() -> None:
    async with cluster.connect() as api:
        await release_all(api, Runtime(), RELEASE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

"""The operator's endpoint by itself, in a process of its own: its server with TLS and its service, without the passes.

    python -m bench.scripts.scale.endpoint <port> <workers> <ranks a worker>

Prints the authority that callers are to trust, then its usage for each `poll` on standard input; all in lines of
JSON. The API server's review of tokens is left out: every caller that claims to be a worker is one. Not measured: the
calls that a review costs (see decision 29).
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys
import time
from datetime import UTC, datetime
from typing import Any, cast

from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_operator import file_limits
from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime, reduce_gc_frequency
from pacekeeper_operator.endpoint import certificates
from pacekeeper_operator.endpoint.connections import EndpointConnections
from pacekeeper_operator.endpoint.server import serve_endpoint
from pacekeeper_operator.endpoint.sidecars import SidecarService
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry
from pacekeeper_operator.state.desired_state import DesiredState, Placement, State, WorkerRecord

HOST = "127.0.0.1"
NAMESPACE, JOB, VERSION = "bench", "large", 100
MAX_BENCH_CONNECTIONS = 32_768
"""Connections: this process has no memory limit to go by."""


class Believing:
    """The API server, as far as tokens are concerned."""

    async def create(self, _kind: object, body: dict[str, Any]) -> dict[str, Any]:
        payload = body["spec"]["token"].split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
        extra = {f"authentication.kubernetes.io/pod-{name}": [claims[name]] for name in ("name", "uid")}
        user = {"username": f"system:serviceaccount:{NAMESPACE}:default", "extra": extra}
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}


async def main(port: int, workers: int, ranks: int) -> None:
    runtime, registry = OperatorRuntime(), JobRegistry(time.time())
    job = registry.get_or_create(
        TrainingJob(NAMESPACE, JOB, "uid", 1, JobSpec(template={}, replicas=workers, nproc_per_node=ranks))
    )
    job.publish(_build_desired(workers, ranks), "1")
    sidecars = SidecarService(cast(Cluster, Believing()), registry, runtime)
    certificate = certificates.create_authority(datetime.now(UTC)).issue_serving_certificate((HOST,), datetime.now(UTC))
    connections = EndpointConnections(max_total=MAX_BENCH_CONNECTIONS)
    async with serve_endpoint(
        sidecars, runtime, port, certificate.to_ssl_context(), address=HOST, connections=connections
    ) as served_port:
        _write_message({"port": served_port, "trusted": certificate.trusted, **_read_usage(job, connections)})
        while await asyncio.to_thread(sys.stdin.readline):
            _write_message(_read_usage(job, connections))


def _build_desired(workers: int, ranks: int) -> DesiredState:
    records = tuple(WorkerRecord(f"{JOB}-w{n}-0", n, 0, uid=f"uid-{n}", node=f"node-{n}") for n in range(workers))
    members = tuple(
        Member(record.name, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", tuple(range(n * ranks, (n + 1) * ranks)))
        for n, record in enumerate(records)
    )
    plan = Plan(version=VERSION, membership=1, round=1, members=members)
    return DesiredState(plan, State(placement=Placement(workers=records)))


def _read_usage(job: JobCache, connections: EndpointConnections) -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "held": sum(contact.open_polls > 0 for contact in job.contacts.values()),
        "polls": sum(contact.heartbeat.progress.step or 0 for contact in job.contacts.values()),
        "connections": connections.total,
        "resident": _read_resident_bytes(),
        "seconds": usage.ru_utime + usage.ru_stime,
        "at": time.monotonic(),
    }


def _read_resident_bytes() -> int:
    """Bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _write_message(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    file_limits.raise_file_limit()
    reduce_gc_frequency()
    asyncio.run(main(*map(int, sys.argv[1:4])))

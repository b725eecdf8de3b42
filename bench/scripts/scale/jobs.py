"""1,000 jobs of four workers: what the operator takes while they train, how soon one that starts anew knows them all,
and what becomes of them while the API server refuses nearly everything.

A storm: all that the operator asks is answered 429 by the API server's own priority and fairness; but for its Lease,
without which it would not act at all.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence

from .figure import Measurement
from .world import GROUP, JOBS, PATIENT, SYSTEM, ScaleTestbed, made, log_progress

WORKERS = 4
PASS_SECONDS = 0.05
"""A bound of the histogram of passes."""
IDLE_SECONDS, QUICK_IDLE_SECONDS = 60.0, 10.0
STORM_SECONDS, QUICK_STORM_SECONDS = 120.0, 20.0
PATIENCE_SECONDS = 180.0
STATUS_POLL_SECONDS = 1.0
MAX_CONCURRENT_CREATIONS = 50
"""Jobs that begin together."""
SETTLE_SECONDS = 30.0
"""Polls become longer, and part."""
FLOW = "/apis/flowcontrol.apiserver.k8s.io/v1"
STORM = "storm"


def measured(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure(quick))


async def _measure(quick: bool) -> list[Measurement]:
    jobs = 20 if quick else 1000
    idle, storm = (QUICK_IDLE_SECONDS, QUICK_STORM_SECONDS) if quick else (IDLE_SECONDS, STORM_SECONDS)
    async with made(jobs * WORKERS) as world:
        world.start_operator(PATIENT)
        for first in range(0, jobs, MAX_CONCURRENT_CREATIONS):
            which = range(first, min(first + MAX_CONCURRENT_CREATIONS, jobs))
            await world.api.all(world.make_job(f"job-{number:04}", WORKERS) for number in which)
            await world.wait_until_training(which.stop * WORKERS)
        world.plane.stop_placing()
        world.restart_operator({})
        await _known(world, jobs)
        await asyncio.sleep(SETTLE_SECONDS)
        before = _passes(world)
        share = await world.idle_share(idle)
        passes, late = (after - begun for after, begun in zip(_passes(world), before, strict=True))
        log_progress(f"{jobs} jobs train: {share:.3f} of a core, {world.memory_mb():.0f} MB")
        log_progress(f"{late} of {passes} passes took longer than {1e3 * PASS_SECONDS:.0f} ms")
        world.kill_operator()
        world.start_operator({})
        known = await _known(world, jobs)
        log_progress(f"a new operator knows them all after {known:.1f} s")
        lost = await _lost_in_a_storm(world, jobs, storm)
    return [
        Measurement(f"cores while {jobs} jobs of {WORKERS} workers train", share, 0.5, "cores"),
        Measurement("passes that take more than 50 ms, of a hundred", 100 * late / passes, 1.0, ""),
        Measurement(f"a killed operator's successor knows {jobs} jobs", known, 30.0, "s"),
        Measurement(f"jobs that were touched or lost sight of in a storm of {storm:.0f} s", lost, 0, "jobs"),
    ]


async def _known(world: ScaleTestbed, jobs: int) -> float:
    """Seconds until the operator says of every job that it runs, and hears all its workers; infinite: not in time."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        if _running(world) == (jobs, jobs * WORKERS):
            return time.monotonic() - began
        await asyncio.sleep(STATUS_POLL_SECONDS)
    log_progress(f"the operator knows {_running(world)} of {jobs} jobs and their workers")
    return math.inf


async def _lost_in_a_storm(world: ScaleTestbed, jobs: int, seconds: float) -> int:
    """Jobs that have another plan than before, an incident, or do not run when it is over."""
    plans = await _plans(world)
    await _refuse(world)
    refused = await _refused(world)
    await asyncio.sleep(seconds)
    log_progress(f"in {seconds:.0f} s the API server has refused {await _refused(world) - refused} calls")
    if await _refused(world) == refused:
        raise RuntimeError("there was no storm: the API server has refused nothing")
    await world.api.call("DELETE", f"{FLOW}/flowschemas/{STORM}")
    if math.isinf(await _known(world, jobs)):
        return jobs
    incidents = (await world.api.call("GET", f"{GROUP}/incidents"))["items"]
    touched = {incident["spec"]["jobRef"]["name"] for incident in incidents}
    after = await _plans(world)
    return len(touched | {name for name in plans if after.get(name) != plans[name]})


async def _plans(world: ScaleTestbed) -> dict[str, int]:
    """Which round each job is in."""
    found = await world.api.call("GET", JOBS)
    return {job["metadata"]["name"]: job["status"]["round"] for job in found["items"]}


async def _refuse(world: ScaleTestbed) -> None:
    """Everything that the operator's account asks, but for Leases."""
    level = {
        "metadata": {"name": STORM},
        "spec": {
            "type": "Limited",
            "limited": {
                "nominalConcurrencyShares": 0,
                "lendablePercent": 0,
                "borrowingLimitPercent": 0,
                "limitResponse": {"type": "Reject"},
            },
        },
    }
    account = {"kind": "ServiceAccount", "serviceAccount": {"name": "pacekeeper", "namespace": SYSTEM}}
    groups = ["", "pacekeeper.dev", "authentication.k8s.io", "events.k8s.io", "policy"]
    rule = {"verbs": ["*"], "apiGroups": groups, "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
    flow = {
        "metadata": {"name": STORM},
        "spec": {
            "priorityLevelConfiguration": {"name": STORM},
            "matchingPrecedence": 2,
            "rules": [{"subjects": [account], "resourceRules": [rule]}],
        },
    }
    await world.api.call("POST", f"{FLOW}/prioritylevelconfigurations", level)
    await world.api.call("POST", f"{FLOW}/flowschemas", flow)


async def _refused(world: ScaleTestbed) -> int:
    """Calls that the API server has refused in the storm so far."""
    told = await world.api.text("/metrics")
    counts = re.findall(rf'^apiserver_flowcontrol_rejected_requests_total{{.*"{STORM}".*}} (\S+)$', told, re.MULTILINE)
    return int(sum(map(float, counts)))


def _running(world: ScaleTestbed) -> tuple[int, int]:
    """(jobs that run, workers that are heard) as the operator says."""
    try:
        told = world.metrics("pacekeeper_jobs", "pacekeeper_workers_heard")
    except OSError:  # it has just started
        return 0, 0
    jobs = re.search(r'^pacekeeper_jobs{phase="Running"} (\S+)$', told, re.MULTILINE)
    heard = re.search(r"^pacekeeper_workers_heard (\S+)$", told, re.MULTILINE)
    return int(float(jobs[1])) if jobs else 0, int(float(heard[1])) if heard else 0


def _passes(world: ScaleTestbed) -> tuple[int, int]:
    """(passes, of these longer than PASS_SECONDS) so far."""
    told = world.metrics("pacekeeper_reconcile_seconds_bucket")
    buckets = dict(re.findall(r'^pacekeeper_reconcile_seconds_bucket{le="(\S+)"} (\S+)$', told, re.MULTILINE))
    total = int(float(buckets["+Inf"]))
    return total, total - int(float(buckets[str(PASS_SECONDS)]))

"""1,000 jobs of four workers: the operator's cost while they train, how soon a restarted operator has them all,
and what becomes of them while the API server refuses nearly everything.

A storm: the API server's own priority and fairness answers 429 to all requests of the operator, except to those for
its Lease, without which it would not act at all.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence

from .measurement import Measurement
from .world import API_PATH, JOBS_PATH, PATIENT_SETTINGS, SYSTEM_NAMESPACE, ScaleTestbed, create_testbed, log_progress

WORKERS = 4
PASS_SECONDS = 0.05
"""A bound of the histogram of passes."""
IDLE_SECONDS, QUICK_IDLE_SECONDS = 60.0, 10.0
STORM_SECONDS, QUICK_STORM_SECONDS = 120.0, 20.0
TIMEOUT_SECONDS = 180.0
STATUS_POLL_SECONDS = 1.0
MAX_CONCURRENT_CREATIONS = 50
"""Jobs that begin together."""
SETTLE_SECONDS = 30.0
"""Polls become longer, and part."""
FLOW_CONTROL_PATH = "/apis/flowcontrol.apiserver.k8s.io/v1"
STORM = "storm"


def run_measurements(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure_jobs(quick))


async def _measure_jobs(quick: bool) -> list[Measurement]:
    jobs = 20 if quick else 1000
    idle, storm = (QUICK_IDLE_SECONDS, QUICK_STORM_SECONDS) if quick else (IDLE_SECONDS, STORM_SECONDS)
    async with create_testbed(jobs * WORKERS) as testbed:
        testbed.start_operator(PATIENT_SETTINGS)
        for first in range(0, jobs, MAX_CONCURRENT_CREATIONS):
            numbers = range(first, min(first + MAX_CONCURRENT_CREATIONS, jobs))
            await testbed.api.all(testbed.make_job(f"job-{number:04}", WORKERS) for number in numbers)
            await testbed.wait_until_training(numbers.stop * WORKERS)
        testbed.plane.stop_placing()
        testbed.restart_operator({})
        await _wait_until_known(testbed, jobs)
        await asyncio.sleep(SETTLE_SECONDS)
        counts_before = _read_pass_counts(testbed)
        share = await testbed.measure_idle_share(idle)
        passes, late_passes = (
            after - previous for after, previous in zip(_read_pass_counts(testbed), counts_before, strict=True)
        )
        log_progress(f"{jobs} jobs train: {share:.3f} of a core, {testbed.read_memory_mb():.0f} MB")
        log_progress(f"{late_passes} of {passes} passes took longer than {1e3 * PASS_SECONDS:.0f} ms")
        testbed.kill_operator()
        testbed.start_operator({})
        known_seconds = await _wait_until_known(testbed, jobs)
        log_progress(f"a new operator has loaded them all after {known_seconds:.1f} s")
        lost_jobs = await _count_lost_in_storm(testbed, jobs, storm)
    return [
        Measurement(f"cores while {jobs} jobs of {WORKERS} workers train", share, 0.5, "cores"),
        Measurement("passes that take more than 50 ms, of a hundred", 100 * late_passes / passes, 1.0, ""),
        Measurement(f"a killed operator's successor has loaded {jobs} jobs", known_seconds, 30.0, "s"),
        Measurement(f"jobs that were touched or lost sight of in a storm of {storm:.0f} s", lost_jobs, 0, "jobs"),
    ]


async def _wait_until_known(testbed: ScaleTestbed, jobs: int) -> float:
    """Seconds until the operator reports every job as running, with all its workers; infinite: not in time."""
    start = time.monotonic()
    while time.monotonic() - start < TIMEOUT_SECONDS:
        if _read_running_counts(testbed) == (jobs, jobs * WORKERS):
            return time.monotonic() - start
        await asyncio.sleep(STATUS_POLL_SECONDS)
    log_progress(f"the operator reports {_read_running_counts(testbed)} of {jobs} jobs and their workers")
    return math.inf


async def _count_lost_in_storm(testbed: ScaleTestbed, jobs: int, seconds: float) -> int:
    """Jobs that have another plan than before, an incident, or do not run when it is over."""
    rounds = await _read_rounds(testbed)
    await _start_storm(testbed)
    refused_before = await _count_refused_calls(testbed)
    await asyncio.sleep(seconds)
    log_progress(
        f"in {seconds:.0f} s the API server has refused {await _count_refused_calls(testbed) - refused_before} calls"
    )
    if await _count_refused_calls(testbed) == refused_before:
        raise RuntimeError("there was no storm: the API server has refused nothing")
    await testbed.api.call("DELETE", f"{FLOW_CONTROL_PATH}/flowschemas/{STORM}")
    if math.isinf(await _wait_until_known(testbed, jobs)):
        return jobs
    incidents = (await testbed.api.call("GET", f"{API_PATH}/incidents"))["items"]
    touched = {incident["spec"]["jobRef"]["name"] for incident in incidents}
    rounds_after = await _read_rounds(testbed)
    return len(touched | {name for name in rounds if rounds_after.get(name) != rounds[name]})


async def _read_rounds(testbed: ScaleTestbed) -> dict[str, int]:
    """Which round each job is in."""
    listed = await testbed.api.call("GET", JOBS_PATH)
    return {job["metadata"]["name"]: job["status"]["round"] for job in listed["items"]}


async def _start_storm(testbed: ScaleTestbed) -> None:
    """All requests of the operator's account, except for Leases."""
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
    account = {"kind": "ServiceAccount", "serviceAccount": {"name": "pacekeeper", "namespace": SYSTEM_NAMESPACE}}
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
    await testbed.api.call("POST", f"{FLOW_CONTROL_PATH}/prioritylevelconfigurations", level)
    await testbed.api.call("POST", f"{FLOW_CONTROL_PATH}/flowschemas", flow)


async def _count_refused_calls(testbed: ScaleTestbed) -> int:
    """Calls that the API server has refused in the storm so far."""
    metrics = await testbed.api.text("/metrics")
    counts = re.findall(
        rf'^apiserver_flowcontrol_rejected_requests_total{{.*"{STORM}".*}} (\S+)$', metrics, re.MULTILINE
    )
    return int(sum(map(float, counts)))


def _read_running_counts(testbed: ScaleTestbed) -> tuple[int, int]:
    """(jobs that run, workers that report) by the operator's metrics."""
    try:
        metrics = testbed.read_metrics("pacekeeper_jobs", "pacekeeper_workers_reporting")
    except OSError:  # it has just started
        return 0, 0
    jobs = re.search(r'^pacekeeper_jobs{phase="Running"} (\S+)$', metrics, re.MULTILINE)
    reporting = re.search(r"^pacekeeper_workers_reporting (\S+)$", metrics, re.MULTILINE)
    return int(float(jobs[1])) if jobs else 0, int(float(reporting[1])) if reporting else 0


def _read_pass_counts(testbed: ScaleTestbed) -> tuple[int, int]:
    """(passes, of these longer than PASS_SECONDS) so far."""
    metrics = testbed.read_metrics("pacekeeper_reconcile_seconds_bucket")
    buckets = dict(re.findall(r'^pacekeeper_reconcile_seconds_bucket{le="(\S+)"} (\S+)$', metrics, re.MULTILINE))
    total = int(float(buckets["+Inf"]))
    return total, total - int(float(buckets[str(PASS_SECONDS)]))

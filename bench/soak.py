"""Two hours on the test cluster: three jobs, random faults, and what must stay true, and must not grow, from outside.

Two jobs, one replicated and one sharded, are struck again and again; the third, the bystander, is not. Behind each
fault all must train again, their plans, pods and nodes must fit together, the bystander must have had no Incident, and
operators no traceback in their logs. What operators, the bystander's sidecars and trainers, and the cluster hold is
measured whenever all is calm; in an hour or more, none of it may grow: operators are struck, and the API server is
restarted, in the first third only.
At the end every sample was used once in each epoch, and nothing is left of the jobs, nor on any node.

MINUTES=120, SEED=0: how long, and which faults. QUICK=1: eight minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.scripts.soak import invariants, remedies
from bench.scripts.soak.disruptions import RANKS, Disruptions
from bench.scripts.soak.meters import Meters
from testcluster import placement, release
from testcluster.shell import log_progress
from testing.kubernetes.cluster import KubectlCluster, running_cluster, scratch_namespace
from testing.kubernetes.jobs import SAMPLES, ClusterJob, build_paced_job

MINUTES = float(os.environ.get("MINUTES", "8" if os.environ.get("QUICK") else "120"))
SEED = int(os.environ.get("SEED", "0"))
MIN_GROWTH_MINUTES = 60.0
"""From which on growth counts: before, caches fill."""
OPERATOR_FAULTS_SHARE = 1 / 3
"""Of the time, operators are struck: later, each has lived for long enough that growth would show."""
CALM_SECONDS, FAULT_SECONDS = (10.0, 30.0), (10.0, 45.0)
"""From, to: the time without faults, and the duration of a fault."""
CALM_TIMEOUT_SECONDS, GONE_TIMEOUT_SECONDS = 300.0, 30.0
BOTH_JOBS_SHARE = 0.25
"""How often both jobs are struck at the same time."""
STEP_SECONDS = "0.2"
TOTAL_STEPS = 10_000_000
DISRUPTED_NODES, BYSTANDER_NODES = ("node-1", "node-2", "node-3", "node-4"), ("node-5", "node-6")
TRACEBACK = "Traceback (most recent call last)"
OWNED_KINDS = ("pods", "secrets", "services", "networkpolicies", "leases", "roles", "rolebindings", "trainingjobstates")
"""Kinds of which nothing may stay in the jobs' namespace."""
ANY_FAILURE = (Exception, pytest.fail.Exception)
"""The API server is restarted, pods come and go: a check that fails now is repeated."""


@dataclass
class SoakHistory:
    """What has happened so far."""

    made: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Faults that could not be injected: the rank was just starting, for example."""
    broken: list[str] = field(default_factory=list)
    incidents: dict[str, int] = field(default_factory=dict)
    prices: dict[str, remedies.PriceAccuracy] = field(default_factory=dict)
    quarantines: Counter[str] = field(default_factory=Counter)
    """By node. The bystander's nodes have given no reason."""
    meters: Meters = field(default_factory=Meters)


def main() -> None:
    history = SoakHistory()
    try:
        with running_cluster() as cluster:
            release.install_release()
            release.install_exporter()
            with start_jobs(cluster) as (disrupted_jobs, bystander):
                run_soak(cluster, disrupted_jobs, bystander, history, random.Random(SEED))
                all_jobs = [*disrupted_jobs, bystander]
                incidents = {job.name: job.list_incidents() for job in all_jobs}
                history.incidents = {name: len(found) for name, found in incidents.items()}
                history.prices = remedies.compare_prices(itertools.chain(*incidents.values()))
                log_progress("\n".join(remedies.format_prices(itertools.chain(*incidents.values()))))
                for job in disrupted_jobs:
                    problems = invariants.check_samples(job.read_samples_by_epoch(), SAMPLES)
                    history.broken += [f"{job.name}: {problem}" for problem in problems]
                history.broken += delete_jobs(cluster, all_jobs)
    except ANY_FAILURE as error:
        history.broken.append(f"the soak could not go on: {error!r}")
    print(json.dumps(build_result(history)))


def build_result(history: SoakHistory) -> dict[str, Any]:
    growths = history.meters.compute_growth()
    holds = {"nothing_broken": not history.broken}
    holds |= {f"{name}_as_predicted": accuracy.is_accurate for name, accuracy in history.prices.items()}
    if MINUTES >= MIN_GROWTH_MINUTES:
        holds["nothing_grows"] = history.meters.has_all_meters() and not any(
            growth.grows for growth in growths.values()
        )
    return {
        "bench": "soak",
        "minutes": MINUTES,
        "seed": SEED,
        "faults": len(history.made),
        "missed": len(history.missed),
        "incidents": history.incidents,
        "quarantines": dict(history.quarantines),
        "broken": history.broken,
        "predicted_over_measured": {name: accuracy.to_json() for name, accuracy in history.prices.items()},
        "growth": {name: growth.to_json() for name, growth in growths.items()},
        "holds": holds,
    }


def run_soak(
    cluster: KubectlCluster,
    disrupted_jobs: Sequence[ClusterJob],
    bystander: ClusterJob,
    history: SoakHistory,
    rng: random.Random,
) -> None:
    """Ends early where something does not get calm again: later results would add nothing."""
    start = checked_at = time.monotonic()
    while True:
        history.broken += wait_until_calm(cluster, disrupted_jobs, bystander, history)
        history.broken += find_tracebacks(cluster, time.monotonic() - checked_at)
        checked_at = time.monotonic()
        elapsed = checked_at - start
        if history.broken or elapsed >= 60 * MINUTES:
            log_progress("\n".join(history.broken) or f"all is calm behind {len(history.made)} faults")
            return
        try:
            history.meters.take(elapsed, cluster, bystander)
        except ANY_FAILURE as error:
            log_progress(f"not measured: {error!r}")
        time.sleep(rng.uniform(*CALM_SECONDS))
        with ExitStack() as repairs:
            disruptions = Disruptions(cluster, rng, repairs, operators=elapsed < OPERATOR_FAULTS_SHARE * 60 * MINUTES)
            for job in list(disrupted_jobs) if rng.random() < BOTH_JOBS_SHARE else [rng.choice(disrupted_jobs)]:
                inject_disruption(disruptions, job, history)
            time.sleep(rng.uniform(*FAULT_SECONDS))


def inject_disruption(disruptions: Disruptions, job: ClusterJob, history: SoakHistory) -> None:
    kind = disruptions.draw()
    try:
        history.made.append(f"{kind} ({job.name}): {disruptions.make(kind, job)}")
        log_progress(f"{len(history.made)}: {history.made[-1]}")
    except ANY_FAILURE as error:
        history.missed.append(f"{kind} ({job.name}): {error!r}")
        log_progress(f"missed: {history.missed[-1][:300]}")


def wait_until_calm(
    cluster: KubectlCluster, disrupted_jobs: Sequence[ClusterJob], bystander: ClusterJob, history: SoakHistory
) -> list[str]:
    """Waits until all is as it should be; what is wrong, where that does not come about in time."""
    deadline = time.monotonic() + CALM_TIMEOUT_SECONDS
    while True:
        try:
            release_nodes(cluster, history)
            problems = [problem for job in disrupted_jobs for problem in check_job(job, spares=1)] + check_job(
                bystander, spares=0
            )
            problems += invariants.check_nodes(cluster.list("nodes"), cluster.list("nodequarantines"))
            if not problems:
                for job in (*disrupted_jobs, bystander):
                    job.wait_for_more_steps()
        except ANY_FAILURE as error:
            problems = [f"{error!r}"[:2000]]
        if not problems:
            names = bystander.list_incident_names()
            wrongly_quarantined = [node for node in BYSTANDER_NODES if history.quarantines[node]]
            return [
                *(f"{bystander.name} was never struck, and has incident {name}" for name in names),
                *(f"{node} was never struck, and was quarantined" for node in wrongly_quarantined),
            ]
        if time.monotonic() > deadline:
            return problems
        time.sleep(1.0)


def release_nodes(cluster: KubectlCluster, history: SoakHistory) -> None:
    """As on-call does."""
    if quarantines := cluster.list("nodequarantines"):
        names = [quarantine["metadata"]["name"] for quarantine in quarantines]
        history.quarantines.update(names)
        cluster.kubectl("delete", "nodequarantine", *names, "--timeout=90s", timeout=100)


def check_job(job: ClusterJob, spares: int) -> list[str]:
    """What keeps it from being calm."""
    status = job.status
    problems = [] if status.get("phase") == "Running" else [f"it is {status.get('phase')}"]
    if status.get("workers", {}).get("spare", 0) < spares:
        problems.append("its spare is not there")
    still_open = [
        incident["metadata"]["name"]
        for incident in job.list_incidents()
        if not incident.get("status", {}).get("outcome")
    ]
    problems += [f"incident {name} is open" for name in still_open]
    return [
        f"{job.name}: {problem}"
        for problem in [*problems, *invariants.check_plan(job.read_plan(), RANKS, job.list_pods())]
    ]


def find_tracebacks(cluster: KubectlCluster, seconds: float) -> list[str]:
    """Errors of the operators in their recent logs, also of a container that has ended since."""
    tracebacks = []
    for pod in release.list_operator_pods():
        name, restarts = pod["metadata"]["name"], pod["status"].get("containerStatuses", [{}])[0].get("restartCount", 0)
        for previous in (["--previous"], []) if restarts else ([],):
            try:
                log = cluster.kubectl("logs", name, "-n", release.SYSTEM, f"--since={seconds + 1:.0f}s", *previous)
            except ANY_FAILURE:  # it is just starting, or its log has gone
                continue
            if TRACEBACK in log:
                tracebacks.append(f"{name} has a traceback in its log: {log.partition(TRACEBACK)[2][:2000]}")
    return tracebacks


def delete_jobs(cluster: KubectlCluster, jobs: Sequence[ClusterJob]) -> list[str]:
    """Deletes the jobs, and returns what stays."""
    for job in jobs:
        job.delete()
    deadline = time.monotonic() + GONE_TIMEOUT_SECONDS
    while True:  # owned objects go by themselves
        leftovers = [
            f"{kind} {item['metadata']['name']}"
            for kind in OWNED_KINDS
            for item in cluster.list(kind, jobs[0].namespace)
        ]
        leftovers += invariants.check_nodes(cluster.list("nodes"), cluster.list("nodequarantines"))
        if not leftovers or time.monotonic() > deadline:
            return [f"left behind: {', '.join(leftovers)}"] if leftovers else []
        time.sleep(1.0)


@contextmanager
def start_jobs(cluster: KubectlCluster) -> Iterator[tuple[list[ClusterJob], ClusterJob]]:
    """The two that are struck, and the bystander, on nodes of its own."""
    with scratch_namespace(cluster) as namespace:

        def apply_job(name: str, nodes: Sequence[str], environment: dict[str, str], **spec: Any) -> ClusterJob:
            variables = {"SLEEP": STEP_SECONDS, **environment}
            pod = placement.spread_over_nodes(name, nodes)
            body = build_paced_job(name, TOTAL_STEPS, environment=variables, pod=pod, replicas=RANKS, **spec)
            body["spec"].setdefault("remediation", {})["maxRestarts"] = 1000
            return ClusterJob.apply(cluster, namespace, body)

        disrupted_jobs = [
            apply_job("replicated", DISRUPTED_NODES, {}, spares=1, syncMode="Sync"),
            apply_job("sharded", DISRUPTED_NODES, {"SHARD": "1"}, spares=1, syncMode="Sync"),
        ]
        yield disrupted_jobs, apply_job("bystander", BYSTANDER_NODES, {}, syncMode="EDiT")


if __name__ == "__main__":
    main()

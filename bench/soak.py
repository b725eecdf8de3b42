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

from bench.scripts.soak import invariants
from bench.scripts.soak.meters import Meters
from bench.scripts.soak.strikes import RANKS, Disruptions
from testcluster import placement, release
from testcluster.shell import log_progress
from tests.support.cluster import KubectlCluster, running_cluster, scratch_namespace
from tests.support.jobs import SAMPLES, ClusterJob, build_paced_job

MINUTES = float(os.environ.get("MINUTES", "8" if os.environ.get("QUICK") else "120"))
SEED = int(os.environ.get("SEED", "0"))
LEAST_MINUTES = 60.0
"""From which on growth is judged: before, caches fill."""
OPERATORS_UNTIL = 1 / 3
"""Of the time, operators are struck: later, each has lived for long enough that growth would show."""
CALM_SECONDS, LAST_SECONDS = (10.0, 30.0), (10.0, 45.0)
"""From, to: how long all is left alone, and how long a fault lasts that does."""
CALM_WITHIN_SECONDS, GONE_WITHIN_SECONDS = 300.0, 30.0
TWO_AT_ONCE = 0.25
"""How often both jobs are struck at the same time."""
STEP_SECONDS = "0.2"
LONG = 10_000_000
STRUCK_NODES, BYSTANDERS_NODES = ("node-1", "node-2", "node-3", "node-4"), ("node-5", "node-6")
TRACEBACK = "Traceback (most recent call last)"
OURS = ("pods", "secrets", "services", "networkpolicies", "leases", "roles", "rolebindings", "trainingjobstates")
"""Kinds of which nothing may stay in the jobs' namespace."""
ANY_FAILURE = (Exception, pytest.fail.Exception)
"""The API server is restarted, pods come and go: what cannot be looked at now is looked at again."""


@dataclass
class SoakHistory:
    """What has happened so far."""

    made: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Faults that could not be made: the rank was just starting, say."""
    broken: list[str] = field(default_factory=list)
    incidents: dict[str, int] = field(default_factory=dict)
    quarantines: Counter[str] = field(default_factory=Counter)
    """By node. The bystander's nodes have given no reason."""
    meters: Meters = field(default_factory=Meters)


def main() -> None:
    course = SoakHistory()
    try:
        with running_cluster() as cluster:
            release.install_release()
            release.install_exporter()
            with jobs(cluster) as (struck, bystander):
                soak(cluster, struck, bystander, course, random.Random(SEED))
                every = [*struck, bystander]
                course.incidents = {job.name: len(job.list_incidents()) for job in every}
                for job in struck:
                    wrong = invariants.check_samples(job.read_samples_by_epoch(), SAMPLES)
                    course.broken += [f"{job.name}: {what}" for what in wrong]
                course.broken += left_behind(cluster, every)
    except ANY_FAILURE as error:
        course.broken.append(f"the soak could not go on: {error!r}")
    print(json.dumps(result(course)))


def result(course: SoakHistory) -> dict[str, Any]:
    growth = course.meters.grown()
    holds = {"nothing_broken": not course.broken}
    if MINUTES >= LEAST_MINUTES:
        holds["nothing_grows"] = course.meters.has_all_meters() and not any(its.grows for its in growth.values())
    return {
        "bench": "soak",
        "minutes": MINUTES,
        "seed": SEED,
        "faults": len(course.made),
        "missed": len(course.missed),
        "incidents": course.incidents,
        "quarantines": dict(course.quarantines),
        "broken": course.broken,
        "growth": {name: its.to_json() for name, its in growth.items()},
        "holds": holds,
    }


def soak(cluster: KubectlCluster, struck: Sequence[ClusterJob], bystander: ClusterJob, course: SoakHistory, dice: random.Random) -> None:
    """Ends early where something does not get calm again: what comes later would say nothing new."""
    began = looked = time.monotonic()
    while True:
        course.broken += when_calm(cluster, struck, bystander, course)
        course.broken += tracebacks(cluster, time.monotonic() - looked)
        looked = time.monotonic()
        at = looked - began
        if course.broken or at >= 60 * MINUTES:
            log_progress("\n".join(course.broken) or f"all is calm behind {len(course.made)} faults")
            return
        try:
            course.meters.take(at, cluster, bystander)
        except ANY_FAILURE as error:
            log_progress(f"not measured: {error!r}")
        time.sleep(dice.uniform(*CALM_SECONDS))
        with ExitStack() as mends:
            strikes = Disruptions(cluster, dice, mends, operators=at < OPERATORS_UNTIL * 60 * MINUTES)
            for job in list(struck) if dice.random() < TWO_AT_ONCE else [dice.choice(struck)]:
                inject_disruption(strikes, job, course)
            time.sleep(dice.uniform(*LAST_SECONDS))


def inject_disruption(strikes: Disruptions, job: ClusterJob, course: SoakHistory) -> None:
    kind = strikes.draw()
    try:
        course.made.append(f"{kind} ({job.name}): {strikes.make(kind, job)}")
        log_progress(f"{len(course.made)}: {course.made[-1]}")
    except ANY_FAILURE as error:
        course.missed.append(f"{kind} ({job.name}): {error!r}")
        log_progress(f"missed: {course.missed[-1][:300]}")


def when_calm(cluster: KubectlCluster, struck: Sequence[ClusterJob], bystander: ClusterJob, course: SoakHistory) -> list[str]:
    """Waits until all is as it should be; what is wrong, where that does not come about in time."""
    until = time.monotonic() + CALM_WITHIN_SECONDS
    while True:
        try:
            release_nodes(cluster, course)
            wrong = [its for job in struck for its in check_job(job, spares=1)] + check_job(bystander, spares=0)
            wrong += invariants.check_nodes(cluster.list("nodes"), cluster.list("nodequarantines"))
            if not wrong:
                for job in (*struck, bystander):
                    job.wait_for_more_steps()
        except ANY_FAILURE as error:
            wrong = [f"{error!r}"[:2000]]
        if not wrong:
            names = bystander.list_incident_names()
            falsely = [node for node in BYSTANDERS_NODES if course.quarantines[node]]
            return [
                *(f"{bystander.name} was never struck, and has incident {name}" for name in names),
                *(f"{node} was never struck, and was quarantined" for node in falsely),
            ]
        if time.monotonic() > until:
            return wrong
        time.sleep(1.0)


def release_nodes(cluster: KubectlCluster, course: SoakHistory) -> None:
    """As on-call does."""
    if found := cluster.list("nodequarantines"):
        names = [its["metadata"]["name"] for its in found]
        course.quarantines.update(names)
        cluster.kubectl("delete", "nodequarantine", *names, "--timeout=90s", timeout=100)


def check_job(job: ClusterJob, spares: int) -> list[str]:
    """What keeps it from being calm."""
    status = job.status
    wrong = [] if status.get("phase") == "Running" else [f"it is {status.get('phase')}"]
    if status.get("workers", {}).get("spare", 0) < spares:
        wrong.append("its spare is not there")
    still_open = [its["metadata"]["name"] for its in job.list_incidents() if not its.get("status", {}).get("outcome")]
    wrong += [f"incident {name} is open" for name in still_open]
    return [f"{job.name}: {what}" for what in [*wrong, *invariants.check_plan(job.read_plan(), RANKS, job.list_pods())]]


def tracebacks(cluster: KubectlCluster, seconds: float) -> list[str]:
    """Of the operators, in what they have said for so long; of a life that has ended meanwhile, too."""
    found = []
    for pod in release.list_operator_pods():
        name, restarts = pod["metadata"]["name"], pod["status"].get("containerStatuses", [{}])[0].get("restartCount", 0)
        for previous in (["--previous"], []) if restarts else ([],):
            try:
                log = cluster.kubectl("logs", name, "-n", release.SYSTEM, f"--since={seconds + 1:.0f}s", *previous)
            except ANY_FAILURE:  # it is just starting, or its log has gone
                continue
            if TRACEBACK in log:
                found.append(f"{name} has a traceback in its log: {log.partition(TRACEBACK)[2][:2000]}")
    return found


def left_behind(cluster: KubectlCluster, every: Sequence[ClusterJob]) -> list[str]:
    """Deletes the jobs, and says what stays."""
    for job in every:
        job.delete()
    until = time.monotonic() + GONE_WITHIN_SECONDS
    while True:  # owned objects go by themselves
        left = [f"{kind} {its['metadata']['name']}" for kind in OURS for its in cluster.list(kind, every[0].namespace)]
        left += invariants.check_nodes(cluster.list("nodes"), cluster.list("nodequarantines"))
        if not left or time.monotonic() > until:
            return [f"left behind: {', '.join(left)}"] if left else []
        time.sleep(1.0)


@contextmanager
def jobs(cluster: KubectlCluster) -> Iterator[tuple[list[ClusterJob], ClusterJob]]:
    """The two that are struck, and the bystander, on nodes of its own."""
    with scratch_namespace(cluster) as namespace:

        def apply(name: str, nodes: Sequence[str], environment: dict[str, str], **spec: Any) -> ClusterJob:
            variables = {"SLEEP": STEP_SECONDS, **environment}
            pod = placement.spread_over_nodes(name, nodes)
            body = build_paced_job(name, LONG, environment=variables, pod=pod, replicas=RANKS, **spec)
            body["spec"].setdefault("remediation", {})["maxRestarts"] = 1000
            return ClusterJob.apply(cluster, namespace, body)

        struck = [
            apply("replicated", STRUCK_NODES, {}, spares=1, syncMode="Sync"),
            apply("sharded", STRUCK_NODES, {"SHARD": "1"}, spares=1, syncMode="Sync"),
        ]
        yield struck, apply("bystander", BYSTANDERS_NODES, {}, syncMode="EDiT")


if __name__ == "__main__":
    main()

"""Two hours on the test cluster: three jobs, random faults, and what must stay true, and must not grow, from outside.

Two jobs, one replicated and one sharded, are struck again and again; the third, the bystander, is not. Behind each
fault all must train again, their plans, pods and nodes must fit together, and the bystander must have had no Incident.
What operators, the bystander's sidecars and trainers, and the cluster hold is measured whenever all is calm; in an hour
or more, none of it may grow. At the end every sample was used once in each epoch, no operator has a traceback in its
log, and nothing is left of the jobs.

MINUTES=120, SEED=0: how long, and which faults. QUICK=1: eight minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.scripts.soak import invariants
from bench.scripts.soak.meters import Meters
from bench.scripts.soak.strikes import RANKS, Strikes
from testcluster import placement, programs, release
from testcluster.settings import KUBECONFIG
from testcluster.shell import ClusterError, run, say
from tests.support.cluster import Cluster, running_cluster, scratch_namespace
from tests.support.jobs import SAMPLES, Job, paced

MINUTES = float(os.environ.get("MINUTES", "8" if os.environ.get("QUICK") else "120"))
SEED = int(os.environ.get("SEED", "0"))
LEAST_MINUTES = 60.0
"""From which on growth is judged: before, caches fill."""
CALM_SECONDS, LAST_SECONDS = (10.0, 30.0), (10.0, 45.0)
"""From, to: how long all is left alone, and how long a fault lasts that does."""
TWO_AT_ONCE = 0.25
"""How often both jobs are struck at the same time."""
STEP_SECONDS = "0.2"
LONG = 10_000_000
STRUCK_NODES, BYSTANDERS_NODES = ("node-1", "node-2", "node-3", "node-4"), ("node-5", "node-6")
EXPORTER = Path(__file__).parent.parent / "testcluster/dcgm-exporter.yaml"
TRACEBACK = "Traceback (most recent call last)"
OURS = ("pods", "secrets", "services", "networkpolicies", "leases", "roles", "rolebindings", "trainingjobstates")
"""Kinds of which a job may leave nothing in its namespace, where it alone had any."""


@dataclass
class Course:
    """What has happened so far."""

    strikes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    meters: Meters = field(default_factory=Meters)


def main() -> None:
    course, dice = Course(), random.Random(SEED)
    with running_cluster() as cluster:
        release.install()
        run(programs.kubectl(), f"--kubeconfig={KUBECONFIG}", "apply", "-f", EXPORTER)
        with jobs(cluster) as (struck, bystander):
            soak(cluster, struck, bystander, course, dice)
            course.broken += behind_the_end(struck)
            incidents = {job.name: len(job.incidents()) for job in (*struck, bystander)}
            course.broken += left_behind(cluster, [*struck, bystander])
    grown = course.meters.grown()
    judged = MINUTES >= LEAST_MINUTES
    result = {
        "bench": "soak",
        "minutes": MINUTES,
        "seed": SEED,
        "faults": len(course.strikes),
        "incidents": incidents,
        "broken": course.broken,
        "growth": {name: its.to_json() for name, its in grown.items()},
        "holds": {
            "nothing_broken": not course.broken,
            **({"nothing_grows": bool(grown) and not any(its.grows for its in grown.values())} if judged else {}),
        },
    }
    print(json.dumps(result))


def soak(cluster: Cluster, struck: Sequence[Job], bystander: Job, course: Course, dice: random.Random) -> None:
    """Ends early where something does not get calm again: what comes later would say nothing new."""
    began = time.monotonic()
    while not course.broken and (at := time.monotonic() - began) < 60 * MINUTES:
        course.broken += all_calm(cluster, struck, bystander)
        course.meters.take(at, cluster, bystander)
        time.sleep(dice.uniform(*CALM_SECONDS))
        with ExitStack() as mends:
            strikes = Strikes(cluster, dice, mends)
            victims = list(struck) if dice.random() < TWO_AT_ONCE else [dice.choice(struck)]
            for job in victims:
                course.strikes.append(attempt(strikes, job))
                say(f"{at:6.0f} s, {len(course.strikes)}: {course.strikes[-1]}")
            time.sleep(dice.uniform(*LAST_SECONDS))
    course.broken += all_calm(cluster, struck, bystander)
    say("\n".join(course.broken) or "all calm at the end")


def attempt(strikes: Strikes, job: Job) -> str:
    """A rank that is just starting cannot be struck; that is no fault of anybody."""
    try:
        return strikes.draw(job)
    except (ClusterError, OSError, StopIteration, subprocess.CalledProcessError, pytest.fail.Exception) as error:
        return f"missed ({job.name}): {str(error)[:200]}"


def all_calm(cluster: Cluster, struck: Sequence[Job], bystander: Job) -> list[str]:
    """Waits for it, and says what is wrong then."""
    try:
        for job in struck:
            job.until_calm(spares=1)
        bystander.until_calm()
        cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=90s", timeout=100)  # as on-call does at last
    except pytest.fail.Exception as failure:
        return [str(failure)]
    except subprocess.CalledProcessError as error:
        return [f"quarantines do not end: {error.stderr.strip()}"]
    wrong = [
        f"{job.name}: {what}"
        for job in (*struck, bystander)
        for what in invariants.of_plan(job.plan(), RANKS, job.pods())
    ]
    wrong += invariants.of_nodes(cluster.list("nodes"), cluster.list("nodequarantines"))
    wrong += [f"{bystander.name} was never struck, and has incident {name}" for name in bystander.incident_names()]
    return wrong


def behind_the_end(struck: Sequence[Job]) -> list[str]:
    wrong = [f"{job.name}: {what}" for job in struck for what in invariants.of_samples(job.samples_by_epoch(), SAMPLES)]
    for pod in release.pods():
        name = pod["metadata"]["name"]
        log = run(programs.kubectl(), f"--kubeconfig={KUBECONFIG}", "logs", name, "-n", release.SYSTEM)
        if TRACEBACK in log:
            wrong.append(f"{name} has a traceback in its log: {log.partition(TRACEBACK)[2][:2000]}")
    return wrong


def left_behind(cluster: Cluster, every: Sequence[Job]) -> list[str]:
    """Deletes the jobs, and says what stays."""
    try:
        for job in every:
            job.delete()
    except (AssertionError, pytest.fail.Exception) as failure:
        return [str(failure)]
    namespace = every[0].namespace
    left = [f"{kind} {found['metadata']['name']}" for kind in OURS for found in cluster.list(kind, namespace)]
    return [f"left behind: {', '.join(left)}"] if left else []


@contextmanager
def jobs(cluster: Cluster) -> Iterator[tuple[list[Job], Job]]:
    """The two that are struck, and the bystander, on nodes of its own."""
    with scratch_namespace(cluster) as namespace:

        def apply(name: str, nodes: Sequence[str], environment: dict[str, str], **spec: Any) -> Job:
            variables = {"SLEEP": STEP_SECONDS, **environment}
            pod = placement.apart(name, nodes)
            body = paced(name, LONG, environment=variables, pod=pod, replicas=RANKS, **spec)
            body["spec"].setdefault("remediation", {})["maxRestarts"] = 1000
            return Job.apply(cluster, namespace, body)

        struck = [
            apply("replicated", STRUCK_NODES, {}, spares=1, syncMode="Sync"),
            apply("sharded", STRUCK_NODES, {"SHARD": "1"}, spares=1, syncMode="Sync"),
        ]
        yield struck, apply("bystander", BYSTANDERS_NODES, {}, syncMode="EDiT")


if __name__ == "__main__":
    main()

"""How real the bench of decisions is: a slow worker on the test cluster, and on that bench's coarse clock.

Three jobs train side by side under the installed operator; one worker of each becomes slow, by 1.6 or 3.1 times, for
two minutes, with a spare or without. What share of the slowdown is removed has to be the same within 15 points.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from bench.scripts.decisions import on_cluster
from bench.scripts.decisions.agreement import NEAR, Compared
from bench.scripts.decisions.on_cluster import (
    CALM_SECONDS,
    CASES,
    SECONDS_A_SAMPLE,
    SLOW_SECONDS,
    TAIL_SECONDS,
    Case,
)
from bench.scripts.decisions.simulated import REPLICAS, SLOW_RANK
from testcluster import release
from testcluster.shell import say
from tests.support.cluster import Cluster, running_cluster, scratch_namespace
from tests.support.jobs import Job, manifest

SETTLES_SECONDS = 15.0
"""Of a job that has just begun: its first steps are slow."""


def main() -> None:
    with running_cluster() as cluster:
        release.install()
        with scratch_namespace(cluster) as namespace:
            jobs = [apply(cluster, namespace, case) for case in CASES]
            for job, case in zip(jobs, CASES, strict=True):
                job.until_calm(spares=case.spares)
            struck = strike(jobs)
            compared = [compare(job, case, struck) for job, case in zip(jobs, CASES, strict=True)]
            remedies = {job.name: [i.get("status", {}).get("remedy") for i in job.incidents()] for job in jobs}
    print("\n".join(each.words for each in compared))
    print(json.dumps(result(compared, remedies)))


def apply(cluster: Cluster, namespace: str, case: Case) -> Job:
    body = manifest(
        case.name,
        ["pacekeeper", "run", "tests/support/scripts/slowed.py"],
        environment={"FOLDER": "/checkpoints", "SECONDS_A_SAMPLE": str(SECONDS_A_SAMPLE)},
        replicas=REPLICAS,
        spares=case.spares,
        checkpoint={"everySteps": 1000, "volumeClaimName": case.name},
    )
    return Job.apply(cluster, namespace, body)


def strike(jobs: Sequence[Job]) -> float:
    """All at once. When that was, in seconds since the epoch; returns once all is over."""
    say(f"calm for {SETTLES_SECONDS + CALM_SECONDS:.0f} s")
    time.sleep(SETTLES_SECONDS + CALM_SECONDS)
    struck, slow = time.time(), []
    for job, case in zip(jobs, CASES, strict=True):
        slow.append(job.folder() / f"seconds-{job.worker(SLOW_RANK)}")
        beside = slow[-1].with_name("beside")  # ranks read it all the time
        beside.write_text(str(case.factor * SECONDS_A_SAMPLE))
        beside.rename(slow[-1])
    say(f"one worker of each is slow for {SLOW_SECONDS:.0f} s")
    time.sleep(SLOW_SECONDS)
    for path in slow:
        path.unlink()
    say(f"and well again for {TAIL_SECONDS:.0f} s")
    time.sleep(TAIL_SECONDS)
    return struck


def compare(job: Job, case: Case, struck: float) -> Compared:
    diaries = [(job.folder() / f"steps-{rank}").read_text().splitlines(keepends=True) for rank in range(REPLICAS)]
    return on_cluster.compare(case, {rank: on_cluster.read(lines) for rank, lines in enumerate(diaries)}, struck)


def result(compared: Sequence[Compared], remedies: dict[str, list[str]]) -> dict[str, object]:
    removed = {
        case.name: {"cluster": each.there, "coarse": each.coarse} for case, each in zip(CASES, compared, strict=True)
    }
    holds = {f"within {NEAR:.0%}": all(each.agrees for each in compared)}
    return {"bench": "agreement", "removed": removed, "remedies": remedies, "holds": holds}


if __name__ == "__main__":
    main()

"""How real the bench of decisions is: a slow worker on the test cluster, and on that bench's coarse clock.

Three jobs train side by side under the installed operator; one worker of each becomes slow, by 1.6 or 3.1 times, for
two minutes, with a spare or without. What share of the slowdown is removed has to be the same within 15 points.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from bench.scripts.decisions import on_cluster
from bench.scripts.decisions.agreement import MAX_DIFFERENCE, Compared
from bench.scripts.decisions.on_cluster import (
    CALM_SECONDS,
    CASES,
    SECONDS_A_SAMPLE,
    SLOW_SECONDS,
    TAIL_SECONDS,
    ClusterCase,
)
from bench.scripts.decisions.simulated import REPLICAS, SLOW_RANK
from testcluster import release
from testcluster.shell import log_progress
from testing.kubernetes.cluster import KubectlCluster, running_cluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_job_manifest

SETTLE_SECONDS = 15.0
"""Of a job that has just begun: its first steps are slow."""


def main() -> None:
    with running_cluster() as cluster:
        release.install_release()
        with scratch_namespace(cluster) as namespace:
            jobs = [apply_job(cluster, namespace, case) for case in CASES]
            for job, case in zip(jobs, CASES, strict=True):
                job.wait_until_calm(spares=case.spares)
            injected_at = inject_faults(jobs)
            comparisons = [compare_case(job, case, injected_at) for job, case in zip(jobs, CASES, strict=True)]
            remedies = {job.name: [i.get("status", {}).get("remedy") for i in job.list_incidents()] for job in jobs}
    print("\n".join(comparison.description for comparison in comparisons))
    print(json.dumps(build_result(comparisons, remedies)))


def apply_job(cluster: KubectlCluster, namespace: str, case: ClusterCase) -> ClusterJob:
    body = build_job_manifest(
        case.name,
        ["pacekeeper", "run", "testing/scripts/slowed.py"],
        environment={"FOLDER": "/checkpoints", "SECONDS_A_SAMPLE": str(SECONDS_A_SAMPLE)},
        replicas=REPLICAS,
        spares=case.spares,
        checkpoint={"everySteps": 1000, "volumeClaimName": case.name},
    )
    return ClusterJob.apply(cluster, namespace, body)


def inject_faults(jobs: Sequence[ClusterJob]) -> float:
    """All at once. When that was, in seconds since the epoch; returns once all is over."""
    log_progress(f"calm for {SETTLE_SECONDS + CALM_SECONDS:.0f} s")
    time.sleep(SETTLE_SECONDS + CALM_SECONDS)
    injected_at, slow_paths = time.time(), []
    for job, case in zip(jobs, CASES, strict=True):
        slow_paths.append(job.find_checkpoint_folder() / f"seconds-{job.find_worker(SLOW_RANK)}")
        temporary = slow_paths[-1].with_name("new")  # ranks read it all the time
        temporary.write_text(str(case.factor * SECONDS_A_SAMPLE))
        temporary.rename(slow_paths[-1])
    log_progress(f"one worker of each is slow for {SLOW_SECONDS:.0f} s")
    time.sleep(SLOW_SECONDS)
    for path in slow_paths:
        path.unlink()
    log_progress(f"and well again for {TAIL_SECONDS:.0f} s")
    time.sleep(TAIL_SECONDS)
    return injected_at


def compare_case(job: ClusterJob, case: ClusterCase, injected_at: float) -> Compared:
    diaries = [
        (job.find_checkpoint_folder() / f"steps-{rank}").read_text().splitlines(keepends=True)
        for rank in range(REPLICAS)
    ]
    return on_cluster.compare_with_coarse_clock(
        case, {rank: on_cluster.parse_diary(lines) for rank, lines in enumerate(diaries)}, injected_at
    )


def build_result(comparisons: Sequence[Compared], remedies: dict[str, list[str]]) -> dict[str, object]:
    removed = {
        case.name: {"cluster": comparison.there, "coarse": comparison.coarse}
        for case, comparison in zip(CASES, comparisons, strict=True)
    }
    holds = {f"within {MAX_DIFFERENCE:.0%}": all(comparison.agrees for comparison in comparisons)}
    return {"bench": "agreement", "removed": removed, "remedies": remedies, "holds": holds}


if __name__ == "__main__":
    main()

"""What must be true of jobs and nodes whenever all is calm, by the objects in the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pacekeeper_operator.api.names import TAINT_QUARANTINE

Body = Mapping[str, Any]


def check_plan(plan: Body, replicas: int, pods: Sequence[Body]) -> list[str]:
    """What is wrong with a calm job's plan. plan: as the operator has written it."""
    members = plan.get("members", ())
    workers = [member["worker"] for member in members]
    ranks = Counter(rank for member in members for rank in member["ranks"])
    existing = {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}
    return [
        *(f"rank {rank} is held {count} times" for rank, count in ranks.items() if count > 1),
        *(f"{worker} holds ranks, and there is no such pod" for worker in workers if worker not in existing),
        *([f"{len(workers)} workers hold ranks, not {replicas}"] if len(workers) != replicas else []),
        *([] if sorted(ranks) == list(range(len(ranks))) else [f"ranks {sorted(ranks)} leave one out"]),
    ]


def check_nodes(nodes: Sequence[Body], quarantines: Sequence[Body]) -> list[str]:
    named = {quarantine["metadata"]["name"] for quarantine in quarantines}
    active = {
        quarantine["metadata"]["name"]
        for quarantine in quarantines
        if quarantine.get("status", {}).get("phase") == "Active"
    }
    tainted = {
        node["metadata"]["name"]
        for node in nodes
        if any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))
    }
    return [
        *(f"{node} has our taint, and no NodeQuarantine names it" for node in sorted(tainted - named)),
        *(f"{node} is quarantined, and has not our taint" for node in sorted(active - tainted)),
    ]


def check_samples(epochs: Sequence[Sequence[int]], samples: int) -> list[str]:
    """epochs: what all ranks have trained with in each whole one; each is to have every sample once."""
    problems = []
    for number, epoch_samples in enumerate(epochs, start=1):
        counts = Counter(epoch_samples)
        left_out, repeated = samples - len(counts), sum(count - 1 for count in counts.values())
        if left_out or repeated:
            problems.append(f"epoch {number}: {left_out} samples are left out, {repeated} are there again")
    return problems

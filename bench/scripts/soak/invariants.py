"""What must be true of jobs and nodes whenever all is calm, from what anybody can read in the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pacekeeper_operator.api import TAINT_QUARANTINE

Body = Mapping[str, Any]


def check_plan(plan: Body, replicas: int, pods: Sequence[Body]) -> list[str]:
    """What is wrong with a calm job's plan. plan: as the operator has written it."""
    members = plan.get("members", ())
    workers = [member["worker"] for member in members]
    ranks = Counter(rank for member in members for rank in member["ranks"])
    there = {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}
    return [
        *(f"rank {rank} is held {times} times" for rank, times in ranks.items() if times > 1),
        *(f"{worker} holds ranks, and there is no such pod" for worker in workers if worker not in there),
        *([f"{len(workers)} workers hold ranks, not {replicas}"] if len(workers) != replicas else []),
        *([] if sorted(ranks) == list(range(len(ranks))) else [f"ranks {sorted(ranks)} leave one out"]),
    ]


def check_nodes(nodes: Sequence[Body], quarantines: Sequence[Body]) -> list[str]:
    named = {found["metadata"]["name"] for found in quarantines}
    active = {found["metadata"]["name"] for found in quarantines if found.get("status", {}).get("phase") == "Active"}
    tainted = {
        node["metadata"]["name"]
        for node in nodes
        if any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))
    }
    return [
        *(f"{node} has our taint, and no NodeQuarantine says why" for node in sorted(tainted - named)),
        *(f"{node} is quarantined, and has not our taint" for node in sorted(active - tainted)),
    ]


def check_samples(epochs: Sequence[Sequence[int]], samples: int) -> list[str]:
    """epochs: what all ranks have trained with in each whole one; each is to have every sample once."""
    wrong = []
    for number, used in enumerate(epochs, start=1):
        times = Counter(used)
        left_out, again = samples - len(times), sum(its - 1 for its in times.values())
        if left_out or again:
            wrong.append(f"epoch {number}: {left_out} samples are left out, {again} are there again")
    return wrong

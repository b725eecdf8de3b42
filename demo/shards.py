"""The story of shards (`make demo STORY=shards`): a job whose ranks share one model loses a rank, a worker and a node.

What each rank had is kept in memory, and on another node, too. So none of it costs more steps than lie between two
snapshots, and nothing is read from the volume.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from demo import job, kube, story
from demo.faults import Fault, all_faults
from demo.report import Outcome, Report, write
from demo.view import View
from testcluster import cluster
from testcluster.settings import REPOSITORY

FAULTS = ("rank crash", "worker deleted", "node lost")
FROM_MEMORY = ("Memory", "Neighbour")
LEAST_STEPS = 3
"""Behind a snapshot, when a fault is made: its copies are on other nodes by then."""
PATIENCE_SECONDS = 240.0
LOOK_BACK_SECONDS = 120.0
_SNAPSHOT = job.series("pacekeeper_rank_snapshot_step")


def run(out: Path) -> Report:
    """Bring everything up, tell the story, and write the report to `out`."""
    cluster.up()
    chosen = [fault for fault in all_faults() if fault.name in FAULTS]
    with View(len(chosen)) as view:
        story.install(view)
        started = time.time()
        with story.the_job(view, manifest()):
            begun = story.first_step(view)
            outcomes = []
            for fault in chosen:
                story.steady(view, fault.steady_steps, fault.spare)
                outcomes.append(_endure(fault, started, view))
                view.add(outcomes[-1])
            report = story.report(outcomes, story.enough(view), started, begun)
        write(report, out)
    view.finish()
    return report


def manifest() -> str:
    """The demo's job, its model sharded over all ranks."""
    claim, training = yaml.safe_load_all((REPOSITORY / "examples/gpt.yaml").read_text())
    del training["spec"]["minReplicas"]  # a sharded model cannot do without a rank
    training["spec"]["template"]["spec"]["containers"][0]["command"].append("--shard")
    found: str = yaml.safe_dump_all([claim, training])
    return found


def _endure(fault: Fault, started: float, view: View) -> Outcome:
    """Healed is what has cost no more steps than lie between two snapshots, and has read nothing from the volume."""
    interval = _between_snapshots(view)
    outcome = story.endure(fault, started, view)
    origin = restored_from(kube.get("incident", outcome.incident, job.NAMESPACE)) if outcome.incident else ""
    return judged(outcome, interval, origin)


def judged(outcome: Outcome, interval: int, origin: str) -> Outcome:
    cheap = outcome.steps_lost is not None and outcome.steps_lost <= interval
    words = f"{outcome.gain}, from {origin or 'nowhere'}; a snapshot each {interval} steps"
    return replace(outcome, healed=outcome.healed and cheap and origin in FROM_MEMORY, gain=words)


def restored_from(incident: dict[str, Any] | None) -> str:
    """Where the state came from of the rank that had to go farthest; "": nobody has told."""
    restart = (incident or {}).get("status", {}).get("restart") or {}
    return str(restart.get("restoredFrom", ""))


def _between_snapshots(view: View) -> int:
    """Waits until all shards were kept twice in this round, and steps have been made since; returns the steps between
    the two."""
    view.say("until snapshots are with the neighbours …")

    def found() -> int:
        now = story.watch(view)
        if now is None or now.ended:
            raise kube.DemoError(f"the job is {now.phase if now else 'gone'}, too early for the next fault")
        return interval_of(_snapshots(), job.live_step())

    return kube.wait_for(found, PATIENCE_SECONDS, "two snapshots of all shards")


def interval_of(kept: list[int], step: int) -> int:
    """Steps between the newest two of the snapshots `kept`, if the job is some steps behind the newest; otherwise 0.

    kept: steps that the snapshots are of, the newest last. A round that has gone back keeps them anew.
    """
    if len(kept) < 2 or kept[-1] <= kept[-2] or step < kept[-1] + LEAST_STEPS:
        return 0
    return kept[-1] - kept[-2]


def _snapshots() -> list[int]:
    """Steps of those that all ranks have had lately."""
    now = time.time()
    return of_this_round([int(step) for _, step in kube.curve(f"min({_SNAPSHOT})", now - LOOK_BACK_SECONDS, now)])


def of_this_round(seen: list[int]) -> list[int]:
    """Steps of the snapshots that the ranks have had since a round last began: there are none then, or earlier ones."""
    found: list[int] = []
    for step in seen:
        if step <= 0 or (found and step < found[-1]):
            found.clear()
        if step > 0 and step not in found:
            found.append(step)
    return found

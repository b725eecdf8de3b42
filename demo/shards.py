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
SNAPSHOT_EVERY, COPY_STEPS = 20, 4
"""Steps; and so many later, a snapshot's copies are on other nodes."""
PATIENCE_SECONDS = 240.0
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
    command = training["spec"]["template"]["spec"]["containers"][0]["command"]
    command += ["--snapshot-every", str(SNAPSHOT_EVERY), "--shard"]
    found: str = yaml.safe_dump_all([claim, training])
    return found


def _endure(fault: Fault, started: float, view: View) -> Outcome:
    """Healed is what has cost no more steps than lie between two snapshots, and has read nothing from the volume."""
    _behind_a_snapshot(view)
    outcome = story.endure(fault, started, view)
    return judged(outcome, restored_from(kube.get("incidents", outcome.incident, job.NAMESPACE) or {}))


def judged(outcome: Outcome, origin: str) -> Outcome:
    """`origin`: where the state came from."""
    cheap = outcome.steps_lost is not None and outcome.steps_lost <= SNAPSHOT_EVERY
    healed = outcome.healed and cheap and origin in FROM_MEMORY
    return replace(outcome, healed=healed, gain=f"{outcome.gain}, from {origin or 'nowhere'}")


def restored_from(incident: dict[str, Any]) -> str:
    """Where the state came from of the rank that had to go farthest; "": nobody has told."""
    restart = incident.get("status", {}).get("restart") or {}
    return str(restart.get("restoredFrom", ""))


def _behind_a_snapshot(view: View) -> None:
    """Waits until all ranks have one whose copies are on other nodes by now, and the next one is some steps away."""
    view.say("until a snapshot is with the neighbours …")

    def found() -> bool:
        now = story.watch(view)
        if now is None or now.ended:
            raise kube.DemoError(f"the job is {now.phase if now else 'gone'}, too early for the next fault")
        kept = kube.query(f"min({_SNAPSHOT})")
        return bool(kept) and is_behind(int(float(kept[0]["value"][1])), job.live_step())

    kube.wait_for(found, PATIENCE_SECONDS, "a snapshot of all shards")


def is_behind(kept: int, step: int) -> bool:
    """kept: of which step the newest snapshot is; below 1 there is none."""
    return kept > 0 and COPY_STEPS <= step - kept <= SNAPSHOT_EVERY // 2

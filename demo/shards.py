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
from demo.faults import DemoFault, list_faults
from demo.report import FaultOutcome, DemoReport, write_report
from demo.view import DemoView
from testcluster import cluster
from testcluster.settings import REPOSITORY

FAULTS = ("rank crash", "worker deleted", "node lost")
MEMORY_SOURCES = ("Memory", "Neighbour")
SNAPSHOT_EVERY, COPY_STEPS = 20, 4
"""Steps; and so many later, a snapshot's copies are on other nodes."""
SNAPSHOT_WAIT_SECONDS = 240.0
_SNAPSHOT = job.build_series_selector("pacekeeper_rank_snapshot_step")


def run_shards_demo(out: Path) -> DemoReport:
    """Bring everything up, tell the story, and write the report to `out`."""
    cluster.bring_up()
    chosen = [fault for fault in list_faults() if fault.name in FAULTS]
    with DemoView(len(chosen)) as view:
        story.install_pacekeeper(view)
        started = time.time()
        with story.create_job(view, build_manifest()):
            begun = story.wait_for_first_step(view)
            outcomes = []
            for fault in chosen:
                story.wait_until_steady(view, fault.steady_steps, fault.spare)
                outcomes.append(_make_and_judge_fault(fault, started, view))
                view.add(outcomes[-1])
            report = story.build_report(outcomes, story.finish_job(view), started, begun)
        write_report(report, out)
    view.finish()
    return report


def build_manifest() -> str:
    """The demo's job, its model sharded over all ranks."""
    claim, training = yaml.safe_load_all((REPOSITORY / "examples/gpt.yaml").read_text())
    del training["spec"]["minReplicas"]  # a sharded model cannot do without a rank
    command = training["spec"]["template"]["spec"]["containers"][0]["command"]
    command += ["--snapshot-every", str(SNAPSHOT_EVERY), "--shard"]
    found: str = yaml.safe_dump_all([claim, training])
    return found


def _make_and_judge_fault(fault: DemoFault, started: float, view: DemoView) -> FaultOutcome:
    """Healed is what has cost no more steps than lie between two snapshots, and has read nothing from the volume."""
    _wait_for_snapshot(view)
    outcome = story.make_fault(fault, started, view)
    return judge_outcome(outcome, get_restore_source(kube.get_object("incidents", outcome.incident, job.NAMESPACE) or {}))


def judge_outcome(outcome: FaultOutcome, origin: str) -> FaultOutcome:
    """`origin`: where the state came from."""
    cheap = outcome.steps_lost is not None and outcome.steps_lost <= SNAPSHOT_EVERY
    healed = outcome.healed and cheap and origin in MEMORY_SOURCES
    return replace(outcome, healed=healed, gain=f"{outcome.gain}, from {origin or 'nowhere'}")


def get_restore_source(incident: dict[str, Any]) -> str:
    """Where the state came from of the rank that had to go farthest; "": nobody has told."""
    restart = incident.get("status", {}).get("restart") or {}
    return str(restart.get("restoredFrom", ""))


def _wait_for_snapshot(view: DemoView) -> None:
    """Waits until all ranks have one whose copies are on other nodes by now, and the next one is some steps away."""
    view.log_message("until a snapshot is with the neighbours …")

    def found() -> bool:
        now = story.refresh_view(view)
        if now is None or now.has_ended:
            raise kube.DemoError(f"the job is {now.phase if now else 'gone'}, too early for the next fault")
        kept = kube.query_prometheus(f"min({_SNAPSHOT})")
        return bool(kept) and is_past_snapshot(int(float(kept[0]["value"][1])), job.read_live_step())

    kube.wait_for(found, SNAPSHOT_WAIT_SECONDS, "a snapshot of all shards")


def is_past_snapshot(snapshot_step: int, step: int) -> bool:
    """kept: of which step the newest snapshot is; below 1 there is none."""
    return snapshot_step > 0 and COPY_STEPS <= step - snapshot_step <= SNAPSHOT_EVERY // 2

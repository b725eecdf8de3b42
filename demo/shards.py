"""The shards scenario (`make demo SCENARIO=shards`): a job with a sharded model loses a rank, a worker, and a node.

Each rank's state is kept in memory, and on another node, too. So no fault costs more steps than there are between two
snapshots, and nothing is read from the volume.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from demo import fault_demo, job, kube
from demo.faults import DemoFault, list_faults
from demo.report import DemoReport, FaultOutcome, write_report
from demo.view import DemoView
from testcluster import cluster
from testcluster.settings import REPOSITORY

FAULTS = ("rank crash", "worker deleted", "node lost")
MEMORY_SOURCES = ("Memory", "Peer")
SNAPSHOT_EVERY, COPY_STEPS = 20, 4
"""Steps between snapshots, and steps after which a snapshot's copies are on other nodes."""
SNAPSHOT_WAIT_SECONDS = 240.0
_SNAPSHOT = job.build_series_selector("pacekeeper_rank_snapshot_step")


def run_shards_demo(out: Path) -> DemoReport:
    """Bring everything up, run the scenario, and write the report to `out`."""
    cluster.bring_up()
    faults = [fault for fault in list_faults() if fault.name in FAULTS]
    with DemoView(len(faults)) as view:
        fault_demo.install_pacekeeper(view)
        started = time.time()
        with fault_demo.create_job(view, build_manifest()):
            training_started = fault_demo.wait_for_first_step(view)
            outcomes = []
            for fault in faults:
                fault_demo.wait_until_steady(view, fault.steady_steps, fault.spare)
                outcomes.append(_inject_and_check_fault(fault, started, view))
                view.add(outcomes[-1])
            report = fault_demo.build_report(outcomes, fault_demo.finish_job(view), started, training_started)
        write_report(report, out)
    view.finish()
    return report


def build_manifest() -> str:
    """Build the demo's job with its model sharded over all ranks."""
    claim, training_job = yaml.safe_load_all((REPOSITORY / "examples/gpt.yaml").read_text())
    del training_job["spec"]["minReplicas"]  # a sharded model cannot do without a rank
    command = training_job["spec"]["template"]["spec"]["containers"][0]["command"]
    command += ["--snapshot-every", str(SNAPSHOT_EVERY), "--shard"]
    manifest: str = yaml.safe_dump_all([claim, training_job])
    return manifest


def _inject_and_check_fault(fault: DemoFault, started: float, view: DemoView) -> FaultOutcome:
    """Inject and check a fault: at most the steps between two snapshots are lost, and no read from the volume."""
    _wait_for_snapshot(view)
    outcome = fault_demo.make_fault(fault, started, view)
    return check_outcome(
        outcome, get_restore_source(kube.get_object("incidents", outcome.incident, job.NAMESPACE) or {})
    )


def check_outcome(outcome: FaultOutcome, restore_source: str) -> FaultOutcome:
    """Check an outcome. `restore_source`: where the state came from."""
    cheap = outcome.steps_lost is not None and outcome.steps_lost <= SNAPSHOT_EVERY
    healed = outcome.healed and cheap and restore_source in MEMORY_SOURCES
    return replace(outcome, healed=healed, gain=f"{outcome.gain}, from {restore_source or 'nowhere'}")


def get_restore_source(incident: dict[str, Any]) -> str:
    """Return where the state of the rank with the farthest source came from; "": it was not reported."""
    restart = incident.get("status", {}).get("restart") or {}
    return str(restart.get("restoredFrom", ""))


def _wait_for_snapshot(view: DemoView) -> None:
    """Wait until all ranks' newest snapshot has copies on other nodes, and the next one is some steps away."""
    view.log_message("waiting until the peer replicas have a snapshot …")

    def found() -> bool:
        status = fault_demo.refresh_view(view)
        if status is None or status.has_ended:
            raise kube.DemoError(f"the job is {status.phase if status else 'gone'}, too early for the next fault")
        series = kube.query_prometheus(f"min({_SNAPSHOT})")
        return bool(series) and is_past_snapshot(int(float(series[0]["value"][1])), job.read_live_step())

    kube.wait_for(found, SNAPSHOT_WAIT_SECONDS, "a snapshot of all shards")


def is_past_snapshot(snapshot_step: int, step: int) -> bool:
    """Return whether the step is a good time for a fault. `snapshot_step`: of the newest snapshot; below 1: none."""
    return snapshot_step > 0 and COPY_STEPS <= step - snapshot_step <= SNAPSHOT_EVERY // 2

"""The traffic scenario (`make demo SCENARIO=traffic`): two jobs share links of a network that has capacity for both.

Its leaves and spines are real, and choose among equal routes by a hash, as switches do. First, traffic is not planned.
Then there is a `Fabric`, and the operator separates the jobs' routes. A link between a leaf and a spine becomes slow:
another route is the remedy. A node's only link becomes slow: there is no other route, so the ranks synchronize less
often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from demo import fabric, fault_demo, job, kube
from demo.faults import DemoFault
from demo.job import DemoJobStatus
from demo.report import Curve, DemoReport, FaultOutcome, write_report
from demo.view import DemoView
from pacekeeper_analysis.fabric.view import FabricView
from testcluster import cluster, faults, placement
from testcluster import fabric as network
from testcluster.settings import REPOSITORY

NODES = {job.NAME: ("node-1", "node-2"), "other": ("node-4", "node-5")}
"""Nodes of each job: one below leaf l1, one below l2."""
FLOWS = 4
RATE, SLOW, NODE_SLOW_RATE = "50mbit", "10mbit", "8mbit"
"""Rates of links: normal, of a slow link between a leaf and a spine, and of a slow node."""
TRAFFIC_SCRIPT_ARGUMENTS = {"--global-batch": 16, "--context": 64, "--width": 128}
"""Little work and large gradients: what steps wait for are the links."""
DETECTION = {"windowSteps": 8, "stragglerSlowdown": 1.5}
"""Four ranks on two processors disturb each other by less than this."""
MAX_RECOVERED_STEP_RATIO, MAX_RECOVERY_SECONDS, SMOOTHING_SECONDS = 1.1, 20.0, 5
"""Recovery: factor of the step time on separate routes, maximum seconds until it is reached, and seconds of the
median's window, because single steps vary on a machine with few processors."""
MAX_HASH_DRAWS = 20
STEADY_STEPS, STEADY_SECONDS, END_SECONDS = 12, 120.0, 120.0


def run_traffic_demo(out: Path) -> DemoReport:
    """Bring everything up, run the scenario, and write the report to `out`."""
    cluster.bring_up(ports=1)
    try:
        faults.shape_uplinks(RATE)
        with DemoView(3) as view:
            fault_demo.install_pacekeeper(view)
            started = time.time()
            with _create_jobs(view):
                progress = _DemoProgress(view, started)
                _wait_until_steady(view)
                before = _redraw_until_collision(view)
                progress.run_fault(DemoFault("flows share a link", "hashing", _CAUSES, ("PlanTraffic",), _apply_fabric))
                _wait_until_steady(view)
                after = fabric.measure_links(FLOWS)
                progress.run_fault(
                    DemoFault("slow link of a spine", "tc tbf", _CAUSES, ("PlanTraffic",), _slow_used_spine),
                    must_recover_soon=True,
                )
                _wait_until_steady(view)
                progress.run_fault(
                    DemoFault(
                        "slow link of a node", "tc tbf", _CAUSES, ("LocalSGD",), _slow_node_links, _heal_node_links
                    )
                )
                report = _build_report(progress, _finish_jobs(view), (before, after))
            write_report(report, out)
        view.finish()
    finally:
        cluster.bring_up(ports=0)
    return report


_CAUSES = ("slow-communication",)


@dataclass
class _DemoProgress:
    """The scenario's progress."""

    view: DemoView
    started: float
    outcomes: list[FaultOutcome] = field(default_factory=list)

    def run_fault(self, fault: DemoFault, *, must_recover_soon: bool = False) -> None:
        """Run a fault. `must_recover_soon`: it counts as healed only if steps are as short as before, and in time."""
        outcome = fault_demo.make_fault(fault, self.started, self.view)
        self.outcomes.append(self._measure_recovery(outcome) if must_recover_soon else outcome)
        self.view.add(self.outcomes[-1])

    def _measure_recovery(self, outcome: FaultOutcome) -> FaultOutcome:
        injected_at = self.started + outcome.injected_at
        time.sleep(max(0.0, injected_at + MAX_RECOVERY_SECONDS + SMOOTHING_SECONDS - time.time()))
        recovery = max(_measure_recovery_seconds(name, injected_at) for name in NODES)
        summary = f"steps as before after {recovery:.0f} s" if recovery < math.inf else "steps longer than before"
        return replace(
            outcome, healed=outcome.healed and 0 < recovery <= MAX_RECOVERY_SECONDS, gain=f"{outcome.gain}, {summary}"
        )


@contextmanager
def _create_jobs(view: DemoView) -> Iterator[None]:
    """Create two jobs, and wait until they train. Afterwards, delete them and the `Fabric`."""
    _clean_up()
    kube.run_kubectl("create", "namespace", job.NAMESPACE)
    for name in NODES:
        view.log_message(f"kubectl apply: job {name}, two ranks, on {' and '.join(NODES[name])}")
        kube.run_kubectl("apply", "-n", job.NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(build_manifests(name)))
    try:
        kube.wait_for(
            lambda: all(_is_training(view, name) for name in NODES), fault_demo.STEADY_SECONDS, "the first steps"
        )
        yield
    finally:
        _clean_up()


def _clean_up() -> None:
    fault_demo.clean_up()
    kube.run_kubectl("delete", "fabric", network.NAME, "--ignore-not-found")


def build_manifests(name: str) -> list[dict[str, Any]]:
    """Build the demo's job, smaller, on its nodes."""
    claim, training_job = yaml.safe_load_all((REPOSITORY / "examples/gpt.yaml").read_text())
    claim["metadata"]["name"] = f"{name}-checkpoints"
    training_job["metadata"]["name"] = name
    spec: dict[str, Any] = training_job["spec"]
    del spec["minReplicas"]  # no worker is lost in this scenario
    spec |= {"replicas": len(NODES[name]), "spares": 0, "detection": DETECTION}
    spec["checkpoint"]["volumeClaimName"] = claim["metadata"]["name"]
    pod_spec = spec["template"]["spec"]
    command = pod_spec["containers"][0]["command"]
    for option, value in TRAFFIC_SCRIPT_ARGUMENTS.items():
        command[command.index(option) + 1] = str(value)
    pod_spec |= placement.spread_over_nodes(name, NODES[name])
    return [claim, training_job]


def _is_training(view: DemoView, name: str) -> bool:
    fault_demo.refresh_view(view)
    status = DemoJobStatus.read(name)
    return status is not None and status.phase == "Running" and job.read_live_step(name) > 0


def _wait_until_steady(view: DemoView) -> None:
    """Wait until both jobs have trained undisturbed for a while, and no incident is open."""
    view.log_message("training undisturbed …")
    first_steps: dict[str, int] = {}

    def undisturbed() -> bool:
        fault_demo.refresh_view(view)
        steps = {name: job.read_live_step(name) for name in NODES}
        disturbed = min(steps.values()) < 0 or any(map(fault_demo.is_open, job.list_incidents()))
        if disturbed or any(steps[name] < first_steps.get(name, 0) for name in NODES):
            first_steps.clear()
            return False
        for name, step in steps.items():
            first_steps.setdefault(name, step)
        return all(steps[name] >= first_steps[name] + STEADY_STEPS for name in NODES)

    kube.wait_for(undisturbed, STEADY_SECONDS, f"{STEADY_STEPS} steps without a disturbance")


def _redraw_until_collision(view: DemoView) -> FabricView:
    """Redraw the leaves' hashes until both jobs share a spine in at least one direction, as in every other draw."""
    for seed in range(MAX_HASH_DRAWS):
        faults.reseed_hashes(seed)
        fabric_view = fabric.measure_links(FLOWS)
        if any(len(fabric.find_busy_spines(fabric_view, leaf)) == 1 for leaf in ("l1", "l2")):
            view.log_message(f"leaves boot, and hash both jobs' flows onto one spine: {_format_step_times()}")
            return fabric_view
    raise kube.DemoError(f"hashing has kept the jobs apart {MAX_HASH_DRAWS} times")


def _apply_fabric() -> str:
    kube.run_kubectl("apply", "-f", "-", stdin=yaml.safe_dump(network.build_manifest()))
    return f"kubectl apply: a Fabric, so that flows are planned; {_format_step_times()}"


def _slow_used_spine() -> str:
    """Slow the link to the spine over which the first job's rank 0 sends."""
    paths = job.read_plan().paths
    spine = next((path.spine for path in paths.wanted if path.source == 0), "") if paths else ""
    if not spine:
        raise kube.DemoError("the plan names no route for what rank 0 sends")
    faults.slow_uplink(network.get_leaf(job.find_node(job.find_worker_of_rank(0))), spine, SLOW)
    return f"link to {spine} slowed from {RATE} to {SLOW}, by which rank 0 of {job.NAME} sends"


def _slow_node_links() -> str:
    node = NODES[job.NAME][1]
    faults.slow_link(node, NODE_SLOW_RATE)
    return f"all links of {node} slowed to {NODE_SLOW_RATE}, which runs rank 1 of {job.NAME}"


def _heal_node_links() -> None:
    faults.clear_link(NODES[job.NAME][1])


def _format_step_times() -> str:
    """Format the jobs' step times for the log."""
    step_times = {name: job.read_step_seconds(name) for name in NODES}
    return ", ".join(
        f"steps of {name} take {seconds:.2f} s" for name, seconds in step_times.items() if seconds is not None
    )


def _finish_jobs(view: DemoView) -> list[DemoJobStatus]:
    """End both jobs after their next evaluation, on healthy links."""
    _heal_node_links()
    view.log_message("; ".join(f"{name} ends: {job.stop_script(name)}" for name in NODES))

    def ended() -> list[DemoJobStatus]:
        fault_demo.refresh_view(view)
        statuses = [status for name in NODES if (status := DemoJobStatus.read(name)) is not None]
        return statuses if len(statuses) == len(NODES) and all(status.has_ended for status in statuses) else []

    return kube.wait_for(ended, END_SECONDS, "the jobs' end")


def _measure_recovery_seconds(name: str, injected_at: float) -> float:
    previous_seconds = median(
        seconds
        for _, seconds in kube.query_curve(_build_step_query(name), injected_at - 2 * SMOOTHING_SECONDS, injected_at)
    )
    return compute_recovery_seconds(
        kube.query_curve(_build_step_query(name), injected_at, time.time()), previous_seconds
    )


def compute_recovery_seconds(step_times: Sequence[tuple[float, float]], before: float) -> float:
    """Return the seconds until steps are as short as `before` a fault, and mostly stay so.

    0: they always were; infinite: they are not. `step_times`: (seconds since the fault, seconds of a step). A short
    lack of CPU time does not count.
    """
    smooth = [
        median(seconds for _, seconds in step_times[index : index + SMOOTHING_SECONDS])
        for index in range(len(step_times) - SMOOTHING_SECONDS + 1)
    ]
    limit = MAX_RECOVERED_STEP_RATIO * before
    if all(seconds <= limit for seconds in smooth):
        return 0.0
    first_slow = next(index for index, seconds in enumerate(smooth) if seconds > limit)
    for index in range(first_slow, len(smooth)):
        if smooth[index] <= limit and median(smooth[index:]) <= limit:
            return step_times[index + SMOOTHING_SECONDS // 2][0]
    return math.inf


def _build_report(
    progress: _DemoProgress, jobs: Sequence[DemoJobStatus], fabrics: tuple[FabricView, FabricView]
) -> DemoReport:
    now = time.time()
    curves: dict[str, Curve] = {
        f"Step time of job {name} (s)": kube.query_curve(_build_step_query(name), progress.started, now)
        for name in NODES
    }
    return DemoReport(
        outcomes=tuple(progress.outcomes),
        phase=next((status.phase for status in jobs if status.phase != "Complete"), "Complete"),
        steps=sum(status.step for status in jobs),
        seconds=now - progress.started,
        loss_before=None,
        loss_after=None,
        curves=curves,
        fabrics=fabrics,
    )


def _build_step_query(name: str) -> str:
    return f"avg({job.build_series_selector(job.STEP_SECONDS_METRIC, name)})"

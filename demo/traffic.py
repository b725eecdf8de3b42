"""The story of traffic (`make demo STORY=traffic`): two jobs share links of a network that has room for both.

Its leaves and spines are real, and choose among equal ways by a hash, as switches do. First nobody plans; then there is
a `Fabric`, and the operator leads the jobs apart. A link between a leaf and a spine becomes slow: another way is the
remedy. A node's only link becomes slow: there is none, so the ranks synchronise less often.
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

from demo import fabric, job, kube, story
from demo.faults import DemoFault
from demo.job import DemoJobStatus
from demo.report import Curve, FaultOutcome, DemoReport, write_report
from demo.view import DemoView
from pacekeeper_analysis.fabric.view import FabricView
from testcluster import cluster, faults, placement
from testcluster import fabric as network
from testcluster.settings import REPOSITORY

NODES = {job.NAME: ("node-1", "node-2"), "other": ("node-4", "node-5")}
"""Of each job: one below leaf l1, one below l2."""
FLOWS = 4
RATE, SLOW, NODE_SLOW_RATE = "50mbit", "10mbit", "8mbit"
"""Of links: as they are built, of one between a leaf and a spine that has become slow, and of a node's."""
BATCH = 16
DETECTION = {"windowSteps": 8, "stragglerSlowdown": 1.5}
"""Four ranks on two processors disturb each other by less."""
MAX_RECOVERED_STEP_RATIO, MAX_RECOVERY_SECONDS, SMOOTHING_SECONDS = 1.1, 20.0, 5
"""× the time of a step that a job has on ways of its own, how soon it has that again, and of how many seconds
the median counts, since single steps vary on a machine with few processors."""
MAX_HASH_DRAWS = 20
STEADY_STEPS, STEADY_SECONDS, END_SECONDS = 12, 120.0, 120.0


def run_traffic_demo(out: Path) -> DemoReport:
    """Bring everything up, tell the story, and write the report to `out`."""
    cluster.bring_up(ports=1)
    try:
        faults.shape_uplinks(RATE)
        with DemoView(3) as view:
            story.install_pacekeeper(view)
            started = time.time()
            with _create_jobs(view):
                told = _DemoProgress(view, started)
                _wait_until_steady(view)
                before = _redraw_until_collision(view)
                told.run_fault(DemoFault("flows share a link", "hashing", _CAUSES, ("PlanTraffic",), _apply_fabric))
                _wait_until_steady(view)
                after = fabric.measure_links(FLOWS)
                told.run_fault(DemoFault("slow link of a spine", "tc tbf", _CAUSES, ("PlanTraffic",), _slow_used_spine), must_recover_soon=True)
                _wait_until_steady(view)
                told.run_fault(DemoFault("slow link of a node", "tc tbf", _CAUSES, ("LocalSGD",), _slow_node_links, _heal_node_links))
                report = _build_report(told, _finish_jobs(view), (before, after))
            write_report(report, out)
        view.finish()
    finally:
        cluster.bring_up(ports=0)
    return report


_CAUSES = ("slow-communication",)


@dataclass
class _DemoProgress:
    """The story so far."""

    view: DemoView
    started: float
    outcomes: list[FaultOutcome] = field(default_factory=list)

    def run_fault(self, fault: DemoFault, *, must_recover_soon: bool = False) -> None:
        """`soon`: healed is only what has steps as short again as before, and in time."""
        outcome = story.make_fault(fault, self.started, self.view)
        self.outcomes.append(self._measure_recovery(outcome) if must_recover_soon else outcome)
        self.view.add(self.outcomes[-1])

    def _measure_recovery(self, outcome: FaultOutcome) -> FaultOutcome:
        at = self.started + outcome.injected_at
        time.sleep(max(0.0, at + MAX_RECOVERY_SECONDS + SMOOTHING_SECONDS - time.time()))
        back = max(_measure_recovery_seconds(name, at) for name in NODES)
        words = f"steps as before after {back:.0f} s" if back < math.inf else "steps longer than before"
        return replace(outcome, healed=outcome.healed and 0 < back <= MAX_RECOVERY_SECONDS, gain=f"{outcome.gain}, {words}")


@contextmanager
def _create_jobs(view: DemoView) -> Iterator[None]:
    """Two that train; afterwards they and the `Fabric` are gone."""
    _clean_up()
    kube.run_kubectl("create", "namespace", job.NAMESPACE)
    for name in NODES:
        view.log_message(f"kubectl apply: job {name}, two ranks, on {' and '.join(NODES[name])}")
        kube.run_kubectl("apply", "-n", job.NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(build_manifests(name)))
    try:
        kube.wait_for(lambda: all(_is_training(view, name) for name in NODES), story.STEADY_SECONDS, "the first steps")
        yield
    finally:
        _clean_up()


def _clean_up() -> None:
    story.clean_up()
    kube.run_kubectl("delete", "fabric", network.NAME, "--ignore-not-found")


def build_manifests(name: str) -> list[dict[str, Any]]:
    """The demo's job, small, on the nodes that are meant for it."""
    claim, training = yaml.safe_load_all((REPOSITORY / "examples/gpt.yaml").read_text())
    claim["metadata"]["name"] = f"{name}-checkpoints"
    training["metadata"]["name"] = name
    spec: dict[str, Any] = training["spec"]
    del spec["minReplicas"]  # nobody is lost in this story
    spec |= {"replicas": len(NODES[name]), "spares": 0, "detection": DETECTION}
    spec["checkpoint"]["volumeClaimName"] = claim["metadata"]["name"]
    pod = spec["template"]["spec"]
    command = pod["containers"][0]["command"]
    command[command.index("--global-batch") + 1] = str(BATCH)
    pod |= placement.spread_over_nodes(name, NODES[name])
    return [claim, training]


def _is_training(view: DemoView, name: str) -> bool:
    story.refresh_view(view)
    found = DemoJobStatus.read(name)
    return found is not None and found.phase == "Running" and job.read_live_step(name) > 0


def _wait_until_steady(view: DemoView) -> None:
    """Both jobs train undisturbed for a while, and nothing is open."""
    view.log_message("training undisturbed …")
    since: dict[str, int] = {}

    def undisturbed() -> bool:
        story.refresh_view(view)
        steps = {name: job.read_live_step(name) for name in NODES}
        disturbed = min(steps.values()) < 0 or any(map(story.is_open, job.list_incidents()))
        if disturbed or any(steps[name] < since.get(name, 0) for name in NODES):
            since.clear()
            return False
        for name, step in steps.items():
            since.setdefault(name, step)
        return all(steps[name] >= since[name] + STEADY_STEPS for name in NODES)

    kube.wait_for(undisturbed, STEADY_SECONDS, f"{STEADY_STEPS} steps without a disturbance")


def _redraw_until_collision(view: DemoView) -> FabricView:
    """The leaves' hashes are drawn until both jobs send by one spine at least one way, as every other draw has it."""
    for draw in range(MAX_HASH_DRAWS):
        faults.reseed_hashes(draw)
        seen = fabric.measure_links(FLOWS)
        if any(len(fabric.find_busy_spines(seen, leaf)) == 1 for leaf in ("l1", "l2")):
            view.log_message(f"leaves boot, and hash both jobs' flows onto one spine: {_format_step_times()}")
            return seen
    raise kube.DemoError(f"hashing has kept the jobs apart {MAX_HASH_DRAWS} times")


def _apply_fabric() -> str:
    kube.run_kubectl("apply", "-f", "-", stdin=yaml.safe_dump(network.build_manifest()))
    return f"kubectl apply: a Fabric, so that flows are planned; {_format_step_times()}"


def _slow_used_spine() -> str:
    """The one that the first job's rank 0 sends by."""
    paths = job.read_plan().paths
    spine = next((path.spine for path in paths.wanted if path.source == 0), "") if paths else ""
    if not spine:
        raise kube.DemoError("the plan names no way for what rank 0 sends")
    faults.slow_uplink(network.get_leaf(job.find_node(job.find_worker_of_rank(0))), spine, SLOW)
    return f"link to {spine} slowed from {RATE} to {SLOW}, by which rank 0 of {job.NAME} sends"


def _slow_node_links() -> str:
    node = NODES[job.NAME][1]
    faults.slow_link(node, NODE_SLOW_RATE)
    return f"all links of {node} slowed to {NODE_SLOW_RATE}, which runs rank 1 of {job.NAME}"


def _heal_node_links() -> None:
    faults.clear_link(NODES[job.NAME][1])


def _format_step_times() -> str:
    """For people."""
    paces = {name: job.read_step_seconds(name) for name in NODES}
    return ", ".join(f"steps of {name} take {pace:.2f} s" for name, pace in paces.items() if pace is not None)


def _finish_jobs(view: DemoView) -> list[DemoJobStatus]:
    """Both jobs behind their next evaluation, on links that are well."""
    _heal_node_links()
    view.log_message("; ".join(f"{name} ends: {job.stop_script(name)}" for name in NODES))

    def ended() -> list[DemoJobStatus]:
        story.refresh_view(view)
        found = [one for name in NODES if (one := DemoJobStatus.read(name)) is not None]
        return found if len(found) == len(NODES) and all(one.has_ended for one in found) else []

    return kube.wait_for(ended, END_SECONDS, "the jobs' end")


def _measure_recovery_seconds(name: str, at: float) -> float:
    before = median(pace for _, pace in kube.query_curve(_build_step_query(name), at - 2 * SMOOTHING_SECONDS, at))
    return compute_recovery_seconds(kube.query_curve(_build_step_query(name), at, time.time()), before)


def compute_recovery_seconds(step_times: Sequence[tuple[float, float]], before: float) -> float:
    """Seconds until steps are as short as `before` a fault, and stay so on the whole; 0: they always were, infinite:
    they are not. `pace`: (seconds since the fault, seconds of a step). A processor taken away for a moment undoes
    nothing."""
    smooth = [median(seconds for _, seconds in step_times[place : place + SMOOTHING_SECONDS]) for place in range(len(step_times) - SMOOTHING_SECONDS + 1)]
    most = MAX_RECOVERED_STEP_RATIO * before
    if all(seconds <= most for seconds in smooth):
        return 0.0
    slowed = next(place for place, seconds in enumerate(smooth) if seconds > most)
    for place in range(slowed, len(smooth)):
        if smooth[place] <= most and median(smooth[place:]) <= most:
            return step_times[place + SMOOTHING_SECONDS // 2][0]
    return math.inf


def _build_report(progress: _DemoProgress, jobs: Sequence[DemoJobStatus], fabrics: tuple[FabricView, FabricView]) -> DemoReport:
    now = time.time()
    curves: dict[str, Curve] = {
        f"Step time of job {name} (s)": kube.query_curve(_build_step_query(name), progress.started, now) for name in NODES
    }
    return DemoReport(
        outcomes=tuple(progress.outcomes),
        phase=next((one.phase for one in jobs if one.phase != "Complete"), "Complete"),
        steps=sum(one.step for one in jobs),
        seconds=now - progress.started,
        loss_before=None,
        loss_after=None,
        curves=curves,
        fabrics=fabrics,
    )


def _build_step_query(name: str) -> str:
    return f"avg({job.build_series_selector(job.STEP_SECONDS_METRIC, name)})"

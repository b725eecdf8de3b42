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
from demo.faults import Fault
from demo.job import Job
from demo.report import Curve, Outcome, Report, write
from demo.view import View
from pacekeeper_analysis.fabric.view import FabricView
from testcluster import cluster, faults, placement
from testcluster import fabric as network
from testcluster.settings import REPOSITORY

NODES = {job.NAME: ("node-1", "node-2"), "other": ("node-4", "node-5")}
"""Of each job: one below leaf l1, one below l2."""
FLOWS = 4
RATE, SLOW, CRAWLING = "50mbit", "10mbit", "8mbit"
"""Of links: as they are built, of one between a leaf and a spine that has become slow, and of a node's."""
BATCH = 16
DETECTION = {"windowSteps": 8, "stragglerSlowdown": 1.5}
"""Four ranks on two processors disturb each other by less."""
BACK, BACK_SECONDS, SMOOTH = 1.1, 20.0, 5
"""× the time of a step that a job has on ways of its own, how soon it has that again, and of how many seconds
the median counts, since single steps vary on a machine with few processors."""
MOST_DRAWS = 20
STEADY_STEPS, STEADY_SECONDS, END_SECONDS = 12, 120.0, 120.0


def run(out: Path) -> Report:
    """Bring everything up, tell the story, and write the report to `out`."""
    cluster.up(ports=1)
    try:
        faults.shape_uplinks(RATE)
        with View(3) as view:
            story.install(view)
            started = time.time()
            with _jobs(view):
                told = _Told(view, started)
                _steady(view)
                before = _collide(view)
                told.of(Fault("flows share a link", "hashing", _CAUSES, ("PlanTraffic",), _plan))
                _steady(view)
                after = fabric.measured(FLOWS)
                told.of(Fault("slow link of a spine", "tc tbf", _CAUSES, ("PlanTraffic",), _slow_spine), soon=True)
                _steady(view)
                told.of(Fault("slow link of a node", "tc tbf", _CAUSES, ("LocalSGD",), _slow_node, _well_node))
                report = _report(told, _end(view), (before, after))
            write(report, out)
        view.finish()
    finally:
        cluster.up(ports=0)
    return report


_CAUSES = ("slow-communication",)


@dataclass
class _Told:
    """The story so far."""

    view: View
    started: float
    outcomes: list[Outcome] = field(default_factory=list)

    def of(self, fault: Fault, *, soon: bool = False) -> None:
        """`soon`: healed is only what has steps as short again as before, and in time."""
        outcome = story.endure(fault, self.started, self.view)
        self.outcomes.append(self._timed(outcome) if soon else outcome)
        self.view.add(self.outcomes[-1])

    def _timed(self, outcome: Outcome) -> Outcome:
        at = self.started + outcome.injected_at
        time.sleep(max(0.0, at + BACK_SECONDS + SMOOTH - time.time()))
        back = max(_back_after(name, at) for name in NODES)
        words = f"steps as before after {back:.0f} s" if back < math.inf else "steps longer than before"
        return replace(outcome, healed=outcome.healed and 0 < back <= BACK_SECONDS, gain=f"{outcome.gain}, {words}")


@contextmanager
def _jobs(view: View) -> Iterator[None]:
    """Two that train; afterwards they and the `Fabric` are gone."""
    _clean_up()
    kube.kubectl("create", "namespace", job.NAMESPACE)
    for name in NODES:
        view.say(f"kubectl apply: job {name}, two ranks, on {' and '.join(NODES[name])}")
        kube.kubectl("apply", "-n", job.NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(manifests(name)))
    try:
        kube.wait_for(lambda: all(_trains(view, name) for name in NODES), story.STEADY_SECONDS, "the first steps")
        yield
    finally:
        _clean_up()


def _clean_up() -> None:
    story.clean_up()
    kube.kubectl("delete", "fabric", network.NAME, "--ignore-not-found")


def manifests(name: str) -> list[dict[str, Any]]:
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
    pod |= placement.apart(name, NODES[name])
    return [claim, training]


def _trains(view: View, name: str) -> bool:
    story.watch(view)
    found = Job.read(name)
    return found is not None and found.phase == "Running" and job.live_step(name) > 0


def _steady(view: View) -> None:
    """Both jobs train undisturbed for a while, and nothing is open."""
    view.say("training undisturbed …")
    since: dict[str, int] = {}

    def undisturbed() -> bool:
        story.watch(view)
        steps = {name: job.live_step(name) for name in NODES}
        disturbed = min(steps.values()) < 0 or any(map(story.is_open, job.incidents()))
        if disturbed or any(steps[name] < since.get(name, 0) for name in NODES):
            since.clear()
            return False
        for name, step in steps.items():
            since.setdefault(name, step)
        return all(steps[name] >= since[name] + STEADY_STEPS for name in NODES)

    kube.wait_for(undisturbed, STEADY_SECONDS, f"{STEADY_STEPS} steps without a disturbance")


def _collide(view: View) -> FabricView:
    """The leaves' hashes are drawn until both jobs send by one spine at least one way, as every other draw has it."""
    for draw in range(MOST_DRAWS):
        faults.rehash(draw)
        seen = fabric.measured(FLOWS)
        if any(len(fabric.busy(seen, leaf)) == 1 for leaf in ("l1", "l2")):
            view.say(f"leaves boot, and hash both jobs' flows onto one spine: {_paces()}")
            return seen
    raise kube.DemoError(f"hashing has kept the jobs apart {MOST_DRAWS} times")


def _plan() -> str:
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(network.manifest()))
    return f"kubectl apply: a Fabric, so that flows are planned; {_paces()}"


def _slow_spine() -> str:
    """The one that the first job's rank 0 sends by."""
    paths = job.plan().paths
    spine = next((path.spine for path in paths.wanted if path.source == 0), "") if paths else ""
    if not spine:
        raise kube.DemoError("the plan names no way for what rank 0 sends")
    faults.slow_uplink(network.leaf_of(job.node_of(job.worker_of_rank(0))), spine, SLOW)
    return f"link to {spine} slowed from {RATE} to {SLOW}, by which rank 0 of {job.NAME} sends"


def _slow_node() -> str:
    node = NODES[job.NAME][1]
    faults.slow_link(node, CRAWLING)
    return f"all links of {node} slowed to {CRAWLING}, which runs rank 1 of {job.NAME}"


def _well_node() -> None:
    faults.clear_link(NODES[job.NAME][1])


def _paces() -> str:
    """For people."""
    paces = {name: job.step_seconds(name) for name in NODES}
    return ", ".join(f"steps of {name} take {pace:.2f} s" for name, pace in paces.items() if pace is not None)


def _end(view: View) -> list[Job]:
    """Both jobs behind their next evaluation, on links that are well."""
    _well_node()
    view.say("; ".join(f"{name} ends: {job.stop(name)}" for name in NODES))

    def ended() -> list[Job]:
        story.watch(view)
        found = [one for name in NODES if (one := Job.read(name)) is not None]
        return found if len(found) == len(NODES) and all(one.ended for one in found) else []

    return kube.wait_for(ended, END_SECONDS, "the jobs' end")


def _back_after(name: str, at: float) -> float:
    before = median(pace for _, pace in kube.curve(_step_of(name), at - 2 * SMOOTH, at))
    return back_after(kube.curve(_step_of(name), at, time.time()), before)


def back_after(pace: Sequence[tuple[float, float]], before: float) -> float:
    """Seconds until steps are as short as `before` a fault, and stay so on the whole; 0: they always were, infinite:
    they are not. `pace`: (seconds since the fault, seconds of a step). A processor taken away for a moment undoes
    nothing."""
    smooth = [median(seconds for _, seconds in pace[place : place + SMOOTH]) for place in range(len(pace) - SMOOTH + 1)]
    most = BACK * before
    if all(seconds <= most for seconds in smooth):
        return 0.0
    slowed = next(place for place, seconds in enumerate(smooth) if seconds > most)
    for place in range(slowed, len(smooth)):
        if smooth[place] <= most and median(smooth[place:]) <= most:
            return pace[place + SMOOTH // 2][0]
    return math.inf


def _report(told: _Told, jobs: Sequence[Job], fabrics: tuple[FabricView, FabricView]) -> Report:
    now = time.time()
    curves: dict[str, Curve] = {
        f"Step time of job {name} (s)": kube.curve(_step_of(name), told.started, now) for name in NODES
    }
    return Report(
        outcomes=tuple(told.outcomes),
        phase=next((one.phase for one in jobs if one.phase != "Complete"), "Complete"),
        steps=sum(one.step for one in jobs),
        seconds=now - told.started,
        loss_before=None,
        loss_after=None,
        curves=curves,
        fabrics=fabrics,
    )


def _step_of(name: str) -> str:
    return f"avg({job.series(job.STEP_SECONDS, name)})"

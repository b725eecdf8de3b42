"""The bench's real half: gloo's all-reduces on a leaf–spine of network namespaces, hashed by ECMP against planned.

Leaves and spines of the kernel's own routing choose among equal paths by a hash of addresses and ports. Each job has
two ranks below two leaves, started by real launchers without privileges. *ECMP* is a plan without paths: the kernel
draws the ports. *Planned* is the operator's joint plan (`decide.traffic`), brought into force by launchers and shim.
Both sides of a seed have the same switches, in turns. A speed is in Mbit/s that each rank sends.

One setting has as many links as all eight jobs have flows: a good plan gives each flow a link of its own. The other
one is oversubscribed.

The simulator computes the same: leaves report which route each flow takes, and `fabric.load` the resulting rate.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from pacekeeper_analysis.fabric.load import compute_flow_rates, compute_link_loads
from pacekeeper_analysis.fabric.topology import Ints, Topology
from pacekeeper_operator.decide.network import paths, traffic
from pacekeeper_operator.state.network import TrafficPlan, Wiring
from testing.network.fabric import create_leaf_spine

from .jobs import FabricJob, Team, start_jobs
from .launchers import ALL_REDUCE_BYTES
from .progress import compute_recovery_seconds
from .switches import Flow, Switches
from .traffic_statistics import Cut, Run, compute_statistics

LINK_RATE = 25e6
"""Bits a second of each link: all uplinks together leave two processors some rest."""
JOB_COUNTS = (2, 4, 8)
"""Of jobs that run at once."""
CUT_JOBS = 2
SETTLE_SECONDS = 1.0
RATE_POLL_SECONDS = 2.0
"""Between two polls of the fabric by the operator (services.fabrics)."""
CUT_RECOVERY_SECONDS = 14.0
ALL_REDUCE_MBIT = ALL_REDUCE_BYTES * 8 / 1e6
"""That each of two ranks sends in an all-reduce."""

MAX_ELSEWHERE_SHARE = 0.02
"""Of the bytes, that may go by links on which no flow is known: acknowledgements, and the launchers' messages."""


@dataclass(frozen=True)
class Sizes:
    seeds: int
    crowded: int  # seeds where there is too little for all
    seconds: float  # of each measurement
    alone: int  # measurements of one job
    cuts: int


FULL, QUICK = Sizes(20, 5, 4.0, 5, 5), Sizes(2, 1, 3.0, 2, 1)


@dataclass(frozen=True)
class Setting:
    """A fabric, and who is where on it."""

    spines: int
    leaves: tuple[tuple[int, int], ...]  # of each job's two ranks

    @property
    def degree(self) -> int:
        """Flows of all jobs that leave, or reach, one leaf at most."""
        return max(Counter(leaf for pair in self.leaves for leaf in pair).values())


ROOMY = Setting(4, ((0, 1), (0, 1), (1, 2), (2, 0), (2, 3), (3, 0), (1, 3), (2, 3)))
"""Two jobs have both leaves in common; of four, three flows at most leave a leaf; of eight, four leave each."""
CROWDED = Setting(3, ((0, 1), (0, 1), (1, 2), (2, 0), (1, 2), (2, 0), (1, 2), (2, 0)))
"""Five or six flows leave each leaf."""


def measure_fabric(sizes: Sizes) -> tuple[dict[str, Any], dict[str, bool]]:
    """Figures, and which goals hold."""
    with _create_bench(ROOMY, sizes) as bench:
        single_speed = bench.measure_single_job()
        _log_progress(f"a single job: {single_speed:.1f} Mbit/s")
        runs = list(bench.iterate_runs(sizes.seeds, JOB_COUNTS))
        cuts = [bench.cut(seed, single_speed) for seed in range(sizes.cuts)]
    with _create_bench(CROWDED, sizes) as bench:
        _log_progress("too few links for all:")
        crowded = list(bench.iterate_runs(sizes.crowded, JOB_COUNTS[-1:]))
    return compute_statistics(single_speed, runs, crowded, cuts)


@contextmanager
def _create_bench(setting: Setting, sizes: Sizes) -> Iterator[Bench]:
    leaves = 1 + max(map(max, setting.leaves))
    with (
        create_leaf_spine(leaves, setting.spines, setting.degree) as fabric,
        start_jobs(fabric, setting.leaves) as team,
    ):
        yield Bench(team, Switches(fabric, LINK_RATE), sizes)


def explain_missing_tools() -> str:
    """What this machine lacks for it, for people; "": nothing."""
    tools = [tool for tool in ("ip", "tc", "cc") if shutil.which(tool) is None]
    if tools:
        return f"it has no {', '.join(tools)}"
    return "" if os.geteuid() == 0 else "namespaces need root"


class Bench:
    def __init__(self, team: Team, switches: Switches, sizes: Sizes) -> None:
        self._team, self._switches, self._sizes = team, switches, sizes
        self._hops = paths.list_spine_hops(switches.spec)
        self._round_seconds: list[float] = []

    def measure_single_job(self) -> float:
        """Mbit/s of a job that no other holds up: what a whole link of the simulator's stands for."""
        first_job = self._team.jobs[:1]
        self._begin_rounds(first_job, self._switches.build_wiring(), None)
        return median(self._measure_speeds(first_job)[0][0] for _ in range(self._sizes.alone))

    def iterate_runs(self, seeds: int, counts: Sequence[int]) -> Iterator[Run]:
        """Of each of `counts` jobs at once, hashed by ECMP and planned."""
        start = time.monotonic()
        for seed in range(seeds):
            for count in counts:
                for planned in (False, True) if seed % 2 == 0 else (True, False):
                    run = self._measure_run(seed, self._team.jobs[:count], planned)
                    _log_progress(
                        f"seed {seed}, {count} jobs, {'planned' if planned else 'ECMP'}: mean {mean(run.speeds):.1f}, "
                        f"slowest {min(run.speeds):.1f} Mbit/s, processors {run.load:.0%}, "
                        f"{time.monotonic() - start:.0f} s"
                    )
                    yield run

    def cut(self, seed: int, single_speed: float) -> Cut:
        """The link that the first job's rank 0 sends over; then the operator's polls, until well after the goal."""
        jobs, switches, team = self._team.jobs[:CUT_JOBS], self._switches, self._team
        switches.draw(seed)
        wiring = switches.build_wiring()
        flows = self._begin_rounds(jobs, wiring, self._plan_traffic(wiring, jobs))
        first_rounds = [job.round for job in jobs]
        self._go(jobs)
        team.pause(SETTLE_SECONDS + self._sizes.seconds)
        route, cut_at = switches.list_routes(flows)[0], time.monotonic()
        with switches.cut(flows[0].source.leaf, route):
            next_poll = cut_at + random.Random(seed).uniform(0.0, RATE_POLL_SECONDS)
            while next_poll < cut_at + CUT_RECOVERY_SECONDS:
                team.pause(next_poll - time.monotonic())
                next_poll += RATE_POLL_SECONDS
                wiring = switches.build_wiring()
                plan = self._plan_traffic(wiring, jobs, median(self._round_seconds))
                for job in jobs:
                    if job.name in plan.due:
                        self._begin_round(wiring, plan, job)
            end = time.monotonic()
            flows = self._wait_for_flows(jobs)
            strays = _count_strays(jobs, switches.list_routes(flows))
            self._rest(jobs)
        best_rates = [
            single_speed / ALL_REDUCE_MBIT * share
            for share in simulate_job_rates(_get_topology(wiring), flows, _list_planned_routes(jobs))
        ]
        progress = [job.read_progress(first_round) for job, first_round in zip(jobs, first_rounds, strict=True)]
        result = Cut(
            recovered=compute_recovery_seconds(progress, best_rates, cut_at, end),
            pause=max(job_progress.find_longest_pause(cut_at) for job_progress in progress),
            moved=sum(job.round > first_round for job, first_round in zip(jobs, first_rounds, strict=True)),
            strays=strays,
        )
        _log_progress(f"cut {seed}: {result}")
        return result

    def _measure_run(self, seed: int, jobs: Sequence[FabricJob], planned: bool) -> Run:
        switches = self._switches
        switches.draw(seed)
        wiring = switches.build_wiring()
        plan, topology = self._plan_traffic(wiring, jobs), _get_topology(wiring)
        flows = self._begin_rounds(jobs, wiring, plan if planned else None)
        routes, sent_before = switches.list_routes(flows), switches.read_sent_bytes()
        speeds, load = self._measure_speeds(jobs)
        _check_sent_bytes(flows, routes, np.array(switches.read_sent_bytes()) - np.array(sent_before))
        strays = _count_strays(jobs, routes) if planned else 0
        if strays:
            _log_progress(
                f"{strays} flows do not go as planned: "
                f"{', '.join(fault for job in jobs for fault in job.list_faults())}"
            )
        return Run(
            seed=seed,
            planned=planned,
            speeds=tuple(speeds),
            simulated=tuple(simulate_job_rates(topology, flows, routes)),
            fullest=tuple(count_fullest_link_flows(topology, flows, routes)),
            level=plan.max_load,
            strays=strays,
            load=load,
        )

    def _plan_traffic(
        self, wiring: Wiring, jobs: Sequence[FabricJob], round_seconds: float | None = None
    ) -> TrafficPlan:
        """The operator's, of all of them. `round_seconds`: what a round costs each; None: they begin one anyway."""
        job_traffics = [job.build_traffic(round_seconds) for job in jobs]
        if round_seconds is None:
            job_traffics = [replace(job, routes={}) for job in job_traffics]
        plan = traffic.plan_joint_traffic(wiring, job_traffics)
        assert plan is not None
        return plan

    def _begin_rounds(self, jobs: Sequence[FabricJob], wiring: Wiring, plan: TrafficPlan | None) -> list[Flow]:
        """A round of each, over the plan's routes, or over those that the network chooses. Answers what they send, two
        flows of each job, once all are connected."""
        start = time.monotonic()
        for job in jobs:
            self._begin_round(wiring, plan, job)
        flows = self._wait_for_flows(jobs)
        self._round_seconds.append(time.monotonic() - start)
        return flows

    def _begin_round(self, wiring: Wiring, plan: TrafficPlan | None, job: FabricJob) -> None:
        routes = plan.routes[job.name] if plan else {}
        job.begin_round(routes, traffic.fingerprint_live_routes(wiring, job.build_traffic(), routes), self._hops)

    def _wait_for_flows(self, jobs: Sequence[FabricJob]) -> list[Flow]:
        self._team.wait_for(lambda: all(job.list_flows() for job in jobs), "ranks are connected")
        return [flow for job in jobs for flow in job.list_flows()]

    def _measure_speeds(self, jobs: Sequence[FabricJob]) -> tuple[list[float], float]:
        """Mbit/s of each over the same seconds, and the load of the processors during them."""
        self._go(jobs)
        self._team.pause(SETTLE_SECONDS)
        busy_before, began = _read_busy_seconds(), time.monotonic()
        self._team.pause(self._sizes.seconds)
        ended = time.monotonic()
        load = (_read_busy_seconds() - busy_before) / (ended - began) / (os.cpu_count() or 1)
        self._team.wait_for(
            lambda: all(job.read_progress().has_ended_since(ended) for job in jobs), "the next all-reduces end"
        )
        self._rest(jobs)
        return [ALL_REDUCE_MBIT * job.read_progress().measure_rate(began, ended) for job in jobs], load

    def _go(self, jobs: Sequence[FabricJob]) -> None:
        for job in jobs:
            job.go()

    def _rest(self, jobs: Sequence[FabricJob]) -> None:
        for job in jobs:
            job.rest()
        self._team.wait_for(lambda: all(job.read_progress().rests for job in jobs), "ranks rest")


def simulate_job_rates(topology: Topology, flows: Sequence[Flow], routes: Sequence[int]) -> list[float]:
    """Of each job, the part of a whole link at which it sends. Each job's two flows follow one another."""
    source, destination = _list_leaves(flows)
    job = (np.arange(len(flows)) // 2).tolist()
    rates = compute_flow_rates(topology, source, destination, np.array(routes, dtype=np.int64), None, job)
    return [float(rate) / topology.unit for rate in rates[::2]]


def count_fullest_link_flows(topology: Topology, flows: Sequence[Flow], routes: Sequence[int]) -> list[int]:
    """Of each job, the flows on the fullest link that it crosses."""
    source, destination = _list_leaves(flows)
    spine = np.array(routes, dtype=np.int64)
    up, down = compute_link_loads(topology, source, destination, spine, np.ones(len(flows)))
    return [int(load) for load in np.maximum(up[source, spine], down[destination, spine]).reshape(-1, 2).max(axis=1)]


def _check_sent_bytes(flows: Sequence[Flow], routes: Sequence[int], sent: Ints) -> None:
    """Check that the bytes went where the leaves report: RuntimeError if not. sent: (leaves, spines)."""
    elsewhere = sent.copy()
    elsewhere[[flow.source.leaf for flow in flows], list(routes)] = 0
    if elsewhere.sum() > MAX_ELSEWHERE_SHARE * sent.sum():
        raise RuntimeError(f"leaves report that flows take {list(routes)}, and have sent {sent.tolist()} bytes")


def _list_leaves(flows: Sequence[Flow]) -> tuple[Ints, Ints]:
    """Of their sources, and of their destinations."""
    source, destination = np.array([(flow.source.leaf, flow.destination.leaf) for flow in flows], dtype=np.int64).T
    return source, destination


def _get_topology(wiring: Wiring) -> Topology:
    assert wiring.topology is not None
    return wiring.topology


def _list_planned_routes(jobs: Sequence[FabricJob]) -> list[int]:
    return [job.routes[pair] for job in jobs for pair in ((0, 1), (1, 0))]


def _count_strays(jobs: Sequence[FabricJob], routes: Sequence[int]) -> int:
    return sum(route != planned for route, planned in zip(routes, _list_planned_routes(jobs), strict=True))


def _read_busy_seconds() -> float:
    """Of all processors, since the machine's start (proc(5))."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, file.readline().split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

"""What the bench of traffic simulates: fabrics, jobs, those who plan, and what is counted; and what it sees of a real
fabric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from bench import traffic as bench
from bench.scripts.traffic.bounds import compute_speed_bound
from bench.scripts.traffic.clusters import (
    HOSTS,
    NICS,
    RACK_HOSTS,
    STAGES,
    SimulatedFabric,
    Traffic,
    TrafficJob,
    break_busiest_uplink,
    build_fabrics,
    build_one_large_job,
    build_traffic,
    damage_fabric,
    draw_eight_jobs,
    draw_hundred_jobs,
)
from bench.scripts.traffic.planners import PLANNERS, PlannerCase, choose_parts
from bench.scripts.traffic.progress import Progress, compute_recovery_seconds
from bench.scripts.traffic.real import CROWDED, JOB_COUNTS, ROOMY, Setting, count_fullest_link_flows, simulate_job_rates
from bench.scripts.traffic.shifts import shift_jobs
from bench.scripts.traffic.speeds import (
    PlannedTraffic,
    compute_busy_slots,
    compute_concurrent_speeds,
    compute_turn_speeds,
)
from bench.scripts.traffic.switches import Flow, Switches
from bench.scripts.traffic.traffic_statistics import Cut, Run, compute_statistics
from pacekeeper_analysis.fabric.topology import build_uniform_topology
from testing.network.fabric import FabricHost, HostedLeafSpine, create_leaf_spine
from testing.network.paths import build_python_command

HALF = TrafficJob((0, 1), period=12, busy=6)


def traffic(*flows: tuple[int, int, int], parts: int = 1) -> Traffic:
    """(job, source, destination); each has NICs of its own."""
    job, source, destination = np.array(flows, dtype=np.int64).T
    nics = np.arange(len(flows))
    return Traffic(job, nics, nics, source, destination, np.ones(len(flows), dtype=np.int64), planes=1).split_flows(
        parts
    )


def case(fabric: SimulatedFabric, of: Traffic, *jobs: TrafficJob) -> PlannerCase:
    return PlannerCase(fabric, jobs, of, compute_speed_bound(fabric, of), np.zeros(len(jobs), dtype=np.int64))


def chance() -> np.random.Generator:
    return np.random.default_rng(0)


class TestClusters:
    def test_eight_jobs_fill_each_leaf_and_meet_under_all_of_them(self) -> None:
        jobs = draw_eight_jobs(chance())
        racks = np.array([job.hosts for job in jobs]) // RACK_HOSTS
        assert all(sorted(of_job) == list(range(HOSTS // RACK_HOSTS)) for of_job in racks.tolist())
        found = build_traffic(build_fabrics()["1:1"], jobs)
        for ends in (found.source, found.destination):
            assert (np.bincount(ends) == RACK_HOSTS * NICS).all(), "whole leaves send and receive"
        assert found.unit == 1.0

    @pytest.mark.parametrize("packed", [True, False])
    def test_of_a_hundred_jobs_nobody_shares_a_host(self, packed: bool) -> None:
        hosts = [host for job in draw_hundred_jobs(chance(), packed) for host in job.hosts]
        assert len(hosts) == len(set(hosts))
        assert 0.7 * HOSTS < len(hosts) <= HOSTS

    def test_packed_jobs_cross_fewer_leaves(self) -> None:
        crossing = [
            len(build_traffic(build_fabrics()["1:1"], draw_hundred_jobs(chance(), packed)).job)
            for packed in (True, False)
        ]
        assert crossing[0] < crossing[1] / 2

    @pytest.mark.parametrize("name", list(build_fabrics()))
    def test_a_ring_leaves_each_leaf_once_in_each_rail(self, name: str) -> None:
        fabric, job = (
            build_fabrics()[name],
            max(draw_hundred_jobs(chance(), packed=False), key=lambda job: len(job.hosts)),
        )
        found = build_traffic(fabric, [job])
        leaves = {fabric.find_location(host) for host in job.hosts}
        assert len(found.job) == len(leaves) * NICS
        assert (found.sender % NICS == found.receiver % NICS).all()
        if fabric.by_rail:
            assert (found.source % NICS == found.sender % NICS).all()

    def test_stages_of_the_large_job_send_on_and_back_beside_their_rings(self) -> None:
        found = build_traffic(build_fabrics()["1:1"], build_one_large_job())
        rings, steps = found.weight > 1, found.weight == 1
        assert rings.sum() == HOSTS // RACK_HOSTS * NICS
        assert steps.sum() == 2 * (STAGES - 1) * HOSTS // STAGES * NICS
        assert found.unit == 1 / 9, "a NIC with a ring's edge, one step on and one back"

    def test_the_dead_uplink_is_one_that_was_used_and_damage_is_slower_or_dead(self) -> None:
        fabric, draws = build_fabrics()["8 trunks"], chance()
        dead = break_busiest_uplink(fabric, build_traffic(fabric, draw_eight_jobs(draws)))
        assert (dead.topology.up == 0).sum() == 1
        worse = damage_fabric(build_fabrics()["1:1"], draws)
        shares = [(worse.topology.up == capacity).mean() for capacity in (0, 1, 2)]
        assert shares == pytest.approx([0.01, 0.01, 0.98], abs=0.005)


class TestSpeeds:
    def test_two_jobs_on_one_link_have_half_of_it_and_all_of_it_apart(self) -> None:
        fabric, of = SimulatedFabric(build_uniform_topology(2, 2)), traffic((0, 0, 1), (1, 0, 1))
        together, apart = PlannedTraffic(of, np.array([0, 0])), PlannedTraffic(of, np.array([0, 1]))
        assert (together.compute_load(fabric), apart.compute_load(fabric)) == (2.0, 1.0)
        assert compute_concurrent_speeds(together.compute_usage(fabric), jobs=3).tolist() == [0.5, 0.5, 1.0], (
            "the third has no flows"
        )
        assert compute_concurrent_speeds(apart.compute_usage(fabric), jobs=2).tolist() == [1.0, 1.0]

    def test_a_job_is_as_fast_as_its_slowest_edge(self) -> None:
        fabric, of = SimulatedFabric(build_uniform_topology(3, 2)), traffic((0, 0, 1), (0, 1, 2), (1, 1, 2))
        assert compute_concurrent_speeds(
            PlannedTraffic(of, np.array([0, 0, 0])).compute_usage(fabric), jobs=2
        ).tolist() == [
            0.5,
            0.5,
        ]

    def test_sub_connections_share_what_a_flow_sends(self) -> None:
        fabric, of = SimulatedFabric(build_uniform_topology(2, 2)), traffic((0, 0, 1), (1, 0, 1), parts=2)
        assert PlannedTraffic(of, np.array([0, 1, 0, 0])).compute_load(fabric) == 1.5
        assert compute_concurrent_speeds(
            PlannedTraffic(of, np.array([0, 1, 0, 1])).compute_usage(fabric), jobs=2
        ).tolist() == [
            1.0,
            1.0,
        ]

    def test_by_turns_by_hand(self) -> None:
        fabric, of = SimulatedFabric(build_uniform_topology(2, 1)), traffic((0, 0, 1), (1, 0, 1))
        used = PlannedTraffic(of, np.array([0, 0])).compute_usage(fabric)
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 6])).tolist() == [1.0, 1.0]
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 0])).tolist() == pytest.approx([12 / 18] * 2)
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 3])).tolist() == pytest.approx([12 / 14] * 2)


class TestShifts:
    def test_jobs_that_share_a_link_are_shifted_apart_and_others_stay(self) -> None:
        fabric, of = SimulatedFabric(build_uniform_topology(2, 2)), traffic((0, 0, 1), (1, 0, 1), (2, 0, 1))
        used, jobs = PlannedTraffic(of, np.array([0, 0, 1])).compute_usage(fabric), [HALF] * 3
        shifts = shift_jobs(used, jobs, np.array([1, 2, 3]))
        assert shifts[2] == 3
        assert not (compute_busy_slots(jobs, shifts)[0] & compute_busy_slots(jobs, shifts)[1]).any()
        assert compute_turn_speeds(used, jobs, shifts).tolist() == [1.0] * 3

    def test_shifts_never_make_it_worse(self) -> None:
        jobs, fabric = draw_eight_jobs(chance()), build_fabrics()["2:1"]
        of, start = build_traffic(fabric, jobs), chance().integers(24, size=8)
        used = PLANNERS["ecmp"](PlannerCase(fabric, jobs, of, 1.0, start), chance()).compute_usage(fabric)
        assert (
            compute_turn_speeds(used, jobs, shift_jobs(used, jobs, start)).mean()
            >= compute_turn_speeds(used, jobs, start).mean()
        )


class TestPlanners:
    @pytest.mark.parametrize("name", list(PLANNERS))
    def test_nobody_goes_over_a_dead_link(self, name: str) -> None:
        fabric = SimulatedFabric(build_uniform_topology(4, 3).with_dead_links(up=[(0, 1)], down=[(1, 0), (2, 2)]))
        ends = [(source, destination) for source in range(4) for destination in range(4) if source != destination]
        of = traffic(*[(0, *pair) for pair in ends])
        plan = PLANNERS[name](case(fabric, of, HALF), chance())
        assert (fabric.topology.up[plan.traffic.source, plan.routes] > 0).all()
        assert (fabric.topology.down[plan.traffic.destination, plan.routes] > 0).all()

    def test_ecmp_is_even_by_chance_only(self) -> None:
        of = traffic(*[(0, 0, 1)] * 800)
        counts = np.bincount(
            PLANNERS["ecmp"](case(SimulatedFabric(build_uniform_topology(2, 8)), of, HALF), chance()).routes,
            minlength=8,
        )
        assert counts.min() > 60
        assert counts.max() > 100

    def test_sub_connections_are_hashed_by_themselves(self) -> None:
        plan = PLANNERS["e-ecmp 16"](
            case(SimulatedFabric(build_uniform_topology(2, 8)), traffic((0, 0, 1), (0, 0, 1)), HALF), chance()
        )
        assert len(plan.routes) == 32
        assert plan.traffic.demand.sum() == pytest.approx(2.0)
        assert len(set(plan.routes[:16].tolist())) > 2

    def test_least_loaded_takes_the_free_way_and_never_moves_anybody(self) -> None:
        """The last one finds way 0 taken where it leaves, and way 1 where it comes in."""
        fabric, of = SimulatedFabric(build_uniform_topology(5, 2)), traffic((0, 0, 2), (0, 1, 4), (0, 1, 3), (0, 0, 3))
        greedy, best = (PLANNERS[name](case(fabric, of, HALF), chance()) for name in ("greedy", "ours"))
        assert greedy.routes.tolist()[:3] == [0, 0, 1]
        assert (greedy.compute_load(fabric), best.compute_load(fabric)) == (2.0, 1.0)

    def test_crux_serves_the_more_intense_job_first(self) -> None:
        intense = TrafficJob((0, 1), period=12, busy=2)
        of = traffic((0, 0, 1), (1, 0, 1))
        assert PLANNERS["crux"](
            case(SimulatedFabric(build_uniform_topology(2, 2)), of, HALF, intense), chance()
        ).routes.tolist() == [1, 0]
        assert PLANNERS["crux"](
            case(SimulatedFabric(build_uniform_topology(2, 2)), of, intense, HALF), chance()
        ).routes.tolist() == [0, 1]

    def test_flows_are_split_where_a_dead_uplink_asks_for_it(self) -> None:
        fabric = SimulatedFabric(build_uniform_topology(2, 8).with_dead_links(up=[(0, 0)]))
        of = traffic(*[(job, 0, 1) for job in range(8)])
        jobs = [HALF] * 8
        assert compute_speed_bound(fabric, of) == pytest.approx(7 / 8)
        assert choose_parts(case(fabric, of, *jobs)) == 7
        whole, parts = (PLANNERS[name](case(fabric, of, *jobs), chance()) for name in ("ours", "ours in parts"))
        assert compute_concurrent_speeds(whole.compute_usage(fabric), 8).min() == 0.5
        assert compute_concurrent_speeds(parts.compute_usage(fabric), 8).min() == pytest.approx(7 / 8)
        assert choose_parts(case(SimulatedFabric(build_uniform_topology(2, 8)), of, *jobs)) == 4, (
            "the fewest that there are"
        )

    def test_both_ports_of_a_nic_are_used(self) -> None:
        nic = np.zeros(1, dtype=np.int64)
        of = Traffic(nic, nic, nic + 1, nic, nic + 1, nic + 1, planes=2).split_flows(2)
        fabric = SimulatedFabric(build_uniform_topology(2, 2, planes=2))
        for name in ("ours", "greedy"):
            plan = PLANNERS[name](case(fabric, of, HALF), chance())
            assert compute_concurrent_speeds(plan.compute_usage(fabric), 1).tolist() == [1.0]
        one_port = PlannedTraffic(of, np.array([0, 1]))
        assert compute_concurrent_speeds(one_port.compute_usage(fabric), 1).tolist() == [0.5]


class TestBounds:
    @pytest.mark.parametrize("name", ["1:1", "2:1", "dual ports"])
    def test_eight_jobs_that_fill_the_fabric(self, name: str) -> None:
        fabric = build_fabrics()[name]
        of = build_traffic(fabric, draw_eight_jobs(chance())).split_flows(fabric.topology.planes)
        assert compute_speed_bound(fabric, of) == (0.5 if name == "2:1" else 1.0)

    @pytest.mark.parametrize("seed", range(5))
    def test_the_linear_program_agrees_with_the_cut_where_all_links_are_alive(self, seed: int) -> None:
        """A dead link of a leaf to which nobody sends makes no difference, but that the program is solved."""
        draws = np.random.default_rng(seed)
        of = traffic(*[(0, *draws.choice(5, 2, replace=False).tolist()) for _ in range(40)])
        whole, damaged_elsewhere = (
            build_uniform_topology(6, 3),
            build_uniform_topology(6, 3).with_dead_links(up=[(5, 0)]),
        )
        assert compute_speed_bound(SimulatedFabric(damaged_elsewhere), of) == pytest.approx(
            compute_speed_bound(SimulatedFabric(whole), of)
        )

    def test_a_pair_with_one_way_in_common(self) -> None:
        fabric = SimulatedFabric(build_uniform_topology(2, 2).with_dead_links(up=[(0, 0)]))
        assert compute_speed_bound(fabric, traffic((0, 0, 1), (1, 0, 1))) == pytest.approx(0.5)
        assert compute_speed_bound(fabric, traffic((0, 1, 0), (1, 1, 0))) == pytest.approx(1.0)


def progress(*events: tuple[str, float]) -> Progress:
    return Progress.read(f"{what} {time}\n" for what, time in events)


def steady(begin: float, end: float, seconds: float) -> list[tuple[str, float]]:
    """All-reduces of so many seconds each."""
    count = round((end - begin) / seconds)
    return [("began", begin), *(("ended", begin + seconds * (number + 1)) for number in range(count))]


class TestProgress:
    def test_all_reduces_that_are_under_way_count_by_the_part_that_lies_between(self) -> None:
        its = progress(("began", 0.0), ("ended", 1.0), ("ended", 3.0))
        assert its.measure_rate(0.5, 2.0) == pytest.approx(1.0 / 1.5)

    def test_nothing_goes_on_between_two_rounds(self) -> None:
        its = progress(("began", 0.0), ("ended", 1.0), ("began", 5.0), ("ended", 6.0))
        assert its.measure_rate(1.0, 5.0) == 0.0
        assert its.measure_rate(0.0, 6.0) == pytest.approx(2 / 6)

    def test_a_line_that_is_half_written_is_left_out(self) -> None:
        its = Progress.read(["began 1.0\n", "ended 2.0\n", "ended 3."])
        assert its.ends.tolist() == [2.0]

    def test_it_rests_when_it_says_so_and_not_when_it_has_begun_again(self) -> None:
        events = [("began", 0.0), ("ended", 1.0), ("rests", 1.0)]
        assert progress(*events).rests
        assert not progress(*events, ("began", 2.0)).rests
        assert progress().rests

    def test_a_pause_is_counted_from_the_last_end_before(self) -> None:
        its = progress(("began", 0.0), ("ended", 4.0), ("ended", 5.0), ("began", 7.0), ("ended", 7.5), ("ended", 8.0))
        assert its.find_longest_pause(0.0) == 2.5
        assert its.find_longest_pause(4.5) == 2.5
        assert its.find_longest_pause(7.6) == 0.5

    def test_jobs_have_recovered_when_the_last_of_them_keeps_its_best_pace(self) -> None:
        whole = progress(*steady(0.0, 30.0, 0.5))
        broken = progress(*steady(0.0, 10.0, 0.5), *steady(12.0, 15.0, 1.0), *steady(15.0, 30.0, 0.5))
        assert compute_recovery_seconds([whole, broken], [2.0, 2.0], since=10.0, until=30.0) == pytest.approx(
            4.8, abs=0.15
        )
        assert compute_recovery_seconds([whole], [2.0], since=10.0, until=30.0) == 0.0
        assert compute_recovery_seconds([whole, broken], [2.0, 2.4], since=10.0, until=30.0) == inf

    def test_a_moment_undoes_no_recovery_and_a_moment_is_none(self) -> None:
        stops = progress(*steady(0.0, 10.0, 0.5), *steady(12.0, 28.0, 0.5), *steady(28.4, 30.0, 0.5))
        assert compute_recovery_seconds([stops], [2.0], since=10.0, until=30.0) == pytest.approx(1.8, abs=0.15)
        flickers = progress(*steady(0.0, 10.0, 0.5), *steady(12.0, 15.0, 0.5), *steady(15.0, 30.0, 0.7))
        assert compute_recovery_seconds([flickers], [2.0], since=10.0, until=30.0) == inf


def ring(*leaves: tuple[int, int]) -> list[Flow]:
    """Both flows of each job whose two ranks are below these leaves."""
    hosts = [[FabricHost(f"h{leaf}", leaf, f"10.99.{leaf}.10") for leaf in pair] for pair in leaves]
    return [flow for near, far in hosts for flow in (Flow(near, far, 1, 2), Flow(far, near, 2, 1))]


class TestSimulatedFabric:
    def test_jobs_that_meet_in_one_direction_halve_each_other_in_both(self) -> None:
        flows = ring((0, 1), (0, 1))
        assert simulate_job_rates(build_uniform_topology(3, 3, 50), flows, [0, 0, 0, 1]) == [0.5, 0.5]
        assert count_fullest_link_flows(build_uniform_topology(3, 3, 50), flows, [0, 0, 0, 1]) == [2, 2]

    def test_jobs_apart_have_whole_links_also_where_leaves_are_shared(self) -> None:
        flows = ring((0, 1), (1, 2))
        assert simulate_job_rates(build_uniform_topology(3, 3, 50), flows, [0, 0, 1, 1]) == [1.0, 1.0]
        assert count_fullest_link_flows(build_uniform_topology(3, 3, 50), flows, [0, 0, 1, 1]) == [1, 1]


def run(*speeds: float, planned: bool = False, fullest: tuple[int, ...] = (1, 1), strays: int = 0) -> Run:
    """Of two jobs whose plan has one flow on a link, simulated as it is, with 50 Mbit/s alone."""
    return Run(0, planned, speeds, tuple(speed / 50 for speed in speeds), fullest, 1, strays, 0.5)


WELL = Cut(recovered=4.0, pause=1.0, moved=1, strays=0)
WON = (run(20.0, 20.0, fullest=(2, 2)), run(40.0, 40.0, planned=True))


def unreached(holds: dict[str, bool]) -> list[str]:
    return [name for name, reached in holds.items() if not reached]


class TestFigures:
    def test_where_planning_wins_all_holds(self) -> None:
        found, holds = compute_statistics(50.0, WON, WON, [WELL])
        assert unreached(holds) == []
        assert (found["jobs"]["2"]["ratio"], found["jobs"]["2"]["least_ratio"]) == (2.0, 2.0)

    def test_jobs_that_do_not_collide_are_not_asked_for_a_gain_but_for_no_loss(self) -> None:
        found, holds = compute_statistics(50.0, [run(20.0, 20.0), run(20.0, 20.0, planned=True)], WON, [WELL])
        assert found["jobs"]["2"]["ratio"] is None
        assert unreached(holds) == []
        _, holds = compute_statistics(50.0, [run(20.0, 20.0), run(19.0, 40.0, planned=True)], WON, [WELL])
        assert unreached(holds) == ["no_job_slower"], "one of them is, though both together are not"

    def test_too_little_is_won(self) -> None:
        runs = [run(20.0, 40.0, fullest=(2, 1)), run(29.0, 60.0, planned=True)]
        assert unreached(compute_statistics(50.0, runs, WON, [WELL])[1]) == ["faster_where_jobs_collide"]

    @pytest.mark.parametrize(("lucky", "goals"), [(14.0, []), (12.0, ["never_slower"])])
    def test_with_too_few_links_one_job_may_lose_what_all_together_win(self, lucky: float, goals: list[str]) -> None:
        crowded = [run(20.0, 20.0, fullest=(2, 1)), run(26.0, lucky, planned=True)]
        assert unreached(compute_statistics(50.0, WON, crowded, [WELL])[1]) == goals

    def test_a_flow_that_does_not_go_as_planned_is_counted(self) -> None:
        runs = [run(20.0, 20.0), run(10.0, 10.0, planned=True, strays=1)]
        found, holds = compute_statistics(50.0, runs, WON, [WELL])
        assert found["in_force"] == 0.875
        assert unreached(holds) == ["paths_in_force"]
        assert found["jobs"]["2"]["least_ratio_of_a_job"] is None

    def test_a_simulator_that_is_wrong_is_found_out(self) -> None:
        slower = replace(run(40.0, 40.0, planned=True), simulated=(0.9, 0.9))
        for runs, crowded in (([WON[0], slower], WON), (WON, [WON[0], slower])):
            assert "simulator_agrees" in unreached(compute_statistics(50.0, runs, crowded, [WELL])[1])

    def test_a_simulator_that_is_right_about_all_together_is_right(self) -> None:
        """The one in the middle is faster than simulated: the median is off by half, the mean by 9 %."""
        jobs = replace(run(20.0, 20.0, 39.0, 40.0, 40.0, fullest=(2,) * 5), simulated=(0.4, 0.4, 0.52, 0.8, 0.8))
        found, holds = compute_statistics(50.0, [jobs, run(*[45.0] * 5, planned=True)], WON, [WELL])
        assert found["jobs"]["5"]["ecmp"]["median_mbits"] == 39.0
        assert found["jobs"]["5"]["ecmp"]["median_simulated"] == 26.0
        assert holds["simulator_agrees"]

    @pytest.mark.parametrize(
        ("cut", "goal"),
        [
            (replace(WELL, recovered=inf), "replanned_after_cut"),
            (replace(WELL, pause=6.0), "trains_through_cut"),
        ],
    )
    def test_a_cut_that_is_not_got_over(self, cut: Cut, goal: str) -> None:
        found, holds = compute_statistics(50.0, WON, WON, [WELL, cut])
        assert unreached(holds) == [goal]
        json.dumps(found, allow_nan=False)


class TestSettings:
    def test_where_there_is_room_all_jobs_together_have_a_link_for_each_flow(self) -> None:
        assert ROOMY.degree == ROOMY.spines
        assert CROWDED.degree > CROWDED.spines
        for count in JOB_COUNTS:
            assert Setting(ROOMY.spines, ROOMY.leaves[:count]).degree <= ROOMY.spines


class TestCommand:
    @pytest.mark.parametrize(("reached", "status"), [(True, 77), (False, 1)])
    def test_without_what_the_real_fabric_needs_the_simulator_runs_alone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reached: bool, status: int
    ) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 65534)
        monkeypatch.setattr(bench, "run_simulations", lambda seeds: ({"seeds": seeds}, {"goal": reached}))
        assert bench.main([]) == status
        said = capsys.readouterr()
        assert "namespaces need root" in said.err
        assert json.loads(said.out)["holds"] == {"goal": reached}

    def test_a_half_that_there_is_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench.main(["half"]) == 2
        assert "half" in capsys.readouterr().err


TRACE = """
import json, sys
from pacekeeper.launcher.network.hop_trace import HopProbe, trace_hops
own, peer, port, *sources = sys.argv[1:]
found = trace_hops(own, [HopProbe(int(source), peer, int(port), 2) for source in sources], 1.0)
print(json.dumps({probe.source_port: end for probe, end in found.end_addresses.items()}))
"""


class TestSwitches:
    @pytest.fixture
    def fabric(self) -> Iterator[HostedLeafSpine]:
        with create_leaf_spine() as made:
            yield made

    def test_leaves_say_what_probes_find_with_each_seed(self, fabric: HostedLeafSpine) -> None:
        switches, (near, far, _) = Switches(fabric, 50e6), fabric.hosts
        ports = range(25000, 25024)
        found = []
        for seed in (1, 2):
            switches.draw(seed)
            ends = json.loads(
                near.run(*build_python_command(TRACE), near.address, far.address, "20001", *map(str, ports))
            )
            probed = [int(fabric.hops[ends[str(port)]][1:]) for port in ports]
            assert switches.list_routes([Flow(near, far, port, 20001) for port in ports]) == probed
            found.append(probed)
        assert found[0] != found[1]

    def test_a_cut_link_is_dead_to_planning_and_taken_by_nobody_until_it_is_mended(
        self, fabric: HostedLeafSpine
    ) -> None:
        switches, (near, far, other) = Switches(fabric, 50e6), fabric.hosts
        ends = ((near, far), (far, near), (far, other))
        flows = [Flow(*pair, port, 20001) for pair in ends for port in range(25000, 25024)]

        def taken() -> list[set[int]]:
            ways = switches.list_routes(flows)
            return [set(ways[:24]), set(ways[24:48]), set(ways[48:])]

        every = {0, 1, 2}
        assert taken() == [every, every, every]
        with switches.cut(0, 1):
            assert taken() == [every - {1}, every - {1}, every]
            topology = switches.build_wiring().topology
            assert topology is not None
            assert np.argwhere(topology.up == 0).tolist() == [[0, 1]]
        assert taken() == [every, every, every]
        assert switches.build_wiring().dead_links == 0

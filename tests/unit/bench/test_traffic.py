"""The simulator of the bench of traffic: fabrics, jobs, planners, and figures; and what it measures on a real
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


def build_flows(*flows: tuple[int, int, int], parts: int = 1) -> Traffic:
    """Build traffic of flows (job, source, destination), each with its own NICs."""
    job, source, destination = np.array(flows, dtype=np.int64).T
    nics = np.arange(len(flows))
    return Traffic(job, nics, nics, source, destination, np.ones(len(flows), dtype=np.int64), planes=1).split_flows(
        parts
    )


def build_case(fabric: SimulatedFabric, flows: Traffic, *jobs: TrafficJob) -> PlannerCase:
    return PlannerCase(fabric, jobs, flows, compute_speed_bound(fabric, flows), np.zeros(len(jobs), dtype=np.int64))


def create_generator() -> np.random.Generator:
    return np.random.default_rng(0)


class TestClusters:
    def test_eight_jobs_fill_each_leaf_and_share_all_leaves(self) -> None:
        jobs = draw_eight_jobs(create_generator())
        racks = np.array([job.hosts for job in jobs]) // RACK_HOSTS
        assert all(sorted(of_job) == list(range(HOSTS // RACK_HOSTS)) for of_job in racks.tolist())
        found = build_traffic(build_fabrics()["1:1"], jobs)
        for ends in (found.source, found.destination):
            assert (np.bincount(ends) == RACK_HOSTS * NICS).all(), "whole leaves send and receive"
        assert found.unit == 1.0

    @pytest.mark.parametrize("packed", [True, False])
    def test_a_hundred_jobs_share_no_host(self, packed: bool) -> None:
        hosts = [host for job in draw_hundred_jobs(create_generator(), packed) for host in job.hosts]
        assert len(hosts) == len(set(hosts))
        assert 0.7 * HOSTS < len(hosts) <= HOSTS

    def test_packed_jobs_cross_fewer_leaves(self) -> None:
        crossing = [
            len(build_traffic(build_fabrics()["1:1"], draw_hundred_jobs(create_generator(), packed)).job)
            for packed in (True, False)
        ]
        assert crossing[0] < crossing[1] / 2

    @pytest.mark.parametrize("name", list(build_fabrics()))
    def test_a_ring_leaves_each_leaf_once_in_each_rail(self, name: str) -> None:
        fabric, job = (
            build_fabrics()[name],
            max(draw_hundred_jobs(create_generator(), packed=False), key=lambda job: len(job.hosts)),
        )
        found = build_traffic(fabric, [job])
        leaves = {fabric.find_location(host) for host in job.hosts}
        assert len(found.job) == len(leaves) * NICS
        assert (found.sender % NICS == found.receiver % NICS).all()
        if fabric.by_rail:
            assert (found.source % NICS == found.sender % NICS).all()

    def test_stages_of_the_large_job_send_forward_and_back_in_addition_to_their_rings(self) -> None:
        found = build_traffic(build_fabrics()["1:1"], build_one_large_job())
        rings, steps = found.weight > 1, found.weight == 1
        assert rings.sum() == HOSTS // RACK_HOSTS * NICS
        assert steps.sum() == 2 * (STAGES - 1) * HOSTS // STAGES * NICS
        assert found.unit == 1 / 9, "a NIC with a ring's edge, one step on and one back"

    def test_the_dead_uplink_was_used_and_damage_slows_or_kills_links(self) -> None:
        fabric, draws = build_fabrics()["8 trunks"], create_generator()
        dead = break_busiest_uplink(fabric, build_traffic(fabric, draw_eight_jobs(draws)))
        assert (dead.topology.up == 0).sum() == 1
        worse = damage_fabric(build_fabrics()["1:1"], draws)
        shares = [(worse.topology.up == capacity).mean() for capacity in (0, 1, 2)]
        assert shares == pytest.approx([0.01, 0.01, 0.98], abs=0.005)


class TestSpeeds:
    def test_two_jobs_on_one_link_get_half_of_it_and_all_of_it_when_shifted(self) -> None:
        fabric, flows = SimulatedFabric(build_uniform_topology(2, 2)), build_flows((0, 0, 1), (1, 0, 1))
        together, apart = PlannedTraffic(flows, np.array([0, 0])), PlannedTraffic(flows, np.array([0, 1]))
        assert (together.compute_load(fabric), apart.compute_load(fabric)) == (2.0, 1.0)
        assert compute_concurrent_speeds(together.compute_usage(fabric), jobs=3).tolist() == [0.5, 0.5, 1.0], (
            "the third has no flows"
        )
        assert compute_concurrent_speeds(apart.compute_usage(fabric), jobs=2).tolist() == [1.0, 1.0]

    def test_a_job_is_as_fast_as_its_slowest_edge(self) -> None:
        fabric, flows = SimulatedFabric(build_uniform_topology(3, 2)), build_flows((0, 0, 1), (0, 1, 2), (1, 1, 2))
        assert compute_concurrent_speeds(
            PlannedTraffic(flows, np.array([0, 0, 0])).compute_usage(fabric), jobs=2
        ).tolist() == [
            0.5,
            0.5,
        ]

    def test_sub_connections_share_what_a_flow_sends(self) -> None:
        fabric, flows = SimulatedFabric(build_uniform_topology(2, 2)), build_flows((0, 0, 1), (1, 0, 1), parts=2)
        assert PlannedTraffic(flows, np.array([0, 1, 0, 0])).compute_load(fabric) == 1.5
        assert compute_concurrent_speeds(
            PlannedTraffic(flows, np.array([0, 1, 0, 1])).compute_usage(fabric), jobs=2
        ).tolist() == [
            1.0,
            1.0,
        ]

    def test_speeds_of_shifted_jobs_match_a_hand_calculation(self) -> None:
        fabric, flows = SimulatedFabric(build_uniform_topology(2, 1)), build_flows((0, 0, 1), (1, 0, 1))
        used = PlannedTraffic(flows, np.array([0, 0])).compute_usage(fabric)
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 6])).tolist() == [1.0, 1.0]
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 0])).tolist() == pytest.approx([12 / 18] * 2)
        assert compute_turn_speeds(used, [HALF, HALF], np.array([0, 3])).tolist() == pytest.approx([12 / 14] * 2)


class TestShifts:
    def test_jobs_that_share_a_link_are_shifted_apart_and_others_stay(self) -> None:
        fabric, flows = SimulatedFabric(build_uniform_topology(2, 2)), build_flows((0, 0, 1), (1, 0, 1), (2, 0, 1))
        used, jobs = PlannedTraffic(flows, np.array([0, 0, 1])).compute_usage(fabric), [HALF] * 3
        shifts = shift_jobs(used, jobs, np.array([1, 2, 3]))
        assert shifts[2] == 3
        assert not (compute_busy_slots(jobs, shifts)[0] & compute_busy_slots(jobs, shifts)[1]).any()
        assert compute_turn_speeds(used, jobs, shifts).tolist() == [1.0] * 3

    def test_shifts_never_reduce_the_speed(self) -> None:
        jobs, fabric = draw_eight_jobs(create_generator()), build_fabrics()["2:1"]
        flows, start = build_traffic(fabric, jobs), create_generator().integers(24, size=8)
        used = PLANNERS["ecmp"](PlannerCase(fabric, jobs, flows, 1.0, start), create_generator()).compute_usage(fabric)
        assert (
            compute_turn_speeds(used, jobs, shift_jobs(used, jobs, start)).mean()
            >= compute_turn_speeds(used, jobs, start).mean()
        )


class TestPlanners:
    @pytest.mark.parametrize("name", list(PLANNERS))
    def test_no_planner_uses_a_dead_link(self, name: str) -> None:
        fabric = SimulatedFabric(build_uniform_topology(4, 3).with_dead_links(up=[(0, 1)], down=[(1, 0), (2, 2)]))
        ends = [(source, destination) for source in range(4) for destination in range(4) if source != destination]
        flows = build_flows(*[(0, *pair) for pair in ends])
        plan = PLANNERS[name](build_case(fabric, flows, HALF), create_generator())
        assert (fabric.topology.up[plan.traffic.source, plan.routes] > 0).all()
        assert (fabric.topology.down[plan.traffic.destination, plan.routes] > 0).all()

    def test_ecmp_is_even_by_chance_only(self) -> None:
        flows = build_flows(*[(0, 0, 1)] * 800)
        counts = np.bincount(
            PLANNERS["ecmp"](
                build_case(SimulatedFabric(build_uniform_topology(2, 8)), flows, HALF), create_generator()
            ).routes,
            minlength=8,
        )
        assert counts.min() > 60
        assert counts.max() > 100

    def test_sub_connections_are_hashed_separately(self) -> None:
        plan = PLANNERS["e-ecmp 16"](
            build_case(SimulatedFabric(build_uniform_topology(2, 8)), build_flows((0, 0, 1), (0, 0, 1)), HALF),
            create_generator(),
        )
        assert len(plan.routes) == 32
        assert plan.traffic.demand.sum() == pytest.approx(2.0)
        assert len(set(plan.routes[:16].tolist())) > 2

    def test_least_loaded_takes_the_free_route_and_never_moves_a_flow(self) -> None:
        """The last flow finds route 0 taken at its source, and route 1 at its destination."""
        fabric, flows = (
            SimulatedFabric(build_uniform_topology(5, 2)),
            build_flows((0, 0, 2), (0, 1, 4), (0, 1, 3), (0, 0, 3)),
        )
        greedy, best = (
            PLANNERS[name](build_case(fabric, flows, HALF), create_generator()) for name in ("greedy", "ours")
        )
        assert greedy.routes.tolist()[:3] == [0, 0, 1]
        assert (greedy.compute_load(fabric), best.compute_load(fabric)) == (2.0, 1.0)

    def test_crux_serves_the_more_intense_job_first(self) -> None:
        intense = TrafficJob((0, 1), period=12, busy=2)
        flows = build_flows((0, 0, 1), (1, 0, 1))
        assert PLANNERS["crux"](
            build_case(SimulatedFabric(build_uniform_topology(2, 2)), flows, HALF, intense), create_generator()
        ).routes.tolist() == [1, 0]
        assert PLANNERS["crux"](
            build_case(SimulatedFabric(build_uniform_topology(2, 2)), flows, intense, HALF), create_generator()
        ).routes.tolist() == [0, 1]

    def test_flows_are_split_where_a_dead_uplink_requires_it(self) -> None:
        fabric = SimulatedFabric(build_uniform_topology(2, 8).with_dead_links(up=[(0, 0)]))
        flows = build_flows(*[(job, 0, 1) for job in range(8)])
        jobs = [HALF] * 8
        assert compute_speed_bound(fabric, flows) == pytest.approx(7 / 8)
        assert choose_parts(build_case(fabric, flows, *jobs)) == 7
        whole, parts = (
            PLANNERS[name](build_case(fabric, flows, *jobs), create_generator()) for name in ("ours", "ours in parts")
        )
        assert compute_concurrent_speeds(whole.compute_usage(fabric), 8).min() == 0.5
        assert compute_concurrent_speeds(parts.compute_usage(fabric), 8).min() == pytest.approx(7 / 8)
        assert choose_parts(build_case(SimulatedFabric(build_uniform_topology(2, 8)), flows, *jobs)) == 4, (
            "the fewest that there are"
        )

    def test_both_ports_of_a_nic_are_used(self) -> None:
        nic = np.zeros(1, dtype=np.int64)
        flows = Traffic(nic, nic, nic + 1, nic, nic + 1, nic + 1, planes=2).split_flows(2)
        fabric = SimulatedFabric(build_uniform_topology(2, 2, planes=2))
        for name in ("ours", "greedy"):
            plan = PLANNERS[name](build_case(fabric, flows, HALF), create_generator())
            assert compute_concurrent_speeds(plan.compute_usage(fabric), 1).tolist() == [1.0]
        one_port = PlannedTraffic(flows, np.array([0, 1]))
        assert compute_concurrent_speeds(one_port.compute_usage(fabric), 1).tolist() == [0.5]


class TestBounds:
    @pytest.mark.parametrize("name", ["1:1", "2:1", "dual ports"])
    def test_eight_jobs_that_fill_the_fabric_reach_the_bound(self, name: str) -> None:
        fabric = build_fabrics()[name]
        flows = build_traffic(fabric, draw_eight_jobs(create_generator())).split_flows(fabric.topology.planes)
        assert compute_speed_bound(fabric, flows) == (0.5 if name == "2:1" else 1.0)

    @pytest.mark.parametrize("seed", range(5))
    def test_the_linear_program_agrees_with_the_cut_where_all_links_are_alive(self, seed: int) -> None:
        """A dead link of an unused leaf changes nothing, but makes the bench solve the program."""
        draws = np.random.default_rng(seed)
        flows = build_flows(*[(0, *draws.choice(5, 2, replace=False).tolist()) for _ in range(40)])
        whole, damaged_elsewhere = (
            build_uniform_topology(6, 3),
            build_uniform_topology(6, 3).with_dead_links(up=[(5, 0)]),
        )
        assert compute_speed_bound(SimulatedFabric(damaged_elsewhere), flows) == pytest.approx(
            compute_speed_bound(SimulatedFabric(whole), flows)
        )

    def test_a_pair_with_one_common_route_is_bounded_by_it(self) -> None:
        fabric = SimulatedFabric(build_uniform_topology(2, 2).with_dead_links(up=[(0, 0)]))
        assert compute_speed_bound(fabric, build_flows((0, 0, 1), (1, 0, 1))) == pytest.approx(0.5)
        assert compute_speed_bound(fabric, build_flows((0, 1, 0), (1, 1, 0))) == pytest.approx(1.0)


def build_progress(*events: tuple[str, float]) -> Progress:
    return Progress.read(f"{what} {time}\n" for what, time in events)


def list_events(begin: float, end: float, seconds: float) -> list[tuple[str, float]]:
    """Return the events of all-reduces of this many seconds each."""
    count = round((end - begin) / seconds)
    return [("began", begin), *(("ended", begin + seconds * (number + 1)) for number in range(count))]


class TestProgress:
    def test_all_reduces_under_way_count_by_the_part_within_the_interval(self) -> None:
        its = build_progress(("began", 0.0), ("ended", 1.0), ("ended", 3.0))
        assert its.measure_rate(0.5, 2.0) == pytest.approx(1.0 / 1.5)

    def test_no_progress_counts_between_two_rounds(self) -> None:
        its = build_progress(("began", 0.0), ("ended", 1.0), ("began", 5.0), ("ended", 6.0))
        assert its.measure_rate(1.0, 5.0) == 0.0
        assert its.measure_rate(0.0, 6.0) == pytest.approx(2 / 6)

    def test_an_incomplete_line_is_skipped(self) -> None:
        its = Progress.read(["began 1.0\n", "ended 2.0\n", "ended 3."])
        assert its.ends.tolist() == [2.0]

    def test_a_job_rests_between_its_event_and_the_next_all_reduce(self) -> None:
        events = [("began", 0.0), ("ended", 1.0), ("rests", 1.0)]
        assert build_progress(*events).rests
        assert not build_progress(*events, ("began", 2.0)).rests
        assert build_progress().rests

    def test_a_pause_counts_from_the_last_end_before_it(self) -> None:
        its = build_progress(
            ("began", 0.0), ("ended", 4.0), ("ended", 5.0), ("began", 7.0), ("ended", 7.5), ("ended", 8.0)
        )
        assert its.find_longest_pause(0.0) == 2.5
        assert its.find_longest_pause(4.5) == 2.5
        assert its.find_longest_pause(7.6) == 0.5

    def test_jobs_have_recovered_when_the_last_of_them_keeps_its_best_pace(self) -> None:
        whole = build_progress(*list_events(0.0, 30.0, 0.5))
        broken = build_progress(
            *list_events(0.0, 10.0, 0.5), *list_events(12.0, 15.0, 1.0), *list_events(15.0, 30.0, 0.5)
        )
        assert compute_recovery_seconds([whole, broken], [2.0, 2.0], since=10.0, until=30.0) == pytest.approx(
            4.8, abs=0.15
        )
        assert compute_recovery_seconds([whole], [2.0], since=10.0, until=30.0) == 0.0
        assert compute_recovery_seconds([whole, broken], [2.0, 2.4], since=10.0, until=30.0) == inf

    def test_a_short_stop_undoes_no_recovery_and_a_short_pace_is_none(self) -> None:
        stops = build_progress(
            *list_events(0.0, 10.0, 0.5), *list_events(12.0, 28.0, 0.5), *list_events(28.4, 30.0, 0.5)
        )
        assert compute_recovery_seconds([stops], [2.0], since=10.0, until=30.0) == pytest.approx(1.8, abs=0.15)
        flickers = build_progress(
            *list_events(0.0, 10.0, 0.5), *list_events(12.0, 15.0, 0.5), *list_events(15.0, 30.0, 0.7)
        )
        assert compute_recovery_seconds([flickers], [2.0], since=10.0, until=30.0) == inf


def build_ring_flows(*leaves: tuple[int, int]) -> list[Flow]:
    """Build both flows of each job whose two ranks are below these leaves."""
    hosts = [[FabricHost(f"h{leaf}", leaf, f"10.99.{leaf}.10") for leaf in pair] for pair in leaves]
    return [flow for near, far in hosts for flow in (Flow(near, far, 1, 2), Flow(far, near, 2, 1))]


class TestSimulatedFabric:
    def test_jobs_that_share_a_link_in_one_direction_get_half_of_both(self) -> None:
        flows = build_ring_flows((0, 1), (0, 1))
        assert simulate_job_rates(build_uniform_topology(3, 3, 50), flows, [0, 0, 0, 1]) == [0.5, 0.5]
        assert count_fullest_link_flows(build_uniform_topology(3, 3, 50), flows, [0, 0, 0, 1]) == [2, 2]

    def test_separated_jobs_get_whole_links_even_on_shared_leaves(self) -> None:
        flows = build_ring_flows((0, 1), (1, 2))
        assert simulate_job_rates(build_uniform_topology(3, 3, 50), flows, [0, 0, 1, 1]) == [1.0, 1.0]
        assert count_fullest_link_flows(build_uniform_topology(3, 3, 50), flows, [0, 0, 1, 1]) == [1, 1]


def build_run(*speeds: float, planned: bool = False, fullest: tuple[int, ...] = (1, 1), strays: int = 0) -> Run:
    """Build a run of two jobs whose plan has one flow on a link, with 50 Mbit/s alone."""
    return Run(0, planned, speeds, tuple(speed / 50 for speed in speeds), fullest, 1, strays, 0.5)


WELL = Cut(recovered=4.0, pause=1.0, moved=1, strays=0)
WON = (build_run(20.0, 20.0, fullest=(2, 2)), build_run(40.0, 40.0, planned=True))


def list_missed_goals(holds: dict[str, bool]) -> list[str]:
    return [name for name, reached in holds.items() if not reached]


class TestFigures:
    def test_if_planning_wins_all_goals_are_reached(self) -> None:
        found, holds = compute_statistics(50.0, WON, WON, [WELL])
        assert list_missed_goals(holds) == []
        assert (found["jobs"]["2"]["ratio"], found["jobs"]["2"]["least_ratio"]) == (2.0, 2.0)

    def test_jobs_that_do_not_collide_need_no_gain_but_must_not_lose(self) -> None:
        found, holds = compute_statistics(
            50.0, [build_run(20.0, 20.0), build_run(20.0, 20.0, planned=True)], WON, [WELL]
        )
        assert found["jobs"]["2"]["ratio"] is None
        assert list_missed_goals(holds) == []
        _, holds = compute_statistics(50.0, [build_run(20.0, 20.0), build_run(19.0, 40.0, planned=True)], WON, [WELL])
        assert list_missed_goals(holds) == ["no_job_slower"], "one of them loses, although both together do not"

    def test_too_little_gain_misses_the_goal(self) -> None:
        runs = [build_run(20.0, 40.0, fullest=(2, 1)), build_run(29.0, 60.0, planned=True)]
        assert list_missed_goals(compute_statistics(50.0, runs, WON, [WELL])[1]) == ["faster_where_jobs_collide"]

    @pytest.mark.parametrize(("lucky", "goals"), [(14.0, []), (12.0, ["never_slower"])])
    def test_with_too_few_links_one_job_may_lose_if_all_jobs_together_win(self, lucky: float, goals: list[str]) -> None:
        crowded = [build_run(20.0, 20.0, fullest=(2, 1)), build_run(26.0, lucky, planned=True)]
        assert list_missed_goals(compute_statistics(50.0, WON, crowded, [WELL])[1]) == goals

    def test_a_flow_off_its_planned_route_is_counted(self) -> None:
        runs = [build_run(20.0, 20.0), build_run(10.0, 10.0, planned=True, strays=1)]
        found, holds = compute_statistics(50.0, runs, WON, [WELL])
        assert found["in_force"] == 0.875
        assert list_missed_goals(holds) == ["paths_in_force"]
        assert found["jobs"]["2"]["least_ratio_of_a_job"] is None

    def test_a_wrong_simulator_misses_the_goal(self) -> None:
        slower = replace(build_run(40.0, 40.0, planned=True), simulated=(0.9, 0.9))
        for runs, crowded in (([WON[0], slower], WON), (WON, [WON[0], slower])):
            assert "simulator_agrees" in list_missed_goals(compute_statistics(50.0, runs, crowded, [WELL])[1])

    def test_a_simulator_that_is_right_on_average_reaches_the_goal(self) -> None:
        """The one in the middle is faster than simulated: the median is off by half, the mean by 9 %."""
        jobs = replace(build_run(20.0, 20.0, 39.0, 40.0, 40.0, fullest=(2,) * 5), simulated=(0.4, 0.4, 0.52, 0.8, 0.8))
        found, holds = compute_statistics(50.0, [jobs, build_run(*[45.0] * 5, planned=True)], WON, [WELL])
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
    def test_a_cut_without_recovery_misses_the_goal(self, cut: Cut, goal: str) -> None:
        found, holds = compute_statistics(50.0, WON, WON, [WELL, cut])
        assert list_missed_goals(holds) == [goal]
        json.dumps(found, allow_nan=False)


class TestSettings:
    def test_with_enough_links_each_flow_has_its_own(self) -> None:
        assert ROOMY.degree == ROOMY.spines
        assert CROWDED.degree > CROWDED.spines
        for count in JOB_COUNTS:
            assert Setting(ROOMY.spines, ROOMY.leaves[:count]).degree <= ROOMY.spines


class TestCommand:
    @pytest.mark.parametrize(("reached", "status"), [(True, 77), (False, 1)])
    def test_without_the_requirements_of_the_real_fabric_only_the_simulator_runs(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reached: bool, status: int
    ) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 65534)
        monkeypatch.setattr(bench, "run_simulations", lambda seeds: ({"seeds": seeds}, {"goal": reached}))
        assert bench.main([]) == status
        output = capsys.readouterr()
        assert "namespaces need root" in output.err
        assert json.loads(output.out)["holds"] == {"goal": reached}

    def test_an_unknown_half_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
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

    def test_switches_report_the_routes_that_probes_find(self, fabric: HostedLeafSpine) -> None:
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

    def test_a_cut_link_is_dead_and_unused_until_it_is_repaired(self, fabric: HostedLeafSpine) -> None:
        switches, (near, far, other) = Switches(fabric, 50e6), fabric.hosts
        ends = ((near, far), (far, near), (far, other))
        flows = [Flow(*pair, port, 20001) for pair in ends for port in range(25000, 25024)]

        def list_taken_routes() -> list[set[int]]:
            routes = switches.list_routes(flows)
            return [set(routes[:24]), set(routes[24:48]), set(routes[48:])]

        every = {0, 1, 2}
        assert list_taken_routes() == [every, every, every]
        with switches.cut(0, 1):
            assert list_taken_routes() == [every - {1}, every - {1}, every]
            topology = switches.build_wiring().topology
            assert topology is not None
            assert np.argwhere(topology.up == 0).tolist() == [[0, 1]]
        assert list_taken_routes() == [every, every, every]
        assert switches.build_wiring().dead_links == 0

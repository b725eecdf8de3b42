"""What the bench of traffic simulates: fabrics, jobs, those who plan, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scripts.traffic.bounds import speed_bound
from bench.scripts.traffic.clusters import (
    HOSTS,
    NICS,
    RACK,
    STAGES,
    Fabric,
    Job,
    Traffic,
    damaged,
    eight_jobs,
    fabrics,
    hundred_jobs,
    one_large_job,
    one_uplink_dead,
    traffic_of,
)
from bench.scripts.traffic.planners import PLANNERS, Case, enough_parts
from bench.scripts.traffic.shifts import shifted
from bench.scripts.traffic.speeds import Plan, at_once, busy_slots, by_turns
from pacekeeper_analysis.fabric.topology import uniform

HALF = Job((0, 1), period=12, busy=6)


def traffic(*flows: tuple[int, int, int], parts: int = 1) -> Traffic:
    """(job, source, destination); each has NICs of its own."""
    job, source, destination = np.array(flows, dtype=np.int64).T
    nics = np.arange(len(flows))
    return Traffic(job, nics, nics, source, destination, np.ones(len(flows), dtype=np.int64), planes=1).in_parts(parts)


def case(fabric: Fabric, of: Traffic, *jobs: Job) -> Case:
    return Case(fabric, jobs, of, speed_bound(fabric, of), np.zeros(len(jobs), dtype=np.int64))


def chance() -> np.random.Generator:
    return np.random.default_rng(0)


class TestClusters:
    def test_eight_jobs_fill_each_leaf_and_meet_under_all_of_them(self) -> None:
        jobs = eight_jobs(chance())
        racks = np.array([job.hosts for job in jobs]) // RACK
        assert all(sorted(of_job) == list(range(HOSTS // RACK)) for of_job in racks.tolist())
        found = traffic_of(fabrics()["1:1"], jobs)
        for ends in (found.source, found.destination):
            assert (np.bincount(ends) == RACK * NICS).all(), "whole leaves send and receive"
        assert found.unit == 1.0

    @pytest.mark.parametrize("packed", [True, False])
    def test_of_a_hundred_jobs_nobody_shares_a_host(self, packed: bool) -> None:
        hosts = [host for job in hundred_jobs(chance(), packed) for host in job.hosts]
        assert len(hosts) == len(set(hosts))
        assert 0.7 * HOSTS < len(hosts) <= HOSTS

    def test_packed_jobs_cross_fewer_leaves(self) -> None:
        crossing = [len(traffic_of(fabrics()["1:1"], hundred_jobs(chance(), packed)).job) for packed in (True, False)]
        assert crossing[0] < crossing[1] / 2

    @pytest.mark.parametrize("name", list(fabrics()))
    def test_a_ring_leaves_each_leaf_once_in_each_rail(self, name: str) -> None:
        fabric, job = fabrics()[name], max(hundred_jobs(chance(), packed=False), key=lambda job: len(job.hosts))
        found = traffic_of(fabric, [job])
        leaves = {fabric.place(host) for host in job.hosts}
        assert len(found.job) == len(leaves) * NICS
        assert (found.sender % NICS == found.receiver % NICS).all()
        if fabric.by_rail:
            assert (found.source % NICS == found.sender % NICS).all()

    def test_stages_of_the_large_job_send_on_and_back_beside_their_rings(self) -> None:
        found = traffic_of(fabrics()["1:1"], one_large_job())
        rings, steps = found.weight > 1, found.weight == 1
        assert rings.sum() == HOSTS // RACK * NICS
        assert steps.sum() == 2 * (STAGES - 1) * HOSTS // STAGES * NICS
        assert found.unit == 1 / 9, "a NIC with a ring's edge, one step on and one back"

    def test_the_dead_uplink_is_one_that_was_used_and_damage_is_slower_or_dead(self) -> None:
        fabric, draws = fabrics()["8 trunks"], chance()
        dead = one_uplink_dead(fabric, traffic_of(fabric, eight_jobs(draws)))
        assert (dead.topology.up == 0).sum() == 1
        worse = damaged(fabrics()["1:1"], draws)
        shares = [(worse.topology.up == capacity).mean() for capacity in (0, 1, 2)]
        assert shares == pytest.approx([0.01, 0.01, 0.98], abs=0.005)


class TestSpeeds:
    def test_two_jobs_on_one_link_have_half_of_it_and_all_of_it_apart(self) -> None:
        fabric, of = Fabric(uniform(2, 2)), traffic((0, 0, 1), (1, 0, 1))
        together, apart = Plan(of, np.array([0, 0])), Plan(of, np.array([0, 1]))
        assert (together.load(fabric), apart.load(fabric)) == (2.0, 1.0)
        assert at_once(together.usage(fabric), jobs=3).tolist() == [0.5, 0.5, 1.0], "the third has no flows"
        assert at_once(apart.usage(fabric), jobs=2).tolist() == [1.0, 1.0]

    def test_a_job_is_as_fast_as_its_slowest_edge(self) -> None:
        fabric, of = Fabric(uniform(3, 2)), traffic((0, 0, 1), (0, 1, 2), (1, 1, 2))
        assert at_once(Plan(of, np.array([0, 0, 0])).usage(fabric), jobs=2).tolist() == [0.5, 0.5]

    def test_sub_connections_share_what_a_flow_sends(self) -> None:
        fabric, of = Fabric(uniform(2, 2)), traffic((0, 0, 1), (1, 0, 1), parts=2)
        assert Plan(of, np.array([0, 1, 0, 0])).load(fabric) == 1.5
        assert at_once(Plan(of, np.array([0, 1, 0, 1])).usage(fabric), jobs=2).tolist() == [1.0, 1.0]

    def test_by_turns_by_hand(self) -> None:
        fabric, of = Fabric(uniform(2, 1)), traffic((0, 0, 1), (1, 0, 1))
        used = Plan(of, np.array([0, 0])).usage(fabric)
        assert by_turns(used, [HALF, HALF], np.array([0, 6])).tolist() == [1.0, 1.0]
        assert by_turns(used, [HALF, HALF], np.array([0, 0])).tolist() == pytest.approx([12 / 18] * 2)
        assert by_turns(used, [HALF, HALF], np.array([0, 3])).tolist() == pytest.approx([12 / 14] * 2)


class TestShifts:
    def test_jobs_that_share_a_link_are_shifted_apart_and_others_stay(self) -> None:
        fabric, of = Fabric(uniform(2, 2)), traffic((0, 0, 1), (1, 0, 1), (2, 0, 1))
        used, jobs = Plan(of, np.array([0, 0, 1])).usage(fabric), [HALF] * 3
        shifts = shifted(used, jobs, np.array([1, 2, 3]))
        assert shifts[2] == 3
        assert not (busy_slots(jobs, shifts)[0] & busy_slots(jobs, shifts)[1]).any()
        assert by_turns(used, jobs, shifts).tolist() == [1.0] * 3

    def test_shifts_never_make_it_worse(self) -> None:
        jobs, fabric = eight_jobs(chance()), fabrics()["2:1"]
        of, start = traffic_of(fabric, jobs), chance().integers(24, size=8)
        used = PLANNERS["ecmp"](Case(fabric, jobs, of, 1.0, start), chance()).usage(fabric)
        assert by_turns(used, jobs, shifted(used, jobs, start)).mean() >= by_turns(used, jobs, start).mean()


class TestPlanners:
    @pytest.mark.parametrize("name", list(PLANNERS))
    def test_nobody_goes_over_a_dead_link(self, name: str) -> None:
        fabric = Fabric(uniform(4, 3).without(up=[(0, 1)], down=[(1, 0), (2, 2)]))
        ends = [(source, destination) for source in range(4) for destination in range(4) if source != destination]
        of = traffic(*[(0, *pair) for pair in ends])
        plan = PLANNERS[name](case(fabric, of, HALF), chance())
        assert (fabric.topology.up[plan.traffic.source, plan.ways] > 0).all()
        assert (fabric.topology.down[plan.traffic.destination, plan.ways] > 0).all()

    def test_ecmp_is_even_by_chance_only(self) -> None:
        of = traffic(*[(0, 0, 1)] * 800)
        counts = np.bincount(PLANNERS["ecmp"](case(Fabric(uniform(2, 8)), of, HALF), chance()).ways, minlength=8)
        assert counts.min() > 60
        assert counts.max() > 100

    def test_sub_connections_are_hashed_by_themselves(self) -> None:
        plan = PLANNERS["e-ecmp 16"](case(Fabric(uniform(2, 8)), traffic((0, 0, 1), (0, 0, 1)), HALF), chance())
        assert len(plan.ways) == 32
        assert plan.traffic.demand.sum() == pytest.approx(2.0)
        assert len(set(plan.ways[:16].tolist())) > 2

    def test_least_loaded_takes_the_free_way_and_never_moves_anybody(self) -> None:
        """The last one finds way 0 taken where it leaves, and way 1 where it comes in."""
        fabric, of = Fabric(uniform(5, 2)), traffic((0, 0, 2), (0, 1, 4), (0, 1, 3), (0, 0, 3))
        greedy, best = (PLANNERS[name](case(fabric, of, HALF), chance()) for name in ("greedy", "ours"))
        assert greedy.ways.tolist()[:3] == [0, 0, 1]
        assert (greedy.load(fabric), best.load(fabric)) == (2.0, 1.0)

    def test_crux_serves_the_more_intense_job_first(self) -> None:
        intense = Job((0, 1), period=12, busy=2)
        of = traffic((0, 0, 1), (1, 0, 1))
        assert PLANNERS["crux"](case(Fabric(uniform(2, 2)), of, HALF, intense), chance()).ways.tolist() == [1, 0]
        assert PLANNERS["crux"](case(Fabric(uniform(2, 2)), of, intense, HALF), chance()).ways.tolist() == [0, 1]

    def test_flows_are_split_where_a_dead_uplink_asks_for_it(self) -> None:
        fabric = Fabric(uniform(2, 8).without(up=[(0, 0)]))
        of = traffic(*[(job, 0, 1) for job in range(8)])
        jobs = [HALF] * 8
        assert speed_bound(fabric, of) == pytest.approx(7 / 8)
        assert enough_parts(case(fabric, of, *jobs)) == 7
        whole, parts = (PLANNERS[name](case(fabric, of, *jobs), chance()) for name in ("ours", "ours in parts"))
        assert at_once(whole.usage(fabric), 8).min() == 0.5
        assert at_once(parts.usage(fabric), 8).min() == pytest.approx(7 / 8)
        assert enough_parts(case(Fabric(uniform(2, 8)), of, *jobs)) == 4, "the fewest that there are"

    def test_both_ports_of_a_nic_are_used(self) -> None:
        nic = np.zeros(1, dtype=np.int64)
        of = Traffic(nic, nic, nic + 1, nic, nic + 1, nic + 1, planes=2).in_parts(2)
        fabric = Fabric(uniform(2, 2, planes=2))
        for name in ("ours", "greedy"):
            plan = PLANNERS[name](case(fabric, of, HALF), chance())
            assert at_once(plan.usage(fabric), 1).tolist() == [1.0]
        one_port = Plan(of, np.array([0, 1]))
        assert at_once(one_port.usage(fabric), 1).tolist() == [0.5]


class TestBounds:
    @pytest.mark.parametrize("name", ["1:1", "2:1", "dual ports"])
    def test_eight_jobs_that_fill_the_fabric(self, name: str) -> None:
        fabric = fabrics()[name]
        of = traffic_of(fabric, eight_jobs(chance())).in_parts(fabric.topology.planes)
        assert speed_bound(fabric, of) == (0.5 if name == "2:1" else 1.0)

    @pytest.mark.parametrize("seed", range(5))
    def test_the_linear_program_agrees_with_the_cut_where_all_links_are_alive(self, seed: int) -> None:
        """A dead link of a leaf to which nobody sends makes no difference, but that the program is solved."""
        draws = np.random.default_rng(seed)
        of = traffic(*[(0, *draws.choice(5, 2, replace=False).tolist()) for _ in range(40)])
        whole, damaged_elsewhere = uniform(6, 3), uniform(6, 3).without(up=[(5, 0)])
        assert speed_bound(Fabric(damaged_elsewhere), of) == pytest.approx(speed_bound(Fabric(whole), of))

    def test_a_pair_with_one_way_in_common(self) -> None:
        fabric = Fabric(uniform(2, 2).without(up=[(0, 0)]))
        assert speed_bound(fabric, traffic((0, 0, 1), (1, 0, 1))) == pytest.approx(0.5)
        assert speed_bound(fabric, traffic((0, 1, 0), (1, 1, 0))) == pytest.approx(1.0)

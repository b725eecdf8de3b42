"""Several launchers on loopback addresses: they agree on rounds, also when one of them fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.runtime_folder import read_json
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict, ProbeParty, evaluate_probe, plan_probe
from pacekeeper_analysis.protocol.plan import Plan, Stop
from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState, LinkProbe
from pacekeeper_analysis.protocol.requests import Requests
from testing.training.launchers import LauncherTeam, create_team

PORT = 29412


def start_three_workers(one: LauncherTeam, restarts: int = 5, version: int = 1, membership: int = 1) -> None:
    """Workers a, b and c with a rank each."""
    for name in "abc":
        if name not in one.workers:
            one.start(name)
    members = one.build_members(a=[0], b=[1], c=[2])
    one.give_plan(Plan(version=version, membership=membership, members=members, store_port=PORT, restarts=restarts))


def assert_finished(one: LauncherTeam, *names: str) -> None:
    assert [one.workers[name].wait() for name in names] == [0] * len(names), one.read_logs()


def test_all_start_the_next_round_when_one_rank_fails_and_only_its_worker_is_named(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=6, faults=[{"rank": 1, "round": 1, "step": 3, "kind": "sigkill"}]) as one:
        start_three_workers(one)
        assert_finished(one, "a", "b", "c")
        assert [len(one.workers[name].read_faults()) for name in "abc"] == [0, 1, 0], one.read_logs()
        assert one.workers["b"].read_faults()[0].rank == 1
        for rank in range(3):
            assert [line for line in one.read_diary(rank) if "start" in line] == ["round 1 start", "round 2 start"]
            assert one.read_diary(rank)[-1] == "round 2 end"


def test_the_address_of_the_rendezvous_comes_from_its_servers_heartbeat(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=2) as one:
        for name in "abc":
            one.start(name)
            one.wait_for_state(name, LauncherState.WARM)
        ports = {name: one.workers[name].read_heartbeat().rendezvous_port or 0 for name in "abc"}
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((one.workers["a"].address, ports["a"]))  # held before there is a plan
        members = one.build_members(a=[0], b=[1], c=[2])
        one.give_plan(Plan(version=1, membership=1, members=members, store_port=ports["a"]))
        assert_finished(one, "a", "b", "c")


def test_launchers_measure_their_links_during_training_and_report_the_owners_of_sockets(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=100_000) as one:
        start_three_workers(one)
        one.wait_for_step(5)
        address = {
            name: f"{one.workers[name].address}:{one.workers[name].read_heartbeat().probe_port}" for name in "abc"
        }
        parties = [ProbeParty(name, address[name]) for name in "abc"]
        request = plan_probe("probe-2", parties[0], parties[1], parties[2:])
        one.give_requests(Requests(probe=request))
        found = {}
        for name, worker in one.workers.items():
            one.wait_for(worker.runtime.probes.exists, f"what {name} has measured")
            found[name] = read_json(worker.runtime.probes) or {}
        answers = {name: [LinkProbe(**probe) for probe in answer["probes"]] for name, answer in found.items()}
        assert {answer["name"] for answer in found.values()} == {"probe-2"}
        assert [probe.target for probe in answers["a"]] == ["b", "c"]
        assert all(probe.failed == "" for probes in answers.values() for probe in probes), answers
        assert evaluate_probe(answers, "a", "b").verdict is not LinkProbeVerdict.INCONCLUSIVE
        for rank, name in enumerate("abc"):
            held = read_json(one.workers[name].runtime.sockets)
            assert set((held or {}).values()) == {rank}
        assert all(worker.read_faults() == [] for worker in one.workers.values())


def test_a_launcher_with_another_secret_takes_no_part(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=2, gather_timeout=1.0) as one:
        for name in "abc":
            one.start(name)
        members = one.build_members(a=[0], b=[1], c=[2])
        good = Plan(version=1, membership=1, members=members, store_port=PORT, restarts=5, secret="5ec2e7")
        one.give_plan(replace(good, secret="0a0a0a"), to="c")
        one.give_plan(good, to="ab")
        one.wait_for(lambda: one.workers["a"].read_faults(FaultKind.ROUND_FAILED), "a reports that not all have come")
        assert one.read_diary(0) == one.read_diary(2) == []
        assert "were rejected" in one.workers["a"].log.read_text()
        one.give_plan(replace(good, version=2), to="c")
        assert_finished(one, "a", "b", "c")


def test_ranks_that_fail_at_once_cost_one_round(tmp_path: Path) -> None:
    faults = [{"rank": rank, "round": 1, "step": 3, "kind": "sigkill"} for rank in range(3)]
    with create_team(tmp_path, steps=5, faults=faults) as one:
        start_three_workers(one)
        assert_finished(one, "a", "b", "c")
        assert {one.workers[name].read_heartbeat().round for name in "abc"} == {2}


def test_a_late_launcher_is_waited_for(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=2) as one:
        one.start("a")
        one.start("b")
        one.start("c")
        one.give_plan(
            Plan(version=1, membership=1, members=one.build_members(a=[0], b=[1], c=[2]), store_port=PORT),
            to=["b", "c"],
        )
        one.wait_for_state("b", LauncherState.GATHERING)
        one.wait_for_state("c", LauncherState.GATHERING)
        assert one.read_diary(1) == []
        one.give_plan(one.plan)
        assert_finished(one, "a", "b", "c")


def test_a_launcher_that_sees_the_new_plan_first_waits_for_its_peers(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=400) as one:
        start_three_workers(one)
        one.wait_for_step(2)
        second = Plan(version=2, membership=2, round=2, members=one.plan.members, store_port=PORT, restarts=5)
        one.give_plan(second, to=["b"])
        # b has ended its rank; the others stay in the old membership, where b is missing, until they get the plan.
        one.wait_for_state("b", LauncherState.GATHERING)
        assert not any("round 2" in line for line in one.read_diary(1))
        one.give_plan(second)
        one.wait_for(
            lambda: any("step" in line for line in one.read_diary(1) if "round" in line and "round 1" not in line),
            "b trains again",
        )
        assert {one.workers[name].read_heartbeat().membership for name in "abc"} == {2}


def test_a_spare_takes_over_a_lost_workers_rank(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=60) as one:
        for name in "abcd":
            one.start(name)
        one.give_plan(
            Plan(version=1, membership=1, members=one.build_members(a=[0], b=[1], c=[2]), store_port=PORT, restarts=5)
        )
        one.wait_for_state("d", LauncherState.WARM)
        one.wait_for_step(3)
        one.workers["b"].kill()
        members = one.build_members(a=[0], d=[1], c=[2])
        one.give_plan(Plan(version=2, membership=2, round=2, members=members, store_port=PORT, restarts=5), to="acd")
        assert_finished(one, "a", "c", "d")
        assert one.read_diary(1)[-1].endswith("end")
        assert one.workers["d"].read_heartbeat().progress.step == 60


def test_a_member_that_becomes_a_spare_ends_its_rank_and_stays_warm(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=60) as one:
        for name in "abc":
            one.start(name)
        one.give_plan(
            Plan(version=1, membership=1, members=one.build_members(a=[0], b=[1]), store_port=PORT, restarts=5)
        )
        one.wait_for_step(3, rank=1)
        one.give_plan(
            Plan(version=2, membership=2, round=2, members=one.build_members(a=[0], c=[1]), store_port=PORT, restarts=5)
        )
        assert_finished(one, "a", "c")
        assert one.workers["b"].read_heartbeat().state is LauncherState.WARM
        one.give_plan(Plan(version=3, membership=2, round=2, members=one.plan.members, stop=Stop.FINISH), to="b")
        assert one.workers["b"].wait() == 0


def test_the_stores_host_may_be_another_worker_in_the_next_membership(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=60) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        one.workers["a"].kill()
        one.start("d")
        members = one.build_members(b=[0], c=[1], d=[2])
        one.give_plan(Plan(version=2, membership=2, round=2, members=members, store_port=PORT, restarts=5), to="bcd")
        assert_finished(one, "b", "c", "d")


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_launcher_that_is_started_again_in_its_pod_joins_its_peers_in_the_next_round(
    tmp_path: Path, name: str
) -> None:
    """As after a crash of the trainer container; a serves the store, and what it knew is lost with it."""
    with create_team(tmp_path, steps=80) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        one.workers[name].kill()
        one.workers[name].wait()
        one.start(name)
        assert_finished(one, "a", "b", "c")
        rounds = {one.workers[worker].read_heartbeat().round for worker in "abc"}
        assert len(rounds) == 1
        assert rounds.pop() >= 2


def test_a_worker_that_finished_helps_when_a_peer_fails_at_the_very_end(tmp_path: Path) -> None:
    """Rank 2 fails in the last step of round 1 after the others are through: all must come back for it."""
    with create_team(tmp_path, steps=4, faults=[{"rank": 2, "round": 1, "step": "end", "kind": "exit"}]) as one:
        start_three_workers(one)
        assert_finished(one, "a", "b", "c")
        assert [one.read_diary(rank)[-1] for rank in range(3)] == ["round 2 end"] * 3


def test_a_preempted_worker_names_no_peer(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        one.workers["b"].kill(signal.SIGTERM)
        assert one.workers["b"].wait() == 143
        for name in "ac":
            one.wait_for_state(name, LauncherState.GATHERING)
        assert [fault.kind for name in "abc" for fault in one.workers[name].read_faults()] == [FaultKind.TERMINATING]


def test_without_operator_and_peers_the_ranks_end(tmp_path: Path) -> None:
    """c's node is cut off: its peers and its sidecar fall silent at once, as the launcher sees it."""
    with create_team(tmp_path, steps=10_000, contact_timeout=1.5) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        later = time.time() + 3600.0  # c's clock is then set back by an hour
        os.utime(one.workers["c"].runtime.operator_contact, (later, later))
        one.workers["a"].kill(signal.SIGSTOP)

        def has_c_ended() -> bool:
            one.workers[
                "b"
            ].runtime.operator_contact.touch()  # or b ended its rank first, sometimes, which c would receive
            return one.workers["c"].read_heartbeat().state is LauncherState.LOST

        one.wait_for(has_c_ended, "c ends its rank")
        one.wait_for(lambda: not Path(f"/proc/{one.read_pids(2)[-1]}").exists(), "rank 2 is gone")
        one.workers["a"].runtime.operator_contact.touch()
        one.workers["a"].kill(signal.SIGCONT)
        one.wait_for_state("a", LauncherState.GATHERING)
        assert one.workers["c"].read_heartbeat().state is LauncherState.LOST, "its peers may be replaced, too"
        one.workers["c"].runtime.operator_contact.touch()
        one.wait_for_state("c", LauncherState.RUNNING)


def test_while_the_operator_answers_a_silent_peer_ends_nothing(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000, contact_timeout=3.0) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        one.workers["a"].kill(signal.SIGSTOP)
        for _ in range(80):
            one.workers["c"].runtime.operator_contact.touch()
            one.workers["b"].runtime.operator_contact.touch()
            one.workers["c"].sleep_briefly()
        assert one.workers["c"].read_heartbeat().state is LauncherState.RUNNING


def test_suspension_leaves_the_launchers_warm_and_resuming_goes_on(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=60) as one:
        start_three_workers(one)
        one.wait_for_step(3)
        one.give_plan(Plan(version=2, membership=1, members=one.plan.members, store_port=PORT, stop=Stop.SUSPEND))
        for name in "abc":
            one.wait_for_state(name, LauncherState.WARM)
        assert [one.read_diary(rank)[-1] for rank in range(3)] == ["round 1 leave"] * 3
        start_three_workers(one, version=3, membership=2)
        assert_finished(one, "a", "b", "c")
        assert [fault.kind for name in "abc" for fault in one.workers[name].read_faults()] == []

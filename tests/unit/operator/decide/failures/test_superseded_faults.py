"""Which faults say nothing new any more, before anybody decides upon them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.decide.failures import superseded_faults
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_crash, build_policy, build_stall, build_training, change_worker


def settled(world: Observation, *faults: FaultReport) -> list[str]:
    return list(
        superseded_faults.settle_superseded_faults(
            replace(world, faults=faults), build_policy()
        ).state.incidents.settled_faults
    )


def in_membership(membership: int) -> Observation:
    world = build_training()
    return world.with_desired(world.desired.with_plan(membership=membership))


def test_a_fault_of_this_membership_is_news() -> None:
    assert settled(build_training(), build_crash("j-w1-0", 1), build_stall("j-w1-0", 1)) == []


def test_one_of_an_earlier_membership_is_not() -> None:
    earlier, now, unknown = (replace(build_crash("j-w1-0", 1, n), membership=m) for n, m in ((1, 2), (2, 3), (3, 0)))
    assert settled(in_membership(3), earlier, now, unknown) == [earlier.name]


def test_one_of_a_membership_that_was_never_begun_waits_for_a_while_and_not_for_ever() -> None:
    fresh, old, ahead = (
        replace(build_crash("j-w1-0", 1, n), membership=10**6, noticed_at=at)
        for n, at in ((1, NOW - 59), (2, NOW - 61), (3, NOW + 1e6))
    )
    assert settled(in_membership(3), fresh, old, ahead) == [old.name, ahead.name], "who forges a time gains none"


@pytest.mark.parametrize("end", ["stop", "over"])
def test_of_a_job_that_ends_none_is(end: str) -> None:
    world = build_training()
    stop, over = world.desired.with_plan(stop=Stop.SUSPEND), world.desired.with_lifecycle(failed_reason="ScriptFailed")
    fault = build_crash("j-w1-0", 1)
    assert settled(world.with_desired(stop if end == "stop" else over), fault) == [fault.name]


def test_who_holds_no_ranks_can_only_tell_of_its_gpus() -> None:
    gpu = FaultReport("j-w4-0-gpu", FaultKind.GPU_ERROR, "j-w4-0", 1, NOW, 1, xid=79)
    terminating = FaultReport("j-w4-0-terminating", FaultKind.TERMINATING, "j-w4-0", 1, NOW, 1)
    assert settled(build_training(), gpu, terminating) == [terminating.name]
    seated = replace(gpu, worker="j-w1-0"), replace(terminating, worker="j-w1-0")
    assert settled(build_training(), *seated) == []


class TestDeathsOfPeers:
    """A worker is given up, and its ranks wait for another."""

    LOST = replace(build_crash("j-w0-0", 0), exit_code=1, error="RuntimeError: Connection closed by peer")

    @staticmethod
    def given_up(dead: bool = True, **changes: Any) -> Observation:
        world = change_worker(build_training(spares=0), "j-w1-0", **changes)
        view = world.find_worker("j-w1-0")
        assert view is not None
        return world.with_desired(world.desired.with_worker(replace(view.record, leaving="it is lost", dead=dead)))

    @pytest.mark.parametrize("how", [{}, {"dead": False, "gone": True}, {"dead": False, "pod": {"exit_code": 137}}])
    def test_they_are_no_news_once_it_trains_no_more(self, how: dict[str, Any]) -> None:
        assert settled(self.given_up(**how), self.LOST) == [self.LOST.name]

    def test_while_nobody_is_given_up_or_it_still_trains_they_are(self) -> None:
        assert settled(build_training(), self.LOST) == []
        assert settled(change_worker(build_training(), "j-w1-0", gone=True), self.LOST) == [], (
            "the loss is to be dealt with"
        )
        assert settled(self.given_up(dead=False), self.LOST) == []

    @pytest.mark.parametrize("own", [{"error": "ValueError: no such file"}, {"exit_code": -9}, {"out_of_memory": True}])
    def test_what_a_rank_dies_of_by_itself_is(self, own: dict[str, Any]) -> None:
        assert settled(self.given_up(), replace(self.LOST, **own)) == []


class TestStall:
    def test_it_is_over_once_its_worker_has_completed_steps_since(self) -> None:
        faults = (replace(build_stall("j-w1-0", 1), name=f"s{n}", step=n) for n in (0, 499, 500, None))
        assert settled(build_training(), *faults) == ["s0", "s499"], "the worker is at step 500"

    def test_or_once_a_later_round_has_begun(self) -> None:
        world = change_worker(build_training(), "j-w0-0", heartbeat={"round": 2})
        old, new, unknown = (replace(build_stall("j-w1-0", 1), name=f"s{n}", round=n) for n in (1, 2, 0))
        assert settled(world, old, new, unknown) == ["s1"]

    def test_of_a_worker_that_says_nothing_it_is_not_known(self) -> None:
        world = build_training()
        silent = tuple(replace(view, heartbeat=None) for view in world.workers)
        assert settled(replace(world, workers=silent), build_stall("j-w1-0", 1)) == []

    def test_other_faults_do_not_pass(self) -> None:
        assert settled(build_training(), replace(build_crash("j-w1-0", 1), step=3)) == []

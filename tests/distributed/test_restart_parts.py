"""The parts of a restart, as real launchers and ranks report them: they add up to the recovery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FaultKind, Heartbeat, StartStage
from pacekeeper_operator.decide.lifecycle.restart_breakdown import break_down_restart
from testing.training.launchers import LauncherTeam, create_team

TRAIN_SCRIPT = Path(__file__).parents[2] / "testing/scripts/train.py"
PORT = 29441
CRASH = json.dumps([{"rank": 1, "round": 1, "step": 60, "kind": "sigkill"}])


@contextmanager
def start_training(folder: Path, **variables: Any) -> Iterator[LauncherTeam]:
    """Two ranks on two workers."""
    with create_team(folder, script=TRAIN_SCRIPT) as one:
        one.environment.update(UNTIL="100000", SLEEP="0.01", SNAPSHOT_EVERY="2", PACEKEEPER_CHECKPOINT_EVERY="5")
        one.environment.update(PACEKEEPER_CHECKPOINT_PATH=str(folder / "checkpoints"))
        one.environment.update({name: str(value) for name, value in variables.items()})
        one.start("a")
        one.start("b")
        one.give_plan(
            Plan(version=1, membership=1, members=one.build_members(a=[0], b=[1]), store_port=PORT, restarts=5)
        )
        yield one


def wait_until_training(one: LauncherTeam, names: str, round_: int) -> list[Heartbeat]:
    """The workers' heartbeats once they all train in this round."""

    def read_heartbeats() -> list[Heartbeat] | None:
        heartbeats = [one.workers[name].read_heartbeat() for name in names]
        return (
            heartbeats
            if all(heartbeat.round == round_ and heartbeat.start.first_step_at is not None for heartbeat in heartbeats)
            else None
        )

    return one.wait_for(read_heartbeats, f"round {round_} trains")


MEMORY = {"MEMORY", "PEER"}
"""Which of them depends on whether the killed rank had made its last snapshot valid, as its peer has."""


@pytest.mark.parametrize(("snapshots", "origins"), [(2, MEMORY), (0, {"CHECKPOINT"})], ids=["memory", "volume"])
def test_the_recovery_of_a_killed_rank_is_reported_by_its_parts(
    tmp_path: Path, snapshots: int, origins: set[str]
) -> None:
    with start_training(tmp_path, FAULTS=CRASH, SNAPSHOT_EVERY=snapshots) as one:
        first, second = wait_until_training(one, "ab", 1), wait_until_training(one, "ab", 2)
        (fault,) = one.workers["b"].read_faults(FaultKind.RANK_FAILED)
    assert {(heartbeat.start.origin, heartbeat.start.teardown_seconds) for heartbeat in first} == {("NOTHING", 0.0)}
    for start in (heartbeat.start for heartbeat in second):
        assert [one.stage for one in start.stages] == list(StartStage)
        seconds = [one.seconds for one in start.stages]
        assert seconds == sorted(seconds), "in their order"
        assert start.first_step_at is not None
        assert start.started_at is not None
        assert seconds[-1] == pytest.approx(start.first_step_at - start.started_at, abs=0.05)
        assert start.teardown_seconds > 0
        assert start.origin in origins
    recovery = max(heartbeat.start.first_step_at or 0.0 for heartbeat in second) - fault.noticed_at
    found = break_down_restart(recovery, second, ranks=2)
    assert found is not None
    assert sum(part.seconds for part in found.parts) == pytest.approx(recovery)
    assert len(found.parts) == 7
    assert all(part.seconds >= 0 and part.rank in (None, 0, 1) for part in found.parts)
    assert found.restored_from in {origin.capitalize() for origin in origins}


def test_the_state_of_a_new_worker_comes_from_its_peer_replica(tmp_path: Path) -> None:
    with start_training(tmp_path) as one:
        one.wait_for(
            lambda: (
                min(heartbeat.checkpoint.replicated_step or 0 for heartbeat in wait_until_training(one, "ab", 1)[:1])
                > 5
            ),
            "snapshots",
        )
        one.workers["b"].kill()
        one.workers["b"].wait()
        one.start("c")
        members = one.build_members(a=[0], c=[1])
        one.give_plan(Plan(version=2, membership=2, round=2, members=members, store_port=PORT, restarts=5), to="ac")
        stayed, came = wait_until_training(one, "ac", 2)
    assert (stayed.start.origin, came.start.origin) == ("MEMORY", "PEER")
    assert came.start.teardown_seconds == 0
    found = break_down_restart(20.0, [stayed, came], ranks=2)
    assert found is not None
    assert found.restored_from == "Peer"

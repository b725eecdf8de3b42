"""How all blamed nodes stand, kept as they come and go: the same as if all were looked at each time."""

from __future__ import annotations

import random
from dataclasses import replace

from pacekeeper_operator.api import ProbeResult, QuarantinePhase, QuarantineSpec, QuarantineStatus, Sign
from pacekeeper_operator.decide.node_census import AT_ONCE_SECONDS, Census, worth_a_look
from pacekeeper_operator.decide.node_steps import Quarantine

START = 1_000_000.0


def drawn(chance: random.Random, name: str) -> Quarantine:
    signs = tuple(
        Sign(f"team-{i}", "i", "XID 79", START + chance.uniform(0, 400), weak=chance.random() < 0.3)
        for i in range(chance.randrange(4))
    )
    passed = chance.choice((None, True, False))
    finished = None if chance.random() < 0.3 else START + chance.uniform(0, 400)
    probes = () if chance.random() < 0.6 else (ProbeResult("p", START, finished, None if finished is None else passed),)
    status = QuarantineStatus(phase=chance.choice([None, *QuarantinePhase]), probes=probes)
    spec = QuarantineSpec("why", "uid", approved=chance.random() < 0.3, signs=signs)
    return Quarantine(name, f"q-{name}", spec, status, deleted=chance.random() < 0.1)


def failing_at_once(quarantine: Quarantine, others: list[Quarantine]) -> int:
    """By looking at every other one."""
    return 1 + sum(
        any(abs(sign.at - quarantine.last_sign) <= AT_ONCE_SECONDS for sign in other.open_signs)
        for other in others
        if not other.over and other.cleared_at is None and worth_a_look(other)
    )


def test_it_counts_as_a_look_at_all_others_does_whatever_comes_and_goes() -> None:
    chance, known, census = random.Random(7), dict[str, Quarantine](), Census()
    for _ in range(1500):
        name = f"node-{chance.randrange(12)}"
        if chance.random() < 0.2:
            known.pop(name, None)
            census.remove(name)
        else:
            known[name] = drawn(chance, name)
            census.put(known[name])
        judged = known.get(name) or drawn(chance, name)
        others = [other for other in known.values() if other.name != name]
        assert census.failing_at_once(judged) == failing_at_once(judged, others)
        approved = sum(other.spec.approved for other in others)
        asked = sum(not o.spec.approved and o.status.phase is QuarantinePhase.PENDING for o in others)
        assert census.spent(name, asked_too=False) == approved
        assert census.spent(name, asked_too=True) == approved + asked
        assert census.probing(name) == sum(other.suspicion and other.probe_runs for other in others)


def suspected(name: str) -> Quarantine:
    return Quarantine(
        name, f"q-{name}", QuarantineSpec("why", "uid", signs=(Sign("a", "i", "w", START),)), QuarantineStatus()
    )


class TestApprovalsOnTheirWay:
    def test_one_counts_before_it_is_written_whatever_is_heard_of_the_node(self) -> None:
        census = Census.of([suspected("node-1")])
        census.grant("node-1")
        assert census.spent("node-2", asked_too=False) == 1
        census.put(suspected("node-1"))
        assert census.spent("node-2", asked_too=False) == 1, "the watch is behind"
        assert census.spent("node-1", asked_too=False) == 0, "nobody stands in its own way"

    def test_one_that_is_not_written_counts_no_longer_once_that_is_known(self) -> None:
        census = Census.of([suspected("node-1")])
        census.grant("node-1")
        census.settle(suspected("node-1"), "node-1")
        assert census.spent("node-2", asked_too=False) == 0

    def test_one_that_is_written_counts_once(self) -> None:
        census = Census.of([suspected("node-1")])
        census.grant("node-1")
        written = suspected("node-1")
        written = replace(written, spec=replace(written.spec, approved=True))
        census.put(written)
        census.settle(written, "node-1")
        assert census.spent("node-2", asked_too=False) == 1

    def test_with_the_object_goes_what_was_on_its_way_to_it(self) -> None:
        census = Census.of([suspected("node-1")])
        census.grant("node-1")
        census.remove("node-1")
        assert census.spent("node-2", asked_too=False) == 0

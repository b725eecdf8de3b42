"""How all blamed nodes stand, kept as they come and go: the same as if all were looked at each time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pacekeeper_operator.api.conditions import ConditionStatus
from pacekeeper_operator.api.node_probe import InconclusiveReason, ProbeResult
from pacekeeper_operator.api.node_quarantine import (
    NodeSuspicion,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    Witness,
)
from pacekeeper_operator.decide.nodes.quarantine_steps import Quarantine
from pacekeeper_operator.decide.nodes.quarantine_usage import (
    SIMULTANEOUS_FAILURE_SECONDS,
    QuarantineUsage,
    is_unverifiable,
    is_worth_probing,
)

START = 1_000_000.0
NO_GPU = (
    "UnexpectedAdmissionError: Pod was rejected: Allocate failed due to requested number of devices unavailable for "
    "nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected"
)


def drawn(chance: random.Random, name: str) -> Quarantine:
    signs = tuple(
        NodeSuspicion(f"team-{i}", "i", "XID 79", START + chance.uniform(0, 400), weak=chance.random() < 0.3)
        for i in range(chance.randrange(4))
    )
    passed = chance.choice((None, True, False))
    finished = None if chance.random() < 0.3 else START + chance.uniform(0, 400)
    probe = ProbeResult("p", START, finished, None if finished is None else passed)
    probes = chance.choice([(), (), (probe,), (refused(), refused(START + 70))])
    status = QuarantineStatus(phase=chance.choice([None, *QuarantinePhase]), probes=probes)
    spec = QuarantineSpec("why", "uid", approved=chance.random() < 0.3, suspicions=signs)
    return Quarantine(name, f"q-{name}", spec, status, deleted=chance.random() < 0.1)


def failing_at_once(quarantine: Quarantine, others: list[Quarantine], *, settled_too: bool = True) -> int:
    """By looking at every other one."""
    counts = [
        sum(
            any(
                abs(sign.at - at) <= SIMULTANEOUS_FAILURE_SECONDS
                for sign in other.spec.suspicions
                if sign.at <= cleared(other)
            )
            for other in others
            if blamed(other) and (settled_too or other.cleared_at is None)
        )
        for at in {sign.at for sign in quarantine.open_signs}
    ]
    return 1 + max(counts, default=0)


def cleared(quarantine: Quarantine) -> float:
    return math.inf if quarantine.cleared_at is None else quarantine.cleared_at


def blamed(quarantine: Quarantine) -> bool:
    signs = tuple(sign for sign in quarantine.spec.suspicions if sign.at <= cleared(quarantine))
    probes = () if quarantine.cleared_at is not None else quarantine.status.probes
    said = replace(quarantine, spec=replace(quarantine.spec, suspicions=signs), status=QuarantineStatus(probes=probes))
    return not quarantine.is_over and is_worth_probing(said) and not is_unverifiable(quarantine)


def test_it_counts_as_a_look_at_all_others_does_whatever_comes_and_goes() -> None:
    chance, known, census = random.Random(7), dict[str, Quarantine](), QuarantineUsage()
    for _ in range(1500):
        name = f"node-{chance.randrange(12)}"
        if chance.random() < 0.2:
            known.pop(name, None)
            census.remove(name)
        else:
            known[name] = drawn(chance, name)
            census.update(known[name])
        judged = known.get(name) or drawn(chance, name)
        others = [other for other in known.values() if other.name != name]
        assert census.count_failing_together(judged) == failing_at_once(judged, others)
        assert census.count_unsettled(judged) == failing_at_once(judged, others, settled_too=False) - 1
        approved = sum(other.spec.approved for other in others)
        asked = sum(not o.spec.approved and o.status.phase is QuarantinePhase.PENDING for o in others)
        assert census.count_used_budget(name, include_requests=False) == approved
        assert census.count_used_budget(name, include_requests=True) == approved + asked
        assert census.count_probing(name) == sum(other.is_suspicion and other.is_probing for other in others)


def suspected(name: str, *probes: ProbeResult, witness: Witness = Witness.NONE) -> Quarantine:
    spec = QuarantineSpec("why", "uid", suspicions=(NodeSuspicion("a", "i", "w", START, witness),))
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(probes=probes))


def in_vain(inconclusive: InconclusiveReason, message: str, at: float = START) -> ProbeResult:
    return ProbeResult("p", at, at + 2, None, message, inconclusive)


def refused(at: float = START, message: str = NO_GPU) -> ProbeResult:
    return in_vain(InconclusiveReason.NOT_RUN, message, at)


class TestBlame:
    """Who counts for the breaker."""

    @pytest.mark.parametrize(
        "words",
        [
            NO_GPU,
            "OutOfnvidia.com/gpu: Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1",
            "OutOfcpu",
            "Evicted: The node was low on resource: ephemeral-storage.",
            "TopologyAffinityError: Resources cannot be allocated with Topology locality",
        ],
    )
    def test_ends_where_others_have_left_the_probes_no_room(self, words: str) -> None:
        once, twice = refused(message=words), refused(START + 70, words)
        judged = suspected("node-1")
        assert QuarantineUsage.from_quarantines([suspected("node-2", once)]).count_failing_together(judged) == 2, (
            "series may still show something"
        )
        assert QuarantineUsage.from_quarantines([suspected("node-2", once, twice)]).count_failing_together(judged) == 1
        runs = ProbeResult("p", START + 200)
        assert (
            QuarantineUsage.from_quarantines([suspected("node-2", once, twice, runs)]).count_failing_together(judged)
            == 1
        ), "it is asked once more"

    @pytest.mark.parametrize(
        "probe",
        [
            refused(message="NodeShutdown: Pod was rejected as the node is shutting down"),
            refused(message="Terminated: Pod was terminated in response to imminent node shutdown."),
            refused(message="UnexpectedAdmissionError: Allocate failed due to no healthy devices present"),
            refused(message="did not end within 60 s"),
            in_vain(InconclusiveReason.IMAGE, "ErrImagePull: dial tcp: i/o timeout"),
            in_vain(InconclusiveReason.SUPERSEDED, "another witness has confirmed the suspicion"),
            in_vain(InconclusiveReason.SLOW, "slow: it sends 6 MB/s"),
            ProbeResult("p", START, START + 60, False, "did not end within 60 s"),
            ProbeResult("p", START, START + 60, False, "OutOfMemoryError: said by the probe itself"),
        ],
    )
    def test_stays_where_a_fault_of_many_nodes_may_have_been_in_the_probes_way(self, probe: ProbeResult) -> None:
        for probes in ((probe, probe), (refused(), probe), (probe, refused(START + 70))):
            assert (
                QuarantineUsage.from_quarantines([suspected("node-2", *probes)]).count_failing_together(
                    suspected("node-1")
                )
                == 2
            )

    @pytest.mark.parametrize("witness", [Witness.GPU_SERIES, Witness.PROBE, Witness.NODE_CONDITION])
    def test_stays_where_a_sign_has_a_witness(self, witness: Witness) -> None:
        blamed = suspected("node-2", refused(), refused(START + 70), witness=witness)
        assert QuarantineUsage.from_quarantines([blamed]).count_failing_together(suspected("node-1")) == 2

    def test_stays_where_the_node_has_a_witness_now(self) -> None:
        blamed = suspected("node-2", refused(), refused(START + 70))
        down = ConditionStatus("Witnessed", "True", "NodeCondition", "the node is not Ready", START + 80, 1)
        census = QuarantineUsage.from_quarantines([replace(blamed, status=replace(blamed.status, conditions=(down,)))])
        assert census.count_failing_together(suspected("node-1")) == 2
        away = replace(down, status="Unknown", reason="ProbeInconclusive")
        census.update(replace(blamed, status=replace(blamed.status, conditions=(away,))))
        assert census.count_failing_together(suspected("node-1")) == 1


class TestApprovalsOnTheirWay:
    def test_one_counts_before_it_is_written_whatever_is_heard_of_the_node(self) -> None:
        census = QuarantineUsage.from_quarantines([suspected("node-1")])
        census.grant("node-1")
        assert census.count_used_budget("node-2", include_requests=False) == 1
        census.update(suspected("node-1"))
        assert census.count_used_budget("node-2", include_requests=False) == 1, "the watch is behind"
        assert census.count_used_budget("node-1", include_requests=False) == 0, "nobody stands in its own way"

    def test_one_that_is_not_written_counts_no_longer_once_that_is_known(self) -> None:
        census = QuarantineUsage.from_quarantines([suspected("node-1")])
        census.grant("node-1")
        census.settle(suspected("node-1"), "node-1")
        assert census.count_used_budget("node-2", include_requests=False) == 0

    def test_one_that_is_written_counts_once(self) -> None:
        census = QuarantineUsage.from_quarantines([suspected("node-1")])
        census.grant("node-1")
        written = suspected("node-1")
        written = replace(written, spec=replace(written.spec, approved=True))
        census.update(written)
        census.settle(written, "node-1")
        assert census.count_used_budget("node-2", include_requests=False) == 1

    def test_with_the_object_goes_what_was_on_its_way_to_it(self) -> None:
        census = QuarantineUsage.from_quarantines([suspected("node-1")])
        census.grant("node-1")
        census.remove("node-1")
        assert census.count_used_budget("node-2", include_requests=False) == 0

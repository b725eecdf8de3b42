"""The usage by all suspected nodes, updated incrementally: equal to a full count each time."""

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


def draw_quarantine(rng: random.Random, name: str) -> Quarantine:
    signs = tuple(
        NodeSuspicion(f"team-{index}", "i", "XID 79", START + rng.uniform(0, 400), weak=rng.random() < 0.3)
        for index in range(rng.randrange(4))
    )
    passed = rng.choice((None, True, False))
    finished = None if rng.random() < 0.3 else START + rng.uniform(0, 400)
    probe = ProbeResult("p", START, finished, None if finished is None else passed)
    probes = rng.choice([(), (), (probe,), (build_refused(), build_refused(START + 70))])
    status = QuarantineStatus(phase=rng.choice([None, *QuarantinePhase]), probes=probes)
    spec = QuarantineSpec("why", "uid", approved=rng.random() < 0.3, suspicions=signs)
    return Quarantine(name, f"q-{name}", spec, status, deleted=rng.random() < 0.1)


def count_failing_together(quarantine: Quarantine, others: list[Quarantine], *, include_settled: bool = True) -> int:
    """Count by comparison with every other quarantine."""
    counts = [
        sum(
            any(
                abs(sign.at - time) <= SIMULTANEOUS_FAILURE_SECONDS
                for sign in other.spec.suspicions
                if sign.at <= get_cleared_time(other)
            )
            for other in others
            if is_blamed(other) and (include_settled or other.cleared_at is None)
        )
        for time in {sign.at for sign in quarantine.open_signs}
    ]
    return 1 + max(counts, default=0)


def get_cleared_time(quarantine: Quarantine) -> float:
    return math.inf if quarantine.cleared_at is None else quarantine.cleared_at


def is_blamed(quarantine: Quarantine) -> bool:
    signs = tuple(sign for sign in quarantine.spec.suspicions if sign.at <= get_cleared_time(quarantine))
    probes = () if quarantine.cleared_at is not None else quarantine.status.probes
    effective = replace(
        quarantine, spec=replace(quarantine.spec, suspicions=signs), status=QuarantineStatus(probes=probes)
    )
    return not quarantine.is_over and is_worth_probing(effective) and not is_unverifiable(quarantine)


def test_the_incremental_count_equals_a_full_count_after_any_changes() -> None:
    rng, quarantines, usage = random.Random(7), dict[str, Quarantine](), QuarantineUsage()
    for _ in range(1500):
        name = f"node-{rng.randrange(12)}"
        if rng.random() < 0.2:
            quarantines.pop(name, None)
            usage.remove(name)
        else:
            quarantines[name] = draw_quarantine(rng, name)
            usage.update(quarantines[name])
        quarantine = quarantines.get(name) or draw_quarantine(rng, name)
        others = [other for other in quarantines.values() if other.name != name]
        assert usage.count_failing_together(quarantine) == count_failing_together(quarantine, others)
        assert (
            usage.count_unsettled(quarantine) == count_failing_together(quarantine, others, include_settled=False) - 1
        )
        approved = sum(other.spec.approved for other in others)
        pending = sum(not other.spec.approved and other.status.phase is QuarantinePhase.PENDING for other in others)
        assert usage.count_used_budget(name, include_requests=False) == approved
        assert usage.count_used_budget(name, include_requests=True) == approved + pending
        assert usage.count_probing(name) == sum(other.is_suspicion and other.is_probing for other in others)


def build_suspected(name: str, *probes: ProbeResult, witness: Witness = Witness.NONE) -> Quarantine:
    spec = QuarantineSpec("why", "uid", suspicions=(NodeSuspicion("a", "i", "w", START, witness),))
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(probes=probes))


def build_inconclusive(inconclusive: InconclusiveReason, message: str, at: float = START) -> ProbeResult:
    return ProbeResult("p", at, at + 2, None, message, inconclusive)


def build_refused(at: float = START, message: str = NO_GPU) -> ProbeResult:
    return build_inconclusive(InconclusiveReason.NOT_RUN, message, at)


class TestBlame:
    """Which suspicions count for the breaker."""

    @pytest.mark.parametrize(
        "message",
        [
            NO_GPU,
            "OutOfnvidia.com/gpu: Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1",
            "OutOfcpu",
            "Evicted: The node was low on resource: ephemeral-storage.",
            "TopologyAffinityError: Resources cannot be allocated with Topology locality",
        ],
    )
    def test_a_suspicion_stops_counting_if_two_probes_found_no_room(self, message: str) -> None:
        first, second = build_refused(message=message), build_refused(START + 70, message)
        quarantine = build_suspected("node-1")
        assert (
            QuarantineUsage.from_quarantines([build_suspected("node-2", first)]).count_failing_together(quarantine) == 2
        ), "series may still show something"
        assert (
            QuarantineUsage.from_quarantines([build_suspected("node-2", first, second)]).count_failing_together(
                quarantine
            )
            == 1
        )
        running = ProbeResult("p", START + 200)
        assert (
            QuarantineUsage.from_quarantines(
                [build_suspected("node-2", first, second, running)]
            ).count_failing_together(quarantine)
            == 1
        ), "it is probed once more"

    @pytest.mark.parametrize(
        "probe",
        [
            build_refused(message="NodeShutdown: Pod was rejected as the node is shutting down"),
            build_refused(message="Terminated: Pod was terminated in response to imminent node shutdown."),
            build_refused(message="UnexpectedAdmissionError: Allocate failed due to no healthy devices present"),
            build_refused(message="did not end within 60 s"),
            build_inconclusive(InconclusiveReason.IMAGE, "ErrImagePull: dial tcp: i/o timeout"),
            build_inconclusive(InconclusiveReason.SUPERSEDED, "another witness has confirmed the suspicion"),
            build_inconclusive(InconclusiveReason.SLOW, "slow: it sends 6 MB/s"),
            ProbeResult("p", START, START + 60, False, "did not end within 60 s"),
            ProbeResult("p", START, START + 60, False, "OutOfMemoryError: said by the probe itself"),
        ],
    )
    def test_a_suspicion_counts_if_a_fault_of_many_nodes_may_have_stopped_the_probe(self, probe: ProbeResult) -> None:
        for probes in ((probe, probe), (build_refused(), probe), (probe, build_refused(START + 70))):
            assert (
                QuarantineUsage.from_quarantines([build_suspected("node-2", *probes)]).count_failing_together(
                    build_suspected("node-1")
                )
                == 2
            )

    @pytest.mark.parametrize("witness", [Witness.GPU_SERIES, Witness.PROBE, Witness.NODE_CONDITION])
    def test_a_suspicion_counts_if_a_sign_has_a_witness(self, witness: Witness) -> None:
        suspected = build_suspected("node-2", build_refused(), build_refused(START + 70), witness=witness)
        assert QuarantineUsage.from_quarantines([suspected]).count_failing_together(build_suspected("node-1")) == 2

    def test_a_suspicion_counts_if_the_node_has_a_witness_now(self) -> None:
        suspected = build_suspected("node-2", build_refused(), build_refused(START + 70))
        down = ConditionStatus("Witnessed", "True", "NodeCondition", "the node is not Ready", START + 80, 1)
        usage = QuarantineUsage.from_quarantines(
            [replace(suspected, status=replace(suspected.status, conditions=(down,)))]
        )
        assert usage.count_failing_together(build_suspected("node-1")) == 2
        inconclusive = replace(down, status="Unknown", reason="ProbeInconclusive")
        usage.update(replace(suspected, status=replace(suspected.status, conditions=(inconclusive,))))
        assert usage.count_failing_together(build_suspected("node-1")) == 1


class TestPendingApprovals:
    def test_an_approval_counts_before_it_is_written(self) -> None:
        usage = QuarantineUsage.from_quarantines([build_suspected("node-1")])
        usage.grant("node-1")
        assert usage.count_used_budget("node-2", include_requests=False) == 1
        usage.update(build_suspected("node-1"))
        assert usage.count_used_budget("node-2", include_requests=False) == 1, "the watch is behind"
        assert usage.count_used_budget("node-1", include_requests=False) == 0, (
            "a quarantine does not count against itself"
        )

    def test_an_approval_that_was_not_written_stops_counting(self) -> None:
        usage = QuarantineUsage.from_quarantines([build_suspected("node-1")])
        usage.grant("node-1")
        usage.settle(build_suspected("node-1"), "node-1")
        assert usage.count_used_budget("node-2", include_requests=False) == 0

    def test_a_written_approval_counts_once(self) -> None:
        usage = QuarantineUsage.from_quarantines([build_suspected("node-1")])
        usage.grant("node-1")
        written = build_suspected("node-1")
        written = replace(written, spec=replace(written.spec, approved=True))
        usage.update(written)
        usage.settle(written, "node-1")
        assert usage.count_used_budget("node-2", include_requests=False) == 1

    def test_a_pending_approval_of_a_deleted_object_stops_counting(self) -> None:
        usage = QuarantineUsage.from_quarantines([build_suspected("node-1")])
        usage.grant("node-1")
        usage.remove("node-1")
        assert usage.count_used_budget("node-2", include_requests=False) == 0

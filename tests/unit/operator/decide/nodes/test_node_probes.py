"""A failed probe counts against its node only if a probe pod on another node has passed the same check."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.node_probe import InconclusiveReason, ProbeResult
from pacekeeper_operator.decide.nodes.node_probes import evaluate_node_probe
from pacekeeper_operator.decide.nodes.quarantine_steps import ProbePod
from pacekeeper_operator.node_probe import DRIVER, GPUS, MEMORY, NETWORK

START = 1_000_000.0
PROBE = ProbeResult("p", START)


def build_pod(phase: str, check: str = "", node: str = "node-2", has_gpus: bool = False, **changes: Any) -> ProbePod:
    return replace(ProbePod(phase, "words", node=node, reported_check=check, has_gpus=has_gpus), **changes)


def evaluate_probe(
    failed: ProbePod, *others: ProbePod, seconds: float = 5.0
) -> tuple[bool | None, InconclusiveReason | None] | None:
    found = evaluate_node_probe(PROBE, replace(failed, group_peers=others), 60.0, START + seconds)
    return None if found is None else (found.passed, found.inconclusive)


FAILS = (False, None)
SHARED, NO_COMPARISON = (None, InconclusiveReason.SHARED_FAILURE), (None, InconclusiveReason.NO_COMPARISON)


@pytest.mark.parametrize(
    ("check", "others", "expected"),
    [
        (NETWORK, [build_pod("Succeeded")], FAILS),
        (
            NETWORK,
            [build_pod("Failed", NETWORK)],
            SHARED,
        ),  # an egress policy of the namespace, the API server's Service
        (NETWORK, [build_pod("Failed", NETWORK), build_pod("Succeeded", node="node-3")], FAILS),
        (NETWORK, [build_pod("Failed", MEMORY)], FAILS),  # it has passed this check
        (NETWORK, [], NO_COMPARISON),
        (DRIVER, [build_pod("Succeeded")], NO_COMPARISON),  # that one had no GPU to check
        (DRIVER, [build_pod("Succeeded", has_gpus=True)], FAILS),
        (DRIVER, [build_pod("Failed", DRIVER, has_gpus=True)], SHARED),  # the runtime is a RuntimeClass
        (DRIVER, [build_pod("Failed", GPUS, has_gpus=True)], FAILS),
        (GPUS, [build_pod("Succeeded", has_gpus=True)], FAILS),
        (GPUS, [build_pod("Failed", GPUS, has_gpus=True)], SHARED),
        (GPUS, [build_pod("Succeeded")], FAILS),  # the cluster is full; nvidia-smi has reported this node's own GPUs
        (MEMORY, [build_pod("Failed", NETWORK)], NO_COMPARISON),
        ("", [build_pod("Failed", NETWORK)], FAILS),  # it has not run, or is of another version and reports no check
        ("", [build_pod("Succeeded")], FAILS),
        ("", [build_pod("Failed")], SHARED),
        (NETWORK, [build_pod("Failed", "Evicted", inconclusive=InconclusiveReason.NOT_RUN)], NO_COMPARISON),
    ],
)
def test_a_failed_check_counts_if_another_node_passes_it(
    check: str, others: list[ProbePod], expected: tuple[bool | None, InconclusiveReason | None]
) -> None:
    gpus = check in (DRIVER, GPUS)
    assert evaluate_probe(build_pod("Failed", check, "node-1", gpus), *others) == expected


def test_other_pods_are_awaited_while_they_may_report() -> None:
    failed = build_pod("Failed", NETWORK, "node-1")
    assert evaluate_probe(failed, build_pod("Running")) is None
    assert evaluate_probe(failed, build_pod("Running"), build_pod("Succeeded", node="node-3")) == FAILS
    assert evaluate_probe(failed, build_pod("Running"), seconds=60.0) == NO_COMPARISON
    assert (
        evaluate_probe(build_pod("Failed", GPUS, "node-1", has_gpus=True), build_pod("Running", has_gpus=True)) is None
    )
    assert evaluate_probe(
        build_pod("Failed", node="node-1", inconclusive=InconclusiveReason.NOT_RUN), build_pod("Running")
    ) == (
        None,
        InconclusiveReason.NOT_RUN,
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([build_pod("Succeeded")], FAILS),
        ([build_pod("Failed", NETWORK)], FAILS),  # it has run
        ([build_pod("Pending")], SHARED),  # no node can start pods now
        ([], NO_COMPARISON),
    ],
)
def test_a_pod_that_does_not_end_counts_if_another_one_does(
    others: list[ProbePod], expected: tuple[bool | None, InconclusiveReason | None]
) -> None:
    assert evaluate_probe(build_pod("Pending", node="node-1"), *others, seconds=60.0) == expected


def test_a_pod_reports_the_check_that_failed() -> None:
    def parse_pod(phase: str, report: dict[str, Any] | str) -> ProbePod:
        message = report if isinstance(report, str) else json.dumps(report)
        state = {"terminated": {"exitCode": 1, "message": message}}
        return ProbePod.parse({"status": {"phase": phase, "containerStatuses": [{"state": state}]}})

    failed = parse_pod("Failed", {"unfit": "nvidia-smi does not work", "check": "driver", "gpus": 4})
    assert (failed.failed_check, set(failed.passed_checks)) == ("driver", {"runs", "network"})
    assert "gpus" in parse_pod("Succeeded", {"core_seconds": 0.001, "gpus": 1}).passed_checks
    assert "gpus" not in parse_pod("Succeeded", {"core_seconds": 0.001, "gpus": 0}).passed_checks
    for unusual in (
        {"unfit": "no", "check": 7, "gpus": "x"},
        {"unfit": "no", "check": "of tomorrow"},
        "Traceback",
        "[]",
    ):
        assert parse_pod("Failed", unusual).passed_checks == frozenset()

"""What a probe that fails says of its node: nothing, unless a probe pod on another node has passed the same check."""

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


def pod(phase: str, check: str = "", node: str = "node-2", has_gpus: bool = False, **changes: Any) -> ProbePod:
    return replace(ProbePod(phase, "words", node=node, reported_check=check, has_gpus=has_gpus), **changes)


def ended(
    failed: ProbePod, *others: ProbePod, seconds: float = 5.0
) -> tuple[bool | None, InconclusiveReason | None] | None:
    found = evaluate_node_probe(PROBE, replace(failed, group_peers=others), 60.0, START + seconds)
    return None if found is None else (found.passed, found.inconclusive)


FAILS = (False, None)
SHARED, ALONE = (None, InconclusiveReason.SHARED_FAILURE), (None, InconclusiveReason.NO_COMPARISON)


@pytest.mark.parametrize(
    ("check", "others", "expected"),
    [
        (NETWORK, [pod("Succeeded")], FAILS),
        (NETWORK, [pod("Failed", NETWORK)], SHARED),  # an egress policy of the namespace, the API server's Service
        (NETWORK, [pod("Failed", NETWORK), pod("Succeeded", node="node-3")], FAILS),
        (NETWORK, [pod("Failed", MEMORY)], FAILS),  # it has come by this check
        (NETWORK, [], ALONE),
        (DRIVER, [pod("Succeeded")], ALONE),  # that one had no GPU to look at
        (DRIVER, [pod("Succeeded", has_gpus=True)], FAILS),
        (DRIVER, [pod("Failed", DRIVER, has_gpus=True)], SHARED),  # the runtime is a RuntimeClass
        (DRIVER, [pod("Failed", GPUS, has_gpus=True)], FAILS),
        (GPUS, [pod("Succeeded", has_gpus=True)], FAILS),
        (GPUS, [pod("Failed", GPUS, has_gpus=True)], SHARED),
        (GPUS, [pod("Succeeded")], FAILS),  # the cluster is full; nvidia-smi has told of this node's own
        (MEMORY, [pod("Failed", NETWORK)], ALONE),
        ("", [pod("Failed", NETWORK)], FAILS),  # it has not even run, or is of another version and says no check
        ("", [pod("Succeeded")], FAILS),
        ("", [pod("Failed")], SHARED),
        (NETWORK, [pod("Failed", "Evicted", inconclusive=InconclusiveReason.NOT_RUN)], ALONE),
    ],
)
def test_a_check_counts_where_another_node_passes_it(
    check: str, others: list[ProbePod], expected: tuple[bool | None, InconclusiveReason | None]
) -> None:
    gpus = check in (DRIVER, GPUS)
    assert ended(pod("Failed", check, "node-1", gpus), *others) == expected


def test_the_others_are_waited_for_as_long_as_they_may_tell() -> None:
    failed = pod("Failed", NETWORK, "node-1")
    assert ended(failed, pod("Running")) is None
    assert ended(failed, pod("Running"), pod("Succeeded", node="node-3")) == FAILS
    assert ended(failed, pod("Running"), seconds=60.0) == ALONE
    assert ended(pod("Failed", GPUS, "node-1", has_gpus=True), pod("Running", has_gpus=True)) is None
    assert ended(pod("Failed", node="node-1", inconclusive=InconclusiveReason.NOT_RUN), pod("Running")) == (
        None,
        InconclusiveReason.NOT_RUN,
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([pod("Succeeded")], FAILS),
        ([pod("Failed", NETWORK)], FAILS),  # it has run
        ([pod("Pending")], SHARED),  # no node can start pods just now
        ([], ALONE),
    ],
)
def test_a_pod_that_does_not_end_counts_where_another_one_does(
    others: list[ProbePod], expected: tuple[bool | None, InconclusiveReason | None]
) -> None:
    assert ended(pod("Pending", node="node-1"), *others, seconds=60.0) == expected


def test_a_pod_says_in_which_check_it_failed() -> None:
    def of(phase: str, words: dict[str, Any] | str) -> ProbePod:
        message = words if isinstance(words, str) else json.dumps(words)
        state = {"terminated": {"exitCode": 1, "message": message}}
        return ProbePod.parse({"status": {"phase": phase, "containerStatuses": [{"state": state}]}})

    failed = of("Failed", {"unfit": "nvidia-smi does not work", "check": "driver", "gpus": 4})
    assert (failed.failed_check, set(failed.passed_checks)) == ("driver", {"runs", "network"})
    assert "gpus" in of("Succeeded", {"core_seconds": 0.001, "gpus": 1}).passed_checks
    assert "gpus" not in of("Succeeded", {"core_seconds": 0.001, "gpus": 0}).passed_checks
    for odd in ({"unfit": "no", "check": 7, "gpus": "x"}, {"unfit": "no", "check": "of tomorrow"}, "Traceback", "[]"):
        assert of("Failed", odd).passed_checks == frozenset()

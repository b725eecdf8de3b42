"""From NCCL's plugin, called by a stand-in for NCCL, over sidecars to the delay matrix."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.health.rank_rings import NCCL_STEP_MEASUREMENT_SECONDS, RankRings
from pacekeeper.observe.collectives.nccl_transport import TransportReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.network.delay_matrix import SpotKind, describe_hot_spot, diagnose_links, join_link_ends
from pacekeeper_analysis.protocol.reports import MAX_WORKER_FLOWS, Evidence, FlowWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.protocol.transport import TRANSPORT_HEADER
from pacekeeper_rank.record_ring import RingWriter, create_ring
from testing.training.nccl import NcclDriver, build_driver

WORKERS, FIRST_RANK = 4, 20
"""Of one rank each, so that places in the communicator are not the ranks' numbers."""
PARTS = (EvidencePart.WINDOWS, EvidencePart.LINKS)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> NcclDriver:
    return build_driver(tmp_path_factory.mktemp("nccl"))


def build_worker(folder: Path, place: int) -> tuple[RuntimeFolder, RankRings]:
    runtime = RuntimeFolder(folder / f"w{place}").create()
    create_ring(runtime.ring(0), rank=FIRST_RANK + place, round_=1, capacity=64)
    RingWriter(runtime.ring(0))
    return runtime, RankRings(runtime, window_steps=2)


def collect_answers(driver: NcclDriver, folder: Path, slow: tuple[int, int] = (-1, -1)) -> list[Evidence]:
    """Return each worker's answer as the operator reads it."""
    answers = []
    for place in range(WORKERS):
        runtime, rings = build_worker(folder, place)
        peer = slow[1] if place == slow[0] else -1
        driver.run_scenario(6, "traffic", WORKERS, place, peer, transport=runtime.transport(0))
        sent = rings.build_evidence("why", f"w{place}", 1, PARTS)
        answers.append(Evidence.from_json(json.loads(json.dumps(sent.to_json()))))
    return answers


def test_a_slow_pair_is_a_hot_cell(driver: NcclDriver, tmp_path: Path) -> None:
    cells, unknown = join_link_ends(collect_answers(driver, tmp_path, slow=(1, 2)))
    assert unknown == 0
    found = diagnose_links(cells)
    (spot,) = found.hot_spots
    assert (spot.kind, spot.source, spot.destination) == (SpotKind.LINK, FIRST_RANK + 1, FIRST_RANK + 2)
    assert spot.ratio == pytest.approx(5, rel=0.05)
    assert describe_hot_spot(spot).startswith(
        "link 21 → 22: 40 MB/s while a channel of NCCL is busy, the others 200 MB/s"
    )
    assert found.cells == WORKERS * (WORKERS - 1)


def test_equal_transfers_show_nothing(driver: NcclDriver, tmp_path: Path) -> None:
    found = diagnose_links(join_link_ends(collect_answers(driver, tmp_path))[0])
    assert (found.is_known, found.hot_spots) == (True, ())


def test_a_rank_without_the_plugin_is_unknown_to_the_others(driver: NcclDriver, tmp_path: Path) -> None:
    answers_of_others = [answer for answer in collect_answers(driver, tmp_path, slow=(1, 2)) if answer.worker != "w2"]
    cells, unknown = join_link_ends(answers_of_others)
    assert unknown == 3, "one of each who sends to it"
    assert not {cell.destination for cell in cells} & {FIRST_RANK + 2}


def test_a_request_has_the_next_seconds_measured(driver: NcclDriver, tmp_path: Path) -> None:
    runtime, rings = build_worker(tmp_path, 0)
    driver.run_scenario(6, "traffic", WORKERS, 0, -1, transport=runtime.transport(0))
    unlimited = _read_steps_until(runtime)
    assert rings.build_evidence("why", "w0", 1, (EvidencePart.WINDOWS,)).flows == ()
    assert _read_steps_until(runtime) == unlimited, "no request for links was made"
    before = time.monotonic_ns()
    rings.build_evidence("why", "w0", 1, PARTS)
    assert before < _read_steps_until(runtime) - NCCL_STEP_MEASUREMENT_SECONDS * 1e9 < time.monotonic_ns()


def test_the_largest_of_too_many_flows_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, rings = build_worker(tmp_path, 0)
    rings.refresh()
    many = tuple(FlowWindow(1, 0, 1 + peer, FIRST_RANK, 0, peer) for peer in range(MAX_WORKER_FLOWS + 5))
    monkeypatch.setattr(RankRings, "_read_flows", lambda *_: many)
    flows = rings.build_evidence("why", "w0", 1, PARTS).flows
    assert (len(flows), min(flow.sent_bytes for flow in flows)) == (MAX_WORKER_FLOWS, 5)


@pytest.mark.parametrize("content", [None, b"", b"no such file"], ids=["none", "empty", "another"])
def test_nothing_else_changes_without_the_plugin(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, rings = build_worker(tmp_path, 0)
    if content is not None:
        runtime.transport(0).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        answer = rings.build_evidence("why", "w0", 1, PARTS)
    assert (answer.flows, [window.rank for window in answer.windows]) == ((), [FIRST_RANK])
    assert ("rank 20's transfers over NCCL are unknown" in caplog.text) is (content is not None)
    assert join_link_ends([answer]) == ([], 0)


def test_files_that_are_truncated_while_they_are_read_end_no_sidecar(driver: NcclDriver, tmp_path: Path) -> None:
    runtime, rings = build_worker(tmp_path, 0)
    driver.run_scenario(6, "traffic", WORKERS, 0, -1, transport=runtime.transport(0))
    transport = TransportReader(runtime.transport(0))
    assert len(transport.operations())
    assert len(rings.refresh()) == 1
    for path in (runtime.transport(0), runtime.ring(0)):
        os.truncate(path, 0)
    assert (len(transport.operations()), len(transport.communicators())) == (0, 0)
    assert rings.refresh() == rings.refresh() == []


def test_a_link_does_not_lead_the_sidecar_to_another_file(driver: NcclDriver, tmp_path: Path) -> None:
    runtime, rings = build_worker(tmp_path, 0)
    driver.run_scenario(6, "traffic", WORKERS, 0, -1, transport=runtime.transport(0))
    other = runtime.transport(0).rename(tmp_path / "other")
    before = other.read_bytes()
    runtime.transport(0).symlink_to(other)
    assert rings.build_evidence("why", "w0", 1, PARTS).flows == ()
    assert other.read_bytes() == before


def _read_steps_until(runtime: RuntimeFolder) -> int:
    return int(np.fromfile(runtime.transport(0), TRANSPORT_HEADER, count=1)["steps_until_ns"][0])

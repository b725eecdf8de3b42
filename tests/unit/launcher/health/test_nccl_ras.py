"""NCCL's RAS is queried when a job stalls. A stand-in for its server, which needs a GPU, speaks its protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pacekeeper.launcher.health import nccl_ras
from pacekeeper.launcher.health.nccl_ras import (
    MAX_RAS_REPORT_CHARACTERS,
    extract_findings,
    format_ranges,
    is_querying_worker,
    query_ras,
    summarize_status,
)
from pacekeeper_analysis.errors import InputError

COUNTS = {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 41}


def build_rank(number: int, all_reduces: int = 41, **status: Any) -> dict[str, Any]:
    usual = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": 70 + number,
        "status": {**usual, **status},
        "collective_counts": {**COUNTS, "AllReduce": all_reduces},
    }


def build_missing_rank(number: int, unresponsive: bool = False, dead: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {"rank": number, "host": "10.0.0.2", "pid": 70 + number, "status": status}


def build_status(*ranks: dict[str, Any], gone: tuple[dict[str, Any], ...] = (), size: int = 4) -> dict[str, Any]:
    one = {"hash": "0xa1", "size": size, "ranks": list(ranks), "missing_ranks": list(gone)}
    return {"nccl_version": "2.30.7", "communicators": [one]}


@dataclass
class FakeRasServer:
    """The stand-in. `answer`: to STATUS, as JSON; `text`: the same as text; None: it is too old for JSON."""

    answer: str | None
    text: str = ""
    greeting: str = "SERVER PROTOCOL 2\n"
    silent_calls: int = 0  # this number of connections is taken by a process that is stopped
    commands: list[str] = field(default_factory=list)
    calls: int = 0

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        silent, as_json = self.calls <= self.silent_calls, False
        while line := (await reader.readline()).decode().strip():
            self.commands.append(line)
            command = line.lower()
            if silent:
                continue
            if command.startswith("client protocol "):
                writer.write(self.greeting.encode())
            elif command.startswith("timeout "):
                writer.write(b"OK\n")
            elif command == "set format json":
                as_json = self.answer is not None
                writer.write(b"OK\n" if as_json else b"ERROR: Unknown command SET FORMAT json\n")
            elif command == "status":
                writer.write(((self.answer or "") if as_json else self.text).encode(errors="surrogateescape"))
                break
        writer.close()


@asynccontextmanager
async def run_server(server: FakeRasServer) -> AsyncIterator[dict[str, str]]:
    """Yield the environment that makes the launcher query it."""
    listener = await asyncio.start_server(server.handle_connection, "127.0.0.1", 0)
    try:
        yield {"NCCL_RAS_ADDR": f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"}
    finally:
        listener.close()


async def test_dead_ranks_and_ranks_that_launched_less_are_reported() -> None:
    job_status = build_status(
        build_rank(0), build_rank(1, 40), build_rank(2), gone=(build_missing_rank(3, unresponsive=True, dead=True),)
    )
    server = FakeRasServer(json.dumps(job_status, indent=2))
    async with run_server(server) as environment:
        report = await query_ras(environment)
    assert report == (
        "communicator 0xa1 of 4: dead: rank 3 (10.0.0.2, process 73); AllReduce launched 40 by rank 1, 41 by rank 0, 2"
    )
    assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]


def test_every_anomaly_is_described() -> None:
    job_status = build_status(
        build_rank(0, init_state=7),
        build_rank(1, init_state=3),
        build_rank(2, async_error=6),
        build_rank(3, abort_flag=True),
        build_rank(4, finalize_called=True),
        gone=(build_missing_rank(5, unresponsive=True), build_missing_rank(6)),
        size=7,
    )
    assert summarize_status(job_status) == (
        "communicator 0xa1 of 7: no answer from: rank 5 (10.0.0.2, process 75); not a member: rank 6 (10.0.0.2, "
        "process 76); initializing: rank 0; initialization failed with error 3: rank 1; error 6: rank 2; "
        "aborting: rank 3; finalizing: rank 4"
    )


def test_one_line_reports_that_all_ranks_are_alike() -> None:
    alike = build_status(build_rank(0), build_rank(1))
    assert summarize_status(alike) == "1 communicator: all ranks alike"
    assert summarize_status({"communicators": alike["communicators"] * 3}) == "3 communicators: all ranks alike"
    assert summarize_status({"communicators": []}) == "NCCL has no communicators"


def test_ranks_are_reported_in_ranges() -> None:
    assert format_ranges([5, 0, 1, 2]) == "0–2, 5"
    assert format_ranges(list(range(0, 100, 2))).endswith("14 and 42 more")


async def test_an_older_nccl_is_queried_for_text() -> None:
    text = (
        "NCCL version 2.27\n\nJob summary\n===========\n\nErrors\n======\n\nDEAD\n  1 job process is considered dead\n"
    )
    async with run_server(FakeRasServer(None, text)) as environment:
        assert await query_ras(environment) == "Errors\n======\n\nDEAD\n  1 job process is considered dead"
    assert extract_findings("a\n\nWarnings\n========\n\nTIMEOUT\n") == "Warnings\n========\n\nTIMEOUT"
    assert extract_findings("Job summary\n 4 nodes\n") == "Job summary\n 4 nodes"


async def test_the_text_is_used_when_the_answer_is_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MAX_RAS_ANSWER_BYTES", 100_000)
    huge = json.dumps(build_status(*(build_rank(number) for number in range(1_000)), size=1_000))
    assert len(huge) > nccl_ras.MAX_RAS_ANSWER_BYTES
    async with run_server(FakeRasServer(huge, "Errors\n======\nmany" + "!" * 5_000)) as environment:
        report = await query_ras(environment)
    assert report.startswith("Errors\n======\nmany!!!")
    assert len(report) == MAX_RAS_REPORT_CHARACTERS
    async with run_server(FakeRasServer(huge, "x" * 200_000)) as environment:
        assert await query_ras(environment) == "NCCL's RAS sent an unreadable answer: status: more than 100000 bytes"


async def test_a_stopped_process_may_accept_the_connection_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "RAS_GREETING_TIMEOUT_SECONDS", 0.05)
    server = FakeRasServer(json.dumps(build_status(build_rank(0))), silent_calls=2)
    async with run_server(server) as environment:
        assert await query_ras(environment) == "1 communicator: all ranks alike"
    assert server.calls == 3


async def test_a_query_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "RAS_GREETING_TIMEOUT_SECONDS", 0.05)
    async with run_server(FakeRasServer(None, silent_calls=99)) as environment:
        assert await query_ras(environment, patience=0.2) == "NCCL's RAS has not answered within 0.2 s"


async def test_without_a_listener_there_is_nothing_to_report() -> None:
    async with run_server(FakeRasServer("{}")) as environment:
        assert await query_ras({**environment, "NCCL_RAS_ENABLE": "0"}) == ""
    assert await query_ras(environment) == ""


@pytest.mark.parametrize(
    ("answer", "report"),
    [
        ("", "unreadable answer"),
        ("\udcff\udc00{", "unreadable answer"),
        ("[1]", "status: must be an object"),
        ("[" * 100_000, "unreadable answer"),
        ('{"communicators": 3}', "status.communicators: must be a list of objects"),
        ('{"communicators": [{"ranks": [{"rank": "x", "status": {}}]}]}', "ranks[0].rank: must be a whole number"),
        ('{"communicators": [{"ranks": [{"rank": 1}]}]}', "ranks[0].status: must be an object"),
        ('{"communicators": [{"missing_ranks": [{"rank": 1, "pid": 2, "host": 3}]}]}', "host: must be a string"),
        ('{"communicators": [{"missing_ranks": [{"rank": 1e400}]}]}', "rank: must be a whole number"),
    ],
)
async def test_garbage_is_reported_as_garbage(answer: str, report: str) -> None:
    async with run_server(FakeRasServer(answer)) as environment:
        assert report in await query_ras(environment)


async def test_another_service_at_the_port_is_not_trusted() -> None:
    async with run_server(FakeRasServer("{}", greeting="HTTP/1.1 400 Bad Request\n")) as environment:
        assert "greeting: 'HTTP/1.1 400 Bad Request\\n' is not RAS's" in await query_ras(environment)


@pytest.mark.parametrize("address", ["nowhere", ":28028", "localhost:port", "localhost:99999"])
async def test_an_invalid_address_is_named(address: str) -> None:
    assert f"NCCL_RAS_ADDR={address!r}: give host:port" in await query_ras({"NCCL_RAS_ADDR": address})


def test_unprintable_characters_are_removed() -> None:
    with pytest.raises(InputError):
        summarize_status([])
    assert nccl_ras.shorten_text("a\x1b[31mb\x00\n") == "a[31mb"


def test_not_every_worker_of_a_large_job_queries() -> None:
    assert all(is_querying_worker(ranks) for ranks in ([0], [8, 9], [15, 16]))
    assert not any(is_querying_worker(ranks) for ranks in ([16, 17], []))

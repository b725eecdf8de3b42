"""The output of ranks reaches the reader of the launcher. A reader that stops reading stops only the ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pacekeeper.launcher.ranks.output_pipe import OutputPipe
from pacekeeper.launcher.ranks.output_writer import OUTPUT_FULL_BYTES, LogStream, OutputWriter

LIMIT = 60.0
"""Seconds; it only bounds a failure."""


@dataclass
class Reader:
    """A pipe to whose writing end an output writer writes."""

    descriptor: int
    writer: OutputWriter

    def read(self, size: int) -> bytes:
        """Return this number of bytes. Not to be called in the loop."""
        data = b""
        while len(data) < size:
            data += os.read(self.descriptor, size - len(data))
        return data

    async def expect(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT):
            assert await asyncio.to_thread(self.read, len(data)) == data


@pytest.fixture
def reader() -> Iterator[Reader]:
    read_end, write_end = os.pipe()
    yield Reader(read_end, OutputWriter(write_end, "standard output"))
    os.close(write_end)  # a thread that still writes has no reader left, which ends its write
    os.close(read_end)


async def wait_until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not is_met():  # noqa: ASYNC110  # a thread and a reader change it, without an event
            await asyncio.sleep(0.01)


def open_rank_pipe(writer: OutputWriter, number: int) -> OutputPipe:
    return OutputPipe(writer, f"[{number}] ".encode())


async def test_a_line_that_has_not_ended_is_passed_on_after_a_moment(reader: Reader) -> None:
    pipe = open_rank_pipe(reader.writer, 1)
    os.write(pipe.write_end, b"first\nGo on? ")
    await reader.expect(b"[1] first\n[1] Go on? ")
    os.write(pipe.write_end, b"yes\nlast\n")
    await reader.expect(b"yes\n[1] last\n")
    os.close(pipe.write_end)


async def test_progress_bars_of_several_ranks_overwrite_each_other(reader: Reader) -> None:
    zero, one = open_rank_pipe(reader.writer, 0), open_rank_pipe(reader.writer, 1)
    os.write(zero.write_end, b"\r10%\r20%\r30%")
    await reader.expect(b"\r[0] 10%\r[0] 20%\r[0] 30%")
    os.write(one.write_end, b"\r15%\r")
    await reader.expect(b"\r[1] 15%\r")
    os.write(zero.write_end, b"done\r\n\r\n")
    await reader.expect(b"[0] done\r\n[0] \r\n")
    for pipe in (zero, one):
        os.close(pipe.write_end)


async def test_output_of_other_ranks_does_not_run_into_a_line_that_has_not_ended(reader: Reader) -> None:
    zero, one = open_rank_pipe(reader.writer, 0), open_rank_pipe(reader.writer, 1)
    os.write(zero.write_end, b"begun")
    await reader.expect(b"[0] begun")
    os.write(one.write_end, b"other\n")
    await reader.expect(b"\n[1] other\n")
    os.write(zero.write_end, b" and ended\n")
    await reader.expect(b"[0]  and ended\n")
    os.write(zero.write_end, b"again")
    await reader.expect(b"[0] again")
    LogStream(reader.writer).write("the launcher\n")
    await reader.expect(b"\nthe launcher\n")
    for pipe in (zero, one):
        os.close(pipe.write_end)


async def test_a_reader_that_stops_reading_stops_only_the_ranks_and_nothing_is_lost(reader: Reader) -> None:
    pipe = OutputPipe(reader.writer)
    text = b"".join(b"%08d\n" % number for number in range(400_000))

    def print_all() -> None:
        left = memoryview(text)
        while left:
            left = left[os.write(pipe.write_end, left) :]
        os.close(pipe.write_end)

    printing = asyncio.create_task(asyncio.to_thread(print_all))
    await wait_until(lambda: reader.writer.is_full)
    for _ in range(100):
        await asyncio.sleep(0)  # the loop goes on
    assert reader.writer._bytes < OUTPUT_FULL_BYTES + (2 << 20), "what is not read waits with the rank"
    assert not printing.done()
    await reader.expect(text)
    await printing
    await wait_until(lambda: pipe.tail().endswith("00399999\n"))


@pytest.mark.parametrize("how", ["closed", "full device"])
async def test_a_closed_reader_is_named_and_the_ranks_continue(reader: Reader, how: str) -> None:
    writer = reader.writer
    if how == "closed":
        os.close(reader.descriptor)
        reader.descriptor = os.open(os.devnull, os.O_RDONLY)
    else:
        writer = OutputWriter(os.open("/dev/full", os.O_WRONLY), "standard output")
    pipe = OutputPipe(writer)
    for _ in range(40):
        await asyncio.to_thread(os.write, pipe.write_end, b"x" * 2**17)
    os.write(pipe.write_end, b"\nlast\n")
    await wait_until(lambda: pipe.tail().endswith("last\n"))
    assert writer.closed_reason.startswith("standard output cannot be written to any more (")
    assert writer.drain(LIMIT)
    os.close(pipe.write_end)


async def test_output_on_a_non_blocking_stream_is_written_whole(reader: Reader) -> None:
    assert reader.writer._descriptor is not None
    os.set_blocking(reader.writer._descriptor, False)
    text = b"line\n" * 50_000
    for start in range(0, len(text), 50_000):
        reader.writer.write(text[start : start + 50_000])
    await reader.expect(text)
    assert await asyncio.to_thread(reader.writer.drain, LIMIT)
    assert not reader.writer.closed_reason

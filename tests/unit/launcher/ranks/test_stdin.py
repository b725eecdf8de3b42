"""The first rank reads the launcher's standard input."""

from __future__ import annotations

import asyncio
import os
import pty

from pacekeeper.launcher.ranks.stdin import StandardInput


async def test_the_next_round_reads_the_rest_of_a_pipe() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"1234")
    stdin = StandardInput(read_end)
    for part in (b"12", b"34"):
        given = stdin.open()
        assert given is not None
        assert os.read(given, 2) == part
        os.close(given)
    stdin.close()
    for descriptor in (read_end, write_end):
        os.close(descriptor)


async def test_terminal_input_is_passed_to_the_rank_of_the_current_round() -> None:
    keyboard, terminal = pty.openpty()
    stdin = StandardInput(terminal)
    for line in (b"step\n", b"quit\n"):
        given = stdin.open()
        assert given is not None
        assert not os.isatty(given)
        os.write(keyboard, line)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(os.read, given, 99) == line
        os.write(keyboard, b"\x04")
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(os.read, given, 99) == b"", "Ctrl-D"
        os.close(given)
    stdin.close()
    for descriptor in (keyboard, terminal):
        os.close(descriptor)


async def test_ranks_have_no_standard_input_if_the_launcher_has_none() -> None:
    assert StandardInput(None).open() is None

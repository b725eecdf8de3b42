"""Where the ranks' output goes by torchrun's options, and what is read of torch's error files."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.launcher.ranks.log_files import (
    FileWriter,
    RankOutput,
    choose_error_file,
    copy_error_file,
    make_run_folder,
    merge_error_texts,
    read_recorded_error,
)
from pacekeeper.launcher.ranks.output_pipe import OutputPipe
from pacekeeper.launcher.ranks.rank_options import (
    OutputOptions,
    RankOptions,
    RankPlace,
    StandardStream,
    StreamPlan,
    StreamSelection,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.forking.rank_start import RankStart

ALL = StreamSelection(StandardStream.OUT | StandardStream.ERR)
FOLDER = Path("/logs/x_1")
PLACE = RankPlace(rank=5, local_rank=1, attempt=2, shares_console=True)
FILE = FOLDER / "attempt_2/1/stdout.log"


def plan_stream(
    output: OutputOptions, stream: StandardStream = StandardStream.OUT, place: RankPlace = PLACE
) -> StreamPlan:
    return output.plan_stream(stream, place, "trainer", "node7")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (OutputOptions(), StreamPlan(True, "[5] ")),
        (OutputOptions(FOLDER), StreamPlan(True, "[5] ")),
        (OutputOptions(FOLDER, redirects=ALL), StreamPlan(False, "[5] ", FILE)),
        (OutputOptions(FOLDER, redirects=StreamSelection(StandardStream.ERR)), StreamPlan(True, "[5] ")),
        (
            OutputOptions(FOLDER, redirects=StreamSelection(streams_by_rank={0: StandardStream.OUT})),
            StreamPlan(True, "[5] "),
        ),
        (
            OutputOptions(FOLDER, redirects=StreamSelection(streams_by_rank={1: StandardStream.OUT})),
            StreamPlan(False, "[5] ", FILE),
        ),
        (OutputOptions(FOLDER, tee=ALL), StreamPlan(True, "[trainer1]:", FILE)),
        (OutputOptions(FOLDER, redirects=ALL, tee=ALL), StreamPlan(True, "[trainer1]:", FILE)),
        (OutputOptions(FOLDER, tee=ALL, shown_ranks=frozenset({0})), StreamPlan(False, "[trainer1]:", FILE)),
        (OutputOptions(shown_ranks=frozenset({0})), StreamPlan(False, "[5] ")),
        (OutputOptions(shown_ranks=frozenset({1})), StreamPlan(True, "[5] ")),
        (OutputOptions(None, tee=ALL), StreamPlan(True, "[5] ")),  # --log-dir /dev/null
        (
            OutputOptions(FOLDER, tee=ALL, prefix_template="${hostname}:${rank}/${local_rank}/${role_name}/${x} "),
            StreamPlan(True, "node7:5/1/trainer/${x} ", FILE),
        ),
        (
            OutputOptions(FOLDER, tee=ALL, stdout_filters=("loss",)),
            StreamPlan(True, "[trainer1]:", FILE, FOLDER / "attempt_2/filtered_stdout.log", ("loss",)),
        ),
        (OutputOptions(FOLDER, tee=ALL, stderr_filters=("loss",)), StreamPlan(True, "[trainer1]:", FILE)),
    ],
)
def test_a_stream_goes_where_torchrun_would_send_it(output: OutputOptions, expected: StreamPlan) -> None:
    assert plan_stream(output) == expected


def test_a_single_ranks_lines_have_no_prefix_unless_the_user_requests_one() -> None:
    single = replace(PLACE, shares_console=False)
    assert plan_stream(OutputOptions(), place=single).prefix == ""
    assert plan_stream(OutputOptions(prefix_template="$rank>"), place=single).prefix == "5>"


def build_rank_start(tmp_path: Path) -> RankStart:
    environment = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    return RankStart("1-0", 0, 1, "s.py", False, [], environment, "ring", "stack", 0)


async def test_redirected_and_teed_streams_are_written_to_files(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = make_run_folder(str(tmp_path / "new" / "logs"), "a/b")
    assert folder.parent == tmp_path / "new" / "logs"
    assert folder.name.startswith("a_b_")
    output = OutputOptions(
        folder,
        StreamSelection(StandardStream.ERR),
        StreamSelection(StandardStream.OUT),
        stdout_filters=("loss", "two"),
        shown_ranks=None,
    )
    ranks = RankOutput(RankOptions(output=output))
    (tmp_path / "error.json").write_text("of an earlier rank")
    stdout, stderr = ranks.open(build_rank_start(tmp_path), 0, shares_console=True)
    assert not (tmp_path / "error.json").exists()
    os.write(stdout.write_end, b"one\nloss 3\nbar 10%\rtwo")
    os.write(stderr.write_end, b"warning\nValueError: 3\n")
    for stream in (stdout, stderr):
        os.close(stream.write_end)
    await asyncio.sleep(0)
    stdout.pump()
    assert stderr.tail() == "warning\nValueError: 3\n"
    for stream in (stdout, stderr):
        stream.close()
    ranks.close()
    attempt = folder / "attempt_0"
    assert (attempt / "0/stdout.log").read_bytes() == b"one\nloss 3\nbar 10%\rtwo"
    assert (attempt / "0/stderr.log").read_bytes() == b"warning\nValueError: 3\n"
    assert (attempt / "filtered_stdout.log").read_bytes() == b"[default0]:loss 3\n[default0]:bar 10%\rtwo\n"
    shown = capfdbinary.readouterr()
    assert shown.err == b""


async def test_a_folder_that_takes_no_files_leaves_the_output_on_the_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    output = OutputOptions(tmp_path / "file", redirects=ALL)
    streams = RankOutput(RankOptions(output=output)).open(build_rank_start(tmp_path), 0, shares_console=False)
    assert all(isinstance(stream, OutputPipe) for stream in streams)
    assert "no log file for rank 0" in caplog.text
    for stream in streams:
        os.close(stream.write_end)
        stream.close()
    with pytest.raises(InputError, match=f"--log-dir {tmp_path}/file/x: .*name a folder"):
        make_run_folder(str(tmp_path / "file" / "x"), "x")


def test_a_stalled_file_system_blocks_no_rank_and_lost_output_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacekeeper.launcher.ranks.log_files._MAX_PENDING_LOG_BYTES", 1 << 20)
    monkeypatch.setattr("pacekeeper.launcher.ranks.log_files._LOG_DRAIN_SECONDS", 0.01)
    os.mkfifo(tmp_path / "fifo")
    read_end = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # which has no reader
    file = (tmp_path / "fifo").open("wb", buffering=0)
    writer = FileWriter()
    for _ in range(4):
        writer.write(file, b"x" * (1 << 20))
    writer.close()
    os.close(read_end)  # the writer's thread ends
    assert "bytes of the ranks' output: their file system was too slow or failed" in caplog.text


def test_error_files_are_in_the_log_folder_or_in_the_runtime_folder() -> None:
    assert choose_error_file(RankOptions(), 2, 1, Path("/run/errors")) == Path("/run/errors/1.json")
    options = RankOptions(output=OutputOptions(FOLDER))
    assert choose_error_file(options, 2, 1, Path("/run/errors")) == FOLDER / "attempt_2/1/error.json"


CALLSTACK = "Traceback (most recent call last):\n  File x\nValueError: no data\n"
RECORDED = {"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": CALLSTACK, "timestamp": "1"}}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(RECORDED), CALLSTACK.strip()),
        ('{"message": {"message": "ValueError: no data"}}', "ValueError: no data"),
        ('{"message": "no data", "timestamp": 3}', "no data"),
        ('{"message": {"message": 3}}', ""),
        ('{"message": ["x"]}', ""),
        ("[]", ""),
        ("{", ""),
        ("", ""),
    ],
)
def test_a_recorded_error_of_any_form_is_read(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "error.json"
    assert read_recorded_error(path) == ""
    path.write_text(content)
    assert read_recorded_error(path) == text


def test_a_recorded_error_explains_an_exit_that_the_output_does_not() -> None:
    assert merge_error_texts("Traceback\n[rank1]: ValueError: no\n", "Traceback\nValueError: no") == (
        "Traceback\n[rank1]: ValueError: no\n"
    )
    assert merge_error_texts("leaked semaphores\n", "Traceback\nValueError: no") == (
        "leaked semaphores\nTraceback\nValueError: no\n"
    )
    assert merge_error_texts("", "ValueError: no") == "ValueError: no\n"
    assert merge_error_texts("words\n", "") == "words\n"


def test_a_ranks_error_file_becomes_the_launchers(tmp_path: Path) -> None:
    rank, own = tmp_path / "rank.json", tmp_path / "own.json"
    copy_error_file(rank, {"TORCHELASTIC_ERROR_FILE": str(own)})
    rank.write_text("{}")
    copy_error_file(rank, {})
    assert not own.exists()
    copy_error_file(rank, {"TORCHELASTIC_ERROR_FILE": str(own)})
    assert own.read_text() == "{}"

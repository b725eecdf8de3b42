"""`pacekeeper run --local N`: the same on one machine, without a cluster."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper.launcher import local_controller
from pacekeeper.launcher.command import launch_locally
from pacekeeper.launcher.launcher import Script
from pacekeeper_rank.forking.warm_server import import_modules
from testing.training.launchers import STEPS_SCRIPT, fork_process, wait_until_true
from testing.training.ranks import PREIMPORTS


@contextmanager
def start_local_run(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    folder: Path,
    faults: Sequence[Mapping[str, object]] = (),
    restarts: int = 5,
    steps: int = 20,
    step_seconds: float = 0.01,
    script: Path = STEPS_SCRIPT,
    controller: Mapping[str, float] | None = None,
    fake_clock: bool = False,
    variant: str = "",
) -> Iterator[int]:
    """The process id of a run with two ranks; its output is in `folder`/log. controller: other constants for it.

    fake_clock: by which only what the script declares takes time (where it supports that). variant: of ordinary.py.
    """
    import_modules(PREIMPORTS)
    environment = {
        **({"FAKE_CLOCK": "yes"} if fake_clock else {}),
        "FOLDER": str(folder),
        "VARIANT": variant,
        "STEPS": str(steps),
        "UNTIL": str(steps),
        "STEP_SECONDS": str(step_seconds),
        "FAULTS": json.dumps(list(faults)),
    }
    what = Script(str(script), False, ())

    def run() -> int:
        for name, value in (controller or {}).items():
            setattr(local_controller, name, value)
        return launch_locally(what, ranks=2, restarts=restarts)

    pid = fork_process(run, folder / "log", environment)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@contextmanager
def interrupt_repeatedly(pid: int) -> Iterator[Callable[[], None]]:
    """Ctrl-C again and again, until what it gives is called, or the end."""
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.005):
            os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()

    def stop_interrupting() -> None:
        stop.set()
        thread.join()

    try:
        yield stop_interrupting
    finally:
        stop_interrupting()


def exit_code(pid: int, folder: Path, before_reaped: Callable[[], object] = lambda: None) -> int:
    def ended() -> tuple[int, int] | None:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        before_reaped()  # its number is its own as long as it is not reaped
        return os.waitpid(pid, 0)

    try:
        _, status = wait_until_true(ended, "the run ends") or (0, 0)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{(folder / 'log').read_text()}") from None
    return os.waitstatus_to_exitcode(status)


def read_diary(folder: Path, rank: int) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in (folder / f"diary-{rank}").read_text().splitlines()]


def test_a_crashed_rank_starts_again_and_the_run_reports_it(tmp_path: Path) -> None:
    with start_local_run(tmp_path, faults=[{"rank": 1, "round": 1, "step": 4, "kind": "sigkill"}]) as pid:
        assert exit_code(pid, tmp_path) == 0, (tmp_path / "log").read_text()
    assert read_diary(tmp_path, 1)[-1] == "round 2 end"
    assert "rank 1 was killed by SIGKILL in round 1 after step 3" in (tmp_path / "log").read_text()


def list_children(pid: int) -> list[int]:
    """Process ids."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_warm_process_that_dies_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_local_run(tmp_path, steps=20, step_seconds=0.05) as pid:
        wait_until_true(
            lambda: (tmp_path / "diary-0").exists() and "round 1 step 3" in read_diary(tmp_path, 0), "three steps"
        )
        (warm,) = list_children(pid)
        os.kill(warm, signal.SIGKILL)
        assert exit_code(pid, tmp_path) == 0, log.read_text()
    for rank in (0, 1):
        steps = [line.split()[-1] for line in read_diary(tmp_path, rank) if " step " in line]
        assert steps == [str(step) for step in range(1, 21)], "each once: they go on where they were"
        assert read_diary(tmp_path, rank)[-1] == "round 2 end"
    assert "exited (killed by SIGKILL), and the ranks with it; starting another one" in log.read_text()
    assert "the process that it was forked from has exited: killed by SIGKILL" in log.read_text()


def test_a_warm_process_that_dies_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    with start_local_run(tmp_path, steps=10_000) as pid:
        wait_until_true(
            lambda: (tmp_path / "diary-0").exists() and "round 1 step 3" in read_diary(tmp_path, 0), "three steps"
        )
        (first,) = list_children(pid)
        os.kill(first, signal.SIGKILL)
        (second,) = wait_until_true(
            lambda: [child for child in list_children(pid) if is_python(child, first)], "another one"
        )
        os.kill(second, signal.SIGKILL)
        assert exit_code(pid, tmp_path) == 1
    assert "exited during its start: killed by SIGKILL" in (tmp_path / "log").read_text()


def is_python(pid: int, other_than: int) -> bool:
    """Whether this process was begun by another command than the test's own, from which all others are forked."""
    try:
        return pid != other_than and "serve_spawned_process" in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


def test_a_hanging_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    faults = [{"rank": 1, "round": 1, "step": 8, "kind": "stop"}]
    with start_local_run(tmp_path, faults, step_seconds=0.05) as pid:
        assert exit_code(pid, tmp_path) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "hang (Stopped): rank 1" in log
    assert "ends round 1 and starts round 2" in log
    assert read_diary(tmp_path, 0)[-1] == "round 2 end"


def test_a_script_that_always_fails_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    faults = [{"rank": 0, "round": number, "step": 1, "kind": "raise"} for number in (1, 2, 3)]
    with start_local_run(tmp_path, faults) as pid:
        assert exit_code(pid, tmp_path) == 1
    assert [line for line in read_diary(tmp_path, 0) if "start" in line] == ["round 1 start", "round 2 start"]
    *_, last = (tmp_path / "log").read_text().strip().splitlines()
    assert "RuntimeError: scripted failure" in last


ORDINARY = STEPS_SCRIPT.with_name("ordinary.py")


def test_ranks_that_wait_or_have_finished_are_not_hung(tmp_path: Path) -> None:
    """Child processes, idle and busy, and a FIFO; at the end, an export and an upload when the other rank has gone."""
    with start_local_run(tmp_path, script=ORDINARY, variant="waits") as pid:
        assert exit_code(pid, tmp_path) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "uploaded").exists()
    assert log.count("no progress for") >= 2, "the waits were not long enough to be seen"
    assert "hang" not in log
    assert "round 2" not in log


def test_uneven_batches_are_reported_and_not_repeated_indefinitely(tmp_path: Path) -> None:
    with start_local_run(tmp_path, script=ORDINARY, variant="uneven") as pid:
        assert exit_code(pid, tmp_path) == 1
    log = (tmp_path / "log").read_text()
    *_, last = log.strip().splitlines()
    assert "3 rounds have ended after step 60, and none got further: rank 0 ended with code 1" in last
    assert "waiting for rank 1, which had exited with code 0" in last
    assert "round 5" not in log, "the launcher may have begun the next one before it receives that it was the last"


def test_a_rank_that_fails_silently_ends_the_run(tmp_path: Path) -> None:
    with start_local_run(tmp_path, restarts=0, script=ORDINARY, variant="silent") as pid:
        assert exit_code(pid, tmp_path) == 1
    *_, last = (tmp_path / "log").read_text().strip().splitlines()
    assert "rank 1 ended with code 3" in last


def test_hangs_use_up_the_restarts(tmp_path: Path) -> None:
    faults = [{"rank": 1, "round": number, "step": 6 * number, "kind": "stop"} for number in (1, 2)]
    with start_local_run(tmp_path, faults, restarts=1) as pid:
        assert exit_code(pid, tmp_path) == 1
    assert "no restart is left" in (tmp_path / "log").read_text()


def test_sigterm_ends_the_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("pacekeeper-*"))
    with start_local_run(tmp_path, steps=10_000) as pid:
        wait_until_true(
            lambda: (tmp_path / "diary-0").exists() and "round 1 step 3" in read_diary(tmp_path, 0), "three steps"
        )
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid, tmp_path) == 143
    assert read_diary(tmp_path, 1)[-1] == "round 1 leave"
    assert set(Path("/dev/shm").glob("pacekeeper-*")) - before == set()


def is_held(folder: Path) -> bool:
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_a_second_ctrl_c_ends_ranks_that_do_not_leave_and_names_what_outlives_a_round(tmp_path: Path) -> None:
    script = tmp_path / "stays.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "if os.environ['PACEKEEPER_ROUND'] == '1' and os.environ['RANK'] == '0':\n"
        "    server = subprocess.Popen(['sleep', '77'], start_new_session=True)\n"
        "    open(os.environ['FOLDER'] + '/server', 'w').write(str(server.pid))\n"
        "    sys.exit('first')\n"
        "if os.environ['PACEKEEPER_ROUND'] == '2':\n"
        "    open(os.environ['FOLDER'] + '/ready-' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600)\n"
    )
    before = set(Path("/dev/shm").glob("pacekeeper-*"))
    with start_local_run(tmp_path, script=script) as pid:
        wait_until_true(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks stay")
        log, again = tmp_path / "log", "received SIGINT again"

        def is_second_received() -> bool:
            os.kill(pid, signal.SIGINT)
            return again in log.read_text()

        wait_until_true(is_second_received, "a second one is received")
        with interrupt_repeatedly(pid) as stop_interrupting:  # also while the launcher's process ends
            assert exit_code(pid, tmp_path, stop_interrupting) == 130
    server = int((tmp_path / "server").read_text())
    assert f"processes outlive round 1: {server} (sleep 77)" in log.read_text()
    os.kill(server, signal.SIGKILL)
    assert log.read_text().splitlines()[-1].endswith(f"ends with code 130: {again}")
    assert set(Path("/dev/shm").glob("pacekeeper-*")) - before == set()


def test_the_next_run_removes_what_a_killed_run_has_left(tmp_path: Path) -> None:
    with start_local_run(tmp_path, steps=10_000) as pid:
        wait_until_true(lambda: (tmp_path / "diary-0").exists(), "the ranks have started")
        (left,) = Path("/dev/shm").glob(f"pacekeeper-run-{pid}-*")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_until_true(lambda: not is_held(left), "its ranks have ended, too")
    (tmp_path / "next").mkdir()
    with start_local_run(tmp_path / "next", steps=0) as pid:
        assert exit_code(pid, tmp_path / "next") == 0
    assert not left.exists()


def test_a_slow_ranks_share_shrinks_while_the_job_runs(tmp_path: Path) -> None:
    """Rank 1 needs 6 ms a sample, rank 0 two: 18 and 6 of 24 samples take both of them 36 ms instead of 72."""

    def samples() -> list[tuple[int, int]]:
        """Of both ranks, in the steps that both have completed."""
        of_ranks = [(tmp_path / f"samples-{rank}").read_text().splitlines() for rank in (0, 1)]
        return [(int(one), int(other)) for one, other in zip(*of_ranks, strict=False)]

    script, hurried = STEPS_SCRIPT.with_name("uneven.py"), {"ADAPTATION_INTERVAL_SECONDS": 0.5}
    with start_local_run(tmp_path, steps=100_000, script=script, controller=hurried, fake_clock=True) as pid:
        log = tmp_path / "log"
        wait_until_true(
            lambda: "in most steps, at equal shares over their peers: rank 1" in log.read_text(), "a judgment"
        )
        wait_until_true(lambda: samples()[-100:] == [(18, 6)] * 100, "a hundred steps in which both take equally long")
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid, tmp_path) == 143
    assert samples()[0] == (12, 12)
    assert {sum(pair) for pair in samples()} == {24}
    assert "round 2" not in log.read_text(), "a restart would have repeated or lost steps"


def test_sequences_are_balanced_by_their_cost_once_it_is_measured(tmp_path: Path) -> None:
    log, script = tmp_path / "log", STEPS_SCRIPT.with_name("lengths.py")

    def uneven() -> NDArray[np.float64]:
        """The dearer rank's part of each step, 1: both cost the same."""
        squares = [np.loadtxt(tmp_path / f"steps-{rank}", ndmin=1) for rank in (0, 1)]
        steps = min(map(len, squares))
        both = np.stack([of_rank[:steps] for of_rank in squares])
        found: NDArray[np.float64] = 2 * both.max(axis=0) / both.sum(axis=0)
        return found

    with start_local_run(
        tmp_path, steps=100_000, script=script, controller={"ADAPTATION_INTERVAL_SECONDS": 0.5}, fake_clock=True
    ) as pid:
        wait_until_true(lambda: "BalanceLengths" in log.read_text(), "a judgment")
        wait_until_true(lambda: (uneven()[-100:] < 1.1).all(), "what is dealt costs the same, for a hundred steps")
        decided = len(uneven())
        wait_until_true(lambda: len(uneven()) > decided + 200, "further decisions")
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid, tmp_path) == 143
    assert log.read_text().count("BalanceLengths: samples distributed for equal costs of all ranks") == 1
    assert "round 2" not in log.read_text()
    assert uneven()[:20].mean() > 1.2
    assert uneven()[-100:].mean() < 1.02


def test_ranks_that_are_slow_by_turns_train_apart_until_they_no_longer_are(tmp_path: Path) -> None:
    hurried = {
        "ADAPTATION_INTERVAL_SECONDS": 0.5,
        "SYNC_MODE_COOL_DOWN_SECONDS": 1.0,
        "DEFAULT_STRAGGLER_SLOWDOWN": 1.3,
    }
    erratic = STEPS_SCRIPT.with_name("erratic.py")
    log = tmp_path / "log"
    with start_local_run(tmp_path, steps=100_000, script=erratic, controller=hurried) as pid:
        wait_until_true(lambda: "LocalSGD: AsyncEDiT, synchronizing every" in log.read_text(), "a judgment")
        wait_until_true(lambda: "AsyncEDiT from step" in log.read_text(), "the ranks follow")
        (tmp_path / "calm").touch()
        wait_until_true(lambda: "Sync: a synchronous step would take" in log.read_text(), "the return to Sync")
        wait_until_true(lambda: re.search(r"\bSync from step", log.read_text()), "the ranks follow back")
        os.kill(pid, signal.SIGTERM)
        assert exit_code(pid, tmp_path) == 143
    assert "starts with ranks [0, 1] of 2" in log.read_text()
    assert "round 2" not in log.read_text(), "all of it in one round"

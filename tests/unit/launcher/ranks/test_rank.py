"""A rank forked from the warm process behaves as `python script.py` would."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import select
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.launcher.ranks.processes import group_exists
from pacekeeper.launcher.ranks.warm_process import (
    RankExited,
    RankForked,
    WarmProcess,
    fork_warm_process,
    spawn_warm_process,
)
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper_rank.forking import rank
from pacekeeper_rank.forking.process_setup import die_with_parent
from pacekeeper_rank.forking.rank_start import RankStart
from pacekeeper_rank.forking.warm_server import fork_without_warning
from pacekeeper_rank.watching.process_files import STACK_SIGNAL


@dataclass
class EndedRank:
    """A rank that has run."""

    pid: int
    code: int
    stdout: str
    stderr: str


class Runner:
    """Runs scripts in ranks of a warm process, one after the other."""

    def __init__(self, folder: Path, start: Callable[[], WarmProcess] = fork_warm_process) -> None:
        self.folder = folder
        self.warm = start()

    def start(
        self,
        script: str,
        *arguments: str,
        module: str = "",
        program: str = "",
        ring: Path | None = None,
        **environment: str,
    ) -> int:
        """Return the rank's process id."""
        return self.start_rank(
            script, arguments=arguments, module=module, environment=environment, program=program, ring=ring
        )

    def start_rank(self, script: str, **given: Any) -> int:
        """Start it with what `fork_rank` takes; return the rank's process id."""
        self.fork_rank(script, **given)
        event = self.receive_event()
        assert isinstance(event, RankForked)
        return event.pid

    def fork(self, script: str, ring: Path | None = None) -> None:
        self.fork_rank(script, ring=ring)

    def fork_rank(  # noqa: PLR0913  # options of a harness: each caller names what it varies
        self,
        script: str,
        arguments: Sequence[str] = (),
        module: str = "",
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        threads: int | None = None,
        program: str = "",
        ring: Path | None = None,
    ) -> None:
        path = self.folder / f"{module or 'script'}.py"
        path.write_text(script)
        start = RankStart(
            key="1",
            rank=3,
            round=2,
            script=program or module or str(path),
            is_module=bool(module),
            arguments=list(arguments),
            environment=dict(environment or {}),
            ring_path=str(ring or self.folder / "ring"),
            stack_path=str(self.folder / "stack"),
            threads=threads,
            is_program=bool(program),
        )
        outputs = [os.open(self.folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for name in ("out", "err")]
        files = outputs if stdin is None else [*outputs, stdin]
        self.warm.fork(start, *files)
        for file in files:
            os.close(file)

    def wait_for_exit(self, pid: int) -> EndedRank:
        event = self.receive_event()
        assert isinstance(event, RankExited)
        return EndedRank(pid, event.code, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def run(
        self,
        script: str,
        *arguments: str,
        module: str = "",
        program: str = "",
        ring: Path | None = None,
        **environment: str,
    ) -> EndedRank:
        return self.wait_for_exit(
            self.start(script, *arguments, module=module, program=program, ring=ring, **environment)
        )

    def receive_event(self) -> RankForked | RankExited:
        # The warm process imports torch first, which on a machine that has never read it takes tens of seconds.
        while True:
            ready, _, _ = select.select([self.warm.connection], [], [], 600)
            assert ready, "no event of the warm process"
            for event in self.warm.read_events():
                return event


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One warm process for all tests: each script runs in a rank forked from it, and leaves it as it was."""
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.chdir(folder):
        one = Runner(folder)
    yield one
    one.warm.connection.close()
    assert os.waitstatus_to_exitcode(os.waitpid(one.warm.pid, 0)[1]) == 0, "the warm process ends with its launcher"


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import threading; threading.Thread(target=lambda: print('late')).start()", 0, ""),
        ("import atexit; atexit.register(print, 'late')", 0, ""),
    ],
)
def test_a_script_ends_as_it_would_in_plain_python(runner: Runner, script: str, code: int, error: str) -> None:
    ended = runner.run(script)
    assert ended.code == code
    assert error in ended.stderr
    assert ("late" in ended.stdout) == ("late" in script)


def test_a_traceback_begins_with_the_script(runner: Runner) -> None:
    ended = runner.run("def main():\n    1 / 0\nmain()\n")
    lines = ended.stderr.splitlines()
    assert lines[0].endswith("Traceback (most recent call last):")  # behind the rank, once torch.distributed is there
    assert "script.py" in lines[1]
    assert "rank.py" not in ended.stderr


def test_a_warm_process_that_is_started_again_forks_ranks_like_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, spawn_warm_process)
    assert not runner.warm.ready
    script = "import logging, sys\nlogging.getLogger('pacekeeper.here').info('logged')\nprint('torch' in sys.modules)\n"
    configured = "logging.basicConfig(level='DEBUG', format='%(levelname)s %(message)s')\nlogging.debug('own')\n"
    ended = runner.run(script + configured)
    assert runner.warm.ready
    assert (ended.code, ended.stdout) == (0, "True\n")
    assert re.fullmatch(r"pacekeeper [\d:]+ logged\nDEBUG own\n", ended.stderr), "the script's log is its own affair"
    os.kill(runner.warm.pid, signal.SIGSTOP)  # it does not notice its launcher's end
    assert runner.warm.reap() == "killed by SIGKILL"
    runner.warm.fork(RankStart("2", 3, 2, "x", False, [], {}, "x", "x", 0), 1, 2)
    with pytest.raises(EOFError):
        next(iter(runner.warm.read_events()))
    runner.warm.connection.close()


def test_a_fork_raises_no_warning_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later warn of threads at a fork, which `-W error` of the user's command makes an exception."""

    def fork_and_warn() -> int:
        warnings.warn("multi-threaded", DeprecationWarning, stacklevel=1)
        return 7

    monkeypatch.setattr(os, "fork", fork_and_warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fork_without_warning() == 7


def test_a_rank_whose_warm_process_has_died_does_not_begin() -> None:
    pid = os.fork()
    if pid == 0:
        die_with_parent(os.getpid())  # another process than its parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_arguments_environment_and_main_belong_to_the_script(runner: Runner) -> None:
    script = (
        "import os, pickle, sys\n"
        "import neighbor\n"
        "class Thing: pass\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "print(__name__, sys.argv[1:], os.environ['RANK'], neighbor.value, sys.stdin.read() == '')\n"
    )
    (runner.folder / "neighbor.py").write_text("value = 5")
    assert runner.run(script, "-x", "y", RANK="3").stdout == "__main__ ['-x', 'y'] 3 5 True\n"


def test_a_module_is_run_as_by_python_m(runner: Runner) -> None:
    assert runner.run("print(__name__, __spec__.name)", module="job").stdout == "__main__ job\n"


PROGRAM = """
import ctypes, os, signal, sys
from pathlib import Path
from pacekeeper_rank.record_ring import RingWriter
os.kill(os.getpid(), int(sys.argv[1]))
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
RingWriter(Path(os.environ["RING"]))
ignored = [each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN]
print(os.environ["RANK"], os.getpgid(0) == os.getpid(), death.value, sorted(ignored), sys.argv[2:])
sys.exit(7)
"""


def test_a_rank_can_be_any_program(runner: Runner) -> None:
    """It remains the rank's process. A request for its Python stack does not end it. It has the ring if it wants it."""
    (runner.folder / "program.py").write_text(PROGRAM)
    arguments = [str(runner.folder / "program.py"), str(int(STACK_SIGNAL)), "-x"]
    ring = runner.folder / "ring"
    ended = runner.run("", *arguments, program=sys.executable, RANK="3", RING=str(ring))
    mine = sorted([signal.SIGPIPE, signal.SIGXFSZ, STACK_SIGNAL])  # the first two belong to this Python
    assert (ended.code, ended.stdout) == (7, f"3 True {int(signal.SIGKILL)} {[*mine]} ['-x']\n"), ended.stderr
    assert RingReader(ring).state()["pid"] == ended.pid
    assert runner.run("", "-c", "exit 3", program="sh").code == 3
    missing = runner.run("", program="/no/such")
    assert (missing.code, missing.stderr) == (
        127,
        "pacekeeper run: /no/such cannot be run: No such file or directory\n",
    )
    assert runner.run("", program="/").code == 126


def test_ranks_do_not_share_random_numbers(runner: Runner) -> None:
    script = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = runner.run(script).stdout.split(), runner.run(script).stdout.split()
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_script_has_its_path_and_is_main_until_the_end(runner: Runner) -> None:
    script = (
        "import atexit, os, pickle, sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "class Thing: pass\n"
        "def save(name):\n"
        "    time.sleep(0.01)\n"
        "    with open(name, 'wb') as file:\n"
        "        pickle.dump(Thing(), file)\n"
        "    print(name)\n"
        "os.chdir('/')\n"
        "print(os.path.isabs(__file__), os.path.exists(__file__), sys.path[0] == os.path.dirname(__file__))\n"
        "print(sys.modules['__main__'].__file__ == __file__, __spec__, __annotations__)\n"
        "atexit.register(save, sys.argv[1] + '/at exit')\n"
        "threading.Thread(target=save, args=[sys.argv[1] + '/thread']).start()\n"
        "ThreadPoolExecutor(1).submit(save, sys.argv[1] + '/pool')\n"
    )
    ended = runner.run(script, str(runner.folder))
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("True True True\nTrue None {}\n")
    assert {Path(line).name for line in ended.stdout.splitlines()[2:]} == {"thread", "pool", "at exit"}


LEFT_OPEN = {
    "text": "left = open(name, 'w'); left.write('all of it')",
    "binary": "left = open(name, 'wb'); left.write(b'all of it')",
    "in a generator": "def f():\n    left = open(name, 'w'); left.write('all of it'); yield\nleft = f(); next(left)",
    "nested": "import io\nleft = io.TextIOWrapper(io.BufferedWriter(io.FileIO(name, 'w'))); left.write('all of it')",
    "in another module": "import json\njson.left = open(name, 'w'); json.left.write('all of it')",
    "of a thread that goes on": (
        "import threading\ndef write():\n    left = open(name, 'w'); left.write('all of it'); ready.set(); end.wait()\n"
        "ready, end = threading.Event(), threading.Event()\n"
        "threading.Thread(target=write, daemon=True).start(); ready.wait()"
    ),
    "by a finalizer": (
        "class Log:\n    def __init__(self): self.lines = ['all of it']\n"
        "    def __del__(self): open(name, 'w').write(''.join(self.lines))\nleft = Log()"
    ),
    "by logging": (
        "import logging, logging.handlers\nfile = logging.FileHandler(name)\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(99, target=file)); file.terminator = ''\n"
        "logging.warning('all of it')"
    ),
}


@pytest.mark.parametrize("how", LEFT_OPEN)
@pytest.mark.parametrize(("end", "code"), [("", 0), ("\nimport sys; sys.exit(3)", 3), ("\nraise ValueError", 1)])
def test_open_files_are_flushed_at_the_end(runner: Runner, how: str, end: str, code: int) -> None:
    if how == "by a finalizer" and code == 1:
        return  # the exception still refers to it
    path = runner.folder / f"{how} {code}"
    ended = runner.run(f"name = {str(path)!r}\n{LEFT_OPEN[how]}{end}")
    assert ended.code == code, ended.stderr
    assert path.read_text() == "all of it"


def test_archives_that_are_left_open_are_complete(runner: Runner) -> None:
    script = (
        "import ctypes, gzip, os, sys, zipfile\nos.chdir(sys.argv[1])\n"
        "left = gzip.open('a.gz', 'wt'); left.write('all of it')\n"
        "archive = zipfile.ZipFile('a.zip', 'w'); archive.writestr('name', 'all of it')\n"
        "ctypes.CDLL(None).printf(b'by C\\n')\n"
    )
    ended = runner.run(script, str(runner.folder))
    assert (ended.code, ended.stdout, ended.stderr) == (0, "by C\n", "")
    with gzip.open(runner.folder / "a.gz", "rt") as file, zipfile.ZipFile(runner.folder / "a.zip") as archive:
        assert (file.read(), archive.read("name")) == ("all of it", b"all of it")


AS_PYTHON = "import sys; sys.unraisablehook = sys.__unraisablehook__\n"
"""Without pytest's own, which the warm process has inherited here."""


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        (f"{AS_PYTHON}import atexit; atexit.register(lambda: 1 / 0)", 0, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.close(1); os.open('/dev/full', 1); print(1)", 1, "No space left"),
        ("import signal; [signal.signal(n, signal.SIG_DFL) for n in {*signal.Signals} - {9, 19}]", 0, ""),
        ("import os, sys; os.execv('/bin/sh', ['sh', '-c', 'exit 5'])", 5, ""),
    ],
)
def test_an_unusual_exit_is_the_same_as_pythons(runner: Runner, script: str, code: int, error: str) -> None:
    ended = runner.run(script)
    assert ended.code == code
    assert error in ended.stderr


def test_a_script_reads_its_standard_input_and_writes_unbuffered(runner: Runner) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"given\n")
    os.close(write_end)
    script = "import os, sys\nprint(sys.stdin.read().strip(), end=' ')\nsys.__stdout__.write('at once')\nos._exit(4)"
    ended = runner.wait_for_exit(runner.start_rank(script, stdin=read_end))
    assert (ended.code, ended.stdout) == (4, "given at once")


def test_variables_that_come_too_late_are_named_once(runner: Runner) -> None:
    script = (
        "import os, sys\nfrom pacekeeper_rank.forking.late_variables import handle_late_variables\n"
        "sys.modules['torch'] = os  # as if it were imported\nhandle_late_variables(dict(os.environ), True)\n"
        "os.environ['TORCH_LOGS'] = '+dynamo'\nos.environ['TORCH_LOGS'] = 'dynamo'\n"
        "os.environ.setdefault('OMP_NUM_THREADS', '3')\nos.environ['OMP_NUM_THREADS'] = '4'\nos.environ['OTHER'] = ''\n"
    )
    lines = runner.run(script, OMP_NUM_THREADS="4").stderr.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["pacekeeper: the script sets TORCH_LOGS=+dynamo"]


def test_numpy_uses_as_many_threads_as_the_rank_may(runner: Runner) -> None:
    count = "openblas_get_num_threads"
    script = (
        "import ctypes\nfrom pacekeeper_rank.forking.threads import find_loaded_libraries\n"
        "for library in map(ctypes.CDLL, find_loaded_libraries()):\n"
        f"    for name in ('{count}', '{count}64_', 'scipy_{count}', 'scipy_{count}64_'):\n"
        "        if hasattr(library, name): print(getattr(library, name)())\n"
    )
    for setting, threads in (("", "1"), ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n", "3")):
        found = runner.wait_for_exit(runner.start_rank(setting + script, threads=1)).stdout.split()
        assert found
        assert set(found) == {threads}


def test_a_warm_process_whose_launcher_has_exited_ends_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(tmp_path)
    pid = runner.start("import time; time.sleep(60)")
    os.kill(runner.warm.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, runner.warm.pid, os.WSTOPPED)
    os.kill(pid, signal.SIGKILL)  # which it would report
    runner.warm.connection.close()
    os.kill(runner.warm.pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(runner.warm.pid, 0)[1]) == 0
    assert capfd.readouterr().err == ""


def test_a_rank_leads_a_process_group_that_ends_with_it(runner: Runner) -> None:
    script = "import os, subprocess, time\nsubprocess.Popen(['sleep', '60'])\nprint(os.getpgid(0))\ntime.sleep(60)"
    pid = runner.start(script)
    wait_until(lambda: (runner.folder / "out").read_text().strip() == str(pid))
    os.killpg(pid, signal.SIGKILL)
    assert runner.wait_for_exit(pid).code == -signal.SIGKILL
    wait_until(lambda: not group_exists(pid))


def test_a_rank_has_a_fresh_ring_and_writes_its_stack_on_a_signal(runner: Runner) -> None:
    pid = runner.start("import time\ndef wait_here():\n    print('ready')\n    time.sleep(60)\nwait_here()")
    wait_until(lambda: "ready" in (runner.folder / "out").read_text())
    state = RingReader(runner.folder / "ring").state()
    assert (state["rank"], state["round"], state["pid"]) == (3, 2, 0)
    os.kill(pid, STACK_SIGNAL)
    wait_until(lambda: "in wait_here" in (runner.folder / "stack").read_text())
    os.kill(pid, signal.SIGTERM)
    assert runner.wait_for_exit(pid).code == -signal.SIGTERM


def test_a_rank_whose_folder_has_no_space_trains_unmonitored(runner: Runner, tmp_path: Path) -> None:
    ended = runner.run("print('trains')", ring=tmp_path / "no such folder" / "ring")
    assert (ended.code, ended.stdout) == (0, "trains\n")
    assert "pacekeeper: rank 3 is not monitored in this round" in ended.stderr


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("rank._reset_signals", "OSError: broken"),
        ("rank._connect_standard_files", "OSError: broken"),
        ("os.fork", "cannot be"),
    ],
)
def test_a_rank_whose_start_fails_exits_there_and_reports_the_reason(
    broken: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is above on its stack belongs to its parent: it would remove the folder that the others work in."""
    tester, fork = os.getpid(), os.fork

    def refuse_fork(*_: object) -> int:
        if broken == "os.fork" and os.getpid() == tester:
            return fork()  # the warm process
        raise OSError("broken")

    module, _, name = broken.rpartition(".")
    monkeypatch.setattr({"os": os, "rank": rank}[module], name, refuse_fork)
    monkeypatch.chdir(tmp_path)
    unwound = tmp_path / "unwound"
    try:
        runner = Runner(tmp_path)
        runner.fork("pass")
        event = runner.receive_event()
        if isinstance(event, RankForked):
            event = runner.receive_event()
        assert isinstance(event, RankExited)
        assert event.code == 1
        assert message in (tmp_path / "err").read_text()
    finally:
        if os.getpid() != tester:
            unwound.touch()
            os._exit(0)
    assert not unwound.exists()
    runner.warm.connection.close()
    os.waitpid(runner.warm.pid, 0)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_were_closed_are_opened(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from pacekeeper.launcher.ranks.processes import open_standard_files as open_them;"
        "open_them(); own = os.open('/dev/null', os.O_RDONLY); print('', end='', flush=True);"
        f"pathlib.Path({str(tmp_path / 'read')!r}).write_text(f'{{own > 2}} {{sys.stdin.read()!r}}')"
    )
    command = f'exec "$PYTHON" -c "$CODE" {"</dev/null" if "<" not in closed else ""} {closed}'
    environment = {**os.environ, "PYTHON": sys.executable, "CODE": code}
    subprocess.run(["sh", "-c", command], env=environment, timeout=60, check=True)
    assert (tmp_path / "read").read_text() == "True ''"


def wait_until(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)

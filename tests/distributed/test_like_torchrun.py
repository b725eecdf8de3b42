"""The same script under torchrun and under `pacekeeper run`: same output, files, exit code, and signals.

To add a case, add three lines to `CASES`:

    Case("what it shows", '''
    the script: it prints, and writes files into its working folder
    '''),

Both launchers run it with `RANKS` ranks (`ranks=1` for one) in an empty folder. The test compares what the ranks print
on stdout, line by line in any order of the ranks, the files of the folder, and the exit code. A script that
imports torch costs seconds of processor time, any other next to nothing.
Options of a case: `arguments` of the script, `options` of the launcher, `stdin`, `environment`, and `signals` that the
launcher gets one after the other, each when the script has made a file `ready-N` (N: 0, 1, …). `expect` is what both
print, where that is to be stated. `ours` names what differs here, and why: the named things are not compared.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed.run

from pacekeeper.launcher import command
from testing.training.launchers import fork_process, wait_until_true

RANKS = 2
REPEAT_SECONDS = 10.0
"""Until torchrun gets a signal again."""
PREFIX = re.compile(r"(?m)^\[\d\] ")


@dataclass(frozen=True)
class Case:
    """One script, and how it is run."""

    name: str
    script: str
    ranks: int = RANKS
    arguments: str = ""
    options: str = ""
    module: bool = False
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    signals: Sequence[signal.Signals] = ()
    expect: str | None = None
    ours: Mapping[str, str] = field(default_factory=dict)
    """What differs from torchrun (`output`, `files`, `code`), and why."""


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    code: int
    output: tuple[str, ...]
    files: Mapping[str, str]
    log: str = field(compare=False)


CASES = [
    Case("the script's own view", '''
    import os, sys
    print(__name__, os.path.isabs(__file__), os.path.basename(__file__), sys.argv[1:], __spec__, __package__)
    print(os.path.basename(sys.argv[0]), os.path.isabs(sys.argv[0]), sys.path[0] == os.getcwd(), sys.stdin.read())
    ''', arguments="--lr 1 -- 'a b'"),
    Case("a module's own view", '''
    import os, sys
    print(__name__, os.path.basename(__file__), __spec__.name, os.path.isabs(sys.argv[0]), sys.argv[1:])
    ''', module=True, arguments="--lr 1"),
    Case("files that are left open", '''
    import gzip, os
    rank = os.environ["RANK"]
    left = open(f"text-{rank}", "w"); left.write("text " * 200)
    binary = open(f"binary-{rank}", "wb"); binary.write(b"binary " * 100)
    def log():
        file = open(f"generator-{rank}", "w"); file.write("in a generator"); yield
    generator = log(); next(generator)
    '''),
    Case("threads, pools, and atexit write the last checkpoint", '''
    import atexit, os, pickle, threading, time
    from concurrent.futures import ThreadPoolExecutor
    rank = os.environ["RANK"]
    class State:
        value = 7
    def save(name):
        time.sleep(0.05)
        with open(f"{name}-{rank}", "wb") as file:
            pickle.dump([State(), name], file, protocol=4)
    atexit.register(save, "atexit")
    ThreadPoolExecutor(2).submit(save, "pool")
    threading.Thread(target=save, args=["thread"]).start()
    '''),
    Case("objects are finalized, and see their globals", '''
    import os
    class Log:
        def __del__(self): os.write(file, text)
    log = Log(); log.itself = log
    file, text = os.open("log-" + os.environ["RANK"], os.O_CREAT | os.O_WRONLY), b"written at the end"
    '''),
    Case("a relative path, and a change of the folder", '''
    import os
    os.makedirs("elsewhere", exist_ok=True); os.chdir("elsewhere")
    print(len(open(__file__).read()) > 10)
    '''),
    Case("logging is the script's to configure", '''
    import logging, os
    print(logging.getLogger().handlers, logging.getLogger().level, logging.getLogger("transformers").isEnabledFor(20))
    name = "log-" + os.environ["RANK"]
    logging.basicConfig(filename=name, level="DEBUG", format="%(name)s %(levelname)s %(message)s")
    logging.debug("in the file"); logging.getLogger("library").info("in the file, too")
    '''),
    Case("children of multiprocessing, forked and spawned", '''
    import multiprocessing, os
    def work(number):
        return number * int(os.environ["WORLD_SIZE"])
    if __name__ == "__main__":
        for how in ("fork", "spawn"):
            with multiprocessing.get_context(how).Pool(1) as pool: print(how, pool.map(work, [1, 2]))
    '''),
    Case("standard streams", '''
    import os, sys
    print("print"); sys.__stdout__.write("original\\n"); os.write(1, b"by descriptor\\n"); print("é ∑")
    sys.stdout.buffer.write(b"bytes\\n"); print("no newline", end=""); os._exit(0)
    ''', ranks=1),
    Case("standard input of one rank", '''
    print([line.strip() for line in open(0)])
    ''', ranks=1, stdin="one\ntwo\n", expect="['one', 'two']\n"),
    Case("a debugger reads standard input", '''
    value = 5
    import pdb; pdb.Pdb().set_trace()  # what breakpoint() does, where pytest does not replace it
    print("after", value)
    ''', ranks=1, stdin="p value * 2\nvalue = 6\nc\n"),
    Case("exec replaces the rank", '''
    import os
    os.execvp("sh", ["sh", "-c", "echo rank $RANK of $WORLD_SIZE"])
    ''', expect="rank 0 of 2\nrank 1 of 2\n"),
    Case("handlers are taken away", '''
    import signal
    for signum in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(signum, signal.SIG_DFL)
    print("still here")
    '''),
    Case("signals as they are at the start", '''
    import signal
    names = "SIGINT SIGTERM SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE".split()
    print([(name, str(signal.getsignal(getattr(signal, name)))) for name in names if name != "SIGINT"])
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.pthread_sigmask(0, []))
    '''),
    Case("threads of numpy", '''
    import os
    print(os.environ["OMP_NUM_THREADS"])
    '''),
    Case("sys.exit(0) in the midst", '''
    import sys
    print("before"); sys.exit(0)
    '''),
    Case("an error at exit leaves the code", '''
    import atexit
    atexit.register(lambda: 1 / 0); print("done")
    '''),
    Case("exit code", '''
    import os, sys
    sys.exit(3 if os.environ["RANK"] == "1" else 0)
    ''', options="--max-restarts=0"),
    Case("an exception", '''
    import sys
    left = open(f"left-{sys.argv[1]}", "w"); left.write("before the error")
    raise RuntimeError("on purpose")
    ''', ranks=1, arguments="x", options="--max-restarts=0"),
    Case("a second round", '''
    import os, sys
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    print("round", os.environ["TORCHELASTIC_RESTART_COUNT"]); sys.exit(first)
    ''', ranks=1, options="--max-restarts=3"),
    Case("SIGTERM reaches the ranks", '''
    import os, signal, sys, time
    def leave(*_): print("leaves"); sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    open("ready-0", "w").close()
    time.sleep(60)
    ''', ranks=1, signals=[signal.SIGTERM],
         ours={"code": "a run that received SIGTERM exits with 143 (130 after Ctrl-C), torchrun with 1"}),
    *(Case(f"{signum.name} is as SIGTERM", '''
    import os, signal, sys, time
    def leave(number, _):
        with open("saved", "w") as file: file.write("checkpoint")
        sys.exit(0)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, leave)
    open("ready-0", "w").close()
    time.sleep(60)
    ''', ranks=1, signals=[signum], options="--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        ours={"code": "the same; torchrun gives ranks the signal itself, we SIGTERM"})
      for signum in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGUSR1)),
    Case("children that the script does not wait for end their work", '''
    import os, subprocess
    subprocess.Popen(["sh", "-c", "sleep 0.5; echo uploaded > upload-$RANK"])
    '''),
]  # fmt: skip


def _start_case(
    case: Case, folder: Path, main: Callable[[list[str]], object], options: list[str]
) -> Callable[[], Outcome]:
    """Start the case in a fork of this process, which has imported torch; wait for its end where it is called."""
    folder.mkdir()
    name = "module_of_case" if case.module else "script.py"
    (folder / "work").mkdir()
    (folder / "work" / ("module_of_case.py" if case.module else name)).write_text(textwrap.dedent(case.script))
    (folder / "stdin").write_text(case.stdin)

    def run() -> int:
        os.chdir(folder / "work")
        os.dup2(os.open(folder / "stdin", os.O_RDONLY), 0)
        os.dup2(os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        for variable in [each for each in os.environ if each.startswith(("PACEKEEPER_", "OMP_"))]:
            del os.environ[variable]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module = ["-m"] if case.module else []
        result = main([*options, *shlex.split(case.options), *module, name, *shlex.split(case.arguments)])
        return result if isinstance(result, int) else 0

    pid = fork_process(run, folder / "log", case.environment)

    def outcome() -> Outcome:
        try:
            for number, signum in enumerate(case.signals):
                wait_until_true((folder / "work" / f"ready-{number}").exists, f"ready-{number}")
                os.kill(pid, signum)
            if case.signals and main is torch.distributed.run.main:
                _repeat_signal(pid, case.signals[-1])
            code = wait_until_true(lambda: _poll_exit_code(pid), "the run ends")[0]
        except AssertionError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"{error}\n{(folder / 'log').read_text()}") from None
        _wait_for_children(folder)
        outputs = [folder / "stdout", *sorted((folder / "logs").rglob("stdout.log"))]
        text = "\n".join(path.read_text() for path in outputs).replace(str(folder), "")
        lines = PREFIX.sub("", text) if main is not torch.distributed.run.main else text
        files = {
            str(path.relative_to(folder / "work")): path.read_bytes().decode("latin1")
            for path in (folder / "work").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith(".py")
        }
        return Outcome(code, tuple(sorted(filter(None, lines.splitlines()))), files, (folder / "log").read_text())

    return outcome


def _repeat_signal(pid: int, signum: signal.Signals) -> None:
    """Send it once more if the run goes on: torchrun's handler raises, which code that catches Exception may lose."""
    with contextlib.suppress(AssertionError):
        wait_until_true(lambda: _has_exited(pid), "the run ends", REPEAT_SECONDS)
        return
    os.kill(pid, signum)


def _has_exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _poll_exit_code(pid: int) -> tuple[int] | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status),) if ended else None


def _wait_for_children(folder: Path) -> None:
    """Until no process works in this folder any more: torchrun leaves some behind."""

    def is_left() -> bool:
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == folder / "work":
                    return True
        return False

    wait_until_true(lambda: not is_left(), "all processes end")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_script_does_what_it_does_under_torchrun(case: Case, tmp_path: Path) -> None:
    ranks = f"--nproc-per-node={case.ranks}"
    apart = ["--redirects=1", f"--log-dir={tmp_path / 'theirs' / 'logs'}"]  # or else one's lines run into another's
    under_torchrun = _start_case(case, tmp_path / "theirs", torch.distributed.run.main, ["--standalone", ranks, *apart])
    under_ours = _start_case(case, tmp_path / "ours", command.main, ["--standalone", ranks])
    theirs, ours = under_torchrun(), under_ours()
    for what in ("code", "output", "files"):
        if what not in case.ours:
            assert getattr(ours, what) == getattr(theirs, what), f"{what}\n{theirs.log}\n{ours.log}"
    if case.expect is not None:
        assert "".join(f"{line}\n" for line in ours.output) == case.expect
    if case.signals:
        assert ours.code == (130 if case.signals[0] is signal.SIGINT else 143), ours.log
    if ours.code == 0:
        assert "Traceback" not in ours.log

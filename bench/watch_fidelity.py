"""Do scripts end as without the watch? Output and exit codes of the same scripts, watched and unwatched, in pairs.

`RUNS=50`: pairs of each script whose ranks are forks of an interpreter that has imported torch. `FAILING_RUNS=10`: the
same of scripts that fail. `TORCHRUN_RUNS=2`: pairs of each case under torchrun, of which every other one is watched by
the command `pacekeeper watch`. All others are watched as pods are, by injection. `PYTHONS=PATH:PATH`: the interpreters,
by default this one. They need torch, and transformers for one case. `MINUTES=30`: begins no pair after that. `QUICK=1`:
few.

A watched run differs if no unwatched run of the same case had the same outcome. So what gloo and torchrun do
differently from run to run does not count; the result says how many outcomes the unwatched runs had. What changes from
run to run in any case is replaced before (`REPLACED`).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pacekeeper
import pacekeeper_analysis
import pacekeeper_rank
from pacekeeper.watch.payload import build_payload
from pacekeeper.watch.runtime_files import RuntimeFiles
from pacekeeper.watch.session import WatchSession

from .scripts.watch_fidelity.environment import build_environment

QUICK = bool(os.environ.get("QUICK"))
RUNS = int(os.environ.get("RUNS", 2 if QUICK else 50))
FAILING_RUNS = int(os.environ.get("FAILING_RUNS", 2 if QUICK else 10))
TORCHRUN_RUNS = int(os.environ.get("TORCHRUN_RUNS", 2))
MINUTES = float(os.environ.get("MINUTES", "inf"))
PYTHONS = os.environ.get("PYTHONS", sys.executable).split(os.pathsep)
SCRIPTS = Path(__file__).parent / "scripts" / "watch_fidelity"
RANKS = 2
TIMEOUT_SECONDS = 400.0
"""Seconds in which a run must end."""
POLL_INTERVAL_SECONDS = 0.1
MAX_SHOWN_LINES = 60
"""Lines of a difference that are shown."""
PREFIX = "pacekeeper: "
"""Prefix of the lines of `pacekeeper watch` itself, which it documents."""
CASES: Mapping[str, tuple[str, ...]] = {
    "ddp": ("ddp.py",),
    "fsdp2": ("fsdp2.py",),
    "huggingface": ("huggingface.py",),
    "ddp, a dataset raises": ("ddp.py", "raise"),
    "ddp, a rank exits with code 3": ("ddp.py", "exit"),
    "ddp, SIGKILL of a rank": ("ddp.py", "kill"),
    "ddp, a rank loses its peer": ("ddp.py", "leave"),
}
"""By name: the script, and its arguments after the folder."""
TORCHRUN_CASES = tuple(name for name in CASES if name != "ddp, a rank loses its peer")
"""torchrun ends the rank without its peer by SIGTERM, or notices that it has failed: which of both is chance."""
PRELOADED = (
    "torch",
    "torch.utils.data",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed.tensor",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
)
"""What scripts import, as far as the version has it."""
REPLACED = (
    (r"(?<=[EWI])\d{4} \d\d:\d\d:\d\d\.\d+( +\d+)?", "<time and thread>"),  # prefix of torch's log
    (r"\b\d{4}-\d\d-\d\d[_ ]\d\d:\d\d:\d\d", "<time>"),  # torchrun's report of failures
    (r"(?i)\b(pid:? |process )\d+", r"\1<pid>"),  # the same, and its messages about ranks that it ends
    (r"(127\.0\.0\.1|localhost|\[[0-9a-f:.]+\]):\d+", r"\1:<port>"),  # gloo's messages about its peers
    (r"\b0x[0-9a-f]+", "<address>"),  # of objects
    (r"\[[\d:]+<[\d:?]+, +[\d.?]+(it/s|s/it)\]", "[<duration and rate>]"),  # progress bars
    (r"('\w*(?:runtime|per_second)': )'?[\d.e+-]+'?", r"\1<seconds>"),  # the Trainer's durations and rates
)
"""What is different in each run, with or without the watch, and what takes its place."""
PACKAGES = sorted(
    {str(Path(str(each.__file__)).parents[1]) for each in (pacekeeper, pacekeeper_analysis, pacekeeper_rank)}
)
WATCH = f"""
import sys
sys.path[:0] = {PACKAGES!r}
from pacekeeper.cli import main
sys.exit(main())
"""
"""The command, without a PYTHONPATH for the scripts."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_codes: tuple[int | None, ...]
    streams: tuple[tuple[str, str], ...]
    """Name and content of each output, after REPLACED."""

    def format(self) -> list[str]:
        parts = [f"== {name}\n{content}" for name, content in self.streams]
        return "\n".join([f"exit codes {self.exit_codes}", *parts]).splitlines()


@dataclass
class Tally:
    """The runs of a case."""

    plain: list[Outcome] = field(default_factory=list)
    watched: list[Outcome] = field(default_factory=list)
    unwatched: list[str] = field(default_factory=list)
    """Why runs that should have been watched were not."""

    def find_differences(self) -> list[Outcome]:
        return [outcome for outcome in self.watched if outcome not in self.plain]


def main() -> None:
    """Run all pairs. The last line of the output is the result as JSON."""
    deadline = time.monotonic() + MINUTES * 60
    tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as folder, ExitStack() as stack:
        boot = build_payload(Path(folder))
        runners: list[tuple[str, str, int, Preloaded | Torchrun]] = []
        for python in PYTHONS:
            name, cases = describe_interpreter(python), select_cases(python)
            preloaded = stack.enter_context(open_preloaded(python, boot, cases))
            runners += [(name, case, FAILING_RUNS if "," in case else RUNS, preloaded) for case in cases]
            runners += [(name, case, TORCHRUN_RUNS, Torchrun(python, boot)) for case in cases if case in TORCHRUN_CASES]
        for number in range(max(RUNS, FAILING_RUNS, TORCHRUN_RUNS)):
            for name, case, runs, runner in runners:
                if number < runs and time.monotonic() < deadline:
                    run_pair(runner, CASES[case], number, tallies[name, case, runner.start])
            log_progress(f"pair {number + 1}: {sum(len(each.find_differences()) for each in tallies.values())} differ")
    print(json.dumps(build_result(tallies)))


def select_cases(python: str) -> list[str]:
    """Return the cases that the interpreter can run."""
    has_transformers = subprocess.run([python, "-c", "import transformers"], capture_output=True, check=False)
    return [name for name in CASES if name != "huggingface" or has_transformers.returncode == 0]


def describe_interpreter(python: str) -> str:
    program = "import sys, torch; print('Python %s, torch %s' % (sys.version.split()[0], torch.__version__))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def run_pair(runner: Preloaded | Torchrun, arguments: tuple[str, ...], number: int, tally: Tally) -> None:
    """Run both sides, in an order that changes from pair to pair."""
    for watched in (False, True) if number % 2 else (True, False):
        with tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-", dir="/dev/shm") as folder:
            outcome, complaint = runner.run(arguments, Path(folder), number, watched=watched)
        (tally.watched if watched else tally.plain).append(outcome)
        if complaint:
            log_progress(f"{arguments}: not watched: {complaint}")
            tally.unwatched.append(complaint)
    if tally.watched[-1] not in tally.plain:
        lines = difflib.unified_diff(
            tally.plain[-1].format(), tally.watched[-1].format(), "without", "watched", lineterm=""
        )
        log_progress("\n".join([f"{arguments} differs:", *list(lines)[:MAX_SHOWN_LINES]]))


class Preloaded:
    """Two interpreters, with and without the payload, of which ranks are forked."""

    start = "forked"

    def __init__(self, processes: Mapping[bool, subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, arguments: tuple[str, ...], folder: Path, _: int, *, watched: bool) -> tuple[Outcome, str]:
        """Run a script. Return its outcome, and why it was not watched ("": it was, or should not have been)."""
        process, port = self._processes[watched], find_free_port()
        runtime = folder / "runtime"
        runtime.mkdir()
        (folder / "script").mkdir()
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if watched:
            common["PACEKEEPER_WATCH_RUNTIME"] = str(runtime)
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        script = [str(SCRIPTS / arguments[0]), str(folder / "script"), *arguments[1:]]
        request = {"arguments": script, "environments": environments, "folder": str(folder)}
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        complaint = ""
        if watched:
            with WatchSession(runtime) as session:
                while not select.select([process.stdout], [], [], POLL_INTERVAL_SECONDS)[0]:
                    session.poll()
                session.summarize()
            complaint = find_complaint(runtime)
        codes = json.loads(process.stdout.readline())
        files = sorted([*folder.glob("*.out"), *folder.glob("*.err")])
        streams = tuple((file.name, replace_changing(file.read_text(), folder)) for file in files)
        return Outcome(tuple(codes), streams), complaint


@contextmanager
def open_preloaded(python: str, boot: Path, cases: Sequence[str]) -> Iterator[Preloaded]:
    modules = PRELOADED if "huggingface" in cases else [name for name in PRELOADED if not name.startswith("trans")]
    command = [python, "-u", str(SCRIPTS / "preloaded.py"), *modules]
    processes = {
        watched: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=build_environment(boot if watched else None),
            text=True,
        )
        for watched in (False, True)
    }
    try:
        yield Preloaded(processes)
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class Torchrun:
    """Runs under torchrun, whose ranks are interpreters of their own."""

    start = "torchrun"

    def __init__(self, python: str, boot: Path) -> None:
        self._python, self._boot = python, boot

    def run(self, arguments: tuple[str, ...], folder: Path, number: int, *, watched: bool) -> tuple[Outcome, str]:
        """As `Preloaded.run`. Odd numbers are watched by the command."""
        runtime, logs = folder / "runtime", folder / "logs"
        runtime.mkdir()
        (folder / "script").mkdir()
        by_command = watched and number % 2 == 1
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--redirects=3", f"--log-dir={logs}"]
        script = [str(SCRIPTS / arguments[0]), str(folder / "script"), *arguments[1:]]
        command = [self._python, "-m", "torch.distributed.run", *options, *script]
        if by_command:
            command = [sys.executable, "-c", WATCH, "watch", "--", *command]
        environment = build_environment(self._boot if watched and not by_command else None, runtime)
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        errors, complaint = result.stderr, ""
        if by_command:
            own = [line for line in errors.splitlines() if line.startswith(PREFIX)]
            errors = re.sub(rf"(?m)^{PREFIX}.*\n", "", errors)
            if not any(f"watching {RANKS} ranks" in line for line in own):
                complaint = "\n".join(own) or "the command printed nothing"
        elif watched:
            complaint = find_complaint(runtime)
        streams = [("torchrun.out", result.stdout), ("torchrun.err", errors)]
        for file in sorted(logs.glob("*/*/*/*.log")):
            streams.append(("/".join(file.parts[-3:]), file.read_text()))
        replaced = tuple((name, replace_changing(content, folder)) for name, content in streams)
        return Outcome((result.returncode,), replaced), complaint


def find_complaint(runtime: Path) -> str:
    """Return why the ranks of a run were not watched; "": they were, to their end."""
    files = RuntimeFiles(runtime)
    broken = files.read_broken()
    if broken:
        return f"watching has ended: {broken[0]}"
    return "" if len(files.read_ranks()) == RANKS else "a rank has not described itself"


def replace_changing(content: str, folder: Path) -> str:
    content = content.replace(str(folder), "<folder>")
    for pattern, replacement in REPLACED:
        content = re.sub(pattern, replacement, content)
    return content


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def build_result(tallies: Mapping[tuple[str, str, str], Tally]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for (interpreter, case, start), tally in tallies.items():
        differing = tally.find_differences()
        rows.append(
            {
                "interpreter": interpreter,
                "case": case,
                "start": start,
                "pairs": len(tally.watched),
                "differing": len(differing),
                "not_watched": len(tally.unwatched),
                "outcomes_without": len(set(tally.plain)),
                "outcomes_watched": len(set(tally.watched)),
                "exit_codes": sorted({str(outcome.exit_codes) for outcome in tally.watched}),
            }
        )
    totals = Counter({name: sum(row[name] for row in rows) for name in ("pairs", "differing", "not_watched")})
    return {
        "bench": "watch_fidelity",
        **totals,
        "rows": rows,
        "holds": {"all_alike": not totals["differing"], "all_watched": not totals["not_watched"]},
    }


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

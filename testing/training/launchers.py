"""Real launchers on loopback addresses, each with a runtime folder of its own; the test plays the operator."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from pacekeeper.launcher.command import launch_from_plan
from pacekeeper.launcher.launcher import Script
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.protocol.plan import SECRET_BYTES, Member, Plan
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, Heartbeat, LauncherState
from pacekeeper_analysis.protocol.requests import Requests
from pacekeeper_rank.forking.warm_server import import_modules

from .ranks import PREIMPORTS

STEPS_SCRIPT = Path(__file__).parents[1] / "scripts" / "steps.py"
LAUNCHER_TIMEOUT_SECONDS = 300.0
"""It only bounds a failure."""

Value = TypeVar("Value")


def wait_until_true(poll: Callable[[], Value | None], what: str, seconds: float = LAUNCHER_TIMEOUT_SECONDS) -> Value:
    """The first truthy answer of `poll`."""
    deadline = time.monotonic() + seconds
    while not (value := poll()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return value


@dataclass
class LaunchedWorker:
    """One launcher's process and its runtime folder."""

    name: str
    address: str
    runtime: RuntimeFolder
    log: Path
    pid: int = 0
    exit_code: int | None = None

    def read_heartbeat(self) -> Heartbeat:
        return Heartbeat.from_json(read_json(self.runtime.heartbeat) or {})

    def read_faults(self, kind: FaultKind | None = None) -> list[FaultReport]:
        files = sorted(self.runtime.faults.glob("[!.]*.json"))
        faults = [FaultReport.from_json(json.loads(path.read_text())) for path in files]
        return [fault for fault in faults if kind in {None, fault.kind}]

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)

    def sleep_briefly(self) -> None:
        """Fifty milliseconds, for tests that something does not happen."""
        time.sleep(0.05)

    def poll(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        if self.exit_code is None and self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def wait(self) -> int:
        try:
            wait_until_true(lambda: self.poll() is not None, f"{self.name} ends")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None
        assert self.exit_code is not None
        return self.exit_code


@dataclass
class LauncherTeam:
    """The workers of a test, and its plan."""

    folder: Path
    script: Path
    environment: dict[str, str]
    settings: dict[str, float]
    workers: dict[str, LaunchedWorker] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    separate_namespaces: bool = False
    """Whether the ranks are configured with a node of its own for each worker."""

    def start(self, name: str) -> LaunchedWorker:
        """Starts (or starts again) the launcher of the worker with this name: a, b, c, …"""
        address = f"127.0.0.{1 + ord(name) - ord('a')}"
        runtime = RuntimeFolder(self.folder / name).create()
        worker = LaunchedWorker(name, address, runtime, self.folder / f"{name}.log")
        settings = LauncherSettings(
            worker=name,
            address=address,
            incarnation=f"{time.time_ns():x}",
            **self.settings,  # type: ignore[arg-type]  # the tests set numbers only
        )
        environment = {**self.environment, "FOLDER": str(self.folder), "PACEKEEPER_RUNTIME": str(runtime.root)}
        if self.separate_namespaces:
            identity = {"WORKER": name, "NODE": f"node-{name}", "POD_IP": address}
            environment |= {f"PACEKEEPER_{variable}": value for variable, value in identity.items()}
        script = Script(str(self.script), False, ())
        worker.pid = fork_process(lambda: launch_from_plan(script, settings, runtime), worker.log, environment)
        self.workers[name] = worker
        return worker

    def give_plan(self, plan: Plan, to: Sequence[str] | None = None) -> None:
        """What the operator and the sidecars would do: each worker's part of the plan into its runtime folder."""
        plan = self.plan = (
            plan if plan.secret else plan.with_membership_secret(self.plan, secrets.token_hex(SECRET_BYTES))
        )
        for name in self.workers if to is None else to:
            write_json(self.workers[name].runtime.plan, plan.build_worker_plan(name).to_json())
            self.workers[name].runtime.operator_contact.touch()

    def give_requests(self, requests: Requests) -> None:
        """What the sidecars would do: each worker's part of the open requests into its runtime folder."""
        for name, worker in self.workers.items():
            part = requests.build_worker_requests(name, is_member=self.plan.has_member(name))
            write_json(worker.runtime.requests, part.to_json())

    def build_members(self, **ranks: Sequence[int]) -> tuple[Member, ...]:
        return tuple(
            Member(name, self.workers[name].address, tuple(worker_ranks)) for name, worker_ranks in ranks.items()
        )

    def read_diary(self, rank: int) -> list[str]:
        """What a rank did, without times and process ids: `round 1 step 3`."""
        path = self.folder / f"diary-{rank}"
        return [line.split(maxsplit=2)[2] for line in path.read_text().splitlines()] if path.exists() else []

    def read_pids(self, rank: int) -> list[int]:
        """Process ids under which a rank has run, oldest first."""
        lines = (self.folder / f"diary-{rank}").read_text().splitlines()
        return list(dict.fromkeys(int(line.split()[1]) for line in lines))

    def read_logs(self) -> str:
        return "\n".join(
            f"--- {worker.name}\n{worker.log.read_text(errors='replace')}" for worker in self.workers.values()
        )

    def wait_for(self, poll: Callable[[], Value | None], what: str, seconds: float = LAUNCHER_TIMEOUT_SECONDS) -> Value:
        try:
            return wait_until_true(poll, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.read_logs()}") from None

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        self.wait_for(
            lambda: any(f" step {step}" in line for line in self.read_diary(rank)), f"step {step} of rank {rank}"
        )

    def wait_for_state(self, name: str, state: LauncherState) -> None:
        worker = self.workers[name]
        self.wait_for(lambda: worker.read_heartbeat().state is state, f"{name} is {state}")

    def kill_all(self) -> None:
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def fork_process(run: Callable[[], int], log: Path, environment: Mapping[str, str]) -> int:
    """Runs `run`, which gives the exit code, in a child that has imported torch because this process has; its id."""
    log.touch()
    pid = os.fork()
    if pid == 0:
        _run_in_child(run, log, environment)
    return pid


def _run_in_child(run: Callable[[], int], log: Path, environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.getLogger().handlers.clear()
        os.environ.update(environment)
        code = run()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def create_team(
    folder: Path,
    *,
    steps: int = 20,
    faults: Sequence[Mapping[str, object]] = (),
    script: Path = STEPS_SCRIPT,
    step_seconds: float = 0.01,
    **settings: float,
) -> Iterator[LauncherTeam]:
    """No workers yet; ends those that the test has started."""
    import_modules(PREIMPORTS)
    environment = {
        "STEPS": str(steps),
        "STEP_SECONDS": str(step_seconds),
        "FAULTS": json.dumps(list(faults)),
        "OMP_NUM_THREADS": "1",
    }
    team = LauncherTeam(folder, script, environment, settings)
    try:
        yield team
    finally:
        team.kill_all()

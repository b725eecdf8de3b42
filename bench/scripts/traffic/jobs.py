"""Jobs of two ranks on the real fabric, and their launchers. The bench plays the operator, and the sidecars."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pacekeeper.runtime import RuntimeFolder, read_json, write_plan
from pacekeeper_analysis.plan import SECRET_BYTES, Hop, Member, Paths, Plan, PlannedPath
from pacekeeper_analysis.reports import Heartbeat, LauncherState, PathFault
from pacekeeper_operator.decide import paths
from pacekeeper_operator.decide.wiring import format_spine_name
from pacekeeper_operator.network import JobTraffic, RankPair, PortRange, NodeRanks
from testcluster.settings import REPOSITORY
from tests.support.fabric import FabricHost, HostedLeafSpine
from tests.support.paths import build_shim

from .launchers import UNPRIVILEGED_USER_ID, Place
from .progress import Progress
from .switches import Flow

PORTS: PortRange = (20000, 20000 + paths.PORTS_PER_JOB - 1)
"""Of all jobs: none share a host."""
PATIENCE = 120.0
PAUSE = 0.02
MAX_ERROR_OUTPUT_CHARACTERS = 2000
"""Characters of each log."""

Value = TypeVar("Value")


class FabricJob:
    """Of two workers, w0 and w1, with a rank each."""

    def __init__(self, number: int, hosts: tuple[FabricHost, FabricHost], folder: Path) -> None:
        """`folder`: its own, made here."""
        self.name = ("bench", f"job-{number}")
        self.hosts = hosts
        self.folder = folder
        self._plan = Plan()
        self._runtimes = [RuntimeFolder(folder / worker) for worker in ("w0", "w1")]
        for one in (folder, *(runtime.root for runtime in self._runtimes)):
            one.mkdir()
            one.chmod(0o777)

    def places(self) -> list[Place]:
        """Of its launchers."""
        return [
            Place(
                namespace=host.namespace,
                address=host.address,
                worker=runtime.root.name,
                runtime=str(runtime.root),
                folder=str(self.folder),
                log=str(self.folder / f"{runtime.root.name}.log"),
            )
            for host, runtime in zip(self.hosts, self._runtimes, strict=True)
        ]

    def warm(self) -> bool:
        """Its launchers wait for a plan."""
        return all(beat.state is LauncherState.WARM and beat.meeting_port for beat in self._read_heartbeats())

    def traffic(self, round_seconds: float = 0.0) -> JobTraffic:
        """As planning sees it: all that its ranks do is wait for each other's data."""
        seats = tuple(NodeRanks(host.namespace, (rank,)) for rank, host in enumerate(self.hosts))
        membership = self._plan.membership
        among = paths.get_route_fingerprints(self._plan)
        return JobTraffic(
            self.name, seats, membership, self.routes, among, ports=PORTS, waiting=1.0, round_seconds=round_seconds
        )

    def begin(self, ways: Mapping[RankPair, int], among: Mapping[RankPair, int], hops: Sequence[Hop]) -> None:
        """A new round of both ranks, over these ways; of none: the network chooses. among: of `JobTraffic`."""
        number = self._plan.membership + 1
        wanted = tuple(PlannedPath(*pair, format_spine_name(way), among=among.get(pair, 0)) for pair, way in ways.items())
        self._plan = Plan(
            version=number,
            membership=number,
            round=number,
            members=tuple(Member(f"w{rank}", host.address, (rank,)) for rank, host in enumerate(self.hosts)),
            store_port=self._read_heartbeats()[0].meeting_port,
            paths=Paths(wanted, tuple(hops), *PORTS) if wanted else None,
        ).with_membership_secret(self._plan, secrets.token_hex(SECRET_BYTES))
        with _run_unprivileged():
            for runtime in self._runtimes:
                write_plan(runtime.plan, self._plan.build_worker_plan(runtime.root.name))
        self.touch()

    def flows(self) -> list[Flow]:
        """What rank 0 sends to rank 1, and rank 1 to rank 0; none while they are not connected."""
        file = self.folder / f"connection-{self._plan.round}"
        if not file.exists():
            return []
        (near, far), (here, there) = self.hosts, map(int, file.read_text().split())
        return [Flow(near, far, here, there), Flow(far, near, there, here)]

    def faults(self) -> list[PathFault]:
        """Why launchers do not have their paths in force."""
        return [path.fault for beat in self._read_heartbeats() for path in beat.paths if path.fault]

    def go(self) -> None:
        (self.folder / "go").touch()

    def rest(self) -> None:
        (self.folder / "go").unlink(missing_ok=True)

    def progress(self, first_round: int | None = None) -> Progress:
        """Of its rounds, from this one on; None: of the present one."""
        rounds = range(self._plan.round if first_round is None else first_round, self._plan.round + 1)
        files = [self.folder / f"progress-{number}" for number in rounds]
        return Progress.read(line for file in files if file.exists() for line in file.read_text().splitlines(True))

    @property
    def routes(self) -> Mapping[RankPair, int]:
        """That its plan names."""
        return paths.get_planned_routes(self._plan)

    @property
    def round(self) -> int:
        return self._plan.round

    def touch(self) -> None:
        """As sidecars do when the operator has answered."""
        for runtime in self._runtimes:
            runtime.operator_contact.touch()

    def logs(self) -> str:
        return "\n".join(f"{file}\n{file.read_text()[-MAX_ERROR_OUTPUT_CHARACTERS:]}" for file in sorted(self.folder.glob("*.log")))

    def _read_heartbeats(self) -> list[Heartbeat]:
        return [Heartbeat.from_json(read_json(runtime.heartbeat) or {}) for runtime in self._runtimes]


class Team:
    """All jobs, and the process that has started their launchers."""

    def __init__(self, jobs: Sequence[FabricJob], launchers: subprocess.Popen[str]) -> None:
        self.jobs = jobs
        self._launchers = launchers

    def wait_for(self, look: Callable[[], Value | None], what: str, seconds: float = PATIENCE) -> Value:
        """The first truthy answer of `look`. Raises RuntimeError with the last words of the logs."""
        deadline = time.monotonic() + seconds
        while not (value := look()):
            if self._launchers.poll() is not None:
                raise RuntimeError(f"launchers have ended with {self._launchers.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError("\n".join((f"not within {seconds:g} s: {what}", *(job.logs() for job in self.jobs))))
            self.pause(PAUSE)
        return value

    def pause(self, seconds: float) -> None:
        """While all launchers hear from the operator."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for job in self.jobs:
                job.touch()
            time.sleep(min(left, 1.0))


@contextmanager
def jobs_on(fabric: HostedLeafSpine, leaves: Sequence[tuple[int, int]]) -> Iterator[Team]:
    """Warm, without a plan; all is gone in the end. leaves: of each job's ranks, which have a host each."""
    free = {leaf: [host for host in fabric.hosts if host.leaf == leaf] for leaf in range(fabric.leaves)}
    with TemporaryDirectory(prefix="pacekeeper-bench-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        jobs = [
            FabricJob(number, (free[near].pop(0), free[far].pop(0)), folder / f"job-{number}")
            for number, (near, far) in enumerate(leaves)
        ]
        started = _start([place for job in jobs for place in job.places()], folder)
        try:
            team = Team(jobs, started)
            team.wait_for(lambda: all(job.warm() for job in jobs), "launchers are warm")
            yield team
        finally:
            _end(started)


def _start(places: Sequence[Place], folder: Path) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.launchers"],
        cwd=REPOSITORY,
        env={**os.environ, **build_shim(folder).build_environment(None)},
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C is for the bench, which ends them
    )
    assert started.stdin is not None
    started.stdin.write(json.dumps([place.to_json() for place in places]) + "\n")
    started.stdin.flush()
    return started


def _end(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.close()
    try:
        started.wait(timeout=30)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


@contextmanager
def _run_unprivileged() -> Iterator[None]:
    """What is written is the launchers' own: a plan may be read by its user only."""
    os.seteuid(UNPRIVILEGED_USER_ID)
    try:
        yield
    finally:
        os.seteuid(0)

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

from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.protocol.plan import SECRET_BYTES, Hop, Member, Paths, Plan, PlannedPath
from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState, PathFault
from pacekeeper_operator.decide.network import paths
from pacekeeper_operator.state.network import JobTraffic, NodeRanks, PortRange, RankPair
from pacekeeper_operator.state.routes import format_spine_name, get_planned_routes, get_route_fingerprints
from testcluster.settings import REPOSITORY
from testing.network.fabric import FabricHost, HostedLeafSpine
from testing.network.paths import build_shim

from .launchers import UNPRIVILEGED_USER_ID, Place
from .progress import Progress
from .switches import Flow

PORTS: PortRange = (20000, 20000 + paths.PORTS_PER_JOB - 1)
"""Of all jobs: none share a host."""
TIMEOUT_SECONDS = 120.0
POLL_INTERVAL_SECONDS = 0.02
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
        for path in (folder, *(runtime.root for runtime in self._runtimes)):
            path.mkdir()
            path.chmod(0o777)

    def list_places(self) -> list[Place]:
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

    def is_warm(self) -> bool:
        """Its launchers wait for a plan."""
        return all(
            heartbeat.state is LauncherState.WARM and heartbeat.rendezvous_port for heartbeat in self._read_heartbeats()
        )

    def build_traffic(self, round_seconds: float | None = None) -> JobTraffic:
        """As planning sees it: all that its ranks do is wait for each other's data."""
        slots = tuple(NodeRanks(host.namespace, (rank,)) for rank, host in enumerate(self.hosts))
        membership = self._plan.membership
        fingerprints = get_route_fingerprints(self._plan)
        return JobTraffic(
            self.name,
            slots,
            membership,
            self.routes,
            fingerprints,
            ports=PORTS,
            wait_share=1.0,
            round_seconds=round_seconds,
        )

    def begin_round(
        self, routes: Mapping[RankPair, int], fingerprints: Mapping[RankPair, int], hops: Sequence[Hop]
    ) -> None:
        """A new round of both ranks, over these routes; of none: the network chooses. fingerprints: of `JobTraffic`."""
        number = self._plan.membership + 1
        planned_paths = tuple(
            PlannedPath(*pair, format_spine_name(route), live_spines_fingerprint=fingerprints.get(pair, 0))
            for pair, route in routes.items()
        )
        self._plan = Plan(
            version=number,
            membership=number,
            round=number,
            members=tuple(Member(f"w{rank}", host.address, (rank,)) for rank, host in enumerate(self.hosts)),
            store_port=self._read_heartbeats()[0].rendezvous_port or Plan.store_port,
            paths=Paths(planned_paths, tuple(hops), *PORTS) if planned_paths else None,
        ).with_membership_secret(self._plan, secrets.token_hex(SECRET_BYTES))
        with _run_unprivileged():
            for runtime in self._runtimes:
                write_json(runtime.plan, self._plan.build_worker_plan(runtime.root.name).to_json())
        self.touch()

    def list_flows(self) -> list[Flow]:
        """What rank 0 sends to rank 1, and rank 1 to rank 0; none while they are not connected."""
        path = self.folder / f"connection-{self._plan.round}"
        if not path.exists():
            return []
        (near, far), (near_port, far_port) = self.hosts, map(int, path.read_text().split())
        return [Flow(near, far, near_port, far_port), Flow(far, near, far_port, near_port)]

    def list_faults(self) -> list[PathFault]:
        """Why launchers do not have their paths in force."""
        return [path.fault for heartbeat in self._read_heartbeats() for path in heartbeat.paths if path.fault]

    def go(self) -> None:
        (self.folder / "go").touch()

    def rest(self) -> None:
        (self.folder / "go").unlink(missing_ok=True)

    def read_progress(self, first_round: int | None = None) -> Progress:
        """Of its rounds, from this one on; None: of the present one."""
        rounds = range(self._plan.round if first_round is None else first_round, self._plan.round + 1)
        files = [self.folder / f"progress-{number}" for number in rounds]
        return Progress.read(line for file in files if file.exists() for line in file.read_text().splitlines(True))

    @property
    def routes(self) -> Mapping[RankPair, int]:
        """That its plan names."""
        return get_planned_routes(self._plan)

    @property
    def round(self) -> int:
        return self._plan.round

    def touch(self) -> None:
        """As sidecars do when the operator has answered."""
        for runtime in self._runtimes:
            runtime.operator_contact.touch()

    def read_logs(self) -> str:
        return "\n".join(
            f"{file}\n{file.read_text()[-MAX_ERROR_OUTPUT_CHARACTERS:]}" for file in sorted(self.folder.glob("*.log"))
        )

    def _read_heartbeats(self) -> list[Heartbeat]:
        return [Heartbeat.from_json(read_json(runtime.heartbeat) or {}) for runtime in self._runtimes]


class Team:
    """All jobs, and the process that has started their launchers."""

    def __init__(self, jobs: Sequence[FabricJob], launchers: subprocess.Popen[str]) -> None:
        self.jobs = jobs
        self._launchers = launchers

    def wait_for(
        self, condition: Callable[[], Value | None], description: str, seconds: float = TIMEOUT_SECONDS
    ) -> Value:
        """The first truthy answer of `condition`. Raises RuntimeError with the last lines of the logs."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if self._launchers.poll() is not None:
                raise RuntimeError(f"launchers have ended with {self._launchers.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "\n".join((f"not within {seconds:g} s: {description}", *(job.read_logs() for job in self.jobs)))
                )
            self.pause(POLL_INTERVAL_SECONDS)
        return value

    def pause(self, seconds: float) -> None:
        """While all launchers receive the operator's answers."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            for job in self.jobs:
                job.touch()
            time.sleep(min(remaining, 1.0))


@contextmanager
def start_jobs(fabric: HostedLeafSpine, leaves: Sequence[tuple[int, int]]) -> Iterator[Team]:
    """Warm, without a plan; all is gone in the end. leaves: of each job's ranks, which have a host each."""
    free = {leaf: [host for host in fabric.hosts if host.leaf == leaf] for leaf in range(fabric.leaves)}
    with TemporaryDirectory(prefix="pacekeeper-bench-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        jobs = [
            FabricJob(number, (free[near].pop(0), free[far].pop(0)), folder / f"job-{number}")
            for number, (near, far) in enumerate(leaves)
        ]
        process = _start_launchers([place for job in jobs for place in job.list_places()], folder)
        try:
            team = Team(jobs, process)
            team.wait_for(lambda: all(job.is_warm() for job in jobs), "launchers are warm")
            yield team
        finally:
            _end_launchers(process)


def _start_launchers(places: Sequence[Place], folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.launchers"],
        cwd=REPOSITORY,
        env={**os.environ, **build_shim(folder).build_environment(None)},
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C is for the bench, which ends them
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([place.to_json() for place in places]) + "\n")
    process.stdin.flush()
    return process


def _end_launchers(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _run_unprivileged() -> Iterator[None]:
    """What is written is the launchers' own: a plan may be read by its user only."""
    os.seteuid(UNPRIVILEGED_USER_ID)
    try:
        yield
    finally:
        os.seteuid(0)

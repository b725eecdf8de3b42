"""Four hosts of one job, each with a network and a cgroup of its own, a launcher, two ranks, and the sidecar's eyes.

The bench plays the operator: it gives plans, and takes what sidecars would send.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.protocol.plan import SECRET_BYTES, Member, Plan, choose_rendezvous
from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState
from pacekeeper_analysis.protocol.requests import ProbeRequest, ProbeTarget, ProfileRequest, Requests, SourceNaming
from testcluster import cgroups
from testcluster.settings import REPOSITORY
from testcluster.shell import is_successful, run_command

NAME = "pacekeeper-diagnosis"
SWITCH = f"{NAME}-switch"
INTERFACE = "eth0"
UNUSED_HARDWARE_ADDRESS = "02:00:00:00:00:99"
HOSTS, RANKS_A_HOST = 4, 2
RANKS = HOSTS * RANKS_A_HOST
HOGS_CGROUP = f"{NAME}/hogs"
HOG_PROGRAM = "import numpy; a = numpy.ones(1 << 24)\nwhile True: a = a.copy()"
PERIOD_US = 100_000
"""Of a cgroup's quota."""
START_TIMEOUT_SECONDS = 90.0
PROBE_TURNS = (
    ((0, 1), (2, 3)),
    ((1, 0), (3, 2)),
    ((0, 2), (1, 3)),
    ((2, 0), (3, 1)),
    ((0, 3), (1, 2)),
    ((3, 0), (2, 1)),
)
"""Of a probe of all links: source and destination hosts."""

_WITHOUT_NAME_SERVER = (
    *("unshare", "--mount", "sh", "-c"),
    'echo nameserver 127.0.0.1 > "$0" && mount --bind "$0" /etc/resolv.conf && exec "$@"',
    f"/dev/shm/{NAME}-resolv.conf",
)
"""torch resolves the name of each address, and no server answers there: an immediate refusal saves seconds."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class JobHost:
    """One worker of the job."""

    number: int
    folder: Path

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    @property
    def namespace(self) -> str:
        return f"{NAME}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.214.0.{self.number + 1}"

    @property
    def cgroup(self) -> str:
        return f"{NAME}/{self.number}"

    @property
    def port(self) -> str:
        """Its end of the link to the switch."""
        return f"port{self.number}"

    @property
    def runtime(self) -> RuntimeFolder:
        return RuntimeFolder(self.folder / self.name)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(RANKS_A_HOST * self.number, RANKS_A_HOST * (self.number + 1)))

    @property
    def heartbeat(self) -> Heartbeat:
        return Heartbeat.from_json(read_json(self.runtime.heartbeat) or {})

    @property
    def agent_report_path(self) -> Path:
        """What its agent has written down."""
        return self.folder / f"reports-{self.number}"

    def read_pid(self, rank: int) -> int:
        """Of the rank's process."""
        return int(RingReader(self.runtime.ring(rank - self.ranks[0])).state()["pid"])


@dataclass(frozen=True)
class Usual:
    """How the job is while nothing is wrong."""

    step_seconds: float
    cores: tuple[float, ...]  # that the ranks of each host need


class HostedJob:
    """The job on its hosts. `usual`: to be set before it is struck."""

    usual: Usual

    def __init__(self, hosts: Sequence[JobHost]) -> None:
        self.hosts = hosts
        self.plan, self.requests = Plan(), Requests()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns once all ranks train."""
        for host in self.hosts:
            host.runtime.create()
            self._start_process(host, _build_cgroup_command(host.cgroup, self._build_launcher_command()), "launcher")
            self._start_process(
                host, (sys.executable, "-m", "bench.scripts.diagnosis.agent", str(host.number)), "agent"
            )
        self.wait_for(
            lambda: all(host.heartbeat.state is LauncherState.WARM for host in self.hosts), "the launchers are warm"
        )
        self.train()

    def train(self) -> None:
        """A new membership; returns once it trains."""
        members = tuple(Member(host.name, host.address, host.ranks) for host in self.hosts)
        ports = [host.heartbeat.rendezvous_port for host in self.hosts]
        port, secret = choose_rendezvous(ports, secrets.token_hex(SECRET_BYTES))
        membership = self.plan.membership + 1
        first_round = max(host.heartbeat.round for host in self.hosts) + 1
        self.update_plan(members=members, membership=membership, round=first_round, store_port=port, secret=secret)
        self.wait_for(
            lambda: all(
                worker_host.heartbeat.membership == membership and worker_host.heartbeat.progress.steps_in_round > 5
                for worker_host in self.hosts
            ),
            "the ranks train",
        )

    def read_cpu_seconds(self) -> tuple[float, ...]:
        """What the ranks of each host have used so far."""
        return tuple(cgroups.read_cpu_seconds(host.cgroup) for host in self.hosts)

    def update_plan(self, **changes: Any) -> None:
        """The next version of the plan, each worker's part to itself."""
        self.plan = replace(self.plan, version=self.plan.version + 1, **changes)
        for host in self.hosts:
            write_json(host.runtime.plan, self.plan.build_worker_plan(host.name).to_json())

    def update_requests(self, **changes: Any) -> None:
        """Each host's part of the open requests to itself."""
        self.requests = replace(self.requests, **changes)
        for host in self.hosts:
            write_json(host.runtime.requests, self.requests.build_worker_requests(host.name, is_member=True).to_json())

    def request_probe(self, name: str) -> None:
        """Each host measures its link to each other one; those of a turn have no host in common."""
        address = {host.name: f"{host.address}:{host.heartbeat.probe_port}" for host in self.hosts}
        targets: dict[str, list[ProbeTarget]] = {host.name: [] for host in self.hosts}
        for slot, turn in enumerate(PROBE_TURNS):
            for source, destination in turn:
                target = self.hosts[destination].name
                targets[self.hosts[source].name].append(ProbeTarget(target, address[target], slot))
        self.update_requests(probe=ProbeRequest(name, tuple(targets), tuple(map(tuple, targets.values()))))

    def request_profile(self, name: str, ahead: int, steps: int, seconds: float) -> None:
        """Request a profile of `steps` steps or `seconds` on all ranks, which begins `ahead` steps from now."""
        first_step = max(host.heartbeat.progress.step or 0 for host in self.hosts) + ahead
        self.update_requests(
            profile=ProfileRequest(name, first_step=first_step, steps=steps, seconds=seconds, sources=SourceNaming.SHOW)
        )

    def read_patterns(self, name: str) -> tuple[float, dict[int, bytes]]:
        """What has come of this window so far, by rank, and when the last of it came; 0: nothing has."""
        paths = {rank: host.runtime.pattern(name, rank) for host in self.hosts for rank in host.ranks}
        existing = {rank: path for rank, path in paths.items() if path.exists()}
        newest_at = max((path.stat().st_mtime for path in existing.values()), default=0.0)
        return newest_at, {rank: path.read_bytes() for rank, path in existing.items()}

    def step(self) -> int:
        return min(host.heartbeat.progress.step or 0 for host in self.hosts)

    def find_host(self, rank: int) -> JobHost:
        return self.hosts[rank // RANKS_A_HOST]

    def strike(self, rank: int, fault: Mapping[str, Any]) -> None:
        """The script's own fault, from its next step on; an empty one ends it."""
        path = self.hosts[0].folder / f"fault-{rank}.json"
        if not fault:
            path.unlink(missing_ok=True)
            return
        path.with_suffix(".new").write_text(json.dumps(fault))
        path.with_suffix(".new").rename(path)

    def wait_for(
        self, condition: Callable[[], Value | None], description: str, seconds: float = START_TIMEOUT_SECONDS
    ) -> Value:
        """The first truthy answer of `condition`. Raises TimeoutError with the last lines of the logs."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.hosts[0].folder.glob("*.log")))
                raise TimeoutError(f"not within {seconds:.0f} s: {description}\n{logs}")
            time.sleep(0.05)
        return value

    def end(self) -> None:
        for host in self.hosts:
            for pid in cgroups.list_pids(host.cgroup):
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
            cgroups.kill_cgroup(host.cgroup)
        cgroups.kill_cgroup(HOGS_CGROUP)
        for process in self._processes:
            process.kill()
            process.wait()

    def _build_launcher_command(self) -> tuple[str, ...]:
        script = Path(__file__).with_name("job.py")
        return (sys.executable, "-m", "pacekeeper.cli", "run", str(script))

    def _start_process(self, host: JobHost, command: Sequence[str], role: str) -> None:
        environment = {
            **os.environ,
            "FOLDER": str(host.folder),
            "PACEKEEPER_RUNTIME": str(host.runtime.root),
            "PACEKEEPER_WORKER": host.name,
            "PACEKEEPER_POD_IP": host.address,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        with (host.folder / f"{host.name}-{role}.log").open("ab") as log:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{host.namespace}", *_WITHOUT_NAME_SERVER, *command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)


@contextmanager
def create_hosted_job() -> Iterator[HostedJob]:
    """The hosts, without anything that runs on them; all is gone in the end. Needs root, iproute2 and cgroups."""
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir="/dev/shm") as folder:
        hosts = [JobHost(number, Path(folder)) for number in range(HOSTS)]
        _remove_hosts(hosts)
        hosted_job = HostedJob(hosts)
        try:
            _create_hosts(hosts)
            yield hosted_job
        finally:
            hosted_job.end()
            _remove_hosts(hosts)


def set_cpu_quota(host: JobHost, cores: float | None) -> None:
    """So much processor time for all ranks of the host; None: as much as there is."""
    folder = cgroups.get_controller_folder("cpu", host.cgroup)
    if cgroups.is_v2():
        (folder / "cpu.max").write_text("max" if cores is None else f"{round(cores * PERIOD_US)} {PERIOD_US}")
    else:
        (folder / "cpu.cfs_quota_us").write_text("-1" if cores is None else str(round(cores * PERIOD_US)))


def slow_link(host: JobHost, rate: str, *, egress: bool = True, to: JobHost | None = None) -> None:
    """Slow its route to the others (egress) or theirs to it to `rate` (in tc's syntax); `to`: only to this host."""
    namespace, device = (host.namespace, INTERFACE) if egress else (SWITCH, host.port)
    tc = ("tc", "-n", namespace)
    if to is None:
        run_command(*tc, *_split_command(f"qdisc replace dev {device} root tbf rate {rate} burst 32kb latency 400ms"))
        return
    run_command(*tc, *_split_command(f"qdisc replace dev {device} root handle 1: htb default 1"))
    run_command(*tc, *_split_command(f"class add dev {device} parent 1: classid 1:1 htb rate 30gbit quantum 60000"))
    run_command(*tc, *_split_command(f"class add dev {device} parent 1: classid 1:2 htb rate {rate} burst 32kb"))
    match = f"protocol ip u32 match ip dst {to.address}/32 flowid 1:2"
    run_command(*tc, *_split_command(f"filter add dev {device} parent 1: {match}"))


def drop_packets(source: JobHost, destination: JobHost) -> None:
    """What the one sends to the other goes to an unused address."""
    command = f"neigh replace {destination.address} lladdr {UNUSED_HARDWARE_ADDRESS} dev {INTERFACE} nud permanent"
    run_command("ip", "-n", source.namespace, *_split_command(command))


def _split_command(command: str) -> list[str]:
    return command.split()


def restore_host(host: JobHost) -> None:
    """Its network and its processors, as they were."""
    for namespace, device in ((host.namespace, INTERFACE), (SWITCH, host.port)):
        is_successful("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
    run_command("ip", "-n", host.namespace, *_split_command(f"neigh flush dev {INTERFACE} nud permanent"))
    set_cpu_quota(host, None)


def _build_cgroup_command(path: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command that enters the cgroup, with processes and processor time, and then becomes `command`."""
    folders = sorted({str(cgroups.get_controller_folder(name, path)) for name in ("pids", "cpu", "cpuacct")})
    enter = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in folders)
    return ("sh", "-c", f'{enter}; exec "$@"', "sh", *command)


def add_noisy_neighbors(hosts: Sequence[JobHost], victim: int, hogs: int) -> None:
    """`hogs` neighbors copy memory on the one processor that this host shares with them then, and take most of it.
    The other hosts have the other processors. 0: the neighbors end."""
    cgroups.kill_cgroup(HOGS_CGROUP)
    processors = os.sched_getaffinity(0)
    shared_processor = min(processors)
    for host in hosts:
        own_processors = {shared_processor} if host.number == victim else processors - {shared_processor} or processors
        _pin_processes(host, own_processors if hogs else processors)
    if not hogs:
        return
    cgroups.create_cgroup(HOGS_CGROUP)
    _set_cpu_weight(HOGS_CGROUP, 8)
    for _ in range(hogs):
        command = ("taskset", "--cpu-list", str(shared_processor), sys.executable, "-c", HOG_PROGRAM)
        subprocess.Popen(_build_cgroup_command(HOGS_CGROUP, command), start_new_session=True, stdout=subprocess.DEVNULL)


def _set_cpu_weight(path: str, times: int) -> None:
    """Its part of the processors, over that of a usual group next to it."""
    name, usual = ("cpu.weight", 100) if cgroups.is_v2() else ("cpu.shares", 1024)
    (cgroups.get_controller_folder("cpu", path) / name).write_text(str(times * usual))


def _pin_processes(host: JobHost, processors: set[int]) -> None:
    for pid in cgroups.list_pids(host.cgroup):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), processors)


def _create_hosts(hosts: Sequence[JobHost]) -> None:
    cgroups.create_cgroup(NAME)
    _set_cpu_weight(NAME, 100)  # other load of the machine must not act as a fault
    run_command("ip", "netns", "add", SWITCH)
    run_command("ip", "-n", SWITCH, "link", "add", "bridge0", "type", "bridge")
    run_command("ip", "-n", SWITCH, "link", "set", "bridge0", "up")
    for host in hosts:
        cgroups.create_cgroup(host.cgroup)
        run_command("ip", "netns", "add", host.namespace)
        peer = ["peer", "name", INTERFACE, "netns", host.namespace]
        run_command("ip", "-n", SWITCH, "link", "add", host.port, "type", "veth", *peer)
        run_command("ip", "-n", SWITCH, "link", "set", host.port, "master", "bridge0", "up")
        run_command("ip", "-n", host.namespace, "link", "set", "lo", "up")
        run_command("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        run_command("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")


def _remove_hosts(hosts: Sequence[JobHost]) -> None:
    """Deleting a namespace takes the links with it."""
    cgroups.kill_cgroup(NAME)  # with hogs whose parent was killed before it could end them
    if cgroups.get_controller_folder("pids", NAME).exists():
        cgroups.remove_cgroup(NAME)
    for namespace in (*(host.namespace for host in hosts), SWITCH):
        if is_successful("ip", "netns", "pids", namespace):
            run_command("ip", "netns", "delete", namespace)

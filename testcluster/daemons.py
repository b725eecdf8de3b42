"""Long-running programs of the cluster, each in its own cgroup, by which it is found and ended."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testcluster import cgroups
from testcluster.settings import LOGS, STATE
from testcluster.shell import ClusterError


@dataclass(frozen=True)
class Daemon:
    """A program with its command and configuration. It is restarted when any of these changes."""

    name: str
    command: tuple[str, ...]
    namespace: str | None = None  # the network namespace that it runs in
    configuration: str = ""  # text of its configuration files

    def ensure_running(self) -> None:
        """Ensure that it runs with this command and configuration."""
        if self.is_running() and self._digest_file.exists() and self._digest_file.read_text() == self._digest:
            return
        self.stop()
        self._digest_file.parent.mkdir(parents=True, exist_ok=True)
        self._digest_file.write_text(self._digest)
        cgroups.create_cgroup(self.cgroup)
        LOGS.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            subprocess.run(
                cgroups.build_launch_command(self.cgroup, self._command_in_namespace),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
                check=True,
            )

    def stop(self) -> None:
        cgroups.kill_cgroup(self.cgroup)

    def is_running(self) -> bool:
        return bool(cgroups.list_pids(self.cgroup))

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait up to `timeout` seconds for a condition. Raises ClusterError, at once if the program exits."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self.is_running():
                raise ClusterError(f"{self.name} exited. {self.log} ends with:\n{_read_last_lines(self.log)}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: not within {timeout:.0f} s; see {self.log}")
            time.sleep(0.1)

    @property
    def cgroup(self) -> str:
        return f"{cgroups.CLUSTER_CGROUP}/daemons/{self.name}"

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def _digest_file(self) -> Path:
        return STATE / "daemons" / self.name

    @property
    def _digest(self) -> str:
        return hashlib.sha256(repr((self.command, self.namespace, self.configuration)).encode()).hexdigest()

    @property
    def _command_in_namespace(self) -> tuple[str, ...]:
        # nsenter, not `ip netns exec`: that mounts /sys again, which hides the cgroups.
        return ("nsenter", f"--net=/run/netns/{self.namespace}", *self.command) if self.namespace else self.command


def _read_last_lines(log: Path, count: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])

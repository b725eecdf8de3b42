"""The launcher's settings. No other module reads its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper_analysis.errors import InputError

_KILL, _IMPORT = "PACEKEEPER_KILL_SECONDS", "PACEKEEPER_IMPORT_SECONDS"


@dataclass(frozen=True)
class LauncherSettings:
    """Settings of the launcher. All times are in seconds."""

    worker: str
    """Name of this worker's pod."""
    address: str
    """Its address, at which the other workers reach it."""
    incarnation: str = "0"
    """Distinguishes this process from an earlier launcher of the same worker."""
    grace: float = 25.0
    """How long ranks may take to checkpoint and leave after SIGTERM. Below the pod's terminationGracePeriodSeconds."""
    kill_timeout: float = 5.0
    """How long killed ranks may take to exit before the worker is given up."""
    import_timeout: float = 55.0
    """How long the replacement of a warm process that exited may take to import torch."""
    gather_timeout: float = 60.0
    """How long the launcher waits for the other launchers before it reports a fault."""
    settle_timeout: float = 2.0
    """How long the launcher of a failed rank waits for its peers to report which of them failed first."""
    linger: float = 60.0
    """How long processes that ranks have started may run after all ranks exited with code 0. Example: an upload."""
    contact_timeout: float = 8.0
    """Ranks end after this time without contact to operator and peers: their worker may have been replaced."""
    unmonitored_step: float = 30.0
    """A round of a script that records nothing counts as progress if its ranks ran for this time."""
    hang_deadline: float | None = None
    """Deadline of the training phase; None: derived from the ranks' step times."""
    phase_deadline: float = 1800.0
    """Deadline of every other phase."""
    peer_port: int = 9464
    """Port of a peer that is probed when ranks stall: its metrics port. With host networking the metrics are elsewhere,
    but a refused connection is an answer, too."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherSettings:
        """Read the settings. Raises InputError that names the variable and the remedy."""
        try:
            worker, address = environment["PACEKEEPER_WORKER"], environment["PACEKEEPER_POD_IP"]
        except KeyError as error:
            raise InputError(
                f"{error.args[0]} is not set: the operator sets it in a worker's pod. Outside Kubernetes, use "
                "`pacekeeper run --local <ranks> script.py`"
            ) from error
        settings = cls(
            worker=worker,
            address=address,
            incarnation=f"{time.time_ns() // 1_000_000:x}",
            grace=_parse_seconds(environment, "PACEKEEPER_GRACE_SECONDS") or cls.grace,
            kill_timeout=_parse_seconds(environment, _KILL) or cls.kill_timeout,
            import_timeout=_parse_seconds(environment, _IMPORT) or cls.import_timeout,
            gather_timeout=_parse_seconds(environment, "PACEKEEPER_GATHER_SECONDS") or cls.gather_timeout,
            linger=_parse_seconds(environment, "PACEKEEPER_LINGER_SECONDS") or cls.linger,
            contact_timeout=_parse_seconds(environment, "PACEKEEPER_CONTACT_SECONDS") or cls.contact_timeout,
            hang_deadline=_parse_seconds(environment, "PACEKEEPER_HANG_SECONDS"),
            phase_deadline=_parse_seconds(environment, "PACEKEEPER_PHASE_SECONDS") or cls.phase_deadline,
            peer_port=int(_parse_seconds(environment, "PACEKEEPER_METRICS_PORT") or cls.peer_port),
        )
        for name in (_KILL, _IMPORT):
            seconds = _parse_seconds(environment, name) or 0.0
            if seconds >= settings.gather_timeout:
                raise InputError(
                    f"{name}: {seconds:g} s must be below PACEKEEPER_GATHER_SECONDS, {settings.gather_timeout:g} s, "
                    "after which the operator replaces this worker; raise that variable, too"
                )
        return settings


_SERVICE_LINK_PREFIXES = ("tcp://", "udp://", "sctp://")
"""How the values begin that Kubernetes sets for a Service: PACEKEEPER_METRICS_PORT for one named pacekeeper-metrics."""


def _parse_seconds(environment: Mapping[str, str], name: str) -> float | None:
    """Return a positive number; None if the variable is unset, empty, `auto`, or set by Kubernetes for a Service."""
    text = environment.get(name, "")
    if text in {"", "auto"} or text.startswith(_SERVICE_LINK_PREFIXES):
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise InputError(f"{name}={text!r}: give a number above 0, or leave it empty")
    return value

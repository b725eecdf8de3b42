"""The launcher's settings: the one place that reads its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper_analysis.errors import InputError

_KILL, _IMPORT = "PACEKEEPER_KILL_SECONDS", "PACEKEEPER_IMPORT_SECONDS"


@dataclass(frozen=True)
class LauncherSettings:
    """All times in seconds."""

    worker: str
    """Name of this worker's pod."""
    address: str
    """Its address, where the other workers reach it."""
    incarnation: str = "0"
    """Tells this launcher's process from one that ran in its place before."""
    grace: float = 25.0
    """How long ranks may take to checkpoint and leave after SIGTERM; below the pod's terminationGracePeriodSeconds."""
    kill_timeout: float = 5.0
    """How long killed ranks may take to be gone before the worker is given up."""
    import_timeout: float = 55.0
    """How long a process that takes the place of a warm one that has died may take to import torch."""
    gather_timeout: float = 60.0
    """How long the other launchers may take to come before a fault says that they have not."""
    settle_timeout: float = 2.0
    """How long a failed rank's launcher waits for its peers' word on which of them failed first."""
    linger: float = 60.0
    """How long processes that ranks have started may go on when all ranks have ended with code 0: an upload, say."""
    contact_timeout: float = 8.0
    """Without contact to operator and peers for so long, the ranks end: their worker may have been replaced."""
    unmonitored_step: float = 30.0
    """A script that records nothing has done something useful when its ranks ran for so long."""
    hang_deadline: float | None = None
    """Deadline of the training phase; None: from the ranks' own step times."""
    phase_deadline: float = 1800.0
    """Deadline of every other phase."""
    peer_port: int = 9464
    """Port at which a neighbour's address is probed when ranks stall: its metrics. In the node's network they are
    elsewhere, and the refusal is an answer all the same."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherSettings:
        """Raises InputError that names the variable and the remedy."""
        try:
            worker, address = environment["PACEKEEPER_WORKER"], environment["PACEKEEPER_POD_IP"]
        except KeyError as error:
            raise InputError(
                f"{error.args[0]} is not set: the operator sets it in a worker's pod. Outside Kubernetes use "
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
                    "after which this worker is replaced; raise that, too"
                )
        return settings


_SERVICE_LINK_PREFIXES = ("tcp://", "udp://", "sctp://")
"""What Kubernetes sets for a Service: PACEKEEPER_METRICS_PORT for one by the name of pacekeeper-metrics."""


def _parse_seconds(environment: Mapping[str, str], name: str) -> float | None:
    """A positive number; None where the variable is unset, empty, `auto` or Kubernetes' own."""
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

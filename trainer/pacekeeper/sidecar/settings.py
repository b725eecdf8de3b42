"""The sidecar's settings from its environment. No other module of the sidecar reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError


@dataclass(frozen=True)
class SidecarSettings:
    """Settings of the sidecar. Durations are seconds."""

    runtime: RuntimeFolder
    job: str  # "" in a watched container
    worker: str
    operator: str  # https URL
    authority: str  # PEM of the certificate authority; "": the system's
    token_file: Path
    metrics_port: int = 9464
    window_steps: int = 32
    watched: bool = False
    """Whether the container is watched: no launcher runs in it, and its processes are not trusted."""
    kubeflow_port: int = 0
    """Port on which a watched container's script reports its progress; 0: none."""
    samples_connections: bool = False
    """Whether the connections of a watched container's ranks are sampled. Next to a launcher, they always are."""
    poll_seconds: float = 3.0
    """How long the operator holds a poll. Its answers are heartbeats in both directions."""
    hold_seconds: float = 30.0
    """How long it may hold a poll if it has very many workers. Urgent changes are sent on another connection."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> SidecarSettings:
        """Read the settings. Raises InputError that names the variable."""
        watched = environment.get("PACEKEEPER_WATCHED", "") == "1"
        required = _REQUIRED_VARIABLES if watched else ("PACEKEEPER_JOB", *_REQUIRED_VARIABLES)
        missing = [name for name in required if not environment.get(name)]
        if missing:
            raise InputError(f"{', '.join(missing)} must be set; the operator sets them on the sidecars that it adds")
        return cls(
            runtime=RuntimeFolder.from_environment(environment),
            job=environment.get("PACEKEEPER_JOB", ""),
            worker=environment["PACEKEEPER_WORKER"],
            operator=environment["PACEKEEPER_OPERATOR"].rstrip("/"),
            authority=environment.get("PACEKEEPER_CA", ""),
            token_file=Path(environment["PACEKEEPER_TOKEN_FILE"]),
            metrics_port=_read_integer(environment, "PACEKEEPER_METRICS_PORT", cls.metrics_port),
            window_steps=_read_integer(environment, "PACEKEEPER_WINDOW_STEPS", cls.window_steps),
            watched=watched,
            kubeflow_port=_read_integer(environment, "PACEKEEPER_KUBEFLOW_PORT", cls.kubeflow_port),
            samples_connections=environment.get("PACEKEEPER_WATCH_LINKS", "") == "1",
            poll_seconds=float(environment.get("PACEKEEPER_POLL_SECONDS") or cls.poll_seconds),
        )


_REQUIRED_VARIABLES = ("PACEKEEPER_WORKER", "PACEKEEPER_OPERATOR", "PACEKEEPER_TOKEN_FILE")


def _read_integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise InputError(f"{name}={text!r} is not a whole number")
    return int(text)

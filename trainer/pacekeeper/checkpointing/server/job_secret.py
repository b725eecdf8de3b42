"""The job's secret, which the server takes from the operator once: its pod's specification may be read by more people.

It is kept in the pod's memory, so that a server that its kubelet restarts needs no operator.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, parse_json, read_dataclass

OPERATOR_REQUEST_SECONDS = 10.0
FIRST_OPERATOR_RETRY_SECONDS, LONGEST_OPERATOR_RETRY_SECONDS = 0.5, 8.0
_MAX_PLAN_ANSWER_BYTES = 1 << 20
_SECRET_PATTERN = re.compile(r"([0-9a-f]{2}){16,64}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server, which the operator gives its pod."""

    folder: str
    port: int
    pod: str
    operator: str  # https URL
    authority: str  # PEM of the certificate authority
    token_file: Path
    secret_file: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerSettings:
        """Read the settings. Raises InputError that names the variable."""
        missing = [name for name in _VARIABLES if not environment.get(name)]
        if missing:
            raise InputError(f"{', '.join(missing)} must be set; the operator sets them on the pod that it creates")
        port = environment["PACEKEEPER_CHECKPOINT_PORT"]
        if not re.fullmatch(r"\d{1,5}", port):
            raise InputError(f"PACEKEEPER_CHECKPOINT_PORT={port!r} is not a port; the operator sets it")
        return cls(
            environment["PACEKEEPER_CHECKPOINT_PATH"],
            int(port),
            environment["PACEKEEPER_WORKER"],
            environment["PACEKEEPER_OPERATOR"].rstrip("/"),
            environment.get("PACEKEEPER_CA", ""),
            Path(environment["PACEKEEPER_TOKEN_FILE"]),
            Path(environment["PACEKEEPER_RUNTIME"], "checkpoint-secret"),
        )


@dataclass(frozen=True)
class _Server:
    secret: Annotated[str, MaxLength(128)]


@dataclass(frozen=True)
class _Plan:
    checkpoint_server: _Server


def obtain_secret(settings: ServerSettings, sleep: Callable[[float], object] = time.sleep) -> str:
    """Return the secret, hexadecimal. Without the operator, wait for it."""
    if settings.secret_file.exists():
        return settings.secret_file.read_text()
    pause, last_message = FIRST_OPERATOR_RETRY_SECONDS, ""
    while True:
        try:
            secret = _request_secret(settings)
            break
        except (OSError, http.client.HTTPException, InputError) as error:
            message = f"{type(error).__name__}: {error}"
            if message != last_message:
                log.warning("the operator does not give the job's secret, which is asked for again: %s", message)
            last_message = message
        sleep(pause)
        pause = min(2 * pause, LONGEST_OPERATOR_RETRY_SECONDS)
    temporary = settings.secret_file.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret)
    temporary.replace(settings.secret_file)
    return secret


def _request_secret(settings: ServerSettings) -> str:
    """Return the secret in the operator's plan. Raises OSError, HTTPException, and InputError."""
    operator = urlsplit(settings.operator)
    context = ssl.create_default_context(cadata=settings.authority or None)
    connection = http.client.HTTPSConnection(
        operator.hostname or "", operator.port, timeout=OPERATOR_REQUEST_SECONDS, context=context
    )
    headers = {
        "Authorization": f"Bearer {settings.token_file.read_text().strip()}",
        "Content-Type": "application/json",
        "Connection": "close",
    }
    try:
        connection.request("POST", "/v1/plan?wait=0", json.dumps({"worker": settings.pod}).encode(), headers)
        answer = connection.getresponse()
        content = answer.read(_MAX_PLAN_ANSWER_BYTES)
    finally:
        connection.close()
    if answer.status != http.client.OK:  # another operator leads, or has not read the plan yet
        raise http.client.HTTPException(f"status {answer.status}: {content[:200]!r}")
    return parse_secret(content)


def parse_secret(plan: bytes) -> str:
    """Return the secret in the operator's answer. Raises InputError."""
    secret = read_dataclass(_Plan, parse_json(plan), "plan").checkpoint_server.secret
    if not _SECRET_PATTERN.fullmatch(secret):
        raise InputError("plan.checkpoint_server.secret: must be hexadecimal digits")
    return secret


_VARIABLES = (
    *("PACEKEEPER_CHECKPOINT_PATH", "PACEKEEPER_CHECKPOINT_PORT", "PACEKEEPER_WORKER", "PACEKEEPER_OPERATOR"),
    *("PACEKEEPER_TOKEN_FILE", "PACEKEEPER_RUNTIME"),
)

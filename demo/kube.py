"""Access to the cluster through the API server, kubectl, and Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from pacekeeper_operator.api.names import API_VERSION
from testcluster import api, programs
from testcluster.settings import KUBECONFIG, PROMETHEUS_URL

Value = TypeVar("Value")


_PACEKEEPER = f"/apis/{API_VERSION}"
_GROUPS = {
    "events": "/apis/events.k8s.io/v1",
    "incidents": _PACEKEEPER,
    "pods": "/api/v1",
    "trainingjobs": _PACEKEEPER,
    "trainingjobstates": _PACEKEEPER,
}


class DemoError(Exception):
    """The demo cannot continue. The message is the reason."""


def run_kubectl(*arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
    return _run_command([str(programs.find_kubectl()), *arguments], stdin, timeout)


def get_object(kind: str, name: str = "", namespace: str = "") -> Any:
    """Return one object, or the items of a list; None if the object does not exist.

    It calls the API server directly: the demo polls, and each start of kubectl costs a tenth of a second.
    """
    try:
        body = api.get_path(f"{_GROUPS[kind]}/namespaces/{namespace}/{kind}" + f"/{name}" * bool(name))
    except api.ObjectMissing:
        return None
    except api.ApiUnavailable as error:
        raise DemoError(str(error)) from error
    return body if name else body["items"]


def delete_namespace(name: str) -> None:
    """Delete a namespace with all its objects, and wait until it is gone."""
    run_kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout=190)


def wait_for(condition: Callable[[], Value | None], timeout: float, what: str) -> Value:
    """Return the first true result of `condition`. Raises DemoError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.25)


def query_prometheus(expression: str) -> list[dict[str, Any]]:
    """Return the result of an instant PromQL query."""
    return _request_prometheus("query", {"query": expression})


def query_curve(expression: str, start: float, end: float) -> list[tuple[float, float]]:
    """Return (seconds since `start`, value) of a range query that gives one series, one point per second."""
    series = _request_prometheus(
        "query_range", {"query": expression, "start": f"{start}", "end": f"{end}", "step": "1"}
    )
    return [(float(timestamp) - start, float(value)) for timestamp, value in series[0]["values"]] if series else []


def has_answers(expression: str, start: float, end: float) -> bool:
    """Return whether a range query, with a step of five seconds, has any result."""
    return bool(
        _request_prometheus("query_range", {"query": expression, "start": f"{start}", "end": f"{end}", "step": "5"})
    )


def parse_seconds(timestamp: str) -> float:
    """Parse a time in the API's format to seconds since the epoch."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _request_prometheus(path: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
    url = f"{PROMETHEUS_URL}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            results: list[dict[str, Any]] = json.load(response)["data"]["result"]
            return results
    except OSError as error:
        raise DemoError(f"Prometheus at {PROMETHEUS_URL}: {error}") from error


def _run_command(command: list[str], stdin: str | None, timeout: float) -> str:
    environment = os.environ | {"KUBECONFIG": str(KUBECONFIG)}
    try:
        result = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"`{' '.join(command[:6])} …` did not end within {timeout:.0f} s") from error
    if result.returncode != 0:
        raise DemoError(f"`{' '.join(command[:6])} …` failed: {result.stderr.strip()}")
    return result.stdout

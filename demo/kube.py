"""What the demo reads and does on the cluster, through the API server, kubectl and Prometheus."""

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

from pacekeeper_operator.api import API_VERSION
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
    """The demo cannot go on; the message says why."""


def run_kubectl(*arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
    return _run_command([str(programs.find_kubectl()), *arguments], stdin, timeout)


def get_object(kind: str, name: str = "", namespace: str = "") -> Any:
    """One object, or the items of a list; None where the object is not there.

    Asked of the API server itself: the demo polls, and each start of kubectl costs a tenth of a second.
    """
    try:
        found = api.get_path(f"{_GROUPS[kind]}/namespaces/{namespace}/{kind}" + f"/{name}" * bool(name))
    except api.ObjectMissing:
        return None
    except api.ApiUnavailable as error:
        raise DemoError(str(error)) from error
    return found if name else found["items"]


def delete_namespace(name: str) -> None:
    """Return when it and all that is in it are gone, or never were."""
    run_kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout=190)


def wait_for(condition: Callable[[], Value | None], timeout: float, what: str) -> Value:
    """The first answer of `condition` that counts as true. DemoError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.25)


def query_prometheus(expression: str) -> list[dict[str, Any]]:
    """The result of an instant PromQL query."""
    return _request_prometheus("query", {"query": expression})


def query_curve(expression: str, start: float, end: float) -> list[tuple[float, float]]:
    """(seconds since `start`, value) of a range query that gives one series, one point a second."""
    found = _request_prometheus("query_range", {"query": expression, "start": f"{start}", "end": f"{end}", "step": "1"})
    return [(float(at) - start, float(value)) for at, value in found[0]["values"]] if found else []


def has_answers(expression: str, start: float, end: float) -> bool:
    """Whether a range query gives anything at all, looked at every five seconds."""
    return bool(_request_prometheus("query_range", {"query": expression, "start": f"{start}", "end": f"{end}", "step": "5"}))


def parse_seconds(timestamp: str) -> float:
    """Seconds since the epoch of a time in the API's form."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _request_prometheus(path: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
    url = f"{PROMETHEUS_URL}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError as error:
        raise DemoError(f"Prometheus at {PROMETHEUS_URL}: {error}") from error


def _run_command(command: list[str], stdin: str | None, timeout: float) -> str:
    environment = os.environ | {"KUBECONFIG": str(KUBECONFIG)}
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"`{' '.join(command[:6])} …` did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        raise DemoError(f"`{' '.join(command[:6])} …` failed: {done.stderr.strip()}")
    return done.stdout

"""Reads from the API server, without a client library."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from testcluster import credentials
from testcluster.settings import API_PORT, API_URL, HOST_ADDRESS, ClusterNode
from testcluster.shell import ClusterError


class ApiUnavailable(ClusterError):
    """The API server does not answer, or does not have the object."""


class ObjectMissing(ApiUnavailable):
    """The object does not exist."""


def get_path(path: str, timeout: float = 5) -> Any:
    """Return the answer to GET `path` (`/api/v1/nodes`): parsed if it is JSON, otherwise its text.

    Raises ObjectMissing or ApiUnavailable.
    """
    deadline = time.monotonic() + timeout
    while True:
        status, kind, text = _request_with_retry(path, timeout)
        # An API server that has just started is ready before its storage of custom resources: it requests a retry.
        if status != http.HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if status != http.HTTPStatus.OK:
        missing = status == http.HTTPStatus.NOT_FOUND
        raise (ObjectMissing if missing else ApiUnavailable)(f"GET {path}: {status} {text}")
    return json.loads(text) if "json" in kind else text


def _request_with_retry(path: str, timeout: float) -> tuple[int, str, str]:
    """Return status, content type, and text.

    Each thread keeps its connection: a new one costs more than most answers.
    """
    if connection := _connections.__dict__.pop("connection", None):
        with suppress(OSError, http.client.HTTPException):  # the connection is broken after a restart of the server
            return _send_request(connection, path, timeout)
    try:
        return _send_request(_open_connection(timeout), path, timeout)
    except (OSError, http.client.HTTPException) as error:
        raise ApiUnavailable(f"GET {path}: {error}") from error


def _send_request(connection: http.client.HTTPSConnection, path: str, timeout: float) -> tuple[int, str, str]:
    connection.sock.settimeout(timeout)
    connection.request("GET", path, headers={"Authorization": f"Bearer {credentials.read_admin_token()}"})
    response = connection.getresponse()
    text = response.read().decode()
    _connections.connection = connection
    return response.status, response.headers.get("Content-Type", ""), text


def _open_connection(timeout: float) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(credentials.CA))
    connection = http.client.HTTPSConnection(HOST_ADDRESS, API_PORT, timeout=timeout, context=context)
    connection.connect()
    return connection


_connections = threading.local()


def watch_path(path: str, version: str, seconds: int = 60) -> Iterator[Any]:
    """Yield the events of the list at `path` since `version`.

    It ends after `seconds`: then list again, which proves that the watch works. Raises ApiUnavailable, also if
    `version` is too old.
    """
    query = f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={seconds}"
    try:
        with _open_stream(query, seconds + 5) as response:
            for line in response:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiUnavailable(f"GET {query}: {event['object'].get('message')}")
                yield event
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a truncated line
        raise ApiUnavailable(f"GET {query}: {error}") from error


def _open_stream(path: str, timeout: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(
        API_URL + path, headers={"Authorization": f"Bearer {credentials.read_admin_token()}"}
    )
    context = ssl.create_default_context(cafile=str(credentials.CA))
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout, context=context)
    return response


def is_ready() -> bool:
    try:
        return bool(get_path("/readyz") == "ok")
    except ApiUnavailable:
        return False


def list_ready_nodes() -> set[str]:
    """Return the names of the nodes whose condition Ready is True."""
    return {
        node["metadata"]["name"]
        for node in get_path("/api/v1/nodes")["items"]
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
    }


def is_kubelet_healthy(node: ClusterNode) -> bool:
    """Return whether the node's kubelet answers, and its sync loop runs."""
    try:
        return bool(get_path(f"/api/v1/nodes/{node.name}/proxy/healthz") == "ok")
    except ApiUnavailable:
        return False

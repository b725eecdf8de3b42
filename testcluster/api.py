"""Reading from the API server, without a client library."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from testcluster import credentials
from testcluster.settings import API_URL, Node
from testcluster.shell import ClusterError


class Unavailable(ClusterError):
    """The API server does not answer, or has no such object."""


def get(path: str, timeout: float = 5) -> Any:
    """The answer to GET `path` (`/api/v1/nodes`): parsed if it is JSON, else its text."""
    try:
        with _open(path, timeout) as answer:
            text = answer.read().decode()
            return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text
    except OSError as error:  # URLError, a time-out, a broken connection
        raise Unavailable(f"GET {path}: {error}") from error


def watch(path: str, version: str, seconds: int = 60) -> Iterator[Any]:
    """Events on the list at `path` since `version`. Ends after `seconds`: then list again, which proves the watch.

    Raises Unavailable, also where `version` is too old.
    """
    query = f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={seconds}"
    try:
        with _open(query, seconds + 5) as answer:
            for line in answer:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise Unavailable(f"GET {query}: {event['object'].get('message')}")
                yield event
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a line that was cut off
        raise Unavailable(f"GET {query}: {error}") from error


def _open(path: str, timeout: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(API_URL + path, headers={"Authorization": f"Bearer {credentials.admin_token()}"})
    context = ssl.create_default_context(cafile=str(credentials.CA))
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout, context=context)
            return answer
        except urllib.error.HTTPError as error:
            # An API server that has just begun is ready before its storage of custom resources is: "try again".
            if error.code != http.HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def is_ready() -> bool:
    try:
        return bool(get("/readyz") == "ok")
    except Unavailable:
        return False


def ready_nodes() -> set[str]:
    """Names of the nodes whose condition Ready is True."""
    return {
        node["metadata"]["name"]
        for node in get("/api/v1/nodes")["items"]
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
    }


def kubelet_answers(node: Node) -> bool:
    """Whether the node's kubelet serves, and its loop over the pods turns."""
    try:
        return bool(get(f"/api/v1/nodes/{node.name}/proxy/healthz") == "ok")
    except Unavailable:
        return False

"""What a sidecar, or another client with its token, may send to the operator."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

from testing.kubernetes.jobs import ClusterJob

LEADER_SECONDS = 120.0


def call_operator(job: ClusterJob, path: str, bearer: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST to the operator that leads, at the address and with the authority that sidecars are given; (status, answer).
    The Service leads to a standby as well, which names the leader."""
    deadline = time.monotonic() + LEADER_SECONDS
    while True:
        status, answer = _send_call(job, path, bearer, body)
        if status != 503 or "leader" not in answer or time.monotonic() > deadline:
            return status, answer
        time.sleep(0.1)


def _send_call(job: ClusterJob, path: str, bearer: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    sidecar = job.list_pods()[0]["spec"]["initContainers"][0]
    environment = {variable["name"]: variable.get("value", "") for variable in sidecar["env"]}
    request = urllib.request.Request(environment["PACEKEEPER_OPERATOR"] + path, json.dumps(body).encode())
    if bearer:
        request.add_header("Authorization", f"Bearer {bearer}")
    context = ssl.create_default_context(cadata=environment["PACEKEEPER_CA"])
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def create_sidecar_token(job: ClusterJob, pod: str, audience: str = "pacekeeper") -> str:
    """Of the pod, as its sidecar gets it from the kubelet."""
    options = ["--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--audience={audience}"]
    return job.cluster.kubectl("create", "token", "default", *options, "-n", job.namespace).strip()

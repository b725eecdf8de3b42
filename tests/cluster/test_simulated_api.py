"""The simulated API server behaves as the real one, where the operator relies on it: probes call both."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from testcluster import faults
from testing.kubernetes.api_probes import PROBES, ApiProbe
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.simulated.simulated_api import SimulatedServer

pytestmark = pytest.mark.usefixtures("resources")


@dataclass
class RealServer:
    """See testing.kubernetes.api_probes.Server."""

    namespace: str
    connection: http.client.HTTPConnection

    def request(
        self, method: str, path: str, query: Mapping[str, str], body: Any, style: str
    ) -> tuple[int, dict[str, Any]]:
        sent = None if body is None else json.dumps(body).encode()
        self.connection.request(
            method, _build_url(path, query), sent, {"Content-Type": style, "Accept": "application/json"}
        )
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def create_token(self, pod: dict[str, Any], audience: str) -> str:
        metadata = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        body = {"spec": {"audiences": [audience], "boundObjectRef": bound}}
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default/token"
        _, answer = self.request("POST", path, {}, body, "application/json")
        token: str = answer["status"]["token"]
        return token

    def list_changes(self, path: str, query: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
        self.connection.request("GET", _build_url(path, {**query, "watch": "true", "timeoutSeconds": "1"}))
        events = [json.loads(line) for line in self.connection.getresponse().read().splitlines()]
        return [(event["type"], event["object"]) for event in events if event["type"] != "BOOKMARK"]


def _build_url(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


@pytest.fixture(scope="module")
def real(cluster: KubectlCluster) -> Iterator[RealServer]:
    address = urlsplit(cluster.reader.url)
    assert address.hostname is not None
    if cluster.is_testcluster:
        faults.restart_api_server()  # revision 1 is then older than its watch cache
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    with scratch_namespace(cluster) as namespace:
        wait_for(lambda: cluster.get("serviceaccount", "default", namespace), 120, "pods can be made")
        yield RealServer(namespace, connection)
    connection.close()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_both_servers_answer_alike(real: RealServer, probe: ApiProbe) -> None:
    assert probe.run_on(real) == probe.run_on(SimulatedServer())

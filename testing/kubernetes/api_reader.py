"""Reads from a cluster, and dry runs, by the names that kubectl takes: at a hundredth of what a start of it costs."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


@dataclass
class ApiReader:
    """`url`: of a `kubectl proxy`, which connects to any cluster."""

    url: str
    _places: dict[str, _KindPath] = field(default_factory=dict)

    def get(self, kind: str, name: str, namespace: str) -> Any:
        """The object, or None where there is none."""
        try:
            return self._send_request(f"{self._build_path(kind, namespace)}/{name}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str, selector: str) -> list[Any]:
        """`namespace`: "": those of all."""
        items: list[Any] = self._send_request(f"{self._build_path(kind, namespace)}?labelSelector={quote(selector)}")[
            "items"
        ]
        return items

    def find_refusal(self, kind: str, body: dict[str, Any], namespace: str) -> str:
        """The server's refusal to create the object, in a dry run; "": none."""
        path = f"{self._build_path(kind, namespace)}?dryRun=All&fieldValidation=Strict"
        try:
            self._send_request(path, data=json.dumps(body).encode())
        except urllib.error.HTTPError as error:
            return str(json.load(error)["message"])
        return ""

    def _build_path(self, kind: str, namespace: str) -> str:
        if kind not in self._places:  # it may have been defined since
            self._places = self._discover()
        kind_path = self._places[kind]
        return (
            f"{kind_path.path}/namespaces/{namespace}/{kind_path.plural}"
            if kind_path.namespaced and namespace
            else kind_path.list_path
        )

    def _discover(self) -> dict[str, _KindPath]:
        """Where a name has several meanings, the core's goes first, as with kubectl."""
        kind_paths: dict[str, _KindPath] = {}
        for root in ("/api", "/apis"):
            for group in self._send_request(root, _DISCOVERY)["items"]:
                for name, kind_path in _iterate_kind_paths(root, group):
                    kind_paths.setdefault(name, kind_path)
        return kind_paths

    def _send_request(self, path: str, accept: str = "application/json", data: bytes | None = None) -> Any:
        headers = {"Accept": accept, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


@dataclass(frozen=True)
class _KindPath:
    """Where the API server keeps a kind."""

    path: str  # /api/v1 or /apis/<group>/<version>
    plural: str
    namespaced: bool

    @property
    def list_path(self) -> str:
        return f"{self.path}/{self.plural}"


def _iterate_kind_paths(root: str, group: dict[str, Any]) -> Iterator[tuple[str, _KindPath]]:
    """Each name of each of the group's kinds, of the version that the server prefers."""
    group_name = group["metadata"].get("name", "")
    version = group["versions"][0]
    path = "/".join(part for part in (root, group_name, version["version"]) if part)
    for resource in version["resources"]:
        kind_path = _KindPath(path, resource["resource"], resource["scope"] == "Namespaced")
        names = [resource["resource"], resource["singularResource"], *resource.get("shortNames", ())]
        yield from ((name, kind_path) for name in [*names, f"{resource['resource']}.{group_name}"])


@contextmanager
def api_reader(kubectl: Sequence[str]) -> Iterator[ApiReader]:
    """`kubectl`: the command and how it reaches the cluster."""
    command = [*kubectl, "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as proxy:
        assert proxy.stdout is not None
        try:
            line = proxy.stdout.readline()
            assert line, f"{' '.join(command)} ended with status {proxy.wait()}"
            yield ApiReader(f"http://{line.split()[-1]}")  # Starting to serve on 127.0.0.1:…
        finally:
            proxy.terminate()

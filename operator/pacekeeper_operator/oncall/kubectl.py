"""kubectl, called as a person would: with his context, his namespace and his rights."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

from ..api import GROUP, Object

KUBECTL_CALL_TIMEOUT_SECONDS = 60.0
"""For one call."""
KUBECTL_LOG_PATTERN = re.compile(r"[EWI]\d{4} ")
"""Begins a line of kubectl's own log."""
NOT_FOUND_MARKER = "(NotFound)"
NOT_INSTALLED_MARKERS = ("the server doesn't have a resource type", "could not find the requested resource")


class KubectlError(InputError):
    """kubectl has refused, in its own words."""


class KubectlNotFound(KubectlError):
    """There is no such object."""


@dataclass(frozen=True)
class Kubectl:
    """`options`: what stands in every call, as `--context=…`. `namespace`: "" is that of the context."""

    options: tuple[str, ...] = ()
    namespace: str = ""
    all_namespaces: bool = False
    objects_read: dict[str, Object] = field(default_factory=dict, compare=False)
    """Objects that were read, by UID, each as it was last."""

    def get(self, kind: str, name: str) -> Object:
        """Raises Missing."""
        found: Object = parse_json(self.run("get", _qualify_kind(kind), name, *self.namespace_options, "-o", "json"))
        self._remember(found)
        return found

    def list(self, kind: str, labels: str = "", fields: str = "", *, keep: bool = True) -> list[Object]:
        """`keep`: they belong to what `-o json` prints."""
        place = ("--all-namespaces",) if self.all_namespaces else self.namespace_options
        chosen = [f"--selector={labels}"] * bool(labels) + [f"--field-selector={fields}"] * bool(fields)
        items: list[Object] = parse_json(self.run("get", _qualify_kind(kind), *place, *chosen, "-o", "json"))["items"]
        for item in items if keep else ():
            self._remember(item)
        return items

    def patch(self, kind: str, name: str, body: Object) -> None:
        self.run("patch", _qualify_kind(kind), name, *self.namespace_options, "--type=merge", "-p", json.dumps(body))

    def annotate(self, kind: str, name: str, key: str, value: str) -> None:
        self.run("annotate", _qualify_kind(kind), name, *self.namespace_options, "--overwrite", f"{key}={value}")

    def delete(self, kind: str, name: str, seconds: float) -> None:
        """Returns when it is gone. Raises KubectlError where that takes longer than `seconds`."""
        self.run("delete", _qualify_kind(kind), name, *self.namespace_options, f"--timeout={seconds:.0f}s", seconds=seconds + 10)

    def read_file(self, pod: str, container: str, path: str) -> bytes:
        """A file in a container."""
        return self._run_bytes(("exec", pod, *self.namespace_options, "-c", container, "--", "cat", path), KUBECTL_CALL_TIMEOUT_SECONDS)

    def run(self, *arguments: str, seconds: float = KUBECTL_CALL_TIMEOUT_SECONDS) -> str:
        """What it prints. Raises KubectlError."""
        return self._run_bytes(arguments, seconds).decode(errors="replace")

    @property
    def namespace_options(self) -> tuple[str, ...]:
        return (f"--namespace={self.namespace}",) if self.namespace else ()

    def _remember(self, body: Object) -> None:
        self.objects_read[str(body["metadata"].get("uid") or len(self.objects_read))] = body

    def _run_bytes(self, arguments: Sequence[str], seconds: float) -> bytes:
        command = ["kubectl", *self.options, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        except FileNotFoundError as error:
            raise KubectlError("kubectl is not on the PATH; install it: it is what talks to the cluster") from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"`kubectl {' '.join(arguments[:3])}` did not end within {seconds:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        words = "\n".join(line for line in lines if not KUBECTL_LOG_PATTERN.match(line)) or "\n".join(lines)
        if any(sign in words for sign in NOT_INSTALLED_MARKERS):
            words += "\nThis cluster does not know Pacekeeper's resources: install the chart (docs/install.md)"
        raise (KubectlNotFound if NOT_FOUND_MARKER in words else KubectlError)(words or f"kubectl ended with {done.returncode}")


def _qualify_kind(kind: str) -> str:
    """Ours by their full name: another product may have kinds of the same name."""
    ours = ("trainingjobs", "incidents", "nodequarantines", "nodehistories", "behaviourwindows")
    return f"{kind}.{GROUP}" if kind in ours else kind

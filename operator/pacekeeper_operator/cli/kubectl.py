"""Calls of kubectl, with the user's context, namespace, and permissions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json

from ..api.names import GROUP, Object

KUBECTL_CALL_TIMEOUT_SECONDS = 60.0
"""Time-out of one call."""
KUBECTL_LOG_PATTERN = re.compile(r"[EWI]\d{4} ")
"""The begin of a line of kubectl's own log."""
NOT_FOUND_MARKER = "(NotFound)"
PARSE_LOCALLY = ("patch", "--local", "--type=merge", "--patch={}")
"""A call that changes nothing: kubectl parses the objects of a file, and prints them."""
NO_OBJECTS_MARKER = "no objects passed"
NOT_INSTALLED_MARKERS = ("the server doesn't have a resource type", "could not find the requested resource")


class KubectlError(InputError):
    """kubectl reports an error. The message is kubectl's."""


class KubectlNotFound(KubectlError):
    """The object does not exist."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with fixed options.

    `options` are given in every call, like `--context=…`. `namespace` "" is that of the context.
    """

    options: tuple[str, ...] = ()
    namespace: str = ""
    all_namespaces: bool = False
    objects_read: dict[str, Object] = field(default_factory=dict, compare=False)
    """Objects that were read, by UID, each in its latest version."""

    def get(self, kind: str, name: str) -> Object:
        """Read an object.

        Raises KubectlNotFound.
        """
        body: Object = parse_json(self.run("get", _qualify_kind(kind), name, *self.namespace_options, "-o", "json"))
        self._remember(body)
        return body

    def list(self, kind: str, labels: str = "", fields: str = "", *, keep: bool = True) -> list[Object]:
        """List objects. `keep`: they are part of what `-o json` prints."""
        scope = ("--all-namespaces",) if self.all_namespaces else self.namespace_options
        filters = [f"--selector={labels}"] * bool(labels) + [f"--field-selector={fields}"] * bool(fields)
        items: list[Object] = parse_json(self.run("get", _qualify_kind(kind), *scope, *filters, "-o", "json"))["items"]
        for item in items if keep else ():
            self._remember(item)
        return items

    def patch(self, kind: str, name: str, body: Object) -> None:
        self.run("patch", _qualify_kind(kind), name, *self.namespace_options, "--type=merge", "-p", json.dumps(body))

    def annotate(self, kind: str, name: str, key: str, value: str) -> None:
        self.run("annotate", _qualify_kind(kind), name, *self.namespace_options, "--overwrite", f"{key}={value}")

    def delete(self, kind: str, name: str, seconds: float) -> None:
        """Delete an object, and wait until it is gone.

        Raises KubectlError if that takes longer than `seconds`.
        """
        self.run(
            "delete",
            _qualify_kind(kind),
            name,
            *self.namespace_options,
            f"--timeout={seconds:.0f}s",
            seconds=seconds + 10,
        )

    def read_file(self, pod: str, container: str, path: str) -> bytes:
        """Read a file in a container."""
        return self._run_bytes(
            ("exec", pod, *self.namespace_options, "-c", container, "--", "cat", path), KUBECTL_CALL_TIMEOUT_SECONDS
        )

    def read_manifests(self, file: str) -> Sequence[Object]:
        """Read the objects of a file; `-` is standard input. kubectl parses it, without a cluster.

        Raises InputError.
        """
        content = sys.stdin.buffer.read() if file == "-" else None
        try:
            output = self._parse_locally("json", file, content)
        except KubectlError as error:
            missing = NO_OBJECTS_MARKER in str(error)
            reason = "has no objects; give a manifest" if missing else str(error).removeprefix("error: ")
            raise InputError(f"{file}: {reason}") from error
        bodies = []
        decoder, text = json.JSONDecoder(), output.strip()
        while text:  # one document after another
            try:
                body, end = decoder.raw_decode(text)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{file}: is nested too deeply, or is no JSON from kubectl ({error})") from error
            bodies.append(body)
            text = text[end:].lstrip()
        return bodies

    def format_yaml(self, body: Object) -> str:
        """Return an object as kubectl prints it. No cluster is needed."""
        return self._parse_locally("yaml", "-", json.dumps(body).encode())

    def run(self, *arguments: str, seconds: float = KUBECTL_CALL_TIMEOUT_SECONDS) -> str:
        """Run kubectl, and return what it prints.

        Raises KubectlError.
        """
        return self._run_bytes(arguments, seconds).decode(errors="replace")

    @property
    def namespace_options(self) -> tuple[str, ...]:
        return (f"--namespace={self.namespace}",) if self.namespace else ()

    def _remember(self, body: Object) -> None:
        self.objects_read[str(body["metadata"].get("uid") or len(self.objects_read))] = body

    def _parse_locally(self, output: str, file: str, content: bytes | None) -> str:
        arguments = (*PARSE_LOCALLY, "-o", output, "-f", file)
        return self._run_bytes(arguments, KUBECTL_CALL_TIMEOUT_SECONDS, content).decode(errors="replace")

    def _run_bytes(self, arguments: Sequence[str], seconds: float, content: bytes | None = None) -> bytes:
        """Run kubectl. `content` is its standard input; None: that of this process."""
        command = ["kubectl", *self.options, *arguments]
        try:
            completed = subprocess.run(command, input=content, capture_output=True, timeout=seconds, check=False)
        except FileNotFoundError as error:
            raise KubectlError(
                "kubectl is not on the PATH; install it: this command calls it to reach the cluster"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"`kubectl {' '.join(arguments[:3])}` did not end within {seconds:.0f} s") from error
        if completed.returncode == 0:
            return completed.stdout
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        message = "\n".join(line for line in lines if not KUBECTL_LOG_PATTERN.match(line)) or "\n".join(lines)
        if f".{GROUP}" in " ".join(arguments) and any(marker in message for marker in NOT_INSTALLED_MARKERS):
            message += "\nThis cluster does not have Pacekeeper's resources: install the chart (docs/install.md)"
        raise (KubectlNotFound if NOT_FOUND_MARKER in message else KubectlError)(
            message or f"kubectl ended with {completed.returncode}"
        )


def _qualify_kind(kind: str) -> str:
    """Return our kinds by their full name, as another product may have kinds of the same name."""
    ours = ("trainingjobs", "incidents", "nodequarantines", "nodehistories", "profilewindows")
    return f"{kind}.{GROUP}" if kind in ours else kind

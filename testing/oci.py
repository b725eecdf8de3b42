"""OCI archives as tests read them, and a registry that serves one, for clients that only pull."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Archive:
    """An OCI layout in a tar. Each blob that is read has the digest and the size of its descriptor."""

    def __init__(self, content: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            self.files = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
        self.index: dict[str, Any] = json.loads(self.files["index.json"])

    @property
    def blobs(self) -> list[str]:
        return [name for name in self.files if name.startswith("blobs/")]

    def read(self, descriptor: dict[str, Any]) -> bytes:
        content = self.files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
        assert len(content) == descriptor["size"]
        return content

    def read_json(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.read(descriptor))
        return content


@contextmanager
def serve_archive(archive: Archive) -> Iterator[str]:
    """Serve an archive with one name, below any repository and on loopback. Yield host and port."""
    (named,) = archive.index["manifests"]
    tag = named["annotations"]["org.opencontainers.image.ref.name"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            digest = named["digest"] if name == tag else name
            content = archive.files.get(f"blobs/{digest.replace(':', '/')}")
            self.send_response(404 if content is None else 200)
            if content is not None:
                is_manifest = "/manifests/" in self.path
                self.send_header("Content-Type", named["mediaType"] if is_manifest else "application/octet-stream")
                self.send_header("Docker-Content-Digest", digest)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

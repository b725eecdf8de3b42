"""A stand-in for S3: the part of its protocol that s3fs uses for objects, over HTTP on loopback, in memory.

It is no test of S3 itself. Requests must be signed, but the signature is not checked. Listings have pages of two
entries. A request can be made to fail (`S3StandIn.fail`), and new objects can be hidden from listings.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE_ENTRIES = 2
_CUT_OFF = "the connection is closed in the middle of the request"


@dataclass
class S3StandIn:
    """The state of the server. Tests read and change it under `lock`, or while no request runs."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)  # by bucket/key
    buckets: set[str] = field(default_factory=lambda: {"bucket"})
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # method, path, and query
    hidden: set[str] = field(default_factory=set)  # objects that listings lack
    listings_lag: bool = False  # new objects are hidden
    honors_conditions: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)
    _faults: list[list[object]] = field(default_factory=list)
    _upload_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fail(self, matches: Callable[[str], bool], code: str = "InternalError", times: int = 1 << 30) -> None:
        """Let the next `times` matching requests (method, path, query) fail with this code; "": cut the connection."""
        self._faults.append([matches, code or _CUT_OFF, times])

    def clear_faults(self) -> None:
        self._faults.clear()

    def build_variables(self) -> dict[str, str]:
        """Return the environment of a client: what a template would take from a Secret."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "stand-in",
            "AWS_SECRET_ACCESS_KEY": "stand-in",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",  # botocore's own retries take seconds
            "NO_PROXY": "127.0.0.1",
        }

    def find_fault(self, request: str) -> str:
        for fault in self._faults:
            matches, code, times = fault
            if times and matches(request):  # type: ignore[operator]
                fault[2] = times - 1  # type: ignore[operator]
                return str(code)
        return ""

    def store(self, path: str, content: bytes) -> None:
        if self.listings_lag and path not in self.objects:
            self.hidden.add(path)
        self.objects[path] = content

    def begin_upload(self) -> str:
        upload = f"upload-{next(self._upload_ids)}"
        self.uploads[upload] = {}
        return upload

    def list_page(self, bucket: str, prefix: str, delimiter: str, after: str) -> tuple[list[tuple[str, int]], str]:
        """Return keys (or common prefixes, with size -1) and the token of the next page."""
        entries: dict[str, int] = {}
        for path, content in sorted(self.objects.items()):
            name, _, key = path.partition("/")
            if name != bucket or not key.startswith(prefix) or path in self.hidden:
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                entries[prefix + rest.partition(delimiter)[0] + delimiter] = -1
            else:
                entries[key] = len(content)
        page = [(name, size) for name, size in entries.items() if name > after][: PAGE_ENTRIES + 1]
        return page[:PAGE_ENTRIES], page[PAGE_ENTRIES - 1][0] if len(page) > PAGE_ENTRIES else ""


_STATUS = {"AccessDenied": 403, "NoSuchBucket": 404, "NoSuchKey": 404, "PreconditionFailed": 412, "InvalidRange": 416}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # else headers and body are two packets, and the second one waits
    disable_nagle_algorithm = True
    state: S3StandIn

    def log_message(self, *_: object) -> None: ...

    def handle_expect_100(self) -> bool:
        accepted = super().handle_expect_100()
        self.wfile.flush()
        return accepted

    def do_PUT(self) -> None:
        self._serve(self._put)

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_HEAD(self) -> None:
        self._serve(self._get)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def do_POST(self) -> None:
        self._serve(self._post)

    def _serve(self, method: Callable[[], None]) -> None:
        url = urlsplit(self.path)
        self.object_path = unquote(url.path).strip("/")
        self.query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        request = f"{self.command} {self.object_path}?{url.query}"
        with self.state.lock:
            self.state.requests.append(request)
            fault = self.state.find_fault(request)
            if fault == _CUT_OFF:
                self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
                self.close_connection = True
                return
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self._decode(self.rfile.read(length))
            if fault:
                self._refuse(fault)
            elif "Authorization" not in self.headers:
                self._refuse("AccessDenied")
            elif self.object_path.partition("/")[0] not in self.state.buckets:
                self._refuse("NoSuchBucket")
            else:
                method()

    def _decode(self, body: bytes) -> bytes:
        """Return the content of a body in chunks, each of which begins with its size."""
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return body
        content = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            nbytes = int(size.partition(b";")[0], 16)
            if nbytes == 0:
                break
            content, body = content + body[:nbytes], body[nbytes + 2 :]
        return content

    def _put(self) -> None:
        if upload := self.query.get("uploadId"):
            self.state.uploads[upload][int(self.query["partNumber"])] = self.body
        elif (
            self.headers.get("If-None-Match") == "*"
            and self.state.honors_conditions
            and self.object_path in self.state.objects
        ):
            self._refuse("PreconditionFailed", "<Condition>If-None-Match</Condition>")
            return
        else:
            self.state.store(self.object_path, self.body)
        self._answer(200, b"", ETag='"stand-in"')

    def _post(self) -> None:
        if "uploads" in self.query:
            upload = self.state.begin_upload()
            text = f"<UploadId>{upload}</UploadId>"
            self._answer_xml("InitiateMultipartUploadResult", text)
            return
        parts = self.state.uploads.pop(self.query["uploadId"])
        self.state.store(self.object_path, b"".join(content for _, content in sorted(parts.items())))
        self._answer_xml("CompleteMultipartUploadResult", '<ETag>"stand-in"</ETag>')

    def _delete(self) -> None:
        if upload := self.query.get("uploadId"):
            self.state.uploads.pop(upload, None)
        else:
            self.state.objects.pop(self.object_path, None)
        self._answer(204, b"")

    def _get(self) -> None:
        bucket, _, key = self.object_path.partition("/")
        if not key and "list-type" in self.query:
            self._list(bucket)
            return
        content = self.state.objects.get(self.object_path) if key else b""
        if content is None:
            self._refuse("NoSuchKey")
            return
        requested = self.headers.get("Range")
        if requested is None:
            self._answer(200, content, ETag='"stand-in"')
            return
        first, _, last = requested.removeprefix("bytes=").partition("-")
        if int(first) >= len(content):
            self._refuse("InvalidRange")
            return
        part = content[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(part) - 1
        self._answer(206, part, **{"Content-Range": f"bytes {first}-{end}/{len(content)}", "ETag": '"stand-in"'})

    def _list(self, bucket: str) -> None:
        entries, token = self.state.list_page(
            bucket,
            self.query.get("prefix", ""),
            self.query.get("delimiter", ""),
            self.query.get("continuation-token", ""),
        )
        parts = [f"<Name>{bucket}</Name><IsTruncated>{'true' if token else 'false'}</IsTruncated>"]
        if token:
            parts.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
        for name, size in entries:
            if size < 0:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                stamp = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                parts.append(f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>{stamp}</Contents>")
        self._answer_xml("ListBucketResult", "".join(parts))

    def _refuse(self, code: str, more: str = "") -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} of the stand-in</Message>{more}</Error>"
        self._answer(_STATUS.get(code, 500), text.encode(), **{"Content-Type": "application/xml"})

    def _answer_xml(self, name: str, text: str) -> None:
        body = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</{name}>'
        self._answer(200, body.encode(), **{"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_s3() -> Iterator[S3StandIn]:
    """Serve an empty bucket called `bucket`."""
    state = S3StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

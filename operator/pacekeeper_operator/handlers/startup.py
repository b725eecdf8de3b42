"""kopf's settings and its login."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, cast

import aiohttp
import kopf
import orjson

from ..api.names import FINALIZER_JOB
from ..kube.client import LIST_PAGE_OBJECTS, parse_response
from ..kube.response_limits import BoundedResponse, build_session_options, read_lines
from ..pods.trimming import trim_job

_JOB_KIND = "TrainingJob"


class _NullDiffBaseStorage(kopf.DiffBaseStorage):
    """A storage that disables kopf's change detection.

    kopf would copy each watched object three times to detect changes for change handlers. The operator has none, and
    the copies took 2 ms of 3 ms per event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return cast(kopf.BodyEssence, {})

    def store(self, **_: Any) -> None:
        return None


@kopf.on.startup()
async def configure_kopf(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.peering.standalone = True  # leadership is decided by the operator's own Lease
    settings.persistence.finalizer = FINALIZER_JOB
    settings.persistence.diffbase_storage = _NullDiffBaseStorage()
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 3] + [
        5
    ] * 200  # an API server may be away for a quarter of an hour
    settings.queueing.error_delays = [1, 1, 2, 3, 5, 8]
    settings.posting.enabled = False  # `services.events` emits Events
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = LIST_PAGE_OBJECTS  # at most: the session's middleware bounds the bytes
    settings.watching.server_timeout = 300
    settings.background.cancellation_polling = 1
    settings.background.instant_exit_timeout = 2  # a loop ends after its current API call
    settings.process.ultimate_exiting_timeout = 8


class _TrimmedLines:
    """The content of a watch, without fields that the operator does not read."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _size: int) -> AsyncGenerator[bytes]:
        async for line in read_lines(self._content):
            event = parse_response(line)
            _trim_job(event.get("object"))
            yield orjson.dumps(event) + b"\n"


class TrimmedResponse(BoundedResponse):
    """A response that trims jobs before kopf, which keeps each object as received."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.status < HTTPStatus.MULTIPLE_CHOICES and "watch" in self.url.query:
            self.content = cast(aiohttp.StreamReader, _TrimmedLines(self.content))
        return self

    async def json(self, **options: Any) -> Any:
        """Return the trimmed body. Raises what aiohttp does."""
        if self.status >= HTTPStatus.MULTIPLE_CHOICES:
            return await super().json(**options)
        body = parse_response(await self.read())
        if body.get("kind") == f"{_JOB_KIND}List":
            for item in body.get("items") or ():
                trim_job(item)
        _trim_job(body)
        return body


def _trim_job(body: Any) -> None:
    if isinstance(body, dict) and body.get("kind") == _JOB_KIND:
        trim_job(body)


@dataclass(frozen=True, kw_only=True)
class _KopfSession(kopf.AiohttpSession):
    """A session that equals others with the same credentials: kopf does not retry credentials that were rejected."""

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo


@kopf.on.login()
async def log_in(settings: kopf.OperatorSettings, **_: Any) -> kopf.AiohttpSession | None:
    """Log in by the pod's service account or, outside of a cluster, by the kubeconfig.

    The operator creates the session itself, so that responses are bounded and trimmed.
    """
    connection = kopf.login_with_service_account(settings=settings)
    if connection is not None:
        # kopf uses the API server's DNS name. The address in each pod's environment needs no DNS.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        connection = replace(connection, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
    else:
        connection = kopf.login_with_kubeconfig(settings=settings)
    if connection is None:
        return None
    return _KopfSession(
        server=connection.server,
        priority=connection.priority,
        default_namespace=connection.default_namespace,
        expiration=connection.expiration,
        credentials=connection,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
            headers=connection.as_http_headers(),
            proxy=connection.proxy_url,
            trust_env=connection.trust_env,
            **build_session_options() | {"response_class": TrimmedResponse},
        ),
    )

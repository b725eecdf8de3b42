"""How kopf runs: its settings, its login."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import aiohttp
import kopf
import orjson

from ..api import FINALIZER_JOB
from ..cluster import LIST_PAGE_OBJECTS, parse_response
from ..transfer import BoundedResponse, read_lines, build_session_options
from ..trimming import trim_job

_JOB_KIND = "TrainingJob"


class _NullDiffBaseStorage(kopf.DiffBaseStorage):
    """kopf would copy every object that a watch tells of three times over, to find what has changed for handlers of
    changes. There are none: that took 2 ms an event, of 3 in all."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return cast(kopf.BodyEssence, {})

    def store(self, **_: Any) -> None:
        return None


@kopf.on.startup()
async def configure_kopf(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.peering.standalone = True  # leadership is by our own Lease
    settings.persistence.finalizer = FINALIZER_JOB
    settings.persistence.diffbase_storage = _NullDiffBaseStorage()
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 3] + [
        5
    ] * 200  # an API server may be away for a quarter of an hour
    settings.queueing.error_delays = [1, 1, 2, 3, 5, 8]
    settings.posting.enabled = False  # we tell Events ourselves
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = LIST_PAGE_OBJECTS  # at most: the session's middleware bounds the bytes
    settings.watching.server_timeout = 300
    settings.background.cancellation_polling = 1
    settings.background.instant_exit_timeout = 2  # a loop ends after the call to the API server that it is in
    settings.process.ultimate_exiting_timeout = 8


class _TrimmedLines:
    """The content of a watch, without what nobody reads of its objects."""

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
    """To kopf, which keeps each object as it came."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.status < 300 and "watch" in self.url.query:
            self.content = cast(aiohttp.StreamReader, _TrimmedLines(self.content))
        return self

    async def json(self, **options: Any) -> Any:
        """Raises what aiohttp does."""
        if self.status >= 300:
            return await super().json(**options)
        found = parse_response(await self.read())
        if found.get("kind") == f"{_JOB_KIND}List":
            for item in found.get("items") or ():
                trim_job(item)
        _trim_job(found)
        return found


def _trim_job(found: Any) -> None:
    if isinstance(found, dict) and found.get("kind") == _JOB_KIND:
        trim_job(found)


@dataclass(frozen=True, kw_only=True)
class _KopfSession(kopf.AiohttpSession):
    """As good as another one with the same credentials: kopf does not try again those that were refused."""

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo


@kopf.on.login()
async def log_in(settings: kopf.OperatorSettings, **_: Any) -> kopf.AiohttpSession | None:
    """By the pod's service account or, outside of a cluster, the kubeconfig. The session is ours, so that its answers
    are bounded and trimmed."""
    found = kopf.login_with_service_account(settings=settings)
    if found is not None:
        # kopf calls the API server by its name; the address that every pod is given needs no DNS.
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        found = replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
    else:
        found = kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        return None
    return _KopfSession(
        server=found.server,
        priority=found.priority,
        default_namespace=found.default_namespace,
        expiration=found.expiration,
        credentials=found,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
            headers=found.as_http_headers(),
            proxy=found.proxy_url,
            trust_env=found.trust_env,
            **build_session_options() | {"response_class": TrimmedResponse},
        ),
    )

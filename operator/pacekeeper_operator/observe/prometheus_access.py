"""How the operator reaches Prometheus: over HTTP, with the credentials and headers that the platform asks for.

Credentials are files of a mounted Secret, looked at before each question: a token or an authority that was renewed
counts from the next one on. They go to the host of the URL and to nobody else: no redirect is followed.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests import PreparedRequest, Response, Session
from requests.auth import AuthBase, HTTPBasicAuth
from requests.exceptions import ReadTimeout, RequestException, SSLError
from urllib3.util.retry import Retry

from ..prometheus_options import Headers

MIN_QUERY_SECONDS, MAX_QUERY_SECONDS = 3.0, 12.0
"""So long an answer may take: whoever asks begins with the first, and goes up to the last."""
TOKEN, USERNAME, PASSWORD = "token", "username", "password"
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
SECRET_KEYS = (TOKEN, USERNAME, PASSWORD, AUTHORITY, CERTIFICATE, KEY)
SECRET_DESCRIPTION = "the Secret that prometheus.secretName names"
MAX_ERROR_CHARACTERS = 300
"""Characters of an answer that is an error."""
MIN_REDACTED_CHARACTERS = 4
"""Characters: what is shorter would be found everywhere."""
_TOKEN_PATTERN = re.compile(r"[!-~]+")

QueryRows = Sequence[Mapping[str, Any]]
"""Of an answer's `result`: each the labels of a series and its value."""
QueryFunction = Callable[[str, float], Awaitable[QueryRows]]
"""With the seconds that it may take. Raises PrometheusAccessDenied, Slow, QueryTooLarge, or requests' RequestException,
PrometheusApiClientException."""
_TOO_LARGE_STATUSES = frozenset({413, 414, 431})
"""Statuses of a question beyond a limit."""
_LIMIT_PATTERN = re.compile(r"too many|limit|exceed")
"""In the words with which an answer is refused (422) that would be beyond one."""


class PrometheusAccessDenied(RequestException):
    """Prometheus does not answer *us*; the words say what a person can do, and show no credential."""


class QueryTimedOut(RequestException):
    """Prometheus is there, and has not answered in time."""


class QueryTooLarge(RequestException):
    """Prometheus is there, and what it was asked is beyond a limit of its own, or of a proxy's before it."""


def create_http_query(url: str, credentials: Path | None = None, headers: Headers = ()) -> QueryFunction:
    """`credentials`: the folder of a mounted Secret; None: there are none."""
    access = _HttpClient(url, credentials, headers)

    async def ask(query: str, seconds: float) -> QueryRows:
        return await asyncio.to_thread(access.query, query, seconds)

    return ask


class _HttpClient:
    """A client for the credentials as they are now."""

    def __init__(self, url: str, folder: Path | None, headers: Headers) -> None:
        self._url, self._folder, self._headers = url, folder, headers
        self._cached: tuple[Mapping[str, bytes], PrometheusConnect] | None = None

    def query(self, query: str, seconds: float) -> QueryRows:
        client, limit = self._get_client(), {"timeout": f"{seconds:g}s"}  # it stops working on what nobody waits for
        times: Any = MIN_QUERY_SECONDS, seconds  # to connect, and to answer
        try:
            return _check_rows(client.custom_query(query, limit, timeout=times))
        except ReadTimeout as error:
            raise QueryTimedOut(f"does not answer within {seconds:g} s") from error
        except SSLError as error:
            raise PrometheusAccessDenied(f"{_describe_tls_error(error)}: look at {AUTHORITY}, {CERTIFICATE} and {KEY} in {SECRET_DESCRIPTION}") from error
        except PrometheusApiClientException as error:
            raise PrometheusApiClientException(self._redact(str(error))) from None
        except QueryTooLarge as error:
            raise QueryTooLarge(self._redact(str(error))) from None
        except RequestException:
            raise
        except (KeyError, TypeError, RecursionError) as error:
            raise PrometheusApiClientException(f"its answer is none of Prometheus': {type(error).__name__}") from error
        except OSError as error:  # the files have gone since they were looked at
            raise PrometheusAccessDenied(f"is not asked: {SECRET_DESCRIPTION} cannot be read") from error

    def _get_client(self) -> PrometheusConnect:
        """Two threads may make one each when credentials change, and the later one stays. The client before it may be
        in use: it ends by itself."""
        found = _read_credentials(self._folder) if self._folder else {}
        made = self._cached
        if made is None or made[0] != found:
            made = self._cached = (found, self._connect(found))
        return made[1]

    def _connect(self, found: Mapping[str, bytes]) -> PrometheusConnect:
        session = Session()
        session.hooks["response"].append(_check_response)
        session.headers.update(self._headers)
        session.auth = _create_auth(found)
        if self._folder and AUTHORITY in found:
            session.verify = str(self._folder / AUTHORITY)
        if self._folder and CERTIFICATE in found:
            session.cert = str(self._folder / CERTIFICATE), str(self._folder / KEY)
        return PrometheusConnect(self._url, session=session, retry=Retry(total=0, read=False))

    def _redact(self, words: str) -> str:
        """An answer may repeat what it was asked with."""
        for secret in (*_list_secrets(self._cached[0] if self._cached else {}), *(value for _, value in self._headers)):
            words = words.replace(secret, "…") if len(secret) >= MIN_REDACTED_CHARACTERS else words
        return words


class _BearerAuth(AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _check_rows(found: Any) -> QueryRows:
    """Raises TypeError where the answer has none."""
    if not isinstance(found, list):
        raise TypeError("the result is no list")
    return found


def _read_credentials(folder: Path) -> Mapping[str, bytes]:
    """What the Secret holds of what is known. Raises PrometheusAccessDenied where that can be no credentials."""
    try:
        found = {key: (folder / key).read_bytes() for key in SECRET_KEYS if (folder / key).exists()}
    except OSError as error:
        raise PrometheusAccessDenied(f"is not asked: {SECRET_DESCRIPTION} cannot be read ({error.strerror})") from error
    if not found:
        raise PrometheusAccessDenied(f"is not asked: {SECRET_DESCRIPTION} does not exist, or has none of {', '.join(SECRET_KEYS)}")
    for one, other in ((USERNAME, PASSWORD), (PASSWORD, USERNAME), (CERTIFICATE, KEY), (KEY, CERTIFICATE)):
        if one in found and other not in found:
            raise PrometheusAccessDenied(f"is not asked: {SECRET_DESCRIPTION} has {one} without {other}")
    if TOKEN in found and USERNAME in found:
        raise PrometheusAccessDenied(f"is not asked: {SECRET_DESCRIPTION} has both {TOKEN} and {USERNAME}: leave one of them")
    return found


def _list_secrets(found: Mapping[str, bytes]) -> tuple[str, ...]:
    """As they stand in a request, and so in the client's words about its answer."""
    token, username, password = (found.get(key, b"").strip() for key in (TOKEN, USERNAME, PASSWORD))
    basic = base64.b64encode(username + b":" + password)
    return tuple(repr(secret)[2:-1] for secret in (token, basic, password))


def _create_auth(found: Mapping[str, bytes]) -> AuthBase | None:
    if TOKEN in found:
        token = found[TOKEN].decode("latin-1").strip()
        if not _TOKEN_PATTERN.fullmatch(token):
            raise PrometheusAccessDenied(f"is not asked: {TOKEN} in {SECRET_DESCRIPTION} is empty, or has characters that no token has")
        return _BearerAuth(token)
    if USERNAME in found:
        return HTTPBasicAuth(found[USERNAME].strip(), found[PASSWORD].strip())
    return None


def _check_response(response: Response, **_: object) -> None:
    """Raises PrometheusAccessDenied where the answer is about us, not about the query."""
    if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        response.close()
        raise PrometheusAccessDenied(
            f"refuses the operator (HTTP {response.status_code}): look at {TOKEN}, or {USERNAME} and {PASSWORD}, in "
            f"{SECRET_DESCRIPTION}, at what they may read, and at prometheus.headers"
        )
    if response.status_code in _TOO_LARGE_STATUSES or (response.status_code == 422 and _LIMIT_PATTERN.search(response.text)):
        raise QueryTooLarge(f"is asked for too much (HTTP {response.status_code}: {response.text[:MAX_ERROR_CHARACTERS]})")
    if response.status_code == HTTPStatus.GATEWAY_TIMEOUT or _has_timed_out(response):
        raise QueryTimedOut(f"has not found the answer in time (HTTP {response.status_code})")
    if response.is_redirect:
        response.close()
        place = urlsplit(response.headers["location"]).hostname or "another path"
        raise PrometheusAccessDenied(f"sends the operator on to {place}, where it does not go: set prometheus.url to what answers")


def _has_timed_out(response: Response) -> bool:
    """Prometheus' own word that its time for a query is over, in place of a proxy's that nobody is there."""
    return response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and '"errorType":"timeout"' in response.text


def _describe_tls_error(error: SSLError) -> str:
    """In the words of OpenSSL, without the query that they stand behind."""
    found = re.search(r"\[SSL(?::[^]]*)?\] ([^(']+)", str(error))
    return f"no TLS connection comes about ({found[1].strip() if found else type(error).__name__})"

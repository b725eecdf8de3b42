"""The connection to Prometheus: over HTTP, with the credentials and headers that the platform requires.

Credentials are files of a mounted Secret, read before each query, so that a renewed token or CA certificate counts from
the next query on. They are sent to the host of the URL only: redirects are not followed.
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
"""The lowest and the highest time-out of a query. Callers begin with the lowest."""
TOKEN, USERNAME, PASSWORD = "token", "username", "password"
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
SECRET_KEYS = (TOKEN, USERNAME, PASSWORD, AUTHORITY, CERTIFICATE, KEY)
SECRET_DESCRIPTION = "the Secret that prometheus.secretName names"
MAX_ERROR_CHARACTERS = 300
"""Characters of an error answer that are shown."""
MIN_REDACTED_CHARACTERS = 4
"""Characters. Shorter secrets are not redacted, as they would match everywhere."""
_TOKEN_PATTERN = re.compile(r"[!-~]+")

QueryRows = Sequence[Mapping[str, Any]]
"""The `result` of an answer: each row has the labels of a series and its value."""
QueryFunction = Callable[[str, float], Awaitable[QueryRows]]
"""Runs a query with a time-out in seconds.

Raises PrometheusAccessDenied, QueryTimedOut, QueryTooLarge, or requests' RequestException and
PrometheusApiClientException.
"""
_TOO_LARGE_STATUSES = frozenset({413, 414, 431})
"""Statuses of a query beyond a limit."""
_LIMIT_PATTERN = re.compile(r"too many|limit|exceed")
"""Words of an answer (status 422) to a query beyond a limit."""


class PrometheusAccessDenied(RequestException):
    """Prometheus denies the operator access. The message gives the remedy, and shows no credential."""


class QueryTimedOut(RequestException):
    """Prometheus is reachable, but did not answer in time."""


class QueryTooLarge(RequestException):
    """Prometheus is reachable, but the query exceeds a limit of Prometheus or of a proxy in front of it."""


def create_http_query(url: str, credentials: Path | None = None, headers: Headers = ()) -> QueryFunction:
    """Return a function that runs a query over HTTP. `credentials` is the folder of a mounted Secret; None: none."""
    client = _HttpClient(url, credentials, headers)

    async def ask(query: str, seconds: float) -> QueryRows:
        return await asyncio.to_thread(client.query, query, seconds)

    return ask


class _HttpClient:
    """A client with the present credentials."""

    def __init__(self, url: str, folder: Path | None, headers: Headers) -> None:
        self._url, self._folder, self._headers = url, folder, headers
        self._cached: tuple[Mapping[str, bytes], PrometheusConnect] | None = None

    def query(self, query: str, seconds: float) -> QueryRows:
        client, params = self._get_client(), {"timeout": f"{seconds:g}s"}  # Prometheus stops when the client gave up
        timeouts: Any = MIN_QUERY_SECONDS, seconds  # to connect, and to answer
        try:
            return _check_rows(client.custom_query(query, params, timeout=timeouts))
        except ReadTimeout as error:
            raise QueryTimedOut(f"does not answer within {seconds:g} s") from error
        except SSLError as error:
            raise PrometheusAccessDenied(
                f"{_describe_tls_error(error)}: check {AUTHORITY}, {CERTIFICATE} and {KEY} in {SECRET_DESCRIPTION}"
            ) from error
        except PrometheusApiClientException as error:
            raise PrometheusApiClientException(self._redact(str(error))) from None
        except QueryTooLarge as error:
            raise QueryTooLarge(self._redact(str(error))) from None
        except RequestException:
            raise
        except (KeyError, TypeError, RecursionError) as error:
            raise PrometheusApiClientException(f"not an answer of Prometheus: {type(error).__name__}") from error
        except OSError as error:  # the files disappeared after they were checked
            raise PrometheusAccessDenied(f"is not queried: {SECRET_DESCRIPTION} cannot be read") from error

    def _get_client(self) -> PrometheusConnect:
        """Return a client for the present credentials.

        Two threads may each create one when credentials change; the later one stays. The earlier client may be in use,
        and is not closed here.
        """
        credentials = _read_credentials(self._folder) if self._folder else {}
        cached = self._cached
        if cached is None or cached[0] != credentials:
            cached = self._cached = (credentials, self._connect(credentials))
        return cached[1]

    def _connect(self, credentials: Mapping[str, bytes]) -> PrometheusConnect:
        session = Session()
        session.hooks["response"].append(_check_response)
        session.headers.update(self._headers)
        session.auth = _create_auth(credentials)
        if self._folder and AUTHORITY in credentials:
            session.verify = str(self._folder / AUTHORITY)
        if self._folder and CERTIFICATE in credentials:
            session.cert = str(self._folder / CERTIFICATE), str(self._folder / KEY)
        return PrometheusConnect(self._url, session=session, retry=Retry(total=0, read=False))

    def _redact(self, text: str) -> str:
        """Remove secrets, as an answer may repeat parts of the request."""
        for secret in (*_list_secrets(self._cached[0] if self._cached else {}), *(value for _, value in self._headers)):
            text = text.replace(secret, "…") if len(secret) >= MIN_REDACTED_CHARACTERS else text
        return text


class _BearerAuth(AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _check_rows(rows: Any) -> QueryRows:
    """Return the rows.

    Raises TypeError if the answer has none.
    """
    if not isinstance(rows, list):
        raise TypeError("the result is not a list")
    return rows


def _read_credentials(folder: Path) -> Mapping[str, bytes]:
    """Read the known keys of the Secret.

    Raises PrometheusAccessDenied if they cannot be credentials.
    """
    try:
        credentials = {key: (folder / key).read_bytes() for key in SECRET_KEYS if (folder / key).exists()}
    except OSError as error:
        raise PrometheusAccessDenied(
            f"is not queried: {SECRET_DESCRIPTION} cannot be read ({error.strerror})"
        ) from error
    if not credentials:
        raise PrometheusAccessDenied(
            f"is not queried: {SECRET_DESCRIPTION} does not exist, or has none of {', '.join(SECRET_KEYS)}"
        )
    for present, required in ((USERNAME, PASSWORD), (PASSWORD, USERNAME), (CERTIFICATE, KEY), (KEY, CERTIFICATE)):
        if present in credentials and required not in credentials:
            raise PrometheusAccessDenied(f"is not queried: {SECRET_DESCRIPTION} has {present} without {required}")
    if TOKEN in credentials and USERNAME in credentials:
        raise PrometheusAccessDenied(
            f"is not queried: {SECRET_DESCRIPTION} has both {TOKEN} and {USERNAME}: leave one of them"
        )
    return credentials


def _list_secrets(credentials: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the secrets as they appear in a request, and so in error messages of the client."""
    token, username, password = (credentials.get(key, b"").strip() for key in (TOKEN, USERNAME, PASSWORD))
    basic = base64.b64encode(username + b":" + password)
    return tuple(repr(secret)[2:-1] for secret in (token, basic, password))


def _create_auth(credentials: Mapping[str, bytes]) -> AuthBase | None:
    if TOKEN in credentials:
        token = credentials[TOKEN].decode("latin-1").strip()
        if not _TOKEN_PATTERN.fullmatch(token):
            raise PrometheusAccessDenied(
                f"is not queried: {TOKEN} in {SECRET_DESCRIPTION} is empty, or has characters that no token has"
            )
        return _BearerAuth(token)
    if USERNAME in credentials:
        return HTTPBasicAuth(credentials[USERNAME].strip(), credentials[PASSWORD].strip())
    return None


def _check_response(response: Response, **_: object) -> None:
    """Check the status of an answer.

    Raises PrometheusAccessDenied, QueryTooLarge, or QueryTimedOut.
    """
    if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        response.close()
        raise PrometheusAccessDenied(
            f"refuses the operator (HTTP {response.status_code}): check {TOKEN}, or {USERNAME} and {PASSWORD}, in "
            f"{SECRET_DESCRIPTION}, their permissions, and prometheus.headers"
        )
    if response.status_code in _TOO_LARGE_STATUSES or (
        response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY and _LIMIT_PATTERN.search(response.text)
    ):
        raise QueryTooLarge(
            f"rejects the query as too large (HTTP {response.status_code}: {response.text[:MAX_ERROR_CHARACTERS]})"
        )
    if response.status_code == HTTPStatus.GATEWAY_TIMEOUT or _has_timed_out(response):
        raise QueryTimedOut(f"did not answer the query in time (HTTP {response.status_code})")
    if response.is_redirect:
        response.close()
        target = urlsplit(response.headers["location"]).hostname or "another path"
        raise PrometheusAccessDenied(
            f"redirects the operator to {target}; redirects are not followed: set prometheus.url to the final address"
        )


def _has_timed_out(response: Response) -> bool:
    """Return whether Prometheus reports its query time-out, unlike a proxy that finds no server."""
    return response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and '"errorType":"timeout"' in response.text


def _describe_tls_error(error: SSLError) -> str:
    """Return the message of OpenSSL, without the query in front of it."""
    match = re.search(r"\[SSL(?::[^]]*)?\] ([^(']+)", str(error))
    return f"cannot be reached over TLS ({match[1].strip() if match else type(error).__name__})"

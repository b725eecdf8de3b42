"""Token reviews by the API server, with as few calls as possible.

Tokens that no API server would accept are rejected locally. Answers are cached, and one token has one review at a time.
An address that sends bad tokens is rate limited; its tokens that are cached as good are still accepted.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import kopf

from pacekeeper_analysis.protocol.decoding import parse_json

from ..api.names import TOKEN_AUDIENCE
from ..async_runtime import OperatorRuntime
from ..kube.client import TOKEN_REVIEWS, Cluster
from ..limits import ExpiringCache, RateLimiter

TOKEN_REVIEW_TTL_SECONDS = 60.0
"""Seconds that a token's review is valid without a check of its pod."""
LIVE_POD_TOKEN_TTL_SECONDS = 300.0
"""Maximum seconds that a review is valid while the pod is known to exist and not to terminate.

One review per minute of 5,000 workers would be 83 per second, of 0.6 ms here and more in the API server. Watches report
the end of a pod within a second, lists within a minute.
"""
TOKEN_REFUSAL_TTL_SECONDS = 5.0
"""Seconds that a rejection is valid. Short, because the API server may not know a new pod's first token yet."""
MAX_CACHED_REVIEWS = 20_000
MAX_CACHED_REFUSALS = 4_096
MAX_CONCURRENT_REVIEWS = 32
TOKEN_REFUSAL_BURST = 64
TOKEN_REFUSALS_PER_SECOND = 2.0
"""Reviews of bad tokens per address. Reviews of good tokens do not count."""
EXPIRY_LEEWAY_SECONDS = 12 * 3600.0
"""The API server decides about tokens that expired less than this ago: this machine's clock may be hours off."""
_JSON_WEB_TOKEN_PARTS = 3
"""Header, claims, and signature."""
_SERVICE_ACCOUNT_USERNAME_PARTS = 4
"""system:serviceaccount:<namespace>:<name>."""


class Unauthenticated(Exception):
    """The token is missing or not valid."""


class Forbidden(Exception):
    """The token is valid, but its pod may not do this."""


class TooManyRequests(Exception):
    """The caller exceeds a limit, and has to retry later."""


@dataclass(frozen=True)
class PodIdentity:
    """The pod that a token is bound to."""

    namespace: str
    pod: str
    uid: str


ReviewResult = PodIdentity | Exception


class TokenReviewer:
    """Reviews the tokens of all callers."""

    def __init__(
        self,
        cluster: Cluster,
        runtime: OperatorRuntime,
        is_pod_alive: Callable[[PodIdentity], bool] = lambda _identity: False,
    ):
        """Create the reviewer. `is_pod_alive`: whether that very pod is known to exist and not to terminate."""
        self._cluster = cluster
        self._runtime = runtime
        self._is_pod_alive = is_pod_alive
        self._good = ExpiringCache[bytes, tuple[float, PodIdentity]](LIVE_POD_TOKEN_TTL_SECONDS, MAX_CACHED_REVIEWS)
        self._bad = ExpiringCache[bytes, ReviewResult](TOKEN_REFUSAL_TTL_SECONDS, MAX_CACHED_REFUSALS)
        self._sources = RateLimiter[str](TOKEN_REFUSALS_PER_SECOND, TOKEN_REFUSAL_BURST)
        self._pending: dict[bytes, asyncio.Task[ReviewResult]] = {}
        self._free = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)

    async def review(self, token: str, source: str) -> PodIdentity:
        """Return the pod of the token that came from the address `source`.

        Raises Unauthenticated, Forbidden, TooManyRequests or TemporaryError.
        """
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        result = self._find_cached(digest)
        if result is None and (flaw := find_token_flaw(token, self._runtime.now())):
            raise Unauthenticated(flaw)
        if result is None:
            result = await asyncio.shield(self._get_or_start_review(digest, token, source))
        if isinstance(result, Exception):
            raise result.with_traceback(None)  # one exception object may be raised to many callers
        return result

    def _find_cached(self, digest: bytes) -> ReviewResult | None:
        now = self._runtime.monotonic()
        if cached := self._good.get(digest, now):
            reviewed_at, identity = cached
            age = now - reviewed_at
            if age < TOKEN_REVIEW_TTL_SECONDS or (
                age < _get_ttl_share(digest) * LIVE_POD_TOKEN_TTL_SECONDS and self._is_pod_alive(identity)
            ):
                return identity
        return self._bad.get(digest, now)

    def _get_or_start_review(self, digest: bytes, token: str, source: str) -> asyncio.Task[ReviewResult]:
        """Return the running review of this token, and start one if there is none."""
        if digest not in self._pending:
            if not self._sources.take(source, self._runtime.monotonic()):
                raise TooManyRequests(f"too many bad tokens came from {source}: send a good one later")
            self._pending[digest] = self._runtime.start_task(self._run_review(digest, token, source), "token review")
        return self._pending[digest]

    async def _run_review(self, digest: bytes, token: str, source: str) -> ReviewResult:
        """Return the result of a review. Errors are returned to all waiting callers, and must not end the operator."""
        try:
            async with self._free:
                result = await self._request_review(token)
        except Exception as error:
            result = error
        finally:
            del self._pending[digest]
        now = self._runtime.monotonic()
        if isinstance(result, PodIdentity):
            self._good.put(digest, (now, result), now)
        if isinstance(result, Unauthenticated | Forbidden):
            self._bad.put(digest, result, now)
        else:
            self._sources.refund(source)
        return result

    async def _request_review(self, token: str) -> ReviewResult:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        try:
            return _parse_review((await self._cluster.create(TOKEN_REVIEWS, body)).get("status", {}))
        except kopf.PermanentError as error:  # the operator's own problem; it says nothing about this token
            raise kopf.TemporaryError(f"tokens cannot be reviewed: {error}") from error


def _get_ttl_share(digest: bytes) -> float:
    """Return a factor from 0.5 to 1 that depends on the token, so that simultaneous reviews do not expire together."""
    return (256 + digest[0]) / 512


def find_token_flaw(token: str, now: float) -> str:
    """Return why no API server would accept the token for this audience. Empty: one may. No signature is checked."""
    if not token:
        return f"send a service account token with audience {TOKEN_AUDIENCE} as bearer token"
    claims = _parse_claims(token)
    if claims is None:
        return "the bearer token is not a JSON web token"
    audiences = claims.get("aud")
    if TOKEN_AUDIENCE not in (audiences if isinstance(audiences, list) else [audiences]):
        return f"the token is not for audience {TOKEN_AUDIENCE}"
    expires = claims.get("exp")
    if not isinstance(expires, int | float) or not expires > now - EXPIRY_LEEWAY_SECONDS:  # of any length
        return "the token has expired"
    return ""


def _parse_claims(token: str) -> dict[str, Any] | None:
    parts = token.split(".")
    if len(parts) != _JSON_WEB_TOKEN_PARTS or not token.isascii():
        return None
    try:
        claims = parse_json(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    return claims if isinstance(claims, dict) else None


def _parse_review(status: Mapping[str, Any]) -> ReviewResult:
    if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", ()):
        return Unauthenticated(status.get("error") or f"the token is not good for audience {TOKEN_AUDIENCE}")
    user = status["user"]
    parts = user["username"].split(":")
    extra = user.get("extra", {})
    pod = extra.get("authentication.kubernetes.io/pod-name", [""])[0]
    uid = extra.get("authentication.kubernetes.io/pod-uid", [""])[0]
    if len(parts) != _SERVICE_ACCOUNT_USERNAME_PARTS or parts[:2] != ["system", "serviceaccount"] or not pod or not uid:
        return Forbidden(f"{user['username']} is not bound to a pod")
    return PodIdentity(parts[2], pod, uid)

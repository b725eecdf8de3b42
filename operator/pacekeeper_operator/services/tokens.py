"""Whose token it is. The API server has the word, and is not asked more than it takes.

What no API server would accept is refused at sight; an answer is remembered; one token is asked about once at a time;
an address that sends bad tokens soon has to wait, while tokens from there that are known as good are served as before.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import kopf

from pacekeeper_analysis.reading import parse_json

from ..api import TOKEN_AUDIENCE
from ..cluster import TOKEN_REVIEWS, Cluster
from ..limits import RateLimiter, ExpiringCache
from ..runtime import OperatorRuntime

TOKEN_REVIEW_TTL_SECONDS = 60.0
"""So long a token's review is believed whatever has become of its pod."""
LIVE_POD_TOKEN_TTL_SECONDS = 300.0
"""So long at most it is while the pod is known to be there, and is not about to end: 5,000 workers' reviews once
a minute would be 83 a second, of 0.6 ms here and more in the API server. That a pod has gone is known by watches within
a second, by lists within a minute."""
TOKEN_REFUSAL_TTL_SECONDS = 5.0
"""So long a refusal is. Short, because a pod's first token may be a moment ahead of what the API server knows."""
MAX_CACHED_REVIEWS = 20_000
MAX_CACHED_REFUSALS = 4_096
MAX_CONCURRENT_REVIEWS = 32
TOKEN_REFUSAL_BURST = 64
TOKEN_REFUSALS_PER_SECOND = 2.0
"""Bad tokens that one address may have reviewed. A review that ends well does not count."""
EXPIRY_LEEWAY_SECONDS = 12 * 3600.0
"""A token that has run out only by so much is left to the API server: this machine's clock may be hours off."""


class Unauthenticated(Exception):
    """No good token."""


class Forbidden(Exception):
    """A good token of somebody who may not do this."""


class TooManyRequests(Exception):
    """More than the operator takes for now: to be sent again, later."""


@dataclass(frozen=True)
class PodIdentity:
    """The pod that a token is bound to."""

    namespace: str
    pod: str
    uid: str


ReviewResult = PodIdentity | Exception


class TokenReviewer:
    """Reviews of all callers' tokens."""

    def __init__(self, cluster: Cluster, runtime: OperatorRuntime, is_pod_alive: Callable[[PodIdentity], bool] = lambda _holder: False):
        """`stays`: whether that very pod is known to be there, and is not about to end."""
        self._cluster = cluster
        self._runtime = runtime
        self._is_pod_alive = is_pod_alive
        self._good = ExpiringCache[bytes, tuple[float, PodIdentity]](LIVE_POD_TOKEN_TTL_SECONDS, MAX_CACHED_REVIEWS)
        self._bad = ExpiringCache[bytes, ReviewResult](TOKEN_REFUSAL_TTL_SECONDS, MAX_CACHED_REFUSALS)
        self._sources = RateLimiter[str](TOKEN_REFUSALS_PER_SECOND, TOKEN_REFUSAL_BURST)
        self._pending: dict[bytes, asyncio.Task[ReviewResult]] = {}
        self._free = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)

    async def review(self, token: str, source: str) -> PodIdentity:
        """`source`: the address that it came from. Raises Unauthenticated, Forbidden, TooManyRequests or TemporaryError."""
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        verdict = self._find_cached(digest)
        if verdict is None and (why := find_token_flaw(token, self._runtime.now())):
            raise Unauthenticated(why)
        if verdict is None:
            verdict = await asyncio.shield(self._get_or_start_review(digest, token, source))
        if isinstance(verdict, Exception):
            raise verdict.with_traceback(None)  # it may be raised to many callers
        return verdict

    def _find_cached(self, digest: bytes) -> ReviewResult | None:
        now = self._runtime.monotonic()
        if known := self._good.get(digest, now):
            reviewed_at, holder = known
            age = now - reviewed_at
            if age < TOKEN_REVIEW_TTL_SECONDS or (age < _get_ttl_share(digest) * LIVE_POD_TOKEN_TTL_SECONDS and self._is_pod_alive(holder)):
                return holder
        return self._bad.get(digest, now)

    def _get_or_start_review(self, digest: bytes, token: str, source: str) -> asyncio.Task[ReviewResult]:
        """The one review of this token that is under way; begun where there is none."""
        if digest not in self._pending:
            if not self._sources.take(source, self._runtime.monotonic()):
                raise TooManyRequests(f"too many bad tokens came from {source}: send a good one later")
            self._pending[digest] = self._runtime.start_task(self._run_review(digest, token, source), "review of a token")
        return self._pending[digest]

    async def _run_review(self, digest: bytes, token: str, source: str) -> ReviewResult:
        """Errors are returned, for all who wait; they are no reason for the operator to end."""
        try:
            async with self._free:
                verdict = await self._request_review(token)
        except Exception as error:
            verdict = error
        finally:
            del self._pending[digest]
        now = self._runtime.monotonic()
        if isinstance(verdict, PodIdentity):
            self._good.put(digest, (now, verdict), now)
        if isinstance(verdict, Unauthenticated | Forbidden):
            self._bad.put(digest, verdict, now)
        else:
            self._sources.refund(source)
        return verdict

    async def _request_review(self, token: str) -> ReviewResult:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        try:
            return _parse_review((await self._cluster.create(TOKEN_REVIEWS, body)).get("status", {}))
        except kopf.PermanentError as error:  # the operator's own trouble, not a word about this token
            raise kopf.TemporaryError(f"tokens cannot be reviewed: {error}") from error


def _get_ttl_share(digest: bytes) -> float:
    """From a half to 1, another for each token: those that were reviewed together are not all due together again."""
    return (256 + digest[0]) / 512


def find_token_flaw(token: str, now: float) -> str:
    """Why no API server would accept the token for us, without asking one; "": one may. No signature is checked."""
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
    if len(parts) != 3 or not token.isascii():
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
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or not pod or not uid:
        return Forbidden(f"{user['username']} is not bound to a pod")
    return PodIdentity(parts[2], pod, uid)

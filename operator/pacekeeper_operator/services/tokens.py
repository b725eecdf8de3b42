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
from ..limits import Rate, Remembered
from ..runtime import Runtime

REVIEW_SECONDS = 60.0
"""So long a token's review is believed whatever has become of its pod."""
KNOWN_SECONDS = 300.0
"""So long at most it is while the pod is known to be there, and is not about to end: 5,000 workers' reviews once
a minute would be 83 a second, of 0.6 ms here and more in the API server. That a pod has gone is known by watches within
a second, by lists within a minute."""
REFUSED_SECONDS = 5.0
"""So long a refusal is. Short, because a pod's first token may be a moment ahead of what the API server knows."""
MAX_REVIEWS = 20_000
MAX_REFUSALS = 4_096
REVIEWS_AT_ONCE = 32
REFUSED_AT_ONCE = 64
REFUSED_PER_SECOND = 2.0
"""Bad tokens that one address may have reviewed. A review that ends well does not count."""
EXPIRY_LEEWAY_SECONDS = 12 * 3600.0
"""A token that has run out only by so much is left to the API server: this machine's clock may be hours off."""


class Unauthenticated(Exception):
    """No good token."""


class Forbidden(Exception):
    """A good token of somebody who may not do this."""


class TooMany(Exception):
    """More than the operator takes for now: to be sent again, later."""


@dataclass(frozen=True)
class Holder:
    """The pod that a token is bound to."""

    namespace: str
    pod: str
    uid: str


Judgement = Holder | Exception


class Tokens:
    """Reviews of all callers' tokens."""

    def __init__(self, cluster: Cluster, runtime: Runtime, stays: Callable[[Holder], bool] = lambda _holder: False):
        """`stays`: whether that very pod is known to be there, and is not about to end."""
        self._cluster = cluster
        self._runtime = runtime
        self._stays = stays
        self._good = Remembered[bytes, tuple[float, Holder]](KNOWN_SECONDS, MAX_REVIEWS)
        self._bad = Remembered[bytes, Judgement](REFUSED_SECONDS, MAX_REFUSALS)
        self._sources = Rate[str](REFUSED_PER_SECOND, REFUSED_AT_ONCE)
        self._asked: dict[bytes, asyncio.Task[Judgement]] = {}
        self._free = asyncio.Semaphore(REVIEWS_AT_ONCE)

    async def holder(self, token: str, source: str) -> Holder:
        """`source`: the address that it came from. Raises Unauthenticated, Forbidden, TooMany or TemporaryError."""
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        verdict = self._known(digest)
        if verdict is None and (why := flaw(token, self._runtime.now())):
            raise Unauthenticated(why)
        if verdict is None:
            verdict = await asyncio.shield(self._asking(digest, token, source))
        if isinstance(verdict, Exception):
            raise verdict.with_traceback(None)  # it may be raised to many callers
        return verdict

    def _known(self, digest: bytes) -> Judgement | None:
        now = self._runtime.monotonic()
        if known := self._good.get(digest, now):
            reviewed_at, holder = known
            age = now - reviewed_at
            if age < REVIEW_SECONDS or (age < _part(digest) * KNOWN_SECONDS and self._stays(holder)):
                return holder
        return self._bad.get(digest, now)

    def _asking(self, digest: bytes, token: str, source: str) -> asyncio.Task[Judgement]:
        """The one review of this token that is under way; begun where there is none."""
        if digest not in self._asked:
            if not self._sources.take(source, self._runtime.monotonic()):
                raise TooMany(f"too many bad tokens came from {source}: send a good one later")
            self._asked[digest] = self._runtime.start(self._ask(digest, token, source), "review of a token")
        return self._asked[digest]

    async def _ask(self, digest: bytes, token: str, source: str) -> Judgement:
        """Errors are returned, for all who wait; they are no reason for the operator to end."""
        try:
            async with self._free:
                verdict = await self._review(token)
        except Exception as error:
            verdict = error
        finally:
            del self._asked[digest]
        now = self._runtime.monotonic()
        if isinstance(verdict, Holder):
            self._good.put(digest, (now, verdict), now)
        if isinstance(verdict, Unauthenticated | Forbidden):
            self._bad.put(digest, verdict, now)
        else:
            self._sources.give_back(source)
        return verdict

    async def _review(self, token: str) -> Judgement:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        try:
            return _read((await self._cluster.create(TOKEN_REVIEWS, body)).get("status", {}))
        except kopf.PermanentError as error:  # the operator's own trouble, not a word about this token
            raise kopf.TemporaryError(f"tokens cannot be reviewed: {error}") from error


def _part(digest: bytes) -> float:
    """From a half to 1, another for each token: those that were reviewed together are not all due together again."""
    return (256 + digest[0]) / 512


def flaw(token: str, now: float) -> str:
    """Why no API server would accept the token for us, without asking one; "": one may. No signature is checked."""
    if not token:
        return f"send a service account token with audience {TOKEN_AUDIENCE} as bearer token"
    claims = _claims(token)
    if claims is None:
        return "the bearer token is not a JSON web token"
    audiences = claims.get("aud")
    if TOKEN_AUDIENCE not in (audiences if isinstance(audiences, list) else [audiences]):
        return f"the token is not for audience {TOKEN_AUDIENCE}"
    expires = claims.get("exp")
    if not isinstance(expires, int | float) or not expires > now - EXPIRY_LEEWAY_SECONDS:  # of any length
        return "the token has expired"
    return ""


def _claims(token: str) -> dict[str, Any] | None:
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        return None
    try:
        claims = parse_json(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    return claims if isinstance(claims, dict) else None


def _read(status: Mapping[str, Any]) -> Judgement:
    if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", ()):
        return Unauthenticated(status.get("error") or f"the token is not good for audience {TOKEN_AUDIENCE}")
    user = status["user"]
    parts = user["username"].split(":")
    extra = user.get("extra", {})
    pod = extra.get("authentication.kubernetes.io/pod-name", [""])[0]
    uid = extra.get("authentication.kubernetes.io/pod-uid", [""])[0]
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or not pod or not uid:
        return Forbidden(f"{user['username']} is not bound to a pod")
    return Holder(parts[2], pod, uid)

"""Service account tokens of pods, and their reviews by the API server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass

from ...ports import SharedWorld
from .objects import Object

TOKEN_CACHE_SECONDS = 10.0
"""Seconds for which the API server caches a positive review, even if the pod has been deleted since."""


@dataclass
class _MintedToken:
    """A token, and when it was last validated, in virtual seconds."""

    namespace: str
    pod: str
    uid: str
    account: str
    audience: str
    expires: float  # seconds since the epoch
    validated_at: float = -TOKEN_CACHE_SECONDS


class PodTokens:
    """All tokens. `get_object`: returns a stored object by its kind, name, and namespace."""

    def __init__(self, world: SharedWorld, get_object: Callable[[str, str, str], Object | None]) -> None:
        self._world = world
        self._get_object = get_object
        self._minted: dict[str, _MintedToken] = {}

    def mint_token(self, pod: Object, audience: str, seconds: float) -> str:
        """Create a token that is valid for `seconds`, and while the pod exists."""
        metadata = pod["metadata"]
        account = pod["spec"].get("serviceAccountName", "default")
        now = self._world.wall_time("api")
        claims = {
            "aud": [audience],
            "exp": int(now + seconds),
            "iat": int(now),
            "iss": "https://kubernetes.default.svc",
            "kubernetes.io": {
                "namespace": metadata["namespace"],
                "pod": {"name": metadata["name"], "uid": metadata["uid"]},
            },
            "sub": f"system:serviceaccount:{metadata['namespace']}:{account}",
        }
        token = ".".join((_encode_part({"alg": "none"}), _encode_part(claims), f"s{len(self._minted)}"))
        self._minted[token] = _MintedToken(
            metadata["namespace"], metadata["name"], metadata["uid"], account, audience, now + seconds
        )
        return token

    def review_token(self, body: Object) -> Object:
        """Return the TokenReview with its status."""
        spec = body["spec"]
        audiences = spec.get("audiences", [])
        minted = self._minted.get(spec.get("token", ""))
        now = self._world.now()
        if minted is None:
            return self._build_review(body, {"user": {}, "error": "invalid bearer token"})
        if minted.audience not in audiences:
            problem = (
                f'token audiences ["{minted.audience}"] is invalid for the target audiences {json.dumps(audiences)}'
            )
            return self._build_review(body, {"user": {}, "error": f"[invalid bearer token, {problem}]"})
        if now - minted.validated_at >= TOKEN_CACHE_SECONDS:
            if problem := self._find_flaw(minted):
                return self._build_review(body, {"user": {}, "error": f"[invalid bearer token, {problem}]"})
            minted.validated_at = now
        user = {
            "username": f"system:serviceaccount:{minted.namespace}:{minted.account}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{minted.namespace}",
                "system:authenticated",
            ],
            "extra": {
                "authentication.kubernetes.io/pod-name": [minted.pod],
                "authentication.kubernetes.io/pod-uid": [minted.uid],
            },
        }
        return self._build_review(body, {"authenticated": True, "user": user, "audiences": [minted.audience]})

    def _find_flaw(self, minted: _MintedToken) -> str:
        if self._world.wall_time("api") >= minted.expires:
            return "service account token has expired"
        pod = self._get_object("pods", minted.pod, minted.namespace)
        if pod is None or pod["metadata"]["uid"] != minted.uid:
            return "service account token has been invalidated"
        return ""

    @staticmethod
    def _build_review(body: Object, status: Object) -> Object:
        return {**body, "status": status}


def _encode_part(part: Object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()

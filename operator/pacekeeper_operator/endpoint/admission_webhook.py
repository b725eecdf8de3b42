"""The webhook that injects the watch into pods, for clusters without MutatingAdmissionPolicy (before 1.36).

Each operator serves it, whether it leads or not. The API server creates a pod without the watch if no operator answers
in time. If anything is wrong with a call, the pod is admitted as it is.

The API server does not authenticate itself to webhooks, so any client that reaches the port may call. The answer holds
nothing that the caller did not send, except settings that each watched pod shows.
"""

from __future__ import annotations

import base64
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from pacekeeper_analysis.errors import InputError

from ..api.names import Object
from ..async_runtime import OperatorRuntime
from ..limits import BudgetExhausted, ByteBudget
from ..pods.injection import InjectionRules, OperatorAddress, build_injection_patch, find_injection_refusal
from .connections import EndpointConnections
from .server import serve_application

MAX_REVIEW_BYTES = 4 * 2**20
"""A pod has 1.5 MiB at most in etcd. The review holds it once, and JSON is longer."""
MAX_REVIEWS_BYTES = 16 * 2**20
"""Total size of all reviews that are being read."""
REVIEW_TIMEOUT_SECONDS = 5.0
MAX_WEBHOOK_CONNECTIONS = 256
"""A cluster has a few API servers, and each has a few connections."""
MAX_WEBHOOK_CONNECTIONS_PER_ADDRESS = 64
WEBHOOK_PATH = "/v1/inject"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Injection:
    """What is injected now."""

    rules: InjectionRules
    operator: OperatorAddress


GetInjection = Callable[[], Injection | None]
"""Returns what is injected; None: nothing, for example since the breaker is open."""


@asynccontextmanager
async def serve_admission_webhook(
    get_injection: GetInjection, runtime: OperatorRuntime, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """Serve within the context, and yield the port (`port` 0: any free one). `context` None: without TLS, for tests."""
    connections = EndpointConnections(
        max_total=MAX_WEBHOOK_CONNECTIONS,
        max_per_address=MAX_WEBHOOK_CONNECTIONS_PER_ADDRESS,
        max_unauthenticated=MAX_WEBHOOK_CONNECTIONS,
    )
    app = create_webhook_application(get_injection, runtime)
    async with serve_application(app, runtime, port, context, connections) as actual_port:
        yield actual_port


def create_webhook_application(get_injection: GetInjection, runtime: OperatorRuntime) -> web.Application:
    budget = ByteBudget(MAX_REVIEWS_BYTES)

    async def handle_review(request: web.Request) -> web.StreamResponse:
        try:
            length = MAX_REVIEW_BYTES if request.content_length is None else request.content_length
            if length > MAX_REVIEW_BYTES:
                return web.Response(status=413)
            with budget.reserve(length):
                data = await runtime.run_with_timeout(REVIEW_TIMEOUT_SECONDS, request.read())
            return web.json_response(answer_review(data, get_injection()))
        except InputError as error:
            return web.Response(status=400, text=str(error))
        except (BudgetExhausted, TimeoutError):
            return web.Response(status=503, headers={"Connection": "close"})

    app = web.Application(client_max_size=MAX_REVIEW_BYTES)
    app.add_routes([web.post(WEBHOOK_PATH, handle_review)])
    return app


def answer_review(data: bytes, injection: Injection | None) -> Object:
    """Answer an AdmissionReview (admission.k8s.io/v1): the pod is always admitted, with a patch if it is watched.

    Raises InputError if it is not the review of a pod.
    """
    try:
        return _review_pod(orjson.loads(data), injection)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError("the body must be an AdmissionReview of a pod, of admission.k8s.io/v1") from error


def _review_pod(review: Object, injection: Injection | None) -> Object:
    request = review["request"]
    response: Object = {"uid": str(request["uid"]), "allowed": True}
    pod = request["object"]
    if injection is not None and find_injection_refusal(pod, injection.rules) is None:
        patch = list(build_injection_patch(pod, injection.rules, injection.operator))
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(orjson.dumps(patch)).decode()}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

"""What clients that reach the webhook's port send, among them the API server."""

from __future__ import annotations

from pacekeeper_operator.endpoint.admission_webhook import Injection, answer_review
from testing.kubernetes.injection_cases import ADDRESS, INJECTION_CASES, RULES

from ..border import Border, call_directly
from ..mutations import mutate_text, to_bytes

INJECTION = Injection(RULES, ADDRESS)
BORDERS = [
    Border(
        "reviews of pods",
        lambda: [{"request": {"uid": "u", "object": case.pod}} for case in INJECTION_CASES],
        mutate_text,
        call_directly(lambda value: answer_review(to_bytes(value), INJECTION)),
    )
]

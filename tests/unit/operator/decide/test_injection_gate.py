"""The gate of the injection: what closes it, what opens it again, and when the image is on the nodes."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.decide.injection_gate import (
    CLOSING_CONDITION,
    CLOSING_RULE,
    MAX_PULL_SECONDS,
    ImagePull,
    build_binding_patch,
    build_webhook_patch,
)

OTHER_RULE = {**CLOSING_RULE, "resources": ["pods/status"]}
OTHER_CONDITION = {"name": "of-a-person", "expression": "true"}
METADATA = {"resourceVersion": "7"}


def build_binding(*rules: Any) -> dict[str, Any]:
    return {"metadata": METADATA, "spec": {"matchResources": {"excludeResourceRules": [*rules]}}}


@pytest.mark.parametrize(
    ("binding", "is_open", "rules"),
    [
        ({"metadata": METADATA, "spec": {}}, False, [CLOSING_RULE]),
        ({"metadata": METADATA, "spec": {}}, True, "unchanged"),
        (build_binding(CLOSING_RULE), False, "unchanged"),
        (build_binding({key: value for key, value in CLOSING_RULE.items() if key != "scope"}), False, "unchanged"),
        (build_binding(CLOSING_RULE), True, None),
        (build_binding(OTHER_RULE), False, [OTHER_RULE, CLOSING_RULE]),
        (build_binding(OTHER_RULE, CLOSING_RULE), True, [OTHER_RULE]),
        (build_binding(OTHER_RULE), True, "unchanged"),
    ],
)
def test_a_binding_is_closed_by_a_rule_and_keeps_those_of_others(
    binding: dict[str, Any], is_open: bool, rules: Any
) -> None:
    patch = build_binding_patch(binding, is_open=is_open)
    if rules == "unchanged":
        assert patch is None
    else:
        assert patch == {"metadata": METADATA, "spec": {"matchResources": {"excludeResourceRules": rules}}}


@pytest.mark.parametrize("others", [[], [OTHER_CONDITION]])
def test_webhooks_are_closed_by_a_condition_and_opened_again(others: list[dict[str, str]]) -> None:
    service = {"service": {"name": "pacekeeper"}}
    webhook: dict[str, Any] = {"name": "a", "clientConfig": service, **({"matchConditions": others} if others else {})}
    closing = build_webhook_patch({"metadata": METADATA, "webhooks": [webhook]}, "CA", is_open=False)
    assert closing is not None
    (closed,) = closing["webhooks"]
    assert closed["matchConditions"] == [*others, CLOSING_CONDITION]
    assert closed["clientConfig"] == {**service, "caBundle": "CA"}
    configuration = {"metadata": METADATA, "webhooks": [closed]}
    assert build_webhook_patch(configuration, "CA", is_open=False) is None
    opening = build_webhook_patch(configuration, "CA", is_open=True)
    assert opening == {
        "metadata": METADATA,
        "webhooks": [{**webhook, "clientConfig": {**service, "caBundle": "CA"}}],
    }


def build_daemon_set(ready: int, updated: int = 3, nodes: int = 3, observed: int = 2) -> dict[str, Any]:
    status = {"numberReady": ready, "updatedNumberScheduled": updated, "desiredNumberScheduled": nodes}
    return {"metadata": {"uid": "u", "generation": 2}, "status": {**status, "observedGeneration": observed}}


@pytest.mark.parametrize(
    ("daemon_set", "is_over", "is_over_later"),
    [
        (build_daemon_set(3), True, True),
        (build_daemon_set(2), False, True),  # a node may be down
        (build_daemon_set(0), False, False),  # no node can pull it
        (build_daemon_set(3, updated=1), False, True),  # the others have the image before
        (build_daemon_set(3, observed=1), False, False),
        (build_daemon_set(0, updated=0, nodes=0), True, True),  # no node yet
        ({"metadata": {"uid": "u", "generation": 2}}, False, False),
    ],
)
def test_pods_wait_for_the_image(daemon_set: dict[str, Any], is_over: bool, is_over_later: bool) -> None:
    pull = ImagePull.from_daemon_set(daemon_set)
    assert pull.key == "u/2"
    assert pull.is_over(MAX_PULL_SECONDS - 1) == is_over
    assert pull.is_over(MAX_PULL_SECONDS) == is_over_later

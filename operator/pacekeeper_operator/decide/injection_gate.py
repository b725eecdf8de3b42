"""The gate of the injection, and whether its image is on the nodes. Pure.

The API server reads whether pods are watched from the policy's parameters, a ConfigMap. One whose bindings have all
been deleted once reads old parameters until it restarts (1.36.3). So the operator also closes a gate in the objects
that select pods: the policy's bindings, or the webhook's configuration. It only narrows what they select.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.names import Object

CLOSING_RULE: Mapping[str, Any] = {
    "apiGroups": ["*"],
    "apiVersions": ["*"],
    "operations": ["*"],
    "resources": ["*"],
    "scope": "*",
}
"""Excludes everything from a binding. `scope` is the API server's default: the stored rule has it."""
CLOSING_CONDITION: Mapping[str, str] = {"name": "switched-on", "expression": "false"}
"""A match condition that no pod meets."""
MAX_PULL_SECONDS = 600.0
"""Longest wait for nodes that do not have the image. A node that is down never has it."""


@dataclass(frozen=True)
class ImagePull:
    """The pods that pull the image of the watch, as their DaemonSet counts them."""

    key: str  # of this version of the DaemonSet
    ready: int
    nodes: int
    is_counted: bool  # whether the counts are of this version

    @classmethod
    def from_daemon_set(cls, daemon_set: Object) -> ImagePull:
        metadata, status = daemon_set["metadata"], daemon_set.get("status") or {}
        generation, nodes = metadata.get("generation", 0), status.get("desiredNumberScheduled", 0)
        updated, ready = status.get("updatedNumberScheduled", 0), status.get("numberReady", 0)
        is_counted = status.get("observedGeneration") == generation
        return cls(f"{metadata.get('uid', '')}/{generation}", min(updated, ready), nodes, is_counted)

    def is_over(self, waited_seconds: float) -> bool:
        """Return whether pods may be watched: all nodes have the image, or some have it and others take too long.

        If no node can pull it, no pod could either.
        """
        if not self.is_counted:
            return False
        return self.ready >= self.nodes or (self.ready > 0 and waited_seconds >= MAX_PULL_SECONDS)


def build_binding_patch(binding: Object, *, is_open: bool) -> Object | None:
    """Build the merge patch that opens or closes a binding of the policy; None: it is so already."""
    match = binding["spec"].get("matchResources") or {}
    rules = match.get("excludeResourceRules") or []
    others = [rule for rule in rules if {**CLOSING_RULE, **rule} != CLOSING_RULE]
    wanted = others if is_open else [*others, CLOSING_RULE]
    if len(wanted) == len(rules):
        return None
    version = binding["metadata"]["resourceVersion"]
    spec = {"matchResources": {"excludeResourceRules": wanted or None}}
    return {"metadata": {"resourceVersion": version}, "spec": spec}


def build_webhook_patch(configuration: Object, authority: str, *, is_open: bool) -> Object | None:
    """Build the merge patch that opens or closes the webhooks and has them trust the operator; None: all is so.

    `authority`: the caBundle (base64).
    """
    before = configuration.get("webhooks") or []
    wanted = [_adapt_webhook(webhook, authority, is_open=is_open) for webhook in before]
    if wanted == before:
        return None
    return {"metadata": {"resourceVersion": configuration["metadata"]["resourceVersion"]}, "webhooks": wanted}


def _adapt_webhook(webhook: Object, authority: str, *, is_open: bool) -> Object:
    conditions = webhook.get("matchConditions") or []
    others = [condition for condition in conditions if condition["name"] != CLOSING_CONDITION["name"]]
    wanted = others if is_open else [*others, CLOSING_CONDITION]
    adapted = {**webhook, "clientConfig": {**(webhook.get("clientConfig") or {}), "caBundle": authority}}
    if wanted:
        return {**adapted, "matchConditions": wanted}
    return {name: value for name, value in adapted.items() if name != "matchConditions"}

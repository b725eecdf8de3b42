"""The resources of sidecars, as the platform configures them."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import SIDECAR_CONTAINER
from pacekeeper_operator.pods.resources import SIDECAR_RESOURCES, explain_denial
from pacekeeper_operator.settings import Settings

VARIABLE = "PACEKEEPER_SIDECAR_RESOURCES"


def test_resources_are_read_from_the_environment() -> None:
    text = '{"requests": {"cpu": 0.1, "memory": "1e8"}, "limits": {"cpu": "1", "memory": "256Mi"}}'
    assert Settings.from_environment({VARIABLE: text}).sidecar_resources == {
        "requests": {"cpu": "0.1", "memory": "1e8"},
        "limits": {"cpu": "1", "memory": "256Mi"},
    }
    assert Settings.from_environment({VARIABLE: "{}"}).sidecar_resources == {}
    assert Settings.from_environment({}).sidecar_resources == SIDECAR_RESOURCES


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("256Mi", "is not JSON: write resources like"),
        ("[]", "resources have `requests` and `limits`"),
        ('{"limit": {}}', "resources have `requests` and `limits`"),
        ('{"limits": "256Mi"}', "limits must be quantities by name"),
        ('{"limits": {"memory": "256MB"}}', "'256MB' is no quantity for limits of 'memory'"),
        ('{"requests": {"cpu": -1}}', "is no quantity for requests of 'cpu'"),
        ('{"requests": {"cpu": true}}', "is no quantity for requests of 'cpu'"),
        ('{"requests": {"cpu": null}}', "is no quantity for requests of 'cpu'"),
        (
            '{"requests": {"memory": "64Mi"}, "limits": {"memory": "64M"}}',
            "'memory', 64Mi, are above its limit, 64M",
        ),
        ('{"requests": {"cpu": 1e-1}, "limits": {"cpu": "99m"}}', "of 'cpu', 0.1, are above its limit, 99m"),
    ],
)
def test_invalid_resources_are_refused_at_the_start(text: str, complaint: str) -> None:
    """Otherwise the pod of each worker would be refused, and its job blamed."""
    with pytest.raises(InputError, match=f"{VARIABLE}: .*{complaint}"):
        Settings.from_environment({VARIABLE: text})


def test_tolerations_of_probe_pods_are_read_from_the_environment() -> None:
    text = '[{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}]'
    found = Settings.from_environment({"PACEKEEPER_PROBE_TOLERATIONS": text}).probe_tolerations
    assert found == ({"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},)
    assert Settings.from_environment({}).probe_tolerations == ()


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '[{"effects": "NoExecute"}]', '[{"effect": "Never"}]', '[{"tolerationSeconds": "60"}]']
)
def test_invalid_tolerations_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="PACEKEEPER_PROBE_TOLERATIONS"):
        Settings.from_environment({"PACEKEEPER_PROBE_TOLERATIONS": text})


QUOTA = 'pods "j-w0-0" is forbidden: exceeded quota: team, requested: {}, used: pods=1, limited: pods=1'
LACKING = 'pods "j-w0-0" is forbidden: failed quota: team: must specify {}'
RANGE = 'pods "j-w0-0" is forbidden: {}'
REFUSED, COUNTS = "this is about container pacekeeper-sidecar", "container pacekeeper-sidecar, which Pacekeeper adds to"


@pytest.mark.parametrize(
    ("denial", "explanation"),
    [
        (LACKING.format("limits.cpu for: pacekeeper-sidecar"), REFUSED),
        (LACKING.format("limits.cpu for: pacekeeper-sidecar,trainer; requests.cpu for: trainer"), REFUSED),
        (LACKING.format("requests.cpu for: trainer; limits.cpu for: pacekeeper-sidecar"), REFUSED),
        (LACKING.format("limits.cpu for: trainer"), ""),
        (LACKING.format("limits.cpu,limits.memory"), REFUSED),
        (LACKING.format("limits.memory,requests.cpu"), ""),
        (RANGE.format("minimum cpu usage per Container is 100m, but request is 20m"), REFUSED),
        (RANGE.format("[minimum cpu usage per Container is 1, but request is 500m, minimum memory usage per Container "
                      "is 1Gi, but request is 64Mi]"), REFUSED),
        (RANGE.format("minimum cpu usage per Container is 100m, but request is 50m"), ""),
        (RANGE.format("maximum memory usage per Container is 128Mi, but limit is 256Mi"), REFUSED),
        (RANGE.format("maximum memory usage per Container is 1Gi, but limit is 2Gi"), ""),
        (RANGE.format("maximum cpu usage per Container is 2.  No limit is specified"), REFUSED),
        (RANGE.format("maximum memory usage per Container is 2Gi.  No limit is specified"), ""),
        (RANGE.format("memory max limit to request ratio per Container is 2, but provided ratio is 4.000000"), REFUSED),
        (RANGE.format("memory max limit to request ratio per Container is 2, but provided ratio is 3.000000"), ""),
        (RANGE.format("cpu max limit to request ratio per Container is 1, but no limit is specified or limit is 0"),
         REFUSED),
        (RANGE.format("maximum memory usage per Pod is 1Gi, but limit is 1280Mi"), COUNTS),
        (QUOTA.format("limits.memory=1280Mi,pods=1"), COUNTS),
        (QUOTA.format("cpu=1020m"), COUNTS),
        (QUOTA.format("limits.cpu=1"), ""),
        (QUOTA.format("pods=1"), ""),
        (QUOTA.format("requests.nvidia.com/gpu=8"), ""),
        ('pods "j-w0-0" is forbidden: no PriorityClass with name urgent was found', ""),
    ],
)  # fmt: skip
def test_the_explanation_of_a_denial_names_the_sidecar_where_its_resources_matter(
    denial: str, explanation: str
) -> None:
    found = explain_denial(denial, SIDECAR_RESOURCES, SIDECAR_CONTAINER)
    assert bool(found) == bool(explanation)
    assert explanation in found
    assert not found or found.endswith("by the chart's value sidecarResources)")


def test_the_explanation_of_a_denial_mentions_missing_resources() -> None:
    found = explain_denial(LACKING.format("limits.cpu for: pacekeeper-sidecar"), {}, SIDECAR_CONTAINER)
    assert "with no requests and limits" in found
    assert not explain_denial(QUOTA.format("limits.memory=1280Mi"), {}, SIDECAR_CONTAINER)

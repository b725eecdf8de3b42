"""What sidecars ask for, as the platform says it."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.resources import SIDECAR_RESOURCES
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
def test_what_the_api_server_would_refuse_is_refused_at_the_start(text: str, complaint: str) -> None:
    """Each worker's pod would be refused, and its job blamed."""
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
def test_tolerations_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="PACEKEEPER_PROBE_TOLERATIONS"):
        Settings.from_environment({"PACEKEEPER_PROBE_TOLERATIONS": text})

"""Probes of the simulated API server; tests/cluster/test_simulated_api.py probes the real one, too."""

from __future__ import annotations

import pytest

from testing.kubernetes.api_probes import PROBES, ApiProbe
from testing.simulated.simulated_api import SimulatedServer


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_passes(probe: ApiProbe) -> None:
    assert probe.run_on(SimulatedServer()) == probe.expected

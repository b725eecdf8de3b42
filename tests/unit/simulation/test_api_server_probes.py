"""What the simulated API server says to the probes; tests/cluster/test_simulated_api.py asks the real one, too."""

from __future__ import annotations

import pytest

from testing.kubernetes.api_probes import PROBES, ApiProbe
from testing.simulated.simulated_api import SimulatedServer


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe(probe: ApiProbe) -> None:
    assert probe.run_on(SimulatedServer()) == probe.expected

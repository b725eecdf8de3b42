"""Ranks record in Python, or with the part in C: by `PACEKEEPER_NATIVE`, as in the field."""

from __future__ import annotations

import pytest

from pacekeeper.observe import opening


@pytest.fixture(params=["0", "1"], ids=["Python", "C"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert opening.fast is not None, f"{opening.WHY_SLOW}; `make native` builds it"
    monkeypatch.setenv("PACEKEEPER_NATIVE", request.param)
    return str(request.param)

"""What is recorded is the same in Python and in C: tests of the one are tests of the other."""

from __future__ import annotations

import pytest

from pacekeeper_rank import recorder_factory


@pytest.fixture(params=["Python", "C"])
def python_or_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Leave RingWriter, Recorder, and CollectiveMonitor of the test's module, or replace them with the part in C."""
    if request.param == "C":
        fast = recorder_factory.native_recorder
        assert fast is not None, f"{recorder_factory.NATIVE_UNAVAILABLE_REASON}; `make native` builds it"
        classes = {
            "RingWriter": fast.NativeRing,
            "Recorder": fast.NativeRecorder,
            "CollectiveMonitor": fast.NativeCollectiveMonitor,
        }
        for name, fast_one in classes.items():
            monkeypatch.setattr(request.module, name, fast_one, raising=False)
    return str(request.param)

"""What is recorded is the same in Python and in C: tests of the one are tests of the other."""

from __future__ import annotations

import pytest

from pacekeeper.observe import opening


@pytest.fixture(params=["Python", "C"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's module has RingWriter, Recorder and Watcher as they are, or those with the part in C."""
    if request.param == "C":
        fast = opening.fast
        assert fast is not None, f"{opening.NATIVE_UNAVAILABLE_REASON}; `make native` builds it"
        classes = {"RingWriter": fast.NativeRing, "Recorder": fast.NativeRecorder, "Watcher": fast.NativeCollectiveMonitor}
        for name, fast_one in classes.items():
            monkeypatch.setattr(request.module, name, fast_one, raising=False)
    return str(request.param)

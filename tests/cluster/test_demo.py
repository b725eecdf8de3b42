"""The main job, as a user sees it: every fault of the demo is healed and the job completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.story import run

pytestmark = pytest.mark.usefixtures("operator")


def test_every_fault_is_healed_and_the_job_completes(tmp_path: Path) -> None:
    report = run(tmp_path)
    unhealed = [outcome for outcome in report.outcomes if not outcome.healed]
    assert not unhealed
    assert report.phase == "Complete"
    assert report.loss_before is not None
    assert report.loss_after is not None
    assert report.loss_after < report.loss_before - 1.0, "the training must have gone on through all of it"
    outcomes = {outcome.fault: outcome for outcome in report.outcomes}
    assert outcomes["straggler"].steps_lost == outcomes["slow link"].steps_lost == 0, "nobody was restarted for these"
    before, after = (float(number) for number in outcomes["slow link"].gain.removeprefix("slowdown ").split(" → "))
    assert after < before
    assert outcomes["link well again"].reason.startswith("AsyncEDiT → Sync")

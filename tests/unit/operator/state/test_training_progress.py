"""What the members of a job report about its training."""

from __future__ import annotations

from dataclasses import replace

from testing.operators.observations import (
    build_training,
    change_worker,
)


class TestRefused:
    def test_the_refusal_of_any_rank_is_that_of_the_job(self) -> None:
        assert build_training().progress.refusal == ""
        observation = change_worker(build_training(), "j-w2-0", heartbeat={"training": {"refused": "shares sum to 33"}})
        silent = tuple(replace(view, heartbeat=None) if view.name == "j-w0-0" else view for view in observation.workers)
        assert (
            replace(observation, workers=silent).progress.refusal == observation.progress.refusal == "shares sum to 33"
        )

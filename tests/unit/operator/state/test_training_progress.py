"""What the members of a job report about its training."""

from __future__ import annotations

from dataclasses import replace

from testing.operators.observations import (
    build_training,
    change_worker,
)


class TestRefused:
    def test_is_what_any_of_the_ranks_says(self) -> None:
        assert build_training().progress.refusal == ""
        world = change_worker(build_training(), "j-w2-0", heartbeat={"training": {"refused": "shares sum to 33"}})
        silent = tuple(replace(view, heartbeat=None) if view.name == "j-w0-0" else view for view in world.workers)
        assert replace(world, workers=silent).progress.refusal == world.progress.refusal == "shares sum to 33"

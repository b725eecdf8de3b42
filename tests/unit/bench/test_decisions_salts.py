"""Salts of the decisions bench: fresh scenarios, and batches that are judged as a whole."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from bench import decisions
from bench.scripts.decisions import draw, salts
from bench.scripts.decisions.outcome import run_policies
from bench.scripts.decisions.policies import OURS, Variant
from bench.scripts.decisions.salts import Batch, create_rng, read_batches, record_judgement
from bench.scripts.decisions.sampled_metrics import SampledMetrics
from bench.scripts.decisions.world import CALM, EQUAL_SHARES, CostModel

BATCH = Batch("a-salt-of-tests", {4: 1}, "2026-11-30")


@pytest.fixture
def locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with BATCH, in the place of the committed one."""
    path = tmp_path / "locked.json"
    item = {"salt": BATCH.salt, "counts": {"4": 1}, "date": BATCH.date, "judged": [], "looked": False}
    path.write_text(json.dumps({"batches": [item]}))
    for name in ("find_batch", "record_judgement"):
        monkeypatch.setattr(salts, name, partial(getattr(salts, name), path=path))
    return path


class TestDraws:
    def test_without_a_salt_draws_are_those_of_numpys_seed(self) -> None:
        assert create_rng(17, 4000).random() == np.random.default_rng((17, 4000)).random()

    def test_a_salt_draws_another_job_and_other_noise(self) -> None:
        plain, salted = draw.draw_scenario(4000, ranks=4), draw.draw_scenario(4000, ranks=4, salt="a")
        assert draw.draw_scenario(4000, ranks=4, salt="a") == salted
        assert draw.draw_scenario(4000, ranks=4, salt="b") != salted
        assert plain.job != salted.job
        assert plain.timeline != salted.timeline
        assert "of salt a" in salted.description
        assert draw.draw_healthy_scenario(1, 1.0, 4).job != draw.draw_healthy_scenario(1, 1.0, 4, salt="a").job
        job = replace(plain.job, noise=0.05)
        windows = []
        for scenario in (plain, replace(plain, salt="a")):
            metrics = SampledMetrics.from_scenario(scenario, CostModel(job))
            metrics.extend(0.0, EQUAL_SHARES, CALM)
            windows.append(metrics.build_windows(50.0)[0])
        assert windows[0].steps == windows[1].steps
        assert windows[0].compute_seconds != windows[1].compute_seconds


class TestBatches:
    def test_the_committed_batches_have_600_scenarios(self) -> None:
        for batch in read_batches():
            assert batch.counts == {4: 300, 64: 240, 1024: 60}
            assert len(set(batch.seeds)) == 600
            assert {seed // 1000 for seed in batch.seeds} == set(batch.counts)

    @pytest.mark.parametrize(
        ("judged", "looked", "is_spent"),
        [((), False, False), (("c1",), False, False), (("c1", "c1"), False, True), ((), True, True)],
    )
    def test_a_batch_is_spent_once_it_is_looked_at_or_judged_twice(
        self, judged: tuple[str, ...], looked: bool, is_spent: bool
    ) -> None:
        assert replace(BATCH, judged=judged, looked=looked).is_spent is is_spent

    def test_judgements_are_recorded(self, locked_file: Path) -> None:
        recorded = record_judgement(BATCH.salt, "c1", locked_file)
        assert (recorded,) == read_batches(locked_file)
        assert recorded == replace(BATCH, judged=("c1",))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"salt": "short"}, "12 or more"),
            ({"counts": {"4": 1001}}, "1 to 1000"),
            ({"counts": {"4": 0}}, "1 to 1000"),
        ],
    )
    def test_an_invalid_batch_is_refused(self, locked_file: Path, changes: dict[str, object], message: str) -> None:
        content = json.loads(locked_file.read_text())
        content["batches"][0] |= changes
        locked_file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            read_batches(locked_file)

    def test_two_batches_with_one_salt_are_refused(self, locked_file: Path) -> None:
        content = json.loads(locked_file.read_text())
        locked_file.write_text(json.dumps({"batches": 2 * content["batches"]}))
        with pytest.raises(ValueError, match="same salt"):
            read_batches(locked_file)


@pytest.mark.usefixtures("locked_file")
class TestSettings:
    def test_a_locked_salt_plays_its_batch(self) -> None:
        settings = decisions.read_settings({"SALT": BATCH.salt})
        assert (settings.batch, settings.sizes.seeds, settings.sizes.worlds) == (BATCH, [4000], None)

    @pytest.mark.parametrize("name", ["SEEDS", "CALM", "SENSITIVITY"])
    def test_single_scenarios_of_a_locked_batch_are_refused(self, name: str) -> None:
        with pytest.raises(SystemExit, match=f"leave {name} out"):
            decisions.read_settings({"SALT": BATCH.salt, name: "4000"})

    def test_a_batch_that_was_looked_at_is_played_like_any_salt(self, locked_file: Path) -> None:
        locked_file.write_text(locked_file.read_text().replace("false", "true"))
        settings = decisions.read_settings({"SALT": BATCH.salt, "SEEDS": "4000"})
        assert (settings.batch, settings.salt, settings.sizes.seeds) == (None, BATCH.salt, [4000])

    def test_another_salt_needs_seeds(self) -> None:
        with pytest.raises(SystemExit, match=r"^SALT=free: give SEEDS"):
            decisions.read_settings({"SALT": "free"})
        settings = decisions.read_settings({"SALT": "free", "SEEDS": "4000-4001"})
        assert (settings.salt, settings.batch) == ("free", None)


def test_of_a_locked_batch_only_aggregates_are_printed(locked_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class InlinePool:
        map = staticmethod(map)

    settings = replace(decisions.read_settings({"SALT": BATCH.salt}), variants={OURS: Variant(OURS)})
    pool = cast(ProcessPoolExecutor, InlinePool())
    first, second = (decisions.judge_batch(pool, settings, BATCH) for _ in range(2))
    printed = capsys.readouterr()
    scenario = draw.draw_scenario(4000, ranks=4, salt=BATCH.salt)
    for text in ("seed", scenario.kind, scenario.description):
        assert text not in printed.out + printed.err + json.dumps(first)
    (batch,) = read_batches(locked_file)
    assert len(batch.judged) == 2
    assert [found["holds"]["the batch is not spent"] for found in (first, second)] == [True, False]
    assert first["policies"][OURS]["mean"] == run_policies(scenario, settings.variants).compute_times(OURS)

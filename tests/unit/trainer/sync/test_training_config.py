"""When ranks meet, and what follows: pure decisions."""

from __future__ import annotations

import json

import pytest

from pacekeeper.sync.agreement import Directives, _decode_directives, _encode_directives
from pacekeeper.sync.progress import Progress
from pacekeeper.sync.training_config import (
    SampleSource,
    TrainingConfig,
    choose_sample_source,
    crosses_multiple,
    select_sync_mode,
    should_synchronize,
)
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers.length_cost import SequenceCost

SYNC, EDIT, ASYNC_EDIT = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT


def test_local_sgd_waits_for_its_warm_up_and_then_for_nothing() -> None:
    assert [select_sync_mode(EDIT, step, 100) for step in (0, 99, 100, 5000)] == [SYNC, SYNC, EDIT, EDIT]
    assert select_sync_mode(SYNC, 5000, 100) is SYNC


@pytest.mark.parametrize(
    ("before", "after", "every", "is_crossed"),
    [(9, 10, 10, True), (10, 11, 10, False), (8, 23, 10, True), (11, 19, 10, False), (0, 100, 0, False)],
)
def test_an_event_with_an_interval_in_steps_happens_at_the_first_ordinal_behind(
    before: int, after: int, every: int, is_crossed: bool
) -> None:
    assert crosses_multiple(before, after, every) is is_crossed


def test_a_rank_joins_at_the_boundary_that_is_nearest_to_the_clock() -> None:
    assert not should_synchronize(elapsed=1.4, step_seconds=1.0, seconds=2.0)
    assert should_synchronize(elapsed=1.6, step_seconds=1.0, seconds=2.0)
    assert should_synchronize(elapsed=2.5, step_seconds=0.0, seconds=2.0)
    # decided when the step begins
    assert should_synchronize(elapsed=0.6, step_seconds=1.0, seconds=2.0, in_flight_seconds=1.0)


@pytest.mark.parametrize(
    ("wanted", "samples", "limit", "following"),
    [
        (SYNC, 160, None, SampleSource(SYNC)),
        (EDIT, 160, 480, SampleSource(EDIT)),
        (ASYNC_EDIT, 160, None, SampleSource(ASYNC_EDIT, is_leased=True)),
        (ASYNC_EDIT, 164, 480, SampleSource(ASYNC_EDIT, is_leased=True, limit=464)),
        (ASYNC_EDIT, 464, 480, SampleSource(ASYNC_EDIT)),  # the last global batch belongs to all ranks
        (ASYNC_EDIT, 468, 480, SampleSource(ASYNC_EDIT, is_leased=True, limit=480)),
        (SYNC, 164, None, SampleSource(ASYNC_EDIT, is_leased=True, limit=176)),
        (EDIT, 175, 480, SampleSource(ASYNC_EDIT, is_leased=True, limit=176)),
    ],
)
def test_the_sample_source_follows_from_mode_and_shares(
    wanted: SyncMode, samples: int, limit: int | None, following: SampleSource
) -> None:
    assert choose_sample_source(wanted, samples, 16, limit) == following


@pytest.mark.parametrize("wanted", SyncMode)
@pytest.mark.parametrize("samples", range(0, 80, 3))
@pytest.mark.parametrize("batch", [1, 7, 16])
def test_the_samples_end_exactly_at_the_limit(wanted: SyncMode, samples: int, batch: int) -> None:
    """With any rest of the leases, global batches are dealt from multiples on, and no rank goes beyond the limit."""
    limit = 5 * batch
    while samples < limit:
        following = choose_sample_source(wanted, samples, batch, limit)
        if following.is_leased:
            assert following.limit is not None
            assert samples < following.limit <= limit
            samples = following.limit
        else:
            assert samples % batch == 0
            samples += batch
    assert samples == max(samples, limit)


def test_progress_is_exact_at_ordinals_and_counts_on_in_between() -> None:
    progress = Progress()
    progress.begin_round(global_batch=16)
    for _ in range(3):
        progress.count_step(own_samples=4)
    assert (progress.step, progress.samples, progress.own_samples) == (3, 48, 12)
    progress.settle(used=40)
    assert (progress.step, progress.samples, progress.own_samples) == (2, 40, 12)
    progress.count_step(own_samples=4)
    progress.settle(used=24)
    assert (progress.step, progress.samples) == (4, 64)


def test_a_config_is_the_same_after_its_checkpoint() -> None:
    progress = Progress(training_config=TrainingConfig(ASYNC_EDIT, 3, 0.5, 7, (9, 7), (1e-3, 0.0, 2.5e-9)))
    restored = Progress()
    restored.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert restored.training_config == progress.training_config
    assert restored.training_config.cost == SequenceCost(1e-3, 0.0, 2.5e-9)
    assert TrainingConfig().cost is None


@pytest.mark.parametrize("config", [TrainingConfig(), TrainingConfig(EDIT, 3, 0.5, 7, (9, 7), (1e-3, 0.0, 2.5e-9))])
def test_directives_are_the_same_after_the_exchange(config: TrainingConfig) -> None:
    directives = Directives(config, 5, 4, True, 50)
    assert _decode_directives(_encode_directives(directives, world_size=2)) == directives


def test_another_global_batch_continues_from_the_same_step() -> None:
    progress = Progress(training_config=TrainingConfig(EDIT, shares=(9, 7)))
    progress.begin_round(global_batch=16)
    progress.settle(used=10 * 16)
    restored = Progress()
    restored.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert restored.training_config == progress.training_config
    older = progress.state_dict()
    del older["training_config"]["sequence_cost"]
    restored.load_state_dict(older)
    assert restored.training_config == progress.training_config, "of a checkpoint that has no cost of sequences"
    restored.begin_round(global_batch=24)
    assert (restored.step, restored.compute_samples_at(12)) == (10, 160 + 2 * 24)
    restored.settle(used=2 * 24)
    assert restored.step == 12

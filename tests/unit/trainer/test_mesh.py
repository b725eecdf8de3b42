"""With which numbers of ranks a job with a given mesh can train."""

from __future__ import annotations

import pytest

from pacekeeper.job_settings import count_replica_ranks, resolve_mesh_shape
from pacekeeper_analysis.errors import InputError


@pytest.mark.parametrize(
    ("mesh", "least"),
    [
        ({"sync": -1}, 1),
        ({"sync": -1, "shard": 4}, 4),
        ({"shard": -1}, 8),  # one replica: a part of it is lost with any rank
        ({"sync": 2, "shard": -1}, 8),  # whose parts would be others with fewer ranks
        ({"sync": 2, "shard": 4}, 8),  # with fewer ranks there is no such mesh
    ],
)
def test_supported_numbers_of_ranks_follow_from_the_mesh(mesh: dict[str, int], least: int) -> None:
    assert count_replica_ranks(mesh, 8) == least
    resolve_mesh_shape(mesh, least)
    if least < 8:
        resolve_mesh_shape(mesh, 3 * least)


def test_other_numbers_of_ranks_are_rejected() -> None:
    with pytest.raises(InputError, match="does not fit 6 ranks"):
        resolve_mesh_shape({"sync": -1, "shard": 4}, 6)

"""Groups of ranks as they travel."""

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.communicators import (
    Communicator,
    check_communicators_size,
    parse_ranks,
    truncate_communicators,
)
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport
from pacekeeper_rank.collectives.communicators import format_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 3, 8), "0-3,8"),
        ((0, 4, 8, 12), "0-12:4"),
        ((5, 2), "5,2"),
        ((0, 2), "0,2"),
        (tuple(range(10_000)), "0-9999"),
    ],
)
def test_ranks_are_written_in_runs_and_read_again(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "0-4,2",
        "0-8:2,4-6:2",
        "0-70000:2,1-70001:2,5-70005:2",
        "3-1",
        "0-",
        "-1",
        "0-9999999",
        "0-8:0",
        "0-4,3",
        "1,1",
        "0-99999999999",
    ],
)
def test_an_invalid_group_is_rejected(text: str) -> None:
    with pytest.raises(InputError):
        Communicator(1, text)


def test_interleaved_groups_are_supported() -> None:
    assert Communicator(1, "0-6:2,1-7:2").ranks == (0, 2, 4, 6, 1, 3, 5, 7)


def test_groups_of_one_stride_may_interleave_however_large_they_are() -> None:
    assert Communicator(1, "0-99998:2,1-99999:2").size == 100_000


def test_a_job_has_no_groups_of_ranks_beyond_its_own() -> None:
    group = Communicator(1, "0-1048575")
    assert group.fits_world_size(1 << 20)
    assert not group.fits_world_size(8)


def test_the_members_in_a_message_are_limited_and_the_sender_respects_it() -> None:
    long = [Communicator(number, ",".join(map(str, range(0, 1500, 2)))) for number in range(1, 65)]
    fit = truncate_communicators(long)
    assert 0 < len(fit) < len(long)
    check_communicators_size({"communicators": [vars(each) for each in fit]})
    with pytest.raises(InputError, match="communicators"):
        check_communicators_size({"communicators": [vars(each) for each in long]})
    for kind in (FaultReport, Evidence):
        body = {"communicators": [vars(each) for each in long]}
        with pytest.raises(InputError, match="characters"):
            kind.from_json(body)

"""The policy of GPU health: each row of the tables, and metrics that are missing, fall, or are no sign."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures.finding import FaultClass
from pacekeeper_analysis.failures.gpu_health import (
    GPU_SIGN_MEANINGS,
    GpuSample,
    GpuSign,
    XidOrigin,
    classify_xid,
    compute_counter_rise,
    describe_xid,
    examine_gpu,
    list_gpu_signs,
)
from pacekeeper_analysis.protocol.reports import MAX_WORKER_GPUS, GpuHealth, Heartbeat

BUSY = GpuSample(
    taken_at=0.0,
    uncorrected_errors=4,
    rows_pending=False,
    rows_failed=False,
    slowdown=0,
    clock=1800,
    clock_maximum=2000,
    state=0,
    pcie_replays=1000,
    pcie_width=16,
    pcie_width_maximum=16,
    pcie_generation=5,
    pcie_generation_maximum=5,
    nvlink_errors=7,
    nvlinks=18,
)


def build_samples(**last: Any) -> list[GpuSample]:
    """Ten minutes of a sound GPU, every five seconds; in the last minute with these figures."""
    return [replace(BUSY, taken_at=5.0 * i, **(last if i >= 108 else {})) for i in range(121)]


def examine_samples(given: list[GpuSample], busy_first: GpuSample | None = BUSY) -> GpuHealth:
    return examine_gpu("GPU-1", given, busy_first)


class TestSigns:
    def test_a_sound_gpu_has_no_sign(self) -> None:
        assert examine_samples(build_samples()) == GpuHealth("GPU-1", pcie_width=16, pcie_generation=5, clock_share=0.9)

    def test_an_unknown_gpu_has_no_sign(self) -> None:
        assert examine_samples([GpuSample(0.0), GpuSample(5.0)], None) == GpuHealth("GPU-1")

    @pytest.mark.parametrize(
        ("sign", "figures"),
        [
            (GpuSign.ROWS_PENDING, {"rows_pending": True}),
            (GpuSign.ROWS_FAILED, {"rows_failed": True}),
            (GpuSign.MEMORY_ERRORS, {"uncorrected_errors": 5}),
            (GpuSign.PCIE_REPLAYS, {"pcie_replays": 1080}),
            (GpuSign.NVLINK_ERRORS, {"nvlink_errors": 17}),
            (GpuSign.NVLINK_DOWN, {"nvlinks": 17}),
            (GpuSign.PCIE_FELL, {"pcie_width": 8}),
            (GpuSign.PCIE_FELL, {"pcie_generation": 3}),
        ],
    )
    def test_each_sign_is_found_by_its_metric_only(self, sign: GpuSign, figures: dict[str, Any]) -> None:
        assert examine_samples(build_samples(**figures)).signs == (sign,)

    @pytest.mark.parametrize(
        "figures",
        [
            {"uncorrected_errors": 0},
            {"pcie_replays": 1079},
            {"pcie_replays": 0},
            {"nvlink_errors": 16},
            {"nvlinks": None},
            {"pcie_width": 8, "state": 8},
            {"pcie_generation": 1, "state": 8},
            {"pcie_width": 0},
            {"pcie_width": 16, "pcie_width_maximum": None},
            {"slowdown": 0x1 | 0x2 | 0x4 | 0x10 | 0x20 | 0x100},
        ],
        ids=str,
    )
    def test_a_metric_below_its_limit_falling_missing_or_idle_is_no_sign(self, figures: dict[str, Any]) -> None:
        assert examine_samples(build_samples(**figures)).signs == ()

    def test_a_link_that_was_low_from_the_start_is_the_configuration(self) -> None:
        low = replace(BUSY, pcie_width=8)
        assert examine_samples(build_samples(pcie_width=8), busy_first=low).signs == (GpuSign.PCIE_LOW,)
        assert GPU_SIGN_MEANINGS[GpuSign.PCIE_LOW].fault is FaultClass.CONFIGURATION
        assert GPU_SIGN_MEANINGS[GpuSign.PCIE_FELL].fault is FaultClass.HARDWARE

    def test_a_link_that_is_low_for_a_moment_is_no_sign(self) -> None:
        given = build_samples()
        assert examine_samples([*given[:-1], replace(given[-1], pcie_width=8)]).signs == ()
        assert examine_samples([replace(BUSY, pcie_width=8)]).signs == ()

    @pytest.mark.parametrize("reason", [0x8, 0x40, 0x80], ids=["slowdown", "heat", "power brake"])
    def test_throttling_is_a_sign_from_six_minutes_of_ten_on(self, reason: int) -> None:
        def examine_minutes(count: int) -> GpuHealth:
            return examine_samples(
                [replace(s, slowdown=reason if s.taken_at % 60 == 30 and s.taken_at < 60 * count else 4) for s in given]
            )

        given = build_samples()
        assert (examine_minutes(5).signs, examine_minutes(5).throttled_minutes) == ((), 5)
        assert examine_minutes(6).signs == (GpuSign.THROTTLED,)

    def test_one_bad_minute_is_no_throttling_however_often_it_is_seen(self) -> None:
        assert examine_samples(build_samples(slowdown=0x40)).signs == ()

    def test_some_signs_are_warnings_and_some_are_witnesses_only(self) -> None:
        assert set(GPU_SIGN_MEANINGS) == set(GpuSign)
        witnesses = {sign for sign, meaning in GPU_SIGN_MEANINGS.items() if not meaning.is_warning}
        assert witnesses == {GpuSign.THROTTLED, GpuSign.SLOW_CLOCK, GpuSign.PCIE_FELL, GpuSign.PCIE_LOW}


class TestRise:
    @pytest.mark.parametrize(
        ("values", "risen"),
        [
            ([], 0),
            ([None, None], 0),
            ([5], 0),
            ([5, 5, 9], 4),
            ([None, 5, None, 9, None], 4),
            ([9, 0, 9], 0),
            ([9, 0, 4], 0),
            ([9, 0, 12], 3),
            ([0, 2**64 - 1], 0),
            ([5, 4294967295, 0x7FFFFFF0, 7], 2),
        ],
    )
    def test_only_a_rise_above_the_first_value_counts(self, values: list[int | None], risen: int) -> None:
        """A driver that is loaded again counts from nothing; a drop to nothing and back is no rise."""
        assert compute_counter_rise(values) == risen


class TestXids:
    @pytest.mark.parametrize("xid", [46, 48, 62, 63, 64, 74, 79, 92, 95, 119, 120, 136, 140, 143, 154, 156, 158])
    def test_xids_of_the_hardware_are_classified(self, xid: int) -> None:
        assert classify_xid(xid) is XidOrigin.HARDWARE

    @pytest.mark.parametrize("xid", [13, 31, 32, 43, 45, 68, 69, 137])
    def test_xids_of_the_application_are_classified(self, xid: int) -> None:
        assert classify_xid(xid) is XidOrigin.APPLICATION

    @pytest.mark.parametrize("xid", range(144, 151))
    def test_xids_of_an_nvlink_of_blackwell_are_classified(self, xid: int) -> None:
        assert classify_xid(xid) is XidOrigin.LINK
        assert "NVLink" in describe_xid(xid)

    @pytest.mark.parametrize("xid", [0, 110, 155, 157, 173, 9999])
    def test_unknown_xids_are_no_application_errors(self, xid: int) -> None:
        """A newer driver has newer numbers: they are no reason to look for a fault in the script."""
        assert classify_xid(xid) is XidOrigin.UNKNOWN

    def test_a_contained_memory_error_costs_one_process(self) -> None:
        assert classify_xid(94) is XidOrigin.CONTAINED

    def test_xids_are_described(self) -> None:
        assert (describe_xid(79), describe_xid(9999)) == ("XID 79 (GPU has fallen off the bus)", "XID 9999")


class TestReport:
    def test_the_report_travels_in_the_heartbeat(self) -> None:
        beat = Heartbeat(gpus=(examine_samples(build_samples(pcie_replays=1080)),))
        assert Heartbeat.from_json(beat.to_json()) == beat
        assert beat.gpu_signs == (("GPU-1", ("PcieReplays",)),)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"gpu": 7}, "gpu"),
            ({"signs": ["x" * 41]}, "signs"),
            ({"signs": ["x"] * 17}, "signs"),
            ({"clock_share": 1.5}, "clock_share"),
            ({"clock_share": float("nan")}, "clock_share"),
            ({"temperature": -1}, "temperature"),
            ({"pcie_replays": 2**60}, "pcie_replays"),
        ],
    )
    def test_a_value_out_of_bounds_is_named(self, changes: dict[str, Any], field: str) -> None:
        with pytest.raises(InputError, match=rf"Heartbeat\.gpus\[0\]\.{field}"):
            Heartbeat.from_json({"gpus": [{"gpu": "GPU-1", **changes}]})

    def test_too_many_gpus_are_rejected(self) -> None:
        with pytest.raises(InputError, match="more than the limit of 32"):
            Heartbeat.from_json({"gpus": [{"gpu": "GPU-1"}] * (MAX_WORKER_GPUS + 1)})

    def test_signs_are_described(self) -> None:
        report = GpuHealth(
            "GPU-1",
            signs=("Throttled", "PcieLow", "RowsPending", "SomethingNew"),
            throttled_minutes=7,
            clock_share=0.62,
            temperature=91,
            power=350.4,
            pcie_width=8,
            pcie_generation=4,
        )
        assert [sign.message for sign in list_gpu_signs([report])] == [
            "GPU-1: the hardware slows its clocks down for heat or power"
            " (in 7 of the last 10 minutes, 62% of its clock, 91 °C, 350 W)",
            "GPU-1: its PCIe link has been below its maximum from the start (8 lanes of generation 4)",
            "GPU-1: memory rows wait for a reset of the GPU to be remapped",
        ]

    @pytest.mark.parametrize("sign", GpuSign)
    def test_each_sign_has_a_description(self, sign: GpuSign) -> None:
        (shown,) = list_gpu_signs([GpuHealth("GPU-1", signs=(str(sign),))])
        assert shown.message.startswith(f"GPU-1: {GPU_SIGN_MEANINGS[sign].description}")
        assert shown.meaning is GPU_SIGN_MEANINGS[sign]

"""The content of the page, from a window that real ranks have recorded, and from extreme windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.command import main
from pacekeeper_analysis.profiling.localize import localize_in_table
from pacekeeper_analysis.profiling.page import MAX_PAGE_BYTES, ProfilePage, write_profile_page
from pacekeeper_analysis.profiling.pattern import FoldedStack, ProcessSetup, ProfileAnswer, RankPattern
from pacekeeper_analysis.profiling.report import (
    OMITTED_STACKS,
    build_flame_graph,
    build_report_data,
    compute_usual_range,
    render_profile_html,
)
from pacekeeper_analysis.profiling.table import read_table
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern

RECORDED = Path(__file__).with_name("recorded.json")
"""Four ranks over gloo, of which rank 1's `color` took twelve times as long from a step on."""


def build_page(now: Sequence[RankPattern], early: Sequence[RankPattern] | None = None) -> ProfilePage:
    """Return what the operator stores of the window of these ranks."""
    sent = build_answers([*now], None if early is None else [*early])
    table = read_table(sent)
    return ProfilePage.from_json(write_profile_page(localize_in_table(table, len(now)), table, dict(sent)))


def build_ranks(count: int, slow: int | None = 1, step: float = 0.6) -> list[RankPattern]:
    return [
        build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == slow else HEALTHY_WORK, step)
        for rank in range(count)
    ]


def list_paths(shown: dict[str, Any], place: int) -> dict[tuple[str, ...], int]:
    """Return the samples of each path of a pattern's flame graph."""
    found = dict[tuple[str, ...], int]()

    def walk_node(node: list[Any], before: tuple[str, ...]) -> None:
        name, counts, callees = node
        found[*before, shown["names"][name]] = counts
        for callee in callees:
            walk_node(callee, (*before, shown["names"][name]))

    walk_node(shown["patterns"][place]["tree"], ())
    return found


class TestRecorded:
    def test_the_suspect_stands_first_and_its_function_has_grown(self) -> None:
        shown = build_report_data(ProfilePage.from_json(RECORDED.read_bytes()), "why")
        assert (shown["verdict"]["fault"], shown["verdict"]["culprit"]) == ("Code", "./train.py:color on rank 1")
        labels = [one["label"] for one in shown["patterns"]]
        assert labels[:2] == ["rank 1 (suspect)", "rank 1, early steps"]
        usual = labels.index("rank 0")
        color = ("(a whole step)", "./train.py:train", "./train.py:augment", "./train.py:color")
        slow, fast = list_paths(shown, 0), list_paths(shown, usual)
        assert slow[color] > 10 * fast.get(color, 0) > 0
        for counts in (slow, fast):  # callees have no more samples than their caller
            below = sum(count for path, count in counts.items() if len(path) == 2)
            assert below == counts["(a whole step)",]

    def test_the_point_of_the_suspect_lies_outside_the_usual_range(self) -> None:
        plot = build_report_data(ProfilePage.from_json(RECORDED.read_bytes()), "why")["plots"][0]
        assert plot["function"] == "./train.py:color"
        for rank, share, use, _ in plot["points"]:
            _, low, high = min(plot["expected"], key=lambda row: abs(row[0] - use))
            assert (low <= share <= high) == (rank != 1)

    def test_the_file_needs_nothing_else(self) -> None:
        text = render_profile_html(ProfilePage.from_json(RECORDED.read_bytes()), "why")
        assert "/*" + "DATA*/" not in text
        assert "default-src 'none'" in text
        assert "src=" not in text
        assert "href=" not in text


class TestFlame:
    def test_stacks_with_the_same_callers_lie_together(self) -> None:
        root = build_flame_graph(
            [FoldedStack(3, ("a", "b")), FoldedStack(2, ("a", "c")), FoldedStack(4, ("a",))], sample_count=10
        )
        assert (root.sample_count, root.callees["a"].sample_count, root.callees["a"].callees["b"].sample_count) == (
            10,
            9,
            3,
        )
        assert root.callees[OMITTED_STACKS].sample_count == 1

    def test_recursion_is_a_path(self) -> None:
        root = build_flame_graph([FoldedStack(3, ("a", "a", "a"))], sample_count=3)
        assert root.callees["a"].callees["a"].callees["a"].sample_count == 3

    def test_frames_that_all_stacks_begin_with_are_left_out(self) -> None:
        shown = build_report_data(ProfilePage.from_json(RECORDED.read_bytes()), "why")
        assert shown["outer"][0] == "./record.py:<module>"
        assert [shown["names"][callee[0]] for callee in shown["patterns"][0]["tree"][2]] == ["./train.py:train"]


class TestUsualRange:
    def test_the_range_is_that_of_the_localization(self) -> None:
        shares, busy = np.array([0.30, 0.31, 0.29, 0.35]), np.array([0.27, 0.28, 0.26, 0.10])
        share, part = 0.305, 0.265
        spread = max(1.48 * float(np.median(np.abs(shares - share))), 0.02)
        rows = compute_usual_range(shares, busy)
        assert rows
        for use, low, high in rows:
            for bound in (low, high):
                if 0 < bound < 1:
                    assert abs(bound - share) + abs(bound * use - part) == pytest.approx(5 * spread, abs=1e-4)
            middle = (low + high) / 2
            assert abs(middle - share) + abs(middle * use - part) <= 5 * spread + 1e-4

    def test_a_use_far_from_the_usual_one_is_never_usual(self) -> None:
        rows = compute_usual_range(np.full(4, 0.9), np.full(4, 0.9))
        assert [use for use, *_ in rows if use < 0.8] == []

    def test_no_ranks_have_no_range(self) -> None:
        assert compute_usual_range(np.zeros(0), np.zeros(0)) == []


class TestComparison:
    def test_all_ranks_equally_slow_are_compared_with_their_early_steps(self) -> None:
        works = [build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, 0.6) for rank in range(3)]
        shown = build_report_data(build_page(works, build_ranks(3, slow=None, step=0.4)), "why")
        assert shown["verdict"]["culprit"] == "train.py:augment on all ranks"
        assert not any(one["suspect"] for one in shown["patterns"])
        plot = shown["plots"][0]
        assert (plot["function"], plot["than"]) == ("train.py:augment", "the early steps")
        assert all(share > max(high for _, _, high in plot["expected"]) for _, share, _, _ in plot["points"])

    def test_a_job_of_one_rank_without_early_steps_is_shown_without_a_comparison(self) -> None:
        shown = build_report_data(build_page(build_ranks(1, slow=None)), "why")
        assert [one["label"] for one in shown["patterns"]] == ["rank 0"]
        assert shown["verdict"]["fault"] == "Unknown"

    def test_a_page_without_answers_is_built(self) -> None:
        table = read_table([])
        shown = build_report_data(
            ProfilePage.from_json(write_profile_page(localize_in_table(table, 4), table, {})), "why"
        )
        assert (shown["patterns"], shown["plots"], shown["reported"]) == ([], [], 0)

    def test_known_settings_are_shown(self) -> None:
        setup = ProcessSetup(threads=1, throttled=0.5, variables=("OMP_NUM_THREADS=1",))
        shown = build_report_data(build_page([replace(build_ranks(1)[0], setup=setup)]), "why")
        assert shown["patterns"][0]["setup"] == [
            ("threads of an operation", "1"),
            ("throttled by its quota, of the periods", "50%"),
            ("OMP_NUM_THREADS", "1"),
        ]


class TestHostile:
    def test_markup_stays_text(self) -> None:
        evil = "</script><!--<script><img src=x onerror=alert(1)>"
        one = replace(build_ranks(1)[0], names=(evil, *build_ranks(1)[0].names[1:]))
        text = render_profile_html(build_page([one]), evil)
        assert "<img" not in text
        assert text.count("<script>") == text.count("</script>") == 1
        assert text.count("<!--") == 0

    def test_deep_stacks_of_long_names_stay_small(self) -> None:
        names = tuple(f"{place:03}" + "x" * 157 for place in range(12))
        stacks = tuple((1, *((seed * place) % 12 for place in range(64))) for seed in range(1, 25))
        one = replace(
            build_pattern(0, HEALTHY_WORK, 0.5), names=build_pattern(0, HEALTHY_WORK, 0.5).names + names, folded=stacks
        )
        assert len(render_profile_html(build_page([one]), "why")) < 300_000

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"localization": None}, "localization: must be an object"),
            ({"localization": {"finding": {"fault": "Witchcraft", "culprit": ""}}}, "fault: 'Witchcraft' is not one"),
            ({"plots": [{}]}, r"plots\[0\]"),
            ({"plots": {}}, "plots: must be a list"),
            ({"answers": [7]}, r"answers\[0\]: must be a string"),
            ({"answers": ["{}"]}, r"answers\[0\].pattern"),
        ],
    )
    def test_an_invalid_page_is_rejected_by_name(self, change: dict[str, Any], message: str) -> None:
        content = json.loads(RECORDED.read_bytes()) | change
        with pytest.raises(InputError, match=message):
            ProfilePage.from_json(json.dumps(content).encode())

    def test_a_plot_needs_a_figure_for_each_rank(self) -> None:
        content = json.loads(RECORDED.read_bytes())
        content["plots"][0]["busy"].pop()
        with pytest.raises(InputError, match=r"plots\[0\]\.busy: must have a number for each of the 4 ranks"):
            ProfilePage.from_json(json.dumps(content).encode())

    @pytest.mark.parametrize("data", [b"", b"[]", b"[" * 100_000, b"\xff", b" " * (MAX_PAGE_BYTES + 1)])
    def test_bytes_that_are_no_page_are_rejected(self, data: bytes) -> None:
        with pytest.raises(InputError, match="page: "):
            ProfilePage.from_json(data)


class TestCommand:
    def test_the_output_of_kubectl_is_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        body = {"metadata": {"name": "gpt-r3-straggler-0a1b2"}, "spec": {"content": RECORDED.read_text()}}
        (tmp_path / "window.json").write_text(json.dumps(body))
        assert main([str(tmp_path / "window.json"), "-o", str(tmp_path / "page.html")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "gpt-r3-straggler-0a1b2"
        assert "./train.py:color on rank 1" in lines[2]
        assert lines[-1].startswith("to do: look at what ./train.py:color does")
        assert "gpt-r3-straggler-0a1b2" in (tmp_path / "page.html").read_text()

    def test_the_plain_content_is_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(RECORDED)]) == 0
        assert "./train.py:color on rank 1" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["no", "{}", '{"spec": {}}', '{"kind": "List", "spec": 7}'])
    def test_an_unreadable_page_is_reported(
        self, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "window.json").write_text(text)
        assert main([str(tmp_path / "window.json")]) == 2
        assert capsys.readouterr().err.startswith("pacekeeper profile: ")

    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        assert main([str(tmp_path / "nothing")]) == 2


def test_an_answer_reaches_the_page_unchanged() -> None:
    (first, *_) = ProfilePage.from_json(RECORDED.read_bytes()).answers
    assert ProfileAnswer.from_bytes(first.to_bytes()).pattern.stacks == first.pattern.stacks

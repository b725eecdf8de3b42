"""What ranks and people hand to the analysis: profiles, fabrics, groups, collectives, NCCL's output."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pacekeeper.launcher.health.nccl_ras import shorten_text, summarize_status
from pacekeeper_analysis.fabric import command as fabric_command
from pacekeeper_analysis.fabric.text import render_text
from pacekeeper_analysis.profiling import command as profile_command
from pacekeeper_analysis.profiling.localize import localize_fault
from pacekeeper_analysis.profiling.page import write_profile_page
from pacekeeper_analysis.profiling.pattern import ProfileAnswer
from pacekeeper_analysis.profiling.table import read_table
from pacekeeper_analysis.protocol.communicators import parse_entered, parse_ranks
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.operations import OPERATION, decode_operations, encode_operations
from pacekeeper_rank.collectives.communicators import format_ranks
from pacekeeper_rank.collectives.flight_recorder import find_oldest_collective
from testing.training.patterns import HEALTHY_WORK, LOAD_FUNCTION, build_answers, build_pattern

from ..border import Border, call_directly
from ..mutations import mutate_text, mutate_word, to_bytes

PATTERNS = [
    build_pattern(rank, {**HEALTHY_WORK, LOAD_FUNCTION: 0.3 if rank == 2 else 0.03}, 0.7, samples=8)
    for rank in range(4)
]


def build_pattern_documents() -> list[Any]:
    return [json.loads(data) for _, data in build_answers(PATTERNS, PATTERNS)]


def read_answer(data: bytes) -> object:
    """One rank's answer, and what a table makes of it with the others'; it affects no other rank."""
    others = [(rank, answer) for rank, answer in build_answers(PATTERNS, PATTERNS) if rank]
    answers = [(0, to_bytes(data)), *others]
    assert set(read_table(answers).ranks.tolist()) >= {1, 2, 3}
    localize_fault(answers, 4)
    return ProfileAnswer.from_bytes(to_bytes(data)).pattern.step_seconds


def build_window() -> Any:
    answers = build_answers(PATTERNS, PATTERNS)
    return json.loads(write_profile_page(localize_fault(answers, 4), read_table(answers), dict(answers)))


def read_window(data: Any) -> object:
    return profile_command.parse_profile_window(to_bytes(data))[0].localization


FABRIC = {
    "metadata": {"name": "pods"},
    "spec": {"spines": 2, "planes": 2},
    "status": {
        "leaves": 1,
        "maxLoad": 3,
        "links": [{"leaf": "l1", "spine": "s1", "up": 1, "down": 0, "state": "Up"}],
        "conditions": [{"type": "InForce", "status": "True", "reason": "Oldest", "message": ""}],
    },
}


def render_fabric(data: Any) -> object:
    views = fabric_command.parse_fabrics(to_bytes(data))
    return render_text(fabric_command.choose_fabric(views))


def check_ranks(text: str) -> object:
    ranks = parse_ranks(text)
    assert parse_ranks(format_ranks(ranks)) == ranks
    return ranks


def build_operations() -> list[str]:
    operations = np.zeros(3, OPERATION)
    operations["step"], operations["end"] = (7, 8, 9), 0.5
    return [encode_operations(operations)]


def summarize_ras(data: Any) -> object:
    return shorten_text(summarize_status(parse_json(to_bytes(data))))


RAS = {
    "communicators": [
        {
            "hash": "0xabc",
            "size": 2,
            "missing_ranks": [{"rank": 1, "host": "h", "pid": 5, "status": {"considered_dead": True}}],
            "ranks": [
                {
                    "rank": 0,
                    "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                    "collective_counts": {"AllReduce": 12},
                }
            ],
        }
    ]
}
FLIGHT = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "record_id": 3,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": 4,
            "profiling_name": "nccl:all_reduce",
            "state": "started",
            "is_p2p": False,
            "retired": False,
        }
    ],
}


def read_flight_recorder(data: Any) -> object:
    return find_oldest_collective(to_bytes(data))


BORDERS = [
    Border("patterns", build_pattern_documents, mutate_text, call_directly(read_answer), cases=100),
    Border("behavior windows", lambda: [build_window()], mutate_text, call_directly(read_window), cases=100),
    Border("fabrics, by people", lambda: [FABRIC, {"items": [FABRIC]}], mutate_text, call_directly(render_fabric)),
    Border("ranks", lambda: ["0-7,9,16-64:8"], mutate_word, call_directly(check_ranks), cases=300),
    Border("groups entered", lambda: ["1f:12,7:3"], mutate_word, call_directly(parse_entered), cases=300),
    Border("collectives", build_operations, mutate_word, call_directly(decode_operations), cases=300),
    Border("NCCL's RAS", lambda: [RAS], mutate_text, call_directly(summarize_ras)),
    Border("NCCL's flight recorder", lambda: [FLIGHT], mutate_text, call_directly(read_flight_recorder), refusals=()),
]

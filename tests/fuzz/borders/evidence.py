"""What ranks and people hand to the analysis: behaviour windows, fabrics, groups, collectives, NCCL's words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pacekeeper.launcher.ras import shorten_text, summarize_status
from pacekeeper.observe.flight import find_oldest_collective
from pacekeeper_analysis.behaviour import command as behaviour
from pacekeeper_analysis.behaviour.localise import localize_fault
from pacekeeper_analysis.behaviour.page import write_profile_page
from pacekeeper_analysis.behaviour.pattern import ProfileAnswer
from pacekeeper_analysis.behaviour.table import read_table
from pacekeeper_analysis.communicators import format_ranks, parse_entered, parse_ranks
from pacekeeper_analysis.fabric import command as fabric
from pacekeeper_analysis.fabric.text import render_text as fabric_text
from pacekeeper_analysis.operations import OPERATION, decode_operations, encode_operations
from pacekeeper_analysis.reading import parse_json
from tests.support.patterns import LOAD_FUNCTION, HEALTHY_WORK, build_answers, build_pattern

from ..border import Border, by
from ..mutations import text, word, written

PATTERNS = [build_pattern(rank, {**HEALTHY_WORK, LOAD_FUNCTION: 0.3 if rank == 2 else 0.03}, 0.7, samples=8) for rank in range(4)]


def patterns() -> list[Any]:
    return [json.loads(data) for _, data in build_answers(PATTERNS, PATTERNS)]


def answered(data: bytes) -> object:
    """One rank's answer, and what a table makes of it beside the others'; it costs no other rank."""
    others = [(rank, sent) for rank, sent in build_answers(PATTERNS, PATTERNS) if rank]
    everybody = [(0, written(data)), *others]
    assert set(read_table(everybody).ranks.tolist()) >= {1, 2, 3}
    localize_fault(everybody, 4)
    return ProfileAnswer.from_bytes(written(data)).pattern.step_seconds


def window() -> Any:
    sent = build_answers(PATTERNS, PATTERNS)
    return json.loads(write_profile_page(localize_fault(sent, 4), read_table(sent), dict(sent)))


def looked_at(data: Any) -> object:
    return behaviour.parse_profile_window(written(data))[0].localisation


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


def shown(data: Any) -> object:
    views = fabric.parse_fabrics(written(data))
    return fabric_text(fabric.choose_fabric(views))


def ranks(text: str) -> object:
    found = parse_ranks(text)
    assert parse_ranks(format_ranks(found)) == found
    return found


def operations() -> list[str]:
    told = np.zeros(3, OPERATION)
    told["step"], told["end"] = (7, 8, 9), 0.5
    return [encode_operations(told)]


def asked(data: Any) -> object:
    return shorten_text(summarize_status(parse_json(written(data))))


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


def watched(data: Any) -> object:
    return find_oldest_collective(written(data))


BORDERS = [
    Border("patterns", patterns, text, by(answered), cases=100),
    Border("behaviour windows", lambda: [window()], text, by(looked_at), cases=100),
    Border("fabrics, by people", lambda: [FABRIC, {"items": [FABRIC]}], text, by(shown)),
    Border("ranks", lambda: ["0-7,9,16-64:8"], word, by(ranks), cases=300),
    Border("groups entered", lambda: ["1f:12,7:3"], word, by(parse_entered), cases=300),
    Border("collectives", operations, word, by(decode_operations), cases=300),
    Border("NCCL's RAS", lambda: [RAS], text, by(asked)),
    Border("NCCL's flight recorder", lambda: [FLIGHT], text, by(watched), refusals=()),
]

"""Plan and bookkeeping: what an operator before this one has written, or a person has edited; and what launchers and
ranks read of the plan."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import Any

from pacekeeper.launcher.plans import PlanFile
from pacekeeper.modes.follower import parse_plan
from pacekeeper.sidecar.sidecar import _read_stored_plan
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import (
    EvidencePart,
    Hop,
    Paths,
    Plan,
    PlannedPath,
    ProbeRequest,
    ProbeTarget,
    ProfileRequest,
)
from pacekeeper_operator import ledger, legacy
from pacekeeper_operator.decide.think import evaluate_job
from tests.support.worlds import NOW, build_policy, build_stalls, build_training

from ..border import Border, Enter, by
from ..mutations import document, one_of, text, written
from .manifests import Refused, let_through

W0 = "j-w0-0"


def plan() -> Plan:
    """With something in each field."""
    paths = Paths((PlannedPath(0, 1, "s1"), PlannedPath(1, 0)), (Hop("10.9.0.1", "s1"),))
    return replace(
        build_training().plan,
        shares=(8, 8, 8, 9),
        sequence_cost=(0.1, 1e-6, 1e-9),
        evidence_request="why",
        evidence_parts=(EvidencePart.WINDOWS, EvidencePart.LINKS),
        probe=ProbeRequest("p", (W0,), ((ProbeTarget("j-w1-0", "10.0.0.1:5000"),),)),
        profile=ProfileRequest("b", 100),
        paths=paths,
        secret="ab" * 32,
    )


def bookkeeping() -> dict[str, Any]:
    """Of a job in which something has just been decided."""
    world = build_training()
    thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).desired
    draft = replace(thought, plan=replace(plan(), version=thought.plan.version))
    content: dict[str, Any] = json.loads(json.dumps(ledger.encode_state(draft, "j")))
    return content


def of_older_operator() -> dict[str, Any]:
    state = {"workers": [{"name": W0, "ordinal": 0, "incarnation": 0}], "incarnations": {"0": 0}, "restartsTotal": 1}
    return {"plan.json": plan().to_json(), "state.json": state}


def adopted(data: dict[str, Any]) -> object:
    """`data`: as JSON's bytes, or what becomes of them."""
    texts = {name: written(part) for name, part in data.items()}
    return legacy.convert_legacy_state({name: part.decode(errors="replace") for name, part in texts.items()}, "j", NOW)


def written_down(content: Any) -> object:
    """What is read of it, and what is written again, is the same."""
    found = ledger.decode_state(content, "j").desired
    assert ledger.decode_state(json.loads(json.dumps(ledger.encode_state(found, "j"))), "j").desired == found
    return found


@contextmanager
def in_a_file(read: Callable[[File], object]) -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as folder:
        path = File(folder, "plan.json")

        def enter(content: Any) -> object:
            path.write_bytes(written(content))
            return read(path)

        yield enter


def followed(path: File) -> object:
    """The launcher's: what is no plan leaves the one before in force."""
    return PlanFile(path).read()


def for_ranks(path: File) -> object:
    return parse_plan(path.read_text(errors="replace"))


def kept(path: File) -> object:
    return _read_stored_plan(path)


def part() -> dict[str, Any]:
    return plan().build_worker_plan(W0).to_json()


TEXT = {"plan.json": text, "state.json": text}

BORDERS = [
    Border("plans", lambda: [plan().to_json()], document, by(Plan.from_json), cases=400),
    Border(
        "bookkeeping",
        lambda: [bookkeeping() | {"metadata": {}}],
        document,
        by(let_through("trainingjobstates", written_down)),
        (InputError, Refused),
        cases=300,
    ),
    Border(
        "bookkeeping of older operators",
        lambda: [of_older_operator()],
        lambda dice, valid: one_of(dice, valid, TEXT),
        by(adopted),
        cases=300,
    ),
    Border("a worker's plan, for its ranks", lambda: [part()], text, lambda: in_a_file(for_ranks), cases=300),
    Border("a worker's plan, for its launcher", lambda: [part()], text, lambda: in_a_file(followed), (), cases=300),
    Border("a worker's plan, kept by its sidecar", lambda: [part()], text, lambda: in_a_file(kept), (), cases=150),
]

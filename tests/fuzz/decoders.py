"""Where the product makes values of other people's bytes, and which of these places the borders come by."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .border import Border

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("analysis", "operator", "trainer")
PRIMITIVES = {"parse_json", "unpack", "unpack_from"}
MODULES = {("json", "loads"), ("orjson", "loads"), ("np", "frombuffer"), ("torch", "load")}
"""What decodes: JSON, arrays, structs, and Pacekeeper's own packing."""

TRUSTED = {
    "what was checked, or made, a few lines before": (
        "analysis/pacekeeper_analysis/behaviour/pattern.py:_owners",
        "operator/pacekeeper_operator/ledger.py:_write_table",
        "operator/pacekeeper_operator/observe/figures.py:_joined",
        "trainer/pacekeeper/observe/ring.py:RingWriter.__init__",
    ),
    "the kernel's own words": (
        "operator/pacekeeper_operator/connections.py:_read_silent_seconds",
        "trainer/pacekeeper/launcher/hops.py:_switch",
        "trainer/pacekeeper/launcher/probe.py:_acked",
        "trainer/pacekeeper/sidecar/connections.py:_addresses",
        "trainer/pacekeeper/sidecar/connections.py:_attribute",
        "trainer/pacekeeper/sidecar/connections.py:_counters",
        "trainer/pacekeeper/sidecar/connections.py:_parse",
    ),
    "the API server's answers: their parsers are bounded, and every object in them is a border of its own": (
        "operator/pacekeeper_operator/cluster.py:parse",
        "operator/pacekeeper_operator/oncall/kubectl.py:Kubectl.get",
        "operator/pacekeeper_operator/oncall/kubectl.py:Kubectl.list",
        "operator/pacekeeper_operator/oncall/links.py:_ask",
    ),
    "processes of one launcher, and ranks of one round, between themselves": (
        "trainer/pacekeeper/exchange.py:_read",
        "trainer/pacekeeper/keep/snapshot_writer.py:SnapshotWriter._helps",
        "trainer/pacekeeper/launcher/warm.py:Warm.news",
        "trainer/pacekeeper/launcher/warm.py:_fork_and_report",
        "trainer/pacekeeper/observe/transport.py:TransportReader.__init__",
        "trainer/pacekeeper/runtime.py:Runtime.is_rank_process",
    ),
    "what they hand it to is a border": (
        "trainer/pacekeeper/keep/sources.py:SnapshotSource._unpacked",
        "trainer/pacekeeper/keep/state.py:TrainingState.restore_portable",
        "trainer/pacekeeper/launcher/ras.py:ask",
        "trainer/pacekeeper/observe/behaviour/watch.py:RankProfiler._load_early_pattern",
        "trainer/pacekeeper/observe/behaviour/watch.py:_ProfileRequestReader.profile",
    ),
    "the script's own call, passed on": ("trainer/pacekeeper/observe/watching.py:_record_file_access",),
    "only whether it can be read counts": ("trainer/pacekeeper/integrations/huggingface.py:_has_state",),
    "another probe pod, which knows the secret; bounded, and a traceback ends the probe alone": (
        "operator/pacekeeper_operator/probe.py:_receive_block",
    ),
}
"""Why nobody fuzzes these decoders."""


def decoders() -> set[str]:
    """`file:function` of all that call one of PRIMITIVES."""
    return {
        f"{path.relative_to(ROOT)}:{name}"
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        for name in _decoding(ast.parse(path.read_text()).body)
    }


def reached(borders: Iterable[Border]) -> set[str]:
    """The functions that valid values go through, in the same form."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    for border in borders:
        with border.open() as enter:
            examples = border.examples()
            sys.setprofile(note)
            threading.setprofile(note)
            try:
                for example in examples:
                    enter(example)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return set(_named(seen))


def _named(codes: Iterable[CodeType]) -> Iterator[str]:
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            yield f"{path.relative_to(ROOT)}:{code.co_qualname.partition('.<locals>')[0]}"


def _decoding(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Outermost functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _decoding(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(map(_is_decoder, ast.walk(node))):
            yield prefix + node.name


def _is_decoder(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    name = node.id if isinstance(node, ast.Name) else node.attr
    of = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
    return name in PRIMITIVES or (of, name) in MODULES

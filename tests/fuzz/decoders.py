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
PRIMITIVES = {"parse_json", "unpack", "unpack_from", "unpack_slot", "unpack_value"}
MODULES = {("json", "loads"), ("orjson", "loads"), ("np", "frombuffer"), ("torch", "load")}
"""What decodes: JSON, arrays, structs, and Pacekeeper's own packing."""

TRUSTED = {
    "what was checked, or made, a few lines before": (
        "analysis/pacekeeper_analysis/profiling/pattern.py:_read_owners",
        "operator/pacekeeper_operator/state/state_codec.py:_write_table",
        "operator/pacekeeper_operator/observe/rank_metrics.py:_join_rows",
    ),
    "the kernel's own output": (
        "operator/pacekeeper_operator/endpoint/connections.py:_read_silent_seconds",
        "trainer/pacekeeper/launcher/network/hop_trace.py:_parse_switch_address",
        "trainer/pacekeeper/launcher/network/link_probes.py:_read_acked_bytes",
        "trainer/pacekeeper/sidecar/connection_sampler.py:_parse_addresses",
        "trainer/pacekeeper/sidecar/connection_sampler.py:_find_attribute",
        "trainer/pacekeeper/sidecar/connection_sampler.py:_parse_counters",
        "trainer/pacekeeper/sidecar/connection_sampler.py:_parse_datagram",
        "trainer/pacekeeper/watch/runtime_files.py:is_locked",
    ),
    "the API server's answers: their parsers are bounded, and every object in them is a border of its own": (
        "operator/pacekeeper_operator/kube/client.py:parse_response",
        "operator/pacekeeper_operator/cli/command.py:switch_injection",
        "operator/pacekeeper_operator/cli/kubectl.py:Kubectl.get",
        "operator/pacekeeper_operator/cli/kubectl.py:Kubectl.list",
        "operator/pacekeeper_operator/cli/links.py:_query_worker",
    ),
    "processes of one launcher, and ranks of one round, between themselves": (
        "trainer/pacekeeper/object_collectives.py:_decode_object",
        "trainer/pacekeeper/checkpointing/snapshots/snapshot_writer.py:SnapshotWriter._is_restorable",
        "trainer/pacekeeper/launcher/ranks/warm_process.py:WarmProcess.read_events",
        "trainer/pacekeeper_rank/forking/warm_server.py:_fork_and_report",
        "trainer/pacekeeper_rank/forking/warm_server.py:_serve_stores",
        "trainer/pacekeeper/checkpointing/peer_saves/rank_channel.py:RankChannel.all_gather",
        "trainer/pacekeeper/checkpointing/peer_saves/rank_channel.py:RankChannel.broadcast",
    ),
    "processes of one watched container, between themselves; an error ends only the watching": (
        "trainer/pacekeeper_rank/watching/process_monitor.py:ProcessMonitor._has_answered",
        "trainer/pacekeeper_rank/watching/process_monitor.py:ProcessMonitor._parse_ranks",
    ),
    "what they hand it to is a border": (
        "trainer/pacekeeper/checkpointing/peer_saves/save_memory.py:SaveMemory.read_index",
        "trainer/pacekeeper/checkpointing/peer_saves/save_memory.py:read_items",
        "trainer/pacekeeper/checkpointing/state_sources.py:SnapshotSource._unpack_state",
        "trainer/pacekeeper/checkpointing/training_state.py:TrainingState.restore_portable",
        "trainer/pacekeeper/launcher/health/nccl_ras.py:query_ras",
        "trainer/pacekeeper/observe/profiling/rank_profiler.py:RankProfiler._load_early_pattern",
    ),
    "the script's own call, passed on": ("trainer/pacekeeper_rank/monitoring.py:_record_file_access",),
    "only whether it can be read counts": (
        "trainer/pacekeeper/checkpointing/peer_saves/trainer_folders.py:get_completeness",
    ),
    "another probe pod, which has the secret; bounded, and a traceback ends only the probe": (
        "operator/pacekeeper_operator/node_probe.py:_receive_block",
    ),
}
"""Why these decoders are not fuzzed."""


def find_decoders() -> set[str]:
    """`file:function` of all that call one of PRIMITIVES."""
    return {
        f"{path.relative_to(ROOT)}:{name}"
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        for name in _find_decoding_functions(ast.parse(path.read_text()).body)
    }


def trace_reached(borders: Iterable[Border]) -> set[str]:
    """The functions that valid values go through, in the same form."""
    codes: set[CodeType] = set()

    def record_call(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    for border in borders:
        with border.open() as enter:
            examples = border.examples()
            sys.setprofile(record_call)
            threading.setprofile(record_call)
            try:
                for example in examples:
                    enter(example)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return set(_name_functions(codes))


def _name_functions(codes: Iterable[CodeType]) -> Iterator[str]:
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            yield f"{path.relative_to(ROOT)}:{code.co_qualname.partition('.<locals>')[0]}"


def _find_decoding_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Outermost functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _find_decoding_functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(map(_is_decoder, ast.walk(node))):
            yield prefix + node.name


def _is_decoder(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    name = node.id if isinstance(node, ast.Name) else node.attr
    owner = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
    return name in PRIMITIVES or (owner, name) in MODULES

"""Files that `pacekeeper whatif` is given, by its own command."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pacekeeper_analysis.whatif.causes import SlowdownCause
from pacekeeper_analysis.whatif.command import main
from pacekeeper_analysis.whatif.inputs.parquet import write_parquet
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import SyntheticJob
from testing.training.rings import write_ring

from ..border import Border, Enter
from ..mutations import Mutated, mutate_bytes, mutate_one_part, mutate_text, mutate_word, to_bytes

Files = dict[str, Any]
"""By name: bytes, or a document."""


class Refused(Exception):
    """By the command, as text."""


@contextmanager
def run_command(arguments: Callable[[Files], Sequence[str]]) -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def enter(files: Files) -> object:
            for name, data in files.items():
                (folder / name).write_bytes(data.encode(errors="replace") if isinstance(data, str) else to_bytes(data))
            errors, result = io.StringIO(), folder / "result.json"
            result.unlink(missing_ok=True)
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                status = main([str(folder / name) for name in arguments(files)] + ["--json", str(result)])
            if status:
                raise Refused(errors.getvalue())
            return json.loads(result.read_text(), parse_constant=float)["slowdown"]

        yield enter


@cache
def build_rings() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(4):
            write_ring(Path(folder, str(rank)), rank)
        return {str(rank): Path(folder, str(rank)).read_bytes() for rank in range(4)}


@cache
def build_parquet() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace-a.parquet")
        shape = JobShape(dp=2, pp=2, microbatches=3, steps=5)
        trace = SyntheticJob(SlowdownCause.SLOW_WORKER, shape, strength=1.0, noise=0.02, seed=1).build_trace()
        write_parquet(path, trace)
        meta = "dp_size: 2\npp_size: 2\nworld_size: 4\nvpp_size: 1\ntrial_name: 'x'\n"
        return {"trace-a.parquet": path.read_bytes(), "meta-a.yaml": meta}


def build_kineto() -> Files:
    """Of two ranks; the second one waits for the first."""
    return {f"{rank}.json": _build_rank_kineto(rank, forward, 5 - forward) for rank, forward in enumerate((5.0, 3.0))}


def _build_rank_kineto(rank: int, forward: float, wait: float) -> Any:
    events, begin = [], 7.0 * rank
    for step in (3, 4):
        backward = begin + forward
        update = backward + 4 + wait + 2
        for category, name, start, length in (
            ("user_annotation", f"ProfilerStep#{step}", begin, update + 1 - begin),
            ("cpu_op", "aten::mm", begin, forward),
            ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, 4.0),
            ("user_annotation", "gloo:all_reduce", backward + 4, wait + 2),
            ("user_annotation", "Optimizer.step#SGD.step", update, 1.0),
        ):
            times = {"ts": start * 1e3, "dur": length * 1e3}
            events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "args": {}} | times)
        begin = update + 1
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}


PARQUET_MUTATIONS: Mapping[str, Callable[[Random, Any], Mutated]] = {
    "trace-a.parquet": mutate_bytes,
    "meta-a.yaml": mutate_word,
}

BORDERS = [
    Border(
        "recordings",
        lambda: [build_rings()],
        lambda rng, files: mutate_one_part(rng, files, dict.fromkeys("012", mutate_bytes)),
        lambda: run_command(sorted),
        (Refused,),
        cases=120,
    ),
    Border(
        "published traces",
        lambda: [build_parquet()],
        lambda rng, files: mutate_one_part(rng, files, PARQUET_MUTATIONS),
        lambda: run_command(lambda files: [name for name in files if name.startswith("trace")]),
        (Refused,),
        cases=120,
    ),
    Border(
        "profiler traces",
        lambda: [build_kineto()],
        lambda rng, files: mutate_one_part(rng, files, dict.fromkeys(("0.json", "1.json"), mutate_text)),
        lambda: run_command(sorted),
        (Refused,),
        cases=120,
    ),
]

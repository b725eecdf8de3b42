"""The delay matrix of a job that trains now: its sidecars are asked for all they know of its ranks' connections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from pacekeeper_analysis.diagnose.links import Cell, by_ratio, describe, join, judge
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Evidence

from ..api import LABEL_JOB, TRAINER, Object
from ..manifests import RUNTIME_PATH
from .kubectl import Kubectl, KubectlError
from .seen import SeenJob
from .text import count, paragraph, table
from .whatif import AT_ONCE

QUESTIONS = f"{RUNTIME_PATH}/links"
MOST_WORKERS = 256
SECONDS, LOOK_SECONDS = 10.0, 0.5
"""A sidecar looks for questions once a second."""
SHOWN = 20
"""Links that are shown, unless all are wanted."""


def told(kubectl: Kubectl, seen: SeenJob, *, all_: bool) -> str:
    """Who sends to whom, and how fast; the slowest first. Raises InputError."""
    pods = kubectl.list("pods", labels=f"{LABEL_JOB}={seen.job.name}")
    if len(pods) > MOST_WORKERS:
        raise InputError(f"{len(pods)} workers are too many to ask: read pacekeeper_link_side_ratio and the Incidents")
    name = f"asked-{uuid4().hex[:12]}"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [answer for answer in pool.map(lambda pod: _ask(kubectl, pod, name), _names(pods)) if answer]
    if not answers:
        raise InputError(f"no worker of {seen.job.name} has answered: kubectl pacekeeper why {seen.job.name}")
    cells, unknown = join(answers, {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods})
    heard = "" if len(answers) == len(pods) else f"{len(answers)} of {count(len(pods), 'worker')} have answered"
    return "\n".join(filter(None, (_table(cells, all_=all_), *map(paragraph, (heard, *_words(cells, unknown))))))


def _ask(kubectl: Kubectl, pod: str, name: str) -> Evidence | None:
    """None: it does not answer, as one that has just gone, or whose sidecar is older than this command."""

    def run(*command: str) -> str:
        return kubectl.run("exec", pod, *kubectl.place, "-c", TRAINER, "--", *command)

    path = f"{QUESTIONS}/{name}"
    try:
        run("touch", path)
        deadline = time.monotonic() + SECONDS
        while not (content := run("cat", path)) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        run("rm", path)
        return Evidence.from_json(parse_json(content)) if content else None
    except KubectlError as error:
        if "forbidden" in str(error).lower():
            raise
        return None


def _names(pods: Sequence[Object]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def _table(cells: Sequence[Cell], *, all_: bool) -> str:
    links = by_ratio(cells)
    if not links:
        return ""
    rows = [
        [
            f"rank {cell.source}",
            f"rank {cell.destination}",
            "–" if ratio is None else f"{ratio:.2f}",
            f"{cell.bytes_per_second / 1e6:.1f}",
            f"{cell.acked_bytes / 1e6:.1f}",
            f"{cell.busy_seconds:.2f}",
            f"{cell.retransmitted_bytes / 1e6:.1f}",
            "NCCL" if cell.by_nccl else "one node" if cell.same_node else "nodes",
        ]
        for cell, ratio in links
    ]
    shown = rows if all_ else rows[:SHOWN]
    left = f"\n{count(len(rows) - len(shown), 'link')} more: --all" if len(shown) < len(rows) else ""
    heads = ["FROM", "TO", "× USUAL", "MB/S", "MB", "BUSY S", "RESENT MB", "BETWEEN"]
    return table(heads, shown) + left


def _words(cells: Sequence[Cell], unknown: int) -> list[str]:
    """What it comes to."""
    found = judge(cells, unknown)
    words = [f"slow: {describe(spot)}" for spot in found.hot]
    if unknown:
        words.append(f"{count(unknown, 'end')} of connections with nobody known at the other: a mesh, or no answer")
    if not cells:
        words.append("no connection between its ranks has carried a megabyte in the last 15 s")
    elif not found.known:
        words.append("none has carried enough to call it slow")
    elif not found.hot:
        words.append("no link is much slower than the others, in two of the last three windows of 5 s")
    return words

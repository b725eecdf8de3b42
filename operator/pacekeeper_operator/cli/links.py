"""The delay matrix of a job that trains now, from the connections that its sidecars know."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.network.delay_matrix import (
    DelayCell,
    describe_hot_spot,
    diagnose_links,
    join_link_ends,
    sort_cells_by_ratio,
)
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.reports import Evidence

from ..api.names import Object, find_trainer_name
from ..pods.manifests import RUNTIME_PATH
from .kubectl import Kubectl, KubectlError
from .loaded_objects import LoadedJob
from .text import format_count, format_paragraph, format_table
from .whatif import MAX_CONCURRENT_KUBECTL

LINK_REQUESTS_PATH = f"{RUNTIME_PATH}/links"
MAX_QUERIED_WORKERS = 256
LINK_ANSWER_TIMEOUT_SECONDS, LINK_ANSWER_POLL_SECONDS = 10.0, 0.5
"""A sidecar polls for requests once a second."""
DEFAULT_SHOWN_LINKS = 20
"""Links that are shown by default."""


def report_links(kubectl: Kubectl, loaded: LoadedJob, *, all_: bool) -> str:
    """Report which rank sends to which, and how fast, the slowest first.

    Raises InputError.
    """
    pods = kubectl.list("pods", labels=loaded.job.selector)
    if len(pods) > MAX_QUERIED_WORKERS:
        raise InputError(
            f"{len(pods)} workers are too many to query: read pacekeeper_link_side_ratio and the Incidents"
        )
    request_name = f"asked-{uuid4().hex[:12]}"
    with ThreadPoolExecutor(MAX_CONCURRENT_KUBECTL) as pool:
        answers = [
            answer
            for answer in pool.map(lambda pod: _query_worker(kubectl, pod["metadata"], request_name), pods)
            if answer
        ]
    if not answers:
        raise InputError(f"no worker of {loaded.job.name} has answered: kubectl pacekeeper why {loaded.job.name}")
    cells, unknown = join_link_ends(answers, {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods})
    coverage = "" if len(answers) == len(pods) else f"{len(answers)} of {format_count(len(pods), 'worker')} answered"
    return "\n".join(
        filter(
            None,
            (_format_links(cells, all_=all_), *map(format_paragraph, (coverage, *_summarize_links(cells, unknown)))),
        )
    )


def _query_worker(kubectl: Kubectl, metadata: Object, request_name: str) -> Evidence | None:
    """Return a worker's answer. `metadata`: of its pod.

    None: it does not answer, as it has just ended, or its sidecar is older than this command.
    """
    pod, container = metadata["name"], find_trainer_name(metadata)

    def run(*command: str) -> str:
        return kubectl.run("exec", pod, *kubectl.namespace_options, "-c", container, "--", *command)

    path = f"{LINK_REQUESTS_PATH}/{request_name}"
    try:
        run("touch", path)
        deadline = time.monotonic() + LINK_ANSWER_TIMEOUT_SECONDS
        while not (content := run("cat", path)) and time.monotonic() < deadline:
            time.sleep(LINK_ANSWER_POLL_SECONDS)
        run("rm", path)
        return Evidence.from_json(parse_json(content)) if content else None
    except KubectlError as error:
        if "forbidden" in str(error).lower():
            raise
        return None


def _format_links(cells: Sequence[DelayCell], *, all_: bool) -> str:
    links = sort_cells_by_ratio(cells)
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
            "NCCL" if cell.counted_by_nccl else "one node" if cell.same_node else "nodes",
        ]
        for cell, ratio in links
    ]
    shown = rows if all_ else rows[:DEFAULT_SHOWN_LINKS]
    hidden = f"\n{format_count(len(rows) - len(shown), 'link')} more: --all" if len(shown) < len(rows) else ""
    headers = ["FROM", "TO", "× USUAL", "MB/S", "MB", "BUSY S", "RESENT MB", "BETWEEN"]
    return format_table(headers, shown) + hidden


def _summarize_links(cells: Sequence[DelayCell], unknown: int) -> list[str]:
    """Return the findings."""
    diagnosis = diagnose_links(cells, unknown)
    lines = [f"slow: {describe_hot_spot(spot)}" for spot in diagnosis.hot_spots]
    if unknown:
        lines.append(f"{format_count(unknown, 'end')} of connections with an unknown other end: a mesh, or no answer")
    if not cells:
        lines.append("no connection between its ranks has carried a megabyte in the last 15 s")
    elif not diagnosis.is_known:
        lines.append("none has carried enough to call it slow")
    elif not diagnosis.hot_spots:
        lines.append("no link is much slower than the others, in two of the last three windows of 5 s")
    return lines

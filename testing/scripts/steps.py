"""A script of ranks that all-reduce once a step, record it, keep a counter on disk, and fail on request.

Environment: STEPS; FOLDER (counter and diary of each rank); STEP_SECONDS; FAULTS: a JSON list of
{"rank": …, "round": …, "step": …, "kind": "sigkill" | "raise" | "exit" | "stop" | "skip" | "phase" | "kernel"};
GPU: "nccl" or "gloo", with which a stand-in for a GPU exchanges; not set: there is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pacekeeper_rank import torch_internals
from pacekeeper_rank.collectives import flight_recorder
from pacekeeper_rank.record_ring import NO_PLACE, RingWriter
from pacekeeper_rank.records import Collective, Phase, RecordKind

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["PACEKEEPER_ROUND"])
FOLDER = Path(os.environ["FOLDER"])


def main() -> None:
    write_diary("start")
    ring = RingWriter(Path(os.environ["PACEKEEPER_RING"]))
    signal.signal(signal.SIGTERM, exit_on_signal)
    if "GPU" in os.environ:
        fake_gpu(ring)
    inject_fault("before", ring)
    dist.init_process_group("gloo")
    counter = FOLDER / "counter"
    step = int(counter.read_text()) if counter.exists() else 0
    ring.state.restored_step = step
    dist.barrier()
    ring.enter_phase(Phase.TRAIN)
    while step < int(os.environ["STEPS"]):
        begin = time.monotonic_ns()
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")))
        ring.end_load(time.monotonic_ns() - begin)
        inject_fault(step + 1, ring)
        total = torch.ones(1)
        ring.enter_collective(Collective.ALL_REDUCE, 1, step, time.monotonic_ns(), NO_PLACE)
        dist.all_reduce(total)
        ring.leave_collective()
        assert total.item() == dist.get_world_size()
        step += 1
        now = time.monotonic_ns()
        for kind in (RecordKind.STEP, RecordKind.COMPUTE):
            ring.write(kind, begin, now, step, Phase.TRAIN, 8.0)
        ring.end_step(step, now)
        write_diary(f"step {step}")
        if RANK == 0:
            counter.with_suffix(".new").write_text(str(step))
            counter.with_suffix(".new").replace(counter)
        dist.barrier()
    dist.destroy_process_group()
    inject_fault("end", ring)
    write_diary("end")


def inject_fault(step: int | str, ring: RingWriter) -> None:
    for fault in json.loads(os.environ.get("FAULTS", "[]")):
        if (fault["rank"], fault["round"], fault["step"]) != (RANK, ROUND, step):
            continue
        write_diary(fault["kind"])
        match fault["kind"]:
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError("scripted failure")
            case "exit":
                sys.exit(1)
            case "phase":
                ring.enter_phase(Phase[fault["phase"]])
                time.sleep(fault["seconds"])
                ring.enter_phase(Phase.TRAIN)
            case "skip":
                lock = threading.Lock()
                with lock, lock:  # a deadlock: no wait for anything that may come
                    raise AssertionError
            case "kernel":
                if os.environ["GPU"] == "nccl":  # the host has issued the collective behind it
                    ring.enter_collective(Collective.ALL_REDUCE, 1, int(step) - 1, time.monotonic_ns(), NO_PLACE)
                STREAM["held"] = True
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as a synchronization of CUDA: it spins, in C


STREAM = {"held": False}
"""Whether a kernel that never ends is on the GPU of the stand-in."""


def fake_gpu(ring: RingWriter) -> None:
    """What torch would report of a GPU and of NCCL's collectives on it. The collectives themselves are gloo's."""

    def flight_record() -> bytes:
        state = "scheduled" if STREAM["held"] else "started"
        entry = {
            "record_id": ring.state.sequence, "collective_seq_id": ring.state.sequence, "state": state, "pg_id": 0,
            "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce",
        }  # fmt: skip
        entries = [entry] if ring.state.collective else []
        return json.dumps({"pg_config": {"0": {"ranks": "[0, 1, 2]"}}, "entries": entries}).encode()

    torch.cuda.is_initialized = lambda: True
    torch.cuda.set_device = do_nothing  # type: ignore[assignment]  # takes any arguments
    torch_internals.list_used_gpus = lambda: [0]
    torch_internals.dump_flight_record = flight_record
    flight_recorder.preserve_graph_captures = do_nothing  # type: ignore[assignment]  # the same
    torch_internals.list_backends = lambda: [f"cuda:{os.environ['GPU']}"]
    flight_recorder.start_flight_monitor(ring.state)


def do_nothing(*_: object) -> None: ...


def exit_on_signal(*_: object) -> None:
    write_diary("leave")
    os._exit(143)


def write_diary(text: str) -> None:
    with (FOLDER / f"diary-{RANK}").open("a") as file:
        file.write(f"{time.monotonic():.4f} {os.getpid()} round {ROUND} {text}\n")


main()

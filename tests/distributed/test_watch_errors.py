"""Errors of the library in a watched rank: they end the watching, and not the script."""

from __future__ import annotations

import ast
import atexit
import importlib
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from pacekeeper.watch.payload import PACKAGE_FOLDER, PAYLOAD_PACKAGE, build_payload

LIBRARY = Path(PACKAGE_FOLDER) / PAYLOAD_PACKAGE
PARTS = ("watching", "profiling")
"""Parts of the library that only watched processes use, or that act in threads."""
BOUNDARIES = {
    "find_spec", "execute_and_call", "prepare_process", "_install_hooks", "run", "_run", "break_off", "stop",
    "_begin_optimizer_step", "_end_optimizer_step", "_report_exception", "_report_exit", "_report_child_exit",
    "_end_in_child", "_is_of_script",
}  # fmt: skip
"""Functions that catch the errors of all others, or that hold no more than a statement."""
NEEDS_A_HANG = {
    "_has_answered", "drop_dumps", "catches_stack_signal", "_call_before_child_exit", "_write_child_exit", "_break_off",
    "ignore_wait", "mark_script_end",
}  # fmt: skip
"""Functions that this file's training does not reach, or that run after an error only."""
OF_WORKERS = {"launched_rank", "takeover"}
"""Modules that watched processes do not use."""
PROFILE_REQUEST = "one 0 1000000 0.05"
STEPS = 4
PATIENCE_SECONDS = 60.0
"""It only bounds a failure."""


def list_functions() -> Iterator[tuple[str, str]]:
    """Module and name of each function of these parts of the library."""
    import pacekeeper_rank

    package = Path(next(iter(pacekeeper_rank.__path__)))
    for path in (path for part in PARTS for path in sorted((package / part).glob("*.py"))):
        if path.stem in OF_WORKERS:
            continue
        module = path.relative_to(package).with_suffix("").as_posix()
        for node in ast.parse(path.read_text()).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in inner:
                name = getattr(function, "name", "")
                if isinstance(function, ast.FunctionDef) and name not in BOUNDARIES:
                    yield module, name


def break_function(module: Path, name: str) -> None:
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.body = [*ast.parse("raise RuntimeError('injected')").body, *node.body]
    module.write_text(ast.unparse(tree))


def train(folder: Path, is_watched: Callable[[], bool]) -> list[float]:
    """Train one rank, until a profile window has been taken, start a process as torchrun's agent does, and end."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.ones(2, 4)).mean()
        dist.all_reduce(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (folder / "profile_request").write_text(PROFILE_REQUEST)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_watched() and not (folder / "profiles/0.json").exists() and time.monotonic() < deadline:
        optimizer.step()  # without gradients, it changes nothing
        time.sleep(0.005)
    context = start_processes("agent", "/bin/true", {0: ()}, {0: {}}, DefaultLogsSpecs())
    result = context.wait(timeout=60, period=0.01)
    assert result is not None
    assert not result.is_failed()
    dist.destroy_process_group()
    return losses


def run_watched(payload: Path, runtime: Path) -> list[float]:
    """Train in this process, a fork, with threads that act at once."""
    os.environ.update(PACEKEEPER_WATCH_RUNTIME=str(runtime), LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    runpy.run_path(str(payload / "boot/sitecustomize.py"))
    bootstrap: Any = sys.modules.get(f"{PAYLOAD_PACKAGE}.watching.bootstrap")
    if bootstrap is None or not hasattr(bootstrap, "guard"):
        return train(runtime, lambda: False)
    for name in bootstrap._HOOKS:  # torch is here already
        bootstrap._install_hooks(name, sys.modules[name])
    monitor: Any = importlib.import_module(f"{PAYLOAD_PACKAGE}.watching.process_monitor")
    monitor.TICK_INTERVAL_SECONDS = 0.005
    losses = train(runtime, lambda: bootstrap.guard.active)
    (runtime / "stack_request").write_text("one")
    deadline = time.monotonic() + PATIENCE_SECONDS
    answers = [runtime / "stacks/0.json", runtime / "processes.json", runtime / "sockets.json"]
    while bootstrap.guard.active and not all(path.exists() for path in answers) and time.monotonic() < deadline:
        time.sleep(0.005)
    return losses


def fork_watched(payload: Path, runtime: Path) -> Any:
    """What `run_watched` returns in a fork whose exit handlers run, or its traceback."""
    runtime.mkdir()
    pid = os.fork()
    if pid == 0:
        atexit._clear()
        try:
            result: Any = run_watched(payload, runtime)
        except BaseException:
            result = traceback.format_exc()
        try:
            atexit._run_exitfuncs()
        except BaseException:
            result = traceback.format_exc()
        (runtime / "result").write_text(json.dumps(result))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads((runtime / "result").read_text())


def test_an_error_in_any_function_ends_the_watching_and_not_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build_payload(tmp_path / "whole")
    expected = fork_watched(tmp_path / "whole", tmp_path / "healthy")
    assert len(expected) == STEPS, expected
    assert not list((tmp_path / "healthy/broken").iterdir())
    assert json.loads((tmp_path / "healthy/ranks/0.json").read_text())["optimizer"] == "AdamW"
    assert json.loads((tmp_path / "healthy/profiles/0.json").read_text())["request"] == "one"
    functions = list(list_functions())
    for module, name in functions:
        place = f"{module.replace('/', '-')}-{name}"
        runtime, payload = tmp_path / place, tmp_path / f"payload-{place}"
        build_payload(payload)
        break_function(payload / LIBRARY / f"{module}.py", name)
        assert fork_watched(payload, runtime) == expected, f"{module}.{name}"
        reports = [json.loads(path.read_text()) for path in (runtime / "broken").glob("*.json")]
        if Path(module).name not in {"guard", "watch_folder", "import_hook"} and name not in NEEDS_A_HANG:
            assert [report["error"] for report in reports] == ["RuntimeError('injected')"], f"{module}.{name}"
    assert len(functions) > 40
    assert capfd.readouterr().err == ""

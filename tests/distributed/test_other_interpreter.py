"""torchrun, accelerate, and scripts of a shell, without Pacekeeper: replaced by the launcher of a payload."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from pacekeeper.watch.payload import build_watched_environment

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
folder, crashes = sys.argv[1], "--crash" in sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = 0
if os.path.exists(f"{folder}/state.pt"):
    state = torch.load(f"{folder}/state.pt")
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); first = state["step"]
for step in range(first, 12):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"{folder}/new.pt")
        os.replace(f"{folder}/new.pt", f"{folder}/state.pt")
    dist.barrier()
    if crashes and step == 6 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    result = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    open(f"{folder}/result", "wb").write(result)
imported = "pacekeeper" in {name.split(".")[0] for name in sys.modules}
print(imported, sys.flags.optimize, os.environ.get("ACCELERATE_MIXED_PRECISION"))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"),
    *("--mixed_precision=no", "--dynamo_backend=no", "train.py"),
]
SHELL = """
set -e
$PYTHON -c 'print("prepares")'
$PYTHON -O train.py "$@"
echo "uploads after $?"
"""
"""A shell that starts the script itself."""


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the init container of a worker's pod makes it, but of another version than this environment."""
    folder = tmp_path_factory.mktemp("payload")
    subprocess.run([sys.executable, "-m", "pacekeeper.watch.payload", "--launcher", folder], check=True, timeout=60)
    (folder / "version").write_text("9.9.9\n")
    return folder


class Training:
    """Trains the script with two ranks, in a folder of its own."""

    def __init__(
        self, python: str, folder: Path, *options: str, payload: Path | None = None, launcher: Sequence[str] = TORCHRUN
    ) -> None:
        """`launcher`: Python's arguments before those of the script; without any, a shell starts the script."""
        folder.mkdir()
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        hidden = ("PYTHONPATH", "PACEKEEPER_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if payload is not None:
            environment = build_watched_environment({**environment, "PACEKEEPER_PAYLOAD": str(payload)}, payload)
        command = [python, *launcher]
        if not launcher:
            command = ["sh", "-c", SHELL, "sh"]
            # In a pod, the operator sets the runtime folder, and its plan the number of ranks.
            environment |= {"PYTHON": python, "PACEKEEPER_LAUNCH_SCRIPT": "train.py", "PET_NPROC_PER_NODE": "2"}
            environment["PACEKEEPER_RUNTIME"] = str(folder)
        self._process = subprocess.Popen(
            [*command, str(folder), *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Return exit code, output, and errors."""
        output, errors = self._process.communicate(timeout=120)
        return self._process.returncode, output, errors


@pytest.fixture(scope="module")
def calm_result(bare_python: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of torchrun without a crash."""
    training = Training(bare_python, tmp_path_factory.mktemp("calm") / "torchrun")
    assert training.finish()[0] == 0
    return (training.folder / "result").read_bytes()


@pytest.mark.parametrize(
    ("launcher", "own_view"),
    [
        pytest.param(TORCHRUN, "0 None", id="torchrun"),
        pytest.param(
            ACCELERATE,
            "0 no",
            id="accelerate",
            marks=pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
        ),
        pytest.param([], "1 None", id="shell"),
    ],
)
def test_training_is_the_same_bit_for_bit_also_after_a_crash(
    launcher: list[str], own_view: str, calm_result: bytes, bare_python: str, payload: Path, tmp_path: Path
) -> None:
    """`own_view`: Python's level of optimization and a variable that accelerate sets, as the ranks see them."""
    training = Training(bare_python, tmp_path / "crashed", "--crash", payload=payload, launcher=launcher)
    code, output, errors = training.finish()
    assert code == 0, errors
    assert "round 2 starts with ranks [0, 1] of 2" in errors
    assert "rank 1 was killed by SIGKILL in round 1 after step 7" in errors, "the ranks are recorded"
    assert output.count(f"False {own_view}\n") == 2, "no rank has imported the package"
    assert (training.folder / "result").read_bytes() == calm_result
    if not launcher:
        assert output.startswith("prepares\n")
        assert output.endswith("uploads after 0\n")

"""What all tests with real ranks share."""

from __future__ import annotations

import atexit
import gc
import os
import venv
from pathlib import Path

import pytest

# Before torch is imported. Ranks outnumber the processors, and models are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Fresh interpreters (sidecars, examples, launchers of a command line) compile the project's modules once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Until all tests are imported: collections in between find nothing, and take seconds.
gc.disable()

from pacekeeper_rank import recorder_factory  # noqa: E402  # the same
from testing.training.ranks import PREIMPORTS, import_before_forks  # noqa: E402  # it imports torch

AT_FIRST_USE = (
    "numpy.ma",
    "tabulate",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_dynamo",
    "torch._export.passes._node_metadata_hook",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._inductor.pattern_matcher",
    "torch._inductor.sizevars",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.utils.serialization.config",
)
"""What torch imports when something is compiled, reduced, or saved for the first time, as far as this torch has it."""


IMPORT_MUCH = ("test_models", "test_huggingface", "test_lightning")
"""Modules that import more into this process than others need. They come last: the larger it is, the longer takes a
fork."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent == Path(__file__).parent and item.path.stem in IMPORT_MUCH)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cheap_forks() -> None:
    """Ranks, launchers and their warm processes are forked from this process: what it has done they need not do."""
    import_before_forks([*PREIMPORTS, *AT_FIRST_USE])
    atexit.register(_unfreeze_objects, os.getpid())


def _unfreeze_objects(pid: int) -> None:
    """At this process's end, not at a fork's: extensions complain of what is left over."""
    if os.getpid() == pid:
        gc.unfreeze()


@pytest.fixture(params=["0", "1"], ids=["Python", "C"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have ranks record in Python, or with the part in C: by `PACEKEEPER_NATIVE`, as in the field."""
    reason = recorder_factory.NATIVE_UNAVAILABLE_REASON
    assert recorder_factory.native_recorder is not None, f"{reason}; `make native` builds it"
    monkeypatch.setenv("PACEKEEPER_NATIVE", request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with this one's packages, but without Pacekeeper, which an editable installation adds."""
    import torch

    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return str(folder / "bin/python")

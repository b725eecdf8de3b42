"""Variables that torch reads when it is imported. Ranks are forked from a process that has imported it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping

from .threads import limit_libraries

VARIABLES_READ_AT_IMPORT = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "OMP_SCHEDULE",
        "OMP_WAIT_POLICY",
        "OPENBLAS_NUM_THREADS",
        "PYTORCH_JIT",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_CUDA_SANITIZER",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_LOGS_FORMAT",
        "TORCH_LOGS_OUT",
        "TORCH_TRACE",
        "TORCH_USE_RTLD_GLOBAL",
    }
)
"""By torch, OpenMP, and linear algebra. Others are read at first use."""
THREAD_COUNT_VARIABLES = frozenset({"MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
COMPILER_VARIABLE_PREFIXES = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_")
"""Prefixes of those that torch._dynamo and torch._inductor read when they are imported."""


def is_read_at_import(name: str, modules: Collection[str] | None = None) -> bool:
    """Whether it is too late to set this variable. `modules`: those that are imported; None: any may be later."""
    if name.startswith(COMPILER_VARIABLE_PREFIXES):
        return modules is None or "torch._dynamo" in modules
    return name in VARIABLES_READ_AT_IMPORT and (modules is None or "torch" in modules)


def handle_late_variables(seen: Mapping[str, str], warn: bool) -> None:
    """From here on, see to variables that this process sets too late. The number of threads for linear algebra can
    still be set; of others, warn once where `warn`.

    seen: the environment at import.
    """
    put, named = os.putenv, set[str]()
    modules = [name for name in ("torch", "torch._dynamo") if name in sys.modules]

    def putenv(name: str | bytes, value: str | bytes) -> None:
        put(name, value)
        key, text = os.fsdecode(name), os.fsdecode(value)
        if key in THREAD_COUNT_VARIABLES and text.isdecimal():
            limit_libraries(int(text))
        if warn and key not in named and seen.get(key) != text and is_read_at_import(key, modules):
            named.add(key)
            print(format_late_warning(key, text), file=sys.stderr)

    os.putenv = putenv  # type: ignore[assignment]  # os.environ comes by here, too


def format_late_warning(name: str, value: str) -> str:
    """The warning."""
    return (
        f"pacekeeper: the script sets {name}={value}, which comes too late: torch is imported before the script "
        "starts, and reads it then. Set it in the environment of `pacekeeper run`"
    )

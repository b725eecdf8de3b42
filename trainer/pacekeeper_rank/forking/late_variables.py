"""Variables that torch reads when it is imported. A script sets them too late: ranks are forked after the import."""

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
"""Variables that torch, OpenMP, and linear algebra libraries read at import. Others are read at first use."""
THREAD_COUNT_VARIABLES = frozenset({"MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
COMPILER_VARIABLE_PREFIXES = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_")
"""Prefixes of the variables that torch._dynamo and torch._inductor read when they are imported."""


def is_read_at_import(name: str, modules: Collection[str] | None = None) -> bool:
    """Return whether a variable is read at import. `modules`: the imported ones, which have read theirs; None: any."""
    if name.startswith(COMPILER_VARIABLE_PREFIXES):
        return modules is None or "torch._dynamo" in modules
    return name in VARIABLES_READ_AT_IMPORT and (modules is None or "torch" in modules)


def handle_late_variables(import_environment: Mapping[str, str], warn: bool) -> None:
    """Handle variables that this process sets too late, from now on.

    The number of threads for linear algebra can still be set. For other variables, print a warning once each if `warn`.
    `import_environment`: the environment at import.
    """
    original_putenv, reported = os.putenv, set[str]()
    modules = [name for name in ("torch", "torch._dynamo") if name in sys.modules]

    def putenv(name: str | bytes, value: str | bytes) -> None:
        original_putenv(name, value)
        key, text = os.fsdecode(name), os.fsdecode(value)
        if key in THREAD_COUNT_VARIABLES and text.isdecimal():
            limit_libraries(int(text))
        if warn and key not in reported and import_environment.get(key) != text and is_read_at_import(key, modules):
            reported.add(key)
            print(format_late_warning(key, text), file=sys.stderr)

    os.putenv = putenv  # type: ignore[assignment]  # os.environ calls it, too


def format_late_warning(name: str, value: str) -> str:
    """Return the warning about a variable that is set too late."""
    return (
        f"pacekeeper: the script sets {name}={value}, which comes too late: torch is imported before the script "
        "starts, and reads it then. Set it in the environment of `pacekeeper run`"
    )

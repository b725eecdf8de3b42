"""The number of threads that the loaded linear algebra libraries use."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_THREAD_COUNT_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "MKL_Set_Num_Threads",
)
"""Functions that take an int. numpy's and scipy's wheels rename OpenBLAS's."""
_MATH_LIBRARIES = ("openblas", "libmkl_rt")


def limit_threads(threads: int) -> None:
    """Limit torch's and numpy's threads: both read OMP_NUM_THREADS before this process became a rank."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
    limit_libraries(threads)


def limit_libraries(threads: int) -> None:
    """Limit the threads of the libraries of numpy and scipy."""
    for path in find_loaded_libraries():
        library = ctypes.CDLL(path)
        for name in _THREAD_COUNT_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(threads))


def find_loaded_libraries(maps: Path = Path("/proc/self/maps")) -> set[str]:
    """Return the paths of the loaded linear algebra libraries that have their own threads."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return {path for path in paths if any(name in Path(path).name for name in _MATH_LIBRARIES) and Path(path).exists()}

"""Copies this interpreter with the launcher into a folder, so that the launcher runs in images that have neither.

bin/pacekeeper    runs `pacekeeper` in any image of the same machine architecture that has /bin/sh
bin/python        this interpreter
lib/              the shared libraries that it has loaded, libc and its loader `ld.so` included
lib/python3.…/    Python's standard library
packages/         this package, and the packages that the launcher imports
launch.py         what bin/pacekeeper runs

The loader is called by its path, with a path of libraries: so nothing depends on the libc of the image, which may be
older or another one. What the launcher starts gets the loader and the libraries of the image.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pacekeeper_analysis.errors import InputError

PROGRAM = "bin/pacekeeper"
_IMPORTED_MODULES = ("pacekeeper.launcher.command", "pacekeeper.watch.payload")
_OPTIONAL_MODULES = ("pynvml",)
"""Modules that the launcher imports where they are installed."""
_LEFT_OUT_OF_LIBRARY = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
    "pydoc_data", "config-*", "*.a", "*.opt-?.pyc",
)  # fmt: skip
_LEFT_OUT_OF_PACKAGES = shutil.ignore_patterns("tests", "*.pyi", "*.c", "*.a", "*.lib", "include")
_STARTUP_MODULES = frozenset({"_distutils_hack", "sitecustomize", "usercustomize"})
"""Modules that an environment imports at each start of its Python."""
_LOADER = re.compile(r"ld(-linux.*|-musl.*|64)?(-\d.*)?\.so(\.\d+)*")
_SCRIPT = """#!/bin/sh
root=${0%/bin/pacekeeper}
exec "$root/lib/ld.so" --library-path "$root/lib" "$root/bin/python" -I -S "$root/launch.py" "$@"
"""
_LAUNCH = """import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages"))

from pacekeeper.cli import main

sys.exit(main())
"""


def build_launcher_runtime(target: Path) -> None:
    """Copy interpreter, libraries, and packages into `target`, which may have an earlier copy.

    Raises OSError, and InputError if this process has no loader of its own, as with a static Python.
    """
    _import_launcher()
    library = Path(sysconfig.get_path("stdlib"))
    packages = [*_find_packages(library)]
    for folder in ("bin", "lib", "packages"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    for package in packages:
        _copy_package(package, target / "packages" / package.name)
    shutil.copytree(
        library, target / "lib" / library.name, ignore=_LEFT_OUT_OF_LIBRARY, dirs_exist_ok=True, symlinks=False
    )
    copied = [library, *(package.parent for package in packages)]
    loader = None
    for path in _list_mapped_libraries():
        if _LOADER.fullmatch(path.name):
            loader = path
        elif not any(path.is_relative_to(folder) for folder in copied):
            shutil.copyfile(path, target / "lib" / path.name)
            for link in _list_links(path):
                (target / "lib" / link).unlink(missing_ok=True)
                (target / "lib" / link).symlink_to(path.name)
    if loader is None:
        raise InputError(f"{sys.executable} has no dynamic loader; use the image of the watch that the chart names")
    _copy_program(loader, target / "lib" / "ld.so")
    _copy_program(Path(sys.executable).resolve(), target / "bin" / "python")
    (target / "launch.py").write_text(_LAUNCH)
    (target / PROGRAM).write_text(_SCRIPT)
    (target / PROGRAM).chmod(0o755)


def _import_launcher() -> None:
    for name in _IMPORTED_MODULES:
        importlib.import_module(name)
    for name in _OPTIONAL_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)


def _find_packages(library: Path) -> Iterator[Path]:
    """Yield the folders and files of imported packages that are not in the standard library, each once."""
    for name in sorted({name.partition(".")[0] for name in sys.modules}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.stdlib_module_names | _STARTUP_MODULES or name.startswith("__") or file is None:
            continue
        path = Path(file)
        path = path.parent if path.name == "__init__.py" else path
        if path.parent == library:
            continue  # a module of the interpreter's own build
        yield path
        libraries = path.parent / f"{name}.libs"  # of a wheel
        if libraries.is_dir():
            yield libraries


def _list_mapped_libraries() -> list[Path]:
    """Return the shared libraries that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return [Path(path) for path in sorted(paths) if re.search(r"\.so(\.|$)", os.path.basename(path))]


def _list_links(library: Path) -> list[str]:
    """Return the names of the links to a library in its folder. Programs find it by one of them."""
    links = (path for path in library.parent.glob("*.so*") if path.is_symlink())
    return [path.name for path in links if path.resolve() == library.resolve() and path.name != library.name]


def _copy_package(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_LEFT_OUT_OF_PACKAGES, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


def _copy_program(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o755)

"""Names of functions that are the same on all ranks. Installed packages have their installed path."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

OWN_FILE_PREFIX = "./"
"""Prefix of the names of the job's own files."""
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY_FOLDER = os.path.dirname(os.__file__) + "/"
_PACEKEEPER_FOLDER = str(Path(__file__).parents[2]) + "/"
_SCRIPT_START_FRAMES = ("runpy.py:", "<frozen runpy>:", "pacekeeper/launcher/")
"""Outermost frames that start the script, and are the same in every stack."""


class FunctionNames:
    """Names functions, and caches paths."""

    def __init__(self, folder: str | None = None) -> None:
        """Create it. `folder`: folder of the job's script; None: that of the running script."""
        self._folder = (folder or _find_script_folder()).rstrip("/") + "/"
        self._paths: dict[str, str] = {}

    def name_stack(self, codes: Sequence[CodeType]) -> tuple[str, ...]:
        """Return the names from the script's own first frame on; (): the stack is not in the script."""
        names = [self.name_function(code) for code in codes]
        first = max((i + 1 for i, name in enumerate(names) if name.startswith(_SCRIPT_START_FRAMES)), default=0)
        return tuple(names[first:])

    def name_function(self, code: CodeType) -> str:
        """Return the name as file:function."""
        path = self._paths.get(code.co_filename)
        if path is None:
            path = self._paths[code.co_filename] = self._shorten_path(code.co_filename)
        return f"{path}:{_get_qualified_name(code)}"

    def _shorten_path(self, path: str) -> str:
        for folder in _PACKAGE_FOLDERS:
            if folder in path:
                return path.rpartition(folder)[2]
        for root in (_STANDARD_LIBRARY_FOLDER, _PACEKEEPER_FOLDER):
            if path.startswith(root):
                return path.removeprefix(root)
        if not os.path.isabs(path):
            return path if path.startswith("<frozen") else OWN_FILE_PREFIX + path
        if path.startswith(self._folder):
            return OWN_FILE_PREFIX + path.removeprefix(self._folder)
        return OWN_FILE_PREFIX + "/".join(path.split("/")[-3:])


def _get_qualified_name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")


def _find_script_folder() -> str:
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return os.path.dirname(os.path.abspath(path)) if path else os.getcwd()

"""Calls functions once certain modules have been imported.

It imports nothing that Python has not loaded, because each Python process runs it.
"""

from __future__ import annotations

import sys
from _collections_abc import Callable, Sequence  # loaded already, unlike collections.abc

from ..tracebacks import hide_frame


class ImportHook:
    """A finder of `sys.meta_path` that finds nothing itself.

    It stays there: removing it during an import would make Python skip another finder.
    """

    def __init__(self, callbacks: dict[str, Callable[[str, object], object]]) -> None:
        """`callbacks`: by name of the module. Each is called once with name and module, after that was executed.

        They raise nothing.
        """
        self._callbacks = callbacks
        self._searched: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> object:
        """Return what the other finders find for a module that is waited for; None for all others."""
        if name not in self._callbacks or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec = self._find_elsewhere(name, path, target)
            if spec is not None:
                self._call_after_execution(name, getattr(spec, "loader", None))
            return spec
        except Exception:
            return None  # Python asks the other finders itself, and has their error if they have one
        finally:
            self._searched.discard(name)

    def _find_elsewhere(self, name: str, path: Sequence[str] | None, target: object) -> object:
        finders: list[object] = list(sys.meta_path)
        for finder in finders:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _call_after_execution(self, name: str, loader: object) -> None:
        """Have `loader` call the callback. The module keeps its own loader, whose methods tools may use."""
        execute = getattr(loader, "exec_module", None)
        if execute is None or isinstance(loader, type):
            return

        def execute_and_call(module: object) -> None:
            vars(loader).pop("exec_module", None)
            try:
                execute(module)
            except BaseException as error:
                hide_frame(error)
                raise
            callback = self._callbacks.pop(name, None)
            if callback is not None:
                callback(name, module)

        try:
            loader.exec_module = execute_and_call  # type: ignore[attr-defined]  # it has the method
        except AttributeError:
            return  # the loader accepts no attributes, so that this process stays unwatched

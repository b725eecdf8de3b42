"""The torch modules that a training script needs, from its source. The warm process imports them before it forks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pacekeeper_rank.forking.late_variables import is_read_at_import

ALWAYS_IMPORTED_MODULES = ("torch", "torch.distributed")
FIRST_STEP_MODULES = ("torch._dynamo",)
"""What an optimizer's first zero_grad() imports. The warm process imports it while the first ranks run, for those of
the next rounds."""
NEVER_PREIMPORTED_MODULES = ("torch.utils.tensorboard", "torch._inductor")
"""Modules that start threads or processes, or import modules that do. Only ranks import them."""
_MAX_SCRIPT_FILES = 200
"""Maximum number of files of the script's own modules that are read."""


@dataclass
class ImportNeeds:
    """What to import before ranks are forked."""

    modules: list[str] = field(default_factory=list)
    """Modules of torch and of this library, in the order of the script's imports."""
    early_variables: list[str] = field(default_factory=list)
    """Variables that the script sets before it imports torch, which reads them at import."""

    @property
    def uses_library(self) -> bool:
        """Whether the script uses this library."""
        return any(name.startswith("pacekeeper.") for name in self.modules)

    @property
    def initial_modules(self) -> tuple[str, ...]:
        """Modules to import before the first rank starts. None if ranks must import torch themselves."""
        return () if self.early_variables else (*ALWAYS_IMPORTED_MODULES, *self.modules)

    @property
    def deferred_modules(self) -> tuple[str, ...]:
        """Modules to import while ranks run."""
        return () if self.early_variables else FIRST_STEP_MODULES


def find_import_needs(script: str, is_module: bool, path: Sequence[str]) -> ImportNeeds:
    """Read the script, and those of its modules that are in its folder. Unreadable files are skipped.

    `script`: a path, or a module's name. `path`: folders in which modules are searched.
    """
    needs = ImportNeeds()
    start = _find_module_file(script, [*path]) if is_module else Path(script)
    if start is None:
        return needs
    root = str(start.parent)
    if is_module:  # its modules are imported relative to the folder of its outermost package
        root = str(start.parents[script.count(".") + (start.name == "__main__.py")])
    files, seen = [start], {start}
    while files and len(seen) <= _MAX_SCRIPT_FILES:
        file = files.pop(0)
        names = _scan_file(file, needs, is_script=file == start)
        own_files = (_find_module_file(name, [root], program=False) for name in names)
        new_files = [file for file in own_files if file is not None and file not in seen]
        files += dict.fromkeys(new_files)
        seen.update(new_files)
    return needs


def _scan_file(file: Path, needs: ImportNeeds, is_script: bool) -> list[str]:
    """Add what this file needs, and return the names of other modules that it imports.

    Variables that a module's functions set do not count: they may run before or after torch is imported.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    others: list[str] = []
    assignments: list[tuple[int, str]] = []
    functions: list[range] = []  # line ranges
    torch_line = sys.maxsize  # line of the first import of torch
    for node in ast.walk(tree):
        for name in _list_imported_modules(node):
            package = name.partition(".")[0]
            if package == "torch":
                torch_line = min(torch_line, node.lineno)  # type: ignore[attr-defined]  # an import has a line
            if package == "torch" and not name.startswith(NEVER_PREIMPORTED_MODULES):
                needs.modules += [name] if name not in needs.modules else []
            elif package == "pacekeeper":
                library_module = _map_library_module(name)
                needs.modules += [library_module] if library_module not in needs.modules else []
            elif package != "torch":
                others.append(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        assignments += [(line, name) for line, name in _list_set_variables(node) if is_read_at_import(name)]
    for line, name in sorted(assignments):
        is_before = line < torch_line and (is_script or not any(line in function for function in functions))
        if is_before and name not in needs.early_variables:
            needs.early_variables.append(name)
    return others


def _list_imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that a statement imports. `from a import b`: a, and a.b, which may be one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        if node.module.partition(".")[0] != "pacekeeper":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name[0].islower())


def _map_library_module(name: str) -> str:
    """Return the module that implements the imported one, without its side effects at import."""
    is_monitored = name == "pacekeeper.auto" or name.startswith("pacekeeper.integrations")
    return "pacekeeper.observe.monitoring" if is_monitored else "pacekeeper.job"


def _list_set_variables(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the variables that a statement or call sets in os.environ."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environment(target.value):
                yield from _list_string_constants(target.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = node.func
        if function.attr == "putenv" or (function.attr == "setdefault" and _is_environment(function.value)):
            for argument in node.args[:1]:
                yield from _list_string_constants(argument)
        elif function.attr == "update" and _is_environment(function.value):
            yield from ((node.lineno, keyword.arg) for keyword in node.keywords if keyword.arg)
            for argument in node.args:
                if isinstance(argument, ast.Dict):
                    for key in argument.keys:
                        if key is not None:
                            yield from _list_string_constants(key)


def _is_environment(node: ast.expr) -> bool:
    """Return whether this is os.environ, or environ."""
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _list_string_constants(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value


def _find_module_file(name: str, path: Sequence[str], program: bool = True) -> Path | None:
    """Return the source of a module. For a package: what `python -m` runs if `program`, else its __init__.py."""
    package_file = "__main__.py" if program else "__init__.py"
    for folder in path:
        base = Path(folder, *name.split("."))
        for file in (base.with_name(f"{base.name}.py"), base / package_file):
            if file.is_file():
                return file
    return None

"""What a training script needs of torch, read from its source: what the warm process imports before it forks ranks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .late import is_read_at_import

ALWAYS_IMPORTED_MODULES = ("torch", "torch.distributed")
FIRST_STEP_MODULES = ("torch._dynamo",)
"""What an optimizer's first zero_grad() imports. The warm process imports it once the first ranks run, for the ranks
that follow them."""
NEVER_PREIMPORTED_MODULES = ("torch.utils.tensorboard", "torch._inductor")
"""These start threads and processes, or import what does: they are left to the ranks."""
_MAX_SCRIPT_FILES = 200
"""A script's own modules are read, too, but no more than these."""


@dataclass
class ImportNeeds:
    """What is to be imported before ranks are forked."""

    modules: list[str] = field(default_factory=list)
    """Of torch and of our library, in the order in which the script has them."""
    early_variables: list[str] = field(default_factory=list)
    """Variables that the script sets before it imports torch, which reads them then."""

    @property
    def initial_modules(self) -> tuple[str, ...]:
        """Modules to import before the first rank starts. None, where ranks have to import torch themselves."""
        return () if self.early_variables else (*ALWAYS_IMPORTED_MODULES, *self.modules)

    @property
    def deferred_modules(self) -> tuple[str, ...]:
        """Modules to import while ranks run."""
        return () if self.early_variables else FIRST_STEP_MODULES


def find_import_needs(script: str, is_module: bool, path: Sequence[str]) -> ImportNeeds:
    """Read the script, and those of its modules that lie in its folder. What cannot be read needs nothing.

    script: a path, or a module's name. path: folders in which modules are found.
    """
    needs = ImportNeeds()
    start = _find_module_file(script, [*path]) if is_module else Path(script)
    if start is None:
        return needs
    root = str(start.parent)
    if is_module:  # its modules are found from where its outermost package lies
        root = str(start.parents[script.count(".") + (start.name == "__main__.py")])
    files, seen = [start], {start}
    while files and len(seen) <= _MAX_SCRIPT_FILES:
        file = files.pop(0)
        found = _scan_file(file, needs, is_script=file == start)
        own = (_find_module_file(name, [root], program=False) for name in found)
        new = [file for file in own if file is not None and file not in seen]
        files += dict.fromkeys(new)
        seen.update(new)
    return needs


def _scan_file(file: Path, needs: ImportNeeds, is_script: bool) -> list[str]:
    """Add what this file needs; return the names of other modules that it imports.

    What the functions of a module set may come before torch is imported or after it, so it does not count.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    others: list[str] = []
    sets: list[tuple[int, str]] = []
    functions: list[range] = []  # their lines
    torch_at = sys.maxsize  # line of the first import of torch
    for node in ast.walk(tree):
        for name in _list_imported_modules(node):
            package = name.partition(".")[0]
            if package == "torch":
                torch_at = min(torch_at, node.lineno)  # type: ignore[attr-defined]  # an import has a line
            if package == "torch" and not name.startswith(NEVER_PREIMPORTED_MODULES):
                needs.modules += [name] if name not in needs.modules else []
            elif package == "pacekeeper":
                ours = _map_library_module(name)
                needs.modules += [ours] if ours not in needs.modules else []
            elif package != "torch":
                others.append(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        sets += [(line, name) for line, name in _list_set_variables(node) if is_read_at_import(name)]
    for line, name in sorted(sets):
        is_before = line < torch_at and (is_script or not any(line in function for function in functions))
        if is_before and name not in needs.early_variables:
            needs.early_variables.append(name)
    return others


def _list_imported_modules(node: ast.AST) -> Iterator[str]:
    """Names of the modules that a statement imports. `from a import b`: a, and a.b, which may be one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        if node.module.partition(".")[0] != "pacekeeper":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name[0].islower())


def _map_library_module(name: str) -> str:
    """The module that does the work behind the one that the script imports, without its effects."""
    watched = name == "pacekeeper.auto" or name.startswith("pacekeeper.integrations")
    return "pacekeeper.observe.watching" if watched else "pacekeeper.job"


def _list_set_variables(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of variables that a statement or call sets in os.environ."""
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
    """Whether this is os.environ, or environ."""
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _list_string_constants(node: ast.expr) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value


def _find_module_file(name: str, path: Sequence[str], program: bool = True) -> Path | None:
    """The source of a module; of a package, what `python -m` runs where `program`, else its __init__.py."""
    of_package = "__main__.py" if program else "__init__.py"
    for folder in path:
        base = Path(folder, *name.split("."))
        for file in (base.with_name(f"{base.name}.py"), base / of_package):
            if file.is_file():
                return file
    return None

"""Names: one meaning each, and functions that are verb phrases (docs/style.md, "Names")."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from .violation import Violation

PREPOSITIONS = frozenset(
    (
        *("about", "above", "across", "after", "against", "among", "around", "as", "at", "before"),
        *("behind", "below", "beside", "besides", "between", "beyond", "by", "for", "from", "in"),
        *("into", "of", "off", "on", "onto", "out", "over", "per", "since", "than"),
        *("through", "till", "to", "toward", "towards", "under", "until", "unto", "upon", "via"),
        *("with", "within", "without"),
    )
)
IDIOMS = ("as_", "from_", "on_", "to_", "with_")
"""Conversions, callbacks of events, and changed copies, as the standard library and torch name them."""
ONE_WORD = frozenset({"init", "main"})
"""Functions of modules that may be one word: `pacekeeper.init` is read with its package, as in torch."""


def check_names(sources: Mapping[str, ast.Module]) -> Iterator[Violation]:
    """Yield each name that breaks a rule. `sources`: parsed modules by their path."""
    classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    constants: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, module in sources.items():
        yield from _check_functions(path, module)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((path, node.lineno))
        for name, line in _list_constants(module):
            constants[name].append((path, line))
    for kind, definitions in (("class", classes), ("constant", constants)):
        for name, locations in definitions.items():
            first = ":".join(map(str, locations[0]))
            for path, line in locations[1:]:
                yield Violation(path, line, f"{kind} {name} is also defined at {first}: name what each of them is of")


def _check_functions(path: str, module: ast.Module) -> Iterator[Violation]:
    top_level_ids = {id(node) for node in module.body}
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_special(node.name):
            continue
        words = node.name.strip("_").split("_")
        if words[0] in PREPOSITIONS and not node.name.lstrip("_").startswith(IDIOMS):
            yield Violation(path, node.lineno, f"function {node.name} begins with a preposition: begin with a verb")
        if id(node) in top_level_ids and len(words) == 1 and node.name not in ONE_WORD:
            yield Violation(path, node.lineno, f"function {node.name} is one word: say what it does to what")


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _list_constants(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the module's constants of three letters or more, and their lines."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        else:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper() and len(target.id.strip("_")) > 2:
                yield target.id, node.lineno

"""The mutants of a module: each comparison, boolean and early exit of its functions, changed one at a time."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""Its neighbor, where it has one, and its negation."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    path: Path
    number: int  # within its module
    function: str  # its qualified name
    lines: range  # of the statement that is changed: who runs none of them cannot notice
    before: str
    after: str
    mutation: str  # what becomes what; no other mutant of the function has the same text

    def build_module(self) -> ast.Module:
        """The whole module with this change."""
        tree = ast.parse(self.path.read_text())
        change = next(islice(_iterate_changes(tree), self.number, None))
        change.put(change.replacement)
        return ast.fix_missing_locations(tree)


def iterate_mutants(path: Path) -> Iterator[Mutant]:
    """In the order of the text."""
    seen: Counter[tuple[str, str]] = Counter()
    for number, change in enumerate(_iterate_changes(ast.parse(path.read_text()))):
        before, after = change.format_lines()
        mutation = f"{ast.unparse(change.node)} → {ast.unparse(change.replacement)}"
        if isinstance(change.node, ast.stmt):
            mutation = f"{before} → pass"
        seen[change.function, mutation] += 1
        occurrence = seen[change.function, mutation]
        mutation += f" ({occurrence})" if occurrence > 1 else ""
        yield Mutant(path, number, change.function, _get_lines(change.statement), before, after, mutation)


@dataclass(frozen=True)
class _Change:
    """Of one node of a tree: another in its place."""

    function: str
    statement: ast.stmt  # that `node` is, or belongs to
    parent: ast.AST
    field: str
    index: int | None  # None: the field holds no list
    replacement: ast.AST

    @property
    def node(self) -> ast.AST:
        value: Any = getattr(self.parent, self.field)
        node: ast.AST = value if self.index is None else value[self.index]
        return node

    def put(self, node: ast.AST) -> None:
        node = ast.copy_location(node, self.node)
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def format_lines(self) -> tuple[str, str]:
        """The statement's first line as it is, and with the change; of an exit, also what it stands under."""
        node = self.node
        if node is self.statement:
            parent_line = ("else of " if self.field == "orelse" else "") + _first_line(self.parent)
            return f"{parent_line} {_first_line(node)}", f"{parent_line} pass"
        before = _first_line(self.statement)
        self.put(self.replacement)
        after = _first_line(self.statement)
        self.put(node)
        return before, after


def _iterate_changes(parent: ast.AST, function: str = "", statement: ast.stmt | None = None) -> Iterator[_Change]:
    """Only within functions: all else has run before the first test."""
    is_inside = statement is not None or isinstance(parent, _Function)
    for field, index, child in _iterate_children(parent):
        if isinstance(child, _Function | ast.ClassDef):
            yield from _iterate_changes(child, f"{function}.{child.name}".removeprefix("."))
        elif not isinstance(child, ast.Assert):  # (which is no behavior)
            changed_statement = child if is_inside and isinstance(child, ast.stmt) else statement
            if changed_statement is not None:
                for replacement in _iterate_replacements(child, parent):
                    yield _Change(function, changed_statement, parent, field, index, replacement)
            yield from _iterate_changes(child, function, changed_statement)


def _iterate_children(parent: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """By field and place. Defaults, decorators and annotations of a function are no part of what it does."""
    for field in ["body"] if isinstance(parent, _Function | ast.ClassDef) else parent._fields:
        value = getattr(parent, field, None)
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield field, index, child


def _iterate_replacements(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for replacement in _COMPARISONS[type(operator)]:
                    yield ast.Compare(
                        node.left, [*node.ops[:index], replacement(), *node.ops[index + 1 :]], node.comparators
                    )
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()) if not (isinstance(parent, ast.keyword) and parent.arg == "strict"):
            yield ast.Constant(not node.value)  # (`strict` of `zip` is an assertion)
        case ast.Return() | ast.Raise() | ast.Continue() if not isinstance(parent, _Function):
            yield ast.Pass()


def _get_lines(statement: ast.stmt) -> range:
    """Of a compound statement, only its head."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().split("\n")[0]

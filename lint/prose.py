"""Prose: plain words and short sentences in docs, docstrings, comments, and messages (docs/style.md, "Prose")."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from .violation import Violation

MAX_WORDS = 25
"""Of a sentence of docs."""
BANNED = {
    "nobody": "name the actor: the operator, a worker",
    "whoever": "name the actor",
    "whatever": "name it",
    "anew": "again",
    "for ever": "indefinitely",
    "forever": "indefinitely",
    "in vain": "without result",
    "beside": "next to, in addition to",
    "besides": "in addition to",
    "meanwhile": "at the same time",
    "by luck": "by chance",
    "as ever": "as before",
    "so long": "this duration",
    "so many": "this many",
    "in place of": "instead of",
}
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})s?\b", re.IGNORECASE)
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_CODE = re.compile(r"`[^`]*`|https?://\S+|\]\([^)]*\)")


def check_words(path: str, line: int, text: str) -> Iterator[Violation]:
    """Yield each banned word of a text that begins at `line`. What stands in backticks is a name, not prose."""
    plain = _CODE.sub(lambda match: " " * len(match[0]), text)
    for match in _BANNED.finditer(plain):
        word = match[1].lower()
        yield Violation(path, line + plain.count("\n", 0, match.start()), f'"{match[0]}": write {BANNED[word]}')


def check_page(path: str, text: str) -> Iterator[Violation]:
    """Yield the banned words, and the sentences that are too long, of a page in Markdown."""
    prose = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    yield from check_words(path, 1, prose)
    for number, line in enumerate(prose.splitlines(), start=1):
        if line.lstrip().startswith("|"):
            continue
        plain = _CODE.sub("name", line.replace("](", "] ("))
        for sentence in re.split(r"(?<=[.!?:])[*)]*\s+", plain):
            words = re.findall(r"[^\W\d_][\w'’-]*", sentence)
            if len(words) > MAX_WORDS:
                yield Violation(
                    path, number, f"{len(words)} words in a sentence, {MAX_WORDS} at most: {sentence[:60]}…"
                )


def check_module(path: str, source: str, module: ast.Module) -> Iterator[Violation]:
    """Yield the banned words of a module's comments, docstrings, and other strings of two words or more."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check_words(path, token.start[0], token.string)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from check_words(path, node.lineno, node.value)

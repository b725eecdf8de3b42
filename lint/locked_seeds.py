"""Locked scenarios of the decisions bench: code, tests, and decisions cite none, so that no rule is made for one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from .violation import Violation

LOCKED_FILE = "bench/scripts/decisions/locked.json"


def read_salts(text: str) -> tuple[str, ...]:
    """Return the salts of all locked batches, from the text of LOCKED_FILE."""
    return tuple(batch["salt"] for batch in json.loads(text)["batches"])


def check_citations(texts: Mapping[str, str], salts: Iterable[str]) -> Iterator[Violation]:
    """Yield each line that contains a locked salt. `texts`: contents by path."""
    for path, text in texts.items():
        for salt in salts:
            if salt in text:
                lines = text.splitlines()
                line = next(number for number, content in enumerate(lines, start=1) if salt in content)
                yield Violation(path, line, f"cites the locked salt {salt}: the rules may not know its scenarios")

"""Checkers: what must hold at all times of a run, and what must hold at its end.

`cluster_history` records what has happened. Each other module has rules about one subject. To add an invariant, add one
class, one line in its module's RULES, and a test that shows its violations. A rule that compares a write with an
earlier state sets `by_history`: it is suspended for a minute after etcd was restored.
"""

from .checker import Checker, Violation, start_checker

__all__ = ["Checker", "Violation", "start_checker"]

"""Judges: what must hold at every moment of a run, and what must be so at its end.

`record` remembers what has happened, each of the other modules holds rules about one thing. To add an invariant: one
class here, one line in its module's RULES, and a test that shows what it complains about. One that holds what is
written against what was before says so (`by_history`): after an etcd was restored it waits for a minute.
"""

from .judge import Checker, Violation, start_checker

__all__ = ["Checker", "Violation", "start_checker"]

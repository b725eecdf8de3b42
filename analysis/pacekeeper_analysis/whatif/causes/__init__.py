"""Root causes of a slowdown: named checks, each with its evidence."""

from pacekeeper_analysis.whatif.causes.checks import CAUSE_CHECKS, CauseFinding, SlowdownCause, diagnose_cause

__all__ = ["CAUSE_CHECKS", "CauseFinding", "SlowdownCause", "diagnose_cause"]

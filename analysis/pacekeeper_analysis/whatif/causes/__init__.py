"""Root causes of a slowdown: named checks, each with its evidence."""

from pacekeeper_analysis.whatif.causes.checks import CHECKS, Cause, Finding, diagnose

__all__ = ["CHECKS", "Cause", "Finding", "diagnose"]

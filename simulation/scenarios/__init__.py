"""Directed scenarios: what went wrong once, and does not any more."""

"""Directed scenarios: defects that were fixed."""

"""Faults, as values, and their triggers.

To add a fault: one class in the module of what it affects, and one line in `generator.FAULT_MENU`.
"""

from . import control_plane, machines, operators, people, ranks, surroundings  # noqa: F401  # the vocabulary

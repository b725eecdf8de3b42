"""What can go wrong, as values, and when. To add a fault: one class in the module of what it strikes, one line in
`generator.MENU`."""

from . import control_plane, machines, operators, people, ranks, surroundings  # noqa: F401  # the vocabulary

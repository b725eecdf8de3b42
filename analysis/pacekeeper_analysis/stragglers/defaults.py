"""Defaults of detection, for jobs that set none. Without imports: the command line reads them, too."""

DEFAULT_STRAGGLER_SLOWDOWN = 1.1
"""Slowdown from which ranks count as slow."""
DEFAULT_WINDOW_STEPS = 32
"""Steps of a window that ranks are compared over."""

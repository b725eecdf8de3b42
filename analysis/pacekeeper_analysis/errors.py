"""The error of this package that is meant for users."""

from __future__ import annotations


class InputError(ValueError):
    """An invalid input. The message names the field and the remedy."""

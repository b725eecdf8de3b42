"""The one error of this package that is meant for users."""

from __future__ import annotations


class InputError(ValueError):
    """Something that was handed in is wrong. The message names the field and what to do about it."""

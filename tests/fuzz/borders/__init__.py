"""One module a border, or a few that are alike; each has its `BORDERS`."""

from __future__ import annotations

import importlib
import pkgutil

from ..border import Border


def all_of_them() -> dict[str, Border]:
    """By name."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {border.name: border for module in modules for border in module.BORDERS}

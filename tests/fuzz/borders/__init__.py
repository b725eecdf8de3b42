"""One module a border, or a few that are alike; each has its `BORDERS`."""

from __future__ import annotations

import importlib
import pkgutil

from ..border import Border


def load_borders() -> dict[str, Border]:
    """By name."""
    modules = [
        importlib.import_module(f"{__name__}.{module_info.name}") for module_info in pkgutil.iter_modules(__path__)
    ]
    return {border.name: border for module in modules for border in module.BORDERS}

"""Hooks of what a script imports after it is monitored."""

from __future__ import annotations

from pacekeeper_rank.monitoring import LateHooks


def test_a_late_hook_is_installed_once_when_its_module_is_loaded() -> None:
    loaded, installed = {"dataloader"}, list[str]()

    def install(name: str) -> bool:
        if name in loaded:
            installed.append(name)
        return name in loaded

    hooks = LateHooks([lambda: install("dataloader"), lambda: install("FSDP2")])
    for _ in range(2):
        hooks.install()
    assert installed == ["dataloader"]
    loaded.add("FSDP2")
    for _ in range(2):
        hooks.install()
    assert installed == ["dataloader", "FSDP2"]

"""Watches PyTorch processes that know nothing of Pacekeeper: `pacekeeper watch`, and sidecars of watched containers.

* `container.py` reads a container's runtime folder.
* `live.py` finds who is slow, who hangs, and who died first. It is pure: start reading there.
* `command.py` runs a command and prints that.
* `payload.py` makes the folder that the watched processes load (`pacekeeper_rank.watching`).
"""

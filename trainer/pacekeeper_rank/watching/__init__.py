"""Watches a process that does not use Pacekeeper: from the start of Python until its end.

`bootstrap.py` runs in each Python process and waits for torch. All other modules are imported only in a process that
trains (`rank_process.py`) or that starts such processes (`agent.py`). No exception of this package reaches the script
(`guard.py`).
"""
